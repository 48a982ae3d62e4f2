"""Copies of values that environments return."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

__all__ = ["IMMUTABLE_TYPES", "copy_output", "may_be_same"]

# Python's types of values that need no copy.
IMMUTABLE_TYPES = (int, float, bool, str, bytes, type(None))
_IMMUTABLE = frozenset((*IMMUTABLE_TYPES, np.bool_, np.int32, np.int64, np.uint8, np.float32, np.float64))


def copy_output(value: Any) -> Any:
    """Copy a value that an environment returned and may write to again.

    Tensors are detached. Immutable arrays of JAX, and objects that cannot be copied, are returned as is.
    """
    kind = type(value)
    if kind in IMMUTABLE_TYPES or isinstance(value, np.generic):
        return value
    if kind is np.ndarray and value.dtype != object:
        return value.copy("K")
    if kind is dict:
        if _IMMUTABLE.issuperset(map(type, value.values())):  # most infos
            return value.copy()
        return {key: copy_output(part) for key, part in value.items()}
    if kind.__module__.startswith("jax"):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # for example locks and simulator handles
        return value


def may_be_same(left: Any, right: Any, max_error: int) -> Any:
    """Return in which rows two uint8 arrays may be one picture that was stored twice, each time with another error.

    :param max_error: largest error of a stored byte, so that both differ by at most twice that
    """
    errors = np.abs(np.subtract(left, right, dtype=np.int16))
    return errors.max(axis=tuple(range(1, errors.ndim)), initial=0) <= 2 * max_error
