"""State of an environment and its wrappers that repeating an episode does not restore.

That is, what lasts over episodes: statistics, monitors and their files, levels of a curriculum.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.recording.generators import layers_of
from rl_ext_core.recording.recorder import EpisodeRecorder

__all__ = [
    "LayerState",
    "describe_layers",
    "is_plain",
    "layer_states",
    "restore_layers",
    "restore_results_file",
    "results_text",
]

# Description of the layer, attributes, and content of the file in which a monitor writes its episodes.
LayerState = tuple[str, dict[str, Any], str | None]
_PLAIN = (
    *(bool, int, float, str, bytes, np.ndarray, np.generic),
    *(np.random.Generator, np.random.RandomState, random.Random),
)
_LINKS = frozenset(
    (
        *("env", "results_writer", "_action_space", "_observation_space", "_metadata", "_cached_spec"),
        *("_np_random", "_np_random_seed"),  # repeating the episode restores the generator
    )
)
# Larger arrays are usually maps and models, which do not change.
_MAX_BYTES = 1 << 20
# Number of characters of an argument in a description.
_MAX_TEXT = 60


def layer_states(env: Any) -> list[LayerState]:
    """Return the state of each wrapper of an environment, outermost first, and of the environment itself."""
    return [(_describe_layer(layer), _small_attributes(layer), results_text(layer)) for layer in _all_layers(env)]


def describe_layers(env: Any) -> str:
    """Describe an environment's wrappers, outermost first, and the environment itself.

    Equal descriptions mean the same classes, and the same id, arguments and time limit of ``gymnasium.make``.
    """
    return " of ".join(map(_describe_layer, _all_layers(env)))


def _describe_layer(layer: Any) -> str:
    """Return the class of a layer, and what its constructor or ``gymnasium.make`` got."""
    name = type(layer).__name__
    if isinstance(layer, gymnasium.wrappers.TimeLimit):
        return f"{name}({layer._max_episode_steps})"
    spec = None if isinstance(layer, gymnasium.Wrapper) else getattr(layer, "spec", None)
    if not isinstance(spec, gymnasium.envs.registration.EnvSpec):
        return name
    arguments = [
        f", {key}={_describe_argument(value)}" for key, value in spec.kwargs.items() if _is_compared(key, value)
    ]
    return f"{name} ({spec.id!r}{''.join(arguments)})"


def _is_compared(name: str, value: Any) -> bool:
    """Whether a resumed run must have the same argument of ``gymnasium.make``."""
    is_path = isinstance(value, str) and os.path.isabs(value)  # which differs on another machine
    return name != "render_mode" and not is_path


def _describe_argument(value: Any) -> str:
    """Return an argument as text, with a checksum if it is long, and only the class of an object with an address."""
    with np.printoptions(threshold=sys.maxsize):
        text = repr(value)
    if " at 0x" in text:
        return type(value).__name__
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({zlib.crc32(text.encode()):08x})"


def _small_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer that are data, except large arrays."""
    return {
        name: value
        for name, value in getattr(layer, "__dict__", {}).items()
        if name not in _LINKS and is_plain(value) and getattr(value, "nbytes", 0) <= _MAX_BYTES
    }


def restore_layers(env: Any, states: Sequence[LayerState]) -> None:
    """Set the attributes of an environment and its wrappers, and the content of their files, to recorded states.

    Attributes that repeating the episode has restored stay as they are, because other objects may share them.
    """
    for layer, (name, values, text) in zip(_all_layers(env), states, strict=False):
        if _describe_layer(layer) == name:
            present = _small_attributes(layer)
            for key, value in values.items():
                if key not in present or not _is_equal(present[key], value):
                    vars(layer)[key] = value
            restore_results_file(layer, text)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of :func:`is_plain` are equal bit for bit.

    Containers are compared by their parts, because pickles of equal ones differ if they share other objects.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_equal, one.values(), other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return pickle.dumps(one) == pickle.dumps(other)


def _all_layers(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, and the environment, without the recorder."""
    return [layer for layer in layers_of(env) if not isinstance(layer, EpisodeRecorder)]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, an array, a generator, a running mean, or a container of them."""
    if isinstance(value, (list, tuple, deque)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, _PLAIN) or type(value).__name__ == "RunningMeanStd"


def results_text(monitor: Any) -> str | None:
    """Return the content of the file in which a monitor writes its episodes; None if it has none."""
    file = getattr(getattr(monitor, "__dict__", {}).get("results_writer"), "file_handler", None)
    if file is None:
        return None
    file.flush()
    return Path(os.path.abspath(file.name)).read_bytes().decode()


def restore_results_file(monitor: Any, text: str | None) -> None:
    """Replace the content of a monitor's file by that at the time of a save."""
    file = getattr(getattr(monitor, "__dict__", {}).get("results_writer"), "file_handler", None)
    if file is not None and text is not None:
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
