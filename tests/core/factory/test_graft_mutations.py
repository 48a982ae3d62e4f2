"""Nothing that is changed about an environment gets lost on the way into a copy without being noticed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import wrappers

from rl_ext_core.factory import _graft, _streams
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import act, made
from tests.core.factory.mutating import changes


def _pong() -> Any:
    import ale_py

    gym.register_envs(ale_py)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(made("ALE/Pong-v5", frameskip=1)), 4)


def _wrapped() -> Any:
    environment = wrappers.NormalizeReward(wrappers.NormalizeObservation(gym.make("Pendulum-v1")))
    return wrappers.TransformReward(wrappers.TimeAwareObservation(environment), lambda reward: reward * 2)


# How many changes there are to be at least, as a walk that finds none would pass too, and which of them are made.
WORLDS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "classic": (lambda: gym.make("CartPole-v1"), 40, 1),
    "wrapped": (_wrapped, 60, 1),
    "toy_text": (lambda: gym.make("Blackjack-v1"), 25, 1),
    "mujoco": (lambda: made("HalfCheetah-v5"), 40, 5),
    "box2d": (lambda: made("LunarLander-v3"), 20, 2),
    "vector": (lambda: gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"), 60, 1),
}
SLOW: dict[str, tuple[Callable[[], Any], int, int]] = {
    "atari": (_pong, 90, 1),
    "contacts": (lambda: made("Ant-v5"), 250, 1),
    "walker": (lambda: made("BipedalWalker-v3"), 60, 1),
    "arm": (lambda: made("Pusher-v5"), 250, 1),
    "cheetah": (lambda: made("HalfCheetah-v5"), 250, 1),
}


def _silent(environment: Any, least: int, each: int) -> list[str]:
    """Make changes and list those that neither a copy has nor anybody notices."""
    with _streams.keeping():
        untouched = fingerprint(_graft.loads(_graft.dumps(environment)))
    assert fingerprint(environment).differences(untouched) == []
    failures, count = [], 0
    for step, change, undo in itertools.islice(changes(environment), 0, None, each):
        try:
            change()
        except (ValueError, TypeError, AttributeError, OverflowError):
            continue  # what it is a setting of takes no other value
        count += 1
        changed = fingerprint(environment)
        seen = changed.differences(untouched)
        if not any(path.endswith(step) for path in seen):
            failures.append(f"{step} was changed, and only {seen[:3]} is different")
        failures += _lost(environment, step, changed)
        undo()
    assert fingerprint(environment).differences(untouched) == []
    assert count >= least, f"only {count} settings were found"
    return failures


def _lost(environment: Any, step: str, changed: Any) -> list[str]:
    try:
        packed = _graft.dumps(environment)
    except _graft.Refused:
        return []
    try:
        with _streams.keeping():
            copy = _graft.loads(packed)
    except ValueError:  # MuJoCo loads no model whose parts contradict one another
        return []
    lost = changed.differences(fingerprint(copy))
    return [f"{step} was changed, and the copy differs at {lost[:3]}"] if lost else []


@pytest.mark.sample
@pytest.mark.parametrize("name", WORLDS)
def test_a_copy_has_every_change(name: str) -> None:
    make, least, each = WORLDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = make()
        environment.reset(seed=0)
        if name != "vector":
            act(environment, 3)
    assert _silent(environment, least, each) == []
    environment.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW)
def test_so_have_copies_of_slower_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WORLDS", SLOW)
    test_a_copy_has_every_change(name)
