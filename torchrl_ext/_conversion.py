"""Makes tensors of what environments return: of any value that fits without loss; what is wrong with others is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data import MultiOneHot, OneHot

from rl_ext_core.errors import EnvironmentOutputError

__all__ = ["coerced", "counted", "counted_from_zero", "index_shape", "one_hot"]


def coerced(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype, *, name: str, device: torch.device | None, copy: bool = True
) -> torch.Tensor:
    """Make a tensor of a value.

    :param value: what an environment returned
    :param shape: which it must have, but for axes of one; -1 stands for any length
    :param dtype: which it must fit
    :param name: of the entry, for messages
    :param device: of the tensor; None: where the value is
    :param copy: whether it may not share the value's memory
    :raises EnvironmentOutputError: it does not fit
    """
    found = _tensor(value, shape, dtype, name)
    if _may_lose(found.dtype, dtype) and _loses(found, dtype):
        raise EnvironmentOutputError(
            f"{name!r} has the dtype {found.dtype}, which loses information as {dtype}, the dtype of its space. "
            "Write the space with the dtype that the environment returns"
        )
    if found.shape != shape:
        found = _reshaped(found, shape, name)
    return found.to(device=device, dtype=dtype, copy=copy and isinstance(value, torch.Tensor))


def _tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None:
        raise EnvironmentOutputError(f"{name!r} is None; its space has the shape {tuple(shape)} of {dtype}")
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return torch.stack([torch.as_tensor(part).detach() for part in value])
        # A copy: torch takes neither read-only arrays nor negative strides.
        array = np.array(value, order="C")
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentOutputError(
            f"{name!r} is of type {type(value).__name__}, which makes no tensor ({error}); its space has the shape "
            f"{tuple(shape)} of {dtype}"
        ) from None


def _reshaped(found: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    wanted = tuple(shape)
    if len(found.shape) == len(wanted) and all(n in (-1, m) for n, m in zip(wanted, found.shape, strict=True)):
        return found
    # A trailing axis of one comes and goes between libraries; nothing else does without a mistake.
    if tuple(n for n in found.shape if n != 1) == tuple(n for n in wanted if n != 1):
        return found.reshape(wanted)
    hint = " (the batch axis is lost)" if tuple(found.shape) == wanted[1:] else ""
    raise EnvironmentOutputError(f"{name!r} has the shape {tuple(found.shape)}{hint}; its space has {wanted}")


def _may_lose(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether a cast may lose more than precision: fractions, signs, or the upper digits of integers."""
    kind = _kind(wanted)
    if _kind(found) != kind:
        return _kind(found) > kind
    return kind == 1 and (
        torch.iinfo(found).min < torch.iinfo(wanted).min or torch.iinfo(found).max > torch.iinfo(wanted).max
    )


def _kind(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _loses(found: torch.Tensor, wanted: torch.dtype) -> bool:
    """Tell whether it does. On a GPU, where looking would make the step wait for it, it is taken to; so are complex."""
    if found.device.type != "cpu" or found.is_complex():
        return True
    return not torch.equal(found.to(wanted).to(found.dtype), found)


def index_shape(spec: OneHot) -> tuple[int, ...]:
    """Give the shape of the indices that a one-hot spec encodes."""
    lead = tuple(spec.shape[:-1])
    return (*lead, len(spec.nvec)) if isinstance(spec, MultiOneHot) else lead


def one_hot(
    value: Any, spec: OneHot, shape: tuple[int, ...], *, name: str, device: torch.device | None
) -> torch.Tensor:
    """Encode indices.

    :param value: what an environment returned
    :param spec: tells how many classes there are
    :param shape: of the indices
    :param name: of the entry, for messages
    :param device: of the tensor
    :raises EnvironmentOutputError: they do not fit
    """
    index = coerced(value, shape, torch.int64, name=name, device=device)
    encode = torch.nn.functional.one_hot
    try:
        if isinstance(spec, MultiOneHot):
            parts = [encode(index[..., place], int(n)) for place, n in enumerate(spec.nvec)]
            return torch.cat(parts, -1).to(spec.dtype)
        return encode(index, spec.space.n).to(spec.dtype)
    except RuntimeError:
        raise EnvironmentOutputError(
            f"{name!r} is {index.tolist()}, which is not below the number of classes of its space, "
            f"{list(spec.nvec) if isinstance(spec, MultiOneHot) else spec.space.n}, or negative"
        ) from None


def counted(values: Any, start: Any) -> Any:
    """Count integers from where a space does, which TorchRL's specs do from zero.

    :param values: a number, an array or a tensor
    :param start: a number or an array
    """
    if isinstance(values, torch.Tensor):
        return values + torch.as_tensor(start, dtype=values.dtype, device=values.device)
    return values + start


def counted_from_zero(values: Any, start: Any) -> Any:
    """Undo that in what an environment returned; what are no integers stays as it is.

    :param values: a value, or a dict of them
    :param start: a number or an array, or a dict of them; None: they count from zero
    """
    if start is None:
        return values
    if isinstance(values, dict) and isinstance(start, dict):
        return {key: counted_from_zero(part, start.get(key)) for key, part in values.items()}
    if not isinstance(values, torch.Tensor):
        array = np.asarray(values)
        return array.astype(np.int64) - start if array.dtype.kind in "iu" else values
    return values if values.is_floating_point() else counted(values, -np.asarray(start))
