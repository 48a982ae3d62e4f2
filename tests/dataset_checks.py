"""Datasets for tests: random episodes of a space, and comparisons of episodes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.datasets import Episode
from tests.sb3_ext.vec_checks import assert_equal as assert_equal_values

PARTS = ("observations", "actions", "rewards", "terminations", "truncations")


def require_minari() -> Any:
    """Return the module ``minari``. Without it, skip the tests of a module, or fail in CI."""
    if os.environ.get("CI"):
        import minari

        return minari
    return pytest.importorskip("minari", reason='pip install "./rl-ext[datasets]"')


def random_values(space: spaces.Space[Any], n: int, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: random_values(part, n, rng) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        low, high = np.maximum(space.low, -3), np.minimum(space.high, 3)
        return rng.uniform(low, high, (n, *space.shape)).astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    return np.array([space.sample() for _ in range(n)], dtype=space.dtype).reshape(n, *(space.shape or ()))


def random_episodes(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], lengths: Iterable[int] = (4, 1, 7)
) -> list[Episode]:
    """Return random episodes, of which every second one is terminated and the others truncated."""
    rng = np.random.default_rng(0)
    found = []
    for number, n in enumerate(lengths):
        ends = np.arange(n) == n - 1
        flags = (ends, ends & False) if number % 2 == 0 else (ends & False, ends)
        rewards = rng.normal(size=n).astype(np.float32).astype(np.float64)
        observations = random_values(observation_space, n + 1, rng)
        found.append(Episode(observations, random_values(action_space, n, rng), rewards, *flags))
    return found


def assert_equal_episodes(found: Iterable[Episode], expected: Iterable[Episode]) -> None:
    for one, other in zip(found, expected, strict=True):
        for part in PARTS:
            assert_equal_values(getattr(one, part), getattr(other, part))
