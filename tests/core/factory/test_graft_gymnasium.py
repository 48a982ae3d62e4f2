"""Every environment and wrapper that gymnasium has here, copied in the middle of an episode."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from rl_ext_core.factory import _graft
from tests.core.factory.grafting import assert_copied, copied, different, equal, made

if importlib.util.find_spec("ale_py") is not None:
    import ale_py

    gym.register_envs(ale_py)

QUICK = [
    "CartPole-v1",
    "Acrobot-v1",
    "Blackjack-v1",
    "FrozenLake-v1",
    "HalfCheetah-v5",
    "LunarLander-v3",
    "ALE/Pong-v5",
]


# ALE reads two of this game's counters into the wrong variables when it restores a state: the copy is refused.
WRONG_IN_ALE = "ALE/MiniatureGolf-v5"


def _others() -> Iterator[Any]:
    newest: dict[str, str] = {}
    for name, spec in gym.registry.items():
        if spec.namespace == "ALE" or (spec.namespace is None and str(spec.entry_point).startswith("gymnasium.envs")):
            newest[f"{spec.namespace}/{spec.name}"] = name
    for name in sorted(set(newest.values()) - set(QUICK)):
        wrong = [pytest.mark.xfail(raises=AssertionError)] if name == WRONG_IN_ALE else []
        yield pytest.param(name, marks=wrong)


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")


@pytest.mark.parametrize("name", QUICK)
def test_a_copy_is_the_original_and_does_the_same(name: str) -> None:
    environment = made(name)
    copy = assert_copied(environment, at_once=False)
    environment.close()
    copy.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(_others()))
def test_so_is_that_of_every_other_environment(name: str) -> None:
    test_a_copy_is_the_original_and_does_the_same(name)


def test_emulators_in_one_library_are_made_anew_by_their_specification() -> None:
    environment = gym.make_vec("ALE/Pong-v5", num_envs=2)
    copy = copied(environment)
    assert equal(environment.reset(seed=1)[0], copy.reset(seed=1)[0])
    for _ in range(20):
        action = environment.action_space.sample()
        assert equal(environment.step(action)[:4], copy.step(action)[:4])


def test_environments_in_other_processes_are_refused_by_name() -> None:
    # Not by fork, which is the default: what garbage of pygame or Box2D is left here brings such a worker down.
    options = {"context": "spawn"}
    environment = gym.make_vec("CartPole-v1", num_envs=1, vectorization_mode="async", vector_kwargs=options)
    try:
        with pytest.raises(_graft.Refused, match=r"processes share|another process"):
            _graft.dumps(environment)
    finally:
        environment.close()


# Under each of gymnasium's wrappers, and under those whose authors took liberties.

Make = Callable[[], Any]


def _cart(**kwargs: Any) -> Any:
    return gym.make("CartPole-v1", **kwargs)


def _drawn() -> Any:
    return _cart(render_mode="rgb_array")


class Dots(gym.Env[Any, Any]):
    """Small pictures."""

    observation_space = gym.spaces.Box(0, 255, (12, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.picture = self.np_random.integers(0, 256, (12, 16, 3), np.uint8)
        return self.picture.copy(), {}

    def step(self, action: Any) -> Any:
        self.picture[self.np_random.integers(12)] += np.uint8(1 + action)
        return self.picture.copy(), 1.0, bool(self.np_random.random() < 0.1), False, {}


def _pendulum() -> Any:
    return gym.make("Pendulum-v1")


def _pong() -> Any:
    return made("ALE/Pong-v5", frameskip=1)


WRAPPED: dict[str, Make] = {
    "AddRenderObservation": lambda: wrappers.AddRenderObservation(_drawn()),
    "AddWhiteNoise": lambda: wrappers.AddWhiteNoise(Dots(), 0.3),
    "AtariPreprocessing": lambda: wrappers.AtariPreprocessing(_pong()),
    "Autoreset": lambda: wrappers.Autoreset(_cart()),
    "ClipAction": lambda: wrappers.ClipAction(_pendulum()),
    "ClipReward": lambda: wrappers.ClipReward(_cart(), 0, 0.5),
    "DelayObservation": lambda: wrappers.DelayObservation(_cart(), 2),
    "DiscretizeAction": lambda: wrappers.DiscretizeAction(_pendulum(), 5),
    "DiscretizeObservation": lambda: wrappers.DiscretizeObservation(_pendulum(), 5),
    "DtypeObservation": lambda: wrappers.DtypeObservation(_cart(), np.float64),
    "FilterObservation": lambda: wrappers.FilterObservation(
        wrappers.TimeAwareObservation(_cart(), flatten=False), ["time"]
    ),
    "FlattenObservation": lambda: wrappers.FlattenObservation(wrappers.TimeAwareObservation(_cart(), flatten=False)),
    "FrameStackObservation": lambda: wrappers.FrameStackObservation(_cart(), 4),
    "GrayscaleObservation": lambda: wrappers.GrayscaleObservation(Dots()),
    "MaxAndSkipObservation": lambda: wrappers.MaxAndSkipObservation(Dots(), 2),
    "NormalizeObservation": lambda: wrappers.NormalizeObservation(_cart()),
    "NormalizeReward": lambda: wrappers.NormalizeReward(_cart()),
    "NumpyToTorch": lambda: wrappers.NumpyToTorch(_cart()),
    "ObstructView": lambda: wrappers.ObstructView(Dots(), 0.3, 3),
    "OrderEnforcing": lambda: wrappers.OrderEnforcing(_cart()),
    "PassiveEnvChecker": lambda: wrappers.PassiveEnvChecker(_cart()),
    "RecordEpisodeStatistics": lambda: wrappers.RecordEpisodeStatistics(_cart()),
    "RenderCollection": lambda: wrappers.RenderCollection(_drawn()),
    "RepeatAction": lambda: wrappers.RepeatAction(_cart(), 2),
    "RescaleAction": lambda: wrappers.RescaleAction(_pendulum(), -1, 1),
    "RescaleObservation": lambda: wrappers.RescaleObservation(_pendulum(), -1, 1),
    "ReshapeObservation": lambda: wrappers.ReshapeObservation(_cart(), (2, 2)),
    "ResizeObservation": lambda: wrappers.ResizeObservation(Dots(), (8, 8)),
    "StickyAction": lambda: wrappers.StickyAction(_cart(), 0.3),
    "TimeAwareObservation": lambda: wrappers.TimeAwareObservation(_cart()),
    "TimeLimit": lambda: wrappers.TimeLimit(_cart(), 20),
    "TransformAction": lambda: wrappers.TransformAction(_pendulum(), lambda a: a * 0.5, gym.spaces.Box(-1, 1, (1,))),
    "TransformObservation": lambda: wrappers.TransformObservation(_cart(), lambda observation: observation * 2, None),
    "TransformReward": lambda: wrappers.TransformReward(_cart(), lambda reward: reward * 2),
}
NOT_HERE = {
    "HumanRendering": "has a window, which is refused",
    "JaxToNumpy": "needs jax",
    "JaxToTorch": "needs jax",
    "RecordVideo": "has a test of its own",
    "vector": "a package",
}


def test_each_of_gymnasiums_wrappers_is_here() -> None:
    known = {name for name in wrappers.__all__ if name in dir(wrappers)}
    assert {name for name in known if name not in WRAPPED and name not in NOT_HERE} == set()


@pytest.mark.sample
@pytest.mark.parametrize("name", WRAPPED)
def test_a_copy_under_a_wrapper_does_the_same(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = WRAPPED[name]()
    copy = assert_copied(environment, steps=8, at_once=False)
    environment.close()
    copy.close()


def test_a_recorder_is_copied_with_what_it_has_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", types.ModuleType("moviepy"))
    environment = wrappers.RecordVideo(_drawn(), str(tmp_path / "videos"), episode_trigger=lambda episode: episode == 0)
    environment.reset(seed=0)
    environment.step(0)
    copy = copied(environment)
    assert different(environment, copy) == []
    assert len(copy.recorded_frames) == 2
    environment.recorded_frames, copy.recorded_frames = [], []
    environment.recording = copy.recording = False


class Forwarding(gym.Wrapper[Any, Any, Any, Any]):
    """Asks the environment below it for whatever it does not have, before it has one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class Refusing(gym.Wrapper[Any, Any, Any, Any]):
    """Lets nothing be set from outside."""

    def __init__(self, env: Any) -> None:
        object.__setattr__(self, "_open", True)
        super().__init__(env)
        object.__setattr__(self, "_open", False)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._open:
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("wrapper", [Forwarding, Refusing])
def test_wrappers_of_somebody_s_own_are_copied(wrapper: type[Any]) -> None:
    assert type(assert_copied(wrapper(_cart()))) is wrapper
