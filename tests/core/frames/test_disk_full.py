"""A disk that is full leaves the store as it was, with an error of ours."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import StorageError
from rl_ext_core.frames import FrameStore, arena, ring
from rl_ext_core.frames.disk import _files, _store
from tests.core.frames.disk_toys import LAYOUT, N_ENVS, add, check, open_store


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["patch", "patch+lz4", "raw", "adaptive"])
def test_a_file_that_may_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(arena, "_SLAB_BYTES", 3000)
    store, *rows = open_store(tmp_path / "a", kind, 5000)
    number, failures = 0, 0
    for limit in (45_000, 90_000, 150_000):
        with files_of_at_most(limit):
            while True:
                try:
                    add(store, *rows, number)
                except StorageError as error:
                    refusal = str(error)
                    break
                number += 1
            failures += refusal.startswith("cannot write") and str(tmp_path) in refusal
            for _ in range(3):
                with pytest.raises(StorageError):
                    add(store, *rows, number)
            check(store, *rows, end=number)
    assert failures == 3
    assert number > 400
    for _ in range(50):
        add(store, *rows, number)
        number += 1
    store.close()
    store, *rows = open_store(tmp_path / "a", kind, 5000)
    check(store, *rows, end=number)
    store.close()


class Failing:
    """``os.pwrite`` that writes half and then fails, at the n-th call from when it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self._half = 0, False
        self._write = _files.os.pwrite
        monkeypatch.setattr(_files.os, "pwrite", self)

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if self._half:
            self._half = False
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.left:
            self.left -= 1
            if not self.left:
                self._half = True
                return self._write(fd, data[: len(data) // 2], offset)
        return self._write(fd, data, offset)


@pytest.mark.parametrize("kind", ["patch", "raw", "adaptive"])
def test_every_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(arena, "_SLAB_BYTES", 900)
    monkeypatch.setattr(_store, "_COMPACT_FROM", 1500)
    monkeypatch.setattr(ring, "_MOST_UNSEALED", 15)
    store, *rows = open_store(tmp_path / "a", kind, 40)
    failing, failures = Failing(monkeypatch), 0
    for number in range(110):
        for at in range(
            1 + number % 3, 100
        ):  # the first ones may be of a journal that is written anew, at another time
            failing.left = at
            try:
                add(store, *rows, number)
            except StorageError as error:
                failing.left, failures = 0, failures + ("No space left on device" in str(error))
                if number:
                    check(store, *rows, end=number)
            else:
                failing.left = 0
                break
    assert failures > 40
    blocks = (store._inner if kind == "adaptive" else store)._writer.blocks
    assert sum(blocks._arena._live) == len(blocks.records())  # nothing that failed holds its place
    check(store, *rows, end=110)
    store.close()
    store, *rows = open_store(tmp_path / "a", kind, 40)
    check(store, *rows, end=110)
    assert store.recovered == (40, 0, 0)
    store.close()


def test_row_arrays_reserve_their_room(tmp_path: Path) -> None:
    store = FrameStore(100_000, N_ENVS, LAYOUT, storage_dir=tmp_path / "a")
    with files_of_at_most(300_000), pytest.raises(StorageError, match=r"reserve 800,000 bytes for .*row-number"):
        store.rows("number", (), np.int64)
    assert store.rows("number", (), np.int64).shape == (100_000,)
    assert (tmp_path / "a" / "row-number").stat().st_blocks * 512 >= 800_000
    store.close()


def test_a_folder_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(StorageError):
        FrameStore(100, N_ENVS, LAYOUT, storage_dir=tmp_path / "a")
    assert not list(tmp_path.iterdir())
