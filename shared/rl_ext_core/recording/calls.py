"""Calls of a vectorized environment that change an environment, and so are part of its episode's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["RECORDED_CALLS", "record_setting"]


def _call_or_get(env: Any, data: Any) -> Any:
    """Call a method of an environment, or return an attribute."""
    name, args, kwargs = data
    found = env.get_wrapper_attr(name)
    return found(*args, **kwargs) if callable(found) else found


# Each function calls one environment with its data.
RECORDED_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "env_method": lambda env, data: env.get_wrapper_attr(data[0])(*data[1], **data[2]),
    "call": _call_or_get,
    "set_attr": lambda env, data: setattr(env, *data),
    "set_wrapper_attr": lambda env, data: env.set_wrapper_attr(*data),
}
_SETTERS = ("set_attr", "set_wrapper_attr")


def record_setting(settings: dict[tuple[str, str], tuple[str, Any]], name: str, data: Any) -> None:
    """Record a call if it sets an attribute, in place of an earlier one for this attribute.

    :param settings: calls by their name and the attribute, in the order of the last values
    """
    if name in _SETTERS:
        settings.pop((name, data[0]), None)
        settings[name, data[0]] = name, data
