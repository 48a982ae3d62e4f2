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
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.recording.attributes import Summary, differing, read_attributes, read_state, summarize, write_state
from rl_ext_core.recording.generators import layers_of

__all__ = [
    "LayerState",
    "describe_layers",
    "layer_states",
    "record_construction",
    "restore_layers",
    "restore_results_file",
    "results_file",
    "unsaved_attributes",
]


@dataclasses.dataclass(frozen=True)
class LayerState:
    """State of a wrapper, or of the environment itself.

    :ivar description: see :func:`describe_layers`
    :ivar attributes: copies of its attributes
    :ivar construction: summary of the attributes right after construction; None if it was not recorded
    :ivar replaced: names of containers that were replaced since construction, instead of filled
    :ivar file: content and time of a monitor's file; None if there is none
    """

    description: str
    attributes: dict[str, Any]
    construction: Summary | None
    replaced: frozenset[str]
    file: tuple[str, float] | None


# Summaries of living layers after construction, and their containers, by the ids of the layers.
_constructions: dict[int, tuple[weakref.ref[Any], Summary, dict[str, Callable[[], Any]]]] = {}
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
    return [
        LayerState(
            _describe_layer(layer),
            _layer_parts(layer, vars(layer), layers, unchanged=_construction(layer)),
            _construction(layer),
            _find_replaced(layer),
            results_file(layer),
        )
        for layer in layers
    ]


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


def record_construction(env: Any) -> None:
    """Record the attributes of a new environment, which are compared with those of a resumed one.

    What differs then belongs to the process, such as ports and temporary folders. Call this before the first reset.
    """
    layers = _all_layers(env)
    for layer in layers:
        attributes = read_attributes(layer)
        summary = summarize(_layer_parts(layer, attributes, layers))
        objects = {name: _refer(value) for name, value in attributes.items() if _is_container(value)}
        with contextlib.suppress(TypeError):  # an object of a class without weak references
            _constructions.setdefault(id(layer), (weakref.ref(layer, _forget(id(layer))), summary, objects))


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque, bytearray, np.ndarray)) or type(value).__name__ == "Tensor"


def _refer(value: Any) -> Callable[[], Any]:
    """Return a function that returns an object, which it keeps alive only if the class has no weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _find_replaced(layer: Any) -> frozenset[str]:
    """Return the containers that are not the objects that construction has made."""
    objects = _constructions[id(layer)][2] if id(layer) in _constructions else {}
    return frozenset(name for name, refer in objects.items() if vars(layer).get(name) is not refer())


def _forget(key: int) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        _constructions.pop(key, None)

    return forget


def _construction(layer: Any) -> Summary | None:
    """Return the summary of a layer after its construction; None if it was not recorded."""
    return _constructions[id(layer)][1] if id(layer) in _constructions else None


def _layer_parts(layer: Any, attributes: dict[str, Any], layers: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Return copies of the attributes of a layer, except links to other layers."""
    state = {name: value for name, value in attributes.items() if name not in _LINKS}
    return read_state(state, layers, **options)


def restore_layers(env: Any, states: Sequence[LayerState]) -> list[str]:
    """Set the attributes of an environment and its wrappers, and the content of their files, to recorded states.

    Objects are filled in place, because other objects may share them. Attributes that construction has set otherwise
    than in the recorded process stay as they are.

    :return: sentences on attributes that are not restored, although they have changed in the recorded process
    """
    layers, kept, lost = _all_layers(env), list[str](), list[str]()
    for layer, state in zip(layers, states, strict=False):
        if _describe_layer(layer) != state.description:
            continue
        name, saved = type(layer).__name__, summarize(state.attributes)
        present = summarize(_layer_parts(layer, vars(layer), layers))
        own = differing(state.construction, _construction(layer))
        own -= {path for path in own if path in saved and saved[path].is_generator}
        kept += [
            f"{name}.{path}"
            for path in sorted(own & differing(state.construction, saved) & differing(saved, present))
            if path in saved
        ]
        replaced = state.replaced - _find_replaced(layer)
        paths = write_state(layer, state.attributes, layers, kept=own.__contains__, replaced=replaced)
        lost += [f"{name}.{path}" for path in paths]
        restore_results_file(layer, state.file)
    sentences = []
    if kept:
        sentences.append(
            f"construction has set {', '.join(kept)} otherwise than in the saved run, which has changed them since. "
            "They keep the values of this process"
        )
    if lost:
        sentences.append(f"{', '.join(lost)} cannot be saved, and differ from the saved run")
    return sentences


def unsaved_attributes(states: Sequence[LayerState]) -> list[str]:
    """Return the attributes that have changed since construction and cannot be saved, with their classes."""
    found = []
    for state in states:
        name, before = state.description.partition("(")[0].strip(), state.construction
        for path, mark in summarize(state.attributes).items():
            old = None if before is None else before.get(path)
            has_changed = old is not None and old.unsaved is not None and old.unsaved != mark.unsaved
            if mark.unsaved is not None and (has_changed or mark.is_unknown):
                found.append(f"{name}.{path} ({mark.description})")
    return found


def _all_layers(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, and the environment, without the recorder."""
    return [layer for layer in layers_of(env) if not hasattr(type(layer), "episode_log")]


def results_file(monitor: Any) -> tuple[str, float] | None:
    """Return the content of the file in which a monitor writes its episodes, and the origin of its times.

    :return: None if it has no file
    """
    file = getattr(getattr(monitor, "__dict__", {}).get("results_writer"), "file_handler", None)
    if file is None:
        return None
    file.flush()
    return Path(os.path.abspath(file.name)).read_bytes().decode(), monitor.t_start


def restore_results_file(monitor: Any, saved: tuple[str, float] | None) -> None:
    """Replace the content of a monitor's file, and the origin of its times, by those of a save."""
    file = getattr(getattr(monitor, "__dict__", {}).get("results_writer"), "file_handler", None)
    if file is not None and saved is not None:
        text, vars(monitor)["t_start"] = saved
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
