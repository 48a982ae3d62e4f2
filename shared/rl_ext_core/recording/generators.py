"""States of the random generators of an environment."""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

_MAX_STATISTICS_BYTES = 4096  # larger ones would take a noticeable part of a reset
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
# Attributes in which environments store generators and spaces. Reading vars(layer) instead would slow down each later
# access to an attribute of the layer, because CPython then stores the attributes in a separate dict.
_NAMES = (
    *("_np_random", "np_random", "rng", "_rng", "np_rng", "prng", "random", "_random", "random_state", "_random_state"),
    *("random_generator", "_random_generator", "generator", "_generator"),
    "ale",
    *("_action_space", "_observation_space", "action_space", "observation_space", "_obs_space"),
    # Not generators: the statistics of NormalizeObservation and NormalizeReward, which results depend on, too.
    *("obs_rms", "return_rms", "discounted_reward"),
)
_STATE_BYTES = 40  # state and increment of PCG64, 128 bits each, and has_uint32 and uinteger, 32 bits each


def layers_of(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, and the environment itself."""
    found = [env]
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        found.append(env)
    return found


def global_states(environment: Any = None) -> tuple[Any, ...]:
    """Return the states of the global generators of Python, NumPy and torch, if it is imported."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


def restore_global_states(environment: Any, states: tuple[Any, ...]) -> None:
    """Set the global generators of Python, NumPy and torch."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is not None and "torch" in sys.modules:
        sys.modules["torch"].set_rng_state(states[2])


class Generators:
    """Random generators of an environment: those in usual attributes of its layers and of its spaces.

    :param layers: layers of the environment, see :func:`layers_of`
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        # Owner, attribute and generator of each place; at first one that does not fit, so that a snapshot maps them.
        self._mapped: list[tuple[Any, str, Any]] = [(self, "_layers", None)]
        # Pickled places, and views of the generators' memory.
        self._views: list[Any] = []
        self._life_layers = [layer for layer in layers if hasattr(layer, "was_real_done")]

    def states(self) -> dict[tuple[int, str], Any]:
        """Return the state of each generator, as plain data, by the number of the layer and the attribute."""
        states = {}
        for place, owner, name in self._places:
            generator = getattr(owner, name, None)
            if generator is None and name == "_np_random" and isinstance(owner, gymnasium.Env):
                created = getattr(owner, "np_random", None)  # otherwise the reset creates it from random numbers
                generator = created if isinstance(created, np.random.Generator) else None
            if type(generator) is np.random.Generator:  # the usual case
                states[place] = generator.bit_generator.state
            elif generator is not None:
                states[place] = state_of_generator(generator)
        return states

    def snapshot(self) -> bytes:
        """Return the states for :func:`read_snapshot`.

        The memory of NumPy's usual generators is copied. Reading their state takes ten times as long.
        """
        for owner, name, generator in self._mapped:
            if getattr(owner, name, None) is not generator:
                self._map_memory()
                break
        return b"".join(self._views) if self._views else pickle.dumps(self.states())

    def _map_memory(self) -> None:
        """Map the memory of all generators, if each is of the usual kind and this version of NumPy stores it so."""
        states = self.states()
        self._mapped, self._views = [], []
        if not all(type(state) is dict and state.get("bit_generator") == "PCG64" for state in states.values()):
            return
        mapped = [(owner, name, getattr(owner, name, None)) for _, owner, name in self._places]
        views = [view for _, _, generator in mapped if generator is not None for view in _views_of(generator)]
        views.insert(0, pickle.dumps(tuple(states)))
        if read_snapshot(io.BytesIO(b"".join(views))) == states:
            self._mapped, self._views = mapped, views

    def is_full_reset(self) -> bool:
        """Whether the next reset does not depend on earlier steps.

        Wrappers that end an episode at each lost life do not reset the game after it.
        """
        return not self._life_layers or all(layer.was_real_done for layer in self._life_layers)

    @functools.cached_property
    def _places(self) -> list[tuple[tuple[int, str], Any, str]]:
        """Name, owner and attribute of each generator, also of those that are created later."""
        found: set[int] = set()
        places: list[tuple[tuple[int, str], Any, str]] = []
        for number, layer in reversed(list(enumerate(self._layers))):  # a wrapper may return attributes of inner layers
            for name in _NAMES:
                if name == "np_random" and isinstance(layer, gymnasium.Env):
                    continue  # a property, which creates the generator
                if name == "_np_random" and isinstance(layer, gymnasium.Wrapper):
                    continue  # the attribute of the innermost environment
                value = getattr(layer, name, None)
                if isinstance(value, gymnasium.Space) and id(value) not in found:
                    places += [((number, place), space, "_np_random") for place, space in _spaces_in(value, name)]
                elif (value is None and name == "_np_random") or (
                    id(value) not in found
                    and (isinstance(value, _GENERATORS) or _is_statistics(value) or _is_emulator(value))
                ):
                    places.append(((number, name), layer, name))
                found.add(id(value))
        return places

    def restore(self, states: dict[tuple[int, str], Any]) -> None:
        """Set the generators to states of an environment that was built in the same way."""
        for (number, name), state in states.items():
            layer = self._layers[number]
            attribute, *path = name.split("/")
            owner: Any = getattr(layer, attribute, None)
            if isinstance(owner, gymnasium.Space):
                for part in path:
                    parts: Any = owner.spaces  # type: ignore[attr-defined]
                    owner = parts[part] if isinstance(parts, dict) else parts[int(part)]
                owner._np_random = restore_generator(owner._np_random, state)
            else:
                setattr(layer, attribute, restore_generator(owner, state))


def read_snapshot(file: io.BytesIO) -> dict[tuple[int, str], Any]:
    """Read the states of generators, by the number of the layer and the attribute."""
    places = pickle.load(file)
    if isinstance(places, dict):
        return places
    states: dict[tuple[int, str], Any] = {}
    for place in places:
        part = file.read(_STATE_BYTES)
        state, inc, has_uint32, uinteger = (
            int.from_bytes(part[slice(*span)], sys.byteorder) for span in ((0, 16), (16, 32), (32, 36), (36, 40))
        )
        states[place] = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": inc},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }
    return states


def _views_of(generator: np.random.Generator) -> tuple[Any, Any]:
    """Return views of the memory of a PCG64 generator.

    NumPy stores a pointer to the state and the increment, has_uint32, and uinteger.
    """
    address = generator.bit_generator.ctypes.state_address
    numbers = ctypes.c_void_p.from_address(address).value
    assert numbers is not None
    rest = address + ctypes.sizeof(ctypes.c_void_p)
    return (ctypes.c_char * 32).from_address(numbers), (ctypes.c_char * 8).from_address(rest)


def _is_statistics(value: Any) -> bool:
    return type(value).__name__ == "RunningMeanStd" or type(value) is np.ndarray


def _is_emulator(value: Any) -> bool:
    """Whether this is Atari's emulator. Only its whole state includes the generator of sticky actions."""
    return type(value).__module__.startswith("ale_py.") and hasattr(value, "cloneState")


def state_of_generator(generator: Any) -> Any:
    """Return the state of a generator as plain data; None for one of the operating system, and large statistics."""
    if type(generator) is np.ndarray:
        return generator.copy() if generator.nbytes <= _MAX_STATISTICS_BYTES else None
    if _is_statistics(generator):
        mean, var = np.array(generator.mean), np.array(generator.var)
        return {"mean": mean, "var": var, "count": generator.count} if mean.nbytes <= _MAX_STATISTICS_BYTES else None
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if _is_emulator(generator):
        return generator.cloneState(include_rng=True).__getstate__()
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def restore_generator(generator: Any, state: Any) -> Any:
    """Return a generator with a state: the present one if its kind fits, else a new one."""
    if state is None:
        return generator
    if _is_emulator(generator):
        kind: Any = type(generator.cloneState())
        saved = kind.__new__(kind)
        saved.__setstate__(state)
        generator.restoreState(saved)
    elif isinstance(state, np.ndarray):
        generator = state.copy()
    elif isinstance(state, tuple):
        generator = generator if isinstance(generator, random.Random) else random.Random()
        generator.setstate(state)
    elif "mean" in state:
        for name, value in state.items():
            setattr(generator, name, np.array(value) if isinstance(value, np.ndarray) else value)
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
    yield name, space
    parts = getattr(space, "spaces", ())
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if isinstance(part, gymnasium.Space) and "/" not in str(key):
            yield from _spaces_in(part, f"{name}/{key}")
