"""A disk that is full leaves the store as it was, with an error of ours."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_ext_core.errors import StorageError
from rl_ext_core.frames import FrameStore, folder
from tests.core.frames.disk_toys import LAYOUT, N_ENVS, add, check, open_store


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["patch", "patch+lz4", "raw", "adaptive"])
def test_a_file_that_may_not_grow(tmp_path: Path, kind: str) -> None:
    store, *rows = open_store(tmp_path / "a", kind, 20_000)
    number, failures = 0, 0
    for limit in (240_000, 300_000, 400_000):
        with files_of_at_most(limit):
            while True:
                try:
                    add(store, *rows, number)
                except StorageError as error:
                    refusal = str(error)
                    break
                number += 1
            failures += refusal.startswith("cannot") and str(tmp_path) in refusal
            for _ in range(3):
                with pytest.raises(StorageError):
                    add(store, *rows, number)
            check(store, *rows, end=number)
    assert failures == 3
    assert number > 200
    for _ in range(50):
        add(store, *rows, number)
        number += 1
    store.close()
    store, *rows = open_store(tmp_path / "a", kind, 20_000)
    check(store, *rows, end=number)
    store.close()


class Failing:
    """``os.posix_fallocate`` that fails at the n-th call from when it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, *args: Any) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
        self._allocate(*args)


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("kind", ["patch", "raw", "patch+lz4", "adaptive"])
def test_every_growth_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store, *rows = open_store(tmp_path / "a", kind, 3000)
    failing, failures = Failing(monkeypatch), 0
    for number in range(3100):
        for at in range(1, 100):
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
    assert failures > 20
    check(store, *rows, end=3100)
    store.close()
    store, *rows = open_store(tmp_path / "a", kind, 3000)
    check(store, *rows, end=3100)
    assert store.recovered == (3000, 0, 0)
    store.close()


def test_row_arrays_take_room_as_they_are_needed(tmp_path: Path) -> None:
    store, *rows = open_store(tmp_path / "a", "patch", 1_000_000)
    for number in range(300):
        add(store, *rows, number)
    store.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}  # what cp and sync take
    assert 300 * 8 <= sizes["row-number"] - 65536 <= 2 * 300 * 8 + 4096
    assert sum(sizes.values()) < 1e6
    copied = shutil.copytree(tmp_path / "a", tmp_path / "copied")
    store, *rows = open_store(copied, "patch", 1_000_000)
    check(store, *rows, end=300)
    store.close()


def test_a_folder_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(StorageError):
        FrameStore(100, N_ENVS, LAYOUT, storage_dir=tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_description_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store, *rows = open_store(tmp_path / "a", "adaptive", 300)
    first = store.layout
    monkeypatch.setattr(folder, "write_json", full)
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
    check(store, *rows, end=300)
    store.close()


def test_a_copy_with_holes_has_room_before_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, *rows = open_store(tmp_path / "a", "patch", 5000)
    for number in range(300):
        add(store, *rows, number)
    store.close()
    path = tmp_path / "a" / "row-number"
    contents = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(len(contents))
        file.write(contents[:65536])  # the rest is a hole

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cannot write .* bytes to .*row-number: No space left"):
        open_store(tmp_path / "a", "patch", 5000)
