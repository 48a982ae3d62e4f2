"""Registers the rules for what environments of known libraries hold."""

from __future__ import annotations

import importlib
import importlib.util

from rl_ext_core.factory import _rebuilders

_MODULES = (
    "basics",
    "references",
    "threads",
    "caches",
    "data",
    "mujoco",
    "atari",
    "box2d",
    "pygame",
    "sb3",
    "torchrl",
    "meltingpot",
    "robosuite",
    "dm_control",
    "pettingzoo",
    "vmas",
)

for _name in _MODULES:
    if importlib.util.find_spec(f"rl_ext_core.factory._rules_{_name}") is not None:
        _rebuilders.add(importlib.import_module(f"rl_ext_core.factory._rules_{_name}").RULES)
