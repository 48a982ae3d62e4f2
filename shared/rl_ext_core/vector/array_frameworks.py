"""Detection of array frameworks (NumPy, torch, JAX), and conversion between them.

The framework is detected once for each array type. This module imports no framework except NumPy. Arrays of torch, JAX
and others are exchanged by DLPack, without a copy to the host.

Source: einops' ``_backends.py``; https://data-apis.org/array-api/latest/design_topics/data_interchange.html
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidTypeError

Array = np.ndarray[Any, Any]

_FRAMEWORKS: dict[type, str] = {}  # cache, by array type


def _framework(leaf: Any) -> str:
    """Return the framework of an array: ``"numpy"``, ``"torch"``, ``"jax"`` or ``"dlpack"``."""
    kind = type(leaf)
    if kind not in _FRAMEWORKS:
        packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
        if "torch" in packages:
            _FRAMEWORKS[kind] = "torch"
        elif "jax" in packages or "jaxlib" in packages:
            _FRAMEWORKS[kind] = "jax"
        else:
            is_numpy = issubclass(kind, np.ndarray | np.generic) or not hasattr(kind, "__dlpack__")
            _FRAMEWORKS[kind] = "numpy" if is_numpy else "dlpack"
    return _FRAMEWORKS[kind]


def framework_of(observation: Any) -> str:
    """Return the framework of the first array in an observation that is not NumPy's.

    :return: ``"numpy"``, ``"torch"``, ``"jax"``, or ``"dlpack"`` for others that support it, such as Warp and CuPy
    """
    found = map(_framework, leaves(observation))
    return next((name for name in found if name != "numpy"), "numpy")


def leaves(value: Any) -> Iterator[Any]:
    """Iterate over the arrays in nested dicts, tuples and lists."""
    if isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def to_numpy(leaf: Any) -> Any:
    """Convert an array to NumPy, without a copy from the CPU; return other values as is.

    :raises InvalidTypeError: If it is a tensor of a dtype that NumPy lacks.
    """
    framework = _framework(leaf)
    if framework == "numpy":
        return leaf
    if framework == "torch":
        try:
            return leaf.numpy()
        except (RuntimeError, TypeError):  # force=True takes three times as long, so it is the second try
            pass
        try:
            return leaf.numpy(force=True)
        except TypeError as error:
            raise InvalidTypeError(
                f"a tensor has the dtype {leaf.dtype}, which NumPy lacks. Convert it in the environment: "
                "tensor.float(). With sb3_ext.tensor, GymVecEnv(env, tensors=True) accepts it"
            ) from error
    return np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)


def to_torch(leaf: Any) -> Any:
    """Convert an array of JAX, Warp or CuPy to a tensor that shares its memory.

    Arrays that torch cannot share, such as random keys, are returned as is.
    """
    if _framework(leaf) in ("numpy", "torch"):
        return leaf
    try:
        return sys.modules["torch"].from_dlpack(leaf)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return leaf


def to_framework(array: Array, framework: str, device: Any = None) -> Any:
    """Convert a NumPy array to an array of a framework, on one of its devices."""
    if framework == "torch":
        return sys.modules["torch"].from_numpy(array).to(device)
    return sys.modules["jax"].numpy.asarray(array) if framework == "jax" else array


def take_rows(batch: Any, rows: Any) -> Any:
    """Copy rows of an array.

    :return: tensor on the same device if ``batch`` is a tensor, except if it is on the CPU and ``rows`` is a NumPy
        array. Otherwise a NumPy array, also for JAX, which would compile for each number of rows
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(batch, torch.Tensor) or (batch.is_cpu and isinstance(rows, np.ndarray)):
        return np.asarray(to_numpy(batch))[to_numpy(rows)]
    return batch.detach().index_select(0, torch.as_tensor(rows, device=batch.device))


def map_arrays(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to the arrays at each place of equally nested dicts and tuples."""
    first = values[0]
    if isinstance(first, dict):
        return {key: map_arrays(function, *(value[key] for value in values)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_arrays(function, *parts) for parts in zip(*values, strict=True))
    return function(*values)


def stack_arrays(*arrays: Any) -> Any:
    """Stack arrays along a new first axis.

    :raises ValueError: If their shapes differ.
    """
    if _framework(arrays[0]) == "torch":
        return sys.modules["torch"].stack([array.detach() for array in arrays])
    return np.array([to_numpy(array) for array in arrays])


def keep_freed_memory(nbytes: int) -> None:
    """Make the C library reuse freed blocks of this size, which is faster than mapping new ones.

    glibc's threshold rises to the largest block that was freed, up to 32 MB. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, 31 << 20)
    if size > 128 << 10:
        np.empty(size, np.uint8)
