"""What files and states hold of a storage: arrays, and plain values that say what these are. Nothing else is read."""

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
    """Return what :func:`dtype_from_name` takes."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: Any) -> torch.dtype:
    """Return the dtype of that name.

    :raises CorruptFileError: if there is none.
    """
    if name not in _DTYPES:
        raise CorruptFileError(f"{name!r} is no dtype")
    return _DTYPES[name]


def describe_rows(rows: Any, *, values: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return what a TensorDict is like, in values that JSON knows, and its tensors.

    :param rows: with at least one batch dimension.
    :param values: whether it may hold what is no tensor: numbers, texts and lists of these, which are written too.
    :raises InvalidTypeError: if it holds anything else.
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
                    f"{key!r} holds {type(value).__name__}, and a storage in files holds tensors only; leave it out: "
                    f"data.exclude({key!r}), or store without storage_dir"
                )
            others.append({"key": path, "values": _require_plain(value.tolist(), key)})
        elif type(value) is torch.Tensor:
            if value.layout != torch.strided or value.is_quantized:
                raise InvalidTypeError(f"{key!r} is no dense tensor; convert it: data[{key!r}].to_dense()")
            leaves.append({"key": path, "dtype": dtype_name(value.dtype), "shape": list(value.shape)})
            tensors.append(value)
        elif type(value) in (TensorDict, LazyStackedTensorDict):
            nodes.append(_node(path, value))
        else:
            raise InvalidTypeError(
                f"{key!r} is a {type(value).__name__}, which files cannot hold: they hold TensorDicts of tensors and "
                f"plain values; convert it, for example data[{key!r}] = data[{key!r}].to_tensordict()"
            )
    return {"nodes": nodes, "leaves": leaves, "values": others}, tensors


def rebuild(description: Any, tensor_of: TensorOf) -> TensorDict:
    """Return the TensorDict that was described.

    :param tensor_of: gives the tensor of that number, dtype and shape.
    :raises CorruptFileError: if the description is none.
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
        raise CorruptFileError(f"the elements are described in no way that is known ({error})") from error
    return rows


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _key(part: dict[str, Any]) -> Any:
    path = part["key"]
    if not path or not all(isinstance(name, str) for name in path):
        raise ValueError(f"{path!r} is no key")
    return tuple(path)


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape that was read.

    :raises ValueError: if it is none.
    """
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return tuple(shape)


def _node(path: Any, node: Any) -> dict[str, Any]:
    names = {"names": list(node.names)} if node._has_names() else {}
    return {"key": list(path), "batch_size": list(node.batch_size), **names}


def _empty_node(node: dict[str, Any]) -> TensorDict:
    return TensorDict({}, batch_size=list(parse_shape(node["batch_size"])), names=node.get("names"), device="cpu")


def _require_plain(values: Any, key: Any) -> Any:
    """Values that are the same when they were written as JSON and read again."""
    try:
        if repr(json.loads(json.dumps(values))) == repr(values):
            return values
    except (TypeError, ValueError):
        pass
    raise InvalidTypeError(
        f"{key!r} holds {values!r:.80}, which files cannot hold: besides tensors, they hold texts, numbers, and lists "
        f"and dictionaries of these; leave it out: data.exclude({key!r})"
    )


def pack_rows(rows: Any, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return elements and frames as arrays and plain values: views, no copies.

    :param rows: the elements, with handles in place of images.
    :param frames: what a pool says of itself, for each column. It has its own checksum.
    :raises InvalidTypeError: if elements hold what is neither a tensor nor a plain value.
    """
    description, tensors = describe_rows(rows, values=True)
    flat = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    leaves = [part.view(torch.uint8).numpy() for part in flat]  # NumPy does not know all dtypes, but their bytes
    return {"rows": description, "leaves": leaves, "sums": [*map(checksum, leaves)], "frames": frames}


def unpack_rows(held: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Return what :func:`pack_rows` was given.

    :raises CorruptFileError: if the elements are damaged.
    """

    def leaf(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        contents = np.array(held["leaves"][number])
        if checksum(contents) != held["sums"][number]:
            raise CorruptFileError("the elements are damaged: their checksum does not match their contents")
        return (
            torch.from_numpy(contents).view(dtype).reshape(shape) if contents.size else torch.empty(shape, dtype=dtype)
        )

    return rebuild(held["rows"], leaf), held["frames"]
