"""Tests of JAX conversions; test_venvs.py runs this file in .venv-jax."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_ext_core.errors import EnvironmentOutputError
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: jax.numpy.array([-1, 2]), r"int32, which loses information as torch\.uint8"),
        (lambda: jax.numpy.array([0.5, 2]), r"float32, which loses information as torch\.uint8"),
        (lambda: jax.numpy.ones(3, "uint8"), r"the shape \(3,\); its space has \(2,\)"),
        (lambda: jax.random.key(0), r"PRNGKeyArray, which makes no tensor"),
    ],
)
def test_values_that_do_not_fit_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(EnvironmentOutputError, match=message):
        compile_value((2,), torch.uint8, name="a", device=None)(value())
