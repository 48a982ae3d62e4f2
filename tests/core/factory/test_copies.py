from __future__ import annotations

import functools
import gc
import pickle
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rl_ext_core.factory import as_factory
from tests.core.factory.copying import Line, Scaled, try_rollout


def make_line(gain: float = 2.0) -> Line:
    return Line(gain)


class Maker:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __call__(self) -> Line:
        return Line(self.gain)

    def make(self) -> Line:
        return Line(self.gain)


MADE_LINE = "lambda: gymnasium.make('copies/Line-v0')"
# Each source with the origin of its factory, None for an instance, and the code that builds the same environment.
SOURCES: dict[str, tuple[Any, str | None, str]] = {
    "lambda": (lambda: Line(2.0), "callable", "lambda: ..."),
    "function": (make_line, "callable", "make_line"),
    "partial": (functools.partial(functools.partial(Line, 2.0), length=5), "callable", "lambda: Line(2.0, length=5)"),
    "object": (Maker(2.0), "callable", "Maker(...)"),
    "method": (Maker(2.0).make, "callable", "Maker.make"),
    "function over an instance": ((lambda env: lambda: env)(Line(2.0)), "callable", "lambda: ..."),
    "partial over an instance": (functools.partial(Scaled, Line(2.0)), "callable", "lambda: Scaled(Line(2.0))"),
    "class": (Line, "class", "lambda: Line()"),
    "id": ("copies/Line-v0", "id", MADE_LINE),
    "id with its module": ("tests.core.factory.copying:copies/Line-v0", "id", MADE_LINE),
    "specification": (gym.spec("copies/Line-v0"), "spec", MADE_LINE),
    "instance": (Line(2.0), None, "lambda: Line(2.0)"),
    "made instance": (gym.make("copies/Line-v0"), None, MADE_LINE),
    "wrapped instance": (Scaled(Line(2.0), 3.0), None, "lambda: Scaled(Line(2.0), 3.0)"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_as_factory_accepts_each_source_and_copies_are_independent(name: str) -> None:
    source, origin, line = SOURCES[name]
    factory = as_factory(source)
    assert origin in (None, factory.origin)
    assert factory.to_source() == line
    env = source if origin is None else factory()
    one, other = factory(), factory()
    assert len({id(env.unwrapped), id(one.unwrapped), id(other.unwrapped)}) == 3
    assert try_rollout(pickle.loads(pickle.dumps(factory))()) == try_rollout(env)
    one.unwrapped.rewards.bonus, one.unwrapped.weights[0] = 50.0, 9.0
    assert (other.unwrapped.rewards.bonus, other.unwrapped.weights[0]) == (1.0, 1.0)
    assert (env.unwrapped.rewards.bonus, env.unwrapped.weights[0]) == (1.0, 1.0)


def test_as_factory_returns_a_factory_as_it_is_and_pickles_omit_the_instance() -> None:
    factory = as_factory(Line)
    assert as_factory(factory) is factory
    assert repr(factory) == "EnvFactory('lambda: Line()', origin='class')"
    assert repr(factory.for_workers(2)[1]) == "EnvFactory('lambda: Line()', origin='class', worker=1)"
    env = Line()
    of_instance = as_factory(env)
    assert all(one.instance is env for one in (of_instance, of_instance.then(Scaled), *of_instance.for_workers(2)))
    assert pickle.loads(pickle.dumps(of_instance)).instance is factory.instance is None


def test_then_wraps_environments_in_order() -> None:
    factory = as_factory(make_line).then(Scaled).then(functools.partial(Scaled, scale=5.0))
    env = pickle.loads(pickle.dumps(factory))()
    assert (env.scale, env.env.scale, env.unwrapped.gain) == (5.0, 2.0, 2.0)
    assert as_factory("CartPole-v1").then(Scaled, preload=["json"]).preload == ("gymnasium", "json")


def test_as_factory_works_in_a_thread_and_on_environments_without_driver() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(as_factory(Line(3.0))))
    thread.start()
    thread.join()
    assert found[0]().gain == 3.0
    env = UnknownInterface()
    env.angle = 0.5
    assert as_factory(env)().angle == 0.5


class UnknownInterface:
    """Environment of an unknown library, with ``reset`` and ``step``."""

    angle = 0.0

    def reset(self) -> float:
        return self.angle

    def step(self, action: float) -> float:
        return self.angle


def make_changed_line() -> Any:
    env = gym.wrappers.TimeLimit(Line(), 20)
    env.unwrapped.rewards.bonus = 4.0  # type: ignore[attr-defined]
    return env


def _step_30_times(venv: Any) -> list[Any]:
    venv.action_space.seed(1)
    seen: list[Any] = list(venv.reset(seed=3))
    for _ in range(30):
        seen += venv.step(venv.action_space.sample())
    venv.close()
    return seen


@pytest.mark.sample
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_gymnasium_vector_environments_accept_the_factories(method: str) -> None:
    gc.collect()  # A forked process does not tolerate some libraries' objects that other tests left.
    env = make_changed_line()
    ours = _step_30_times(AsyncVectorEnv(as_factory(env, start_method=method).for_workers(2), context=method))
    np.testing.assert_equal(ours, _step_30_times(SyncVectorEnv([make_changed_line] * 2)))
    env.reset()
    env.step(0)  # gymnasium closed the environment that it built to read the spaces. This one is still open.


def test_stable_retro_game_is_built_by_its_name() -> None:
    pytest.importorskip("stable_retro")
    factory = as_factory("Airstriker-Genesis-v0")
    assert (factory.origin, factory.to_source()) == ("id", "stable_retro.make('Airstriker-Genesis-v0')")
    env = factory()
    assert (env.unwrapped.gamename, env.render_mode) == ("Airstriker-Genesis-v0", "rgb_array")
    env.close()
