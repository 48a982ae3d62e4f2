"""Which device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices import _mask, _picks, _requests
from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices.decision import Step
from rl_ext_core.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from rl_ext_core.devices._machine import Machine
    from rl_ext_core.devices._picks import Picker
    from rl_ext_core.devices._requests import Request
    from rl_ext_core.devices.inventory import Gpu


@dataclass(frozen=True)
class Computing:
    """The device that computes; the fields are those of a decision."""

    device: str
    reason: str
    gpu: Gpu | None = None
    mig: str | None = None
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()


def decide(request: Request, machine: Machine, picker: Picker) -> Computing:
    """Decide which device computes.

    :raises DeviceUnavailableError: a GPU was named that this process cannot compute on
    """
    asked = Step("asked", request.argument, repr(request.asked), "")
    if request.kind == "cpu":
        return Computing("cpu", "the CPU was asked for", steps=(_concluded(asked, "cpu"),))
    if machine.torch_without_cuda or not machine.count:
        return _without(request, machine, asked)
    if request.kind == "auto" and machine.visible.uuids:
        ordinal, why = _picks.pick(picker, machine.visible, machine.inventory, machine.environ)
        reason = f"auto: cuda:{ordinal}, because {why}"
    elif request.kind in ("auto", "cuda"):
        ordinal, why = _ordinal(request, machine), f"{request.asked} was asked for"
        reason = f"auto: cuda:{ordinal} of {machine.count}" if request.kind == "auto" else why
    else:
        ordinal, why = _of_gpu(request, machine), f"{request.asked} was asked for"
        reason = why
    device = f"cuda:{ordinal}"
    if not machine.visible.uuids:
        warning = f"NVML does not know {device} ({machine.inventory.nvml_error}), so rendering cannot be matched to it"
        return Computing(device, reason, steps=(_concluded(asked, device),), warnings=(warning,))
    steps = (_masked(machine), Step(asked.rule, asked.source, asked.value, f"{device}, because {why}"))
    return Computing(device, reason, machine.gpu(ordinal), machine.visible.mig, steps, _warnings(machine))


def _concluded(asked: Step, verdict: str) -> Step:
    return Step(asked.rule, asked.source, asked.value, verdict)


def _without(request: Request, machine: Machine, asked: Step) -> Computing:
    why = machine.why_none()
    if request.kind == "auto":
        reason = f"auto: the CPU, because {why}"
        return Computing("cpu", reason, steps=(_concluded(asked, f"cpu, because {why}"),))
    raise DeviceUnavailableError(
        f"{request.argument}={str(request.asked)!r} was asked for, but {why}. "
        f'Write {request.argument}="cpu", or {request.argument}="auto" to use a GPU wherever there is one'
    )


def _ordinal(request: Request, machine: Machine) -> int:
    current = _picks._current_of_torch()
    index = request.index if request.index is not None else current or 0
    if index < machine.count:
        return index
    raise DeviceUnavailableError(
        f"{request.argument}={str(request.asked)!r} was asked for, but this process sees {_counted(machine.count)}, "
        f"counted from 0{_listed(machine)}. "
        f'Write {request.argument}="cuda:{machine.count - 1}", or {request.argument}="auto"'
    )


def _of_gpu(request: Request, machine: Machine) -> int:
    gpu = _requests.find_gpu(request, machine.inventory)
    if gpu.uuid in machine.visible.uuids:
        return machine.visible.uuids.index(gpu.uuid)
    mask = _mask.mask_of(machine.environ)
    hidden = "CUDA does not show beside a MIG slice" if mask is None else f"{MASK}={mask!r} hides from CUDA"
    raise DeviceUnavailableError(
        f"{request} is {gpu.uuid}, which {hidden}. Write: export {MASK}={gpu.mig[0] if gpu.mig else gpu.uuid}"
    )


def _counted(count: int) -> str:
    return f"{count} CUDA device{'' if count == 1 else 's'}"


def _listed(machine: Machine) -> str:
    mask = _mask.mask_of(machine.environ)
    return "" if mask is None else f" ({MASK}={mask!r})"


def _masked(machine: Machine) -> Step:
    mask = _mask.mask_of(machine.environ)
    shown = ", ".join(f"cuda:{i} = nvidia-smi {machine.gpu(i).index}" for i in range(len(machine.visible.uuids)))
    if mask is None:
        return Step("no mask", MASK, "", shown)
    return Step("mask", MASK, repr(mask), shown)


def _warnings(machine: Machine) -> tuple[str, ...]:
    mask = _mask.mask_of(machine.environ)
    if machine.visible.ended is None:
        return ()
    how = f"without {MASK} torch sees" if mask is None else f"{MASK}={mask!r} shows"
    return (f"{how} {_counted(len(machine.visible.uuids))}: {machine.visible.ended}",)
