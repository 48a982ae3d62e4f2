"""Copies, compares and steps environments, for the tests of grafts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rl_ext_core.factory import _graft, _streams
from rl_ext_core.factory._fingerprint import fingerprint

__all__ = ["act", "assert_faithful", "copied", "different", "episode", "equal", "made"]


def copied(value: Any) -> Any:
    """Copy by a graft, with all generators as they are."""
    with _streams.keeping():
        return _graft.loads(_graft.dumps(value))


def different(one: Any, other: Any) -> list[str]:
    """List how two differ, and what could not be looked into."""
    mine, theirs = fingerprint(one), fingerprint(other)
    found = [f"{path}: {mine.tokens.get(path)} != {theirs.tokens.get(path)}" for path in mine.differences(theirs)]
    return found + [f"{path}: opaque" for path in mine.opaque]


def made(name: str, **kwargs: Any) -> Any:
    """Make a registered environment; one for which something is not installed skips the test."""
    import gymnasium as gym
    import pytest

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.make(name, **kwargs)
    except (ImportError, gym.error.Error) as error:
        pytest.skip(f"{name}: {error}")


def act(environment: Any, steps: int) -> None:
    """Step an environment by random actions, as far as it goes."""
    for _ in range(steps):
        _, _, terminated, truncated, _ = environment.step(environment.action_space.sample())
        if terminated or truncated:
            environment.reset()


def episode(environment: Any, actions: list[Any], seed: int = 3) -> list[Any]:
    """Reset with a seed, step by given actions and give all that was returned."""
    found: list[Any] = [environment.reset(seed=seed)[0]]
    for action in actions:
        observation, reward, terminated, truncated, _ = environment.step(action)
        found.append((observation, reward, terminated, truncated))
        if terminated or truncated:
            found.append(environment.reset()[0])
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two observations, rewards or flags, or collections of them, are the same bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    first, second = np.asarray(one), np.asarray(other)
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def assert_faithful(environment: Any, steps: int = 50) -> Any:
    """Graft an environment in the middle of an episode, compare it, and step both; give the copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gymnasium's checks of the environments
        environment.action_space.seed(0)
        environment.reset(seed=0)
        act(environment, 7)
        copy = copied(environment)
        assert different(environment, copy) == []
        actions = [environment.action_space.sample() for _ in range(steps)]
        assert equal(episode(environment, actions), episode(copy, actions))
    return copy
