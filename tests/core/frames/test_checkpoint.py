"""Checkpoints: a store in one file, written and read without another copy in memory, and checked when it is read."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.testing import LAYOUTS, PlainStore, check_contents, transitions
from tests.core.frames.disk_toys import append_all
from tests.core.frames.test_disk_full import files_of_at_most

GREY = LAYOUTS[0]
CODECS = ["raw", "patch", "patch+lz4"]


def filled(kind: str, codec: str, n_steps: int, **options: Any) -> tuple[Any, PlainStore]:
    plain = PlainStore(60, 2, GREY)
    if kind == "adaptive":
        store: Any = FrameStore.adaptive(60, 2, GREY.shape, np.uint8, codec=codec, **options)
    else:
        store = FrameStore(60, 2, GREY, codec=codec, block_length=4, **options)
    append_all((store, plain), transitions(GREY, n_steps=n_steps, contents="mixed", odd=0.05))
    return store, plain


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["store", "adaptive"])
@pytest.mark.parametrize("n_steps", [0, 1, 50, 200])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_was_saved_is_loaded(tmp_path: Path, codec: str, kind: str, n_steps: int, where: str) -> None:
    options = {"storage_dir": tmp_path / "folder"} if where == "disk" else {}
    store, plain = filled(kind, codec, n_steps, **options)
    store.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["checkpoint"]
    stream = io.BytesIO()
    store.save(stream)
    loaded = [type(store).load(tmp_path / "checkpoint"), type(store).load(io.BytesIO(stream.getvalue()))]
    for transition in transitions(GREY, n_steps=40, contents="mixed", seed=1):
        plain.append(*transition)
        for each in (store, *loaded):
            each.append(*transition)
    for each in (store, *loaded):
        check_contents(each, plain)
    store.close()
    again = type(store).load(tmp_path / "checkpoint")
    again.save(tmp_path / "second")
    other = type(store).load(tmp_path / "second")
    append_all((other,), transitions(GREY, n_steps=40, contents="mixed", seed=1))
    if n_steps == 200:
        check_contents(other, plain)


class Counted(io.RawIOBase):
    """Counts what is written to it."""

    written = 0

    def write(self, data: Any) -> int:
        self.written += memoryview(data).nbytes
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True


@pytest.fixture(scope="module")
def large() -> FrameStore:
    layout = StackLayout((2, 64, 64), np.dtype(np.uint8), 2, 0)
    store = FrameStore(6000, 1, layout, codec="patch+lz4", block_length=8)
    noise = np.random.default_rng(0).integers(256, size=(3000, 64, 64), dtype=np.uint8)
    for step in range(7000):
        frames = noise[[(step + age) * 7 % 3000 for age in range(3)]]
        store.append(frames[None, :2], frames[None, 1:])
    return store


def test_a_file_is_as_large_as_what_is_held(large: FrameStore) -> None:
    file = Counted()
    tracemalloc.start()
    try:
        large.save(file)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 16e6 < file.written < 1.05 * large.nbytes
    assert peak < 0.05 * file.written


PEAK = """
import resource, sys
from pathlib import Path
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.store import load_kernels
from tests.core.frames.disk_toys import append_all

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

load_kernels()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
before = resident()
loaded = FrameStore.load(sys.argv[1])
(peak,) = [line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM")]
print(loaded.nbytes, resident() - before, int(peak) * 1024 - before)
"""


def test_loading_takes_no_second_copy(large: FrameStore, tmp_path: Path) -> None:
    large.save(tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "checkpoint"], capture_output=True, text=True, check=True
    )
    n_bytes, grown, most = map(int, done.stdout.split())
    assert n_bytes > 16e6
    assert grown < 1.2 * n_bytes + 3e6
    assert most < 1.3 * n_bytes + 6e6


class Evil:
    """Unpickled, it would run a program."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps([1]), pickle.dumps(Evil())], ids=str)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"{tmp_path}/file .*"):
        FrameStore.load(tmp_path / "file")
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    store, plain = filled("store", "raw", 50)
    store.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    with files_of_at_most(5000), pytest.raises(StorageError, match=r"cannot write .*file"):
        store.save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before
    check_contents(store, plain)
