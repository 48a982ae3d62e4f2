"""What functions and environments refer to that a worker needs: modules, and ids that a script has registered."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from rl_ext_core.factory import _parts, _rules

__all__ = ["merged", "named_by", "of_callable", "of_instance", "of_modules", "referred", "register"]

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
    return of_modules(module for value in referred(build) for module in _modules_of(value))


def _modules_of(value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, type):
        yield from (base.__module__ for base in value.__mro__)
    elif isinstance(value, types.FunctionType):
        yield value.__module__ or ""
    elif isinstance(getattr(value, "entry_point", None), str):  # gymnasium's specification
        yield value.entry_point.partition(":")[0]
    else:
        yield type(value).__module__


def named_by(build: Any) -> list[Any]:
    """Give the specifications of ids that stand in a function's code, as far as gymnasium does not bring them.

    Where a script or a notebook has registered them, a worker has not.
    """
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return []
    names = (value for value in referred(build) if isinstance(value, str))
    found = {name: gymnasium.registry[name] for name in names if name in gymnasium.registry}
    return [copy.deepcopy(spec) for spec in found.values() if not str(spec.entry_point).startswith("gymnasium.")]


def register(specs: Iterable[Any]) -> None:
    """Register specifications of ids that this process does not know."""
    for spec in specs:
        import gymnasium

        gymnasium.registry.setdefault(spec.id, spec)


def referred(build: Any) -> Iterator[Any]:
    """Give what a callable is and refers to: a partial's arguments; a function's constants, variables and globals."""
    waiting, seen = [build], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:  # a function may be among its own variables
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
            continue
        yield value
        if isinstance(value, types.FunctionType):
            yield from _texts_in(value.__code__)
            yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
            waiting += [*(value.__defaults__ or ()), *_parts.variables(value)]


def _texts_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts_in(constant)
