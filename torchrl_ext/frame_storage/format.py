"""Conversion of elements to tensors and a description in plain values for files, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_non_tensor

from rl_ext_core.errors import InvalidTypeError

ALIGNMENT = 64  # of arrays in files, in bytes
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: Any) -> torch.dtype:
    """Return the dtype with a name.

    :raises KeyError: If there is no such dtype.
    """
    return _DTYPES[name]


def describe_rows(rows: Any, *, values: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Describe a TensorDict in values that JSON can store; return its tensors, too.

    :param rows: TensorDict with at least one batch dimension.
    :param values: Whether it may contain numbers, texts, and lists and dictionaries of these.
    :raises InvalidTypeError: If it contains anything else than that, tensors and TensorDicts.
    """
    tensors: list[torch.Tensor] = []

    def describe(node: Any, key: tuple[str, ...]) -> dict[str, Any]:
        """Describe a part of the elements, and collect its tensors."""
        name = key[0] if len(key) == 1 else key
        if is_non_tensor(node):
            if not values:
                raise InvalidTypeError(
                    f"{name!r} holds {type(node).__name__}, but a storage in files stores tensors only. Leave it out: "
                    f"data.exclude({name!r}), or leave storage_dir out"
                )
            return {"values": _require_plain(node.tolist(), name)}
        if type(node) is torch.Tensor:
            if node.layout != torch.strided or node.is_quantized:
                raise InvalidTypeError(f"{name!r} is not a dense tensor. Use data[{name!r}].to_dense()")
            tensors.append(node)
            return {"dtype": dtype_name(node.dtype), "shape": list(node.shape)}
        if key and type(node) not in (TensorDict, LazyStackedTensorDict):
            raise InvalidTypeError(
                f"{name!r} is a {type(node).__name__}, which files cannot hold: expected a TensorDict of tensors and "
                f"plain values. Use data[{name!r}] = data[{name!r}].to_tensordict()"
            )
        entries = {part: describe(leaf, (*key, part)) for part, leaf in sorted(node.items(), key=lambda item: item[0])}
        names = {"names": list(node.names)} if node._has_names() else {}
        return {"batch_size": list(node.batch_size), **names, "entries": entries}

    return describe(rows, ()), tensors


def align(n_bytes: int) -> int:
    """Round a number of bytes up."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def rebuild(description: Any, next_bytes: Callable[[int], npt.NDArray[np.uint8]]) -> Any:
    """Build a TensorDict from its description. If that is damaged, any exception may be raised.

    :param description: Result of :func:`describe_rows`.
    :param next_bytes: Function of a number of bytes that returns those of the next one of the tensors.
    """
    if "values" in description:
        return NonTensorStack.from_list(_require_plain(description["values"], "values"))
    if "entries" not in description:
        dtype, shape = dtype_from_name(description["dtype"]), _require_shape(description["shape"])
        contents = next_bytes(math.prod(shape) * dtype.itemsize)
        if 0 in shape:  # a view of nothing has no other dtype
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(contents).view(dtype).reshape(shape)
    batch_size, names = list(_require_shape(description["batch_size"])), description.get("names")
    rows = TensorDict({}, batch_size=batch_size, names=names, device="cpu")
    for key, part in description["entries"].items():
        rows.set(key, rebuild(part, next_bytes))
    return rows


def _require_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape from a file as a tuple; raise ValueError if it is not a list of non-negative integers."""
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    return tuple(shape)


def _require_plain(values: Any, key: Any) -> Any:
    """Return values unchanged, and refuse those that JSON does not preserve.

    :raises InvalidTypeError: If it does not.
    """
    try:
        if repr(json.loads(json.dumps(values))) == repr(values):
            return values
    except (TypeError, ValueError):
        pass
    raise InvalidTypeError(
        f"{key!r} holds {values!r:.80}, which files cannot hold: expected tensors, texts, numbers, or lists and "
        f"dictionaries of these. Leave it out: data.exclude({key!r})"
    )
