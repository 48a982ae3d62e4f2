"""Compilation of the kernels: once, then from a cache on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_SOURCES = (
    "_compile.py",
    "_groups.py",
    "_kernels.py",
    "_kernels_files.py",
    "_kernels_in.py",
    "_kernels_out.py",
    "_memory.py",
    "_packed.py",
    "_patch.py",
    "_pool_checks.py",
    "_pool_frames.py",
    "_pool_in.py",
    "_pool_memory.py",
    "_pool_out.py",
    "_pool_scan.py",
    "_pool_state.py",
    "_state.py",
    "_sums.py",
)


def sources_digest(folder: Path) -> str:
    """A hash of everything that ends up in the machine code."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


_DIGEST = sources_digest(Path(__file__).parent)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls: GIL released, machine code cached.

    numba's cache goes stale by the time stamp of the function's own file; but these functions inline others from other
    files, and wheels carry one fixed time stamp. So the contents of all the files decide.
    """
    compiled = njit(nogil=True, cache=True)(function)
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _DIGEST)
    return compiled
