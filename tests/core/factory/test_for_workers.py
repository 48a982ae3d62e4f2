"""Factories for several workers: overrides and devices of their own, and what is refused."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import as_factory
from tests.core.factory.copying import Line, Scaled, try_rollout


def test_each_worker_has_its_overrides_and_its_number() -> None:
    factories = as_factory(Line()).for_workers(3, overrides=[{"gain": 1.0}, {"gain": 2.0}, {}])
    assert [factory.worker for factory in factories] == [0, 1, 2]
    assert [dict(factory.overrides) for factory in factories] == [{"gain": 1.0}, {"gain": 2.0}, {}]
    assert [pickle.loads(pickle.dumps(factory))().gain for factory in factories] == [1.0, 2.0, 1.0]
    assert factories[1](gain=6.0).gain == 6.0
    assert as_factory(Line).worker is None


def test_decisions_are_handed_out_and_applied_where_the_environment_is_built() -> None:
    decision = resolve("cpu")
    factories = as_factory(lambda device="?": (device, Line())).for_workers(2, devices=decision)
    assert [factory.decision for factory in factories] == [decision, decision]
    assert [factory()[0] for factory in factories] == ["cpu", "cpu"]
    assert [factory.decision for factory in as_factory(Line).for_workers(2, devices=[decision] * 2)] == [decision] * 2
    assert as_factory(Line).for_workers(1)[0].decision is None


def test_round_robin_decides_for_each_worker() -> None:
    factories = as_factory(Line()).for_workers(2, devices="round-robin")
    assert all(isinstance(factory.decision, Decision) for factory in factories)


WRONG: list[tuple[str, list[Any], type[Exception], str]] = [
    ("num_workers", [0, -1, 2.0, True, "2", None], InvalidArgumentError, r"Write for_workers\(2\)"),
    ("seed", [-1, 1.5, "a", True], InvalidArgumentError, r"Write for_workers\(2, seed=0\)"),
    ("overrides", [{"gain": 1.0}, [1, 2], "ab", 5, [{}, None]], InvalidTypeError, r"write overrides=\[dict\(name"),
    ("devices", ["cuda", 5, ["cpu", "cpu"]], InvalidArgumentError, r"Write devices=\[resolve\("),
    ("overrides", [[{}]], InvalidArgumentError, "1 entries for 2 workers; expected one for each. Write overrides="),
    ("devices", [[resolve("cpu")] * 3], InvalidArgumentError, "3 entries for 2 workers; expected one for each. Write "),
]


@pytest.mark.parametrize(("name", "values", "error", "said"), WRONG)
def test_what_is_wrong_is_named_with_the_line_to_write(
    name: str, values: list[Any], error: type[Exception], said: str
) -> None:
    for value in values:
        with pytest.raises(error, match=said) as caught:
            as_factory(Line).for_workers(**{"num_workers": 2, name: value})
        assert f"{name}={value!r}" in str(caught.value) or f"{name} has" in str(caught.value)


def test_what_is_for_a_worker_keeps_what_is_not_said_anew() -> None:
    [_, second] = as_factory(Line).for_workers(2, seed=3, overrides=[{"gain": 2.0}, {"gain": 5.0}])
    [_, again] = second.for_workers(2)
    assert again.overrides == {"gain": 5.0}
    assert again().gain == 5.0
    assert again._worker is not None
    assert again._worker.entropy == 3
    [other] = second.for_workers(1, overrides=[{"length": 7}])
    assert other.overrides == {"gain": 5.0, "length": 7}


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
    env = gym.make("copies/Line-v0", max_episode_steps=20)
    copy = as_factory(env)(gain=4.0, weights=np.array([1.0, 5.0, 0.0]), _max_episode_steps=9)
    env.unwrapped.gain, env.unwrapped.weights = 4.0, np.array([1.0, 5.0, 0.0])
    env._max_episode_steps = 9
    assert try_rollout(copy) == try_rollout(env)


def test_attributes_of_the_class_are_set_for_one_and_properties_by_their_setters() -> None:
    copy = as_factory(Guarded(Line()))(drift=2.0, speed=4.0)
    assert (copy.unwrapped.drift, Line.drift, copy._speed) == (2.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("make", "name", "value", "said"),
    [
        (lambda: Scaled(Line()), "gian", 5.0, r"no layer of Scaled has the attribute gian=5.0; there are gain.*as_fac"),
        (lambda: Guarded(Line()), "fixed", 5, r"fixed=5 cannot be set on Guarded: .*fixed"),
        (lambda: Guarded(Line()), "speed", 11, r"speed=11 was set on Guarded, which keeps 10\.0"),
    ],
)
def test_a_name_that_cannot_be_set_is_refused(make: Any, name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        as_factory(make())(**{name: value})


def test_overrides_of_a_callable_are_arguments() -> None:
    sources: list[Any] = [Line, lambda gain: Line(gain), functools.partial(Line, gain=2.0), lambda **kw: Line(**kw)]
    assert {as_factory(source)(gain=5.0).unwrapped.gain for source in [*sources, "copies/Line-v0"]} == {5.0}
    assert as_factory(gym.spec("copies/Line-v0"))(max_episode_steps=3)._max_episode_steps == 3


@pytest.mark.parametrize("source", [Line, functools.partial(Line, length=3), lambda gain, length: Line(gain, length)])
def test_an_argument_that_a_callable_does_not_take_is_refused(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"takes no argument bonus=1; it takes gain, length.*lambda bonus"):
        as_factory(source)(bonus=1)


@pytest.mark.parametrize("source", [Line(), Line])
def test_they_are_checked_before_any_worker_starts(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="gian=5"):
        as_factory(source).for_workers(2, overrides=[{}, {"gian": 5}])
