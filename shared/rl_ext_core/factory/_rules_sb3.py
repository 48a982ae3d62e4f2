"""How Stable Baselines3's wrappers of vectorised environments are copied."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rl_ext_core.factory._state import layer, set_state

__all__ = ["RULES"]

# All that the class has, as a dictionary: taken from the class again.
_OF_CLASS = "class_attributes"


def _wrapper(wrapper: Any) -> tuple[Any, ...]:
    made = layer(wrapper, _settings(wrapper))
    return (*made[:5], _fill)


def _settings(wrapper: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(wrapper).items() if name != _OF_CLASS}


def _fill(copy: Any, state: dict[str, Any]) -> None:
    set_state(copy, {**state, _OF_CLASS: dict(inspect.getmembers(type(copy)))})


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("stable_baselines3.common.vec_env.base_vec_env:VecEnvWrapper", _wrapper, _settings),
]
