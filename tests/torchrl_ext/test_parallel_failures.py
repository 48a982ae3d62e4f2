"""Tests of failures in workers: the parent raises WorkerError, and no process is left."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torchrl.envs import RewardSum, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.factory import EnvFactory
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_checks import event_log, no_workers_left, workers_left
from tests.torchrl_ext.parallel_environments import Failing, Well
from torchrl_ext import GymWrapper, ParallelEnv, as_factory

__all__ = ["event_log", "no_workers_left"]

slow = pytest.mark.slow
# Workers step gymnasium environments themselves, or TorchRL's environments around them.
steppers = pytest.mark.parametrize("in_torchrl", [False, True], ids=["gymnasium", "TorchRL"])


def transformed(env: Any) -> TransformedEnv:
    """Wrap an environment so that workers need TorchRL."""
    return TransformedEnv(GymWrapper(env), RewardSum())


class FailingInTorchRL:
    """Callable that builds a transformed Failing environment."""

    def __call__(self, when: str = "", how: str = "raise") -> TransformedEnv:
        return transformed(Failing(when, how))


@functools.cache
def failing_factory(in_torchrl: bool = False) -> EnvFactory[Any]:
    """Return the factory that copies a Failing environment, made only once."""
    return as_factory(transformed(Failing()) if in_torchrl else Failing())


def make_failing_pair(when: str, how: str = "raise", *, in_torchrl: bool = False, **options: Any) -> ParallelEnv:
    """Make a ParallelEnv of two workers, of which the second fails."""
    source: Any = FailingInTorchRL() if in_torchrl else Failing
    source = source if when == "constructor" else failing_factory(in_torchrl)
    return ParallelEnv(2, source, overrides=[{}, {"when": when, "how": how}], **options)


def pids(env: ParallelEnv) -> list[int]:
    """Return the process numbers of the workers."""
    return [process.pid for process in env._pool.processes]


def call_everything(env: ParallelEnv) -> None:
    """Call everything at which an environment may fail, one after the other."""
    env.reset()
    env.rollout(5, break_when_any_done=False)
    env.fetch(litres=3)
    env.close()


def test_workers_beyond_the_open_file_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (len(os.listdir("/proc/self/fd")) + 55,) * 2)
    with pytest.raises(InvalidArgumentError, match=r"ParallelEnv\(4, ...\) needs 40 .*Use ParallelEnv\(3, ...\)"):
        ParallelEnv(4, failing_factory()).reset()
    env = ParallelEnv(3, failing_factory())
    env.reset()
    env.close()


@contextmanager
def expect_worker_error(env: ParallelEnv) -> Iterator[Any]:
    """Expect a WorkerError, after which no process is left and ``close()`` works."""
    with pytest.raises(WorkerError) as caught:
        yield caught
    assert not running_workers()
    assert env.is_closed
    env.close()


FAILURES = {
    "raise": ("exception", "raised ValueError('the well is dry')"),
    "raise what cannot be pickled": ("exception", "raised DryError('the bucket hit the ground at 10.0 m')"),
    "segfault": ("signal", "was killed by SIGSEGV"),
    "SIGKILL": ("signal", "was killed by SIGKILL"),
    "os._exit": ("exit", "ended with exit code 0"),
    "sys.exit": ("exit", "exited by SystemExit('enough')"),
}


OCCASIONS = ["constructor", "reset", "step", "method", "close"]


@pytest.mark.sample(quick=4, ci=10)
@steppers
@pytest.mark.parametrize(
    ("when", "how", "method"),
    [
        *((*case, None) for case in itertools.product(OCCASIONS, FAILURES)),
        pytest.param("constructor", "raise", "spawn", marks=pytest.mark.exhaustive),
        ("step", "segfault", "fork"),
    ],
)
def test_worker_failures_raise_worker_error(when: str, how: str, method: str | None, in_torchrl: bool) -> None:
    seed = None if when == "reset" else 5  # with a seed, environments are reset when they are built
    env = make_failing_pair(when, how, in_torchrl=in_torchrl, mp_start_method=method, seed=seed)
    if (when, how) == ("close", "os._exit"):
        call_everything(env)  # close() expects workers to exit
        return
    with expect_worker_error(env) as caught:
        call_everything(env)
    error, (kind, said) = caught.value, FAILURES[how]
    assert (error.worker, error.kind) == (1, kind)
    assert str(error).startswith("worker 1 of 2")
    assert (error.seed is None) == (seed is None)
    assert seed is None or (error.seed != seed and f"(seed {error.seed})" in str(error))
    assert error.phase == {"method": "call"}.get(when, when)
    assert when != "method" or "in fetch: " in str(error)
    assert said in str(error)
    if kind == "exception":
        assert "parallel_environments.py" in error.traceback
    if how == "raise":
        assert repr(error.__cause__) == "ValueError('the well is dry')"


@pytest.mark.sample(quick=0, ci=2)
@steppers
@pytest.mark.parametrize("when", ["constructor", "reset", "step", "method"])
def test_hanging_workers_raise_timeout_errors(when: str, in_torchrl: bool) -> None:
    failing_factory()  # starts the fork server, whose imports take seconds
    limits = {"start_timeout": 6.0} if when == "constructor" else {"step_timeout": 2.0}
    env = make_failing_pair(when, "hang", in_torchrl=in_torchrl, **limits)
    with expect_worker_error(env) as caught:
        call_everything(env)
    assert (caught.value.worker, caught.value.kind) == (1, "timeout")
    assert f"did not answer within {limits.popitem()[1]:g} s" in str(caught.value)
    assert "in fail" in str(caught.value)  # the traceback names the function that hangs


@pytest.mark.sample(ci=1)
@steppers
def test_limit_of_pipes_names_the_worker_that_hangs(in_torchrl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_failing_pair("step", "hang", in_torchrl=in_torchrl)
    env.reset()
    env.close()
    monkeypatch.setattr("torchrl._utils.BATCHED_PIPE_TIMEOUT", 2.0)
    with expect_worker_error(env) as caught:
        env.rollout(5)
    assert (caught.value.worker, caught.value.kind) == (1, "timeout")
    assert "did not answer within 2 s" in str(caught.value)


@pytest.mark.sample(quick=1, ci=2)
@steppers
@pytest.mark.parametrize("then", [lambda env: env.close(), lambda env: env.rollout(3)], ids=["close", "rollout"])
def test_worker_killed_while_idle_raises_at_the_next_call(then: Any, in_torchrl: bool) -> None:
    env = ParallelEnv(2, transformed(Well()) if in_torchrl else Well)
    env.reset()
    os.kill(pids(env)[1], signal.SIGKILL)
    with expect_worker_error(env) as caught:
        then(env)
    assert "worker 1 of 2, between two calls: was killed by SIGKILL" in str(caught.value)


def test_step_after_a_failure_is_rejected_until_reset() -> None:
    env = make_failing_pair("step")
    with pytest.raises(WorkerError, match="the well is dry"):
        env.rollout(5)
    with pytest.raises(WorkerError, match=r"no workers, because worker 1 .* in step: .*Use reset\(\) to start"):
        env.step(env.full_action_spec.zero())
    assert not running_workers()
    with pytest.raises(WorkerError, match="the well is dry") as caught:  # starts raise it too
        ParallelEnv(2, functools.partial(Failing, when="constructor"))
    assert repr(caught.value.__cause__) == "ValueError('the well is dry')"


def test_first_of_two_failures_is_reported() -> None:
    env = ParallelEnv(3, failing_factory(), overrides=[{}, {"when": "step", "how": "hang"}, {"when": "step"}])
    with expect_worker_error(env) as caught:
        call_everything(env)
    assert (caught.value.worker, caught.value.kind) == (2, "exception")


def test_result_that_cannot_be_unpickled_does_not_corrupt_the_next_one() -> None:
    env = ParallelEnv(2, failing_factory(), overrides=[{"when": "method", "how": ""}, {}])
    env.reset()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        env.return_unreadable()
    assert env.fetch(litres=4) == [8, 8]
    with expect_worker_error(env) as caught:
        env.make_lock()
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert "in make_lock: " in str(caught.value)


def test_errors_in_the_parent_process_keep_the_workers() -> None:
    env = ParallelEnv(2, Well)
    td = env.reset()
    before = pids(env)
    with pytest.raises(InvalidArgumentError, match="shape"):
        env.step(td.set("action", torch.zeros(2, 5, dtype=torch.int64)))
    with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
        env.fetch(threading.Lock())
    assert env.rollout(3)["observation"][0, :, 1].tolist() == [0.0, 1.0, 2.0]
    assert pids(env) == before
    env.close()


@pytest.mark.sample
@pytest.mark.parametrize(
    ("when", "in_torchrl"), [("step", True), pytest.param("constructor", False, marks=slow), ("method", False)]
)
def test_ctrl_c_ends_the_workers(when: str, in_torchrl: bool) -> None:
    env = make_failing_pair(when, "hang", in_torchrl=in_torchrl)
    if when != "constructor":
        env.reset()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        call_everything(env) if when == "constructor" else env.rollout(5) if when == "step" else env.fetch()
    assert not workers_left()
    env.close()
    if when != "constructor":
        env.reset()
        env.close()


def test_failed_start_ends_workers_that_have_started() -> None:
    env = ParallelEnv(2, Failing, create_env_kwargs=[{}, {"how": threading.Lock()}])
    with pytest.raises(TypeError, match="cannot pickle"):
        env.reset()
    assert not workers_left()
