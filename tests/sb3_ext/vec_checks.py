from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from rl_ext_core.errors import WorkerError
from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.leaks import running_workers

FAST = "fork"  # SB3's workers import torch with the other methods


@contextlib.contextmanager
def raise_interrupt_in(owner: Any, method: str) -> Iterator[None]:
    """Raise KeyboardInterrupt when a method is called."""

    def interrupting(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, interrupting)
        yield


def no_workers(grace_s: float = 60) -> bool:
    """Return whether the workers of this test have ended after a grace period. Otherwise log them for its report."""
    if left := running_workers(grace_s=grace_s):
        logging.getLogger(__name__).warning("running: %s", left)
    return not left


@contextlib.contextmanager
def expect_error(grace_s: float = 60) -> Iterator[Any]:
    """Expect a WorkerError, and no workers or threads after a grace period."""
    with pytest.raises(WorkerError) as caught:
        yield caught
    assert no_workers()
    for thread in threading.enumerate():
        if thread.name == "rl_ext_core-watch":
            thread.join(grace_s)
            assert not thread.is_alive()


@contextlib.contextmanager
def open_vec_env_pair(env_fns: Sequence[Callable[[], Any]], **options: Any) -> Iterator[tuple[VecEnv, VecEnv]]:
    """Yield a SharedMemoryVecEnv and a SubprocVecEnv; close both, and check that no worker remains."""
    theirs = SubprocVecEnv(list(env_fns), start_method=FAST)
    with contextlib.closing(theirs), contextlib.closing(SharedMemoryVecEnv(env_fns, FAST, **options)) as ours:
        yield ours, theirs
    assert no_workers()


def action_of(space: spaces.Space[Any], num_envs: int) -> Any:
    """Sample actions as algorithms pass them: an array, or a list for Dict and Tuple spaces."""
    drawn = [space.sample() for _ in range(num_envs)]
    return drawn if isinstance(space, spaces.Dict | spaces.Tuple) else np.stack(drawn)


def rollout(venv: VecEnv, actions: Sequence[Any], seed: int = 5) -> list[Any]:
    """Reset and step with given actions, return copies of all results, and check that none is overwritten."""
    venv.seed(seed)
    kept: list[Any] = [venv.reset(), venv.reset_infos]
    copies = copy.deepcopy(kept)
    for action in actions:
        given = copy.deepcopy(action)
        returned = [*venv.step(action), venv.reset_infos]
        assert_equal(action, given, "the actions")  # a step must not change them
        kept.append(returned)
        copies.append(copy.deepcopy(returned))
    assert_equal(kept, copies, "what the caller keeps")
    return copies


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Check that values have equal bits and types; lists and tuples are interchangeable."""
    if isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple), where
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"{where}[{index}]")
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        if theirs.dtype == object:
            assert_equal(ours.tolist(), theirs.tolist(), where)
        else:
            assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(theirs, torch.Tensor):
        assert (type(ours), ours.device) == (type(theirs), theirs.device), where
        assert_equal(ours.numpy(), theirs.numpy(), where)
    else:
        assert type(ours) is type(theirs), where
        assert ours == theirs or (ours != ours and theirs != theirs), where
