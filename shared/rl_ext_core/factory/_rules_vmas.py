"""How VMAS's environments are copied: their random streams belong to their class, and go along as generators."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.factory._state import set_state

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES"]


def _environment(environment: Any) -> tuple[Any, ...]:
    return _bare, (type(environment),), (dict(vars(environment)), _generators(environment)), None, None, _fill


def _bare(cls: Any) -> Any:
    return cls.__new__(cls)


def _generators(environment: Any) -> tuple[Any, np.random.RandomState, random.Random]:
    import torch

    of_torch, of_numpy, of_python = torch.Generator(), np.random.RandomState(), random.Random()
    states = type(environment).vmas_random_state
    of_torch.set_state(states[0])
    of_numpy.set_state(states[1])
    of_python.setstate(states[2])
    return of_torch, of_numpy, of_python


def _fill(environment: Any, state: tuple[dict[str, Any], tuple[Any, Any, Any]]) -> None:
    attributes, (of_torch, of_numpy, of_python) = state
    set_state(environment, attributes)
    # The list itself: every method holds it.
    type(environment).vmas_random_state[:] = of_torch.get_state(), of_numpy.get_state(), of_python.getstate()


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("vmas.simulator.environment.environment:Environment", _environment, None),
]
