"""Decide which device computes and which device renders, from an inventory, variables and a request."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import cuda, launchers, renderers
from rl_ext_core.devices.cuda import INDEX, MASK, Machine
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import Inventory, NvmlUnavailableError, pci_address, read_gpus
from rl_ext_core.devices.launchers import Pick, Picker
from rl_ext_core.devices.renderers import Renderer
from rl_ext_core.errors import DeviceConflictError, DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_ext_core.devices.inventory import EglDevice, Gpu

Kind = Literal["auto", "cpu", "cuda", "uuid", "nvidia-smi", "pci", "egl", "same", "none"]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_HEX = "[0-9a-fA-F]"
_DEVICE_FORMS: dict[Kind, str] = {
    "auto": "auto",
    "cpu": "cpu",
    "cuda": f"cuda(?::{_NUMBER})?",
    "uuid": "(GPU-[0-9a-fA-F-]+)",
    "nvidia-smi": f"nvidia-smi:{_NUMBER}",
    "pci": rf"pci:((?:{_HEX}{{1,8}}:)?{_HEX}{{2}}:{_HEX}{{2}}\.{_HEX})",
}
_RENDER_FORMS: dict[Kind, str] = {"egl": f"egl:{_NUMBER}", "same": "same", "none": "none"}
_EXPECTED_FORMS = (
    '"auto", "cpu", "cuda", "cuda:<index>", an index, "GPU-<uuid>", "nvidia-smi:<index>", "pci:<address>" '
    "or a torch.device of type cpu or cuda"
)
_CPU_RENDERING_HINT = 'Use render="cpu" to render on the CPU'

_log = logging.getLogger("rl_ext_core.devices")


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
    """Decide which device computes and which device renders.

    No variable is set until :meth:`Decision.apply`, and CUDA is not initialized.

    Devices can be written in these forms:

    - ``"auto"``: a visible GPU chosen by ``pick``, or the CPU if there is none, which is logged once
    - ``"cpu"``
    - ``"cuda"``, ``"cuda:1"``, ``1`` or a ``torch.device``: a GPU by its torch index under the mask
    - ``"nvidia-smi:3"``, ``"pci:0000:3b:00.0"``, or the beginning of a UUID such as ``"GPU-3f2a"``: a GPU by its
      identity

    :param device: the device that computes, in one of these forms
    :param render: the device that renders: ``"none"`` (default), ``"same"`` as the one that computes,
        ``"egl:<index>"``, or one of these forms. ``"cpu"`` renders with Mesa or OSMesa
    :param renderer: the library that renders. Its rule depends on its version. One of ``"robosuite"``, ``"libero"``,
        ``"mujoco"``, ``"gymnasium"`` (its MuJoCo environments), ``"dm_control"``, ``"sapien"`` and
        ``"mani_skill"``. For the last two, see :attr:`Decision.render_device`
    :param pick: how ``"auto"`` chooses a GPU. ``"free-memory"`` takes the one with the most free memory. ``"rank"``
        (default) uses the first variable of ``LOCAL_RANK``, ``OMPI_COMM_WORLD_LOCAL_RANK`` and ``SLURM_LOCALID`` that
        is set, else torch's current device
    :param rank: index of this process among the training processes of this machine; replaces the launcher's variables
    :param worker: index of an environment worker; worker ``i`` takes visible GPU ``i`` modulo their number
    :param on_missing: ``"error"`` (default), or ``"cpu"`` to replace a missing GPU by the CPU with a warning
    :param inventory: the machine to decide for; default: this machine, read once per process
    :param environ: environment variables to decide with; default: those of this process
    :return: the decision
    :raises DeviceUnavailableError: If a named device, or the GPU of a rank, is missing or cannot render.
    :raises DeviceConflictError: If the mask was changed after torch had started CUDA.
    :raises InvalidArgumentError: If a value has none of these forms.
    :raises InvalidTypeError: If a value has another type.
    :raises MissingDependencyError: If the renderer is not installed.

    >>> from rl_ext_core.devices import resolve
    >>> decision = resolve("cpu")
    >>> decision.device, decision.reason
    ('cpu', 'the CPU was asked for')
    """
    request = Request(device, render, renderer, Picker(pick, rank, worker, cuda.torch_current_device()), on_missing)
    variables = os.environ if environ is None else environ
    if inventory is None:
        inventory = read_inventory(request)
        late = cuda.find_late_mask(Machine(inventory, variables)) if request.needs_cuda else None
        if late is not None:
            raise DeviceConflictError(late)
    decision = decide(inventory, variables, request)
    if request.compute.kind == "auto" and decision.device == "cpu":
        _log_once(logging.INFO, decision.reason)
    for warning in decision.warnings:
        _log_once(logging.WARNING, warning)
    return decision


def read_inventory(request: Request) -> Inventory:
    """Read as much of this machine as a request needs: nothing, GPUs and versions, or EGL's devices too."""
    if request.compute.kind == "cpu" and request.rendering.kind == "none":
        return Inventory()
    inventory = Inventory.current(egl=request.rendering.kind != "none")
    if request.picker.pick == "free-memory":
        with contextlib.suppress(NvmlUnavailableError):  # the cached inventory's free memory is out of date
            inventory = dataclasses.replace(inventory, gpus=read_gpus())
    return inventory


def decide(inventory: Inventory, environ: Mapping[str, str], request: Request) -> Decision:
    """Decide which device computes and which renders. Nothing is imported, read or set."""
    machine, shown = Machine(inventory, environ), request.rendering
    try:
        decision = decide_compute(request, machine)
    except DeviceUnavailableError as error:
        if request.on_missing == "error":
            raise
        decision = Decision("cpu", f"the CPU in place of {request.device}", warnings=(f"on_missing: {error}",))
    try:
        return decide_render(request, machine, decision)
    except DeviceUnavailableError as error:
        if request.on_missing == "error" or shown.kind == "cpu":
            raise
        row = renderers.find_renderer(request.renderer, inventory.versions)
        return _decide_cpu_rendering(row, machine, shown, decision, (f"on_missing: {error}",))


def resolve_device(
    device: str | int | torch.device = "auto", *, on_missing: Literal["error", "cpu"] = "error"
) -> torch.device:
    """Return the device that computes as a ``torch.device``: short for ``resolve(device).compute``.

    :param device: the device, in one of the forms that :func:`resolve` lists
    :param on_missing: ``"error"`` (default), or ``"cpu"`` to replace a missing GPU by the CPU with a warning
    :return: the device; a CUDA device always has an index
    :raises DeviceUnavailableError: If a named GPU is missing.
    :raises InvalidArgumentError: If a value has none of these forms.
    :raises InvalidTypeError: If a value has another type.
    :raises MissingDependencyError: If torch is not installed.

    >>> from rl_ext_core.devices import resolve_device
    >>> resolve_device("cpu")
    device(type='cpu')
    """
    return resolve(device, on_missing=on_missing).compute


@cache
def _log_once(level: int, sentence: str) -> None:
    """Log a sentence once per process, because many buffers and wrappers call :func:`resolve`."""
    _log.log(level, sentence)


# Requests


@dataclass(frozen=True)
class AskedDevice:
    """A parsed ``device`` or ``render`` argument. ``value`` is the index, UUID or address in it, or empty."""

    kind: Kind
    value: str
    argument: str
    original: object

    def __str__(self) -> str:
        return f"{self.argument}={self.original!r}"

    @property
    def index(self) -> int | None:
        """The index in the argument, or None."""
        return int(self.value) if self.value.isdigit() else None

    def step(self, result: str) -> str:
        """Describe the step of a decision that answers this argument."""
        return f"asked: {self} -> {result}"


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`resolve`."""

    device: object = "auto"
    render: object = "none"
    renderer: str = "mujoco"
    picker: Picker = field(default_factory=Picker)
    on_missing: str = "error"

    def __post_init__(self) -> None:
        if self.on_missing not in ("error", "cpu"):
            raise InvalidArgumentError(
                f'on_missing={self.on_missing!r} is not valid: expected "error" or "cpu". Use on_missing="error"'
            )
        renderers.check_renderer(self.renderer)
        _ = self.compute, self.rendering

    @cached_property
    def compute(self) -> AskedDevice:
        """The device that computes, parsed."""
        return parse_device(self.device, "device")

    @cached_property
    def rendering(self) -> AskedDevice:
        """The device that renders, parsed."""
        return parse_device(self.render, "render")

    @property
    def needs_cuda(self) -> bool:
        """Whether the decision depends on the GPUs that CUDA shows."""
        return self.compute.kind != "cpu" or self.rendering.kind not in ("none", "cpu", "same")


def parse_device(asked: object, argument: str) -> AskedDevice:
    """Parse the value of the argument ``"device"`` or ``"render"``."""
    forms, expected, likely = _DEVICE_FORMS, _EXPECTED_FORMS, "auto"
    if argument == "render":
        forms, expected, likely = forms | _RENDER_FORMS, f'{expected}, or "same", "none" or "egl:<index>"', "same"
    text = _device_as_text(asked)
    if text is None:
        likely = "none" if argument == "render" and not asked else likely
        raise InvalidTypeError(f'{argument}={asked!r} is not a device: expected {expected}. Use {argument}="{likely}"')
    for kind, form in forms.items():
        match = re.fullmatch(form, text, re.ASCII)
        if match:
            return AskedDevice(kind, (match[1] or "") if match.lastindex else "", argument, asked)
    raise InvalidArgumentError(
        f'{argument}={text!r} is not the name of a device: expected {expected}. Use {argument}="{likely}"'
    )


def _device_as_text(asked: object) -> str | None:
    """Convert a string, an index or a ``torch.device`` to text; None for other types."""
    if isinstance(asked, str):
        return asked
    if type(asked) is int and asked >= 0:
        return f"cuda:{asked}"
    # A torch.device is recognized by its class's name, because importing torch is slow.
    if type(asked).__module__ == "torch" and type(asked).__name__ == "device":
        return "cpu" if asked.type == "cpu" else str(asked)  # type: ignore[attr-defined]
    return None


def _find_gpu(asked: AskedDevice, inventory: Inventory) -> Gpu:
    """Find a GPU by UUID, PCI address or nvidia-smi index, whether CUDA shows it or not."""
    if not inventory.gpus:
        raise DeviceUnavailableError(
            f"{asked} is not available: this machine has no GPU ({inventory.nvml_error or 'NVML lists none'}). "
            f'Use {asked.argument}="cpu"'
        )
    wanted = str(asked.original).lower()
    if asked.kind == "pci":
        address = asked.value if asked.value.count(":") == 2 else f"0:{asked.value}"
        wanted = f"pci:{pci_address(address)}"
    forms = {"nvidia-smi": "nvidia-smi:{0.index}", "pci": "pci:{0.pci}", "uuid": "{0.uuid}"}
    names = [forms[asked.kind].format(gpu) for gpu in inventory.gpus]
    pairs = [(name.lower(), gpu) for name, gpu in zip(names, inventory.gpus, strict=True)]
    found = [gpu for name, gpu in pairs if name == wanted or (asked.kind == "uuid" and name.startswith(wanted))]
    if len(found) > 1:
        raise InvalidArgumentError(f'{asked} fits {len(found)} GPUs. Use {asked.argument}="{found[0].uuid}"')
    if not found:
        raise DeviceUnavailableError(
            f'{asked} is not available: expected one of {", ".join(names)}. Use {asked.argument}="{names[0]}"'
        )
    return found[0]


# The device that computes


def decide_compute(request: Request, machine: Machine) -> Decision:
    """Decide which device computes. The decision has no rendering device yet."""
    asked = request.compute
    if asked.kind == "cpu":
        return Decision("cpu", "the CPU was asked for", steps=(asked.step("cpu"),))
    if machine.torch_without_cuda or not machine.count:
        why = machine.no_device_reason()
        if asked.kind == "auto":
            return Decision("cpu", f"auto: the CPU, because {why}", steps=(asked.step(f"cpu, because {why}"),))
        raise DeviceUnavailableError(
            f'{asked.argument}={str(asked.original)!r} is not available: {why}. Use device="cpu", or device="auto"'
        )
    found = f"torch finds {cuda.format_gpu_count(machine.count)}"
    why = found if asked.kind == "auto" else f"{asked.original} was asked for"
    if asked.kind == "auto" and machine.visible.uuids:
        ordinal, why = launchers.pick_gpu(request.picker, machine)
    elif asked.kind in ("auto", "cuda"):
        ordinal = _ordinal_from_index(asked, machine, request.picker.current)
    else:
        ordinal = _ordinal_from_identity(asked, machine)
    device = f"cuda:{ordinal}"
    reason = f"auto: {device}, because {why}" if asked.kind == "auto" else why
    if not machine.visible.uuids:
        warning = f"NVML does not list {device} ({machine.inventory.nvml_error}), so rendering cannot be matched to it"
        return Decision(device, reason, steps=(asked.step(device),), warnings=(warning,))
    mask = machine.environ.get(MASK)
    shown = ", ".join(f"cuda:{i} = nvidia-smi {machine.gpu(i).index}" for i in range(len(machine.visible.uuids)))
    masked = f"no mask: {MASK} -> {shown}" if mask is None else f"mask: {MASK}={mask!r} -> {shown}"
    stop_reason, count = machine.visible.stop_reason, cuda.format_gpu_count(len(machine.visible.uuids))
    warnings = () if stop_reason is None else (f"{MASK}={mask!r} shows {count}: {stop_reason}",)
    steps = (masked, asked.step(f"{device}, because {why}"))
    return Decision(device, reason, machine.gpu(ordinal), machine.visible.mig, steps=steps, warnings=warnings)


def _ordinal_from_index(asked: AskedDevice, machine: Machine, current: int | None) -> int:
    """Return the CUDA ordinal for ``"cuda"`` or ``"cuda:1"``; raise if CUDA does not show it."""
    index = asked.index if asked.index is not None else current or 0
    if index < machine.count:
        return index
    # If the index is nvidia-smi's number of a visible GPU, the error shows how to write that.
    mask, name, last = machine.environ.get(MASK), asked.argument, machine.count - 1
    numbers = [machine.inventory.gpu(uuid).index for uuid in machine.visible.uuids]
    value = asked.original if isinstance(asked.original, int) else str(asked.original)
    use = f'{name}="cuda:{last}", or {name}="auto"'
    if index in numbers:
        use = f'{name}="nvidia-smi:{index}" (nvidia-smi:{index} -> cuda:{numbers.index(index)})'
    raise DeviceUnavailableError(
        f"{name}={value!r} is not visible: expected cuda:0{f' to cuda:{last}' if last else ''}, because this process "
        f"sees {cuda.format_gpu_count(machine.count)}{'' if mask is None else f' ({MASK}={mask!r})'}. Use {use}"
    )


def _ordinal_from_identity(asked: AskedDevice, machine: Machine) -> int:
    """Return the CUDA ordinal for a UUID, PCI address or nvidia-smi index; raise if hidden."""
    gpu = _find_gpu(asked, machine.inventory)
    if gpu.uuid in machine.visible.uuids:
        return machine.visible.uuids.index(gpu.uuid)
    mask = machine.environ.get(MASK)
    hidden = "CUDA does not show next to a MIG slice" if mask is None else f"{MASK}={mask!r} hides from CUDA"
    raise DeviceUnavailableError(
        f"{asked} is {gpu.uuid}, which {hidden}. Use `export {MASK}={gpu.mig[0] if gpu.mig else gpu.uuid}`"
    )


# The device that renders


def decide_render(request: Request, machine: Machine, compute_decision: Decision) -> Decision:
    """Add the device that renders to a decision."""
    asked = request.rendering
    if asked.kind == "none":
        return compute_decision
    renderer = renderers.find_renderer(request.renderer, machine.inventory.versions)
    if asked.kind == "cpu" or (asked.kind == "same" and compute_decision.device == "cpu"):
        gpus = machine.inventory.gpus if asked.kind == "same" else ()
        note = 'render="same" renders on the CPU, because that is what computes; to render on a GPU, use render='
        notes = tuple(f'{note}"nvidia-smi:{gpu.index}"' for gpu in gpus[:1])
        return _decide_cpu_rendering(renderer, machine, asked, compute_decision, notes)
    if asked.kind == "egl":
        device = _find_egl_device(renderer, asked, machine)
        return _decide_egl_rendering(renderer, device, machine, asked, compute_decision)
    gpu = _find_rendering_gpu(request, machine, compute_decision)
    _check_not_mig(gpu, asked)
    if renderer.select_egl_device is None:
        return _decide_vulkan_rendering(renderer, gpu, machine, asked, compute_decision)
    device = _find_egl_device_of_gpu(gpu, machine, asked)
    return _decide_egl_rendering(renderer, device, machine, asked, compute_decision)


def _decide_cpu_rendering(
    renderer: Renderer, machine: Machine, asked: AskedDevice, compute_decision: Decision, notes: tuple[str, ...] = ()
) -> Decision:
    """Decide for rendering on the CPU: by EGL's software device (Mesa) if there is one, else by OSMesa."""
    if renderer.select_egl_device is None:
        raise DeviceUnavailableError(
            f"{asked}: {renderer} renders on GPUs only, because Mesa's Vulkan for the CPU lacks required features. "
            'Use render="none", and observations without images'
        )
    inventory = machine.inventory
    compute_decision = dataclasses.replace(compute_decision, warnings=compute_decision.warnings + notes)
    device = next((device for device in inventory.egl or () if device.software), None)
    if device is not None:
        try:
            return _decide_egl_rendering(renderer, device, machine, asked, compute_decision)
        except DeviceUnavailableError:
            if not inventory.osmesa:
                raise
    if not inventory.osmesa:
        raise DeviceUnavailableError(
            f"{asked} needs a renderer for the CPU, but neither Mesa's EGL nor OSMesa is installed"
            f"{f' ({inventory.egl_error})' if inventory.egl_error else ''}. Use `apt-get install libegl1 libegl-mesa0`"
        )
    return dataclasses.replace(
        compute_decision,
        render="cpu",
        renderer=str(renderer),
        variables=renderer.variables("osmesa", None, machine.environ),
        steps=(*compute_decision.steps, asked.step("the CPU, OSMesa")),
    )


def _find_rendering_gpu(request: Request, machine: Machine, compute_decision: Decision) -> Gpu:
    """Return the GPU that a ``render`` argument selects; raise if it is not available."""
    asked = request.rendering
    if asked.kind == "same":
        if compute_decision.gpu is None:
            raise DeviceUnavailableError(f"{asked}: {compute_decision.warnings[0]}. {_CPU_RENDERING_HINT}")
        return compute_decision.gpu
    if asked.kind in ("uuid", "nvidia-smi", "pci"):
        # Renderers ignore the mask if they are given a device, so a GPU that is hidden from CUDA can render.
        return _find_gpu(asked, machine.inventory)
    count = len(machine.visible.uuids)
    if not count:
        why = machine.inventory.nvml_error or machine.no_device_reason()
        raise DeviceUnavailableError(f"{asked} is not available: {why}. {_CPU_RENDERING_HINT}")
    if asked.kind == "auto":
        return machine.gpu(launchers.pick_gpu(request.picker, machine)[0])
    return machine.gpu(_ordinal_from_index(asked, machine, None))


def _find_egl_device(renderer: Renderer, asked: AskedDevice, machine: Machine) -> EglDevice:
    """Return the device for ``render="egl:<index>"``; raise if EGL does not list it."""
    devices = machine.inventory.egl or ()
    listed = f"EGL lists devices 0 to {len(devices) - 1}" if devices else "EGL lists no device"
    why = machine.inventory.egl_error or listed
    if renderer.select_egl_device is None:
        why = f"{renderer} does not render through EGL"
    elif asked.index in range(len(devices)):
        return devices[asked.index or 0]
    raise DeviceUnavailableError(f'{asked} is not available: {why}. Use render="same"')


def _find_egl_device_of_gpu(gpu: Gpu, machine: Machine, asked: AskedDevice) -> EglDevice:
    """Return the EGL device of a GPU; raise with the reason if EGL does not list it."""
    inventory = machine.inventory
    device = inventory.egl_of(gpu.uuid)
    if device is not None:
        return device
    if inventory.egl_error:
        why = inventory.egl_error
    elif any(found.uuid for found in inventory.egl or ()):
        why = f"EGL lists other GPUs, but not {gpu.uuid}"
    else:
        why = (
            "EGL lists no GPU, because NVIDIA's EGL is not installed (10_nvidia.json in /usr/share/glvnd/egl_vendor.d; "
            "a container needs NVIDIA_DRIVER_CAPABILITIES=all, and NVIDIA's driver for WSL has no EGL)"
        )
    raise DeviceUnavailableError(f"{asked}: {gpu} cannot render: {why}. {_CPU_RENDERING_HINT}")


def _check_not_mig(gpu: Gpu, asked: AskedDevice) -> None:
    if gpu.mig:
        raise DeviceUnavailableError(
            f"{asked}: {gpu.uuid} is cut into MIG slices ({gpu.mig[0]}), which do not render. {_CPU_RENDERING_HINT}"
        )


def _decide_egl_rendering(
    renderer: Renderer, device: EglDevice, machine: Machine, asked: AskedDevice, compute_decision: Decision
) -> Decision:
    """Add an EGL device, and the variables that select it, to a decision."""
    try:
        index = renderers.find_index_value(renderer, device, machine)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f"{asked}: {error}") from error
    gpu = machine.inventory.gpu(device.uuid) if device.uuid else None
    if gpu is not None:
        _check_not_mig(gpu, asked)
    who = "the CPU" if device.software else gpu.uuid if gpu else "a device that NVML does not list"
    variables = renderer.variables("egl", index, machine.environ)
    rules = [f"rule of {renderer}: {INDEX}={index} -> EGL device {device.index}"]
    if f",-1,{index}" in (variables.get(MASK) or ""):
        why = (
            f"robosuite asserts that {INDEX} is part of this text; CUDA stops reading at -1, so it shows the same GPUs "
            "as before. A program that splits the text at commas, such as Ray, counts two more"
        )
        rules.append(f"import check of {renderer}: {MASK}={variables[MASK]} -> {why}")
    return dataclasses.replace(
        compute_decision,
        render="cpu" if device.software else "gpu",
        render_gpu=gpu,
        egl=device,
        renderer=str(renderer),
        variables=variables,
        steps=(*compute_decision.steps, asked.step(f"EGL device {device.index}, {who}"), *rules),
    )


def _decide_vulkan_rendering(
    renderer: Renderer, gpu: Gpu, machine: Machine, asked: AskedDevice, compute_decision: Decision
) -> Decision:
    """Decide for rendering with Vulkan, which reads no variable: the GPU's name is passed as an argument."""
    # SAPIEN's name is a CUDA ordinal, or the address of a hidden GPU (haosulab/SAPIEN#101). It reads an address with an
    # unknown domain as bus 0.
    uuids = machine.visible.uuids
    name = f"cuda:{uuids.index(gpu.uuid)}" if gpu.uuid in uuids else f"pci:{gpu.pci.removeprefix('0000:')}"
    rule = f"rule of {renderer}: device={name} -> {gpu.uuid}"
    return dataclasses.replace(
        compute_decision,
        render="gpu",
        render_gpu=gpu,
        renderer=str(renderer),
        render_device=name,
        steps=(*compute_decision.steps, asked.step(gpu.uuid), rule),
    )
