from __future__ import annotations

import functools
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.devices import resolve
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import as_factory
from tests.core.factory.copying import Line, Scaled, try_rollout


def test_each_worker_has_its_own_overrides_and_index() -> None:
    factories = as_factory(Line()).for_workers(3, overrides=[{"gain": 1.0}, {"gain": 2.0}, {}])
    assert [factory.worker for factory in factories] == [0, 1, 2]
    assert [dict(factory.overrides) for factory in factories] == [{"gain": 1.0}, {"gain": 2.0}, {}]
    assert [pickle.loads(pickle.dumps(factory))().gain for factory in factories] == [1.0, 2.0, 1.0]
    assert factories[1](gain=6.0).gain == 6.0
    assert as_factory(Line).worker is None


def test_decisions_are_distributed_and_passed_as_device_argument() -> None:
    decision = resolve("cpu")
    factories = as_factory(lambda device="?": (device, Line())).for_workers(2, devices=decision)
    assert [factory.decision for factory in factories] == [decision, decision]
    assert [factory()[0] for factory in factories] == ["cpu", "cpu"]
    assert [factory.decision for factory in as_factory(Line).for_workers(2, devices=[decision] * 2)] == [decision] * 2
    assert as_factory(Line).for_workers(1)[0].decision is None


INVALID: list[tuple[str, list[Any], type[Exception], str]] = [
    ("num_workers", [0, -1, 2.0, True, "2", None], InvalidArgumentError, r"Use for_workers\(2\)"),
    ("seed", [-1, 1.5, "a", True], InvalidArgumentError, r"Use for_workers\(2, seed=0\)"),
    ("overrides", [{"gain": 1.0}, [1, 2], "ab", 5, [{}, None]], InvalidTypeError, r"Use overrides=\[dict\(name"),
    ("devices", ["cuda", 5, ["cpu", "cpu"]], InvalidArgumentError, r"Use devices=\[resolve\("),
    ("overrides", [[{}]], InvalidArgumentError, "length 1: expected one entry for each of num_workers=2. Use overr"),
    ("devices", [[resolve("cpu")] * 3], InvalidArgumentError, "length 3: expected one entry for each of num_workers=2"),
]


@pytest.mark.parametrize(("name", "values", "error", "message"), INVALID)
def test_invalid_arguments_are_named_with_the_code_to_write(
    name: str, values: list[Any], error: type[Exception], message: str
) -> None:
    for value in values:
        with pytest.raises(error, match=message) as caught:
            as_factory(Line).for_workers(**{"num_workers": 2, name: value})
        assert f"{name}={value!r}" in str(caught.value) or f"{name} has" in str(caught.value)


def test_second_call_of_for_workers_keeps_settings_that_it_does_not_replace() -> None:
    [_, second] = as_factory(Line).for_workers(2, seed=3, overrides=[{"gain": 2.0}, {"gain": 5.0}])
    [_, again] = second.for_workers(2)
    assert again.overrides == {"gain": 5.0}
    assert again().gain == 5.0
    assert again._entropy == 3
    [other] = second.for_workers(1, overrides=[{"length": 7}])
    assert other.overrides == {"gain": 5.0, "length": 7}


class Guarded(gym.Wrapper[Any, Any, Any, Any]):
    """Environment with a read-only property, and one that clips its value."""

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


def test_copy_with_overrides_equals_an_original_with_the_same_attributes() -> None:
    env = gym.make("copies/Line-v0", max_episode_steps=20)
    copy = as_factory(env)(gain=4.0, weights=np.array([1.0, 5.0, 0.0]), _max_episode_steps=9)
    env.unwrapped.gain, env.unwrapped.weights = 4.0, np.array([1.0, 5.0, 0.0])
    env._max_episode_steps = 9
    assert try_rollout(copy) == try_rollout(env)


def test_class_attributes_are_set_on_the_instance_and_properties_by_their_setters() -> None:
    copy = as_factory(Guarded(Line()))(drift=2.0, speed=4.0)
    assert (copy.unwrapped.drift, Line.drift, copy._speed) == (2.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (
            lambda: Scaled(Line()),
            "gian",
            5.0,
            r"no layer of Scaled has the attribute gian=5.0: .* such as gain.*as_fac",
        ),
        (lambda: Guarded(Line()), "fixed", 5, r"fixed=5 cannot be set on Guarded: .*fixed"),
        (lambda: Guarded(Line()), "speed", 11, r"speed=11 was set on Guarded, which stores 10\.0 instead"),
    ],
)
def test_override_of_an_unknown_or_read_only_attribute_is_rejected(
    make: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_factory(make())(**{name: value})


def test_overrides_are_arguments_of_a_callable() -> None:
    sources: list[Any] = [Line, lambda gain: Line(gain), functools.partial(Line, gain=2.0), lambda **kw: Line(**kw)]
    assert {as_factory(source)(gain=5.0).unwrapped.gain for source in [*sources, "copies/Line-v0"]} == {5.0}
    assert as_factory(gym.spec("copies/Line-v0"))(max_episode_steps=3)._max_episode_steps == 3


@pytest.mark.parametrize("source", [Line, functools.partial(Line, length=3), lambda gain, length: Line(gain, length)])
def test_override_that_is_not_a_parameter_of_the_callable_is_rejected(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"takes no argument bonus=1: expected gain, length.*lambda bonus"):
        as_factory(source)(bonus=1)


@pytest.mark.parametrize("source", [Line(), Line])
def test_overrides_are_checked_before_any_worker_starts(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="gian=5"):
        as_factory(source).for_workers(2, overrides=[{}, {"gian": 5}])
