"""A decision: which device computes, which one renders, what has to be set for it, and why."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rl_ext_core.devices.inventory import EglDevice, Gpu
from rl_ext_core.errors import _missing_dependency_error

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_ext_core.devices.workers import BoundFactory

__all__ = ["Decision", "Step"]

_Env = TypeVar("_Env")


@dataclass(frozen=True)
class Step:
    """One step of a decision.

    :param rule: what was applied
    :param source: the argument, variable or query that it was applied to
    :param value: what that held
    :param verdict: what follows

    >>> from rl_ext_core.devices import resolve
    >>> [step.verdict for step in resolve("cpu").steps]
    ['cpu']
    """

    rule: str
    source: str
    value: str
    verdict: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.source}{f'={self.value}' if self.value else ''} -> {self.verdict}"


@dataclass(frozen=True)
class Decision:
    """Which device computes and which renders, and why. It pickles, and is the same in every process of the machine.

    :param device: where tensors live and networks run, as torch writes it: ``"cpu"`` or ``"cuda:<index>"``
    :param reason: one sentence on ``device``, fit for a log
    :param gpu: the GPU that computes; None for the CPU, and for a GPU that NVML does not know
    :param mig: the MIG slice of it, where the mask names one
    :param render: ``"gpu"``, ``"cpu"`` or ``"none"``
    :param render_gpu: the GPU that renders
    :param egl: the EGL device that renders; None for OSMesa and where nothing renders
    :param renderer: what renders, with its version
    :param variables: what :meth:`apply` sets (text) and unsets (None)
    :param render_device: the device's name where a renderer takes it as an argument and reads no variable, as SAPIEN
        does: ``sapien.render.RenderSystem(render_device)``, ``gymnasium.make(..., render_backend=render_device)``
    :param steps: what was asked and found, in order
    :param warnings: what to know about it, one sentence each

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
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def compute(self) -> torch.device:
        """The device that computes, for torch: a CUDA device always carries its index.

        :raises MissingDependencyError: torch is not installed
        """
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":  # torch is there and broken: its own error says more
                raise
            raise _missing_dependency_error("torch", "sb3", "Choosing a device") from error
        return torch.device(self.device)

    def explain(self) -> str:
        """Say in full what was decided: the devices under every name they have, what is set, and each step.

        :return: text of several lines
        """
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
        if self.egl is None:
            return (
                f"{same}{_gpu_identity(self.render_gpu)}{through}" if self.render_gpu else f"the CPU (OSMesa){through}"
            )
        place = f"EGL device {self.egl.index}{f', {self.egl.drm}' if self.egl.drm else ''}"
        if self.render == "cpu":
            return f"the CPU (Mesa, {place}){through}"
        return f"{same}{_gpu_identity(self.render_gpu)}, {place}{through}"

    def to_json(self) -> str:
        """Write it down for a log or a bug report.

        :return: JSON with sorted keys
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`to_json` writes, as plain dicts, tuples, numbers and text.

        :return: a new dict
        """
        return dataclasses.asdict(dataclasses.replace(self, variables=dict(self.variables)))

    def apply(self) -> None:
        """Set and unset the variables that the renderer reads, in this process and those it starts from now on.

        Call it before the first environment is built; under renderer ``"robosuite"`` it also sees to it that a later
        ``import robosuite`` does not refuse them. Applying a decision twice changes nothing.

        :raises DeviceConflictError: a library has read other values already, or has made its display elsewhere; no
            variable is changed then
        """
        from rl_ext_core.devices import _apply

        _apply.apply(self, os.environ)

    def bind(self, env_fn: Callable[[], _Env]) -> BoundFactory[_Env]:
        """Make a factory for worker processes that applies this decision before it unpickles and calls ``env_fn``.

        It works under fork, spawn and forkserver, in SB3's ``SubprocVecEnv``, gymnasium's ``AsyncVectorEnv`` and
        TorchRL's ``ParallelEnv``. A different decision for each worker: ``resolve(..., worker=i).bind(env_fn)``.

        :param env_fn: builds the environment; a lambda or a closure will do, as cloudpickle packs it
        :return: the factory: picklable, called without arguments
        :raises InvalidTypeError: not callable, or cloudpickle cannot pack it
        """
        from rl_ext_core.devices.workers import BoundFactory

        return BoundFactory(self, env_fn)


def _gpu_identity(gpu: Gpu | None) -> str:
    return f" = {gpu.name}, {gpu.uuid}, nvidia-smi {gpu.index}, PCI {gpu.pci}" if gpu else ""
