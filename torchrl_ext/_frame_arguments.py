"""What a frame storage accepts, and bringing it into one form."""

from __future__ import annotations

from operator import index as as_index
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError


def at_least_one(name: str, value: Any) -> int:
    """A whole number from 1 on."""
    try:
        number = as_index(value)
    except TypeError:
        raise InvalidTypeError(f"{name}={value!r} is not a whole number; for example {name}=1") from None
    if number < 1:
        raise InvalidArgumentError(f"{name}={value!r} must be at least 1")
    return number


def as_tensordict(data: Any) -> Any:
    """Data that has keys; a list is stacked.

    :raises InvalidTypeError: if it has none.
    """
    if isinstance(data, list) and data and all(is_tensor_collection(item) for item in data):
        data = torch.stack(data)
    if not is_tensor_collection(data):
        raise InvalidTypeError(
            f"FrameStorage stores TensorDicts, got {type(data).__name__}; write TensorDict({{'pixels': images}}, "
            "batch_size=[len(images)])"
        )
    return data


def on_cpu(index: Any) -> Any:
    """An index for tensors in main memory."""
    if isinstance(index, tuple):
        return tuple(map(on_cpu, index))
    return index.cpu() if isinstance(index, torch.Tensor) else index


def last_of_each(cursor: Any, data: Any) -> tuple[Any, Any]:
    """Leaves out elements that others of the same batch overwrite."""
    if isinstance(cursor, (slice, tuple)):
        return cursor, data
    places = torch.as_tensor(list(cursor) if isinstance(cursor, (range, set)) else cursor).cpu()
    if places.dtype == torch.bool or places.ndim != 1:
        return places, data
    backwards, kept = np.unique(places.numpy()[::-1], return_index=True)
    if len(backwards) == len(places):
        return places, data
    last = torch.from_numpy(np.sort(len(places) - 1 - kept))
    return places[last], data[last]
