"""Checks of what callers pass."""

from __future__ import annotations

import operator
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.planning import parse_bytes


def _like(value: Any) -> str:
    """A whole number that may be what was meant: 1e6 and "4GB" have one."""
    try:
        number = parse_bytes(value) if isinstance(value, str) else int(value)
    except (InvalidArgumentError, TypeError, ValueError, OverflowError):
        number = 1
    return f"{max(number, 1):_}"


def at_least_one(name: str, value: Any) -> int:
    """The value as an integer, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}={_like(value)}") from None
    if number < 1:
        raise InvalidArgumentError(f"{name}={number} must be at least 1")
    return number
