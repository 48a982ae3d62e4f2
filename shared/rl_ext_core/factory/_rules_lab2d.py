"""How Melting Pot's environments are copied: the simulator is built anew by Melting Pot's own function for that.

Every reset after the first builds a new simulator, with a seed that is one higher; hence nothing that the old one holds
outlasts an episode, and a copy needs the function alone. It is a closure over the simulator's settings, which are kept,
and over the chain of seeds, which each copy begins elsewhere.
"""

from __future__ import annotations

import random
import types
from typing import TYPE_CHECKING, Any

from rl_ext_core.errors import InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_ext_core.factory._rules import Rules


_SEEDS, _SETTINGS = "env_seeds", "lab2d_settings_dict"
_LARGEST_SEED = 2**32 - 1
# What a reset makes anew.
_PASSING = ("_env", "_rebuild_environment", "_reset")


class EnvSeeds:
    """The seeds of a copy's simulators, counted as Melting Pot counts them.

    The first is drawn from :mod:`random` when it is needed: by then the worker has seeded that generator.
    """

    def __init__(self) -> None:
        self._next: int | None = None

    def __iter__(self) -> EnvSeeds:
        return self

    def __next__(self) -> int:
        # Not zero at first, as there.
        seed = random.randint(1, _LARGEST_SEED) if self._next is None else self._next
        self._next = (seed + 1) % (_LARGEST_SEED + 1)
        return seed


def _reset_wrapper(wrapper: Any) -> tuple[Any, ...]:
    build = _with_own_seeds(wrapper._rebuild_environment)
    return _make_reset_wrapper, (type(wrapper), build), _lasting(wrapper)


def _reset_wrapper_settings(wrapper: Any) -> dict[str, Any]:
    build = wrapper._rebuild_environment
    simulator = _held(build, _SETTINGS)
    if simulator is not None:
        # The seed is that of the latest episode.
        build = {name: value for name, value in simulator.items() if name != "env_seed"}
    return {"build": build, "lasting": _lasting(wrapper)}


def _make_reset_wrapper(cls: Any, build: Callable[[], Any]) -> Any:
    wrapper = cls.__new__(cls)
    wrapper._env, wrapper._rebuild_environment, wrapper._reset = build(), build, False
    return wrapper


def _lasting(wrapper: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(wrapper).items() if name not in _PASSING}


def _held(function: Any, name: str) -> Any:
    """Return what a closure holds under a name; None: it is no closure, or one of somebody's own."""
    if isinstance(function, types.FunctionType) and name in function.__code__.co_freevars:
        return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents
    return None


def _with_own_seeds(build: Any) -> Any:
    """Copy a closure over seeds, with a chain of the copy's own in place of them; leave anything else as it is."""
    if _held(build, _SEEDS) is None:
        return build
    closure = tuple(
        types.CellType(EnvSeeds()) if name == _SEEDS else cell
        for name, cell in zip(build.__code__.co_freevars, build.__closure__, strict=True)
    )
    copy = types.FunctionType(build.__code__, build.__globals__, build.__name__, build.__defaults__, closure)
    copy.__module__, copy.__qualname__ = build.__module__, build.__qualname__
    return copy


def _bare_simulator(simulator: Any) -> tuple[Any, ...]:
    raise InvalidTypeError(
        f"{simulator!r} does not tell by which settings it was made, so it cannot be copied; expected one that Melting "
        "Pot built, in its ResetWrapper. Give the function that builds the environment: make_env, not make_env()"
    )


def _bare_simulator_settings(simulator: Any) -> dict[str, Any]:
    return {"level": simulator.name()}


# Class, rule, and what a copy has in common with the original.
RULES: Rules = [
    ("meltingpot.utils.substrates.wrappers.reset_wrapper:ResetWrapper", _reset_wrapper, _reset_wrapper_settings),
    ("dmlab2d.dmlab2d_pybind:Lab2d", _bare_simulator, _bare_simulator_settings),
]
