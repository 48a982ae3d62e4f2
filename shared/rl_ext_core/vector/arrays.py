"""Arrays of NumPy, torch and JAX: which framework one belongs to, and how it gets into another.

A framework is found by an array's type, once for each type, and is imported by whoever made that array: this module
imports none of them. Between torch, JAX and others, arrays go by DLPack, without a trip through the host.

Source: einops' ``_backends.py``; https://data-apis.org/array-api/latest/design_topics/data_interchange.html
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = [
    "copy_array",
    "framework_of",
    "keep_freed_memory",
    "leaves",
    "map_arrays",
    "stack_arrays",
    "take_rows",
    "to_framework",
    "to_numpy",
    "to_torch",
]

Array = np.ndarray[Any, Any]

_FRAMEWORKS: dict[type, str] = {}  # of types that were seen


def _framework(leaf: Any) -> str:
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
    """Return ``"numpy"``, ``"torch"``, ``"jax"``, or ``"dlpack"`` for others that have it (Warp, CuPy).

    :param observation: an array, or dicts, tuples and lists of them, of which the first that is not NumPy's counts
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
    """Return an array of another framework as NumPy's, without a copy if it is on the CPU; others are unchanged."""
    framework = _framework(leaf)
    if framework == "numpy":
        return leaf
    if framework == "torch":
        try:
            return leaf.numpy()
        except (RuntimeError, TypeError):  # takes three times as long if it is not needed
            return leaf.numpy(force=True)
    return np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)


def to_torch(leaf: Any) -> Any:
    """Return an array of JAX, Warp or CuPy as a tensor that shares its memory; others, such as keys, are unchanged."""
    if _framework(leaf) in ("numpy", "torch"):
        return leaf
    try:
        return sys.modules["torch"].from_dlpack(leaf)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return leaf


def to_framework(array: Array, framework: str, device: Any = None) -> Any:
    """Return a NumPy array as one of a framework, on a device of that framework."""
    if framework == "torch":
        return sys.modules["torch"].from_numpy(array).to(device)
    return sys.modules["jax"].numpy.asarray(array) if framework == "jax" else array


def take_rows(batch: Any, rows: Any) -> Any:
    """Return rows of an array as a new one: a tensor on the same device, or NumPy's if rows and array are on the CPU.

    Rows of JAX's arrays are NumPy's too, because JAX compiles for each number of rows.

    :param rows: indices; if they are a tensor, rows of tensors are tensors, which takes longer on the CPU
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(batch, torch.Tensor) or (batch.is_cpu and isinstance(rows, np.ndarray)):
        return np.asarray(to_numpy(batch))[to_numpy(rows)]
    return batch.detach().index_select(0, torch.as_tensor(rows, device=batch.device))


def map_arrays(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function with the arrays at each place in dicts and tuples that are nested alike."""
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


def copy_array(array: Any) -> Any:
    """Copy an array, which environments write into again, except JAX's, which cannot be written."""
    framework = _framework(array)
    if framework == "jax":
        return array
    return array.detach().clone() if framework == "torch" else copy.copy(array)


def keep_freed_memory(nbytes: int) -> None:
    """Let the C library keep freed blocks of this size, because mapping them again takes longer than filling them.

    glibc's threshold rises to the largest block that was freed, up to 32 MB. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, 31 << 20)
    if size > 128 << 10:
        np.empty(size, np.uint8)
