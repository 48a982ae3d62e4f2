"""Ids that a function names: where a script or a notebook has registered them, a worker has not."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["filled", "named_by", "register"]


def named_by(build: Any) -> list[Any]:
    """Give the specifications of ids that stand in a function's code, as far as gymnasium does not bring them."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return []
    found = {name: gymnasium.registry[name] for name in _texts(build) if name in gymnasium.registry}
    return [copy.deepcopy(spec) for spec in found.values() if not str(spec.entry_point).startswith("gymnasium.")]


def register(specs: Iterable[Any]) -> None:
    """Register specifications of ids that this process does not know."""
    for spec in specs:
        import gymnasium

        gymnasium.registry.setdefault(spec.id, spec)


def _texts(build: Any) -> Iterator[str]:
    if isinstance(build, functools.partial):
        for part in (build.func, *build.args, *build.keywords.values()):
            yield from _texts(part)
    elif isinstance(build, str):
        yield build
    elif isinstance(build, types.FunctionType):
        yield from _constants(build.__code__)
        for part in (*(build.__defaults__ or ()), *(cell.cell_contents for cell in filled(build))):
            if isinstance(part, (str, types.FunctionType)):
                yield from _texts(part)


def _constants(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _constants(constant)


def filled(function: types.FunctionType) -> Iterator[types.CellType]:
    """Give the variables of a function's own that have a value."""
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018 (raises if there is nothing in it yet)
        except ValueError:
            continue
        yield cell
