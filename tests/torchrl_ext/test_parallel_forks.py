"""Tests of a ``ParallelEnv`` in a forked child, where the workers belong to the parent."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import process, util
from typing import Any

import pytest

from tests.forks import result_in_fork
from tests.torchrl_ext.parallel_checks import no_workers_left
from torchrl_ext import GymEnv, ParallelEnv

__all__ = ["no_workers_left"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "reset": lambda env, data: env.reset(),
    "step": lambda env, data: env.step(data),
    "step_and_maybe_reset": lambda env, data: env.step_and_maybe_reset(data),
    "set_seed": lambda env, data: env.set_seed(3),
    "state_dict": lambda env, data: env.state_dict(),
}


def test_calls_in_a_forked_process_are_rejected() -> None:
    others = set(process._children)  # type: ignore[attr-defined]  # such as the process in which other tests build copies
    env = ParallelEnv(2, GymEnv("CartPole-v1"), seed=0)
    data = env.rand_action(env.reset())
    for name, call in CALLS.items():
        text = result_in_fork(lambda call=call: call(env, data.clone()))
        assert text.startswith("InvalidArgumentError: these environments belong to process "), name
    assert env.step(data)["next", "observation"].shape[0] == 2

    def close_and_exit() -> str:
        """Close the environment in the fork, and run multiprocessing's exit function."""
        env.close()
        process._children.difference_update(others)  # type: ignore[attr-defined]
        util._exit_function()  # type: ignore[attr-defined]  # multiprocessing ends children with it at exit
        return "left"

    assert result_in_fork(close_and_exit) == "'left'"
    assert env.rollout(3, break_when_any_done=False).batch_size == (2, 3)
    env.close()
