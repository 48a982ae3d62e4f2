"""Find mistakes in the environment variables that select devices, each with the line that fixes it.

Each renderer's rule predicts where it renders. The other checks cover mistakes from public bug reports. They concern
masks, ranks and device orders that do not mean what they seem to, and containers without GPUs or drivers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from rl_ext_core.devices import cuda, launchers, renderers
from rl_ext_core.devices.cuda import INDEX, MASK, ORDER, Machine
from rl_ext_core.devices.decide import Request, decide_compute, decide_render
from rl_ext_core.devices.decision import Decision, find_display_conflict, find_import_conflict, is_in_force
from rl_ext_core.devices.inventory import Inventory
from rl_ext_core.devices.launchers import LOCAL_RANK
from rl_ext_core.devices.renderers import BACKEND, PLATFORM, Renderer, RendererFailsError
from rl_ext_core.errors import RlExtError

Severity: TypeAlias = Literal["error", "warning"]
Changes: TypeAlias = Mapping[str, "str | None"]

_KNOWN_VARIABLES = (MASK, ORDER, BACKEND, INDEX, PLATFORM, LOCAL_RANK)
_QUOTES = " \t\r\n'\"`[](){}<>"
_NO_CUDA = 'torch.device("cuda") ends in "RuntimeError: No CUDA GPUs are available"'
_NO_DISPLAY = "mujoco.FatalError: an OpenGL platform library has not been loaded into this process"
_IGNORED_INDEX = "EGL_DEVICE_ID"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_DOCKER = f"docker run --gpus all -e {_CAPABILITIES}=all ..."


@dataclass(frozen=True)
class Finding:
    """A mistake in the environment variables that select devices.

    :param variable: name of the variable, or ``"EGL"`` if no variable causes the problem
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
    severity: Severity = "error"


@dataclass(frozen=True)
class Prediction:
    """Predicted rendering device of a renderer in a program that applies no decision.

    :param where: ``"window"`` means the display's device
    :param with_compute: whether it is the device that computes; None if that is unknown
    """

    renderer: str
    where: Literal["gpu", "cpu", "window", "nothing", "fails", "unknown"]
    why: str
    variable: str = BACKEND
    egl: int | None = None
    uuid: str | None = None
    with_compute: bool | None = None


@dataclass(frozen=True)
class Situation(Machine):
    """A machine and its environment variables, before (``original``) and after the fixes of the errors found so far."""

    original: Mapping[str, str]

    @cached_property
    def renderers(self) -> tuple[Renderer, ...]:
        """Installed renderers."""
        return renderers.installed_renderers(self.inventory.versions)

    @cached_property
    def compute_decision(self) -> Decision | None:
        """Decision of ``resolve("auto")``; None if it would raise an error."""
        try:
            return decide_compute(Request(), self)
        except RlExtError:
            return None

    def with_changes(self, changes: Changes) -> Situation:
        """Return a copy in which some variables are set (text) or unset (None)."""
        environ = {name: value for name, value in {**self.environ, **changes}.items() if value is not None}
        return Situation(self.inventory, environ, self.original)

    def finding(
        self, variable: str, effect: str, fix: Changes | str, severity: Severity = "error"
    ) -> tuple[Finding, Changes]:
        """Create a finding, and return it with the variables that its fix changes, which are none for a command."""
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
    if is_this_process and "torchrl.envs.libs.dm_control" in sys.modules:
        variables.pop(_IGNORED_INDEX, None)  # TorchRL sets it when it is imported
    original = situation = Situation(machine, variables, variables)
    # A decision that was applied in this process has already set the renderers' variables.
    decision_in_force = is_this_process and is_in_force(variables)
    findings: list[Finding] = []
    for stage in (
        _find_misspelled_names,
        _find_ignored_index,
        _find_device_order_mistakes,
        _find_mask_mistakes,
        _find_rank_mistakes,
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
    sets = [f"{name}={shlex.quote(value)}" for name, value in changes.items() if value is not None]
    unsets = [name for name, value in changes.items() if value is None]
    return "; ".join(" ".join([verb, *words]) for verb, words in (("export", sets), ("unset", unsets)) if words)


# Names of variables


def _find_misspelled_names(situation: Situation) -> Findings:
    """Find names in lower case or with blanks, as in .env files, or without the last S (haosulab/SAPIEN#101)."""
    for name, value in situation.original.items():
        known = name.strip().upper()
        known = known if known in _KNOWN_VARIABLES else f"{known}S"
        if name != known and known in _KNOWN_VARIABLES and known not in situation.original:
            effect = f"{name!r} has no effect: the variable is {known}"
            yield situation.finding(name, effect, {known: value.strip(_QUOTES)})


def _find_ignored_index(situation: Situation) -> Findings:
    """Find EGL_DEVICE_ID, which these renderers do not read (google-deepmind/dm_control#310, #345, pytorch/rl#155)."""
    environ, index = situation.environ, situation.environ.get(_IGNORED_INDEX, "")
    through_egl = any(_read_backend(row, environ) == "egl" for row in situation.renderers)
    if through_egl and INDEX not in environ and launchers.parse_rank(index) is not None:
        effect = f"MuJoCo, dm_control and robosuite ignore it and read {INDEX} instead"
        yield situation.finding(_IGNORED_INDEX, effect, {INDEX: index})


# CUDA's device order, the mask and ranks


def _find_device_order_mistakes(situation: Situation) -> Findings:
    """Find unequal GPUs without a CUDA_DEVICE_ORDER that CUDA knows (gpustack/gpustack#6041, NVIDIA/DIGITS#1358)."""
    value, inventory = situation.environ.get(ORDER), situation.inventory
    by_speed = inventory.fastest_first
    alike = by_speed == tuple(gpu.uuid for gpu in inventory.gpus)
    # A mask of UUIDs does not depend on the order.
    by_uuid = situation.environ.get(MASK, "").startswith(("GPU-", "MIG-"))
    if alike or by_uuid or value == "PCI_BUS_ID" or (by_speed and value == "FASTEST_FIRST"):
        return
    first = f": number 0 is {inventory.gpu(by_speed[0])}" if by_speed else ", which is unknown"
    effect = f"the GPUs differ, and CUDA counts the fastest one first{first}"
    severity: Severity = "warning" if by_speed and value is None else "error"
    yield situation.finding(ORDER, effect, {ORDER: "PCI_BUS_ID"}, severity)


def _find_mask_mistakes(situation: Situation) -> Findings:
    """Find entries of CUDA_VISIBLE_DEVICES that CUDA ignores or interprets unexpectedly."""
    shown, mask, gpus = situation.shown, situation.environ.get(MASK), situation.inventory.gpus
    if shown is None or not gpus:
        return
    if shown.mig is not None or mask is None:
        if shown.stop_reason:
            yield situation.finding(MASK, shown.stop_reason, {MASK: shown.mig}, "warning")
        return
    mask = cuda.strip_hidden_index(mask, situation.environ)
    one = {MASK: "0" if _is_valid_mask("0", situation) else gpus[0].uuid}
    word = mask.split(",")[0].strip(_QUOTES)
    hidden = f"hides {'the only GPU' if len(gpus) == 1 else f'all {len(gpus)} GPUs'}: {_NO_CUDA}"
    if not word:
        effect = f'it is empty and {hidden}; blanks around = in "export {MASK}= 1" leave it empty'
        yield situation.finding(MASK, effect, one)
    elif re.fullmatch(r"-\d+|[A-Za-z*]+", word):
        severity: Severity = "error" if word.lower() == "all" else "warning"
        yield situation.finding(MASK, f"{word!r} {hidden}", {MASK: None}, severity)
    elif explanation := shown.stop_reason or _describe_misread_entry(mask):
        clean = ",".join(filter(None, (entry.strip(_QUOTES) for entry in mask.split(","))))
        is_clean = _is_valid_mask(clean, situation)
        harmless = is_clean and situation.with_changes({MASK: clean}).visible.uuids == shown.uuids
        by_number = shown.uuids and not mask.startswith("GPU-")
        order = cuda.cuda_order(situation.inventory, situation.environ) if by_number else ()
        in_effect = ",".join(str(order.index(uuid)) if order else uuid for uuid in shown.uuids)
        numbers = ", ".join(str(situation.inventory.gpu(uuid).index) for uuid in shown.uuids)
        seen = f"torch sees nvidia-smi {numbers}" if numbers else f"torch sees no GPU, and {_NO_CUDA}"
        fix = {MASK: clean} if is_clean else {MASK: in_effect} if numbers else one
        yield situation.finding(MASK, f"{explanation}; {seen}", fix, "warning" if harmless else "error")


def _describe_misread_entry(mask: str) -> str | None:
    """Describe the first mask entry that CUDA reads as another value; None if there is none."""
    for entry in mask.split(","):
        text = entry.strip()
        if not text.startswith("GPU-") and not re.fullmatch(r"\d+", text, re.ASCII):
            return f"CUDA reads {entry!r} as {cuda.parse_leading_number(text)}"
        if entry != text:
            return f"CUDA skips the blank in {entry!r}, but other programs may not"
    return None


def _is_valid_mask(mask: str, situation: Situation) -> bool:
    """Return whether a mask shows GPUs, and CUDA reads all of its entries as they are written."""
    shown = situation.with_changes({MASK: mask}).shown
    is_read = shown is not None and shown.stop_reason is None and _describe_misread_entry(mask) is None
    return is_read and bool(shown and shown.uuids)


def _find_rank_mistakes(situation: Situation) -> Findings:
    """Find a rank that is invalid, or beyond the visible GPUs (pytorch/torchtitan#423)."""
    environ, shown, name = situation.environ, situation.shown, launchers.find_rank_variable(situation.environ)
    if name is None:
        return
    rank = launchers.parse_rank(environ[name])
    if rank is None:
        effect = f'{environ[name]!r} is not a rank: int(os.environ["{name}"]) and resolve("auto") reject it'
        text = environ[name].strip(_QUOTES)
        yield situation.finding(name, effect, {name: None if launchers.parse_rank(text) is None else text})
    elif shown and shown.uuids and situation.compute_decision is None:
        seen = f"torch sees {cuda.format_gpu_count(len(shown.uuids))}, counted from 0"
        effect = f'it asks for cuda:{rank}, but {seen}: "CUDA error: invalid device ordinal"'
        line = launchers.launch_command(rank, situation)
        yield situation.finding(name, effect, line)[0], {name: "0"}


# EGL without the GPU that computes


def _find_unlisted_gpu(situation: Situation) -> Findings:
    """Find that EGL does not list the GPU that computes (TensorAuto/OpenTau#404), with the cause."""
    inventory, environ = situation.inventory, situation.environ
    gpu = situation.compute_decision.gpu if situation.compute_decision else None
    rows = [renderer for renderer in situation.renderers if renderer.select_egl_device]
    if not rows or not gpu or gpu.mig or inventory.egl is None or inventory.egl_of(gpu.uuid):
        return
    severity: Severity = "error" if any(_read_backend(row, environ) == "egl" for row in rows) else "warning"
    others = any(device.uuid for device in inventory.egl)
    in_container = bool({_CAPABILITIES, "NVIDIA_VISIBLE_DEVICES"} & environ.keys())
    why, variable, fix = " (the container has only part of /dev/dri)", "EGL", _DOCKER
    if inventory.egl_error:
        why, fix = f": {inventory.egl_error}", "apt-get install libegl1"
    elif not others:
        why = "; NVIDIA's EGL is not installed (10_nvidia.json in /usr/share/glvnd/egl_vendor.d; WSL has none)"
        variable = _CAPABILITIES if in_container else "EGL"
        fix = _DOCKER if in_container else "apt-get install nvidia-egl-icd  # Ubuntu: libnvidia-gl-<version>"
    where = "another GPU" if others else "Mesa's CPU device, if any"
    effect = f"EGL does not list {gpu}, which computes, so rendering uses {where}{why}"
    yield situation.finding(variable, effect, fix, severity)


# Predicted rendering devices, compared with the device that computes


def _read_backend(renderer: Renderer, environ: Mapping[str, str]) -> str | None:
    """Return the backend of a renderer; None if it rejects the variable's value."""
    try:
        return renderer.backend(environ)
    except RendererFailsError:
        return None


def predict(renderer: Renderer, situation: Situation) -> Prediction:
    """Predict where a renderer renders with the variables of a situation."""
    decision = situation.compute_decision
    try:
        found = _predict_place(renderer, situation)
    except RendererFailsError as refused:
        return Prediction(str(renderer), "fails", refused.text, refused.variable)
    if decision is None or decision.mig or found.where not in ("gpu", "cpu"):  # MIG slices cannot render
        return found
    if decision.device != "cpu" and (decision.gpu is None or (found.where == "gpu" and found.uuid is None)):
        return found
    with_compute = found.uuid == decision.gpu.uuid if decision.gpu else found.where == "cpu"
    return dataclasses.replace(found, with_compute=with_compute)


def _predict_place(renderer: Renderer, situation: Situation) -> Prediction:
    """Predict where a renderer renders; raise RendererFailsError if it fails."""
    inventory, environ, title = situation.inventory, situation.environ, str(renderer)
    if renderer.select_egl_device is None:
        return Prediction(title, "unknown", "without a device argument, it uses the first GPU that Vulkan lists", MASK)
    backend = renderer.backend(environ)
    how = f"{BACKEND}={environ[BACKEND]!r}" if BACKEND in environ else f"{BACKEND} is not set"
    if backend == "none":
        return Prediction(title, "nothing", f"{how} turns rendering off")
    if backend == "glfw":
        how += f": it opens a window{f', and {INDEX} affects EGL alone' if INDEX in environ else ''}"
        if renderers.has_display(environ):
            return Prediction(title, "window", how)
        raise RendererFailsError(BACKEND, f'{how}, but there is no display: "{_NO_DISPLAY}"')
    # mujoco accepts the value in capitals, but PyOpenGL does not.
    if environ.get(PLATFORM, "") not in ("", backend):
        error = f'"ImportError: Cannot use {"EGL" if backend == "egl" else "OSMesa"} rendering platform"'
        error += " or \"AttributeError: module 'mujoco' has no attribute 'Renderer'\""
        raise RendererFailsError(PLATFORM, f"it contradicts {BACKEND}={backend}, and rendering ends in {error}")
    mask, index = environ.get(MASK), environ.get(INDEX)
    # `import robosuite` asserts that the index is a substring of the mask.
    if renderer.checks_mask and mask and index is not None and not (index.isdigit() and index in mask):
        error = f"AssertionError: {INDEX} needs to be set to one of the device id specified in {MASK}"
        raise RendererFailsError(
            INDEX, f'import robosuite ends in "{error}", because it is not part of {MASK}={mask!r}'
        )
    if backend == "osmesa":
        if inventory.osmesa is False:
            raise RendererFailsError(BACKEND, f"{how}, but OSMesa's library is not installed")
        return Prediction(title, "cpu", f"{how}: OSMesa")
    if inventory.egl is None:
        return Prediction(title, "unknown", "EGL was not queried for this inventory")
    if not inventory.egl:
        raise RendererFailsError("EGL", inventory.egl_error or "EGL lists no device")
    device = inventory.egl[renderer.select_egl_device(situation)]
    # robosuite reads the mask's first entry as EGL's own index.
    variable = MASK if renderer.checks_mask and INDEX not in environ and MASK in environ else INDEX
    chosen = f"={environ[variable]!r} selects" if variable in environ else " is not set, so it uses"
    why = f"{variable}{chosen} EGL device {device.index}"
    if device.software:
        return Prediction(title, "cpu", f"{why}, Mesa's on the CPU", variable, device.index)
    if device.uuid is None:
        return Prediction(title, "gpu", f"{why}; EGL does not report its GPU", variable, device.index)
    gpu = inventory.gpu(device.uuid)
    if gpu.mig:
        raise RendererFailsError(variable, f"{why}, {gpu}, is cut into MIG slices, which do not render")
    return Prediction(title, "gpu", f"{why}, {gpu}", variable, device.index, device.uuid)


def _find_rendering_mistakes(situation: Situation) -> Findings:
    """Find renderers that fail or do not render on the device that computes. Equal findings are merged."""
    grouped: dict[tuple[Prediction, str, Severity], list[Renderer]] = {}
    decision = situation.compute_decision
    gpu = decision.gpu if decision and not decision.mig else None
    unlisted = gpu is not None and situation.inventory.egl_of(gpu.uuid) is None
    for renderer in situation.renderers:
        found = predict(renderer, situation)
        # A set index shows that the user wants EGL.
        index_unused = found.where == "window" and INDEX in situation.environ
        # With OSMesa, the CPU was chosen on purpose. A GPU may also render while the CPU computes.
        elsewhere = found.with_compute is False and found.egl is not None and gpu is not None
        if found.where == "fails":
            if found.variable == "EGL" and gpu:
                continue  # _find_unlisted_gpu() has reported it
        elif not (elsewhere or index_unused) or unlisted:
            continue
        unset = found.variable not in situation.environ and found.variable in (BACKEND, PLATFORM)
        # Without any variable, the program may not render at all. An index of the CPU's device may be intended.
        harmless = unset or index_unused or (found.where == "cpu" and INDEX in situation.environ)
        severity: Severity = "warning" if harmless else "error"
        key = (dataclasses.replace(found, renderer=""), _find_rendering_fix(renderer, situation), severity)
        grouped.setdefault(key, []).append(renderer)
    prefix = "" if situation.environ == situation.original else "once the other lines are typed, "
    for (found, fix, severity), affected in grouped.items():
        effect = f"{', '.join(map(str, affected))}: {prefix}{found.why}"
        if found.where != "fails" and decision and gpu:
            effect += f", while {decision.device}, {gpu}, computes"
        # robosuite comes last, and a decision for it also suits the other renderers.
        fix = fix.replace('renderer="{}"', f'renderer="{affected[-1].name}"')  # values may contain braces, too
        yield situation.finding(found.variable, effect, fix, severity)


def _find_rendering_fix(renderer: Renderer, situation: Situation) -> str:
    """Find the line for the shell, or Python code with ``{}`` for a renderer, that renders where it computes."""
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
            decision = decide_render(request, situation, situation.compute_decision)
        except RlExtError:
            continue
        changes = {name: value for name, value in decision.variables.items() if environ.get(name) != value}
        count = len(situation.shown.uuids) if situation.shown else 0
        by_process = count > 1 and launchers.find_rank_variable(environ) is not None
        return python if by_process or render == "cpu" or not changes else _to_shell_line(changes)
    return "apt-get install libegl1 libegl-mesa0"


# Variables that were set too late in this process


def _find_late_changes(situation: Situation, decision_in_force: bool) -> Findings:
    """Find variables that were changed in this process after a library had read them."""
    environ = situation.environ
    late_mask = cuda.find_late_mask(situation)
    if late_mask is not None:
        yield situation.finding(MASK, late_mask, {MASK: environ.get(MASK)})
    for renderer in () if decision_in_force else situation.renderers:
        backend = _read_backend(renderer, environ)
        if backend not in ("egl", "osmesa") or not {BACKEND, PLATFORM} & environ.keys():
            continue
        found = predict(renderer, situation)
        late = [find_import_conflict(renderer.name, backend, "the variables ask for")]
        if found.variable in environ and found.variable not in (BACKEND, PLATFORM) and found.egl is not None:
            late.append(find_display_conflict(renderer.name, found.egl, "the variables ask for"))
        for variable, sentence in filter(None, late):
            yield situation.finding(variable, sentence, {variable: environ.get(variable)})
