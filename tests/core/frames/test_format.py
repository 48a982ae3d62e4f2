"""Checkpoints and folders: released formats stay readable, damaged and foreign files are rejected."""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import re
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import CorruptFileError, MissingDependencyError, StorageError
from rl_ext_core.frames import FrameStore, StackLayout, folder, salvage
from rl_ext_core.frames.checkpoint import FORMAT_VERSION
from rl_ext_core.testing import LAYOUTS, ReferenceStore, check_contents, make_transitions
from tests.core.frames import make_fixtures as fixtures
from tests.core.frames.disk_helpers import add, append_all, check_store, limit_file_size, open_store, read_all
from tests.core.frames.make_fixtures import (
    ENCODINGS,
    EXACT,
    KINDS,
    LAYOUT,
    N_ENVS,
    first_transitions,
    make_filled_store,
    path_of,
)

# Checksums of the decoded bytes. Those of JPEG depend on the library.
DECODED = {
    ("patch-lossy", "store"): 54609382,
    ("patch-lossy", "adaptive"): 3313217912,
}
GRAY = LAYOUTS[0]


@pytest.mark.skipif(np.__version__ < "2", reason="the files were written with NumPy 2")
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_this_format_is_readable_and_reproducible(encoding: str, kind: str) -> None:
    capacity, n_steps = KINDS[kind]
    data = path_of(encoding, kind).read_bytes()
    assert len(data) < 65_000
    store, plain = pickle.loads(data), ReferenceStore(capacity, N_ENVS, LAYOUT)
    append_all([plain], first_transitions(n_steps))
    made, true = read_all(store, plain)
    off = np.abs(made - true)
    if encoding == "jpeg":
        assert off.mean() < 6
    else:
        assert off.max() == ENCODINGS[encoding].get("max_error", 0)
        right = DECODED.get((encoding, kind), zlib.crc32(true.astype(np.uint8).tobytes()))
        assert zlib.crc32(made.astype(np.uint8).tobytes()) == right
    append_all([store, plain], make_transitions(LAYOUT, n_steps=30, contents="mixed"))
    if encoding in EXACT:
        check_contents(store, plain)
    first = pickle.dumps(make_filled_store(encoding, kind), protocol=5)
    dirt = [np.full(size, 0xA5, dtype=np.uint8) for size in range(30, 9000, 7)]
    del dirt
    assert pickle.dumps(make_filled_store(encoding, kind), protocol=5) == first


def test_checkpoint_of_numpy_2_asks_for_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiarray", "numeric"):  # which NumPy 1 lacks
        monkeypatch.setitem(sys.modules, f"numpy._core.{name}", None)
    monkeypatch.setattr(np, "__version__", "1.26.4")
    with pytest.raises(MissingDependencyError, match=r"was written with NumPy 2.* pip install 'numpy>=2'"):
        FrameStore.load(path_of("raw", "store"))


def test_fixtures_have_current_formats() -> None:
    assert (FORMAT_VERSION, folder.FORMAT_VERSION) == (6, 8)


@pytest.mark.parametrize("kind", fixtures.FOLDERS)
def test_folder_of_this_format_is_readable(tmp_path: Path, kind: str) -> None:
    capacity, n_steps = fixtures.FOLDER_CAPACITY, fixtures.FOLDER_STEPS
    zipfile.ZipFile(fixtures.path_of_folder(kind)).extractall(tmp_path)
    store, *rows = open_store(tmp_path, kind, capacity, **fixtures.FOLDERS[kind])
    assert store.recovered == (capacity, 0, 0)
    check_store(store, *rows, end=n_steps)
    for number in range(n_steps, n_steps + 50):
        add(store, *rows, number)
    check_store(store, *rows, end=n_steps + 50)
    store.close()


def test_folder_of_a_later_format_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder, "FORMAT_VERSION", 9)
        open_store(tmp_path / "a", "raw", 30)[0].close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for opened in (lambda: open_store(tmp_path / "a", "raw", 30), lambda: salvage(tmp_path / "a")):
        with pytest.raises(CorruptFileError, match="has format 9, but this version reads 8; use the version"):
            opened()
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}


@functools.cache
def state_of(codec: str) -> dict[str, Any]:
    """Return the pickled state of the filled store of a codec, computed once."""
    return make_filled_store(codec, "store").__getstate__()


def flatten_state(value: Any, where: str = "state") -> dict[str, Any]:
    """Return the leaves of a nested state by path."""
    if isinstance(value, (dict, list, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, part in parts for key, leaf in flatten_state(part, f"{where}[{name!r}]").items()}
    return {where: value}


@pytest.mark.parametrize("codec", EXACT)
def test_state_contains_only_arrays_and_plain_values(codec: str) -> None:
    """Pickled classes and NumPy scalars would depend on versions."""
    store = FrameStore(np.int64(5), np.int64(2), LAYOUT, codec=codec)
    append_all((store,), make_transitions(LAYOUT, n_steps=20, contents="mixed"))
    for state in (state_of(codec), store.__getstate__()):
        assert {type(leaf) for leaf in flatten_state(state).values()} <= {int, bool, str, np.ndarray}


@settings(max_examples=100)
@given(codec=st.sampled_from(EXACT), which=st.integers(0), place=st.integers(0), bit=st.integers(0, 7))
def test_flipped_bit_in_any_array_is_detected(codec: str, which: int, place: int, bit: int) -> None:
    state = pickle.loads(pickle.dumps(state_of(codec)))
    arrays = [leaf for leaf in flatten_state(state).values() if isinstance(leaf, np.ndarray) and leaf.size]
    contents = arrays[which % len(arrays)].reshape(-1).view(np.uint8)
    contents[place % len(contents)] ^= 1 << bit
    with pytest.raises(CorruptFileError, match="checksum"):
        FrameStore.__new__(FrameStore).__setstate__(state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"position": 3}, "checksum"), ({"full": False}, "checksum"), ({"checksum": 0}, "checksum")),
        *(({"dropped": 1}, "checksum"), ({"capacity": 10**15}, "checksum")),
        ({"index": np.zeros((9, 2), dtype=">u8")}, "checksum"),
        *(
            ({"format": version}, rf"has format {version!r}, but this version reads {FORMAT_VERSION}; use the version")
            for version in (FORMAT_VERSION + 1, 1, None, "1")
        ),
        *((state, None) for state in (None, 3, [], "text")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_state_is_rejected(change: Any, says: str | None) -> None:
    state = {**state_of("patch"), **change} if isinstance(change, dict) else change
    with pytest.raises(CorruptFileError, match=says):
        FrameStore.__new__(FrameStore).__setstate__(state)


def test_checkpoint_of_missing_codec_names_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    data = pickle.dumps(make_filled_store("jpeg", "store"))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "simplejpeg" else find(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match="codec 'jpeg'"):
        pickle.loads(data)


# ``save`` and ``load`` use one file and no copy in memory.


@pytest.mark.parametrize(
    ("codec", "kind", "where"),
    [("raw", "store", "memory"), ("patch", "adaptive", "disk"), ("patch", "store", "disk")],
)
def test_loaded_store_equals_saved_store(tmp_path: Path, codec: str, kind: str, where: str) -> None:
    for n_steps in (0, 200):
        options = {"storage_dir": tmp_path / f"folder{n_steps}"} if where == "disk" else {}
        plain = ReferenceStore(60, 2, GRAY)
        if kind == "adaptive":
            store: Any = FrameStore.adaptive(60, 2, GRAY.shape, np.uint8, codec=codec, **options)
        else:
            store = FrameStore(60, 2, GRAY, codec=codec, **options)
        append_all((store, plain), make_transitions(GRAY, n_steps=n_steps, contents="mixed", odd=0.05))
        store.save(tmp_path / "checkpoint")
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["checkpoint"]
        loaded = FrameStore.load(tmp_path / "checkpoint")
        append_all((plain, store, loaded), make_transitions(GRAY, n_steps=40, contents="mixed", seed=1))
        for each in (store, loaded):
            check_contents(each, plain)
        store.close()


class CountingFile(io.RawIOBase):
    """File that counts the bytes written to it."""

    written = 0

    def write(self, data: Any) -> int:
        self.written += memoryview(data).nbytes
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True


PEAK = """
import resource, sys
from pathlib import Path
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.store import load_kernels

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

load_kernels()
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = resident()
loaded = FrameStore.load(sys.argv[1])
(peak,) = [line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM")]
print(loaded.nbytes, resident() - before, int(peak) * 1024 - before)
"""


@pytest.mark.slow
def test_save_and_load_make_no_copy_in_memory(tmp_path: Path) -> None:
    layout = StackLayout((2, 64, 64), np.dtype(np.uint8), 2, 0)
    large = FrameStore(6000, 1, layout)
    noise = np.random.default_rng(0).integers(256, size=(3000, 64, 64), dtype=np.uint8)
    for step in range(7000):
        frames = noise[[(step + age) * 7 % 3000 for age in range(3)]]
        large.append(frames[None, :2], frames[None, 1:])
    file = CountingFile()
    tracemalloc.start()
    try:
        large.save(file)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 16e6 < file.written < 1.05 * large.nbytes  # as large as the store
    assert peak < 0.05 * file.written
    large.save(tmp_path / "checkpoint")
    command = [sys.executable, "-c", PEAK, tmp_path / "checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    n_bytes, grown, most = map(int, done.stdout.split())
    assert n_bytes > 16e6
    assert grown < 1.2 * n_bytes + 3e6
    assert most < 1.3 * n_bytes + 6e6


class Evil:
    """Object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps([1]), pickle.dumps(Evil())], ids=str)
def test_foreign_file_is_rejected(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptFileError, match=re.escape(f"{tmp_path}/file ")):
        FrameStore.load(tmp_path / "file")
    assert capsys.readouterr().out == ""


def test_failed_save_leaves_the_previous_file(tmp_path: Path) -> None:
    store = make_filled_store("raw", "store")
    store.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    with limit_file_size(500), pytest.raises(StorageError, match=r"cannot write .*file"):
        store.save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before
