"""State of the wrappers of an environment, which repeating an episode does not restore: statistics, monitors, files."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.recording.generators import layers_of
from rl_ext_core.recording.recorder import EpisodeRecorder

__all__ = ["LayerState", "is_plain", "layer_states", "restore_layers", "restore_results_file", "results_text"]

# Name of the class, attributes, and content of the file in which a monitor writes its episodes.
LayerState = tuple[str, dict[str, Any], str | None]
_PLAIN = (
    *(bool, int, float, str, bytes, np.ndarray, np.generic),
    *(np.random.Generator, np.random.RandomState, random.Random),
)
_LINKS = frozenset(("env", "results_writer", "_action_space", "_observation_space", "_metadata", "_cached_spec"))


def layer_states(env: Any) -> list[LayerState]:
    """Return the state of each wrapper of an environment, outermost first."""
    states: list[LayerState] = []
    for layer in _wrappers(env):
        values = {name: value for name, value in vars(layer).items() if name not in _LINKS and is_plain(value)}
        states.append((type(layer).__name__, values, results_text(layer)))
    return states


def restore_layers(env: Any, states: Sequence[LayerState]) -> None:
    """Set the attributes of an environment's wrappers, and the content of their files, to recorded states."""
    for layer, (name, values, text) in zip(_wrappers(env), states, strict=False):
        if type(layer).__name__ == name:
            vars(layer).update(values)
            restore_results_file(layer, text)


def _wrappers(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, without the recorder."""
    return [layer for layer in layers_of(env)[:-1] if not isinstance(layer, EpisodeRecorder)]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, an array, a generator, a running mean, or a container of them."""
    if isinstance(value, (list, tuple, deque)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, _PLAIN) or type(value).__name__ == "RunningMeanStd"


def results_text(monitor: Any) -> str | None:
    """Return the content of the file in which a monitor writes its episodes; None if it has none."""
    file = getattr(vars(monitor).get("results_writer"), "file_handler", None)
    if file is None:
        return None
    file.flush()
    return Path(os.path.abspath(file.name)).read_bytes().decode()


def restore_results_file(monitor: Any, text: str | None) -> None:
    """Replace the content of a monitor's file by that at the time of a save."""
    file = getattr(vars(monitor).get("results_writer"), "file_handler", None)
    if file is not None and text is not None:
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
