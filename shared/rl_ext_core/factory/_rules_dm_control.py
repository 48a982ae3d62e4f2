"""How dm_control's environments are copied: its simulator's handles, and what it derives from them."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory._state import layer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES"]

# Made anew from the simulator's data: the names by which its fields are indexed, a view into it, what draws it, and
# views that are kept because making them takes time.
_DERIVED = ("_contexts", "_contexts_lock", "_named", "_warnings", "_bindings")

_MODULES = ("mujoco.engine", "mujoco.index", "mjcf.physics")
_SCHEMAS = ("MUJOCO", "ATTACHMENT_FRAME", "WORLD_ATTACHMENT_FRAME")


def _wrapper(value: Any) -> tuple[Any, ...]:
    # Its own __setstate__ wraps the model a second time.
    return layer(value, dict(vars(value)))


def _physics(physics: Any) -> tuple[Any, ...]:
    state = {name: value for name, value in vars(physics).items() if name not in _DERIVED}
    return _bare, (type(physics),), state, None, None, _fill_physics


def _bare(cls: Any) -> Any:
    return cls.__new__(cls)


def _fill_physics(physics: Any, state: dict[str, Any]) -> None:
    engine, index, bindings = (importlib.import_module(f"dm_control.{name}") for name in _MODULES)
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
    return _bare, (type(binding),), kept, None, None, _fill_binding


def _fill_binding(binding: Any, state: dict[str, Any]) -> None:
    binding.__init__(*(state[name] for name in ("_physics", "_namespace", "_named_index")))


def _empty_binding(binding: Any) -> tuple[Any, ...]:
    return _the_empty_binding, ()


def _the_empty_binding() -> Any:
    return importlib.import_module("dm_control.mjcf.physics")._EMPTY_BINDING


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


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("dm_control.mujoco.engine:Physics", _physics, None),
    ("dm_control.mujoco.wrapper.core:MjModel", _wrapper, None),
    ("dm_control.mujoco.wrapper.core:MjData", _wrapper, None),
    ("dm_control.mjcf.physics:Binding", _binding, None),
    ("dm_control.mjcf.physics:_EmptyBinding", _empty_binding, None),
    ("dm_control.mjcf.schema:ElementSpec", _spec, None),
]
