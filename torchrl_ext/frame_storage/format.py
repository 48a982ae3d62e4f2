"""Conversion of elements to arrays and plain values for files, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_non_tensor

from rl_ext_core.errors import CorruptFileError, InvalidTypeError
from rl_ext_core.frames.checkpoint import checksum

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
TensorOf = Callable[[int, torch.dtype, tuple[int, ...]], torch.Tensor]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: Any) -> torch.dtype:
    """Return the dtype with a name.

    :raises CorruptFileError: If there is no such dtype.
    """
    if name not in _DTYPES:
        raise CorruptFileError(f"{name!r} is not the name of a dtype")
    return _DTYPES[name]


def describe_rows(rows: Any, *, values: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Describe a TensorDict in values that JSON can store; return its tensors, too.

    :param rows: TensorDict with at least one batch dimension
    :param values: whether it may contain numbers, texts, and lists and dictionaries of these
    :raises InvalidTypeError: If it contains anything else than that, tensors and TensorDicts.
    """
    nodes = [_node((), rows)]
    leaves: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    for key, value in sorted(rows.items(include_nested=True), key=lambda item: _path(item[0])):
        path = list(_path(key))
        if is_non_tensor(value):
            if not values:
                raise InvalidTypeError(
                    f"{key!r} holds {type(value).__name__}, but a storage in files stores tensors only. Leave it out: "
                    f"data.exclude({key!r}), or leave storage_dir out"
                )
            others.append({"key": path, "values": _require_plain(value.tolist(), key)})
        elif type(value) is torch.Tensor:
            if value.layout != torch.strided or value.is_quantized:
                raise InvalidTypeError(f"{key!r} is not a dense tensor. Use data[{key!r}].to_dense()")
            leaves.append({"key": path, "dtype": dtype_name(value.dtype), "shape": list(value.shape)})
            tensors.append(value)
        elif type(value) in (TensorDict, LazyStackedTensorDict):
            nodes.append(_node(path, value))
        else:
            raise InvalidTypeError(
                f"{key!r} is a {type(value).__name__}, which files cannot hold: expected a TensorDict of tensors and "
                f"plain values. Use data[{key!r}] = data[{key!r}].to_tensordict()"
            )
    return {"nodes": nodes, "leaves": leaves, "values": others}, tensors


def rebuild(description: Any, tensor_of: TensorOf) -> TensorDict:
    """Build a TensorDict from its description.

    :param description: result of :func:`describe_rows`
    :param tensor_of: function of a tensor's number, dtype and shape that returns the tensor
    :raises CorruptFileError: If the description is damaged.
    """
    try:
        first, *nodes = description["nodes"]
        rows = _empty_node(first)
        for node in nodes:
            rows.set(_key(node), _empty_node(node))
        for number, leaf in enumerate(description["leaves"]):
            rows.set(_key(leaf), tensor_of(number, dtype_from_name(leaf["dtype"]), parse_shape(leaf["shape"])))
        for other in description["values"]:
            rows.set(_key(other), NonTensorStack.from_list(_require_plain(other["values"], "values")))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptFileError(f"the description of the elements is damaged ({error})") from error
    return rows


def _path(key: Any) -> tuple[str, ...]:
    """Return a key as a tuple of strings."""
    return (key,) if isinstance(key, str) else key


def _key(part: dict[str, Any]) -> Any:
    """Return the key of a described entry; raise ValueError if it is invalid."""
    path = part["key"]
    if not path or not all(isinstance(name, str) for name in path):
        raise ValueError(f"{path!r} is not a key")
    return tuple(path)


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape from a file as a tuple.

    :raises ValueError: If it is not a list of non-negative integers.
    """
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    return tuple(shape)


def _node(path: Any, node: Any) -> dict[str, Any]:
    """Describe a TensorDict without its entries: key, batch size and dimension names."""
    names = {"names": list(node.names)} if node._has_names() else {}
    return {"key": list(path), "batch_size": list(node.batch_size), **names}


def _empty_node(node: dict[str, Any]) -> TensorDict:
    """Build the empty TensorDict that a result of :func:`_node` describes."""
    return TensorDict({}, batch_size=list(parse_shape(node["batch_size"])), names=node.get("names"), device="cpu")


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


def pack_rows(rows: Any, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Convert elements and frames to arrays and plain values. The arrays are views, not copies.

    :param rows: Elements, with numbers in place of images.
    :param frames: Per column, the contents of its table, which have their own checksum.
    :raises InvalidTypeError: If elements contain anything else than tensors and plain values.
    """
    description, tensors = describe_rows(rows, values=True)
    flat = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    leaves = [part.view(torch.uint8).numpy() for part in flat]  # NumPy does not have all of torch's dtypes
    return {"rows": description, "leaves": leaves, "checksum": checksum([description, leaves]), "frames": frames}


def unpack_rows(packed: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Return the arguments of :func:`pack_rows` from its result.

    :raises CorruptFileError: If the elements are damaged.
    """
    if packed["checksum"] != checksum([packed["rows"], packed["leaves"]]):
        raise CorruptFileError("the elements are damaged: their checksum does not match their contents")

    def leaf(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a copy of tensor ``number``."""
        contents = np.array(packed["leaves"][number])
        if not contents.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(contents).view(dtype).reshape(shape)

    return rebuild(packed["rows"], leaf), packed["frames"]
