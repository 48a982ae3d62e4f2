"""Decision: the device that computes, the device that renders, the variables to set, and the reasons."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_ext_core.devices import apply
from rl_ext_core.devices.inventory import EglDevice, Gpu
from rl_ext_core.errors import DeviceConflictError, _missing_dependency_error

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("rl_ext_core.devices")
_has_warned = False


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
        """Describe the rendering device and the renderer, for :meth:`explain`."""
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
        name = (self.renderer or "").split(" ")[0]
        apply.set_device_variables(name, self.variables, self.egl.index if self.egl else None, self.reason)


def apply_in_worker(decision: Decision, *, is_creator: bool) -> None:
    """Apply a decision in a process that builds an environment for a worker.

    Vectorized environments also build one environment in the process that created the factories, to read its spaces.
    There (``is_creator``), a decision that was applied earlier stays in effect, which is logged once.
    """
    global _has_warned
    present = apply.applied
    if present is None or present.variables == dict(decision.variables):
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


def _gpu_identity(gpu: Gpu | None) -> str:
    """Return name, UUID, nvidia-smi index and PCI address of a GPU as text; empty for None."""
    return f" = {gpu.name}, {gpu.uuid}, nvidia-smi {gpu.index}, PCI {gpu.pci}" if gpu else ""
