"""What can be done with a ``ParallelEnv`` while it lives, as upstream has it, and how it ends."""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from rl_ext_core.errors import WorkerError
from tests.torchrl_ext.parallel_checks import diary, no_workers_left, workers
from tests.torchrl_ext.parallel_environments import Failing, Native, Well, make_failing, told
from torchrl_ext import GymWrapper, ParallelEnv, as_factory

__all__ = ["diary", "no_workers_left"]

buffers = pytest.mark.parametrize("use_buffers", [True, False], ids=["buffers", "pipes"])


@functools.cache
def factory() -> Any:
    return as_factory(Failing())


def make_native() -> Native:
    return Native()


@pytest.mark.slow
def test_options_may_be_set_later() -> None:
    env = ParallelEnv(2, make_native).configure_parallel(use_buffers=False, mp_start_method="fork", shutdown_timeout=20)
    env.reset()
    assert env._workers[0].popen.method == "fork"
    assert env._mp_start_method == "fork"
    assert not env._use_buffers
    env.close()


# -- the end, and what comes after it


@pytest.mark.sample(quick=0)
@buffers
def test_closing_ends_the_workers_and_their_environments(use_buffers: bool, diary: Any) -> None:
    env = ParallelEnv(2, factory(), use_buffers=use_buffers)
    env.reset()
    env.close()
    assert not workers()
    assert told("closed", here=False) >= 2
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        env.close()
    env.close(raise_if_closed=False)
    assert env.rollout(3).shape == (2, 3)
    env.close()


@pytest.mark.slow
def test_the_number_of_threads_of_this_process_is_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        env = ParallelEnv(2, factory(), overrides=[{}, {"when": "reset"}])
        for _ in range(2):
            with pytest.raises(WorkerError):
                env.reset()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_no_descriptors_and_threads_are_left() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    env = ParallelEnv(2, factory(), overrides=[{}, {"when": "step"}])
    counts = []
    for _ in range(3):
        env.reset()
        with pytest.raises(WorkerError):
            env.rollout(5)
        env.reset()
        env.close()
        counts.append(held())
    assert counts[-1] <= counts[1]


# -- views


def test_views_fail_with_the_whole() -> None:
    env = ParallelEnv(3, factory(), overrides=[{}, {}, {"when": "step", "how": "SIGKILL"}])
    env.reset()
    view = env[1:]
    with pytest.raises(WorkerError, match="worker 2 of 3 was killed by SIGKILL"):
        view.rollout(5)
    assert not workers()
    assert env.is_closed
    env.reset()
    with pytest.raises(RuntimeError, match="closed indexed batched environment view"):
        view.rollout(5)
    assert env[0].fetch() == [2]
    env.close()


def test_views_of_workers_that_have_ended() -> None:
    env = ParallelEnv(2, factory())
    env.reset()
    view = env[:1]
    env.close()
    with pytest.raises(RuntimeError, match="view after its parent environment has been closed"):
        view.reset()
    env.reset()
    with pytest.raises(RuntimeError, match="closed indexed batched environment view"):
        view.reset()
    view.close(raise_if_closed=False)
    assert env.rollout(2).shape == (2, 2)
    env.close()


# -- pickles


@pytest.mark.sample
@pytest.mark.parametrize(
    ("source", "dumps"),
    [
        (Well, pickle.dumps),
        (lambda: GymWrapper(Well()), pickle.dumps),
        (Well(4.0), cloudpickle.dumps),
        ([Well(), make_failing], pickle.dumps),
        ("CartPole-v1", pickle.dumps),
    ],
    ids=["class", "lambda", "instance", "list", "id"],
)
def test_pickles_of_closed_ones(source: Any, dumps: Callable[[Any], bytes]) -> None:
    env = ParallelEnv(2, source, seed=3)
    before = env.rollout(3)["observation"]
    copy = pickle.loads(dumps(env))
    assert env.is_closed  # as upstream has it
    assert not workers()
    torch.manual_seed(0)
    found = copy.rollout(3)["observation"]
    copy.close()
    assert torch.equal(found[:, 0], before[:, 0])


def test_a_pickle_holds_no_instance() -> None:
    env = ParallelEnv(2, Well(4.0))
    assert env._plan.factories[0].live is not None
    assert pickle.loads(pickle.dumps(env))._plan.factories[0].live is None


# -- time
