"""Which device renders, and the variables that lead the renderer to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_ext_core.devices import _picks, _renderers, _requests
from rl_ext_core.devices._renderers import INDEX
from rl_ext_core.devices.decision import Step
from rl_ext_core.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ext_core.devices._compute import Computing
    from rl_ext_core.devices._machine import Machine
    from rl_ext_core.devices._picks import Picker
    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices._requests import Request
    from rl_ext_core.devices.inventory import EglDevice, Gpu

_ON_THE_CPU = 'Write render="cpu" to render there on purpose'


@dataclass(frozen=True)
class Rendering:
    """The device that renders; the fields are those of a decision."""

    render: str = "none"
    gpu: Gpu | None = None
    egl: EglDevice | None = None
    renderer: str | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()


def decide(request: Request, name: str, machine: Machine, computing: Computing, picker: Picker) -> Rendering:
    """Decide which device renders.

    :raises DeviceUnavailableError: it cannot be made to render
    """
    if request.kind == "none":
        return Rendering()
    renderer = _renderers.find(name, machine.inventory.versions)
    if request.kind == "cpu" or (request.kind == "same" and computing.device == "cpu"):
        return on_cpu(renderer, machine, request, _note(request, machine))
    if request.kind == "egl":
        device = _egl_device(request, machine)
        return _through_egl(renderer, device, machine, request)
    gpu = _gpu(request, machine, computing, picker)
    return _through_egl(renderer, _device_of(gpu, machine, request), machine, request)


def _note(request: Request, machine: Machine) -> tuple[str, ...]:
    if request.kind == "same" and machine.inventory.gpus:
        gpu = f'render="nvidia-smi:{machine.inventory.gpus[0].index}"'
        return (f'render="same" renders on the CPU, because that is what computes; for a GPU write {gpu}',)
    return ()


def on_cpu(renderer: Renderer, machine: Machine, request: Request, warnings: tuple[str, ...] = ()) -> Rendering:
    """Render on the CPU: on Mesa's software device of EGL where there is one, else with OSMesa."""
    inventory = machine.with_egl
    device = next((device for device in inventory.egl or () if device.software), None)
    steps: tuple[Step, ...]
    if device is not None:
        try:
            index = _renderers.index_for(renderer, device, machine.world, machine.environ)
        except DeviceUnavailableError:
            if not inventory.osmesa:
                raise
        else:
            steps = (_asked(request, f"the CPU, EGL device {device.index} (Mesa)"), _set(renderer, index, device))
            settings = _renderers.variables("egl", index)
            return Rendering("cpu", None, device, str(renderer), settings, steps, warnings)
    if not inventory.osmesa:
        raise DeviceUnavailableError(
            f"{request} needs a renderer on the CPU, and neither Mesa's EGL nor OSMesa is installed"
            f"{f' ({inventory.egl_error})' if inventory.egl_error else ''}. Write: apt-get install libegl1 libegl-mesa0"
        )
    steps = (_asked(request, "the CPU, OSMesa"),)
    return Rendering("cpu", None, None, str(renderer), _renderers.variables("osmesa", None), steps, warnings)


def _gpu(request: Request, machine: Machine, computing: Computing, picker: Picker) -> Gpu:
    if request.kind == "same":
        if computing.gpu is None:
            raise DeviceUnavailableError(f"{request}: {computing.warnings[0]}. {_ON_THE_CPU}")
        return computing.gpu
    if request.kind in ("uuid", "nvidia-smi", "pci"):
        # EGL heeds no mask: a GPU that is hidden from CUDA renders if it is named.
        return _requests.find_gpu(request, machine.inventory)
    count = len(machine.visible.uuids)
    if not count:
        raise DeviceUnavailableError(f"{request} was asked for, but {_why_no_gpu(machine)}. {_ON_THE_CPU}")
    if request.kind == "auto":
        return machine.gpu(_picks.pick(picker, machine.visible, machine.inventory, machine.environ)[0])
    ordinal = request.index or 0
    if ordinal >= count:
        raise DeviceUnavailableError(
            f'{request} was asked for, but this process sees {count}, counted from 0. Write render="cuda:{count - 1}"'
        )
    return machine.gpu(ordinal)


def _why_no_gpu(machine: Machine) -> str:
    inventory = machine.inventory
    if inventory.gpus:
        return machine.why_none()
    return inventory.nvml_error or "NVML lists no GPU on this machine"


def _egl_device(request: Request, machine: Machine) -> EglDevice:
    devices = machine.with_egl.egl or ()
    for device in devices:
        if device.index == request.index:
            return device
    seen = machine.with_egl.egl_error or f"EGL lists {len(devices)}, counted from 0"
    raise DeviceUnavailableError(f'{request} was asked for, but {seen}. Write render="same"')


def _device_of(gpu: Gpu, machine: Machine, request: Request) -> EglDevice:
    inventory = machine.with_egl
    if gpu.mig:
        raise DeviceUnavailableError(
            f"{request}: {gpu.uuid} is cut into MIG slices ({gpu.mig[0]}), which do not render. {_ON_THE_CPU}"
        )
    device = inventory.egl_of(gpu.uuid)
    if device is not None:
        return device
    if inventory.egl_error:
        why = inventory.egl_error
    elif any(found.uuid for found in inventory.egl or ()):
        why = f"EGL lists other GPUs, but not {gpu.uuid}"
    else:
        why = (
            "NVIDIA's EGL is not installed (10_nvidia.json in /usr/share/glvnd/egl_vendor.d; a container needs "
            "NVIDIA_DRIVER_CAPABILITIES=all), so that EGL lists no GPU"
        )
    raise DeviceUnavailableError(f"{request}: {gpu.name} ({gpu.uuid}) does not render here: {why}. {_ON_THE_CPU}")


def _through_egl(renderer: Renderer, device: EglDevice, machine: Machine, request: Request) -> Rendering:
    try:
        index = _renderers.index_for(renderer, device, machine.world, machine.environ)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f"{request}: {error}") from error
    gpu = machine.inventory.gpu(device.uuid) if device.uuid else None
    who = "the CPU" if device.software else gpu.uuid if gpu else "a device that NVML does not know"
    steps = (_asked(request, f"EGL device {device.index}, {who}"), _set(renderer, index, device))
    render = "cpu" if device.software else "gpu"
    return Rendering(render, gpu, device, str(renderer), _renderers.variables("egl", index), steps)


def _asked(request: Request, verdict: str) -> Step:
    return Step("asked", request.argument, repr(request.asked), verdict)


def _set(renderer: Renderer, index: str, device: EglDevice) -> Step:
    return Step(f"rule of {renderer}", INDEX, index, f"EGL device {device.index}")
