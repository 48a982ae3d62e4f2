"""What is different about one worker's environment: attributes of a copy, or arguments of what builds it."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import as_factory
from tests.core.factory.worlds import Line, Scaled, rollout


class Guarded(gym.Wrapper[Any, Any, Any, Any]):
    """One with attributes that cannot be set, or not to everything."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._speed = 1.0

    @property
    def fixed(self) -> int:
        return 3

    @property
    def speed(self) -> float:
        return self._speed

    @speed.setter
    def speed(self, value: float) -> None:
        self._speed = min(value, 10.0)


def test_attributes_are_set_on_the_outermost_layer_that_has_them() -> None:
    inner = Scaled(Line(), 2.0)
    factory = as_factory(Scaled(inner, 3.0))
    copy = factory(scale=7.0, gain=4.0, _cached_spec=None)
    assert (copy.scale, copy.env.scale, copy.unwrapped.gain) == (7.0, 2.0, 4.0)
    assert "gain" not in vars(copy)
    assert (inner.scale, inner.unwrapped.gain) == (2.0, 1.0)


def test_a_copy_with_overrides_does_what_the_original_does_once_it_is_set() -> None:
    env = gym.make("worlds/Line-v0", max_episode_steps=20)
    copy = as_factory(env)(gain=4.0, weights=np.array([1.0, 5.0, 0.0]), _max_episode_steps=9)
    env.unwrapped.gain, env.unwrapped.weights = 4.0, np.array([1.0, 5.0, 0.0])
    env._max_episode_steps = 9
    assert rollout(copy) == rollout(env)


def test_attributes_of_the_class_are_set_for_one_and_properties_by_their_setters() -> None:
    copy = as_factory(Guarded(Line()))(drift=2.0, speed=4.0)
    assert (copy.unwrapped.drift, Line.drift, copy._speed) == (2.0, 0.0, 4.0)


def test_a_name_that_no_layer_has_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        as_factory(Scaled(Line()))(gian=5.0)
    assert "no layer of Scaled has the attribute gian=5.0; there are gain" in str(caught.value)
    assert "as_factory(lambda **kwargs: MyEnv(**kwargs))" in str(caught.value)


def test_what_cannot_be_set_or_does_not_stay_is_refused() -> None:
    factory = as_factory(Guarded(Line()))
    with pytest.raises(InvalidArgumentError, match=r"fixed=5 cannot be set on Guarded: .*fixed"):
        factory(fixed=5)
    with pytest.raises(InvalidArgumentError, match=r"speed=11 was set on Guarded, which keeps 10\.0"):
        factory(speed=11)


def test_overrides_of_a_callable_are_arguments() -> None:
    assert as_factory(Line)(gain=5.0).gain == 5.0
    assert as_factory(lambda gain: Line(gain))(gain=5.0).gain == 5.0
    assert as_factory(functools.partial(Line, gain=2.0))(gain=5.0).gain == 5.0
    assert as_factory(lambda **kwargs: Line(**kwargs))(gain=5.0).gain == 5.0
    assert as_factory("worlds/Line-v0")(gain=5.0, max_episode_steps=3).unwrapped.gain == 5.0
    assert as_factory(gym.spec("worlds/Line-v0"))(max_episode_steps=3)._max_episode_steps == 3


@pytest.mark.parametrize("source", [Line, functools.partial(Line, length=3), lambda gain, length: Line(gain, length)])
def test_an_argument_that_a_callable_does_not_take_is_refused(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"takes no argument bonus=1; it takes gain, length.*lambda bonus"):
        as_factory(source)(bonus=1)


def test_they_are_checked_before_any_worker_starts() -> None:
    with pytest.raises(InvalidArgumentError, match="gian=5"):
        as_factory(Line()).for_workers(2, overrides=[{}, {"gian": 5}])
    with pytest.raises(InvalidArgumentError, match="gian=5"):
        as_factory(Line).for_workers(2, overrides=[{}, {"gian": 5}])
