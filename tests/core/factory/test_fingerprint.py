"""What a fingerprint sees, and what it takes for the same."""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import dis
import enum
import functools
import math
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_ext_core.factory import _rules, register_rebuilder
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.factory._parts import globals_in
from tests.core.factory.grafting import copied, different


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Key:
    """Is no other's equal."""

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Labelled(np.ndarray[Any, Any]):
    """An array with attributes."""


def _labelled(label: str) -> Any:
    array = np.zeros(2).view(Labelled)
    array.label = label  # type: ignore[attr-defined]
    return array


class Holder:
    """Holds what it is given."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slots:
    __slots__ = ("_hidden", "gain")

    def __init__(self, gain: float) -> None:
        self.gain, self._hidden = gain, {"deep": gain}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


class Watched:
    """Fails if anything but its dictionary is looked at."""

    def __init__(self, gain: float) -> None:
        self._gain = gain

    @property
    def gain(self) -> float:
        raise AssertionError("a property was evaluated")

    def __getattribute__(self, name: str) -> Any:
        if name in ("_gain", "gain"):
            raise AssertionError(f"{name} was read")
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        raise AssertionError("its text was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


class OwnDict(dict[str, Any]):
    """Its entries are its attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


def _multiplier(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def _scripted(gain: float) -> Any:
    """Give a function as a script's or a notebook's: it is packed with the globals that it names."""
    script: dict[str, Any] = {"__name__": "__main__", "GAIN": gain}
    exec("def rule(value):\n    return value * GAIN", script)
    return script["rule"]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    gain: float
    parts: list[int] = dataclasses.field(default_factory=list)


def _shared() -> list[Any]:
    part = [1]
    return [part, part]


def _row(array: Any) -> list[Any]:
    return [array, array[1]]


EVEN = np.ones((2, 3))
GRID, NUMBERS = np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)

# Pairs that differ in one thing; each is copied faithfully.
PAIRS: dict[str, tuple[Any, Any]] = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "signs of zero": (0.0, -0.0),
    "types of numbers": (np.float32(1), np.float64(1)),
    "None and its text": (None, "None"),
    "text and bytes": ("a", b"a"),
    "long texts": ("a" * 9999, "a" * 9998 + "b"),
    "huge numbers": (10**5000, 10**5000 + 1),
    "members of an enumeration": (Colour.RED, Colour.BLUE),
    "order of a dictionary": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "keys of a dictionary": ({1: "a"}, {1.0: "a"}),
    "an object as key": ({Colour.RED: 1}, {Colour.BLUE: 1}),
    "an object with state as key": ({Key(1.0): 1}, {Key(2.0): 1}),
    "parts of a set": ({"a", "b"}, {"a", "c"}),
    "set and frozenset": ({1}, frozenset({1})),
    "length of a tuple": ((1,), (1, 1)),
    "list and tuple": ([1], (1,)),
    "long lists": ([0] * 999, [0] * 998 + [1]),
    "long dictionaries": (dict.fromkeys(range(999), 0), {i: i // 998 for i in range(999)}),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "bits of an array": (np.zeros(2), -np.zeros(2)),
    "type of an array": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "structured arrays": (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")])),
    "arrays of objects": (np.array([[1], 2], object), np.array([[3], 2], object)),
    "read-only arrays": (np.frombuffer(b"\0" * 8), np.zeros(1)),
    "masked arrays": (np.ma.masked_array([1, 2], [0, 1]), np.ma.masked_array([1, 2], [1, 1])),
    "attributes of an array": (_labelled("a"), _labelled("b")),
    "tensors": (torch.zeros(2), torch.ones(2)),
    "types of tensors": (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    "gradients asked for": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "parameters": (torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, requires_grad=True)),
    "deques": (collections.deque([1], 3), collections.deque([1], 4)),
    "defaults": (collections.defaultdict(int), collections.defaultdict(list)),
    "counters": (collections.Counter("a"), collections.Counter("b")),
    "ordered": (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    "namespaces": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "slots": (Slots(1.0), Slots(2.0)),
    "frozen data classes": (Frozen(1.0, [1]), Frozen(1.0, [2])),
    "behind a property": (Watched(1.0), Watched(2.0)),
    "partial functions": (functools.partial(max, 1), functools.partial(max, 2)),
    "constants of a function": (lambda value: value * 2, lambda value: value * 3),
    "names in a function": (lambda value: math.sin(value), lambda value: math.cos(value)),
    "what a closure holds": (_multiplier(2.0), _multiplier(3.0)),
    "globals of a script": (_scripted(2.0), _scripted(3.0)),
    "methods": (Frozen(1.0).__eq__, Frozen(2.0).__eq__),
    "bound builtins": ([1].append, [2].append),
    "spaces": (gym.spaces.Box(0, 1, (2,)), gym.spaces.Box(0, 2, (2,))),
    "an entry that is an attribute": (OwnDict(gain=1), OwnDict(gain=2)),
    "ranges": (range(3), range(4)),
    "one list or two": (_shared(), [[1], [1]]),
    "which of two lists": ((lambda a, b: [a, b, a])([1], [1]), (lambda a, b: [a, b, b])([1], [1])),
    "one memory or two": (_row(GRID.copy()), [GRID.copy(), GRID[1].copy()]),
    "parts of one memory": (_row(EVEN.copy()), (lambda grid: [grid, grid[0]])(EVEN.copy())),
    "one storage or two": (_row(NUMBERS.clone()), [NUMBERS.clone(), NUMBERS[1].clone()]),
    "array and tensor in one memory": (
        (lambda a: [a, torch.from_numpy(a)])(np.ones(3)),
        [np.ones(3), torch.ones(3).double()],
    ),
    "dates": (__import__("datetime").date(2020, 1, 1), __import__("datetime").date(2020, 1, 2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_is_told_apart_and_copied(name: str) -> None:
    one, other = PAIRS[name]
    assert fingerprint(one).differences(fingerprint(other)) != []
    for value in (one, other):
        assert different(value, copied(value)) == []
        assert different({"held": [value]}, copied({"held": [value]})) == []


def test_a_difference_is_named_by_its_path() -> None:
    one, other = Holder(layers=[{"gain": Slots(1.0)}]), Holder(layers=[{"gain": Slots(2.0)}])
    assert fingerprint(one).differences(fingerprint(other)) == [
        ".layers[0]['gain'].gain",
        ".layers[0]['gain']._hidden['deep']",
    ]


def _twice(kind: type) -> Any:
    class Another(kind):  # type: ignore[misc]
        gain = 3

    Another.__name__, Another.__qualname__ = kind.__name__, kind.__qualname__
    return Another


@_twice
class Decorated:
    gain = 2


def test_two_classes_of_one_name_are_told_apart() -> None:
    world = Decorated()
    tokens = {path: token for path, token in fingerprint(world).tokens.items() if path.endswith("gain")}
    assert len(tokens) == len(set(tokens.values())) == 2


class Slotted:
    __slots__ = ("gain",)

    def read(self) -> Any:
        return self.gain


gain = 3  # which nothing reads


def test_slots_and_names_of_attributes_are_no_values() -> None:
    slotted = Slotted()
    slotted.gain = 1
    assert [path for path in fingerprint(slotted, code=True).tokens if path.endswith("gain")] == [".gain"]


def test_names_of_globals_are_those_that_the_standard_library_finds() -> None:
    def codes(code: types.CodeType) -> Iterator[types.CodeType]:
        yield code
        for part in code.co_consts:
            yield from codes(part) if isinstance(part, types.CodeType) else ()

    for module in (argparse, collections, os):  # some with more names than a byte counts
        whole = compile(Path(str(module.__file__)).read_text(encoding="utf-8"), "<string>", "exec")
        steps = [step for code in codes(whole) for step in dis.get_instructions(code)]
        expected = {step.argval for step in steps if "GLOBAL" in step.opname or step.opname == "LOAD_NAME"}
        assert globals_in(whole) == expected


def test_a_handle_that_is_a_number_is_noticed() -> None:
    memory = ctypes.create_string_buffer(1 << 22)  # what is small may lie at an address that is a common number
    handle = ctypes.addressof(memory)
    held = Holder(handle=handle, pair=(1, handle), steps=1 << 40, seed=2**63)
    assert fingerprint(held).differences(fingerprint(copied(held))) == [".handle", ".pair[1]"]


def test_a_generator_that_was_not_asked_for_yet_is_no_difference() -> None:
    one, other = gym.spaces.Discrete(3), gym.spaces.Discrete(3)
    other.sample()
    assert fingerprint(one).differences(fingerprint(other)) == []


def test_cycles_and_chains_come_to_an_end() -> None:
    ring: list[Any] = [1]
    ring += [ring, {"again": ring}, (lambda: ring)]
    assert different(ring, copied(ring)) == []

    def recursive(depth: int) -> int:
        return depth and recursive(depth - 1)

    assert different([recursive], copied([recursive])) == []
    chain: Any = None
    for number in range(20_000):
        chain = [number, chain]
    assert len(fingerprint(chain).tokens) == 40_001


def test_what_a_rule_without_settings_rebuilds_is_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules, "_registered", {})

    class Known:
        def __init__(self, gain: float) -> None:
            self.gain, self.handle = gain, object()

    register_rebuilder(Known, lambda known: (Known, (known.gain,)))
    copy = copied(Holder(known=Known(2.0)))
    assert copy.known.gain == 2.0
    assert fingerprint(Holder(known=Known(2.0))).opaque == {".known": f"{__name__}.{Known.__qualname__}"}
    assert fingerprint(Holder(known=Known(2.0))).differences(fingerprint(Holder(known=Known(3.0)))) == [".known(0)"]


_OF_A_WORLD = """
import enum, sys, pickle
import gymnasium as gym
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.worlds import Line, Rewards
class Colour(enum.Enum):
    RED = 1
class Still(Line):
    __hash__ = object.__hash__
def multiplier(factor):
    return lambda value: value * factor
environment = gym.wrappers.RecordEpisodeStatistics(gym.make("Acrobot-v1"))
environment.reset(seed=1)
environment.episode_start_time = 0.0
environment.words = {"one", "two", "three", b"four", 5, Colour.RED, ("a", "b"), frozenset({"x", "y", "z"})}
environment.objects = {Still(gain) for gain in range(20)}
environment.table = {Rewards: multiplier(3.0), Still(1): Rewards(2.0), "lambda": lambda x: x in {"p", "q", "r"}}
pickle.dump(fingerprint(environment), sys.stdout.buffer)
"""


@pytest.mark.slow
def test_they_are_equal_in_different_processes() -> None:
    prints = []
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _OF_A_WORLD]
        prints.append(pickle.loads(subprocess.run(command, check=True, capture_output=True, env=environ).stdout))
    assert prints[0].tokens == prints[1].tokens
    assert len(prints[0].tokens) > 150
