"""What is measured of a copy, and which way of building one is chosen."""

from __future__ import annotations

import functools
import os
import queue
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core import resources
from rl_ext_core.errors import WorkerError
from rl_ext_core.factory import _examine, streams, as_factory
from rl_ext_core.factory._examine import examine, measure, snapshot
from rl_ext_core.factory.convert import examined
from rl_ext_core.factory.factory import by_calling
from tests.core.factory.worlds import Line, Raising, Turned

_MEBIBYTES = 40


class Slow(Line):
    """Takes its time, and its memory."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.05)
        self.ballast = bytearray(b"x") * (_MEBIBYTES << 20)

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        return super().step(action)


@pytest.fixture(autouse=True)
def this_process_draws_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called here directly seeds the process: elsewhere, that one ends with it."""
    monkeypatch.setattr(streams, "_stream", None)


def _read(env: Any) -> Any:
    return type(env).__name__, env.gain, os.getpid()


def test_a_copy_is_timed_and_weighed_in_another_process() -> None:
    found = examined(as_factory(Slow), read=_read, overrides={}, start_method=None)
    # Clocks of virtual machines let a sleep end a little early.
    assert found.build_seconds > 0.04
    assert (found.step_seconds or 0) > 0.008
    if resources.private_memory() is not None:
        assert found.private_bytes is not None
        assert _MEBIBYTES << 20 <= found.private_bytes < 20 * _MEBIBYTES << 20
    name, gain, pid = found.read
    assert (name, gain) == ("Slow", 1.0)
    assert pid != os.getpid()


def test_its_overrides_are_added_to_the_workers() -> None:
    [factory] = as_factory(Line()).for_workers(1, overrides=[{"gain": 4.0, "length": 3}])
    found = examined(factory, read=lambda env: (env.gain, env.length), overrides={"length": 5}, start_method=None)
    assert found.read == (4.0, 5)


def test_what_building_raises_is_the_cause() -> None:
    def make() -> Line:
        raise FileNotFoundError("no such level")

    with pytest.raises(WorkerError, match=r"^trial copy 0 of 1 raised FileNotFoundError") as caught:
        examined(as_factory(make), read=_read, overrides={}, start_method=None)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert "in make" in caught.value.traceback


def test_what_raises_when_it_is_stepped_has_no_speed() -> None:
    assert measure(Raising).step_seconds is None
    assert measure(Turned).step_seconds is None


def test_without_a_graft_the_other_has_to_be_as_the_original_stands() -> None:
    env = gym.make("worlds/Line-v0")
    recipe = by_calling(functools.partial(gym.make, "worlds/Line-v0"), "spec", "", takes_arguments=False)
    assert examine([recipe], snapshot(env), None).chosen == 0
    env.unwrapped.weights[2] = 3.0
    env.unwrapped.rewards.bonus = 2.0
    found = examine([recipe], snapshot(env), None)
    assert found.chosen is None
    assert found.lost == (
        (
            ".env.env.weights is other data in the instance and other data in a copy",
            ".env.env.rewards.bonus is 2.0 in the instance and 1.0 in a copy",
        ),
    )


def processes_of_its_own() -> Any:
    return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")


def process_left_behind() -> Any:
    env = gym.make("CartPole-v1")
    env.unwrapped.left = subprocess.Popen(["sleep", "600"])  # type: ignore[attr-defined]
    return env


def pids(env: Any) -> list[int]:
    left = getattr(env.unwrapped, "left", None)
    return [process.pid for process in (env.processes if left is None else [left])]


@pytest.mark.parametrize("build", [processes_of_its_own, process_left_behind])
def test_a_trial_may_start_processes_and_they_go_with_it(build: Any) -> None:
    found = examined(as_factory(build), read=pids, overrides={}, start_method=None)
    assert found.read
    until = time.monotonic() + 120
    while any(map(_is_alive, found.read)):
        assert time.monotonic() < until
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


class Waiting(gym.Env[Any, Any]):
    """Its steps wait for what the user's program does."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.commands: queue.Queue[float] = queue.Queue()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(1, self.commands.get(), np.float32), 0.0, False, False, {}


def test_a_step_that_waits_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_examine, "_TIMING_PATIENCE_S", 0.1)
    assert _examine.measure(Waiting).step_seconds is None
