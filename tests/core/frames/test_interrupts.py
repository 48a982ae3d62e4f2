"""Ctrl-C at any step of a call leaves a store as before or as after the call."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.frames import FrameStore
from tests.core.frames.disk_helpers import LAYOUT, N_ENVS, transition
from tests.interrupts import interrupt_everywhere

CODE_PATHS = ("rl_ext_core/frames/", "rl_ext_core/_interrupts.py")
CAPACITY = 12
NUMBERS = {(before[0].tobytes(), after[0].tobytes()): n for n in range(60) for before, after in [transition(n)]}


def make_store(kind: str, folder: Path | None) -> Any:
    """Create an empty store in memory or in a folder."""
    if kind == "adaptive":
        return FrameStore.adaptive(
            CAPACITY, N_ENVS, LAYOUT.shape, np.uint8, storage_dir=folder, resume=folder is not None
        )
    return FrameStore(CAPACITY, N_ENVS, LAYOUT, codec=kind, storage_dir=folder, resume=folder is not None)


def append_numbered(store: Any, *numbers: int) -> Any:
    """Append the transitions with these numbers, and return the store."""
    for number in numbers:
        store.append(*transition(number))
    return store


def read_numbers(store: Any) -> list[int]:
    """Read all transitions in another thread, and return their numbers."""
    found: list[int] = []

    def read() -> None:
        """Append the number of each stored transition to the result."""
        rows = (store.first + np.arange(store.size)) % CAPACITY
        outs = [np.empty((len(rows), N_ENVS, *LAYOUT.shape), dtype=np.uint8) for _ in range(2)]
        for env in range(N_ENVS):
            parts = [np.empty((len(rows), *LAYOUT.shape), dtype=np.uint8) for _ in outs]
            store.get(rows, np.full(len(rows), env), *parts)
            for out, part in zip(outs, parts, strict=True):
                out[:, env] = part
        for before, after in zip(*outs, strict=True):
            number = NUMBERS[before[0].tobytes(), after[0].tobytes()]
            assert (before == transition(number)[0]).all()
            assert (after == transition(number)[1]).all()
            found.append(number)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive(), "the store is still locked"
    assert len(found) == store.size
    return found


def save_to_folder(store: Any, folder: Path) -> None:
    """Save a store to a file in this folder."""
    store.save(folder / "saved")


# Calls, and the number of transitions before them. The ring is full with 12 transitions. An adaptive store chooses its
# encoding after 8 and 16 of them. Every fourth frame starts a block.
CALLS: dict[str, tuple[Callable[[Any, Path], Any], int]] = {
    "append": (lambda store, _: append_numbered(store, 30), 5),
    "append to a block that is full": (lambda store, _: append_numbered(store, 30), 7),
    "append over the oldest": (lambda store, _: append_numbered(store, 30), 15),
    "stage and commit": (lambda store, _: store.commit(store.stage(*transition(30))), 15),
    "get": (lambda store, _: read_first_env(store), 14),
    "drop_oldest": (lambda store, _: store.drop_oldest(5), 14),
    "drop_newest": (lambda store, _: store.drop_newest(3), 14),
    "clear": (lambda store, _: store.clear(), 14),
    "free_stream_buffers": (lambda store, _: store.free_stream_buffers(), 14),
    "flush": (lambda store, _: store.flush(), 14),
    "save": (save_to_folder, 14),
    "save to an open file": (lambda store, _: store.save(io.BytesIO()), 14),
}


def read_first_env(store: Any) -> None:
    """Read all transitions of the first environment."""
    rows = np.arange(store.size)
    store.get(rows, np.zeros_like(rows), np.empty((len(rows), *LAYOUT.shape), dtype=np.uint8))


EVERY = [pytest.param(1, marks=pytest.mark.exhaustive), 31]


@pytest.mark.sample(ci=20)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", ["patch", "adaptive", "in a folder", "adaptive in a folder"])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_leaves_state_before_or_after(name: str, kind: str, every: int, tmp_path: Path) -> None:
    call, there = CALLS[name]
    number, stores = 0, []
    codec = "adaptive" if kind.startswith("adaptive") else "patch"

    def prepare() -> Callable[[], Any]:
        """Create a filled store, and return the call that is to be interrupted."""
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        store = append_numbered(make_store(codec, folder / "store" if "folder" in kind else None), *range(there))
        folder.mkdir(exist_ok=True)
        stores[:] = [(store, folder)]  # replaces the previous store, because an exhaustive run makes thousands
        return lambda: call(store, folder)

    before = read_numbers(stores[-1][0]) if prepare() else []
    call(*stores[-1])
    after = read_numbers(stores[-1][0])
    saved_or_not = set()
    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        store, folder = stores[-1]
        found = read_numbers(store)
        assert found in (before, after), where
        saved = folder / "saved"
        assert {path.name for path in folder.iterdir()} <= {"saved", "store"}, where
        saved_or_not.add(saved.exists())
        if saved.exists():
            assert read_numbers(type(store).load(saved)) == before, where
        append_numbered(store, 40, 41, 42, 43, 44)  # the store can still be used
        found = [*found, 40, 41, 42, 43, 44][-CAPACITY:]
        assert read_numbers(store) == found, where
        if "folder" in kind:
            store.close()
            store = make_store(codec, folder / "store")
            assert read_numbers(store) == found, where
            store.close()
    assert number > 2, "nothing was interrupted"
    assert True not in saved_or_not or name == "save"


@pytest.mark.sample(ci=4)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", ["adaptive", "patch"])
@pytest.mark.parametrize("name", ["open", "close", "make"])
def test_interrupted_open_or_close_leaves_a_usable_folder(name: str, kind: str, every: int, tmp_path: Path) -> None:
    number, there, opened = 0, [] if name == "make" else list(range(2, 14)), []

    def prepare() -> Callable[[], Any]:
        """Return a call that creates, opens or closes a store."""
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        if name != "make":
            store = append_numbered(make_store(kind, folder), *range(14))
            if name == "close":
                return store.close  # type: ignore[no-any-return]
            store.close()
        return lambda: opened.append(make_store(kind, folder))

    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        if opened:
            opened.pop().close()
        store = make_store(kind, tmp_path / str(number))
        assert read_numbers(store) == there, where
        append_numbered(store, 40, 41)
        store.close()
        store = make_store(kind, tmp_path / str(number))
        assert read_numbers(store) == [*there, 40, 41][-CAPACITY:], where
        store.close()


@pytest.mark.parametrize("kind", ["patch", "adaptive"])
def test_interrupted_load_can_be_repeated(kind: str, tmp_path: Path) -> None:
    store = append_numbered(make_store(kind, None), *range(14))
    store.save(tmp_path / "saved")
    for where in interrupt_everywhere(
        lambda: lambda: type(store).load(tmp_path / "saved"), code_paths=CODE_PATHS, every=211
    ):
        assert read_numbers(type(store).load(tmp_path / "saved")) == read_numbers(store), where
