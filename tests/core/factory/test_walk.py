"""Whatever Python data is pickled, the copy has the same fingerprint, and a single change of either is seen."""

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
from rl_ext_core.factory.walk import description, fingerprint


class Holder:
    """Has any attributes."""


class Slots:
    """Has its attributes in slots, with one whose name is mangled."""

    __slots__ = ("__hidden", "gain")

    def __init__(self, gain: float) -> None:
        self.gain, self.__hidden = gain, [gain]


def copied(value: Any) -> Any:
    return pickle.loads(_pickle.dumps(value))


def different(one: Any, other: Any) -> list[str]:
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


def _slots(_: Any) -> Any:
    return Slots(1.0)


def _default(_: Any) -> Any:
    return collections.defaultdict(list)


# What can be made empty and filled later with anything, itself included; and how.
MAKERS: list[Callable[[Any], Any]] = [
    list,
    dict,
    collections.deque,
    collections.OrderedDict,
    _default,
    lambda _: Holder(),
    _slots,
]


def _put(container: Any, value: Any, at: int) -> None:
    if isinstance(container, (list, collections.deque)):
        container.append(value)
    elif isinstance(container, dict):
        container[at if at % 2 else f"key{at}"] = value
    elif isinstance(container, Slots):
        container.gain, container._Slots__hidden = value, {"deep": value}
    else:
        setattr(container, f"part{at}", value)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """Draw objects that refer to one another in any way, with the first of them as root."""
    objects = [maker(()) for maker in draw(st.lists(st.sampled_from(MAKERS), min_size=1, max_size=6))]
    leaves = draw(st.lists(st.one_of(scalars, arrays), min_size=1, max_size=6))
    parts = [*objects, *leaves, tuple(leaves), frozenset(["a", 1]), {2.5, "b"}]
    for index, owner in enumerate(objects[1:], 1):  # so that each can be reached
        _put(objects[draw(st.integers(0, index - 1))], owner, 100 + index)
    for at in range(draw(st.integers(0, 12))):
        _put(draw(st.sampled_from(objects)), draw(st.sampled_from(parts)), at)
    reached = [owner for owner in objects if not isinstance(owner, Slots)]
    return objects[0], reached


@pytest.mark.slow
@settings(max_examples=150)
@given(worlds())
def test_a_copy_of_anything_is_the_same(world: tuple[Any, list[Any]]) -> None:
    root, _ = world
    assert different(root, copied(root)) == []
    assert different(root, copied(copied(root))) == []


def _linked(root: Any) -> set[int]:
    found, waiting = {id(root)}, [root]
    while waiting:
        owner = waiting.pop()
        parts = list(owner.values()) if isinstance(owner, dict) else []
        parts += list(owner) if isinstance(owner, (list, collections.deque, tuple)) else []
        parts += list(vars(owner).values()) if isinstance(owner, Holder) else []
        parts += [owner.gain, owner._Slots__hidden] if isinstance(owner, Slots) else []
        for part in parts:
            if id(part) not in found and not isinstance(part, type):
                found.add(id(part))
                waiting.append(part)
    return found


@pytest.mark.slow
@settings(max_examples=150)
@given(worlds(), st.data())
def test_a_single_change_is_seen(world: tuple[Any, list[Any]], data: st.DataObject) -> None:
    root, owners = world
    linked = _linked(root)
    owners = [owner for owner in owners if id(owner) in linked]
    if not owners:
        return
    before = copied(root)
    _put(data.draw(st.sampled_from(owners)), "something new", 999)
    assert different(root, before) != []
    assert different(root, copied(root)) == []


def test_paths_name_what_differs() -> None:
    root, other = Holder(), Holder()
    root.part, other.part = {"a": [1, (2.0, np.zeros(2))]}, {"a": [1, (2.0, np.ones(2))]}  # type: ignore[attr-defined]
    assert different(root, other) == [".part['a'][1][1]"]


def test_shared_parts_are_no_equal_parts() -> None:
    shared: list[int] = []
    assert different([shared, shared], [[], []]) != []
    whole = np.zeros(4)
    assert different([whole, whole[:2]], [np.zeros(4), np.zeros(2)]) != []


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be described"):
        description([iter_of_nothing()])


def iter_of_nothing() -> Any:
    yield
