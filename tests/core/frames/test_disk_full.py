"""A full disk raises StorageError and leaves the store unchanged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import StorageError
from rl_ext_core.frames import StackLayout, folder
from rl_ext_core.frames import arrays as state
from rl_ext_core.frames.pool import FramePool
from rl_ext_core.frames.region import RegionFile
from tests.core.frames.disk_helpers import LAYOUT, add, check_store, open_store


def raise_disk_full(*_: Any) -> None:
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


class FailingAllocation:
    """Replacement of ``os.posix_fallocate`` that fails at its n-th call after ``left`` was set to n."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, *args: Any) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                raise_disk_full()
        self._allocate(*args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["patch", pytest.param("adaptive", marks=pytest.mark.exhaustive)])
def test_each_failed_allocation_leaves_the_store_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store, *rows = open_store(tmp_path / "a", kind, 1000)
    failing, failures = FailingAllocation(monkeypatch), 0
    for number in range(1100):
        for at in range(1, 100):
            failing.left = at
            try:
                add(store, *rows, number)
            except StorageError as error:
                failing.left, failures = 0, failures + ("No space left on device" in str(error))
                if number:
                    check_store(store, *rows, end=number)
            else:
                failing.left = 0
                break
    assert failures > 15
    check_store(store, *rows, end=1100)
    store.close()
    store, *rows = open_store(tmp_path / "a", kind, 1000)
    check_store(store, *rows, end=1100)
    assert store.recovered == (1000, 0, 0)
    store.close()


def test_failed_write_of_settings_leaves_previous_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, *rows = open_store(tmp_path / "a", "adaptive", 300)
    first = store.layout
    monkeypatch.setattr(folder, "write_json", raise_disk_full)
    for number in range(100):
        add(store, *rows, number)
    assert store.layout == first != LAYOUT
    assert [path.name for path in (tmp_path / "a").glob("frames-*")] == ["frames-0"]
    with pytest.raises(StorageError, match=r"cannot write .*store\.json: No space left on device"):
        open_store(tmp_path / "b", "adaptive", 300)
    assert not (tmp_path / "b").exists()
    monkeypatch.undo()
    for number in range(100, 300):
        add(store, *rows, number)
    assert store.layout == LAYOUT
    store.close()
    store, *rows = open_store(tmp_path / "a", "adaptive", 300)
    check_store(store, *rows, end=300)
    store.close()


def test_file_with_holes_is_allocated_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, *_rows = open_store(tmp_path / "a", "patch", 5000, count=300)
    store.close()
    path = tmp_path / "a" / "row-number"
    contents = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(len(contents))
        file.write(contents[:65536])  # the rest is a hole

    monkeypatch.setattr(os, "posix_fallocate", raise_disk_full)
    with pytest.raises(StorageError, match=r"cannot write .* bytes to .*row-number: No space left"):
        open_store(tmp_path / "a", "patch", 5000)


def test_reserved_memory_suffices_for_requested_stacks(tmp_path: Path) -> None:
    pool = FramePool(2_000_000, StackLayout((4, 12, 9), np.dtype(np.uint8), 4, 0), file=RegionFile(tmp_path / "frames"))
    memory, head = pool._memory, pool._pool.head
    for pages in (1, 2, 3, 5, 8, 13, 21):
        for grains in range(8 * 4096 * pages - 20, 8 * 4096 * pages + 20):
            head[state.GRAINS] = grains - 2 * memory.per_stack[1]
            memory.reserve_stacks(2)  # if it reserved too little, callers would retry forever
            assert (memory.capacity >= head[list(state._RESERVED_KINDS)] + 2 * memory.per_stack).all(), grains
