"""Names of codecs, the checks of ``rl_ext_core.testing``, and missing packages."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import FrameStore, Observation, StackLayout
from rl_ext_core.testing import CONTENTS, ConformanceError, check_frame_store
from tests.core.frames.disk_helpers import adaptive_store, make_store


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["patch", pytest.param("raw", marks=pytest.mark.exhaustive), "adaptive"])
def test_store_conforms(codec: str) -> None:
    def make_tested(capacity: int, n_envs: int, layout: StackLayout) -> FrameStore:
        """Create the store under test."""
        if codec == "adaptive":
            return adaptive_store(capacity, n_envs, layout.shape, layout.dtype)
        return make_store(capacity, n_envs, layout, codec=codec)

    check_frame_store(make_tested, contents=("mixed",) if codec == "adaptive" else CONTENTS)


class FaultyStore(FrameStore):
    """Store with the fault that ``fault`` names."""

    fault = ""

    def __init__(self, capacity: int, n_envs: int, layout: StackLayout, *, fault: str) -> None:
        observation = Observation(layout.shape, layout.dtype, "raw", layout.n_stack, axis=layout.axis)
        super().__init__(capacity, n_envs, observation)
        self.fault = fault

    def get(self, rows: Any, envs: Any, observations: Any, next_observations: Any = None, **options: Any) -> None:
        """Read transitions, with wrong results if the fault is "next" or "threads"."""
        super().get(rows, envs, observations, next_observations, **options)
        if self.fault == "next" and next_observations is not None:
            next_observations[-1, ..., -1] = 3
        if self.fault == "threads" and options.get("num_threads", 1) > 1:
            observations[:] = observations[::-1].copy()

    @property
    def size(self) -> int:
        """Number of transitions, one too many if the fault is "size"."""
        return super().size + (self.fault == "size")

    @property
    def nbytes(self) -> int:
        """Memory in use, which grows with each added frame if the fault is "leak"."""
        return super().nbytes + (self.seen * 5000 if self.fault == "leak" else 0)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("next", "next observation of row"),
        ("threads", "num_threads=2"),
        ("size", "size is"),
        ("leak", "nbytes grew to"),
    ],
)
def test_check_frame_store_finds_faults(fault: str, text: str) -> None:
    factory = functools.partial(FaultyStore, fault=fault)
    with pytest.raises(ConformanceError, match=text):
        check_frame_store(factory, contents=("sparse",), label="faulty")


def test_missing_numba_raises_with_install_command() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from rl_ext_core.frames import FrameStore, Observation\n"
        "from rl_ext_core.errors import MissingDependencyError\n"
        "try: FrameStore(4, 1, Observation((4, 9, 9), 'u1', 'raw'))\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("A store of frames needs the package 'numba', which is not installed. Install it")
    assert done.stdout.endswith('rl-ext[frames]"\n')


@pytest.mark.parametrize("codec", ["auto", "patch+lz4", "zstd"])
def test_unknown_codecs_are_refused(codec: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is unknown; expected one of 'patch', 'raw', 'jpeg'"):
        adaptive_store(4, 1, (4, 9, 9), np.uint8, codec=codec)
