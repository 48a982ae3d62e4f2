"""Specifications of gymnasium's, and what its wrappers note of having been asked for one, or of having checked."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

from rl_ext_core.factory import _kinds
from rl_ext_core.factory._overrides import layers

__all__ = ["is_spec", "spec_of", "without_notes"]

# What wrappers remember that changes nothing about what they return, and what stands for not remembering anything.
_NOTES: dict[str, dict[str, Any]] = {
    "Wrapper": {"_cached_spec": None},
    "PassiveEnvChecker": {
        "checked_reset": False,
        "checked_step": False,
        "checked_render": False,
        "checked_data_reuse": False,
        "_previous_data": None,
    },
}


def is_spec(value: Any) -> bool:
    """Whether this is a specification."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(value, gymnasium.envs.registration.EnvSpec)


def spec_of(environment: Any) -> Any:
    """Copy the specification by which gymnasium makes all layers of an environment; None: there is none."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(environment, gymnasium.Env):
        return None
    with without_notes(environment):
        try:
            spec = copy.deepcopy(environment.spec)
        except Exception:  # of wrappers that do not tell their arguments
            return None
    if spec is None or any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
        return None
    return spec


@contextlib.contextmanager
def without_notes(environment: Any) -> Iterator[None]:
    """Have an environment as if its wrappers had never been asked or used; it is left as it was."""
    noted = [(held, {name: held[name] for name in blank if name in held}, blank) for held, blank in _notes(environment)]
    for held, notes, blank in noted:
        held.update((name, blank[name]) for name in notes)
    try:
        yield
    finally:
        for held, notes, _ in noted:
            held.update(notes)


def _notes(environment: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for layer in layers(environment):
        held = _kinds.dictionary(layer)
        for base in type(layer).__mro__:
            if held is not None and base.__module__.startswith("gymnasium.") and base.__name__ in _NOTES:
                yield held, _NOTES[base.__name__]
