"""The one decision, from what was asked and what there is."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _compute, _renderers, _rendering, _requests
from rl_ext_core.devices._machine import Machine
from rl_ext_core.devices._picks import Pick, Picker
from rl_ext_core.devices.decision import Decision
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_ext_core.devices._compute import Computing
    from rl_ext_core.devices._rendering import Rendering
    from rl_ext_core.devices._requests import Request
    from rl_ext_core.devices.inventory import Inventory

_log = logging.getLogger("rl_ext_core.devices")

# A sentence is worth one line per process, however many buffers and wrappers ask.
_said: set[str] = set()


def resolve(
    device: str | int | torch.device = "auto",
    *,
    render: str | int | torch.device = "none",
    renderer: str = "mujoco",
    pick: Pick = "rank",
    rank: int | None = None,
    worker: int | None = None,
    on_missing: Literal["error", "cpu"] = "error",
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
) -> Decision:
    """Decide which device computes and which one renders.

    Nothing is set by it (:meth:`Decision.apply` does that), and CUDA is not initialised.

    :param device: what computes. ``"auto"`` is a visible GPU if there is one, chosen by ``pick``, else the CPU, which
        is logged once. ``"cpu"``; ``"cuda"``, ``"cuda:1"``, ``1`` or a ``torch.device``: as torch counts under a mask;
        ``"nvidia-smi:3"``, ``"pci:0000:3b:00.0"`` or the beginning of a UUID, ``"GPU-3f2a"``: a GPU by its identity
    :param render: what renders. ``"none"``; ``"same"``: the GPU that computes, or the CPU if that computes; ``"cpu"``:
        Mesa or OSMesa; or a GPU in any of the forms above, or ``"egl:<index>"``
    :param renderer: ``"robosuite"``, ``"mujoco"``, ``"gymnasium"`` (its MuJoCo environments) or ``"dm_control"``:
        each has its own rule, which depends on its version
    :param pick: how ``"auto"`` chooses: ``"rank"``, by ``LOCAL_RANK`` or ``SLURM_LOCALID`` where a launcher has set
        one, else torch's current device; or ``"free-memory"``
    :param rank: this process among those that train together on this machine, in place of what a launcher says
    :param worker: an environment worker's number: workers share the visible GPUs in turn
    :param on_missing: ``"cpu"`` turns a GPU that was named and is not there into the CPU, and logs a warning
    :param inventory: decide for another machine; default: this one's, read once per process
    :param environ: variables to decide under; default: this process's
    :return: the decision
    :raises DeviceUnavailableError: a device was named, or a rank stands for one, that is not there or cannot render
    :raises DeviceConflictError: the mask was changed after torch had started CUDA
    :raises InvalidArgumentError: a value has none of the forms above
    :raises InvalidTypeError: a value of another type
    :raises MissingDependencyError: the renderer is not installed
    """
    if on_missing not in ("error", "cpu"):
        raise InvalidArgumentError(f'on_missing={on_missing!r} is neither "error" nor "cpu". Write on_missing="error"')
    asked, shown = _requests.parse(device, "device"), _requests.parse(render, "render")
    picker = Picker(pick, rank, worker)
    machine = Machine(inventory, os.environ if environ is None else environ)
    computing = _computing(asked, machine, picker, on_missing)
    rendering = _rendering_of(shown, renderer, machine, computing, picker, on_missing)
    decision = _joined(computing, rendering)
    _say(asked, decision)
    return decision


def resolve_device(
    device: str | int | torch.device = "auto", *, on_missing: Literal["error", "cpu"] = "error"
) -> torch.device:
    """Give the device that computes, for those who want just that: ``resolve(device).compute``.

    :param device: as for :func:`resolve`
    :param on_missing: as for :func:`resolve`
    :return: the device; a CUDA device always carries its index
    :raises DeviceUnavailableError: a GPU was named that is not there
    :raises InvalidArgumentError: a value that names no device
    :raises InvalidTypeError: a value of another type
    :raises MissingDependencyError: torch is not installed
    """
    return resolve(device, on_missing=on_missing).compute


def _computing(request: Request, machine: Machine, picker: Picker, on_missing: str) -> Computing:
    try:
        return _compute.decide(request, machine, picker)
    except DeviceUnavailableError as error:
        if on_missing == "error":
            raise
        return _compute.Computing("cpu", f"the CPU in place of {request.asked}", warnings=(f"on_missing: {error}",))


def _rendering_of(
    request: Request, renderer: str, machine: Machine, computing: Computing, picker: Picker, on_missing: str
) -> Rendering:
    try:
        return _rendering.decide(request, renderer, machine, computing, picker)
    except DeviceUnavailableError as error:
        if on_missing == "error" or request.kind == "cpu":
            raise
        rule = _renderers.find(renderer, machine.inventory.versions)
        return _rendering.on_cpu(rule, machine, request, (f"on_missing: {error}",))


def _joined(computing: Computing, rendering: Rendering) -> Decision:
    return Decision(
        device=computing.device,
        reason=computing.reason,
        gpu=computing.gpu,
        mig=computing.mig,
        render=rendering.render,
        render_gpu=rendering.gpu,
        egl=rendering.egl,
        renderer=rendering.renderer,
        variables=rendering.variables,
        steps=computing.steps + rendering.steps,
        warnings=computing.warnings + rendering.warnings,
    )


def _say(request: Request, decision: Decision) -> None:
    if request.kind == "auto" and decision.device == "cpu":
        _once(logging.INFO, decision.reason)
    for warning in decision.warnings:
        _once(logging.WARNING, warning)


def _once(level: int, sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        _log.log(level, sentence)
