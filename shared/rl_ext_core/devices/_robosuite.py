"""Import robosuite under a decision, with an import hook that patches three of its problems.

robosuite 1.5 asserts at import that ``MUJOCO_EGL_DEVICE_ID`` is a substring of ``CUDA_VISIBLE_DEVICES``, although the
right EGL index may differ. It silently ignores ``render_gpu_device_id`` if that variable is set. It hides errors of a
context behind an error about an attribute ``con``.
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
    """Make robosuite follow a decision, whether it is already imported or not."""
    global _decision
    _decision = decision
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that patches two modules of robosuite after they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module to patch, and replace its loader by one that patches it."""
        if fullname not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    """Module loader that patches a module of robosuite after another loader has loaded it."""

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self._wrapped_loader = loader
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._wrapped_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then patch it."""
        _check_variable(BACKEND)
        with _hide_index() if self._name == _BINDING else _explain_errors():
            self._wrapped_loader.exec_module(module)
        _PATCHES[self._name](module)

    def __getattr__(self, name: str) -> Any:
        # linecache and inspect get the source from the loader.
        if name == "_wrapped_loader":  # copy.copy() creates an instance without attributes
            raise AttributeError(name)
        return getattr(self._wrapped_loader, name)


@contextmanager
def _hide_index() -> Iterator[None]:
    """Unset MUJOCO_EGL_DEVICE_ID during an import that asserts its value but does not use it."""
    hidden = os.environ.pop(INDEX, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[INDEX] = hidden


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Convert errors of OpenGL to an error that names the rendering device."""
    try:
        yield
    except Exception as error:
        _apply.clear_failed_display("robosuite")
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__  # PyOpenGL's texts have many lines
        raise DeviceUnavailableError(
            f"robosuite cannot render on {_describe_target()}: {why}. Use `rl-ext doctor --verify` to see which "
            "devices work"
        ) from error


def _patch_binding(module: ModuleType) -> None:
    """Patch MjRenderContext: explain errors, and free only contexts that were created."""
    context = module.MjRenderContext
    if getattr(context.__del__, "_is_patched", False):
        return
    free, set_buffers = context.__del__, context._set_mujoco_context_and_buffers

    @functools.wraps(free)
    def free_if_made(self: Any) -> None:
        """Free the context, unless its constructor failed."""
        if hasattr(self, "con"):  # it is missing if the constructor failed
            free(self)

    @functools.wraps(set_buffers)
    def set_buffers_or_explain(self: Any) -> None:
        """Set up the context's buffers; if that fails, name the rendering device in the error."""
        with _explain_errors():
            set_buffers(self)

    context.__del__ = _mark_patched(free_if_made)
    context._set_mujoco_context_and_buffers = set_buffers_or_explain


def _patch_context(module: ModuleType) -> None:
    """Patch EGLGLContext to use the decision's device and to name it in errors."""
    context = module.EGLGLContext
    if getattr(context.__init__, "_is_patched", False):
        return
    make, make_current = context.__init__, context.make_current

    @functools.wraps(make)
    def make_as_decided(self: Any, max_width: int, max_height: int, device_id: int = -1) -> None:
        """Create the context on the decision's device, and ignore ``device_id``."""
        self._context = None  # free() reads it, also after a failure
        _check_variable(INDEX)
        hangs = _apply.inherited_display_error()
        if hangs:
            raise DeviceConflictError(hangs)
        _warn_ignored_device(device_id)
        with _explain_errors():
            make(self, max_width, max_height, device_id=-1)

    @functools.wraps(make_current)
    def make_current_or_explain(self: Any) -> None:
        """Make the context current; if that fails, name the rendering device in the error."""
        with _explain_errors():
            make_current(self)

    context.__init__ = _mark_patched(make_as_decided)
    context.make_current = make_current_or_explain


def _mark_patched(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a method, so that it is not patched twice, and return it."""
    function._is_patched = True  # type: ignore[attr-defined]
    return function


_PATCHES = {_BINDING: _patch_binding, _CONTEXT: _patch_context}


def _describe_target() -> str:
    """Return the decision's rendering device, for an error text."""
    assert _decision is not None, "patch_robosuite() has been called"
    if _decision.egl is None:
        return "the CPU (OSMesa)"
    gpu = f" ({_decision.egl.uuid})" if _decision.egl.uuid else ""
    return f"EGL device {_decision.egl.index}{gpu}"


def _check_variable(variable: str) -> None:
    """Raise an error if a variable has changed since the decision was applied."""
    assert _decision is not None, "patch_robosuite() has been called"
    decided, found = _decision.variables.get(variable), os.environ.get(variable)
    if found != decided:
        raise DeviceConflictError(
            f"{variable}={found!r} differs from the decision: expected {decided!r}, but something changed it after "
            "apply(). Remove that change, or call apply() after it"
        )


def _warn_ignored_device(device_id: int) -> None:
    """Log once that ``render_gpu_device_id`` is ignored in favor of the decision."""
    assert _decision is not None, "patch_robosuite() has been called"
    if device_id != -1 and device_id not in _warned_device_ids and str(device_id) != _decision.variables.get(INDEX):
        _warned_device_ids.add(device_id)
        _log.warning(
            "render_gpu_device_id=%d is ignored: this process renders on %s, as decided. Use resolve(..., render=...) "
            "to choose a GPU",
            device_id,
            _describe_target(),
        )


def import_robosuite(decision: Decision | None = None) -> ModuleType:
    """Apply a decision and import robosuite, which may reject the variables in a plain ``import robosuite``.

    :param decision: the decision to apply; default: ``resolve("auto", render="same", renderer="robosuite")``
    :return: the package ``robosuite``
    :raises MissingDependencyError: If robosuite, or a package that it needs, is not installed.
    :raises DeviceConflictError: If a library in this process has already read other values.
    :raises DeviceUnavailableError: If the default decision is not possible on this machine.
    :raises InvalidArgumentError: If the decision is for another renderer.
    """
    from rl_ext_core.devices._resolve import resolve
    from rl_ext_core.errors import _missing_dependency_error

    chosen = resolve("auto", render="same", renderer="robosuite") if decision is None else decision
    if _apply.renderer_name(chosen) not in ("robosuite", ""):
        raise InvalidArgumentError(
            f"this decision is for {chosen.renderer}: expected one for robosuite, which selects its device by another "
            'rule. Use resolve(..., renderer="robosuite")'
        )
    chosen.apply()
    try:
        return importlib.import_module("robosuite")
    except ModuleNotFoundError as error:
        raise _missing_dependency_error(error.name or "robosuite", "robosuite", "import_robosuite()") from error
