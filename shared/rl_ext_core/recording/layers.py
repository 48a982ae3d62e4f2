"""State of an environment and its wrappers that repeating an episode does not restore.

That is, what lasts over episodes: statistics, monitors and their files, levels of a curriculum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.recording.attributes import (
    Digests,
    Value,
    differing,
    digests_of,
    read_attributes,
    read_values,
    write_values,
)
from rl_ext_core.recording.generators import layers_of


@dataclasses.dataclass(frozen=True)
class LayerState:
    """State of a wrapper, or of the environment itself.

    :ivar description: see :func:`describe_layers`
    :ivar values: copies of the values in its attributes, by path
    :ivar construction: checksums of the values right after construction; None if they were not recorded
    :ivar file: content of a monitor's file; None if there is none
    """

    description: str
    values: dict[str, Value]
    construction: Digests | None
    file: str | None


# Checksums of the values in living layers after construction.
_constructions: weakref.WeakKeyDictionary[Any, Digests] = weakref.WeakKeyDictionary()
_LINKS = frozenset(
    (
        *("env", "results_writer", "_action_space", "_observation_space", "_metadata", "_cached_spec"),
        *("spec", "metadata"),  # descriptions are compared
        *("_np_random", "_np_random_seed"),  # repeating the episode restores the generator
    )
)
# Number of characters of an argument in a description.
_MAX_TEXT = 60


def layer_states(env: Any) -> list[LayerState]:
    """Return the state of each wrapper of an environment, outermost first, and of the environment itself."""
    layers = _all_layers(env)
    return [layer_state(layer, layers, _describe_layer(layer)) for layer in layers]


def layer_state(layer: Any, links: Sequence[Any], description: str) -> LayerState:
    """Return the state of an object, without the objects in ``links``."""
    return LayerState(description, _read_layer(vars(layer), links), _construction(layer), _results_file(layer))


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
    text = repr(spec.id)
    for key, value in spec.kwargs.items():
        is_path = isinstance(value, str) and os.path.isabs(value)  # which differs on another machine
        if key != "render_mode" and not is_path:
            text += f", {key}={_describe_argument(value)}"
    return f"{name} ({text})"


def _describe_argument(value: Any) -> str:
    """Return an argument as text, with a checksum if it is long, and only the class of an object with an address."""
    with np.printoptions(threshold=sys.maxsize):
        text = repr(value)
    if " at 0x" in text:
        return type(value).__name__
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({zlib.crc32(text.encode()):08x})"


def record_construction(env: Any) -> None:
    """Record the attributes of a new environment, which are compared with those of a resumed one.

    What differs then belongs to the process, such as ports and temporary folders. Call this before the first reset.
    """
    layers = _all_layers(env)
    for layer in layers:
        record_layer(layer, layers)


def record_layer(layer: Any, links: Sequence[Any]) -> None:
    """Record the attributes of a new object, unless that was done."""
    with contextlib.suppress(TypeError):  # an object of a class without weak references
        if layer not in _constructions:
            _constructions[layer] = digests_of(_read_layer(read_attributes(layer), links))


def _construction(layer: Any) -> Digests | None:
    try:
        return _constructions[layer]
    except (KeyError, TypeError):
        return None


def _read_layer(attributes: dict[str, Any], links: Sequence[Any]) -> dict[str, Value]:
    return read_values({name: value for name, value in attributes.items() if name not in _LINKS}, links)[0]


def restore_layers(env: Any, states: Sequence[LayerState]) -> list[str]:
    """Set the attributes of an environment and its wrappers, and the content of their files, to recorded states.

    Both environments have the same description. Objects are filled in place, because other objects may share them.
    Attributes that construction has set otherwise than in the recorded process stay as they are.

    :return: sentences on attributes that are not restored, although they have changed in the recorded process
    """
    layers = _all_layers(env)
    pairs = zip(layers, states, strict=True)
    return [sentence for layer, state in pairs for sentence in restore_layer(layer, state, layers)]


def restore_layer(layer: Any, state: LayerState, links: Sequence[Any]) -> list[str]:
    """Set the attributes of an object, and the content of its file, to a recorded state.

    :return: sentences on attributes that are not restored
    """
    values, before = state.values, state.construction
    # What construction has set otherwise belongs to the process: ports, folders and arguments.
    own = differing(before, _construction(layer)) - {path for path in values if values[path].kind == "generator"}
    if state.file is not None:
        own.discard("t_start")  # from which the times in a monitor's file count
    different = write_values(layer, values, links, kept=own)
    changed = differing(before, digests_of(values))
    _restore_results_file(layer, state.file)
    kept, lost = (
        ", ".join(f"{type(layer).__name__}.{path}" for path in sorted(paths))
        for paths in (different & own & changed, different - own)
    )
    sentences = []
    if kept:
        sentences.append(
            f"construction has set {kept} otherwise than in the saved run, which has changed them since. They keep the "
            "values of this process"
        )
    if lost:
        sentences.append(f"{lost} cannot be restored, and may differ from the saved run")
    return sentences


def unsaved_attributes(states: Sequence[LayerState], *, opaque: bool = False) -> list[str]:
    """Return the attributes that have changed since construction and cannot be saved, with their classes.

    :param opaque: whether to return also those whose changes cannot be detected
    """
    found = []
    for state in states:
        name, before = state.description.partition("(")[0].strip(), state.construction or {}
        for path, (kind, checksum) in digests_of(state.values).items():
            has_changed = kind == "unsaved" and before.get(path, ("", b""))[0] == kind and before[path][1] != checksum
            if kind == "unknown" or has_changed or (opaque and kind == "opaque"):
                found.append(f"{name}.{path} ({state.values[path].type_name.partition(':')[2]})")
    return found


def _all_layers(env: Any) -> list[Any]:
    """Return an environment's wrappers and itself, without recorders and adapters."""
    layers = layers_of(env)
    return [layer for layer in layers if not any(hasattr(type(layer), name) for name in ("episode_log", "is_adapter"))]


def _results_file(monitor: Any) -> str | None:
    """Return the content of the file that a monitor writes."""
    file = _find_results_file(monitor)
    if file is None:
        return None
    file.flush()
    return Path(os.path.abspath(file.name)).read_bytes().decode()


def _restore_results_file(monitor: Any, text: str | None) -> None:
    """Replace the content of a monitor's file by that of a save."""
    file = _find_results_file(monitor)
    if file is not None and text is not None:
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()


def _find_results_file(monitor: Any) -> Any:
    return getattr(getattr(monitor, "__dict__", {}).get("results_writer"), "file_handler", None)
