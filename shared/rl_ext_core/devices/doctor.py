"""Say which GPU computes, which one every renderer uses, why, and what to type to fix it.

Without options it reports on this machine under the present variables. The exit status is 0 if nothing is wrong,
1 if something is or a renderer that is installed fails, and 2 if the command itself was wrong.

examples:
  rl-ext doctor
  rl-ext doctor --renderer robosuite --device cuda:1
  rl-ext doctor --verify --json > machine.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_ext_core
from rl_ext_core.cli import new_console
from rl_ext_core.devices import _renderers, _resolve
from rl_ext_core.devices._check import Finding, Prediction, Situation, check_environment, guess_variable, predict
from rl_ext_core.devices._verify import TIMEOUT_S, Verification, verify
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import PACKAGES, Gpu, Inventory, installed_versions, read_record
from rl_ext_core.errors import (
    CorruptFileError,
    InvalidArgumentError,
    MissingDependencyError,
    RlExtError,
    install_line,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DoctorReport", "Question", "add_arguments", "examine", "print_report", "replay", "run"]

REPORT_FORMAT = 1
_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}

# The variables that go into a report: those that decide on devices, and no others. Reports end up in public bug
# trackers: NVIDIA_API_KEY or a path below somebody's home must not. In any case: who misspelt one should read of it.
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
_PRIVATE_WORDS = re.compile("KEY|TOKEN|SECRET|PASSW|AUTH|CREDENTIAL|HOME|ROOT|PATH|DIR", re.IGNORECASE)
# Their paths decide on a driver; other paths only tell where somebody has installed something.
_REPORTED_PATHS = ("__EGL_VENDOR_LIBRARY_FILENAMES", "__EGL_VENDOR_LIBRARY_DIRS")


@dataclass(frozen=True)
class Question:
    """A decision to explain: arguments of :func:`rl_ext_core.devices.resolve`.

    :param device: what computes
    :param render: what renders
    :param renderer: through which library
    """

    device: str = "auto"
    render: str = "none"
    renderer: str = "mujoco"

    def __str__(self) -> str:
        device, render, renderer = map(json.dumps, dataclasses.astuple(self))
        return f"resolve({device}, render={render}, renderer={renderer})"


@dataclass(frozen=True)
class DoctorReport:
    """What the doctor sees.

    :param inventory: the machine
    :param environ: the variables that decide on devices, and no others
    :param question: the decision that was asked for; by default what computes
    :param decision: the answer to that; None where it is refused
    :param refusal: why there is no such decision
    :param renderers: where each one that is installed renders with the present variables
    :param findings: mistakes, errors first
    :param verified: what ``--verify`` saw
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
        """Whether nothing is wrong that has to be mended, and all renderers that are installed render."""
        renders = all(renderer.where != "fails" for renderer in self.renderers)
        return renders and self.refusal is None and all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`to_json` writes, as plain dicts, lists, numbers and text."""
        plain = {field.name: _to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"format": REPORT_FORMAT, "rl_ext": rl_ext_core.__version__, **plain}

    def to_json(self) -> str:
        """Write it down for a bug report; :func:`replay` reads it."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _to_plain(value: Any) -> Any:
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
    """Examine a machine. Nothing is set, and where NVML answers, CUDA is not initialised.

    :param inventory: the machine; default: this one
    :param environ: its variables; default: this process's. Those that do not decide on devices are left out
    :param question: a decision to explain; default: what computes
    :param verified: what was seen when renderers were tried
    :return: the report
    """
    asked = question or Question()
    machine = Inventory.current() if inventory is None else inventory
    given = os.environ if environ is None else environ
    variables = {name: given[name] for name in sorted(given) if _is_reported(name)}
    situation = Situation(machine, variables, variables)
    found = [*check_environment(variables, inventory=machine)]
    found += [
        Finding(entry.name, None, f"when it was tried, {entry.problem}", entry.line)
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
    if guess_variable(name) is not None or name in _REPORTED_PATHS:
        return True
    return _REPORTED_NAMES.fullmatch(name) is not None and _PRIVATE_WORDS.search(name) is None


def replay(text: str, *, question: Question | None = None) -> DoctorReport:
    """Examine the machine that a report was written on, and trust nothing in it.

    :param text: what :meth:`DoctorReport.to_json` wrote
    :param question: a decision to explain; default: the one that was asked for there
    :return: the report, as this version sees it
    :raises CorruptFileError: not a report, or of a format that this version does not read
    """
    try:
        data = json.loads(text)
        if data["format"] != REPORT_FORMAT:
            raise CorruptFileError(f"this report is not of format {REPORT_FORMAT}, the one that this version reads")
        inventory = Inventory.from_json(json.dumps(data["inventory"]))
        uuids = {gpu.uuid for gpu in inventory.gpus}
        if any(device.index != place for place, device in enumerate(inventory.egl or ())):
            raise ValueError("EGL's devices are not in order")
        if not {device.uuid for device in inventory.egl or ()} | set(inventory.fastest_first or ()) <= uuids | {None}:
            raise ValueError("a UUID belongs to no GPU")
        environ = read_record(Mapping[str, str], data["environ"], "environ")
        asked = read_record(Question, data["question"], "question")
        verified = read_record(tuple[Verification, ...], data["verified"], "verified")
        decision = read_record(Decision | None, data["decision"], "decision")
        if not {entry.name for entry in verified} <= set(_renderers.NAMES):  # it becomes part of lines to copy
            raise ValueError(f"{[entry.name[:60] for entry in verified]} is no renderer")
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CorruptFileError(f"not a report: {detail}. Expected what rl-ext doctor --json wrote") from error
    report = examine(inventory, environ, question=question or asked, verified=verified)
    if question is None and decision and not inventory.gpus and report.decision and report.decision.device == "cpu":
        # What torch found where NVML lists nothing cannot be found out from here.
        return report if decision.device == "cpu" else dataclasses.replace(report, decision=decision)
    return report


# As text


def print_report(report: DoctorReport, console: Console) -> None:
    """Print a report. Lines to copy are never wrapped, and nothing is cut off."""
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
        _print_line(console, "no renderer that is known here is installed")
        _print_line(console, install_line("mujoco"), "bold")
    answers = {True: "yes", False: "NO", None: "-"}
    rows = [
        (found.renderer, _describe_place(found, report), answers[found.with_compute], found.why)
        for found in report.renderers
    ]
    _print_table(console, ("renderer", "renders on", "computes there", "because"), rows)
    if report.verified:
        _print_heading(console, "tried under a decision, each in a process of its own")
        tried = [
            (seen.name, seen.gl_renderer or "-", seen.gl_vendor or "-", seen.place, seen.result)
            for seen in report.verified
        ]
        _print_table(console, ("renderer", "GL_RENDERER", "GL_VENDOR", "EGL", "result"), tried)
    _print_heading(console, "findings, each with the line to type")
    if not report.findings:
        _print_line(console, "nothing is wrong with the variables", _SEVERITY_STYLES["ok"])
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
    """Return a row for every GPU, with what each numbering calls it."""
    inventory = report.inventory
    situation = Situation(inventory, report.environ, report.environ)
    visible, uuids = situation.visible, [gpu.uuid for gpu in inventory.gpus]
    # As many characters as it takes to tell them apart: such a beginning names a GPU.
    length = next(n for n in range(len("GPU-01234567"), 99) if len({uuid[:n] for uuid in uuids}) == len(set(uuids)))
    for gpu in inventory.gpus:
        if situation.machine.torch_without_cuda:
            torch = "none"
        elif visible is None:
            torch = "unknown"
        else:
            torch = f"cuda:{visible.uuids.index(gpu.uuid)}" if gpu.uuid in visible.uuids else "hidden"
        device = inventory.egl_of(gpu.uuid)
        egl = "not asked" if inventory.egl is None else str(device.index) if device else "none"
        drm = device.drm.rpartition("/")[2] if device and device.drm else "-"
        memory = f"{gpu.memory_free / 2**30:.1f} / {gpu.memory_total / 2**30:.1f} GiB"
        yield str(gpu.index), gpu.name, gpu.pci, gpu.uuid[:length], torch, egl, drm, memory


def _describe_other_devices(inventory: Inventory) -> Iterator[str]:
    """Name the slices, EGL's devices that are none of these GPUs, and what did not answer."""
    if not inventory.gpus:
        yield f"no GPU: {inventory.nvml_error or 'NVML lists none'}"
    for gpu in inventory.gpus:
        if gpu.mig:
            yield f"nvidia-smi {gpu.index} is cut into MIG slices: {', '.join(gpu.mig)}"
    for device in inventory.egl or ():
        if device.uuid is None:
            what = "software on the CPU (Mesa)" if device.software else "a device that NVML does not know"
            yield f"EGL {device.index}: {what}{f', {device.drm}' if device.drm else ''}"
    if inventory.egl_error:
        yield f"EGL: {inventory.egl_error}"
    if inventory.osmesa is not None:
        yield f"OSMesa: {'installed' if inventory.osmesa else 'not installed'}"


def _describe_place(found: Prediction, report: DoctorReport) -> str:
    gpu: Gpu | None = next((gpu for gpu in report.inventory.gpus if gpu.uuid == found.uuid), None)
    egl = "" if found.egl is None else f" (EGL {found.egl})"
    if found.where == "gpu":
        return f"nvidia-smi {gpu.index}{egl}" if gpu else f"a GPU{egl}"
    if found.where == "cpu":
        return f"the CPU{egl or ' (OSMesa)'}"
    return {"fails": "FAILS", "window": "the display"}.get(found.where, found.where)


def _print_heading(console: Console, text: str) -> None:
    console.print()
    _print_line(console, text, "bold cyan")


def _print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line that the terminal may break, and nobody else: what is copied from there is one line."""
    from rich.text import Text

    console.print(Text(_escape_unprintable(text), style), soft_wrap=True, highlight=False)


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]
) -> None:
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
    """Show characters that are none as Python writes them: a report may come from anybody."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# As a command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    asked = parser.add_argument_group("a decision to explain, in the words of rl_ext_core.devices.resolve()")
    asked.add_argument("--device", help='what computes: "auto", "cpu", "cuda:1", "nvidia-smi:3", "GPU-3f2a"')
    asked.add_argument("--render", help='what renders: "same", "cpu", "egl:2", or as for --device')
    asked.add_argument("--renderer", help=f"through which library: {', '.join(_renderers.NAMES)}")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, fit for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="report on the machine that such a JSON came from")
    parser.add_argument(
        "--verify", action="store_true", help="try every renderer for real, each in a process of its own"
    )


def run(arguments: argparse.Namespace) -> int:
    """Report or try.

    :return: the exit status
    :raises RlExtError: the arguments contradict each other, or a file is no report
    """
    # What is logged stands in the report as well.
    logging.getLogger("rl_ext_core").addHandler(logging.NullHandler())
    if arguments.replay is not None and arguments.verify:
        raise InvalidArgumentError("--replay and --verify exclude each other")
    if arguments.verify and arguments.render == "none":
        raise InvalidArgumentError('--verify renders, so --render "none" leaves nothing to do')
    console = new_console()
    report = _create_report(arguments, console)
    if arguments.json:
        sys.stdout.write(f"{report.to_json()}\n")
    else:
        print_report(report, console)
    return 0 if report.healthy else 1


def _create_report(arguments: argparse.Namespace, console: Console) -> DoctorReport:
    question = _parse_question(arguments)
    if arguments.replay is not None:
        try:
            text = Path(arguments.replay).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidArgumentError(
                f"--replay {arguments.replay!r} cannot be read: {why}. Expected what rl-ext doctor --json wrote"
            ) from error
        return replay(text, question=question)
    seen = []
    for renderer in _renderers.installed_renderers(installed_versions()) if arguments.verify else ():
        if renderer.select_egl_device is not None and arguments.renderer in (None, renderer.name):
            silent = arguments.json or not console.is_terminal
            text = f"trying {renderer.name}, {TIMEOUT_S:.0f} s at most"
            with contextlib.nullcontext() if silent else console.status(text):
                seen.append(verify(renderer.name, arguments.device or "auto", arguments.render or "same"))
    return examine(question=question, verified=seen)


def _parse_question(arguments: argparse.Namespace) -> Question | None:
    """Read the decision to explain; None if none was asked for.

    :raises InvalidArgumentError: a device or a renderer is written in no known form
    """
    given = {name: getattr(arguments, name) for name in ("device", "render", "renderer")}
    if not any(value is not None for value in given.values()):
        return None
    renders = arguments.renderer is not None or arguments.verify
    default = {"device": "auto", "render": "same" if renders else "none", "renderer": "mujoco"}
    question = Question(**default | {name: value for name, value in given.items() if value is not None})
    _resolve.parse_device(question.device, "device")
    _resolve.parse_device(question.render, "render")
    # Whether one that is known is also installed is for the decision to say.
    with contextlib.suppress(MissingDependencyError):
        _renderers.find_renderer(question.renderer, {})
    return question
