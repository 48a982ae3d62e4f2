"""Ctrl-C at any step of a call leaves a storage as before the call, or as after it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.interrupts import interrupt_everywhere
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage

CODE_PATHS = ("torchrl_ext/frame", "rl_ext_core/")
SIZE = 24
FIRST, SECOND, THIRD = (Videos(1, seed=seed).collect(n).reshape(-1) for seed, n in ((0, 20), (1, 7), (2, 9)))


class Case:
    """One call of a buffer to interrupt, with the expected contents before and after it.

    :param kind: ``"memory"``, ``"folder"`` or ``"shared"``
    :param path: folder for files of the case
    :param call: function of the buffer and the folder
    :param expected: function of a plain buffer with the same effect; None: no effect
    """

    def __init__(
        self, kind: str, path: Path, call: Callable[[Any, Path], Any], expected: Callable[[Any], Any] | None
    ) -> None:
        storage = FrameStorage(SIZE, storage_dir=path / "storage" if kind == "folder" else None)
        self.ours = TensorDictReplayBuffer(storage=storage, batch_size=8)
        self.before, self.after = (
            TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=8) for _ in range(2)
        )
        for buffer in (self.ours, self.before, self.after):
            buffer.extend(FIRST.clone())
        if expected is not None:
            expected(self.after)
        self.call = lambda: call(self.ours, path)

    def check(self, where: str) -> bool:
        """Check the buffer after an interrupt; return whether the call was completed."""
        storage = self.ours.storage
        assert _is_free(storage.lock), where
        after = _are_equal(self.ours, self.after)
        assert after or _are_equal(self.ours, self.before), where
        twin = self.after if after else self.before
        for buffer in (self.ours, twin):
            buffer.extend(THIRD.clone())
        assert _are_equal(self.ours, twin), where
        assert storage._columns[0].table.n_stored == len(storage), where
        if storage._folder is not None:
            storage.close()
        return after


def _is_free(lock: Any) -> bool:
    """Return whether another thread can take a lock."""
    taken = []

    def take_lock() -> None:
        """Take the lock, record that, and release it."""
        with lock:
            taken.append(True)

    thread = threading.Thread(target=take_lock, daemon=True)
    thread.start()
    thread.join(120)
    return bool(taken)


def _are_equal(ours: Any, theirs: Any) -> bool:
    """Return whether two buffers have the same length, cursor and elements."""
    if len(ours) != len(theirs) or int(ours.writer._cursor) != int(theirs.writer._cursor):
        return False
    if not len(ours):
        return True
    try:
        assert_same(ours[torch.arange(len(ours))], theirs[:])
    except AssertionError:
        return False
    return True


def _set_elements(buffer: Any, *_: Any) -> None:
    """Replace elements of a storage, one of them twice."""
    buffer.storage.set(
        torch.tensor([3, 5, 3]), FIRST[:3].set("index", torch.zeros(3, dtype=torch.int64)), set_cursor=False
    )


def _set_one_key(buffer: Any, *_: Any) -> None:
    """Replace one of the two images of an element."""
    buffer[4] = TensorDict({"pixels": SECOND["pixels"][0]})


def _load_state(buffer: Any, *_: Any) -> None:
    """Load the state of another storage."""
    buffer.storage.load_state_dict(STATE)


def _load_checkpoint(buffer: Any, path: Path) -> None:
    """Load another storage's checkpoint, which is written first if it is missing."""
    if not path.exists():
        DUMPED.dumps(path)
    buffer.storage.loads(path)


def _set_loaded(buffer: Any) -> None:
    """Store the elements that a plain buffer should contain after loading."""
    buffer.storage.set(range(20), OTHER[:20], set_cursor=False)


def _make_other_storage() -> tuple[Any, Any, Any]:
    """Return a filled storage, its state, and its elements."""
    buffer = TensorDictReplayBuffer(storage=FrameStorage(SIZE), batch_size=8)
    buffer.extend(Videos(1, seed=9).collect(20).reshape(-1))
    return buffer.storage, buffer.storage.state_dict(), buffer[:].clone()


DUMPED, STATE, OTHER = _make_other_storage()

CALLS: dict[str, Any] = {
    "extend": (lambda buffer, _: buffer.extend(SECOND.clone()), lambda buffer: buffer.extend(SECOND.clone())),
    "add": (lambda buffer, _: buffer.add(SECOND[0].clone()), lambda buffer: buffer.add(SECOND[0].clone())),
    "set": (_set_elements, _set_elements),
    "one key": (_set_one_key, _set_one_key),
    "empty": (lambda buffer, _: buffer.empty(), lambda buffer: buffer.empty()),
    "sample": (lambda buffer, _: buffer.sample(), None),
    "get": (lambda buffer, _: buffer.storage.get(("next", "pixels"))[3].sum(), None),
    "state_dict": (lambda buffer, _: buffer.state_dict(), None),
    "load_state_dict": (_load_state, _set_loaded),
    "loads": (_load_checkpoint, _set_loaded),
    "dumps": (lambda buffer, path: buffer.storage.dumps(path / "checkpoint"), None),
    "copy": (lambda buffer, _: copy.deepcopy(buffer.storage), None),
}


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["memory", "folder"])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_are_completed_or_have_no_effect(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "folder" and name in ("load_state_dict", "loads", "copy"):
        return  # a storage in a folder refuses these calls
    cases: list[Any] = []

    def prepare() -> Callable[[], Any]:
        """Make a new case, drop the earlier ones, and return the call to interrupt."""
        cases[:-1] = [None] * (len(cases) - 1)
        cases.append(Case(kind, tmp_path / str(len(cases)), *CALLS[name]))
        return cases[-1].call

    prepare()()  # compiles
    done = [cases[-1].check(where) for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=97)]
    assert done, "not interrupted at all"


@pytest.mark.sample
@pytest.mark.parametrize("every", [37, pytest.param(11, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("in_folder", [False, True])
def test_interrupted_first_elements_are_stored_or_not(in_folder: bool, every: int, tmp_path: Path) -> None:
    made: list[FrameStorage] = []

    def prepare() -> Callable[[], Any]:
        """Make an empty storage, and return a call that stores its first elements."""
        folder = tmp_path / f"storage{len(made)}" if in_folder else None
        made.append(FrameStorage(SIZE, storage_dir=folder))
        return lambda: made[-1].set(range(20), FIRST.clone())

    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        assert len(made[-1]) in (0, 20), where
        made[-1].set(range(20, 24), FIRST[:4].clone())
        made[-1].set(range(20), FIRST.clone())
        assert_same(made[-1][:].clone()[:20], FIRST.to("cpu"))
        made[-1].close()
