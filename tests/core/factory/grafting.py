"""Copies, compares and steps environments of any interface, for the tests of grafts."""

from __future__ import annotations

import functools
import gc
import random
import sys
import warnings
from typing import Any

import numpy as np

from rl_ext_core.factory import _graft, streams
from rl_ext_core.factory.drivers import driver_for
from rl_ext_core.factory._fingerprint import fingerprint

__all__ = ["act", "assert_copied", "begin", "copied", "different", "equal", "life", "made"]


def copied(value: Any) -> Any:
    """Copy by a graft, with all generators as they are."""
    with streams.keeping():
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
    """Step an environment of gymnasium by random actions, as far as it goes."""
    for _ in range(steps):
        _, _, terminated, truncated, _ = environment.step(environment.action_space.sample())
        if terminated or truncated:
            environment.reset()


def equal(one: Any, other: Any) -> bool:
    """Whether two observations, rewards or flags, or collections of them, are the same bit for bit."""
    return fingerprint(one).tokens == fingerprint(other).tokens


def begin(environment: Any, steps: int = 3) -> None:
    """Get into the middle of an episode."""
    driver = driver_for(environment, seed=0)
    assert driver is not None, f"how to step {environment!r} is not known"
    driver.reset(0)
    for _ in range(steps):
        driver.step()


def life(environment: Any, steps: int, seed: int | None) -> dict[str, Any]:
    """Step an environment, after a reset if there is a seed, and give the tokens of all that it returned."""
    random.seed(1)
    np.random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
    driver = driver_for(environment, seed=1)
    assert driver is not None
    returned = [] if seed is None else [driver.reset(seed)]
    returned += [driver.step() for _ in range(steps)]
    return fingerprint(returned).tokens


@functools.cache
def _leave_modules_alone() -> None:
    # What has been imported is much: collections need not go through it each time.
    gc.collect()
    gc.freeze()


def assert_copied(environment: Any, *, steps: int = 30, at_once: bool = True) -> Any:
    """Copy an environment in the middle of an episode, compare it, and step both: then, and from a reset on.

    The original goes first: some share generators or a renderer with whatever else is in the process.

    :param at_once: False where the copy does the same from the next reset on only
    :return: the copy
    """
    _leave_modules_alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin(environment)
        original, packed = fingerprint(environment), _graft.dumps(environment)
        lives = [life(environment, steps, seed) for seed in (None, 3)]
        gc.collect()
        with streams.keeping():
            copy = _graft.loads(packed)
        assert original.opaque == {}
        mine = fingerprint(copy)
        assert [(path, original.tokens.get(path), mine.tokens.get(path)) for path in original.differences(mine)] == []
        again = life(copy, steps, None)
        assert not at_once or again == lives[0], "it goes on in another way"
        assert life(copy, steps, 3) == lives[1], "it does something else after a reset"
    return copy
