"""Tests of ``ParallelEnv``: closing, pickles, child processes, Ctrl-C, warnings."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import pytest
import torch
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.envs import ParallelEnv as Upstream

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError, WorkerError
from tests.environments import Counting, Failing, count_events
from tests.interrupts import interrupt_at
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_checks import event_log, no_workers_left, workers_left
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["event_log", "no_workers_left"]

slow = pytest.mark.slow


def test_close_ends_workers_and_closes_environments(event_log: Any) -> None:
    env = ParallelEnv(2, Failing)
    env.reset()
    env.close()
    assert not running_workers()
    assert count_events("closed", in_this_process=False) >= 2
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        env.close()
    env.close(raise_if_closed=False)
    assert env.rollout(3).shape == (2, 3)
    env.close()


# -- pickles


@pytest.mark.sample
@pytest.mark.parametrize(
    ("source", "dumps"),
    [(lambda: GymWrapper(Counting()), pickle.dumps), (Counting(4.0), cloudpickle.dumps)],
    ids=["lambda", "instance"],
)
def test_pickling_closes_the_environment_and_the_copy_starts_new_workers(
    source: Any, dumps: Callable[[Any], bytes]
) -> None:
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
    """Environment that takes as long to close as its depth says."""

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
    """Make TorchRL's environment of a CartPole, with our class."""
    return GymEnv("CartPole-v1")


def make_counting() -> GymWrapper:
    """Make a wrapped Counting."""
    return GymWrapper(Counting())


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
    assert not workers_left()


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
@pytest.mark.parametrize("in_torchrl", [False, True], ids=["gymnasium", "TorchRL"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("every", [151, pytest.param(17, marks=pytest.mark.exhaustive)])
def test_ctrl_c_at_any_line_leaves_a_usable_environment(call: str, every: int, in_torchrl: bool) -> None:
    """After the interrupt, the next call works or its error names ``reset``. The workers continue, except in close."""
    env = ParallelEnv(2, TransformedEnv(GymWrapper(Failing()), RewardSum()) if in_torchrl else Failing)
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
    assert not workers_left()


def continue_without_reset(env: ParallelEnv, *, stepping: bool) -> str:
    """Step or call a method without a reset, and return the error's text."""
    try:
        env.step(env.fake_tensordict()) if stepping else env.method()
    except InvalidArgumentError as error:
        return str(error)
    return ""


def test_shallow_copies_are_refused() -> None:
    env = ParallelEnv(2, Counting)
    env.reset()
    with pytest.raises(NotCopyableError, match=r"share the workers.*Use ParallelEnv\(2, create_env_fn\)"):
        copy.copy(env)
    assert env.rollout(3).shape == (2, 3)
    env.close()


# -- the user's environments


def test_only_the_caller_resets_and_steps_an_environment(event_log: Path) -> None:
    env = ParallelEnv(1, make_counting)
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
