"""What there is to know about single simulators: the fields of objects in C, and seeds of their own.

MuJoCo: https://mujoco.readthedocs.io/en/stable/python.html, the Arcade Learning Environment: https://ale.farama.org,
Box2D: https://box2d.org/documentation, VMAS: https://github.com/proroklab/VectorizedMultiAgentSimulator
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["fields", "is_left_alone", "seed_simulators"]

# Structures of MuJoCo's that are settings. MjData is the state of an episode, which begins anew at a reset.
_MUJOCO = ("MjModel", "MjOption", "MjStatistic", "MjVisual", "MjvCamera", "MjvOption")
# Which compilation of an XML file it comes from; a copy has another one.
_SIGNATURE = "signature"
# The settings of ale::stella::Settings. It does not list them; one that it does not know reads as its default.
_ALE = {
    "Int": ("max_num_frames", "max_num_frames_per_episode", "frame_skip", "reward_min", "reward_max", "max_turn_time"),
    "Bool": ("color_averaging", "send_rgb", "truncate_on_loss_of_life", "sound", "sound_obs"),
    "Float": ("repeat_action_probability",),
    "String": ("rom_file",),
}
_BOX2D = ("gravity", "warmStarting", "continuousPhysics", "subStepping", "autoClearForces")
# Made anew by whoever makes the environment, from settings that are seen elsewhere, or changed by every step: classes,
# and packages whose classes hold no settings of an environment's.
_LEFT_ALONE = {
    *("mujoco", "Box2D", "ale_py", "pygame", "OpenGL", "glfw", "_thread", "_io", "threading", "socket", "mmap"),
    *(
        "dm_control.mujoco.index",
        "SWIG",
        "_ctypes",
        "ctypes",
        "weakref",
        "multiprocessing.synchronize",
        "select",
        "pandas._libs.internals",
    ),
}


def fields(item: Any) -> tuple[dict[str, Any], bool] | None:
    """Return the settings of an object of a simulator, by their names.

    :param item: anything
    :return: with whether they can be set, or written to, as attributes; None if it is nothing that is known here
    """
    kind: Any = type(item)
    read = _reader(kind)
    return None if read is None else (read(item), read is not _of_ale)


@functools.lru_cache(maxsize=10_000)
def _reader(kind: Any) -> Callable[[Any], dict[str, Any]] | None:
    for base in kind.__mro__:
        module, name = str(getattr(base, "__module__", "")), base.__name__
        if module.startswith("mujoco._structs"):
            return _of_mujoco if name in _MUJOCO or "." in base.__qualname__ else None
        if module.startswith("ale_py") and name == "ALEInterface":
            return _of_ale
        if module.startswith("Box2D") and (name == "b2World" or name.endswith("Def")):
            return _of_box2d
    return None


def _of_mujoco(structure: Any) -> dict[str, Any]:
    found = {}
    kind: Any = type(structure)
    for name in _names(kind):
        try:
            found[name] = getattr(structure, name)
        except Exception:  # of what a model without the feature does not have
            continue
    return found


@functools.lru_cache(maxsize=1000)
def _names(kind: Any) -> tuple[str, ...]:
    found = {
        name: None
        for base in kind.__mro__
        for name, part in vars(base).items()
        # Those written in Python, in subclasses, are other names.
        if isinstance(part, property) and not (name.startswith("_") or isinstance(part.fget, types.FunctionType))
    }
    found.pop(_SIGNATURE, None)
    return tuple(found)


def _of_ale(emulator: Any) -> dict[str, Any]:
    return {name: getattr(emulator, f"get{kind}")(name) for kind, names in _ALE.items() for name in names}


def _of_box2d(item: Any) -> dict[str, Any]:
    """Read a world's settings, and all plain ones of a definition, which is no part of a world."""
    kind: Any = type(item)
    names = _BOX2D if kind.__name__ == "b2World" else _names(kind)
    found = {name: getattr(item, name) for name in names if hasattr(item, name)}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))} | {
        name: tuple(value) for name, value in found.items() if type(value).__name__ == "b2Vec2"
    }


# Attributes in which libraries keep for themselves what they have made of the others, by package.
_KEPT = {
    "gymnasium": {"_np_random", "_np_random_seed", "_cached_spec"},
    "tensordict": {"_cache", "_last_op", "__last_op_queue", "__lock_parents_weakrefs", "_lock_parents_weakrefs"},
    "torchrl": {"_cache", "_container", "_encode", "__lock_parents_weakrefs", "_lock_parents_weakrefs"},
}
_KEPT["tensordict"] |= {"_last_op_queue", "_is_locked", "_lock_id"}


@functools.lru_cache(maxsize=10_000)
def kept_by_library(kind: Any) -> frozenset[str]:
    """Return attributes of instances that are not looked at: where they are missing, they are made when needed."""
    packages = {str(getattr(base, "__module__", "")).partition(".")[0] for base in kind.__mro__}
    return frozenset(name for package in packages for name in _KEPT.get(package, ()))


# By module and name, what no pickle copies rightly, whatever its class says.
_UNPICKLABLE = {
    "ctypes.CDLL": "it is a library in C",
    "multiprocessing.connection.Connection": "it is a connection, which a copy cannot use as well",
    "multiprocessing.connection.PipeConnection": "it is a connection, which a copy cannot use as well",
    "weakref.finalize": "what it does in the end would be done for every copy",
    "_cffi_backend.Lib": "it is a library in C",
    "_cffi_backend.CompiledLib": "it is a library in C",
}


@functools.lru_cache(maxsize=10_000)
def why_unpicklable(kind: Any) -> str | None:
    """Return why pickles of instances are wrong; None: they are not, or there are none."""
    names = (f"{getattr(base, '__module__', '')}.{base.__qualname__}" for base in kind.__mro__)
    return next((_UNPICKLABLE[name] for name in names if name in _UNPICKLABLE), None)


@functools.lru_cache(maxsize=10_000)
def is_left_alone(kind: Any) -> bool:
    """Whether objects of a class in C are not looked into, and nothing is lost by that."""
    modules = {str(getattr(base, "__module__", "SWIG")) for base in kind.__mro__ if base is not object}
    return any(name in _LEFT_ALONE or name.partition(".")[0] in _LEFT_ALONE for name in modules)


def seed_simulators(layers: Iterable[Any], stream: np.random.SeedSequence) -> None:
    """Seed simulators that would seed themselves alike in every worker.

    :param layers: of an environment
    :param stream: the worker's
    """
    for layer in layers:
        if type(layer).__module__ == "vmas.simulator.environment.environment":  # its constructor's default is 0
            layer.seed(int(stream.generate_state(1)[0] >> 1))
