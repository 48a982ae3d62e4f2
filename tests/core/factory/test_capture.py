from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.errors import InvalidTypeError, NotCopyableError
from rl_ext_core.factory import as_factory, capture_constructors
from rl_ext_core.factory.record import recorded_call
from tests.core.factory.copying import Line, Scaled, try_rollout


class Own(Line):
    def __new__(cls, gain: float, *args: Any) -> Any:
        return super().__new__(cls)


class CapturedOwn(Own):
    def __new__(cls, gain: float, *args: Any) -> Any:
        return super().__new__(cls, gain)


class Meta(type):
    """Metaclass that consumes an option, as that of TorchRL's environments does."""

    def __call__(cls, *args: Any, doubled: bool = False, **kwargs: Any) -> Any:
        env = super().__call__(*args, **kwargs)
        env.gain *= 2 if doubled else 1
        return env


class DerivedMeta(Meta):
    def __call__(cls, *args: Any, length: int = 3, **kwargs: Any) -> Any:
        return super().__call__(*args, length=length, **kwargs)


class Doubled(Line, metaclass=Meta):
    """Environment whose metaclass consumes the argument ``doubled``."""


class Derived(Doubled, metaclass=DerivedMeta):
    """Environment whose metaclass is derived from that of its base, and adds an argument."""


class Bare(gym.Env[Any, Any]):
    """Environment without a constructor of its own."""


def make_and_change_arguments(config: dict[str, Any], weights: Any) -> Line:
    config["layers"].append(config.pop("gain"))
    weights[:] = 9
    return Line(2.0)


make_and_change_arguments = capture_constructors(make_and_change_arguments)
for _cls in (Doubled, CapturedOwn):
    capture_constructors(_cls)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Line(2.0, length=9), (Line, (2.0,), {"length": 9})),
        (lambda: Doubled(3.0, doubled=True), (Doubled, (3.0,), {"doubled": True})),  # type: ignore[call-arg]
        (lambda: Derived(3.0, length=4), (Derived, (3.0,), {"length": 4})),
        (lambda: CapturedOwn(5.0), (CapturedOwn, (5.0,), {})),
        (lambda: Bare(), (Bare, (), {})),
        (lambda: Own(5.0), None),
        *((lambda again=again: again(Scaled(Line(2.0), 3.0)), None) for again in (copy.copy, copy.deepcopy)),
        (lambda: pickle.loads(pickle.dumps(Scaled(Line(2.0), 3.0))), None),
    ],
)
def test_outermost_constructor_call_is_recorded_except_for_copies(make: Any, expected: Any) -> None:
    made = make()
    call = recorded_call(made)
    assert (call and (call.func, call.args, call.keywords)) == expected


def test_recorded_arguments_are_not_affected_by_later_changes() -> None:
    call = recorded_call(make_and_change_arguments({"gain": 1.0, "layers": [1]}, weights=np.zeros(2)))
    assert call is not None
    assert (call.func, call.args) == (make_and_change_arguments, ({"gain": 1.0, "layers": [1]},))
    assert call.keywords["weights"].tolist() == [0, 0]


def test_captured_constructors_still_reject_superfluous_arguments() -> None:
    passing: Any = type("Passing", (Line,), {"__new__": lambda cls, gain: gym.Env.__new__(cls, gain)})
    for make in (Bare, passing):
        with pytest.raises(TypeError, match=r"object.__new__\(\) takes exactly one argument"):
            make(3)


def test_records_are_excluded_from_pickles_and_comparisons() -> None:
    env = Bare()
    assert b"rl_ext_core" not in pickle.dumps(env)
    assert vars(env) == vars(Bare()) == vars(copy.deepcopy(env))


def test_environment_that_two_arguments_use_is_constructed_once() -> None:
    inner = Line(2.0)
    outer = Scaled(Scaled(inner, scale=3.0), 4.0)
    factory = as_factory(outer)
    assert factory.to_source() == "lambda: Scaled(Scaled(Line(2.0), scale=3.0), 4.0)"
    assert (factory.origin, try_rollout(factory())) == ("constructor", try_rollout(outer))
    built = as_factory(Scaled(inner, [inner, {"same": inner}]))()  # type: ignore[arg-type]
    assert built.env is built.scale[0] is built.scale[1]["same"] is not inner
    with pytest.raises(NotCopyableError, match=r"(?s)its constructor call was not recorded.*lambda: Scaled\(Own"):
        as_factory(Scaled(Own(2.0)))


def test_captured_classes_and_functions_of_the_main_module_are_pickled_by_value() -> None:
    own: Any = type("Own", (), {"__module__": "__main__", "__init__": lambda self, gain: setattr(self, "gain", gain)})
    capture_constructors(own)
    assert pickle.loads(cloudpickle.dumps(own))(4.0).gain == 4.0
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def make(gain): return Line(gain)", namespace | {"Line": Line}, namespace)
    make = capture_constructors(namespace["make"])
    assert as_factory(make(2.0))().gain == 2.0


@pytest.mark.parametrize("thing", ["Kept", 5, None, Line()])
def test_capture_constructors_rejects_other_objects(thing: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"is not a class or function.* Use capture_constructors\(MyEnv\)"):
        capture_constructors(thing)


IMPORTS = """
import importlib.util, sys
assert {first}
from rl_ext_core.factory import record
record.start_recording()
assert importlib.util.find_spec("gymnasium.core") and not importlib.util.find_spec("no_such_module")
from gymnasium import make
import gymnasium
for env in (make("CartPole-v1"), gymnasium.make_vec("CartPole-v1", 2)):
    assert record.recorded_call(env).args[0] == "CartPole-v1", env
assert make is gymnasium.make is gymnasium.envs.registration.make
assert record.source_of_environment(env) == "gymnasium.make_vec('CartPole-v1', 2)"
"""


@pytest.mark.parametrize("first", ['"gymnasium" not in sys.modules', '__import__("gymnasium")'])
def test_recording_starts_before_and_after_gymnasium_is_imported(first: str) -> None:
    subprocess.run([sys.executable, "-c", IMPORTS.format(first=first)], check=True, timeout=120)


class WarningNew(Line):
    def __new__(cls) -> Any:
        warnings.warn("look here", stacklevel=2)
        return super().__new__(cls)


class WarningInit(Line, metaclass=Meta):
    def __init__(self) -> None:
        super().__init__()
        warnings.warn("look here", stacklevel=3)


@pytest.mark.parametrize("make", [capture_constructors(WarningNew), capture_constructors(WarningInit)])
def test_warnings_of_captured_constructors_name_the_line_of_the_caller(make: Any) -> None:
    with pytest.warns(UserWarning, match="look here") as caught:
        make()
    assert [warning.filename for warning in caught] == [__file__]
