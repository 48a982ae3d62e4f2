"""How MuJoCo's structures are copied, and what gymnasium draws its MuJoCo environments by.

https://mujoco.readthedocs.io/en/stable/python.html
"""

from __future__ import annotations

import importlib
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_ext_core.factory import _kinds
from rl_ext_core.factory._rebuilders import Fields

__all__ = ["RULES"]

# Which compilation of an XML file it comes from; a pickle of the model leaves it out.
_SIGNATURE = "signature"
# What the solver writes anew in every step, in memory that it does not clear; with what it has of that memory.
_SCRATCH = (
    _SIGNATURE,
    "efc_",
    "iefc_",
    "iM",
    "iLD",
    "iacc",
    "ifrc_",
    "map_",
    "island_",
    "tendon_efcadr",
    "dof_island",
    "tree_island",
)
# How long things have taken.
_CLOCKS = "timer"
# Of a viewer: what the constructor makes, by OpenGL or by the window system.
_HANDLES = ("model", "data", "scn", "con", "viewport", "opengl_context", "window", "backend")


def _names(structure: Any) -> Iterator[str]:
    for base in type(structure).__mro__:
        for name, part in vars(base).items():
            # Those written in Python, in subclasses, are other names; one of dm_control's is the structure itself.
            if isinstance(part, property) and not (name.startswith("_") or isinstance(part.fget, types.FunctionType)):
                yield name


def _fields(structure: Any) -> Fields:
    """Read a structure field by field, those within it too."""
    found = Fields()
    for name in _names(structure):
        try:
            value = getattr(structure, name)
        except Exception:  # of what a model without the feature does not have
            continue
        if type(value).__module__.startswith("mujoco") and type(value).__name__ not in ("MjModel", "MjData"):
            value = _fields(value)
        found[name] = value
    return found


def _model(model: Any) -> tuple[Any, ...]:
    reduced: tuple[Any, ...] = model.__reduce_ex__(4)
    return reduced


def _model_settings(model: Any) -> Fields:
    return Fields({name: value for name, value in _fields(model).items() if name != _SIGNATURE})


def _data(data: Any) -> tuple[Any, ...]:
    # Its bytes have those of its model in them, which travels by itself.
    state, model = data.__getstate__(), data.model.__getstate__()
    head, found, tail = state.partition(model)
    return _make_data, (type(data), data.model, head, bool(found), tail, _lost(data))


def _lost(data: Any) -> dict[str, Any]:
    """Give what MuJoCo's own pickle of the data leaves out: flags, and counts of the solver."""
    numbers = {name: value for name, value in _data_settings(data).items() if isinstance(value, (bool, int, float))}
    counts = {name: getattr(data, name).copy() for name in _names(data) if name.startswith("solver_")}
    return {**numbers, **counts}


def _make_data(cls: Any, model: Any, head: bytes, has_model: bool, tail: bytes, lost: dict[str, Any]) -> Any:
    mujoco = importlib.import_module("mujoco")
    loose = cls.__new__(cls)
    loose.__setstate__(head + (model.__getstate__() if has_model else b"") + tail)
    data = mujoco.MjData(model)
    mujoco.mj_copyData(data, model, loose)
    for name, value in lost.items():
        if isinstance(value, np.ndarray):
            getattr(data, name)[...] = value
        elif getattr(data, name) != value:
            setattr(data, name, value)
    return data


def _data_settings(data: Any) -> Fields:
    return Fields({name: value for name, value in _fields(data).items() if not name.startswith((*_SCRATCH, _CLOCKS))})


def _structure(structure: Any) -> tuple[Any, ...]:
    fields = {name: _value(part) for name, part in _fields(structure).items()}
    return _make_structure, (type(structure), fields), _kinds.attributes(structure) or None


def _value(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _value(inner) for name, inner in part.items()}
    return part.copy() if isinstance(part, np.ndarray) else part


def _make_structure(cls: Any, fields: dict[str, Any]) -> Any:
    structure = cls()
    _set_fields(structure, fields)
    return structure


def _rectangle(rectangle: Any) -> tuple[Any, ...]:
    return type(rectangle), (rectangle.left, rectangle.bottom, rectangle.width, rectangle.height)


def _set_fields(structure: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            getattr(structure, name)[...] = value
        elif isinstance(value, dict):
            _set_fields(getattr(structure, name), value)
        else:
            setattr(structure, name, value)


def _refuse(_: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError("it is a part of a model; keep the model, and write model.vis where it is used")


def _viewer(viewer: Any) -> tuple[Any, ...]:
    size = viewer.viewport.width, viewer.viewport.height, viewer.scn.maxgeom
    made = (type(viewer), viewer.model, viewer.data, *size)
    return _make_viewer, made, _viewer_settings(viewer), None, None, _fill_viewer


def _viewer_settings(viewer: Any) -> dict[str, Any]:
    held = {name: value for name, value in vars(viewer).items() if name not in _HANDLES}
    return {**held, "<flags>": viewer.scn.flags.copy(), "<size>": (viewer.viewport.width, viewer.viewport.height)}


def _make_viewer(cls: Any, model: Any, data: Any, width: int, height: int, max_geom: int) -> Any:
    return cls(model, data, width, height, max_geom)


def _fill_viewer(viewer: Any, state: dict[str, Any]) -> None:
    viewer.scn.flags[...] = state.pop("<flags>")
    state.pop("<size>")
    vars(viewer).update(state)


def _renderer(renderer: Any) -> tuple[Any, ...]:
    made = (type(renderer), renderer._model, renderer._height, renderer._width, renderer._scene.maxgeom)
    return _make_renderer, made, _renderer_settings(renderer), None, None, _fill_renderer


def _renderer_settings(renderer: Any) -> dict[str, Any]:
    kept = ("_depth_rendering", "_segmentation_rendering", "_scene_option")
    held = {name: getattr(renderer, name) for name in kept if hasattr(renderer, name)}
    return {**held, "<flags>": renderer._scene.flags.copy(), "<size>": (renderer._width, renderer._height)}


def _make_renderer(cls: Any, model: Any, height: int, width: int, max_geom: int) -> Any:
    return cls(model, height, width, max_geom)


def _fill_renderer(renderer: Any, state: dict[str, Any]) -> None:
    renderer._scene.flags[...] = state.pop("<flags>")
    state.pop("<size>")
    vars(renderer).update(state)


def _context(_: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError(
        "it belongs to a context of OpenGL, which other processes do not have; draw once the copy is made"
    )


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("mujoco._structs:MjModel", _model, _model_settings),
    ("mujoco._structs:MjData", _data, _data_settings),
    ("mujoco._structs:MjOption", _structure, _fields),
    ("mujoco._structs:MjStatistic", _structure, _fields),
    ("mujoco._structs:MjVisual", _refuse, _fields),
    ("mujoco._structs:MjvCamera", _structure, _fields),
    ("mujoco._structs:MjvOption", _structure, _fields),
    ("mujoco._structs:MjvPerturb", _structure, _fields),
    ("mujoco._render:MjrContext", _context, None),
    ("mujoco._structs:MjvScene", _context, None),
    ("mujoco._structs:MjrRect", _rectangle, _fields),
    ("mujoco.rendering.classic.renderer:Renderer", _renderer, _renderer_settings),
    ("mujoco.renderer:Renderer", _renderer, _renderer_settings),
    ("gymnasium.envs.mujoco.mujoco_rendering:BaseRender", _viewer, _viewer_settings),
]
