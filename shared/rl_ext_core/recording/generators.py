"""States of the random generators of an environment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

__all__ = ["generator_states", "layers_of", "restore_generators"]

# The emulator of Atari has a generator of its own, for sticky actions, which only its whole state includes.
_EMULATOR = "ale"


def layers_of(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, and the environment itself."""
    found = [env]
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        found.append(env)
    return found


def generator_states(layers: list[Any]) -> dict[tuple[int, str], Any]:
    """Return the state of each generator that is an attribute of a layer or of its spaces.

    :param layers: layers of an environment
    :return: states by the number of the layer and the name of the attribute. They contain plain data only
    """
    states = {}
    for number, layer in enumerate(layers):
        for name, value in vars(layer).items():
            if (state := _state_of(value)) is not None:
                states[number, name] = state
            elif isinstance(value, gymnasium.Space):
                for place, space in _spaces_in(value, name):
                    if space._np_random is not None:
                        states[number, place] = _state_of(space._np_random)
        if _is_atari(layer):
            states[number, _EMULATOR] = layer.ale.cloneState(include_rng=True).__getstate__()
    return states


def restore_generators(layers: list[Any], states: dict[tuple[int, str], Any]) -> None:
    """Set the generators of an environment's layers to recorded states.

    :param layers: layers of an environment that was built like the recorded one
    :param states: see :func:`generator_states`
    """
    for (number, name), state in states.items():
        layer = layers[number]
        if name == _EMULATOR and _is_atari(layer):
            kind: Any = type(layer.ale.cloneState())
            emulator_state = kind.__new__(kind)
            emulator_state.__setstate__(state)
            layer.ale.restoreState(emulator_state)
            continue
        attribute, *path = name.split("/")
        owner: Any = vars(layer).get(attribute)
        if isinstance(owner, gymnasium.Space):
            for part in path:
                parts: Any = owner.spaces  # type: ignore[attr-defined]
                owner = parts[part] if isinstance(parts, dict) else parts[int(part)]
            owner._np_random = _restored(owner._np_random, state)
        else:
            setattr(layer, attribute, _restored(owner, state))


def _is_atari(layer: Any) -> bool:
    return type(layer).__module__ == "ale_py.env"


def _state_of(value: Any) -> Any:
    """Return the state of a generator as plain data; None for other values."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    return None


def _restored(generator: Any, state: Any) -> Any:
    """Return a generator with a state: the present one if its kind fits, else a new one."""
    if isinstance(state, tuple):
        generator = generator if isinstance(generator, random.Random) else random.Random()
        generator.setstate(state)
    elif "has_gauss" in state:
        generator = generator if isinstance(generator, np.random.RandomState) else np.random.RandomState()
        generator.set_state(state)
    else:
        kind = state["bit_generator"]
        if not isinstance(generator, np.random.Generator) or type(generator.bit_generator).__name__ != kind:
            generator = np.random.Generator(getattr(np.random, kind)())
        generator.bit_generator.state = state
    return generator


def _spaces_in(space: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a space and the spaces in it, with their places as a path."""
    yield name, space
    parts = getattr(space, "spaces", ())
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if isinstance(part, gymnasium.Space) and "/" not in str(key):
            yield from _spaces_in(part, f"{name}/{key}")
