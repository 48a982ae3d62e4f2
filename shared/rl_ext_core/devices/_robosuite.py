"""Sees robosuite through its import and its first context under a decision.

robosuite 1.5 asserts at import that MUJOCO_EGL_DEVICE_ID is a substring of CUDA_VISIBLE_DEVICES, which the right EGL
index need not be; it drops ``render_gpu_device_id`` where that variable is set; and what fails in a context surfaces
as an error about an attribute ``con``. An import hook, installed once, mends the three as the modules are loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_ext_core.devices import _apply
from rl_ext_core.devices._renderers import BACKEND, INDEX
from rl_ext_core.errors import DeviceConflictError, DeviceUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from rl_ext_core.devices.decision import Decision

_log = logging.getLogger("rl_ext_core.devices")

_BINDING = "robosuite.utils.binding_utils"
_CONTEXT = "robosuite.renderers.context.egl_context"

_decision: Decision | None = None
_warned_device_ids: set[int] = set()


def patch_robosuite(decision: Decision) -> None:
    """Let robosuite follow this decision, whether it is imported already or not."""
    global _decision
    _decision = decision
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules where Python would, and mends them after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self._wrapped_loader = loader
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._wrapped_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _check_variable(BACKEND)
        with _hide_index() if self._name == _BINDING else _explain_errors():
            self._wrapped_loader.exec_module(module)
        _PATCHES[self._name](module)

    def __getattr__(self, name: str) -> Any:
        # linecache and inspect ask the loader for the source.
        if name == "_wrapped_loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._wrapped_loader, name)


@contextmanager
def _hide_index() -> Iterator[None]:
    """Hide the variable for the length of an import that refuses it and does not use it."""
    hidden = os.environ.pop(INDEX, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[INDEX] = hidden


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn what fails in OpenGL into an error that says where rendering was meant to happen."""
    try:
        yield
    except Exception as error:
        _apply.clear_failed_display("robosuite")
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__  # PyOpenGL's are tables of many lines
        raise DeviceUnavailableError(
            f"robosuite cannot render on {_describe_target()}: {why}. See what EGL offers: rl-ext doctor --verify"
        ) from error


def _patch_binding(module: ModuleType) -> None:
    context = module.MjRenderContext
    if getattr(context.__del__, "_is_patched", False):
        return
    free, draw = context.__del__, context._set_mujoco_context_and_buffers

    @functools.wraps(free)
    def free_if_made(self: Any) -> None:
        if hasattr(self, "con"):  # a constructor that failed has not come so far
            free(self)

    @functools.wraps(draw)
    def draw_or_explain(self: Any) -> None:
        with _explain_errors():
            draw(self)

    context.__del__ = _mark_patched(free_if_made)
    context._set_mujoco_context_and_buffers = draw_or_explain


def _patch_context(module: ModuleType) -> None:
    context = module.EGLGLContext
    if getattr(context.__init__, "_is_patched", False):
        return
    make, make_current = context.__init__, context.make_current

    @functools.wraps(make)
    def make_as_decided(self: Any, max_width: int, max_height: int, device_id: int = -1) -> None:
        self._context = None  # free() asks for it, also after a failure
        _check_variable(INDEX)
        hangs = _apply.inherited_display_error()
        if hangs:
            raise DeviceConflictError(hangs)
        _warn_ignored_device(device_id)
        with _explain_errors():
            make(self, max_width, max_height, device_id=-1)

    @functools.wraps(make_current)
    def make_current_or_explain(self: Any) -> None:
        with _explain_errors():
            make_current(self)

    context.__init__ = _mark_patched(make_as_decided)
    context.make_current = make_current_or_explain


def _mark_patched(function: Callable[..., None]) -> Callable[..., None]:
    function._is_patched = True  # type: ignore[attr-defined]
    return function


_PATCHES = {_BINDING: _patch_binding, _CONTEXT: _patch_context}


def _describe_target() -> str:
    assert _decision is not None, "guard() has been called"
    if _decision.egl is None:
        return "the CPU (OSMesa)"
    gpu = f" ({_decision.egl.uuid})" if _decision.egl.uuid else ""
    return f"EGL device {_decision.egl.index}{gpu}"


def _check_variable(variable: str) -> None:
    """See that what was decided still holds."""
    assert _decision is not None, "guard() has been called"
    decided, found = _decision.variables.get(variable), os.environ.get(variable)
    if found != decided:
        raise DeviceConflictError(
            f"{variable} was {decided!r} as decided and is {found!r} now: something changed it after apply(). "
            "Remove that, or call apply() after it"
        )


def _warn_ignored_device(device_id: int) -> None:
    """Say once that the device which robosuite's own argument names is not the one that renders."""
    assert _decision is not None, "guard() has been called"
    if device_id != -1 and device_id not in _warned_device_ids and str(device_id) != _decision.variables.get(INDEX):
        _warned_device_ids.add(device_id)
        _log.warning(
            "render_gpu_device_id=%d is not used: this process renders on %s, as decided; ask for a GPU with "
            "resolve(..., render=...)",
            device_id,
            _describe_target(),
        )


def import_robosuite(decision: Decision | None = None) -> ModuleType:
    """Import robosuite under a decision, whatever the variables say before.

    :param decision: is applied first; default: ``resolve("auto", render="same", renderer="robosuite")``
    :return: the package ``robosuite``
    :raises MissingDependencyError: robosuite, or what it needs and does not declare, is not installed
    :raises DeviceConflictError: it is too late for the decision in this process
    :raises DeviceUnavailableError: the default decision is impossible here
    :raises InvalidArgumentError: the decision is for another renderer
    """
    from rl_ext_core.devices._resolve import resolve
    from rl_ext_core.errors import _missing_dependency_error

    chosen = resolve("auto", render="same", renderer="robosuite") if decision is None else decision
    if _apply.renderer_name(chosen) not in ("robosuite", ""):
        raise InvalidArgumentError(
            f"this decision is for {chosen.renderer}, which picks its device by another rule than robosuite. "
            'Write resolve(..., renderer="robosuite")'
        )
    chosen.apply()
    try:
        return importlib.import_module("robosuite")
    except ModuleNotFoundError as error:
        raise _missing_dependency_error(error.name or "robosuite", "robosuite", "import_robosuite()") from error
