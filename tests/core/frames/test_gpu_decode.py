"""The decoder for GPUs returns the same stacks as that for CPUs. Without a GPU, Triton interprets its kernel.

Without Triton, which test_jax_venv.py has, these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames.gpu_decode import GpuDecoder
from rl_ext_core.testing import CONTENTS, LAYOUTS, make_transitions
from tests.core.frames.disk_helpers import append_all

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton: pip install triton, or scripts/make_jax_venv.sh", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernel is imported


def check_equal(store: Any, decoder: GpuDecoder, rows: Any, envs: Any) -> None:
    """Check that both decoders return the same bytes."""
    expected = [np.empty((len(rows), *store.layout.shape), store.layout.dtype) for _ in range(2)]
    store.get(rows, envs, *expected)
    found = store.get_on_gpu(rows, envs, decoder)
    for tensor, array in zip(found, expected, strict=True):
        assert tensor.cpu().numpy().tobytes() == array.tobytes()
        assert tensor.shape == array.shape


# The interpreter takes a second for a few small frames.
@settings(max_examples=150 if DEVICE == "cuda" else 10)
@given(
    layout=st.sampled_from(LAYOUTS if DEVICE == "cuda" else LAYOUTS[:-2]),
    contents=st.sampled_from(CONTENTS),
    episode=st.sampled_from([0, 1, 5, 20]),
    odd=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_stacks_equal_those_of_the_cpu(layout: StackLayout, contents: str, episode: int, odd: float, seed: int) -> None:
    store: Any = FrameStore(40, 2, layout)
    append_all((store,), make_transitions(layout, n_steps=55, contents=contents, episode=episode, odd=odd, seed=seed))
    rng = np.random.default_rng(seed)
    n = 32 if DEVICE == "cuda" else 3
    check_equal(store, GpuDecoder(DEVICE), rng.integers(40, size=n), rng.integers(2, size=n))


def test_rows_that_were_never_written_are_zero() -> None:
    store: Any = FrameStore(40, 1, LAYOUTS[0], codec="patch")
    append_all((store,), make_transitions(LAYOUTS[0], n_envs=1, n_steps=3))
    check_equal(store, GpuDecoder(DEVICE), np.array([2, 30]), np.zeros(2, np.int64))
    check_equal(store, GpuDecoder(DEVICE), np.array([30]), np.zeros(1, np.int64))


def test_buffer_grows_with_the_batch() -> None:
    layout = StackLayout((1, 300, 300), np.dtype(np.uint8), 1, 0)
    store: Any = FrameStore(64, 1, layout, codec="patch")
    append_all((store,), make_transitions(layout, n_envs=1, n_steps=30, contents="noise"))
    decoder = GpuDecoder(DEVICE)
    check_equal(store, decoder, np.array([3]), np.zeros(1, np.int64))
    check_equal(store, decoder, np.arange(20), np.zeros(20, np.int64))  # more than the buffer's first size


def test_other_codecs_are_left_to_the_cpu() -> None:
    store: Any = FrameStore(8, 1, LAYOUTS[0], codec="raw")
    append_all((store,), make_transitions(LAYOUTS[0], n_envs=1, n_steps=3))
    assert store.get_on_gpu(np.zeros(1, np.int64), np.zeros(1, np.int64), GpuDecoder(DEVICE)) is None


def test_rows_that_do_not_exist_are_refused() -> None:
    store: Any = FrameStore(8, 1, LAYOUTS[0], codec="patch")
    with pytest.raises(InvalidArgumentError, match="rows from 0 to 7"):
        store.get_on_gpu(np.array([8]), np.zeros(1, np.int64), GpuDecoder(DEVICE))
