"""Copies of values that environments return."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

__all__ = ["IMMUTABLE_TYPES", "copy_output"]

# Python's types of values that need no copy.
IMMUTABLE_TYPES = (int, float, bool, str, bytes, type(None))


def copy_output(value: Any) -> Any:
    """Copy a value that an environment returned and may write to again.

    An object that cannot be copied is returned as is.
    """
    kind = type(value)
    if kind in IMMUTABLE_TYPES or isinstance(value, np.generic):
        return value
    if kind is np.ndarray and value.dtype != object:
        return value.copy("K")
    if kind is dict:
        return {key: copy_output(part) for key, part in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # for example locks, simulator handles, tensors with a gradient
        return value
