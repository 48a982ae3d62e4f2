from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core import _pickle
from rl_ext_core.factory.walk import fingerprint


class Holder:
    """Object with arbitrary attributes."""


class Slots:
    __slots__ = ("__hidden", "gain")

    def __init__(self, gain: Any) -> None:
        self.gain, self.__hidden = gain, [gain]


def copy_by_pickle(value: Any) -> Any:
    return pickle.loads(_pickle.dumps(value))


def changed_paths(one: Any, other: Any) -> list[str]:
    return fingerprint(one).differences(fingerprint(other))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([np.float32(1.5), np.int8(3), np.bool_(True), np.dtype("f4"), int, len, Holder]),
)
arrays = st.builds(
    lambda shape, kind, number: np.full(shape, number).astype(kind),
    st.sampled_from([(), (2,), (2, 3), (0, 2)]),
    st.sampled_from(["f8", "f4", "i2", "u1", "?", "c8"]),
    st.integers(0, 5),
)


# Containers that are created empty, and filled later with anything, including themselves.
MAKERS: list[Callable[[], Any]] = [
    list,
    dict,
    collections.deque,
    collections.OrderedDict,
    lambda: collections.defaultdict(list),
    Holder,
]


def _put(container: Any, value: Any, at: int) -> None:
    """Store a value in a container, or as an attribute of another object."""
    if isinstance(container, (list, collections.deque)):
        container.append(value)
    elif isinstance(container, dict):
        container[at if at % 2 else f"key{at}"] = value
    else:
        setattr(container, f"part{at}", value)


@st.composite
def worlds(draw: st.DrawFn) -> list[Any]:
    """Draw objects that refer to each other in any way. All are reachable from the first one."""
    objects = [maker() for maker in draw(st.lists(st.sampled_from(MAKERS), min_size=1, max_size=6))]
    leaves = draw(st.lists(st.one_of(scalars, arrays), min_size=1, max_size=6))
    parts = [*objects, *leaves, tuple(leaves), frozenset(["a", 1]), {2.5, "b"}, Slots(leaves[0])]
    for index, owner in enumerate(objects[1:], 1):
        _put(objects[draw(st.integers(0, index - 1))], owner, 100 + index)
    for at in range(draw(st.integers(0, 12))):
        _put(draw(st.sampled_from(objects)), draw(st.sampled_from(parts)), at)
    return objects


@pytest.mark.slow
@settings(max_examples=150)
@given(worlds(), st.data())
def test_fingerprint_of_a_copy_is_equal_and_differs_after_a_change(objects: list[Any], data: st.DataObject) -> None:
    root, before = objects[0], copy_by_pickle(objects[0])
    assert changed_paths(root, before) == changed_paths(root, copy_by_pickle(before)) == []
    _put(data.draw(st.sampled_from(objects)), "something new", 999)
    assert changed_paths(root, before) != []
    assert changed_paths(root, copy_by_pickle(root)) == []


def test_differences_are_named_by_their_paths() -> None:
    root, other = Holder(), Holder()
    root.part, other.part = {"a": [1, (2.0, np.zeros(2))]}, {"a": [1, (2.0, np.ones(2))]}  # type: ignore[attr-defined]
    assert changed_paths(root, other) == [".part['a'][1][1]"]
    root.part, other.part = [1].append, [2].append  # type: ignore[attr-defined]
    assert changed_paths(root, other) == [".part.<reduced 1>[0]"]
    array = np.zeros(2)
    root.part, other.part = [array, array[:]], [array, array.copy()]  # type: ignore[attr-defined]
    assert changed_paths(root, other) == [".part[1].<memory>"]
    root.part, other.part = (lambda value: lambda: value)(1), (lambda value: lambda: value)(2)  # type: ignore[attr-defined]
    assert changed_paths(root, other) == [".part.<value>.<value>"]
