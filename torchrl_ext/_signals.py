"""Reads rewards and flags into new tensors of their specs: environments write into theirs again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchrl.data import TensorSpec
from torchrl.data.utils import torch_to_numpy_dtype_dict

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext._conversion import coerced

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[Any], Any]

__all__ = ["compile_flags", "compile_reward", "no_end", "no_flags"]


def compile_reward(spec: TensorSpec, *, batched: bool, device: torch.device | None) -> Read:
    """Compile the way from a reward to a new tensor of the spec."""
    shape, dtype = tuple(spec.shape), spec.dtype

    def coerce(value: Any) -> torch.Tensor:
        return coerced(value, shape, dtype, name="reward", device=device)

    if not batched:
        if shape != (1,):
            return coerce
        # By way of NumPy, which makes small arrays in half of torch's time.
        scalars, array, from_numpy = (float, int, np.floating), np.array, torch.from_numpy
        wanted = torch_to_numpy_dtype_dict[dtype]
        moves = device is not None and device.type != "cpu"

        def read_scalar(value: Any) -> torch.Tensor:
            if isinstance(value, scalars):
                tensor = from_numpy(array((value,), wanted))
                return tensor.to(device) if moves else tensor
            return coerce(value)

        return read_scalar
    if shape[-1:] != (1,):
        return coerce
    return _batch_reader(shape[:-1], dtype, device, coerce)


def no_end(shape: tuple[int, ...], device: torch.device | None) -> tuple[torch.Tensor, ...]:
    """Make flags of which none is set: done, terminated, truncated.

    :param shape: of each, with its trailing axis
    """
    tensor = torch.from_numpy(np.zeros((3, *shape), np.bool_))
    return (tensor if device is None or device.type == "cpu" else tensor.to(device)).unbind(0)


def _batch_reader(flat: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, coerce: Read) -> Read:
    array, from_numpy = np.ndarray, torch.from_numpy
    wanted = torch_to_numpy_dtype_dict[dtype]
    moves = device is not None and device.type != "cpu"

    def read(value: Any) -> torch.Tensor:
        if type(value) is array and value.shape == flat and value.dtype.kind in "fiub":
            tensor = from_numpy(value.astype(wanted)).unsqueeze(-1)
            return tensor.to(device) if moves else tensor
        if type(value) is torch.Tensor and value.shape == flat:
            return value.detach().to(device=device, dtype=dtype, copy=True).unsqueeze(-1)
        return coerce(value)

    return read


def no_flags(terminated: Any, truncated: Any) -> EnvironmentOutputError:
    """Say that two values are not flags of one environment."""
    found = " and ".join(_described(value) for value in (terminated, truncated))
    return EnvironmentOutputError(f"'terminated' and 'truncated' are {found}; expected one boolean each")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{value!r}" if shape is None else f"of the shape {tuple(shape)}"


def compile_flags(shape: torch.Size, *, device: torch.device | None) -> Callable[[Any, Any], tuple[torch.Tensor, ...]]:
    """Compile the way from two batches of flags to new tensors of booleans: done, terminated, truncated.

    :param shape: of each with its trailing axis, (n, 1)
    """
    flat, array, boolean = tuple(shape[:-1]), np.ndarray, np.dtype(bool)
    moves = device is not None and device.type != "cpu"

    three, column, size = (3, *shape), tuple(shape), shape[:-1]
    from_numpy = torch.from_numpy

    def read(terminated: Any, truncated: Any) -> tuple[torch.Tensor, ...]:
        if (
            type(terminated) is type(truncated) is array
            and terminated.dtype is truncated.dtype is boolean
            and terminated.shape == truncated.shape == flat
        ):
            if moves:
                flags = np.stack((terminated | truncated, terminated, truncated)).reshape(three)
                return from_numpy(flags).to(device).unbind(0)
            done = from_numpy((terminated | truncated).reshape(column))
            return done, from_numpy(terminated.copy().reshape(column)), from_numpy(truncated.copy().reshape(column))
        if (
            type(terminated) is type(truncated) is torch.Tensor
            and terminated.dtype is truncated.dtype is torch.bool
            and terminated.shape == truncated.shape == size
            and (device is None or terminated.device == truncated.device == device)
        ):
            return torch.stack((terminated | truncated, terminated, truncated)).unsqueeze(-1).unbind(0)
        one, other = (
            coerced(value, shape, torch.bool, name=name, device=device)
            for name, value in (("terminated", terminated), ("truncated", truncated))
        )
        return one | other, one, other

    return read
