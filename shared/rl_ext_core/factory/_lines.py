"""The source line that a person would write to build an environment, as well as it can be told from an instance."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rl_ext_core.factory import _captured, _kinds, _specs

__all__ = ["of_callable", "of_instance", "of_spec"]

_LONGEST = 60
# What is wrapped is found under one of these names.
_INNER = ("base_env", "env", "_env")


def of_callable(build: Any) -> str:
    """Give the line of a function, a class or a partial."""
    if isinstance(build, functools.partial):
        return f"lambda: {_name(build.func)}({_arguments(build.args, build.keywords)})"
    if isinstance(build, type):
        return f"lambda: {_name(build)}()"
    if getattr(build, "__name__", "") == "<lambda>":
        return _of_lambda(build) or "lambda: ..."
    return _name(build) if inspect.isroutine(build) else f"{_name(type(build))}(...)"


def _of_lambda(build: Any) -> str | None:
    # Out of the whole file: the lines of a lambda alone are often no valid Python.
    try:
        source = "".join(inspect.findsource(build)[0])
        tree = ast.parse(source)
    except Exception:  # typed at a prompt, changed since, too deep for the parser: it is for messages alone
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _is_of(node, build.__code__)]
    if len(found) != 1:
        return None
    text = ast.get_source_segment(source, found[0]) or ""
    return text if "\n" not in text else ast.unparse(found[0])


def _is_of(node: ast.Lambda, code: Any) -> bool:
    if node.lineno != code.co_firstlineno:
        return False
    if not hasattr(code, "co_positions"):  # Python 3.10
        return True
    begin = node.body.lineno, node.body.col_offset
    places = [(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None]
    return begin in places


def of_spec(spec: Any) -> str:
    """Give the line of a gymnasium specification."""
    line = f"gymnasium.make({_arguments((spec.id,), dict(_told(spec)))})"
    for wrapper in spec.additional_wrappers:
        line = f"{wrapper.name}({', '.join(filter(None, [line, _arguments((), wrapper.kwargs or {})]))})"
    return f"lambda: {line}"


def _told(spec: Any) -> Iterator[tuple[str, Any]]:
    """Give the arguments that make this of what is registered under the id."""
    known = sys.modules["gymnasium"].registry.get(spec.id)
    usual = {} if known is None else known.kwargs
    yield from (pair for pair in spec.kwargs.items() if repr(pair[1]) != repr(usual.get(pair[0], pair)))
    if known is not None and spec.max_episode_steps != known.max_episode_steps:
        yield "max_episode_steps", -1 if spec.max_episode_steps is None else spec.max_episode_steps
    if known is not None and spec.disable_env_checker and not known.disable_env_checker:
        yield "disable_env_checker", True


def of_instance(environment: Any) -> str:
    """Give the line of an instance: by its specification or what is known of its constructor, else with dots."""
    return f"lambda: {_expression(environment)}"


def _expression(environment: Any) -> str:
    spec = _specs.spec_of(environment)
    if spec is not None:
        return of_spec(spec).removeprefix("lambda: ")
    call = _captured.recorded(environment)
    if call is not None:
        return f"{_name(call[0])}({_arguments(*call[1:])})"
    kind, held = type(environment), _kinds.attributes(environment)
    held |= held.get("_modules") or {}  # where torch's modules have theirs
    if "_constructor_kwargs" in held:
        return f"{_name(kind)}({_of_torchrl(held)})"
    if "_ezpickle_args" in held:
        return f"{_name(kind)}({_arguments(held['_ezpickle_args'], held['_ezpickle_kwargs'])})"
    inner = next((held[name] for name in _INNER if hasattr(held.get(name), "step")), None)
    if inner is None:
        return f"{_name(kind)}({'...' if _takes(kind) else ''})"
    rest = f", {_name(type(held['_transform']))}(...)" if "_transform" in held else ", ..." if _takes(kind) > 1 else ""
    return f"{_name(kind)}({_expression(inner)}{rest})"


def _of_torchrl(held: Mapping[str, Any]) -> str:
    options = dict(held["_constructor_kwargs"])
    # What its constructors take out of the arguments before they are kept.
    options |= {"frame_skip": held["frame_skip"]} if held.get("frame_skip", 1) != 1 else {}
    options |= {"device": str(held["_device"])} if held.get("_device") is not None else {}
    if options.get("disable_env_checker") is True:  # by default
        del options["disable_env_checker"]
    first = [_expression(options.pop("env"))] if "env" in options else []
    args = (options.pop("env_name"),) if "env_name" in options else ()
    return ", ".join(filter(None, [*first, _arguments(args, options)]))


def _takes(kind: type) -> int:
    """Count the parameters of a constructor; many: it does not say."""
    try:
        return len(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return sys.maxsize


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(_short, args), *(f"{name}={_short(value)}" for name, value in kwargs.items())])


def _short(value: Any) -> str:
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    text = _expression(value) if hasattr(value, "step") and hasattr(value, "reset") else repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text else "..."


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__name__
    return name.rpartition("<locals>.")[2]
