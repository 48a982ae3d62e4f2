"""The decoder for GPUs returns the same stacks as that for CPUs. Without a GPU, Triton interprets its kernel.

Without Triton, which .venv-jax has, these tests are skipped.
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
from rl_ext_core.frames import StackLayout
from rl_ext_core.frames.gpu_decode import GpuDecoder
from rl_ext_core.frames.store import FrameStore, Observation
from tests.core.frames.transitions import CONTENTS, LAYOUTS, append_all, make_store, make_transitions

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton: pip install triton, or scripts/make_jax_venv.sh", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernel is imported


def check_equal(store: Any, decoder: GpuDecoder, rows: Any, envs: Any) -> None:
    """Check that both decoders return the same bytes."""
    expected = [np.empty((len(rows), *store.layout.shape), store.layout.dtype) for _ in range(2)]
    store.get(rows, envs, *expected)
    assert decoder.can_decode(store.parts[None])
    for tensor, array in zip(decoder.get(store, rows, envs), expected, strict=True):
        assert tensor.cpu().numpy().tobytes() == array.tobytes()
        assert tensor.shape == array.shape


# The interpreter takes a second for a few small frames.
@settings(max_examples=150 if DEVICE == "cuda" else 10)
@given(
    layout=st.sampled_from(LAYOUTS if DEVICE == "cuda" else LAYOUTS[:-2]),
    contents=st.sampled_from(CONTENTS),
    episode=st.sampled_from([0, 1, 5, 20]),
    odd=st.sampled_from([0.0, 0.5]),
    n_steps=st.sampled_from([3, 55]),  # with 3, most rows were never written
    seed=st.integers(0, 1000),
)
def test_stacks_equal_those_of_the_cpu(layout: StackLayout, **options: Any) -> None:
    store: Any = make_store(40, 2, layout)
    append_all((store,), make_transitions(layout, **options))
    rng = np.random.default_rng(options["seed"])
    n = 32 if DEVICE == "cuda" else 3
    check_equal(store, GpuDecoder(DEVICE), rng.integers(40, size=n), rng.integers(2, size=n))


def test_buffer_grows_with_the_batch() -> None:
    layout = StackLayout((1, 300, 300), np.dtype(np.uint8), 1, 0)
    store: Any = make_store(64, 1, layout)
    append_all((store,), make_transitions(layout, n_envs=1, n_steps=30, contents="noise"))
    decoder = GpuDecoder(DEVICE)
    check_equal(store, decoder, np.array([3]), np.zeros(1, np.int64))
    check_equal(store, decoder, np.arange(20), np.zeros(20, np.int64))  # more than the buffer's first size


def test_wide_patches_of_large_frames_and_keys_of_a_dict() -> None:
    layout = StackLayout((300, 300, 3), np.dtype(np.uint8), 1, 0)
    parts = {key: Observation(layout.shape, layout.dtype, n_stack=1) for key in ("left", "right")}
    store, decoder, rng = FrameStore(8, 1, parts), GpuDecoder(DEVICE), np.random.default_rng(0)
    stacks = {key: np.repeat(rng.integers(256, size=(1, 1, *layout.shape), dtype=np.uint8), 9, 0) for key in parts}
    for key, first in (("left", 0), ("right", 100)):
        for t in range(9):
            stacks[key][t, 0, ::37, first + t] = t  # the changes are further apart than 255 bytes
    for t in range(8):
        store.append(*({key: stacks[key][t + side] for key in parts} for side in range(2)))
    for key in parts:
        found = decoder.get(store, np.array([1, 7]), np.zeros(2, np.int64), key)
        for side, tensor in enumerate(found):
            np.testing.assert_array_equal(tensor.cpu().numpy(), stacks[key][[1 + side, 7 + side], 0])


@pytest.mark.parametrize("options", [{"codec": "raw"}, {"max_error": 4}], ids=str)
def test_other_codecs_are_left_to_the_cpu(options: dict[str, Any]) -> None:
    assert not GpuDecoder.can_decode(make_store(8, 1, LAYOUTS[0], **options).parts[None])


def test_rows_that_do_not_exist_are_refused() -> None:
    store: Any = make_store(8, 1, LAYOUTS[0])
    with pytest.raises(InvalidArgumentError, match="rows from 0 to 7"):
        GpuDecoder(DEVICE).get(store, np.array([8]), np.zeros(1, np.int64))
