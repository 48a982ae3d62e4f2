"""Tests of failures in workers: the parent raises WorkerError, and no process is left."""

from __future__ import annotations

import functools
import os
import pickle
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import RewardSum, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from tests.environments import Counting, Failing
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_checks import event_log, no_workers_left, workers_left
from tests.torchrl_ext.parallel_environments import NativeEnv
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["event_log", "no_workers_left"]

slow = pytest.mark.slow
# Workers step gymnasium environments themselves, or TorchRL's environments around them.
steppers = pytest.mark.parametrize("in_torchrl", [False, True], ids=["gymnasium", "TorchRL"])


def transformed(env: Any) -> TransformedEnv:
    """Wrap an environment so that workers need TorchRL."""
    return TransformedEnv(GymWrapper(env), RewardSum())


def make_failing_pair(when: str, how: str = "raise", *, in_torchrl: bool = False) -> ParallelEnv:
    """Make a ParallelEnv of two workers, of which the second fails."""
    wrap = transformed if in_torchrl else GymWrapper
    return ParallelEnv(2, [lambda: wrap(Counting()), lambda: wrap(Failing(when, how))])


def pids(env: ParallelEnv) -> list[int]:
    """Return the process numbers of the workers."""
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


def test_step_after_a_failure_is_rejected_until_reset() -> None:
    env = make_failing_pair("step")
    with pytest.raises(WorkerError, match="the rope has snapped"):
        env.rollout(5)
    with pytest.raises(WorkerError, match=r"no workers, because worker 1 .* in step: .*Use reset\(\) to start"):
        env.step(env.full_action_spec.zero())
    assert not running_workers()
    with pytest.raises(WorkerError, match="the rope has snapped") as caught:  # starts raise it too
        ParallelEnv(2, functools.partial(Failing, when="constructor"))
    assert repr(caught.value.__cause__) == "ValueError('the rope has snapped')"


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
    assert not workers_left()
