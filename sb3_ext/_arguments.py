"""Checks of what callers pass."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError


def at_least_one(name: str, value: Any) -> int:
    """The value as an integer, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}=int({value!r})") from None
    if number < 1:
        raise InvalidArgumentError(f"{name}={number} must be at least 1")
    return number


def with_shape(stack: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Adds the axis that may be left out: of one environment, or of a discrete observation's only value."""
    stack = np.asarray(stack)
    return stack.reshape(shape) if stack.shape in (shape[1:], shape[:-1]) and stack.size == math.prod(shape) else stack


def per_env(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The value as an array of one row an environment, or an error that names it."""
    try:
        array = np.asarray(value)
        if array.dtype != dtype:
            array = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error
    if array.shape == shape:
        return array
    if array.size != math.prod(shape):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, expected {shape}: one row an environment; nothing was stored"
        )
    return array.reshape(shape)
