from __future__ import annotations

import copy
import functools
import logging
import os
import pickle
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.envs import ParallelEnv as Upstream

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError, WorkerError
from tests.environments import Counting, Failing, count_events
from tests.interrupts import interrupt_at
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_environments import NativeEnv
from torchrl_ext import GymWrapper, ParallelEnv

pytestmark = pytest.mark.usefixtures("no_workers_left")

slow = pytest.mark.slow
# Workers step gymnasium environments themselves, or TorchRL's environments around them.
in_torchrl_or_not = pytest.mark.parametrize("in_torchrl", [False, True], ids=["gymnasium", "TorchRL"])


def transformed(env: Any) -> TransformedEnv:
    return TransformedEnv(GymWrapper(env), RewardSum())


# -- pickles


@pytest.mark.sample
@pytest.mark.parametrize(
    ("source", "dumps"),
    [(lambda: GymWrapper(Counting()), pickle.dumps), (Counting(4.0), cloudpickle.dumps)],
    ids=["lambda", "instance"],
)
def test_pickling_closes_the_environment_and_the_copy_starts_new_workers(source: Any, dumps: Any) -> None:
    env = ParallelEnv(2, source, seed=3)
    before = env.rollout(3)["observation"]
    copy = pickle.loads(dumps(env))
    assert env.is_closed  # as with upstream
    assert not running_workers()
    torch.manual_seed(0)
    found = copy.rollout(3)["observation"]
    copy.close()
    assert torch.equal(found[:, 0], before[:, 0])


@pytest.mark.sample(quick=1, ci=1)
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_environments_are_closed_when_another_one_fails(how: str, event_log: Path) -> None:
    fault = {"when": "step", "how": how}
    env = ParallelEnv(3, Failing, create_env_kwargs=[{}, fault, {}], step_timeout=3 if how == "hang" else None)
    env.reset()
    before = count_events("closed", in_this_process=False)
    with pytest.raises(WorkerError):
        env.rollout(5)
    assert count_events("closed", in_this_process=False) - before == 3


class SlowToClose(Counting):
    def close(self) -> None:
        time.sleep(self.depth)


@slow
def test_close_warns_after_shutdown_timeout() -> None:
    env = ParallelEnv(2, SlowToClose, create_env_kwargs=[{"depth": 0.0}, {"depth": 1000.0}], shutdown_timeout=2)
    env.reset()
    with pytest.warns(UserWarning, match=r"worker 1 of 2 was still in close after 2.*Use shutdown_timeout=None"):
        env.close()
    assert not running_workers()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="trying to close a closed environment"):
        env.close()


def make_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


# Environments that start processes of their own.
NESTED: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda: ParallelEnv(2, make_cartpole),
    "an instance": lambda: ParallelEnv(2, make_cartpole),
    "gymnasium's processes": lambda: lambda: GymWrapper(gymnasium.make_vec("CartPole-v1", 2, "async")),
    "upstream's": lambda: lambda: Upstream(2, make_cartpole),
}


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("form", NESTED)
def test_environments_may_start_their_own_processes(form: str) -> None:
    env = ParallelEnv(2, NESTED[form]())
    assert env.rollout(3, break_when_any_done=False).shape == (2, 2, 3)
    env.close()
    assert not running_workers(grace_s=60)


# -- Ctrl-C

CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action(env.reset())),
    "step_and_maybe_reset": lambda env: env.step_and_maybe_reset(env.rand_action(env.reset())),
    "method": lambda env: env.twice(number=2),
    "state": lambda env: env.load_state_dict(env.state_dict()),
    "close": lambda env: env.close(),
}
CODE_PATHS = ("/torchrl_ext/parallel/", "/rl_ext_core/processes/", "/rl_ext_core/vector/")


# Python turns exceptions in finalizers into warnings.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sample(quick=0, ci=3)
@in_torchrl_or_not
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("every", [151, pytest.param(17, marks=pytest.mark.exhaustive)])
def test_ctrl_c_at_any_line_leaves_a_usable_environment(call: str, every: int, in_torchrl: bool) -> None:
    """After the interrupt, the next call works or its error names ``reset``. The workers continue, except in close."""
    env = ParallelEnv(2, transformed(Failing()) if in_torchrl else Failing)
    env.reset()
    at = 1
    while where := interrupt_at(functools.partial(CALLS[call], env), at, code_paths=CODE_PATHS):
        assert call == "close" or not env.is_closed, where
        # A step of a closed environment would start workers without a reset.
        said = continue_without_reset(env, stepping=at % 2 == 1 and not env.is_closed)
        assert said == "" or "interrupted" in said, where
        data = env.rollout(3, break_when_any_done=False)
        assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2, where
        assert len(running_workers()) == 2, where
        at += every
    env.close(raise_if_closed=False)
    assert not running_workers(grace_s=60)


def continue_without_reset(env: ParallelEnv, *, stepping: bool) -> str:
    try:
        env.step(env.fake_tensordict()) if stepping else env.method()
    except InvalidArgumentError as error:
        return str(error)
    return ""


# -- failures


def make_failing_pair(when: str, how: str = "raise", *, in_torchrl: bool = False) -> ParallelEnv:
    wrap = transformed if in_torchrl else GymWrapper
    return ParallelEnv(2, [lambda: wrap(Counting()), lambda: wrap(Failing(when, how))])


def pids(env: ParallelEnv) -> list[int]:
    return [process.pid for process in env._pool.processes]


def test_workers_beyond_the_open_file_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (len(os.listdir("/proc/self/fd")) + 55,) * 2)
    with pytest.raises(InvalidArgumentError, match=r"ParallelEnv\(4, ...\) needs 40 .*Use ParallelEnv\(3, ...\)"):
        ParallelEnv(4, Failing).reset()
    env = ParallelEnv(3, Failing)
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


@pytest.mark.sample(ci=1)
@in_torchrl_or_not
def test_limit_of_pipes_names_the_worker_that_hangs(in_torchrl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_failing_pair("step", "hang", in_torchrl=in_torchrl)
    env.reset()
    env.close()
    monkeypatch.setattr("torchrl._utils.BATCHED_PIPE_TIMEOUT", 2.0)
    with expect_worker_error(env) as caught:
        env.rollout(5)
    assert (caught.value.worker, caught.value.kind) == (1, "timeout")
    assert "did not answer within 2 s" in str(caught.value)


def test_step_after_a_failure_is_rejected_until_reset() -> None:
    env = make_failing_pair("step")
    with pytest.raises(WorkerError, match="the rope has snapped"):
        env.rollout(5)
    with pytest.raises(WorkerError, match=r"no workers, because worker 1 .* in step: .*Use reset\(\) to start"):
        env.step(env.full_action_spec.zero())
    assert not running_workers()


def test_result_that_cannot_be_unpickled_does_not_corrupt_the_next_one() -> None:
    env = ParallelEnv(2, Failing, overrides=[{"when": "method", "how": ""}, {}])
    env.reset()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        env.return_unreadable()
    assert env.twice(number=4) == [8, 8]
    with expect_worker_error(env) as caught:
        env.make_lock()
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert "in make_lock: " in str(caught.value)


def test_errors_in_the_parent_process_keep_the_workers() -> None:
    env = ParallelEnv(2, Counting)
    td = env.reset()
    before = pids(env)
    with pytest.raises(InvalidArgumentError, match="shape"):
        env.step(td.set("action", torch.zeros(2, 5, dtype=torch.int64)))
    with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
        env.twice(threading.Lock())
    assert env.rollout(3)["observation"][0, :, 0].tolist() == [0.0, 1.0, 2.0]
    assert pids(env) == before
    env.close()


class OtherShape(NativeEnv):
    """``NativeEnv`` whose steps return an observation that could be broadcast to the shape of its spec."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("observation", torch.zeros(1))


def test_outputs_of_another_shape_are_refused() -> None:
    env = ParallelEnv(1, OtherShape)
    with expect_worker_error(env) as caught:
        env.rollout(2)
    assert "'observation' has the shape [1]: expected [2], as in the specs" in str(caught.value)


def test_failed_start_ends_workers_that_have_started() -> None:
    env = ParallelEnv(2, Failing, create_env_kwargs=[{}, {"how": threading.Lock()}])
    with pytest.raises(TypeError, match="cannot pickle"):
        env.reset()
    assert not running_workers(grace_s=60)


# -- copies


def test_shallow_copies_are_refused() -> None:
    env = ParallelEnv(2, Counting)
    env.reset()
    with pytest.raises(NotCopyableError, match=r"share the workers.*Use ParallelEnv\(2, create_env_fn\)"):
        copy.copy(env)
    assert env.rollout(3).shape == (2, 3)
    env.close()


# -- the user's environments


def test_only_the_caller_resets_and_steps_an_environment(event_log: Path) -> None:
    env = ParallelEnv(1, lambda: GymWrapper(Counting()))
    assert event_log.read_text().count("reset") == 0
    env.rollout(3, auto_reset=False, tensordict=env.reset())
    env.close()
    assert [event_log.read_text().count(event) for event in ("reset", "stepped")] == [1, 3]


# -- warnings about memory


@slow
def test_memory_warning_appears_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.resources.available_memory", lambda: 10**6)
    env = ParallelEnv(2, Counting)
    with caplog.at_level(logging.WARNING, logger="torchrl_ext"):
        for _ in range(2):
            env.rollout(3, break_when_any_done=False)
            env.close()
    (memory,) = (record.getMessage() for record in caplog.records if record.name == "torchrl_ext")
    pattern = r"2 workers need about 0\.\d+ GB \(\d+ MB each, measured\), but only 0\.0 GB are available: use 1 or"
    assert re.match(pattern, memory)
