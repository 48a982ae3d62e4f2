"""Rules for individual simulators and libraries: settings of their C objects, caches, seeds.

MuJoCo: https://mujoco.readthedocs.io/en/stable/python.html, the Arcade Learning Environment: https://ale.farama.org,
Box2D: https://box2d.org/documentation, VMAS: https://github.com/proroklab/VectorizedMultiAgentSimulator
"""

from __future__ import annotations

import contextlib
import functools
import io
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["ale_fields", "cache_attributes", "field_reader", "is_skipped", "seed_simulators", "why_unpicklable"]

# MuJoCo structures that contain settings. MjData contains the state of an episode, which copies do not need.
_MUJOCO = ("MjModel", "MjOption", "MjStatistic", "MjVisual", "MjvCamera", "MjvOption")
# A MuJoCo field that identifies one compilation of an XML file, so it differs in each copy.
_SIGNATURE = "signature"
# Settings of ale::stella::Settings, which cannot list them. It returns the default for an unknown setting.
_ALE = {
    "Int": ("max_num_frames", "max_num_frames_per_episode", "frame_skip", "reward_min", "reward_max", "max_turn_time"),
    "Bool": ("color_averaging", "send_rgb", "truncate_on_loss_of_life", "sound", "sound_obs"),
    "Float": ("repeat_action_probability",),
    "String": ("rom_file",),
}
_BOX2D = ("gravity", "warmStarting", "continuousPhysics", "subStepping", "autoClearForces")
# Packages and modules whose C objects are not inspected. They contain no settings: the constructor creates them from
# settings that are visible elsewhere, or each step changes them.
_SKIPPED = {
    *("mujoco", "Box2D", "ale_py", "pygame", "OpenGL", "glfw"),
    *("dm_control.mujoco.index", "SWIG", "weakref"),
}


@functools.lru_cache(maxsize=10_000)
def field_reader(kind: Any) -> Callable[[Any], dict[str, Any]] | None:
    """Return the function that reads settings of a simulator's C class, or None."""
    for base in kind.__mro__:
        module, name = str(getattr(base, "__module__", "")), base.__name__
        if module.startswith("mujoco._structs"):
            return _mujoco_fields if name in _MUJOCO or "." in base.__qualname__ else None
        if module.startswith("ale_py") and name == "ALEInterface":
            return ale_fields
        if module.startswith("Box2D") and (name == "b2World" or name.endswith("Def")):
            return _box2d_fields
    return None


def _mujoco_fields(structure: Any) -> dict[str, Any]:
    found = {}
    kind: Any = type(structure)
    for name in _property_names(kind):
        with contextlib.suppress(Exception):  # Some fields raise if the model does not use their feature.
            found[name] = getattr(structure, name)
    return found


@functools.lru_cache(maxsize=1000)
def _property_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the public properties whose getters are not Python functions."""
    # Properties that subclasses define in Python are not fields of the C object.
    parts = {
        name: part for base in kind.__mro__ for name, part in vars(base).items() if issubclass(type(part), property)
    }
    names = (name for name, part in parts.items() if not isinstance(part.fget, types.FunctionType))
    return tuple(name for name in names if not name.startswith("_") and name != _SIGNATURE)


def ale_fields(emulator: Any) -> dict[str, Any]:
    """Return the settings of an Atari emulator, which cannot be set on a copy."""
    return {name: getattr(emulator, f"get{kind}")(name) for kind, names in _ALE.items() for name in names}


def _box2d_fields(item: Any) -> dict[str, Any]:
    """Read the settings of a world, or all plain fields of a definition."""
    kind: Any = type(item)
    names = _BOX2D if kind.__name__ == "b2World" else _property_names(kind)
    found = {name: getattr(item, name) for name in names if hasattr(item, name)}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))} | {
        name: tuple(value) for name, value in found.items() if type(value).__name__ == "b2Vec2"
    }


# Attributes in which libraries cache values that they derive from other attributes, by package.
_LAST_OPERATIONS = ("_last_op", "__last_op_queue", "_last_op_queue")
_LOCKED = {"__lock_parents_weakrefs", "_lock_parents_weakrefs"}
_LIBRARY_CACHES = {
    "gymnasium": {"_np_random", "_np_random_seed", "_cached_spec"},
    "pandas": {"_cache", "_item_cache"},
    "tensordict": {"_cache", "_has_mps_val", "_is_locked", "_lock_id", *_LAST_OPERATIONS, *_LOCKED},
    "torchrl": {"_cache", "_container", "_encode", *_LOCKED},
}


@functools.lru_cache(maxsize=10_000)
def cache_attributes(kind: Any) -> frozenset[str]:
    """Return the names of a class's attributes that are only caches of its library."""
    packages = {str(getattr(base, "__module__", "")).partition(".")[0] for base in kind.__mro__}
    return frozenset(name for package in packages for name in _LIBRARY_CACHES.get(package, ()))


# Standard library packages whose objects belong to one process: files, threads, connections, shared memory.
_PROCESS_BOUND = {
    *("_cffi_backend", "_csv", "_ctypes", "_io", "_thread", "asyncio", "concurrent", "ctypes", "mmap"),
    *("multiprocessing", "select", "selectors", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading"),
}


@functools.lru_cache(maxsize=10_000)
def why_unpicklable(kind: Any) -> str | None:
    """Return the reason why instances cannot be pickled for another process, or None if they can."""
    module, *bases = (str(getattr(base, "__module__", "")) for base in kind.__mro__)
    if module.partition(".")[0] in _PROCESS_BOUND or any(base.startswith("multiprocessing.") for base in bases):
        return "it belongs to one process"
    is_finalizer = (module, kind.__name__) == ("weakref", "finalize")
    return "its cleanup would run for every copy" if is_finalizer else None


def name_of_output_file(item: Any) -> str | None:
    """Return the name of a file that is open for writing, or None for other objects."""
    with contextlib.suppress(Exception):
        if isinstance(item, io.IOBase) and not item.closed and item.writable() and item.fileno() > 2:
            return str(getattr(item, "name", ""))
    return None


@functools.lru_cache(maxsize=10_000)
def is_skipped(kind: Any) -> bool:
    """Whether objects of a C class are not inspected, because they contain no settings."""
    modules = {str(getattr(base, "__module__", "SWIG")) for base in kind.__mro__ if base is not object}
    is_known = any(name in _SKIPPED or name.partition(".")[0] in _SKIPPED for name in modules)
    return is_known or kind.__name__ == "BlockValuesRefs"  # pandas tracks other references to an array in it.


def seed_simulators(layers: Iterable[Any], stream: np.random.SeedSequence) -> None:
    """Seed simulators that would otherwise use the same seed in every worker, or a random one.

    :param layers: Layers of an environment.
    :param stream: Seeds of the worker.
    """
    word = int(stream.generate_state(1)[0] >> 1)
    for layer in layers:
        if type(layer).__module__ == "vmas.simulator.environment.environment":  # The default seed is 0.
            layer.seed(word)
        elif type(layer).__module__ == "ale_py.env":  # The default seed is random, so runs could not be reproduced.
            layer.seed_game(word)
            layer.load_game()
