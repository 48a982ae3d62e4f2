"""The compiled loops: compiled anew when they change, and never out of bounds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.frames import decode, machine, patch
from rl_ext_core.frames.geometry import ENTRY_HEADER, SLACK
from rl_ext_core.frames.region import address_of

FOLDER = Path(machine.__file__).parent


def test_a_changed_source_is_compiled_anew(tmp_path: Path) -> None:
    sources = sorted(FOLDER.glob("*.py"))
    for path in sources:
        shutil.copy(path, tmp_path)
    digests = {machine.sources_digest(tmp_path)}
    assert digests == {machine._DIGEST}
    for path in sources:
        with (tmp_path / path.name).open("a") as source:
            source.write("\n")
        digests.add(machine.sources_digest(tmp_path))
    assert len(digests) == 1 + len(sources)
    assert decode.gather._cache._cache_file._source_stamp[1] == machine._DIGEST


def runs_of_bytes() -> st.SearchStrategy[bytes]:
    """Frames in which long runs are equal, long runs differ, and both meet at any place."""
    piece = st.tuples(st.sampled_from([b"\0", b"\1", b"\xff"]), st.integers(1, 700)).map(lambda p: p[0] * p[1])
    return st.lists(st.one_of(piece, st.binary(min_size=1, max_size=40)), min_size=1, max_size=8).map(b"".join)


@pytest.mark.slow
@settings(max_examples=300)
@given(before=runs_of_bytes(), after=runs_of_bytes())
def test_a_patch_makes_the_frame_after_of_the_frame_before(before: bytes, after: bytes) -> None:
    n_bytes = min(len(before), len(after))
    old, new = (np.frombuffer(part[:n_bytes] + bytes(SLACK), dtype=np.uint8).copy() for part in (before, after))
    guard = 64
    entry, work, scratch = (np.full(n_bytes + SLACK + guard, 0xA5, dtype=np.uint8) for _ in range(3))
    where = [np.uint64(address_of(array)) for array in (old, new, entry, scratch, work)]
    size = patch.append_entry(where[0], where[1], n_bytes, where[2], where[3], None)
    assert size <= n_bytes + ENTRY_HEADER
    frame, behind = patch.apply_entry(where[0], where[2], n_bytes, where[4])
    assert behind == where[2] + size
    made = {int(where[0]): old, int(where[4]): work, int(where[2]) + ENTRY_HEADER: entry[ENTRY_HEADER:]}[int(frame)]
    assert made[:n_bytes].tobytes() == after[:n_bytes]
    assert old[:n_bytes].tobytes() == before[:n_bytes]
    for array in (entry, work, scratch):
        assert (array[n_bytes + SLACK :] == 0xA5).all()


BOUNDS = """
import ctypes, mmap
import numpy as np
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.testing import PlainStore, check_contents, transitions

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
pages = []

def guarded(like):
    size = -(-like.nbytes // page) * page
    region = mmap.mmap(-1, size + page)
    whole = np.frombuffer(region, dtype=np.uint8)
    assert not libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), page, 0)
    pages.append(region)
    array = whole[size - like.nbytes : size].view(like.dtype).reshape(like.shape)
    array[:] = like
    return array

def arranged(stacks):
    if stacks.flags.c_contiguous:
        return guarded(stacks)
    return np.moveaxis(guarded(np.ascontiguousarray(np.moveaxis(stacks, 1, -1))), -1, 1)

for shape, dtype, n_stack, axis in (
    ((4, 5, 7), "u1", 4, 0), ((5, 7, 4), "u1", 4, 2), ((6, 3, 9), "u1", 2, 0), ((3, 9, 6), "u1", 2, 2),
    ((1,), "u1", 1, 0), ((3,), "u1", 3, 0), ((4, 8, 8), "u1", 4, 0), ((8, 8, 4), "u1", 4, 2), ((2, 5), "f4", 2, 0),
    ((9, 33, 3), "u1", 3, 2), ((12, 12, 8), "u1", 4, 2), ((4, 40, 41), "u1", 4, 0), ((40, 41, 4), "u1", 4, 2),
):
    layout = StackLayout(shape, np.dtype(dtype), n_stack, axis)
    for codec, bound in (("raw", 0), ("patch", 0), ("patch+lz4", 0), ("patch", 4), ("patch+lz4", 4)):
        bound *= dtype == "u1"
        store = FrameStore(9, 2, layout, codec=codec, block_length=4, max_error=bound)
        plain = PlainStore(9, 2, layout)
        for step in transitions(layout, n_steps=25, contents="mixed", odd=0.1, transposed=0.3):
            plain.append(*step)
            store.append(*map(arranged, step))
        rows, envs = np.arange(18) % 9, np.arange(18) // 9
        outs = [guarded(np.zeros((18, *shape), dtype)) for _ in range(2)]
        store.get(rows, envs, *outs)
        for out, right in zip(outs, (plain.observations, plain.next_observations)):
            within = bound and np.abs(out.astype(int) - right[rows, envs].astype(int)).max() <= bound
            assert within or out.tobytes() == right[rows, envs].tobytes(), (layout, codec, bound)
"""


@pytest.mark.slow
def test_nothing_is_read_or_written_beyond_what_the_caller_gave() -> None:
    """In a process of its own, because what is behind the arrays there kills the one that touches it."""
    done = subprocess.run([sys.executable, "-c", BOUNDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
