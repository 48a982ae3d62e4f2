"""What the doctor says: every section of a report as rows and sentences, whatever shows them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import rl_ext_core
from rl_ext_core.devices import _versions
from rl_ext_core.devices._renderers import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices.checks import Finding
    from rl_ext_core.devices.doctor._predict import Prediction
    from rl_ext_core.devices.doctor._report import Question, Report
    from rl_ext_core.devices.doctor._verified import Verified
    from rl_ext_core.devices.inventory import EglDevice, Gpu

GPU_COLUMNS = ("nvidia-smi", "name", "PCI", "UUID", "torch", "EGL", "DRM", "free / total")
RENDERER_COLUMNS = ("renderer", "renders on", "computes there", "because")
VERIFIED_COLUMNS = ("renderer", "GL_RENDERER", "GL_VENDOR", "EGL", "result")
# What findings name where no variable is to blame.
_NO_VARIABLES = ("EGL", "torch", *NAMES)
_SHORTEST_UUID = len("GPU-01234567")


def versions(report: Report) -> str:
    """List the versions that matter."""
    installed = report.inventory.versions
    found = {name: installed[name] for name in _versions.PACKAGES if name in installed}
    cuda = installed.get("torch.cuda", "")
    if "torch" in found:
        found["torch"] += f" ({cuda if cuda.startswith('rocm') else f'CUDA {cuda}' if cuda else 'without CUDA'})"
    return "  ".join(f"{name} {version}" for name, version in {"rl-ext": rl_ext_core.__version__, **found}.items())


def short_uuids(uuids: tuple[str, ...]) -> dict[str, str]:
    """Shorten UUIDs to as many characters as it takes to tell them apart: such a beginning names a GPU."""
    length = _SHORTEST_UUID
    while len({uuid[:length] for uuid in uuids}) < len(set(uuids)):
        length += 1
    return {uuid: uuid[:length] for uuid in uuids}


def gpu_rows(report: Report) -> list[tuple[str, ...]]:
    """Give a row for every GPU."""
    short = short_uuids(tuple(gpu.uuid for gpu in report.inventory.gpus))
    rows: list[tuple[str, ...]] = []
    for gpu, names in zip(report.inventory.gpus, report.gpus, strict=True):
        device = report.inventory.egl_of(gpu.uuid)
        egl = "not asked" if report.inventory.egl is None else "none" if names.egl is None else str(names.egl)
        drm = device.drm.rpartition("/")[2] if device and device.drm else "-"
        memory = f"{_gib(gpu.memory_free)} / {_gib(gpu.memory_total)} GiB"
        rows.append((str(gpu.index), gpu.name, gpu.pci, short[gpu.uuid], names.torch, egl, drm, memory))
    return rows


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def other_devices(report: Report) -> Iterator[str]:
    """Name the slices, EGL's devices that are none of these GPUs, and what did not answer."""
    inventory = report.inventory
    if not inventory.gpus:
        yield f"no GPU: {inventory.nvml_error or 'NVML lists none'}"
    for gpu in inventory.gpus:
        if gpu.mig:
            yield f"nvidia-smi {gpu.index} is cut into MIG slices: {', '.join(gpu.mig)}"
    for device in inventory.egl or ():
        if device.uuid is None:
            yield f"EGL {device.index}: {_other(device)}"
    if inventory.egl_error:
        yield f"EGL: {inventory.egl_error}"
    if inventory.osmesa is not None:
        yield f"OSMesa: {'installed' if inventory.osmesa else 'not installed'}"


def _other(device: EglDevice) -> str:
    drm = f", {device.drm}" if device.drm else ""
    return f"{'software on the CPU (Mesa)' if device.software else 'a device that NVML does not know'}{drm}"


def compute(report: Report) -> Iterator[str]:
    """Say what computes and why."""
    computes = report.compute
    if computes.device is None:
        yield f"refused: {computes.reason}"
        return
    gpu = _gpu(computes.uuid, report)
    slice_ = f", MIG slice {computes.mig}" if computes.mig else ""
    yield f"{computes.device}{f' = {_named(gpu, report)}' if gpu else ''}{slice_} ({computes.reason})"
    yield from (f"warning: {warning}" for warning in computes.warnings)


def _gpu(uuid: str | None, report: Report) -> Gpu | None:
    return next((gpu for gpu in report.inventory.gpus if gpu.uuid == uuid), None)


def _named(gpu: Gpu, report: Report) -> str:
    short = short_uuids(tuple(entry.uuid for entry in report.inventory.gpus))
    return f"nvidia-smi {gpu.index}, {short[gpu.uuid]}"


def renderer_rows(report: Report) -> list[tuple[str, ...]]:
    """Give a row for every renderer."""
    answers = {True: "yes", False: "NO", None: "-"}
    return [
        (found.renderer, _place(found, report), answers[found.with_compute], found.why) for found in report.renderers
    ]


def _place(found: Prediction, report: Report) -> str:
    gpu = _gpu(found.uuid, report)
    egl = "" if found.egl is None else f" (EGL {found.egl})"
    places = {
        "gpu": f"nvidia-smi {gpu.index}{egl}" if gpu else f"a GPU{egl}",
        "cpu": f"the CPU{egl or ' (OSMesa)'}",
        "window": "the display",
        "nothing": "nothing",
        "fails": "FAILS",
        "unknown": "unknown",
    }
    return places[found.where]


def finding(found: Finding) -> str:
    """Write a finding's variable, value and effect as a sentence."""
    if found.value is not None:
        return f"{found.variable}={found.value!r}: {found.effect}"
    if found.variable in _NO_VARIABLES:
        return f"{found.variable}: {found.effect}"
    return f"{found.variable} is not set: {found.effect}"


def question(asked: Question) -> str:
    """Write a question as Python."""
    device, render, renderer = map(json.dumps, (asked.device, asked.render, asked.renderer))
    return f"resolve({device}, render={render}, renderer={renderer})"


def verified_rows(report: Report) -> list[tuple[str, ...]]:
    """Give a row for every renderer that was tried."""
    return [
        (entry.name, entry.gl_renderer or "-", entry.gl_vendor or "-", _made(entry), _result(entry))
        for entry in report.verified
    ]


def _made(entry: Verified) -> str:
    if entry.egl is not None:
        return str(entry.egl)
    return "OSMesa" if entry.predicted is None and entry.gl_renderer else "-"


def _result(entry: Verified) -> str:
    if entry.problem is not None:
        return f"FAILS: {entry.problem}" if entry.failure else f"DIFFERS: {entry.problem}"
    seen = "" if entry.nvml is None or entry.uuid is None else ", NVML lists the process there"
    return f"as predicted{seen} ({entry.seconds:.1f} s)"
