"""How robosuite's environments are copied: what draws their cameras is made anew, around the copied simulator."""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _graft

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES"]

# Handles of OpenGL's.
_HANDLES = ("gl_ctx", "con", "scn")
# What may be set of a scene; the rest is written whenever it is drawn.
_SCENE = ("enabletransform", "flags", "rotate", "scale", "stereo", "translate")


def _context(context: Any) -> tuple[Any, ...]:
    state = {name: value for name, value in vars(context).items() if name not in _HANDLES}
    scene = {name: _data(getattr(context.scn, name)) for name in _SCENE}
    size = {"max_width": context.con.offWidth, "max_height": context.con.offHeight}
    return (
        _new_context,
        (type(context),),
        {"attributes": state, "scene": scene, "size": size},
        None,
        None,
        _fill_context,
    )


def _data(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") else value


def _new_context(cls: Any) -> Any:
    return cls.__new__(cls)


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
    for name, value in scene.items():
        if hasattr(value, "shape"):
            getattr(context.scn, name)[...] = value
        else:
            setattr(context.scn, name, value)


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("robosuite.utils.binding_utils:MjRenderContext", _context, None),
]
