"""Files of released versions stay readable; damaged ones are refused."""

from __future__ import annotations

import importlib.util
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import CorruptFileError, MissingDependencyError
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.checkpoint import FORMAT_VERSION
from rl_ext_core.testing import PlainStore, check_contents, transitions
from tests.core.frames.disk_toys import append_all
from tests.core.frames.make_fixtures import EXACT, KINDS, LAYOUT, N_ENVS, WAYS, filled, path_of, steps
from tests.core.frames.test_bounded_error import everything

# Of the bytes that come out. JPEG's depend on the library.
DECODED = {
    ("patch-lossy", "store"): 2382317980,
    ("patch-lossy", "adaptive"): 3313217912,
    ("patch+lz4-lossy", "store"): 2492941697,
    ("patch+lz4-lossy", "adaptive"): 3445397735,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_this_format_is_read(way: str, kind: str) -> None:
    capacity, n_steps = KINDS[kind]
    data = path_of(way, kind).read_bytes()
    assert len(data) < 65_000
    store, plain = pickle.loads(data), PlainStore(capacity, N_ENVS, LAYOUT)
    append_all([plain], steps(n_steps))
    made, true = everything(store, plain)
    off = np.abs(made - true)
    if way == "jpeg":
        assert off.mean() < 6
    else:
        assert off.max() == WAYS[way].get("max_error", 0)
        assert zlib.crc32(made.astype(np.uint8).tobytes()) == DECODED.get(
            (way, kind), zlib.crc32(true.astype(np.uint8).tobytes())
        )
    append_all([store, plain], transitions(LAYOUT, n_steps=30, contents="mixed"))
    if way in EXACT:
        check_contents(store, plain)


def test_there_are_files_of_the_format_that_is_written() -> None:
    assert FORMAT_VERSION == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_transitions_give_the_same_file(way: str, kind: str) -> None:
    first = pickle.dumps(filled(way, kind), protocol=5)
    dirt = [np.full(size, 0xA5, dtype=np.uint8) for size in range(30, 9000, 7)]
    del dirt
    assert pickle.dumps(filled(way, kind), protocol=5) == first


def state_of(codec: str) -> dict[str, Any]:
    store: FrameStore = pickle.loads(path_of(codec).read_bytes())
    return store.__getstate__()


def plain_leaves(value: Any, where: str = "state") -> list[str]:
    """Where values are that pickle finds by the name of a class, or that another version of NumPy prints otherwise."""
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in plain_leaves(part, f"{where}[{key!r}]")]
    if isinstance(value, (list, tuple)):
        return [found for i, part in enumerate(value) for found in plain_leaves(part, f"{where}[{i}]")]
    plain = type(value) in (int, bool, str, np.ndarray)
    return [] if plain else [f"{where} is a {type(value)}"]


@pytest.mark.parametrize("codec", EXACT)
def test_the_state_is_arrays_and_plain_values(codec: str) -> None:
    assert plain_leaves(state_of(codec)) == []
    store = FrameStore(np.int64(5), np.int64(2), LAYOUT, codec=codec, block_length=np.int64(4))  # type: ignore[arg-type]
    append_all((store,), transitions(LAYOUT, n_steps=20, contents="mixed"))
    assert plain_leaves(store.__getstate__()) == []


def damaged_arrays(state: Any) -> list[np.ndarray]:
    parts = state.values() if isinstance(state, dict) else state
    found = []
    for part in parts:
        if isinstance(part, np.ndarray):
            found += [part] if part.size else []
        elif isinstance(part, (dict, list, tuple)):
            found += damaged_arrays(part)
    return found


@settings(max_examples=100)
@given(codec=st.sampled_from(EXACT), which=st.integers(0), place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_of_any_array_is_noticed(codec: str, which: int, place: int, bit: int) -> None:
    state = pickle.loads(pickle.dumps(state_of(codec)))
    arrays = damaged_arrays(state)
    contents = arrays[which % len(arrays)].reshape(-1).view(np.uint8)
    contents[place % len(contents)] ^= 1 << bit
    with pytest.raises(CorruptFileError, match="checksum"):
        FrameStore.__new__(FrameStore).__setstate__(state)


@pytest.mark.parametrize(
    "change",
    [
        {"position": 3},
        {"full": False},
        {"checksum": 0},
        {"dropped": 1},
        {"capacity": 10**15},
        {"index": np.zeros((9, 2), dtype=">u8")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_value_is_noticed(change: dict[str, Any]) -> None:
    state = {**state_of("patch"), **change}
    with pytest.raises(CorruptFileError, match="checksum"):
        FrameStore.__new__(FrameStore).__setstate__(state)


@pytest.mark.parametrize("state", [None, 3, [], "text", {"a": 1}])
def test_a_foreign_state_is_refused(state: Any) -> None:
    with pytest.raises(CorruptFileError):
        FrameStore.__new__(FrameStore).__setstate__(state)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 1, None, "1"])
def test_another_format_is_refused(version: Any) -> None:
    with pytest.raises(
        CorruptFileError, match=rf"has format {version!r}, this version reads {FORMAT_VERSION}; load it"
    ):
        FrameStore.__new__(FrameStore).__setstate__({**state_of("patch"), "format": version})


def test_a_file_of_a_codec_that_is_not_available_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = path_of("patch+lz4").read_bytes()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lz4" else find(name, *rest))
    with pytest.raises(MissingDependencyError, match=r"codec 'patch\+lz4'"):
        pickle.loads(data)
