"""Find mistakes in the environment variables that select devices, each with the line that fixes it.

Each renderer's rule predicts where it renders. The other checks cover mistakes from public bug reports. They concern
masks, ranks and device orders that do not mean what they seem to, and containers without GPUs or drivers.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from rl_ext_core.devices import apply, cuda, launchers, renderers
from rl_ext_core.devices.cuda import INDEX, MASK, ORDER, Machine
from rl_ext_core.devices.decide import WSL_LIMIT, Request, decide_compute, decide_render, is_wsl
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import Gpu, Inventory
from rl_ext_core.devices.launchers import LOCAL_RANK, RANK_VARIABLES
from rl_ext_core.devices.renderers import (
    BACKEND,
    PLATFORM,
    PYRENDER_INDEX,
    EglView,
    Renderer,
    RendererFailsError,
    robosuite_import_fails,
)
from rl_ext_core.errors import RlExtError

Severity: TypeAlias = Literal["error", "warning"]
Changes: TypeAlias = Mapping[str, "str | None"]

_KNOWN_VARIABLES = (MASK, ORDER, BACKEND, INDEX, PLATFORM, LOCAL_RANK)
# Variables that users export for MuJoCo, which ignores them, and the variables that it reads instead
# (google-deepmind/dm_control#310, #345, pytorch/rl#155). Other software reads some of them: pyrender and old releases
# of dm_control read EGL_DEVICE_ID, PyBullet EGL_VISIBLE_DEVICES.
_UNREAD_VARIABLES = {
    PYRENDER_INDEX: INDEX,
    "EGL_VISIBLE_DEVICE": INDEX,
    "EGL_VISIBLE_DEVICES": INDEX,
    "MUJOCO_GPU_ID": INDEX,
    "RENDER_GPU_DEVICE_ID": INDEX,
    "MUJOCO_RENDERER": BACKEND,
}
_READ_ELSEWHERE = ("EGL_VISIBLE_DEVICES", "RENDER_GPU_DEVICE_ID")
_CUDA_ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")
_WORDS_FOR_ALL_GPUS = ("all", "*", "any", "auto")  # "all" is Docker's word
_QUOTES = " \t\r\n'\"`[](){}<>"
_NO_CUDA = 'torch.device("cuda") ends in "RuntimeError: No CUDA GPUs are available"'
_NO_DISPLAY = "mujoco.FatalError: an OpenGL platform library has not been loaded into this process"
_CONTAINER, _CAPABILITIES = "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
_MESA = "apt-get install libegl1 libegl-mesa0"
_DOCKER = f"docker run --gpus all -e {_CAPABILITIES}=all ..."


@dataclass(frozen=True)
class Finding:
    """A mistake in the environment variables that select devices.

    :param variable: name of the variable, or ``"torch"`` or ``"EGL"`` if no variable causes the problem
    :param value: its value; None if it is not set
    :param effect: what it does, one sentence
    :param fix: the line to type, for the shell or for Python; two lines if Python must import first
    :param severity: ``"error"`` if something fails or uses another device, ``"warning"`` if it may be intended

    >>> from rl_ext_core.devices import check_environment
    >>> findings = check_environment({"CUDA_VISIBLE_DEVICES": "'0'"})
    >>> findings[0].variable
    'CUDA_VISIBLE_DEVICES'
    """

    variable: str
    value: str | None
    effect: str
    fix: str
    severity: Literal["error", "warning"] = "error"


@dataclass(frozen=True)
class Prediction:
    """Predicted rendering device of a renderer in a program that applies no decision.

    :param renderer: name and version of the renderer
    :param where: ``"gpu"``, ``"cpu"``, ``"window"`` (the display's device), ``"nothing"``, ``"fails"`` or ``"unknown"``
    :param why: which variables select the device, or how rendering fails
    :param variable: the variable that selects the device
    :param egl: index of the EGL device; None if EGL is not used
    :param uuid: UUID of the GPU, or None
    :param with_compute: whether it is the device that computes; None if that is unknown
    """

    renderer: str
    where: Literal["gpu", "cpu", "window", "nothing", "fails", "unknown"]
    why: str
    variable: str = BACKEND
    egl: int | None = None
    uuid: str | None = None
    with_compute: bool | None = None

    @property
    def name(self) -> str:
        """Name of the renderer without its version."""
        return self.renderer.split(" ")[0]


@dataclass(frozen=True)
class Situation:
    """A machine and its environment variables, before and after the fixes of the errors found so far.

    :param inventory: the machine
    :param environ: the variables after these fixes, so that consequences of one mistake are not reported as another
    :param original: the variables before the fixes
    """

    inventory: Inventory
    environ: Mapping[str, str]
    original: Mapping[str, str]

    @cached_property
    def machine(self) -> Machine:
        """The machine with the variables ``environ``."""
        return Machine(self.inventory, self.environ)

    @cached_property
    def visible(self) -> cuda.VisibleGpus | None:
        """GPUs that CUDA shows; None if CUDA's order is unknown."""
        try:
            return self.machine.visible
        except RlExtError:
            return None

    @cached_property
    def compute_decision(self) -> Decision | None:
        """Decision of ``resolve("auto")``; None if it would raise an error."""
        try:
            return decide_compute(Request(), self.machine)
        except RlExtError:
            return None

    def with_changes(self, changes: Changes) -> Situation:
        """Return a copy in which some variables are set (text) or unset (None)."""
        kept = {name: value for name, value in self.environ.items() if name not in changes}
        environ = kept | {name: value for name, value in changes.items() if value is not None}
        return Situation(self.inventory, environ, self.original)

    def finding(
        self, variable: str, effect: str, fix: Changes | str, severity: Severity = "error"
    ) -> tuple[Finding, Changes]:
        """Create a finding, and return it with the variables that its fix changes.

        :param fix: variables to set or unset, or a line that changes no variable of this shell
        """
        line = fix if isinstance(fix, str) else _to_shell_line(fix)
        found = Finding(variable, self.original.get(variable), effect, line, severity)
        return found, {} if isinstance(fix, str) else fix


Findings: TypeAlias = Iterator[tuple[Finding, Changes]]


def check_environment(
    environ: Mapping[str, str] | None = None, *, inventory: Inventory | None = None
) -> tuple[Finding, ...]:
    """Find mistakes in the environment variables that select compute and rendering devices.

    It sets and logs nothing, and starts neither CUDA nor a renderer. Without arguments, it also finds variables that
    were set in this process after a library had read them.

    :param environ: the variables; default: those of this process
    :param inventory: the machine; default: this machine
    :return: the findings, errors first

    >>> from rl_ext_core.devices import Inventory, check_environment
    >>> findings = check_environment({"LOCAL_RANK": "one"}, inventory=Inventory())
    >>> findings[0].fix
    'unset LOCAL_RANK'
    """
    variables = dict(os.environ if environ is None else environ)
    machine = Inventory.current() if inventory is None else inventory
    is_this_process = environ is None and inventory is None
    if is_this_process and "torchrl.envs.libs.dm_control" in sys.modules and "pyrender" not in machine.versions:
        variables.pop(PYRENDER_INDEX, None)  # TorchRL sets it when it is imported, but only pyrender reads it
    original = situation = Situation(machine, variables, variables)
    applied = apply.applied.variables if is_this_process and apply.applied else {}
    # A decision that was applied in this process has already set the renderers' variables.
    decision_in_force = bool(applied) and all(variables.get(name) == value for name, value in applied.items())
    findings: list[Finding] = []
    for stage in (
        _find_misspelled_names,
        _find_ignored_variables,
        _find_device_order_mistakes,
        _find_mask_mistakes,
        _find_rank_mistakes,
        _find_missing_cuda,
        *(() if decision_in_force else (_find_unlisted_gpu, _find_rendering_mistakes)),
    ):
        for finding, changes in list(stage(situation)):
            findings.append(finding)
            if finding.severity == "error":
                situation = situation.with_changes(changes)
    if is_this_process:
        findings += [finding for finding, _ in _find_late_changes(original, decision_in_force)]
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _to_shell_line(changes: Changes) -> str:
    """Return the shell commands that set and unset variables."""
    sets = [f"{name}={shlex.quote(value)}" for name, value in changes.items() if value is not None]
    unsets = [name for name, value in changes.items() if value is None]
    return "; ".join(
        [*(["export " + " ".join(sets)] if sets else []), *(["unset " + " ".join(unsets)] if unsets else [])]
    )


def describe_gpu(gpu: Gpu) -> str:
    """Return a GPU's name, UUID and nvidia-smi index, for a sentence."""
    return f"{gpu.name} {gpu.uuid} (nvidia-smi {gpu.index})"


# Names of variables


def guess_variable(name: str) -> str | None:
    """Return the variable that a misspelled name stands for; None if the name is right, or stands for none."""
    if name in _KNOWN_VARIABLES:
        return None
    if name in _UNREAD_VARIABLES:
        return _UNREAD_VARIABLES[name]
    # Programs that read .env files may leave blanks and a leading "export" in names.
    letters = "".join(re.sub(r"^\s*export\s+", "", name).split()).replace("-", "_").upper()
    if letters.startswith("CUDA_VIS"):  # CUDA_VISIBLE (open-mmlab/mmagic#1580), CUDA_VISIBLE_DEVICE, CUDA_VISIABLE_...
        return MASK
    return letters if letters in _KNOWN_VARIABLES else None


def _find_misspelled_names(situation: Situation) -> Findings:
    """Find misspelled names of variables, such as ``CUDA_VISIBLE_DEVICE``."""
    for name, value in situation.original.items():
        known = None if name in _UNREAD_VARIABLES else guess_variable(name)
        right = situation.original.get(known or "")
        text = _guess_value(known, value, situation)
        if known is None or right == text:
            continue
        drop: Changes = {name: None} if name.isidentifier() else {}  # shells cannot unset other names
        if right is not None:
            effect = f"{name!r} has no effect: the variable is {known}, and {known}={right!r} is used"
            yield situation.finding(name, effect, drop or {known: right}, "warning")
        elif drop and not _is_valid_value(known, text):
            effect = f"{name!r} has no effect: the variable is {known}, for which {text!r} is not valid"
            yield situation.finding(name, effect, drop, "warning")
        else:
            yield situation.finding(name, f"{name!r} has no effect: the variable is {known}", {known: text})


def _guess_value(known: str | None, value: str, situation: Situation) -> str:
    """Convert the value of a misspelled variable to a value for the variable ``known``."""
    text = value.strip(_QUOTES)
    if known == MASK:
        return _guess_mask(value, situation)[0] or text
    if known == BACKEND:
        return text.lower() if text.lower() in ("egl", "osmesa", "glfw") else "egl"
    return text


def _find_ignored_variables(situation: Situation) -> Findings:
    """Find variables that are set for MuJoCo, but that MuJoCo ignores."""
    environ, versions = situation.environ, situation.inventory.versions
    mujocos = [entry for entry in _installed_renderers(situation) if entry.name in renderers.MUJOCO_NAMES]
    through_egl = not renderers.has_display(environ) or any(_read_backend(entry, environ) == "egl" for entry in mujocos)
    for name, known in _UNREAD_VARIABLES.items():
        if name not in environ or not mujocos or not (through_egl or known == BACKEND):
            continue
        if name == PYRENDER_INDEX and "pyrender" in versions:
            continue
        text, right = _guess_value(known, environ[name], situation), environ.get(known)
        severity: Severity = "warning" if name in _READ_ELSEWHERE else "error"
        effect = f"MuJoCo, dm_control and robosuite ignore it and read {known} instead"
        if right is not None:
            if right != text and severity == "error":
                yield situation.finding(name, f"{effect}, which is {right!r}", {name: None}, "warning")
        elif _is_valid_value(known, text):
            yield situation.finding(name, effect, {known: text}, severity)
        else:
            yield situation.finding(name, f"{effect}, for which {text!r} is not valid", {name: None}, "warning")


def _is_valid_value(name: str, value: str) -> bool:
    """Return whether a value is valid for a variable on some machine."""
    if name == MASK:
        return value.lower() not in _WORDS_FOR_ALL_GPUS
    if name == ORDER:
        return value in _CUDA_ORDERS
    return name not in (INDEX, LOCAL_RANK) or launchers.is_rank(value)


# CUDA's device order, the mask and ranks


def _find_device_order_mistakes(situation: Situation) -> Findings:
    """Find a CUDA_DEVICE_ORDER that CUDA does not know, or that is missing for unequal GPUs."""
    value, inventory = situation.environ.get(ORDER), situation.inventory
    by_speed = inventory.fastest_first
    unlike = bool(inventory.gpus) and by_speed != tuple(gpu.uuid for gpu in inventory.gpus)
    first = f": number 0 is {describe_gpu(inventory.gpu(by_speed[0]))}" if unlike and by_speed else ""
    if value is not None and value.strip() and value not in _CUDA_ORDERS:
        fix = {ORDER: "FASTEST_FIRST" if "FAST" in value.upper() else "PCI_BUS_ID"}
        effect = f"CUDA does not know this value and counts the fastest GPU first{first}"
        yield situation.finding(ORDER, effect, fix, "error" if unlike else "warning")
    # A mask of UUIDs does not depend on the order.
    elif unlike and value != "PCI_BUS_ID" and not situation.environ.get(MASK, "").startswith(("GPU-", "MIG-")):
        if by_speed is None:
            effect = (
                "the GPUs differ, CUDA counts the fastest first, and the fastest is unknown, so resolve() cannot say "
                "which GPU is cuda:0"
            )
            yield situation.finding(ORDER, effect, {ORDER: "PCI_BUS_ID"})
        elif value is None:
            effect = f"the GPUs differ, and CUDA counts the fastest one first{first}"
            yield situation.finding(ORDER, effect, {ORDER: "PCI_BUS_ID"}, "warning")


def _find_mask_mistakes(situation: Situation) -> Findings:
    """Find entries of CUDA_VISIBLE_DEVICES that CUDA ignores or interprets unexpectedly."""
    shown, mask, gpus = situation.visible, situation.environ.get(MASK), situation.inventory.gpus
    mask = mask and cuda.strip_hidden_index(mask, situation.environ)
    if shown is None:
        return
    if not gpus:
        if shown.without_duplicates is not None:
            yield situation.finding(
                MASK, f"{shown.stop_reason}, on any machine", {MASK: shown.without_duplicates}, "warning"
            )
        return
    if mask is None:
        if shown.stop_reason:
            yield situation.finding(MASK, f"it is not set, and {shown.stop_reason}", {MASK: shown.mig}, "warning")
        return
    word = mask.split(",")[0].strip(_QUOTES).lower()
    first = ("0", *(slice_ for gpu in gpus for slice_ in gpu.mig), gpus[0].uuid)
    one = {MASK: shown.mig or next(text for text in first if _is_valid_mask(text, situation) or text is first[-1])}
    if not word or word == "nodevfiles":
        yield _empty_mask_finding(mask, word, one, situation)
    elif re.fullmatch(r"-\d+", word) or word in ("none", "void", "no", "off", "null", "nil", "false", "cpu"):
        effect = f"{word!r} hides {_format_all_gpus(len(gpus))}, so the CPU computes and {_NO_CUDA}"
        yield situation.finding(MASK, effect, {MASK: None}, "warning")
    elif word in _WORDS_FOR_ALL_GPUS:
        effect = f"CUDA does not know this word, which Docker uses for all GPUs, and shows no GPU: {_NO_CUDA}"
        yield situation.finding(MASK, effect, {MASK: None})
    else:
        explanation = shown.stop_reason or _describe_misread_entry(mask)
        if explanation is None:
            return
        if re.search(r"[][(){}'\"]", mask):
            explanation += " (quotes and brackets are part of the value)"
        meant, complete = _guess_mask(mask, situation)
        if shown.mig:
            meant, complete = shown.mig, "," not in mask or all(text.startswith("MIG-") for text in mask.split(","))
        harmless = complete and situation.with_changes({MASK: meant}).machine.visible.uuids == shown.uuids
        effect = f"{explanation}; torch sees {_describe_visible_gpus(shown, situation)}"
        yield situation.finding(MASK, effect, {MASK: meant} if meant else one, "warning" if harmless else "error")


def _empty_mask_finding(mask: str, word: str, one: Changes, situation: Situation) -> tuple[Finding, Changes]:
    """Create the finding for a CUDA_VISIBLE_DEVICES that names no GPU and hides all."""
    ray = any(name.startswith("RAY_") for name in situation.environ)
    slurm = any(name.startswith("SLURM_") for name in situation.environ)
    line = "srun --gpus-per-task=1 python train.py" if slurm else "@ray.remote(num_gpus=1)"
    if word:
        effect = f"a launcher (Ray, Slurm) sets it for a process that requested no GPU: {_NO_CUDA}"
    elif ray:
        effect = f"Ray hides all GPUs from an actor that requests none: {_NO_CUDA}"
    else:
        effect = (
            f"it is empty and hides {_format_all_gpus(len(situation.inventory.gpus))}: {_NO_CUDA}; a blank in "
            f'"export {MASK}= 1" leaves it empty, and "export {MASK} = 1" does not set it'
        )
        return situation.finding(MASK, effect, one)
    return situation.finding(MASK, effect, line)[0], one


def _format_all_gpus(count: int) -> str:
    """Return ``"the only GPU"`` or, for example, ``"all 4 GPUs"``."""
    return "the only GPU" if count == 1 else f"all {count} GPUs"


def _describe_misread_entry(mask: str) -> str | None:
    """Describe the first mask entry that CUDA reads as another value; None if there is none."""
    for entry in mask.split(","):
        text = entry.strip()
        if not text.startswith(("GPU-", "MIG-")) and not re.fullmatch(r"\d+", text, re.ASCII):
            return f"CUDA reads {entry!r} as {cuda.parse_leading_number(text)}"
        if entry != text:
            return f"CUDA skips the blank in {entry!r}, but other programs may not"
    return None


def _describe_visible_gpus(shown: cuda.VisibleGpus, situation: Situation) -> str:
    """Describe the GPUs that CUDA shows, as a part of a sentence."""
    gpus = [situation.inventory.gpu(uuid) for uuid in shown.uuids]
    if not gpus:
        return f"no GPU and {_NO_CUDA}"
    if len(gpus) == 1:
        return f"one GPU, {describe_gpu(gpus[0])}{f', its slice {shown.mig}' if shown.mig else ''}"
    return f"{len(gpus)} GPUs, nvidia-smi {', '.join(str(gpu.index) for gpu in gpus)}"


def _guess_mask(mask: str, situation: Situation) -> tuple[str | None, bool]:
    """Guess the mask that was meant, from numbers and UUIDs in any case, with blanks, quotes or other separators.

    :return: a valid mask, or None; and whether it has all entries of the original
    """
    inventory = situation.inventory
    try:
        order = cuda.cuda_order(inventory, situation.environ)
    except RlExtError:
        order = tuple(gpu.uuid for gpu in inventory.gpus)
    uuids = [*order, *(slice_ for gpu in inventory.gpus for slice_ in gpu.mig)]
    entries: list[str] = []
    by_name, complete = False, True
    for token in filter(None, (part.strip(_QUOTES).lower() for part in re.split(r"[,;|\s]+", mask))):
        if re.fullmatch(r"-\d+", token):  # CUDA documents that later entries are hidden
            break
        number = re.fullmatch(r"(?:cuda:|gpu:|\+)?(\d{1,6})", token, re.ASCII)
        if number:
            found = list(order[int(number[1]) :][:1])
        else:
            # Without the prefix, fewer than four characters are too few to be a UUID.
            named = re.fullmatch(r"(?:gpu|mig)-[0-9a-f-]+|[0-9a-f-]{4,}", token)
            found = [uuid for uuid in uuids if named and uuid.lower().startswith((token, f"gpu-{token}"))][:1]
            by_name |= bool(found)
        complete &= bool(found)
        entries += [uuid for uuid in found if uuid not in entries]
    text = ",".join(entries if by_name else (str(order.index(entry)) for entry in entries))
    return (text, complete) if _is_valid_mask(text, situation) else (None, False)


def _is_valid_mask(mask: str, situation: Situation) -> bool:
    """Return whether a mask shows GPUs, and all of its entries have an effect."""
    shown = situation.with_changes({MASK: mask}).visible
    return bool(shown and shown.uuids and shown.stop_reason is None)


def _find_rank_mistakes(situation: Situation) -> Findings:
    """Find a rank that is invalid, or beyond the visible GPUs."""
    environ, shown, name = situation.environ, situation.visible, launchers.find_rank_variable(situation.environ)
    if name is None:
        return
    value = environ[name]
    if not launchers.is_rank(value):
        text = value.strip(_QUOTES)
        effect = f'{value!r} is not a rank: int(os.environ["{name}"]) and resolve("auto") reject it'
        yield situation.finding(name, effect, {name: text if launchers.is_rank(text) else None})
    elif shown and shown.uuids and situation.compute_decision is None:
        yield _high_rank_finding(name, int(value), len(shown.uuids), situation)


def _high_rank_finding(name: str, rank: int, count: int, situation: Situation) -> tuple[Finding, Changes]:
    """Create the finding for a launcher's rank that is beyond the visible GPUs."""
    error = f'torch.cuda.set_device({rank}) ends in "CUDA error: invalid device ordinal"'
    effect = f"it asks for cuda:{rank}, but torch sees {cuda.format_gpu_count(count)}, counted from 0: {error}"
    return situation.finding(name, effect, launchers.launch_command(rank, situation.machine))[0], {name: "0"}


# Missing software and devices


def _find_missing_cuda(situation: Situation) -> Findings:
    """Find a torch that is built without CUDA."""
    inventory = situation.inventory
    if situation.machine.torch_without_cuda and situation.visible and situation.visible.uuids:
        version = inventory.versions["torch"]
        gpus = cuda.format_gpu_count(len(situation.visible.uuids))
        effect = (
            f"torch {version} is built without CUDA, so networks run on the CPU although the machine has {gpus}, "
            'and "cuda" ends in "AssertionError: Torch not compiled with CUDA enabled"'
        )
        line = f"pip install --force-reinstall torch=={version.partition('+')[0]}"
        yield Finding("torch", version, effect, line), {}


def _find_unlisted_gpu(situation: Situation) -> Findings:
    """Yield a finding if EGL does not list the GPU that computes."""
    inventory, environ = situation.inventory, situation.environ
    gpu = situation.compute_decision.gpu if situation.compute_decision else None
    if gpu and not gpu.mig and inventory.egl is not None and inventory.egl_of(gpu.uuid) is None:
        using = [renderer for renderer in _installed_renderers(situation) if _read_backend(renderer, environ) == "egl"]
        if any(renderer.select_egl_device for renderer in _installed_renderers(situation)):
            yield _unlisted_gpu_finding(gpu, situation, "error" if using else "warning")


def _unlisted_gpu_finding(gpu: Gpu, situation: Situation, severity: Severity) -> tuple[Finding, Changes]:
    """Create the finding for a GPU that EGL does not list, with the cause and the fix."""
    inventory, environ = situation.inventory, situation.environ
    where = "uses Mesa's CPU device" if any(device.software for device in inventory.egl or ()) else "fails"
    others = any(device.uuid for device in inventory.egl or ())
    effect = f"EGL does not list {describe_gpu(gpu)}, which computes, so rendering "
    effect += "uses another GPU" if others else where
    if inventory.egl_error:
        return situation.finding("EGL", f"{effect}: {inventory.egl_error}", "apt-get install libegl1", severity)
    if is_wsl(situation.machine):
        line = f'resolve("auto", render="cpu", renderer="{_installed_renderers(situation)[-1].name}").apply()'
        fix = f"from rl_ext_core.devices import resolve\n{line}"
        return situation.finding("EGL", f"{describe_gpu(gpu)} {WSL_LIMIT}", fix, "warning")
    if _CAPABILITIES in environ and not {"all", "graphics"} & set(re.split(r"[\s,]+", environ[_CAPABILITIES])):
        effect = f"the container has no graphics driver: {effect}"
        return situation.finding(_CAPABILITIES, effect, _DOCKER, severity)
    if others:
        return situation.finding("EGL", f"{effect} (the container has only part of /dev/dri)", _DOCKER, severity)
    effect += "; NVIDIA's EGL is not installed (/usr/share/glvnd/egl_vendor.d/10_nvidia.json)"
    if _CONTAINER in environ:
        return situation.finding(_CAPABILITIES, effect, _DOCKER, severity)
    line = "apt-get install nvidia-egl-icd  # Ubuntu: libnvidia-gl-<version of the driver>"
    return situation.finding("EGL", effect, line, severity)


# Predicted rendering devices, compared with the device that computes


def _installed_renderers(situation: Situation) -> tuple[Renderer, ...]:
    """Return the renderers that are installed on the machine of a situation."""
    return renderers.installed_renderers(situation.inventory.versions)


def _read_backend(renderer: Renderer, environ: Mapping[str, str]) -> str | None:
    """Return the backend of a renderer; None if it rejects the variable's value.

    Without the variable, mujoco and gymnasium select GLFW, even without a display: the Python package glfw, which
    mujoco requires, then only warns.
    """
    try:
        if renderer.name in renderers.MUJOCO_NAMES:
            renderers.mujoco_backend(environ)  # all of them import mujoco, which rejects unknown values
        return renderer.backend(environ)
    except RendererFailsError:
        return None


def predict(renderer: Renderer, situation: Situation) -> Prediction:
    """Predict where a renderer renders with the variables of a situation."""
    compute_decision, title = situation.compute_decision, str(renderer)
    computes = None
    if compute_decision is not None:
        computes = (
            "cpu" if compute_decision.device == "cpu" else compute_decision.gpu.uuid if compute_decision.gpu else None
        )
    try:
        found = _predict_place(renderer, situation)
    except RendererFailsError as refused:
        return Prediction(title, "fails", refused.text, refused.variable)
    place = "cpu" if found.where == "cpu" else found.uuid if found.where == "gpu" else None
    unknown = computes is None or (place is None and computes != "cpu") or found.where not in ("gpu", "cpu")
    return dataclasses.replace(found, with_compute=None if unknown else place == computes)


def _predict_place(renderer: Renderer, situation: Situation) -> Prediction:
    """Predict where a renderer renders; raise RendererFailsError if it fails."""
    inventory, environ, title = situation.inventory, situation.environ, str(renderer)
    if renderer.select_egl_device is None:
        return _predict_vulkan(renderer, situation)
    if renderer.name in renderers.MUJOCO_NAMES:
        renderers.mujoco_backend(environ)
    switch, backend = renderer.switches[0], renderer.backend(environ)
    how = f"{switch}={environ[switch]!r}" if switch in environ else f"{switch} is not set"
    if backend == "none":
        return Prediction(title, "nothing", f"{how} turns rendering off")
    if backend == "glfw":
        if not renderers.has_display(environ):
            error = f': "{_NO_DISPLAY}"' if switch == BACKEND else ""
            raise RendererFailsError(
                switch, f"{how}: it uses {_window_library(switch)}, but there is no display{error}"
            )
        unused = f"; {renderer.index} affects EGL alone" if renderer.index in environ else ""
        return Prediction(
            title, "window", f"{how}: it uses {_window_library(switch)}, and so the display's device{unused}"
        )
    platform = environ.get(PLATFORM, "")
    # mujoco accepts the value in capitals, but PyOpenGL does not.
    if platform not in ("", backend):
        error = f'"ImportError: Cannot use {"EGL" if backend == "egl" else "OSMesa"} rendering platform"'
        error += " or \"AttributeError: module 'mujoco' has no attribute 'Renderer'\""
        raise RendererFailsError(PLATFORM, f"it contradicts {switch}={backend}, and rendering ends in {error}")
    if renderer.name == "robosuite" and robosuite_import_fails(environ):
        error = f"AssertionError: {INDEX} needs to be set to one of the device id specified in {MASK}"
        raise RendererFailsError(
            INDEX, f'import robosuite ends in "{error}", because it is not part of {MASK}={environ[MASK]!r}'
        )
    if backend == "osmesa":
        if inventory.osmesa is False:
            raise RendererFailsError(switch, f"{how}, but OSMesa's library is not installed")
        return Prediction(title, "cpu", f"{how}: OSMesa", switch)
    if inventory.egl is None:
        return Prediction(title, "unknown", "EGL was not queried for this inventory")
    if not inventory.egl:
        raise RendererFailsError("EGL", inventory.egl_error or "EGL lists no device")
    device = inventory.egl[renderer.select_egl_device(environ, EglView.from_machine(situation.machine))]
    variable, why = _explain_egl_choice(renderer, environ, device.index)
    if device.software:
        return Prediction(title, "cpu", f"{why}, Mesa's on the CPU", variable, device.index)
    if device.uuid is None:
        return Prediction(title, "gpu", f"{why}; EGL does not report its GPU", variable, device.index)
    gpu = inventory.gpu(device.uuid)
    if gpu.mig:
        raise RendererFailsError(variable, f"{why}, {describe_gpu(gpu)}, is cut into MIG slices, which do not render")
    return Prediction(title, "gpu", f"{why}, {describe_gpu(gpu)}", variable, device.index, device.uuid)


def _window_library(switch: str) -> str:
    """Return the library that opens the window, for a sentence."""
    return "GLFW" if switch == BACKEND else "a window of pyglet"


def _predict_vulkan(renderer: Renderer, situation: Situation) -> Prediction:
    """Predict where SAPIEN renders if it gets no device argument."""
    visible = situation.visible.uuids if situation.visible else ()
    if not renderer.reads_mask:
        why = f"without a device argument, it uses the first GPU that Vulkan lists, and ignores {MASK}"
    elif len(visible) == 1:
        return Prediction(str(renderer), "gpu", "the only GPU that CUDA shows", MASK, None, visible[0])
    else:
        why = "without a device argument, it uses the first of CUDA's GPUs that Vulkan lists, which may not be cuda:0"
    return Prediction(str(renderer), "unknown", why, MASK)


def _explain_egl_choice(renderer: Renderer, environ: Mapping[str, str], index: int) -> tuple[str, str]:
    """Return the variable that selects EGL device ``index``, and a clause that explains it."""
    mask, value = environ.get(MASK), environ.get(renderer.index)
    through_cuda = renderer.select_egl_device is renderers.select_mujoco_4
    where = f"EGL device {index}"
    if renderer.name == "robosuite" and environ.get(BACKEND, "egl") != "egl":
        where += f" (robosuite uses EGL instead of {BACKEND}={environ[BACKEND]!r})"
    if value is not None:
        meaning = "which it reads as a CUDA ordinal first" if through_cuda else "EGL's own index"
        return renderer.index, f"{renderer.index}={value!r}, {meaning}, is {where}"
    if renderer.name == "robosuite" and mask is not None:
        return MASK, f"it reads the first entry of {MASK}={mask!r} as EGL's own index: {where}"
    if through_cuda:
        shows = "CUDA" if mask is None else f"{MASK}={mask!r}"
        return renderer.index, f"the first device that {shows} shows and that EGL reports is {where}"
    return (
        renderer.index,
        f"{renderer.index} is not set, so it uses the first device{' and ignores the mask' if mask else ''}: {where}",
    )


def _find_rendering_mistakes(situation: Situation) -> Findings:
    """Find renderers that fail or do not render on the device that computes. Equal findings are merged."""
    grouped: dict[tuple[Prediction, str, Severity], list[Renderer]] = {}
    compute_decision = situation.compute_decision
    gpu = compute_decision.gpu if compute_decision else None
    for renderer in _installed_renderers(situation):
        found = predict(renderer, situation)
        if (
            renderer.select_egl_device is None
            and found.where == "unknown"
            and gpu
            and len(situation.inventory.gpus) > 1
        ):
            line = f'resolve("auto", render="same", renderer="{renderer.name}").render_device'
            fix = f"from rl_ext_core.devices import resolve\nrender_device = {line}"
            yield situation.finding(found.variable, f"{renderer}: {found.why}", fix, "warning")
        # A set index shows that the user wants EGL.
        index_unused = found.where == "window" and renderer.index in situation.environ
        if found.where != "fails" and found.with_compute is not False and not index_unused:
            continue
        listed = gpu is None or gpu.mig or situation.inventory.egl_of(gpu.uuid)
        if (found.where != "fails" and not listed) or (found.variable == "EGL" and gpu and not gpu.mig):
            continue  # _find_unlisted_gpu() has reported that EGL does not list the GPU
        elsewhere = found.egl is not None and not (compute_decision and compute_decision.device == "cpu")
        if found.where != "fails" and not elsewhere and not index_unused:
            continue  # the user chose OSMesa, and a GPU may render while the CPU computes
        if gpu and gpu.mig and found.where == "cpu":
            continue  # a MIG slice cannot render
        unset = found.variable not in situation.environ and found.variable in renderer.switches
        # Without any variable, the program may not render at all. An index of the CPU's device may be intended.
        harmless = unset or index_unused or (found.where == "cpu" and renderer.index in situation.environ)
        severity: Severity = "warning" if harmless else "error"
        key = (dataclasses.replace(found, renderer=""), _find_rendering_fix(renderer, situation), severity)
        grouped.setdefault(key, []).append(renderer)
    prefix = "" if situation.environ == situation.original else "once the other lines are typed, "
    for (found, fix, severity), affected in grouped.items():
        effect = f"{', '.join(map(str, affected))}: {prefix}{found.why}"
        if found.where != "fails" and compute_decision:
            effect += f", while {compute_decision.device}{f', {describe_gpu(gpu)},' if gpu else ''} computes"
        # robosuite comes last, and a decision for it also suits the other renderers.
        yield situation.finding(found.variable, effect, fix.format(affected[-1].name), severity)


def _find_rendering_fix(renderer: Renderer, situation: Situation) -> str:
    """Find the line that makes a renderer use the device that computes, or the CPU if that device cannot render.

    :return: a line for the shell, or Python code with ``{}`` for the renderer's name
    """
    environ = situation.environ
    meant = {name: "osmesa" for name in (BACKEND, PLATFORM) if environ.get(name, "").strip().lower() == "osmesa"}
    if meant and predict(renderer, situation.with_changes(meant)).where == "cpu":
        return _to_shell_line(meant)  # the value was in capitals, which some renderers reject
    for render in ("same", "cpu"):
        line = f'resolve("auto", render="{render}", renderer="{{}}").apply()'
        python = f"from rl_ext_core.devices import resolve\n{line}"
        if situation.compute_decision is None:
            return python  # its error will show why there is no decision
        try:
            request = Request(render=render, renderer=renderer.name)
            decision = decide_render(request, situation.machine, situation.compute_decision)
        except RlExtError:
            continue
        changes = {name: value for name, value in decision.variables.items() if environ.get(name) != value}
        count = len(situation.visible.uuids) if situation.visible else 0
        by_process = count > 1 and any(name in environ for name in RANK_VARIABLES)
        return python if by_process or render == "cpu" or not changes else _to_shell_line(changes)
    return _MESA


# Variables that were set too late in this process


def _find_late_changes(situation: Situation, decision_in_force: bool) -> Findings:
    """Find variables that were changed in this process after a library had read them."""
    environ = situation.environ
    late_mask = None if situation.visible is None else cuda.find_late_mask(situation.machine)
    if late_mask is not None:
        yield situation.finding(MASK, late_mask, {MASK: environ.get(MASK)})
    for renderer in () if decision_in_force else _installed_renderers(situation):
        backend = _read_backend(renderer, environ)
        if backend not in ("egl", "osmesa") or not any(name in environ for name in renderer.switches):
            continue
        found = predict(renderer, situation)
        late = [*apply.import_conflicts(renderer.name, backend, "the variables ask for")]
        if found.variable in environ and found.variable not in renderer.switches and found.egl is not None:
            late += apply.display_conflicts(renderer.name, found.egl, "the variables ask for")
        for variable, sentence in late:
            yield situation.finding(variable, sentence, {variable: environ.get(variable)})
    yield from _find_ignored_device_ids(situation)


def _find_ignored_device_ids(situation: Situation) -> Findings:
    """Find robosuite's environments in this process whose ``render_gpu_device_id`` has no effect."""
    environments = sys.modules.get("robosuite.environments.base")
    name = INDEX if INDEX in situation.environ else MASK
    index = situation.environ.get(name, "")
    if environments is None or not index.isdigit():
        return
    found = (entry for entry in gc.get_objects() if issubclass(type(entry), environments.MujocoEnv))
    asked = {vars(environment).get("render_gpu_device_id", -1) for environment in found}
    for number in sorted(asked - {-1, int(index)}):
        effect = f"robosuite ignores render_gpu_device_id={number}, because this variable is set"
        line = f'resolve("auto", render="egl:{number}", renderer="robosuite").apply()'
        yield situation.finding(name, effect, f"from rl_ext_core.devices import resolve\n{line}", "warning")
