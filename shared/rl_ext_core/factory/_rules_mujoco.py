"""How MuJoCo's structures are copied, and what gymnasium, dm_control and robosuite hold beside them.

https://mujoco.readthedocs.io/en/stable/python.html
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.factory import _graft, _objects, _rules
from rl_ext_core.factory._rules import Fields

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


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


def _model_settings(model: Any) -> Fields:
    return Fields({name: value for name, value in _fields(model).items() if name != _SIGNATURE})


def _data(data: Any) -> tuple[Any, ...]:
    # Its bytes have those of its model in them, which travels by itself.
    state, model = data.__getstate__(), data.model.__getstate__()
    head, found, tail = state.partition(model)
    return _make_data, (type(data), data.model, head, bool(found), tail, _lost(data))


def _lost(data: Any) -> dict[str, Any]:
    """Return what MuJoCo's own pickle of the data leaves out: flags, and counts of the solver."""
    numbers = {name: value for name, value in _data_settings(data).items() if isinstance(value, (bool, int, float))}
    counts = {name: getattr(data, name).copy() for name in _names(data) if name.startswith("solver_")}
    return {**numbers, **counts}


def _make_data(cls: Any, model: Any, head: bytes, has_model: bool, tail: bytes, lost: dict[str, Any]) -> Any:
    mujoco = importlib.import_module("mujoco")
    loose = cls.__new__(cls)
    loose.__setstate__(head + (model.__getstate__() if has_model else b"") + tail)
    data = mujoco.MjData(model)
    mujoco.mj_copyData(data, model, loose)
    _set_fields(data, lost)
    return data


def _data_settings(data: Any) -> Fields:
    return Fields({name: value for name, value in _fields(data).items() if not name.startswith((*_SCRATCH, _CLOCKS))})


def _structure(structure: Any) -> tuple[Any, ...]:
    fields = {name: _value(part) for name, part in _fields(structure).items()}
    return _make_structure, (type(structure), fields), _objects.attributes(structure) or None


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
        elif getattr(structure, name) != value:  # some can only be read
            setattr(structure, name, value)


def _viewer(viewer: Any) -> tuple[Any, ...]:
    size = viewer.viewport.width, viewer.viewport.height, viewer.scn.maxgeom
    return type(viewer), (viewer.model, viewer.data, *size), _viewer_settings(viewer), None, None, _fill_drawer


def _viewer_settings(viewer: Any) -> dict[str, Any]:
    held = {name: value for name, value in vars(viewer).items() if name not in _HANDLES}
    return {**held, "<flags>": viewer.scn.flags.copy(), "<size>": (viewer.viewport.width, viewer.viewport.height)}


def _renderer(renderer: Any) -> tuple[Any, ...]:
    made = renderer._model, renderer._height, renderer._width, renderer._scene.maxgeom
    return type(renderer), made, _renderer_settings(renderer), None, None, _fill_drawer


def _renderer_settings(renderer: Any) -> dict[str, Any]:
    kept = ("_depth_rendering", "_segmentation_rendering", "_scene_option")
    held = {name: getattr(renderer, name) for name in kept if hasattr(renderer, name)}
    return {**held, "<flags>": renderer._scene.flags.copy(), "<size>": (renderer._width, renderer._height)}


def _fill_drawer(drawer: Any, state: dict[str, Any]) -> None:
    scene = drawer._scene if hasattr(drawer, "_scene") else drawer.scn
    scene.flags[...] = state.pop("<flags>")
    del state["<size>"]
    vars(drawer).update(state)


_PART_OF_A_MODEL = "it is a part of a model; keep the model, and write model.vis where it is used"
_OF_OPENGL = "it belongs to a context of OpenGL, which other processes do not have; draw once the copy is made"


# dm_control.

# Made anew from the simulator's data: the names by which its fields are indexed, a view into it, what draws it, and
# views that are kept because making them takes time.
_DERIVED = ("_contexts", "_contexts_lock", "_named", "_warnings", "_bindings")

_DM_CONTROL = ("mujoco.engine", "mujoco.index", "mjcf.physics")
_SCHEMAS = ("MUJOCO", "ATTACHMENT_FRAME", "WORLD_ATTACHMENT_FRAME")


def _physics(physics: Any) -> tuple[Any, ...]:
    state = {name: value for name, value in vars(physics).items() if name not in _DERIVED}
    return _rules.new(type(physics), state, _fill_physics)


def _fill_physics(physics: Any, state: dict[str, Any]) -> None:
    engine, index, bindings = (importlib.import_module(f"dm_control.{name}") for name in _DM_CONTROL)
    vars(physics).update(state, _contexts_lock=threading.Lock())
    if isinstance(physics, bindings.Physics):
        physics._bindings = {(): bindings._EMPTY_BINDING}
    if "_data" not in state:  # it was freed
        return
    # As upstream's own __setstate__, but without the call of the solver, which would change the data.
    axes = index.make_axis_indexers(physics.model)
    physics._warnings = physics.data.warning.number
    physics._named = engine.NamedIndexStructs(
        model=index.struct_indexer(physics.model, "mjmodel", axes),
        data=index.struct_indexer(physics.data, "mjdata", axes),
    )


def _binding(binding: Any) -> tuple[Any, ...]:
    kept = {name: getattr(binding, name) for name in ("_physics", "_namespace", "_named_index")}
    return _rules.new(type(binding), kept, _fill_binding)


def _fill_binding(binding: Any, state: dict[str, Any]) -> None:
    binding.__init__(*(state[name] for name in ("_physics", "_namespace", "_named_index")))


def _spec(spec: Any) -> tuple[Any, ...]:
    # A part of the schema of XML files, which recurs into itself: two copies of it cannot even be compared.
    schema = sys.modules["dm_control.mjcf.schema"]
    for root in _SCHEMAS:
        path = _path_to(spec, getattr(schema, root), ())
        if path is not None:
            return _spec_at, (root, path)
    return type(spec), tuple(spec)


def _path_to(spec: Any, root: Any, above: tuple[str, ...]) -> tuple[str, ...] | None:
    if spec is root:
        return above
    for name, child in root.children.items():
        path = None if child is root else _path_to(spec, child, (*above, name))
        if path is not None:
            return path
    return None


def _spec_at(root: str, path: tuple[str, ...]) -> Any:
    spec = getattr(importlib.import_module("dm_control.mjcf.schema"), root)
    for name in path:
        spec = spec.children[name]
    return spec


# robosuite: what draws its cameras is made anew, around the copied simulator.

# Handles of OpenGL's.
_GL_HANDLES = ("gl_ctx", "con", "scn")
# What may be set of a scene; the rest is written whenever it is drawn.
_SCENE = ("enabletransform", "flags", "rotate", "scale", "stereo", "translate")


def _robosuite_context(context: Any) -> tuple[Any, ...]:
    state = {name: value for name, value in vars(context).items() if name not in _GL_HANDLES}
    scene = {name: _value(getattr(context.scn, name)) for name in _SCENE}
    size = {"max_width": context.con.offWidth, "max_height": context.con.offHeight}
    return _rules.new(type(context), {"attributes": state, "scene": scene, "size": size}, _fill_context)


def _fill_context(context: Any, state: dict[str, Any]) -> None:
    # The simulator that it is made for holds it, and is not complete yet.
    _graft.after_loading(lambda: _make_context(context, **state))


def _make_context(context: Any, attributes: dict[str, Any], scene: dict[str, Any], size: dict[str, int]) -> None:
    made = importlib.import_module("robosuite.utils.binding_utils").MjRenderContext.__init__
    # The constructor calls these two, and the first changes the state of the simulator.
    calls = {"forward": lambda: None, "add_render_context": lambda _: None}
    simulator = types.SimpleNamespace(model=attributes["model"], data=attributes["data"], **calls)
    made(context, simulator, device_id=attributes["device_id"], **size)
    vars(context).update(attributes)
    _set_fields(context.scn, scene)


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("mujoco._structs:MjModel", _rules.by_pickle, _model_settings),
    ("mujoco._structs:MjData", _data, _data_settings),
    ("mujoco._structs:MjOption", _structure, _fields),
    ("mujoco._structs:MjStatistic", _structure, _fields),
    ("mujoco._structs:MjVisual", _rules.refusal(_PART_OF_A_MODEL), _fields),
    ("mujoco._structs:MjvCamera", _structure, _fields),
    ("mujoco._structs:MjvOption", _structure, _fields),
    ("mujoco._structs:MjvPerturb", _structure, _fields),
    ("mujoco._render:MjrContext", _rules.refusal(_OF_OPENGL), None),
    ("mujoco._structs:MjvScene", _rules.refusal(_OF_OPENGL), None),
    ("mujoco._structs:MjrRect", _rectangle, _fields),
    ("mujoco.rendering.classic.renderer:Renderer", _renderer, _renderer_settings),
    ("mujoco.renderer:Renderer", _renderer, _renderer_settings),
    ("gymnasium.envs.mujoco.mujoco_rendering:BaseRender", _viewer, _viewer_settings),
    ("dm_control.mujoco.engine:Physics", _physics, None),
    # Their own __setstate__ wraps the model a second time.
    ("dm_control.mujoco.wrapper.core:MjModel", _rules.raw, None),
    ("dm_control.mujoco.wrapper.core:MjData", _rules.raw, None),
    ("dm_control.mjcf.physics:Binding", _binding, None),
    ("dm_control.mjcf.physics:_EmptyBinding", lambda _: "_EMPTY_BINDING", None),
    ("dm_control.mjcf.schema:ElementSpec", _spec, None),
    ("robosuite.utils.binding_utils:MjRenderContext", _robosuite_context, None),
]
