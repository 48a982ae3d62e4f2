from __future__ import annotations

from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import FrameStore, Observation, StackLayout, plan, planning
from rl_ext_core.frames.planning import parse_bytes
from rl_ext_core.resources import available_memory
from tests.environments import Failing, RandomEnv

LAYOUT = StackLayout((9, 24, 28), np.dtype(np.uint8), 3, 0)
SB3 = "SB3 ReplayBuffer"


class Film(gym.Env[Any, Any]):
    """Environment of noise in a square that moves over gray, returned in the same array."""

    action_space = gym.spaces.Discrete(4)
    observation_space: gym.Space[Any] = gym.spaces.Box(0, 255, (80, 100, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.frame = 0, np.empty((80, 100, 3), np.uint8)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.observe(), 0.0, False, self.time >= 40, {}

    def observe(self) -> npt.NDArray[Any]:
        self.frame[:] = 60
        side = 4 + self.time // 8
        self.frame[10 : 10 + side, self.time : self.time + 10] = self.np_random.integers(200, 250, (side, 10, 1))
        return self.frame


@pytest.mark.parametrize("optimize", [False, True])
def test_baseline_rows_match_stable_baselines3(optimize: bool) -> None:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    spaces_ = spaces.Box(0, 255, LAYOUT.shape, np.uint8), spaces.Discrete(4)
    options = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    buffer = ReplayBuffer(100, *spaces_, device="cpu", **options)
    arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    held = sum(getattr(buffer, name).nbytes for name in arrays if hasattr(buffer, name))
    found = plan(LAYOUT.shape, 100)
    assert found.row("SB3 optimize_memory_usage" if optimize else SB3).total_bytes == held
    assert found.row(SB3).times_less == 1


def test_estimates_are_marked_and_have_a_range() -> None:
    found = plan((100, 100, 9), 1_000_000)
    assert not found.measured
    assert found.n_stack == 3
    text = str(found)
    assert "ESTIMATES, not measured" in text
    assert "--env ID" in text
    for row in found.rows[2:]:
        assert row.range[0] <= row.bytes_a_transition <= row.range[1]
    assert max(map(len, text.splitlines())) <= 120


def test_n_stack_is_guessed_from_the_shapes() -> None:
    found = plan((80, 100, 9), 1000, env=Film, steps=128)
    assert (found.n_stack, found.shape) == (3, (80, 100, 9))
    assert plan(None, 1000, env=Film, n_stack=3, steps=128).shape == (80, 100, 9)
    for shape, n_stack in (((100, 100, 9), 3), ((9, 84, 84), 3), ((4, 84, 84), 4), ((84, 84, 12), 4), ((84, 84, 3), 1)):
        assert plan(shape, 1000).n_stack == n_stack


def test_default_budget_is_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan((84, 84, 4), 1000)
    free = available_memory()
    assert free is None or found.budget == pytest.approx(free, rel=0.2)
    monkeypatch.setattr(planning, "available_memory", lambda: 10_000)
    found = plan((84, 84, 4), 1000)
    assert not found.fits
    assert "NO" in str(found)
    monkeypatch.setattr(planning, "available_memory", lambda: None)
    found = plan((84, 84, 4), 1000)
    assert (found.budget, found.row(SB3).fits, found.fits) == (None, None, True)
    assert "free memory: unknown" in str(found)


def test_plan_range_contains_the_true_cost() -> None:
    found, env = plan(None, 1_000_000, env=Film, seed=0), Film()
    store, after = FrameStore(1600, 1, Observation((3, 80, 100), np.uint8)), env.reset(seed=77)[0]
    for step in range(1600):
        before = np.moveaxis(after, -1, 0)[None].copy()
        after, _, _, ended, _ = env.step(0)
        store.append(before, np.moveaxis(after, -1, 0)[None])
        after = env.reset()[0] if ended else after
        if step == 400:
            begun = store.nbytes
    assert found.measured
    assert "steps of a random policy" in found.source
    assert found.row("patch, max_error=4").lossy
    low, high = found.row("patch").range or (0, 0)
    assert low <= found.row("patch").bytes_a_transition <= high < 3 * low  # a wider range would be useless
    assert low * 0.85 <= (store.nbytes - begun) / 1199 + 20 <= high * 1.15


class Shrinking(Film):
    def step(self, action: Any) -> Any:
        return np.zeros((3, 3), np.uint8), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        (Failing("step"), ValueError, "the rope has snapped"),
        (Shrinking(), EnvironmentOutputError, r"shape \(3, 3\), but its observation_space has shape \(80, 100, 3\)"),
        (RandomEnv("Dict"), InvalidTypeError, "observation_space is Dict"),
    ],
)
def test_broken_env_is_named_and_closed_if_plan_created_it(env: Any, error: type[Exception], text: str) -> None:
    env.close = mock.Mock()
    for closed, given in enumerate((env, lambda: env)):
        with pytest.raises(error, match=text):
            plan(None, 1000, env=given, steps=150)
        assert env.close.call_count == closed


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"shape": (9, 9), "size": 0}, InvalidArgumentError, "size=0 must be at least 1"),
        ({"shape": (9, 9), "size": 1, "max_bytes": 0}, InvalidArgumentError, "max_bytes=0"),
        ({"shape": None, "size": 1, "env": Film, "steps": 0}, InvalidArgumentError, "steps=0 must be at least 128"),
        ({"shape": None, "size": 1}, InvalidArgumentError, "shape=None needs env"),
        ({"shape": "84,84", "size": 1}, InvalidTypeError, "shape='84,84' must be a tuple of integers"),
        ({"shape": 84, "size": 1}, InvalidTypeError, "shape=84 must be a tuple of integers"),
        ({"shape": (84, 84, 4), "size": 1, "n_stack": 5}, InvalidArgumentError, "n_stack=5 does not divide"),
        ({"shape": (80, 100, 7), "size": 1, "env": Film}, InvalidArgumentError, r"Film has arrays of shape \(80, 100"),
        ({"shape": None, "size": 1, "env": 3}, InvalidTypeError, "env=3 is not a gymnasium.Env"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        plan(**arguments)


def test_parse_bytes_accepts_common_units() -> None:
    for text, n_bytes in (("4GB", 4 * 10**9), ("512 MiB", 2**29), ("1e9", 10**9), ("1.5k", 1500), ("2tib", 2 << 40)):
        assert parse_bytes(text) == n_bytes
    for text in ("", "GB", "-4GB", "4XB", "1.2.3", "0", "1e999", "nan"):
        with pytest.raises(InvalidArgumentError, match="is not a size; for example 4GB"):
            parse_bytes(text)
