"""How TorchRL's environments are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_ext_core.factory._state import layer

__all__ = ["RULES"]

# TorchRL's ``__new__`` puts these on the class; in a process that has constructed no environment it has none or others.
_OF_CLASS = ("_inplace_update", "_batch_locked", "_device", "_cache_in_keys")


def _environment(env: Any) -> tuple[Any, ...]:
    kind, state = type(env), layer(env, dict(vars(env)))[2:]
    return _blank, (kind, {name: vars(kind)[name] for name in _OF_CLASS if name in vars(kind)}), *state


def _blank(kind: Any, of_class: dict[str, Any]) -> Any:
    for name, value in of_class.items():
        setattr(kind, name, value)
    return object.__new__(kind)


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("torchrl.envs.common:EnvBase", _environment, None),
]
