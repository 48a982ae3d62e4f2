"""Resolve the requested devices to a :class:`Decision` on a machine."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _cuda, _pick, _renderers
from rl_ext_core.devices._cuda import MASK, Machine
from rl_ext_core.devices._pick import Pick, Picker
from rl_ext_core.devices._renderers import EglView, Renderer
from rl_ext_core.devices.decision import Decision, Step
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_ext_core.devices.inventory import EglDevice, Gpu, Inventory

Kind = Literal["auto", "cpu", "cuda", "uuid", "nvidia-smi", "pci", "egl", "same", "none"]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_INDEX_LIMIT = 10**9
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
# On WSL, Windows's driver brings libcuda and NVML (/usr/lib/wsl/lib), but no libEGL_nvidia.
WSL_LIMIT = "computes on WSL and does not render there, because NVIDIA's driver for WSL has CUDA and no EGL"
_CPU_RENDERING_HINT = 'Use render="cpu" to render on the CPU'

_log = logging.getLogger("rl_ext_core.devices")

# Each sentence is logged once per process, because many buffers and wrappers call resolve().
_logged_sentences: set[str] = set()


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
        ``"mujoco"``, ``"gymnasium"`` (its MuJoCo environments), ``"dm_control"``, ``"pyrender"``, ``"sapien"`` and
        ``"mani_skill"``. For the last two, see :attr:`Decision.render_device`
    :param pick: how ``"auto"`` chooses a GPU. ``"free-memory"`` takes the one with the most free memory. ``"rank"``
        (default) uses the first variable of ``LOCAL_RANK``, ``OMPI_COMM_WORLD_LOCAL_RANK``,
        ``MV2_COMM_WORLD_LOCAL_RANK``, ``MPI_LOCALRANKID``, ``PMI_LOCAL_RANK`` and ``SLURM_LOCALID`` that is set, else
        torch's current device
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
    if on_missing not in ("error", "cpu"):
        raise InvalidArgumentError(
            f'on_missing={on_missing!r} is not valid: expected "error" or "cpu". Use on_missing="error"'
        )
    asked, shown = parse_device(device, "device"), parse_device(render, "render")
    picker = Picker(pick, rank, worker)
    machine = Machine(inventory, os.environ if environ is None else environ)
    try:
        decision = decide_compute(asked, machine, picker)
    except DeviceUnavailableError as error:
        if on_missing == "error":
            raise
        decision = Decision("cpu", f"the CPU in place of {device}", warnings=(f"on_missing: {error}",))
    try:
        decision = decide_render(shown, renderer, machine, decision, picker)
    except DeviceUnavailableError as error:
        if on_missing == "error" or shown.kind == "cpu":
            raise
        rule = _renderers.find_renderer(renderer, machine.inventory.versions)
        decision = _decide_cpu_rendering(rule, machine, shown, decision, (f"on_missing: {error}",))
    if asked.kind == "auto" and decision.device == "cpu":
        _log_once(logging.INFO, decision.reason)
    for warning in decision.warnings:
        _log_once(logging.WARNING, warning)
    return decision


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


def _log_once(level: int, sentence: str) -> None:
    """Log a sentence, unless this process has logged it before."""
    if sentence not in _logged_sentences:
        _logged_sentences.add(sentence)
        _log.log(level, sentence)


# Requests


@dataclass(frozen=True)
class Request:
    """A parsed ``device`` or ``render`` argument.

    :param kind: form of the argument
    :param value: index, UUID or address in it, as text; empty if the form has none
    :param argument: name of the argument, for error texts
    :param asked: the argument as the caller wrote it
    """

    kind: Kind
    value: str
    argument: str
    asked: object

    def __str__(self) -> str:
        return f"{self.argument}={self.asked!r}"

    @property
    def index(self) -> int | None:
        """The index in the argument, or None."""
        return int(self.value) if self.value.isdigit() else None

    def step(self, verdict: str) -> Step:
        """Create the step of a decision that answers this request."""
        return Step("asked", self.argument, repr(self.asked), verdict)


def parse_device(asked: object, argument: str) -> Request:
    """Parse the value of the argument ``"device"`` or ``"render"``.

    :raises InvalidArgumentError: If the text has none of the forms.
    :raises InvalidTypeError: If it is not a string, an index or a ``torch.device``.
    """
    if type(asked) is int and abs(asked) >= _INDEX_LIMIT:  # Python refuses to write the longest ones in decimal
        raise InvalidArgumentError(
            f"{argument}={asked:#x} is not the index of a device: expected {_expected_forms(argument)}. "
            f'Use {argument}="auto"'
        )
    for kind, form in (_DEVICE_FORMS | (_RENDER_FORMS if argument == "render" else {})).items():
        match = re.fullmatch(form, _device_as_text(asked, argument), re.ASCII)
        if match:
            return Request(kind, (match[1] or "") if match.lastindex else "", argument, asked)
    raise InvalidArgumentError(
        f"{argument}={str(asked)!r} is not the name of a device: expected {_expected_forms(argument)}. "
        f'Use {argument}="{_guess_form(str(asked), argument)}"'
    )


def _device_as_text(asked: object, argument: str) -> str:
    """Convert a string, an index or a ``torch.device`` to text; raise for other types."""
    if isinstance(asked, str):
        return asked
    if type(asked) is int and asked >= 0:
        return f"cuda:{asked}"
    # A torch.device is recognized by its class's name, because importing torch is slow.
    if type(asked).__module__ == "torch" and type(asked).__name__ == "device":
        return "cpu" if asked.type == "cpu" else str(asked)  # type: ignore[attr-defined]
    likely = "auto" if argument == "device" else "same" if asked else "none"
    what = "negative" if type(asked) is int else f"of type {type(asked).__name__}"
    raise InvalidTypeError(
        f'{argument}={asked!r} is {what}: expected {_expected_forms(argument)}. Use {argument}="{likely}"'
    )


def _expected_forms(argument: str) -> str:
    """List the values that the argument ``"device"`` or ``"render"`` accepts, for errors."""
    return (
        f'{_EXPECTED_FORMS}, or for rendering "same", "none" or "egl:<index>"'
        if argument == "render"
        else _EXPECTED_FORMS
    )


def _guess_form(asked: str, argument: str) -> str:
    """Guess which form the caller meant, for the fix in an error text."""
    text = asked.strip().strip("'\"[]").lower().replace(" ", "")
    for guess in (text, f"cuda:{text}", text.replace("gpu:", "cuda:").replace("gpu-", "GPU-")):
        if any(re.fullmatch(form, guess, re.ASCII) for form in _DEVICE_FORMS.values()):
            return guess
    return "same" if argument == "render" else "auto"


def _find_gpu(request: Request, inventory: Inventory) -> Gpu:
    """Find a GPU by UUID, PCI address or nvidia-smi index, whether CUDA shows it or not."""
    if not inventory.gpus:
        raise DeviceUnavailableError(
            f"{request} is not available: this machine has no GPU ({inventory.nvml_error or 'NVML lists none'}). "
            f'Use {request.argument}="cpu"'
        )
    if request.kind == "nvidia-smi":
        found = [gpu for gpu in inventory.gpus if gpu.index == request.index]
    elif request.kind == "pci":
        domain, _, rest = (request.value if request.value.count(":") == 2 else f"0:{request.value}").partition(":")
        address = f"{int(domain, 16):04x}:{rest.lower()}"
        found = [gpu for gpu in inventory.gpus if gpu.pci == address]
    else:
        found = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(request.value.lower())]
    if len(found) > 1:
        uuids = " and ".join(gpu.uuid for gpu in found)
        raise InvalidArgumentError(
            f'{request} fits {len(found)} GPUs: {uuids}. Use {request.argument}="{found[0].uuid}"'
        )
    if not found:
        form = {"nvidia-smi": "nvidia-smi:{0.index}", "pci": "pci:{0.pci}"}.get(request.kind, "{0.uuid}")
        names = [form.format(gpu) for gpu in inventory.gpus]
        raise DeviceUnavailableError(
            f'{request} is not available: expected one of {", ".join(names)}. Use {request.argument}="{names[0]}"'
        )
    return found[0]


# The device that computes


def decide_compute(request: Request, machine: Machine, picker: Picker) -> Decision:
    """Decide which device computes. The decision has no rendering device yet.

    :raises DeviceUnavailableError: If a named GPU is not available to this process.
    """
    if request.kind == "cpu":
        return Decision("cpu", "the CPU was asked for", steps=(request.step("cpu"),))
    if machine.torch_without_cuda or not machine.count:
        why = machine.no_device_reason()
        if request.kind == "auto":
            return Decision("cpu", f"auto: the CPU, because {why}", steps=(request.step(f"cpu, because {why}"),))
        raise DeviceUnavailableError(
            f"{request.argument}={str(request.asked)!r} is not available: {why}. "
            f'Use {request.argument}="cpu", or {request.argument}="auto" to use a GPU if there is one'
        )
    if request.kind == "auto" and machine.visible.uuids:
        ordinal, why = _pick.pick(picker, machine)
        reason = f"auto: cuda:{ordinal}, because {why}"
    elif request.kind in ("auto", "cuda"):
        ordinal, why = _ordinal_from_index(request, machine), f"{request.asked} was asked for"
        reason = f"auto: cuda:{ordinal} of {machine.count}" if request.kind == "auto" else why
    else:
        ordinal, why = _ordinal_from_identity(request, machine), f"{request.asked} was asked for"
        reason = why
    device = f"cuda:{ordinal}"
    if not machine.visible.uuids:
        warning = f"NVML does not list {device} ({machine.inventory.nvml_error}), so rendering cannot be matched to it"
        return Decision(device, reason, steps=(request.step(device),), warnings=(warning,))
    mask = machine.environ.get(MASK)
    shown = ", ".join(f"cuda:{i} = nvidia-smi {machine.gpu(i).index}" for i in range(len(machine.visible.uuids)))
    masked = Step("no mask", MASK, "", shown) if mask is None else Step("mask", MASK, repr(mask), shown)
    warnings: tuple[str, ...] = ()
    if machine.visible.stop_reason is not None:
        how = f"without {MASK} torch sees" if mask is None else f"{MASK}={mask!r} shows"
        warnings = (f"{how} {_format_device_count(len(machine.visible.uuids))}: {machine.visible.stop_reason}",)
    different = _pick.find_rank_contradiction(machine) if request.kind == "auto" and picker.uses_launcher_rank else None
    if different is not None:
        first, second = (f"{name}={machine.environ[name]!r}" for name in different)
        use = f"Use `unset {different[0]}` if it was set for another process"
        warnings = (*warnings, f"{first} contradicts {second} and comes first, so that {device} computes. {use}")
    steps = (masked, request.step(f"{device}, because {why}"))
    return Decision(device, reason, machine.gpu(ordinal), machine.visible.mig, steps=steps, warnings=warnings)


def _ordinal_from_index(request: Request, machine: Machine) -> int:
    """Return the CUDA ordinal for ``"cuda"`` or ``"cuda:1"``; raise if CUDA does not show it."""
    index = request.index if request.index is not None else _cuda.torch_current_device() or 0
    if index < machine.count:
        return index
    raise DeviceUnavailableError(_index_error(request, index, machine))


def _index_error(request: Request, index: int, machine: Machine) -> str:
    """Return the error text for an index beyond the visible GPUs.

    If the index is nvidia-smi's number of a visible GPU, the text shows how to write that.
    """
    mask, name, last = machine.environ.get(MASK), request.argument, machine.count - 1
    numbers = [machine.inventory.gpu(uuid).index for uuid in machine.visible.uuids]
    asked = request.asked if isinstance(request.asked, int) else str(request.asked)
    use = f'{name}="cuda:{last}", or {name}="auto"'
    if index in numbers:
        use = f'{name}="nvidia-smi:{index}" (nvidia-smi:{index} -> cuda:{numbers.index(index)})'
    return (
        f"{name}={asked!r} is not visible: expected cuda:0{f' to cuda:{last}' if last else ''}, because this process "
        f"sees {_format_device_count(machine.count)}{'' if mask is None else f' ({MASK}={mask!r})'}. Use {use}"
    )


def _ordinal_from_identity(request: Request, machine: Machine) -> int:
    """Return the CUDA ordinal for a UUID, PCI address or nvidia-smi index; raise if hidden."""
    gpu = _find_gpu(request, machine.inventory)
    if gpu.uuid in machine.visible.uuids:
        return machine.visible.uuids.index(gpu.uuid)
    mask = machine.environ.get(MASK)
    hidden = "CUDA does not show next to a MIG slice" if mask is None else f"{MASK}={mask!r} hides from CUDA"
    raise DeviceUnavailableError(
        f"{request} is {gpu.uuid}, which {hidden}. Use `export {MASK}={gpu.mig[0] if gpu.mig else gpu.uuid}`"
    )


def _format_device_count(count: int) -> str:
    """Return ``"1 CUDA device"`` or, for example, ``"4 CUDA devices"``."""
    return f"{count} CUDA device{'' if count == 1 else 's'}"


# The device that renders


def decide_render(
    request: Request, name: str, machine: Machine, compute_decision: Decision, picker: Picker
) -> Decision:
    """Add the device that renders to a decision.

    :raises DeviceUnavailableError: If that device cannot render.
    """
    if request.kind == "none":
        return compute_decision
    renderer = _renderers.find_renderer(name, machine.inventory.versions)
    if request.kind == "cpu" or (request.kind == "same" and compute_decision.device == "cpu"):
        gpus = machine.inventory.gpus if request.kind == "same" else ()
        notes = tuple(
            'render="same" renders on the CPU, because that is what computes; to render on a GPU, use '
            f'render="nvidia-smi:{gpu.index}"'
            for gpu in gpus[:1]
        )
        return _decide_cpu_rendering(renderer, machine, request, compute_decision, notes)
    if request.kind == "egl":
        if renderer.select_egl_device is None:
            raise DeviceUnavailableError(f'{request}: {renderer} does not render through EGL. Use render="same"')
        return _decide_egl_rendering(renderer, _find_egl_device(request, machine), machine, request, compute_decision)
    gpu = _find_rendering_gpu(request, machine, compute_decision, picker)
    _check_not_mig(gpu, request)
    if renderer.select_egl_device is None:
        return _decide_vulkan_rendering(renderer, gpu, machine, request, compute_decision)
    return _decide_egl_rendering(
        renderer, _find_egl_device_of_gpu(gpu, machine, request), machine, request, compute_decision
    )


def _decide_cpu_rendering(
    renderer: Renderer, machine: Machine, request: Request, compute_decision: Decision, notes: tuple[str, ...] = ()
) -> Decision:
    """Decide for rendering on the CPU: by EGL's software device (Mesa) if there is one, else by OSMesa."""
    if renderer.select_egl_device is None:
        raise DeviceUnavailableError(
            f"{request}: {renderer} renders on GPUs only, because Mesa's Vulkan for the CPU lacks required features. "
            'Use render="none", and observations without images'
        )
    inventory = machine.inventory_with_egl
    compute_decision = dataclasses.replace(compute_decision, warnings=compute_decision.warnings + notes)
    device = next((device for device in inventory.egl or () if device.software), None)
    if device is not None:
        try:
            return _decide_egl_rendering(renderer, device, machine, request, compute_decision)
        except DeviceUnavailableError:
            if not inventory.osmesa:
                raise
    if not inventory.osmesa:
        raise DeviceUnavailableError(
            f"{request} needs a renderer for the CPU, but neither Mesa's EGL nor OSMesa is installed"
            f"{f' ({inventory.egl_error})' if inventory.egl_error else ''}. Use `apt-get install libegl1 libegl-mesa0`"
        )
    return dataclasses.replace(
        compute_decision,
        render="cpu",
        renderer=str(renderer),
        variables=renderer.variables("osmesa", None),
        steps=(*compute_decision.steps, request.step("the CPU, OSMesa")),
    )


def _find_rendering_gpu(request: Request, machine: Machine, compute_decision: Decision, picker: Picker) -> Gpu:
    """Return the GPU that a ``render`` argument selects; raise if it is not available."""
    if request.kind == "same":
        if compute_decision.gpu is None:
            raise DeviceUnavailableError(f"{request}: {compute_decision.warnings[0]}. {_CPU_RENDERING_HINT}")
        return compute_decision.gpu
    if request.kind in ("uuid", "nvidia-smi", "pci"):
        # Renderers ignore the mask if they are given a device, so a GPU that is hidden from CUDA can render.
        return _find_gpu(request, machine.inventory)
    count = len(machine.visible.uuids)
    if not count:
        why = machine.inventory.nvml_error or "NVML lists no GPU on this machine"
        if machine.inventory.gpus:
            why = machine.no_device_reason()
        raise DeviceUnavailableError(f"{request} is not available: {why}. {_CPU_RENDERING_HINT}")
    if request.kind == "auto":
        return machine.gpu(_pick.pick(picker, machine)[0])
    ordinal = request.index or 0
    if ordinal >= count:
        raise DeviceUnavailableError(_index_error(request, ordinal, machine))
    return machine.gpu(ordinal)


def _find_egl_device(request: Request, machine: Machine) -> EglDevice:
    """Return the device for ``render="egl:<index>"``; raise if EGL does not list it."""
    devices = machine.inventory_with_egl.egl or ()
    for device in devices:
        if device.index == request.index:
            return device
    listed = f"EGL lists {len(devices)} device{'' if len(devices) == 1 else 's'}, counted from 0"
    seen = machine.inventory_with_egl.egl_error or listed
    raise DeviceUnavailableError(f'{request} is not available: {seen}. Use render="same"')


def _find_egl_device_of_gpu(gpu: Gpu, machine: Machine, request: Request) -> EglDevice:
    """Return the EGL device of a GPU; raise with the reason if EGL does not list it."""
    inventory = machine.inventory_with_egl
    device = inventory.egl_of(gpu.uuid)
    if device is not None:
        return device
    if is_wsl(machine):
        raise DeviceUnavailableError(f'{request}: {gpu.name} ({gpu.uuid}) {WSL_LIMIT}. Use render="cpu"')
    if inventory.egl_error:
        why = inventory.egl_error
    elif any(found.uuid for found in inventory.egl or ()):
        why = f"EGL lists other GPUs, but not {gpu.uuid}"
    else:
        why = (
            "EGL lists no GPU, because NVIDIA's EGL is not installed (10_nvidia.json in /usr/share/glvnd/egl_vendor.d; "
            "a container needs NVIDIA_DRIVER_CAPABILITIES=all)"
        )
    raise DeviceUnavailableError(f"{request}: {gpu.name} ({gpu.uuid}) cannot render: {why}. {_CPU_RENDERING_HINT}")


def is_wsl(machine: Machine) -> bool:
    """Return whether a machine is WSL, according to its inventory or the variables that WSL sets."""
    return machine.inventory.wsl or any(name in machine.environ for name in ("WSL_DISTRO_NAME", "WSL_INTEROP"))


def _check_not_mig(gpu: Gpu, request: Request) -> None:
    """Raise if a GPU is cut into MIG slices, which cannot render."""
    if gpu.mig:
        raise DeviceUnavailableError(
            f"{request}: {gpu.uuid} is cut into MIG slices ({gpu.mig[0]}), which do not render. {_CPU_RENDERING_HINT}"
        )


def _decide_egl_rendering(
    renderer: Renderer, device: EglDevice, machine: Machine, request: Request, compute_decision: Decision
) -> Decision:
    """Add an EGL device, and the variables that select it, to a decision."""
    try:
        index = _renderers.find_index_value(renderer, device, EglView.from_machine(machine), machine.environ)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f"{request}: {error}") from error
    gpu = machine.inventory.gpu(device.uuid) if device.uuid else None
    if gpu is not None:
        _check_not_mig(gpu, request)
    who = "the CPU" if device.software else gpu.uuid if gpu else "a device that NVML does not list"
    rule = Step(f"rule of {renderer}", renderer.index, index, f"EGL device {device.index}")
    return dataclasses.replace(
        compute_decision,
        render="cpu" if device.software else "gpu",
        render_gpu=gpu,
        egl=device,
        renderer=str(renderer),
        variables=renderer.variables("egl", index),
        steps=(*compute_decision.steps, request.step(f"EGL device {device.index}, {who}"), rule),
    )


def _decide_vulkan_rendering(
    renderer: Renderer, gpu: Gpu, machine: Machine, request: Request, compute_decision: Decision
) -> Decision:
    """Decide for rendering with Vulkan, which reads no variable: the GPU's name is passed as an argument."""
    name = _renderers.vulkan_device_name(gpu, machine.visible.uuids)
    rule = Step(f"rule of {renderer}", "device", name, gpu.uuid)
    return dataclasses.replace(
        compute_decision,
        render="gpu",
        render_gpu=gpu,
        renderer=str(renderer),
        render_device=name,
        steps=(*compute_decision.steps, request.step(gpu.uuid), rule),
    )
