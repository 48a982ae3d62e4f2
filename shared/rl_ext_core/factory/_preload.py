"""What functions and environments refer to that a worker needs: modules, and ids that a script has registered."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from rl_ext_core.factory import _rules

__all__ = ["filled", "merged", "named_by", "of_callable", "of_instance", "of_modules", "register"]

# Packages that import without starting a thread, a display or CUDA, and without asking which device to use. The user's
# own modules are never among them: they change between two runs of a notebook cell.
_SAFE = {
    "ale_py",
    "dm_control",
    "dm_env",
    "dmlab2d",
    "gymnasium",
    "meltingpot",
    "mujoco",
    "pettingzoo",
    "rl_ext_core",
    "tensordict",
    "torch",
    "torchrl",
    "torchrl_ext",
    "vmas",
}


# What one import brings along needs no other name: each list has a fork server of its own, which takes time to start
# and memory to keep.
_WHOLE = {
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
    "torch": "torch",
    "torchrl": "torchrl.envs",
    "torchrl_ext": "torchrl_ext",
}
_BRINGS = {
    "torchrl_ext": {"gymnasium", "tensordict", "torch", "torchrl.envs"},
    "torchrl.envs": {"tensordict", "torch"},
}


def merged(*lists: Iterable[str]) -> tuple[str, ...]:
    """Give one list for several, the same one whatever their order is."""
    names = {name for names in lists for name in names}
    brought = {other for name in names for other in _BRINGS.get(name, ())}
    return tuple(sorted(names - brought))


def of_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Keep those that are safe."""
    return merged(_whole(name) for name in names if name.partition(".")[0] in _SAFE)


def _whole(name: str) -> str:
    if name.startswith("gymnasium.envs.mujoco"):
        return "gymnasium.envs.mujoco"
    return _WHOLE.get(name.partition(".")[0], name)


def of_instance(environment: Any) -> tuple[str, ...]:
    """Name the modules of an environment's layers."""
    return of_modules([base.__module__ for layer in _rules.layers(environment) for base in type(layer).__mro__])


def of_callable(build: Any) -> tuple[str, ...]:
    """Name the modules of what a function refers to, as far as its code shows."""
    return of_modules(_mentioned(build))


def _mentioned(build: Any) -> Iterator[str]:
    if isinstance(build, functools.partial):
        for part in (build.func, *build.args, *build.keywords.values()):
            yield from _mentioned(part)
    elif isinstance(build, types.FunctionType):
        yield build.__module__ or ""
        for name in build.__code__.co_names:
            yield from _mentioned_by_name(build.__globals__.get(name))
    elif isinstance(build, type):
        yield from (base.__module__ for base in build.__mro__)
    elif hasattr(build, "entry_point"):  # gymnasium's specification
        if isinstance(build.entry_point, str):
            yield build.entry_point.partition(":")[0]
    else:
        yield type(build).__module__


def _mentioned_by_name(value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, (type, types.FunctionType)):
        yield value.__module__ or ""


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
