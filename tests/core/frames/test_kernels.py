from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.frames import kernel_primitives, log_read

FOLDER = Path(kernel_primitives.__file__).parent


def test_changed_source_is_compiled_again(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    sources = sorted(path for path in FOLDER.glob("*.py") if "numba" in path.read_text())
    digests = {kernel_primitives.sources_digest(tmp_path)}
    assert digests == {kernel_primitives._DIGEST}
    for path in sources:
        with (tmp_path / path.name).open("a") as source:
            source.write("\n")
        digests.add(kernel_primitives.sources_digest(tmp_path))
    assert len(digests) == 1 + len(sources)
    assert log_read.decode_transitions._cache._cache_file._source_stamp[1] == kernel_primitives._DIGEST


BOUNDS = """
import ctypes, mmap
import numpy as np
from rl_ext_core.frames import FrameStore, Observation, StackLayout
from tests.core.frames.transitions import ReferenceStore, make_transitions

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

def guard_stacks(stacks):
    if stacks.flags.c_contiguous:
        return guarded(stacks)
    return np.moveaxis(guarded(np.ascontiguousarray(np.moveaxis(stacks, 1, -1))), -1, 1)

for shape, dtype, n_stack, axis in (
    ((4, 5, 7), "u1", 4, 0), ((5, 7, 4), "u1", 4, 2), ((6, 3, 9), "u1", 2, 0), ((3, 9, 6), "u1", 2, 2),
    ((1,), "u1", 1, 0), ((3,), "u1", 3, 0), ((4, 8, 8), "u1", 4, 0), ((8, 8, 4), "u1", 4, 2), ((2, 5), "f4", 2, 0),
    ((9, 33, 3), "u1", 3, 2), ((12, 12, 8), "u1", 4, 2), ((4, 40, 41), "u1", 4, 0), ((40, 41, 4), "u1", 4, 2),
):
    layout = StackLayout(shape, np.dtype(dtype), n_stack, axis)
    for codec, bound in (("raw", 0), ("patch", 0), ("patch", 4)):
        bound *= dtype == "u1"
        store = FrameStore(9, 2, Observation(shape, layout.dtype, codec, n_stack, bound))
        plain = ReferenceStore(9, 2, layout)
        for step in make_transitions(layout, n_steps=25, contents="mixed", odd=0.1, transposed=0.3):
            plain.append(*step)
            store.append(*map(guard_stacks, step))
        rows, envs = np.arange(18) % 9, np.arange(18) // 9
        outs = [guarded(np.zeros((18, *shape), dtype)) for _ in range(2)]
        store.get(rows, envs, *outs)
        for out, right in zip(outs, (plain.observations, plain.next_observations)):
            within = bound and np.abs(out.astype(int) - right[rows, envs].astype(int)).max() <= bound
            assert within or out.tobytes() == right[rows, envs].tobytes(), (layout, codec, bound)
"""


@pytest.mark.slow
def test_kernels_stay_within_the_arrays() -> None:
    """The arrays end at protected pages, so that any access beyond them kills the process."""
    done = subprocess.run([sys.executable, "-c", BOUNDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Tests in new processes: interrupted first use, and failures of the compilation cache.

COPY = """
import logging
import numpy as np

logging.basicConfig(format="LOG %(levelname)s %(message)s")
from rl_ext_core.frames.log_read import are_inside

assert are_inside(np.zeros(3, np.int64), np.zeros(3, np.int64), 1, 1)
from rl_ext_core.frames import log_write  # more kernels, without a second warning
print("works")
"""
NO_FOLDER = "from numba.core.caching import FunctionCache\nFunctionCache._impl_class._locator_classes = []\n"
FULL_DISK = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"


def _run(code: str, **environ: str) -> str:
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PATH": os.environ["PATH"]}
    started = [sys.executable, "-B", "-c", code]
    done = subprocess.run(started, env={**paths, **environ}, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("works\n", 0), done.stderr
    return done.stderr


def test_missing_numba_raises_with_install_command() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from rl_ext_core.frames import FrameStore, Observation\n"
        "from rl_ext_core.errors import MissingDependencyError\n"
        "try: FrameStore(4, 1, Observation((4, 9, 9), 'u1', 'raw'))\n"
        "except MissingDependencyError as error: print(error.name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "numba A store of frames needs the package 'numba', which is not installed. Install it"
    )
    assert done.stdout.endswith('rl-ext[frames]"\n')


INTERRUPTED = """
import signal
import numpy as np
from rl_ext_core.frames import FrameStore, Observation

signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt, like Ctrl-C
rng = np.random.default_rng(0)
frames = [rng.integers(1, 255, (20, 20), dtype=np.uint8) for _ in range(64)]
stacks = [np.stack(frames[start : start + 4])[None] for start in range(60)]
store, added, times = None, 0, [0.3, 0.6, 0.9, 0.2, 0.1, 0.0]
while added < 59:
    try:
        if times:
            signal.setitimer(signal.ITIMER_REAL, times.pop(0))
        store = store or FrameStore(100, 1, Observation((4, 20, 20), np.uint8, n_stack=4))
        while added < 59:
            store.append(stacks[added], stacks[added + 1])
            added = store.size
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        added = 0 if store is None else store.size
found, nexts = np.empty((2, 59, 4, 20, 20), np.uint8)
store.get(np.arange(59), np.zeros(59, np.int64), found, nexts)
assert (found == np.concatenate(stacks[:59])).all() and (nexts == np.concatenate(stacks[1:])).all()
print("works")
"""


@pytest.mark.slow
def test_interrupted_first_use_loses_nothing() -> None:
    _run(INTERRUPTED)


@pytest.mark.parametrize("before", [NO_FOLDER, pytest.param(FULL_DISK, marks=pytest.mark.slow)])
def test_missing_cache_warns_once(before: str, tmp_path: Path) -> None:
    errors = _run(before + COPY, NUMBA_CACHE_DIR=str(tmp_path))
    assert errors.count("LOG WARNING") == 1
    assert "numba cannot cache compiled functions" in errors
    assert "NUMBA_CACHE_DIR" in errors
