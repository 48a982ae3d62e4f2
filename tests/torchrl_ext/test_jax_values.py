"""Tests of JAX conversions; test_venvs.py runs this file in .venv-jax."""

from __future__ import annotations

import pytest
import torch

from torchrl_ext.gym.io import compile_value

jax = pytest.importorskip("jax", reason="JAX is only in .venv-jax. Run scripts/make_jax_venv.sh")


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_share_memory_only_without_copy(copy: bool) -> None:
    value = jax.numpy.arange(3.0)
    found = compile_value((3,), torch.float32, name="a", device=None, copy=copy)(value)
    assert found.tolist() == [0, 1, 2]
    assert (found.data_ptr() == value.unsafe_buffer_pointer()) != copy


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32"])
def test_jax_dtypes_are_kept(dtype: str) -> None:
    wanted = getattr(torch, dtype)
    found = compile_value((2, 1), wanted, name="a", device=None)(jax.numpy.array([0, 1], dtype))
    assert found.dtype is wanted
    assert found.tolist() == [[0], [1]]
