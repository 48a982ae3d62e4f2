"""Settings that differ between workers, put into the layer that has them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import _kinds, _state

__all__ = ["apply", "layers", "owner"]


def layers(environment: Any) -> Iterator[Any]:
    """Give an environment and those that it wraps, the outermost first."""
    waiting, seen = [environment], {id(environment)}
    while waiting:
        layer = waiting.pop(0)
        yield layer
        held = _kinds.attributes(layer)
        for value in [*held.values(), *(held.get("_modules") or {}).values()]:  # torch keeps modules in a dict
            if id(value) not in seen and _state.is_layer(value):
                seen.add(id(value))
                waiting.append(value)


def owner(environment: Any, name: str, value: Any) -> Any:
    """Find the outermost layer that has an attribute.

    :param value: for the message
    :raises InvalidArgumentError: there is none
    """
    found = next((layer for layer in layers(environment) if _has(layer, name)), None)
    if found is None:
        raise InvalidArgumentError(_unknown(environment, name, value))
    return found


def apply(environment: Any, overrides: Mapping[str, Any]) -> None:
    """Set attributes, each on the outermost layer that has it.

    :param environment: an environment
    :param overrides: names of attributes and their values
    :raises InvalidArgumentError: no layer has such an attribute, or it does not keep the value
    """
    for name, value in overrides.items():
        layer = owner(environment, name, value)
        try:
            setattr(layer, name, value)
        except AttributeError as error:
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} cannot be set on {type(layer).__name__}: {error}. {_CONSTRUCT}"
            ) from error
        kept = getattr(layer, name)
        if kept is not value and not _equal(kept, value):
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which keeps {kept!r}. {_CONSTRUCT}"
            )


_CONSTRUCT = (
    "What only the constructor takes needs the constructor: hand over the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


def _has(layer: Any, name: str) -> bool:
    return name in _kinds.attributes(layer) or any(name in vars(base) for base in type(layer).__mro__)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool((one == other) if not hasattr(one, "shape") else (one == other).all())
    except (TypeError, ValueError):
        return False


def _unknown(environment: Any, name: str, value: Any) -> str:
    names = sorted({known for layer in layers(environment) for known in _kinds.attributes(layer)})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    return (
        f"overrides: no layer of {type(environment).__name__} has the attribute {name}={value!r}; there are "
        f"{', '.join(near)}. {_CONSTRUCT}"
    )
