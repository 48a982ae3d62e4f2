"""Decision: the device that computes, the device that renders, the variables to set, and the reasons.

Applying a decision sets its variables in this process, or raises an error if a library has already read others.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.devices._probe import egl_index_of
from rl_ext_core.devices.cuda import INDEX
from rl_ext_core.devices.inventory import EglDevice, Gpu
from rl_ext_core.devices.renderers import BACKEND, PLATFORM, TABLE
from rl_ext_core.errors import DeviceConflictError, _missing_dependency_error

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("rl_ext_core.devices")
_has_warned = False

_PLATFORMS = {"EGLPlatform": "egl", "OSMesaPlatform": "osmesa", "GLXPlatform": "glx"}
_READS_AT_IMPORT = {row.name: row.reads_at_import for row in TABLE}
_DISPLAYS = {row.name: row.display for row in TABLE if row.display}


@dataclass(frozen=True)
class Decision:
    """The device that computes and the device that renders, with the reasons. It can be pickled.

    :param device: the compute device in torch's notation: ``"cpu"`` or ``"cuda:<index>"``
    :param reason: why ``device`` was chosen, one sentence
    :param gpu: the GPU that computes; None for the CPU, or for a GPU that NVML does not list
    :param mig: UUID of the MIG slice that computes, or None
    :param render: ``"gpu"``, ``"cpu"`` or ``"none"``
    :param render_gpu: the GPU that renders, or None
    :param egl: the EGL device that renders; None for OSMesa, or if nothing renders
    :param renderer: name and version of the renderer, or None
    :param variables: environment variables that :meth:`apply` sets (text) or unsets (None)
    :param render_device: name of the device to pass to a renderer that reads no variable, or None. For SAPIEN:
        ``sapien.render.RenderSystem(render_device)``, ``gymnasium.make(..., render_backend=render_device)``
    :param steps: steps of the decision, in order: each a rule, the value that it was applied to, and the result
    :param warnings: problems that do not prevent the decision, one sentence each

    >>> from rl_ext_core.devices import resolve
    >>> decision = resolve("cpu")
    >>> decision.compute, decision.render
    (device(type='cpu'), 'none')
    """

    device: str
    reason: str
    gpu: Gpu | None = None
    mig: str | None = None
    render: str = "none"
    render_gpu: Gpu | None = None
    egl: EglDevice | None = None
    renderer: str | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    render_device: str | None = None
    steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def compute(self) -> torch.device:
        """The compute device as a ``torch.device``. A CUDA device always has an index.

        :raises MissingDependencyError: If torch is not installed.
        """
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":  # torch is installed but broken, and its own error says more
                raise
            raise _missing_dependency_error("torch", "sb3", "Choosing a device") from error
        return torch.device(self.device)

    def explain(self) -> str:
        """Describe the decision: the devices under all their names, the variables to set, and each step."""
        lines = [
            f"compute  {self.device}{_gpu_identity(self.gpu)}{f', MIG slice {self.mig}' if self.mig else ''}",
            f"render   {self._describe_rendering()}",
        ]
        lines += [f"set      {name}={value}" for name, value in self.variables.items() if value is not None]
        lines += [f"unset    {name}" for name, value in self.variables.items() if value is None]
        if self.render_device is not None:
            lines.append(f"pass     {self.render_device!r} as the device to render on")
        lines += [f"because  {step}" for step in self.steps]
        lines += [f"warning  {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def _describe_rendering(self) -> str:
        if self.render == "none":
            return "nothing"
        through = f" through {self.renderer}"
        same = "the same GPU" if self.gpu and self.render_gpu == self.gpu else "a GPU"
        if self.egl is None and self.render_gpu is None:
            return f"the CPU (OSMesa){through}"
        if self.egl is None:
            return f"{same}{_gpu_identity(self.render_gpu)}{through}"
        place = f"EGL device {self.egl.index}{f', {self.egl.drm}' if self.egl.drm else ''}"
        if self.render == "cpu":
            return f"the CPU (Mesa, {place}){through}"
        return f"{same}{_gpu_identity(self.render_gpu)}, {place}{through}"

    def apply(self) -> None:
        """Set and unset the variables that the renderer reads, in this process and in processes that it starts later.

        Call it before the first environment is created. Applying a decision twice changes nothing.

        :raises DeviceConflictError: If a library has already read other values, or has created its display on another
            device. No variable is changed then.
        """
        global _applied
        if not self.variables:
            return
        name, needs = (self.renderer or "").split(" ")[0], "this decision needs"
        conflict = find_display_conflict(name, self.egl.index if self.egl else None, needs)
        conflict = conflict or find_import_conflict(name, self.variables[PLATFORM] or "", needs)
        if conflict is not None:
            raise DeviceConflictError(conflict[1])
        set_variables(self.variables, os.environ)
        _applied = self


_applied: Decision | None = None
_inherited_displays: set[str] = set()


def is_in_force(environ: Mapping[str, str]) -> bool:
    """Return whether a decision was applied in this process, and ``environ`` still has its values."""
    return _applied is not None and all(environ.get(name) == value for name, value in _applied.variables.items())


def _drop_parent_state() -> None:
    # A forked worker may apply a decision of its own.
    global _applied
    _applied = None
    # A forked child has none of the threads that Mesa started for the parent's display, so using that display hangs.
    _inherited_displays.update(module for name, module in _DISPLAYS.items() if display_of(name))


after_fork(_drop_parent_state)


def apply_in_worker(decision: Decision, *, is_creator: bool) -> None:
    """Apply a decision in a process that builds an environment for a worker.

    Vectorized environments also build one environment in the process that created the factories, to read its spaces.
    There (``is_creator``), a decision that was applied earlier stays in effect, which is logged once.
    """
    global _has_warned
    present = _applied
    if present is None or present.variables == decision.variables:
        decision.apply()
    elif is_creator and decision.variables and not _has_warned:
        _has_warned = True
        _log.warning(
            "a worker's environment is built in the parent process, under the decision that was applied here (%s) "
            "instead of the worker's (%s). This is harmless if only its spaces are used",
            present.reason,
            decision.reason,
        )
    elif not is_creator and decision.variables:
        raise DeviceConflictError(
            f"this worker has applied one decision ({present.reason}), but an environment came with another "
            f"({decision.reason}): a process has one rendering device. Use one worker for each device"
        )


def find_import_conflict(name: str, wanted: str, needs: str) -> tuple[str, str] | None:
    """Find a module that read another backend when it was imported; return the variable and an error text."""
    for module, attribute in _READS_AT_IMPORT.get(name, ()):
        taken = getattr(sys.modules.get(module), attribute, wanted)
        if taken != wanted:
            package = module.split(".")[0]
            place = f"`import {package}`"
            if package == "mujoco" and "torchrl" in sys.modules:
                place = "`import torchrl`, which imports mujoco, in the script that starts the workers"
            text = f"{module} read {BACKEND}={taken!r} when it was imported, but {needs} {wanted!r}"
            return BACKEND, f"{text}: call resolve(...).apply() above {place}"
    platform = _PLATFORMS.get(type(getattr(sys.modules.get("OpenGL.platform"), "PLATFORM", None)).__name__)
    if platform is None or platform == wanted:
        return None
    text = f"PyOpenGL was imported for {platform}, but {needs} {wanted}"
    return PLATFORM, f"{text}: call resolve(...).apply() above the first import of mujoco, robosuite or OpenGL"


def find_display_conflict(name: str, wanted: int | None, needs: str) -> tuple[str, str] | None:
    """Find a display that this process has created on another device than EGL index ``wanted``, or None for OSMesa.

    Return the variable and an error text.
    """
    if _inherited_displays and wanted is not None:
        # Libraries share one display per device, so it does not matter which of them created it.
        return INDEX, (
            f"{min(_inherited_displays)} had created its display before this process was forked, so rendering would "
            'hang here. Start workers with start_method="forkserver" or "spawn" (gymnasium: context=, TorchRL: '
            "mp_start_method=), or render in workers only"
        )
    display = display_of(name)
    made = None if display is None else egl_index_of(display)
    if display is None or (made is not None and made == wanted):
        return None
    where = "another device" if display else "no device, because it failed"
    where = where if made is None else f"EGL device {made}"
    target = "OSMesa" if wanted is None else f"EGL device {wanted}"
    return INDEX, (
        f"{_DISPLAYS[name]} already renders on {where}, and a process keeps its first display, but {needs} {target}: "
        "call resolve(...).apply() above the first environment, or use one process per device"
    )


def display_of(name: str) -> Any:
    """Return the display that a renderer has created, or tried to create, in this process; None if there is none."""
    return getattr(sys.modules.get(_DISPLAYS.get(name, "")), "EGL_DISPLAY", None)


def _gpu_identity(gpu: Gpu | None) -> str:
    """Return name, UUID, nvidia-smi index and PCI address of a GPU as text; empty for None."""
    return f" = {gpu.name}, {gpu.uuid}, nvidia-smi {gpu.index}, PCI {gpu.pci}" if gpu else ""
