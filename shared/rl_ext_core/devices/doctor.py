"""Report on the devices of a machine: which GPU computes, which renders, and mistakes with their fixes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rl_ext_core
from rl_ext_core.devices import _renderers, _resolve
from rl_ext_core.devices._check import Finding, Prediction, Situation, check_environment, guess_variable, predict
from rl_ext_core.devices._verify import Verification
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import PACKAGES, Gpu, Inventory, read_record
from rl_ext_core.errors import (
    CorruptFileError,
    RlExtError,
    install_line,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DoctorReport", "Question", "examine", "print_report", "replay"]

REPORT_FORMAT = 1
_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}

# Variables that a report contains. Only variables that select devices are allowed, because reports are posted in public
# bug trackers and must not contain NVIDIA_API_KEY or paths in a home directory. The case is ignored, because names in
# the wrong case are mistakes to report.
_REPORTED_NAMES = re.compile(
    r"""(CUDA|HIP|ROCR|GPU)_\w+ | MUJOCO_\w+ | PYOPENGL_\w+ | (__)?EGL_\w+ | __GLX_\w+ | LIBGL_\w+ | GALLIUM_DRIVER
    | NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_\w+|DISABLE_REQUIRE)
    | (LOCAL_|GROUP_)?RANK | (LOCAL_)?WORLD_SIZE | (OMPI|MV2)_COMM_WORLD_(LOCAL_)?RANK
    | MPI_LOCALRANKID | PMI_(LOCAL_)?RANK | WSL_DISTRO_NAME
    | SLURM_(LOCALID|PROCID|JOB_ID|NTASKS|\w*GPUS?(_\w+)?|TRES_(PER_TASK|BIND)|ACCEL_BIND_TYPE)
    | RAY_(JOB_ID|\w*VISIBLE_DEVICES)
    | DISPLAY | WAYLAND_DISPLAY""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
# Variables with these words in their names are private, except those in _REPORTED_PATHS.
_PRIVATE_WORDS = re.compile("KEY|TOKEN|SECRET|PASSW|AUTH|CREDENTIAL|HOME|ROOT|PATH|DIR", re.IGNORECASE)
# The paths in these variables select a driver.
_REPORTED_PATHS = ("__EGL_VENDOR_LIBRARY_FILENAMES", "__EGL_VENDOR_LIBRARY_DIRS")


@dataclass(frozen=True)
class Question:
    """Arguments of :func:`rl_ext_core.devices.resolve` for the decision to explain.

    :param device: the device that computes
    :param render: the device that renders
    :param renderer: the library that renders
    """

    device: str = "auto"
    render: str = "none"
    renderer: str = "mujoco"

    def __str__(self) -> str:
        device, render, renderer = map(json.dumps, dataclasses.astuple(self))
        return f"resolve({device}, render={render}, renderer={renderer})"


@dataclass(frozen=True)
class DoctorReport:
    """Report of ``rl-ext doctor`` on a machine.

    :param inventory: the machine
    :param environ: the environment variables that select devices
    :param question: arguments of the decision to explain
    :param decision: the decision; None if :func:`rl_ext_core.devices.resolve` raises an error
    :param refusal: text of that error, or None
    :param renderers: where each installed renderer renders with these variables
    :param findings: mistakes, errors first
    :param verified: results of ``--verify``
    """

    inventory: Inventory
    environ: Mapping[str, str]
    question: Question
    decision: Decision | None
    refusal: str | None
    renderers: tuple[Prediction, ...]
    findings: tuple[Finding, ...]
    verified: tuple[Verification, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether there is a decision, no finding is an error, and no installed renderer fails."""
        renders = all(renderer.where != "fails" for renderer in self.renderers)
        return renders and self.refusal is None and all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of :meth:`to_json` as dicts, lists, numbers and strings."""
        plain = {field.name: _to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"format": REPORT_FORMAT, "rl_ext": rl_ext_core.__version__, **plain}

    def to_json(self) -> str:
        """Return the report as JSON text, for a bug report. :func:`replay` reads it."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _to_plain(value: Any) -> Any:
    """Convert dataclasses and their contents to dicts and lists, for JSON."""
    if isinstance(value, (Decision, Inventory)):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _to_plain(entry) for name, entry in value.items()}
    return [_to_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def examine(
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    question: Question | None = None,
    verified: Sequence[Verification] = (),
) -> DoctorReport:
    """Examine a machine. It sets no variable, and does not initialize CUDA if NVML answers.

    :param inventory: the machine; default: this machine
    :param environ: its environment variables; default: those of this process. Only variables that select devices are
        used
    :param question: arguments of the decision to explain; default: ``Question()``
    :param verified: results of testing renderers
    :return: the report
    """
    asked = question or Question()
    machine = Inventory.current() if inventory is None else inventory
    given = os.environ if environ is None else environ
    variables = {name: given[name] for name in sorted(given) if _is_reported(name)}
    situation = Situation(machine, variables, variables)
    found = [*check_environment(variables, inventory=machine)]
    found += [
        Finding(entry.name, None, f"the test with --verify failed: {entry.problem}", entry.line)
        for entry in verified
        if entry.problem
    ]
    decision, refusal = None, None
    try:
        decision = _resolve.resolve(
            asked.device, render=asked.render, renderer=asked.renderer, inventory=inventory, environ=variables
        )
    except RlExtError as error:
        refusal = str(error)
    return DoctorReport(
        inventory=machine,
        environ=variables,
        question=asked,
        decision=decision,
        refusal=refusal,
        renderers=tuple(predict(renderer, situation) for renderer in _renderers.installed_renderers(machine.versions)),
        findings=tuple(sorted(found, key=lambda finding: finding.severity)),
        verified=tuple(verified),
    )


def _is_reported(name: str) -> bool:
    """Return whether reports contain a variable: it concerns devices, and is not a secret."""
    if guess_variable(name) is not None or name in _REPORTED_PATHS:
        return True
    return _REPORTED_NAMES.fullmatch(name) is not None and _PRIVATE_WORDS.search(name) is None


def replay(text: str, *, question: Question | None = None) -> DoctorReport:
    """Examine the machine on which a report was written. The text is not trusted.

    :param text: JSON that :meth:`DoctorReport.to_json` wrote
    :param question: arguments of the decision to explain; default: those in the report
    :return: a new report, created by this version
    :raises CorruptFileError: If the text is not a report, or has a format that this version does not read.
    """
    try:
        data = json.loads(text)
        if data["format"] != REPORT_FORMAT:
            raise CorruptFileError(
                f"the format of this report is not {REPORT_FORMAT}, the only one that this version reads"
            )
        inventory = Inventory.from_json(json.dumps(data["inventory"]))
        uuids = {gpu.uuid for gpu in inventory.gpus}
        if any(device.index != place for place, device in enumerate(inventory.egl or ())):
            raise ValueError("EGL's devices are not in the order of their indices")
        if not {device.uuid for device in inventory.egl or ()} | set(inventory.fastest_first or ()) <= uuids | {None}:
            raise ValueError("a UUID does not belong to any GPU")
        environ = read_record(Mapping[str, str], data["environ"], "environ")
        asked = read_record(Question, data["question"], "question")
        verified = read_record(tuple[Verification, ...], data["verified"], "verified")
        decision = read_record(Decision | None, data["decision"], "decision")
        if not {entry.name for entry in verified} <= set(_renderers.NAMES):  # names become part of lines to copy
            raise ValueError(f"{[entry.name[:60] for entry in verified]} has an unknown renderer")
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CorruptFileError(f"not a report: {detail}. Expected the output of `rl-ext doctor --json`") from error
    report = examine(inventory, environ, question=question or asked, verified=verified)
    if question is None and decision and not inventory.gpus and report.decision and report.decision.device == "cpu":
        # torch had found a GPU that NVML does not list, which cannot be repeated on this machine.
        return report if decision.device == "cpu" else dataclasses.replace(report, decision=decision)
    return report


# The report as text


def print_report(report: DoctorReport, console: Console) -> None:
    """Print a report. Lines to copy are not wrapped, and no text is truncated."""
    packages = {name: report.inventory.versions[name] for name in PACKAGES if name in report.inventory.versions}
    if "torch" in packages:
        cuda = report.inventory.versions.get("torch.cuda", "")
        built = cuda if cuda.startswith("rocm") else f"CUDA {cuda}" if cuda else "without CUDA"
        packages["torch"] += f" ({built})"
    versions = {"rl-ext": rl_ext_core.__version__, **packages}
    _print_line(console, "  ".join(f"{name} {version}" for name, version in versions.items()))
    _print_table(
        console, ("nvidia-smi", "name", "PCI", "UUID", "torch", "EGL", "DRM", "free / total"), _gpu_rows(report)
    )
    for text in _describe_other_devices(report.inventory):
        _print_line(console, text)
    _print_heading(console, str(report.question))
    if report.refusal is not None:
        _print_line(console, f"refused  {report.refusal}", _SEVERITY_STYLES["error"])
    for text in report.decision.explain().splitlines() if report.decision else ():
        _print_line(console, text)
    _print_heading(console, "renderers with the present variables")
    if not report.renderers:
        _print_line(console, "no supported renderer is installed")
        _print_line(console, install_line("mujoco"), "bold")
    answers = {True: "yes", False: "NO", None: "-"}
    rows = [
        (found.renderer, _describe_place(found, report), answers[found.with_compute], found.why)
        for found in report.renderers
    ]
    _print_table(console, ("renderer", "renders on", "computes there", "because"), rows)
    if report.verified:
        _print_heading(console, "tests with a decision, each in its own process")
        tried = [
            (seen.name, seen.gl_renderer or "-", seen.gl_vendor or "-", seen.place, seen.result)
            for seen in report.verified
        ]
        _print_table(console, ("renderer", "GL_RENDERER", "GL_VENDOR", "EGL", "result"), tried)
    _print_heading(console, "findings, each with the line to type")
    if not report.findings:
        _print_line(console, "the environment variables have no mistakes", _SEVERITY_STYLES["ok"])
    for finding in report.findings:
        value = "" if finding.value is None else f"={finding.value!r}"
        named = finding.variable in ("EGL", "torch", *_renderers.NAMES)
        unset = " is not set" if finding.value is None and not named else ""
        _print_line(
            console,
            f"{finding.severity} {finding.variable}{value}{unset}: {finding.effect}",
            _SEVERITY_STYLES[finding.severity],
        )
        for line in finding.fix.splitlines():
            _print_line(console, line, "bold")


def _gpu_rows(report: DoctorReport) -> Iterator[tuple[str, ...]]:
    """Yield a table row for every GPU, with its number in every numbering."""
    inventory = report.inventory
    situation = Situation(inventory, report.environ, report.environ)
    visible, uuids = situation.visible, [gpu.uuid for gpu in inventory.gpus]
    # The shortest prefix of the UUIDs that is unique, because resolve() accepts it as a device.
    length = next(n for n in range(len("GPU-01234567"), 99) if len({uuid[:n] for uuid in uuids}) == len(set(uuids)))
    for gpu in inventory.gpus:
        if situation.machine.torch_without_cuda:
            torch = "none"
        elif visible is None:
            torch = "unknown"
        else:
            torch = f"cuda:{visible.uuids.index(gpu.uuid)}" if gpu.uuid in visible.uuids else "hidden"
        device = inventory.egl_of(gpu.uuid)
        egl = "not queried" if inventory.egl is None else str(device.index) if device else "none"
        drm = device.drm.rpartition("/")[2] if device and device.drm else "-"
        memory = f"{gpu.memory_free / 2**30:.1f} / {gpu.memory_total / 2**30:.1f} GiB"
        yield str(gpu.index), gpu.name, gpu.pci, gpu.uuid[:length], torch, egl, drm, memory


def _describe_other_devices(inventory: Inventory) -> Iterator[str]:
    """Describe MIG slices, EGL devices without a GPU in the table, and drivers that did not answer."""
    if not inventory.gpus:
        yield f"no GPU: {inventory.nvml_error or 'NVML lists none'}"
    for gpu in inventory.gpus:
        if gpu.mig:
            yield f"nvidia-smi {gpu.index} is cut into MIG slices: {', '.join(gpu.mig)}"
    for device in inventory.egl or ():
        if device.uuid is None:
            what = "software on the CPU (Mesa)" if device.software else "a device that NVML does not list"
            yield f"EGL {device.index}: {what}{f', {device.drm}' if device.drm else ''}"
    if inventory.egl_error:
        yield f"EGL: {inventory.egl_error}"
    if inventory.osmesa is not None:
        yield f"OSMesa: {'installed' if inventory.osmesa else 'not installed'}"


def _describe_place(found: Prediction, report: DoctorReport) -> str:
    """Return where a renderer is predicted to render, for a table."""
    gpu: Gpu | None = next((gpu for gpu in report.inventory.gpus if gpu.uuid == found.uuid), None)
    egl = "" if found.egl is None else f" (EGL {found.egl})"
    if found.where == "gpu":
        return f"nvidia-smi {gpu.index}{egl}" if gpu else f"a GPU{egl}"
    if found.where == "cpu":
        return f"the CPU{egl or ' (OSMesa)'}"
    return {"fails": "FAILS", "window": "the display"}.get(found.where, found.where)


def _print_heading(console: Console, text: str) -> None:
    """Print an empty line and a colored heading."""
    console.print()
    _print_line(console, text, "bold cyan")


def _print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line without wrapping it, so that it is copied from the terminal as one line."""
    from rich.text import Text

    console.print(Text(_escape_unprintable(text), style), soft_wrap=True, highlight=False)


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]
) -> None:
    """Print rows under the names of their columns; print nothing if there are no rows."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_escape_unprintable(cell)) for cell in row))
    if table.rows:
        console.print(table, highlight=False)


def _escape_unprintable(text: str) -> str:
    """Escape unprintable characters, because a report may come from an untrusted person."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
