"""Show which GPU computes and which GPU each renderer uses, why, and how to fix mistakes.

Without options, it reports on this machine and its environment variables. The exit status is 0 without errors, 1 if
there are errors or an installed renderer fails, and 2 if the command line is invalid.

examples:
  rl-ext doctor
  rl-ext doctor --renderer robosuite --device cuda:1
  rl-ext doctor --verify --json > machine.json
  rl-ext doctor --pid 4711
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rl_ext_core
from rl_ext_core.cli.console import new_console
from rl_ext_core.devices import Decision, Finding, Inventory, check_environment, renderers, resolve
from rl_ext_core.devices._probe import PACKAGES, query_versions
from rl_ext_core.devices.decide import Request
from rl_ext_core.devices.findings import Prediction, Situation, predict
from rl_ext_core.devices.inventory import Gpu, installed_versions
from rl_ext_core.devices.verify import TIMEOUT_S, GpuUse, Verification, list_gpu_uses, verify
from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError, RlExtError, install_line

if TYPE_CHECKING:
    from rich.console import Console

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
# Default arguments of `resolve` for the decision to explain.
_QUESTION = {"device": "auto", "render": "none", "renderer": "mujoco"}
_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rl-ext doctor`` to a parser."""
    asked = parser.add_argument_group("the decision to explain, as arguments of rl_ext_core.devices.resolve()")
    asked.add_argument("--device", help='the device that computes: "auto", "cpu", "cuda:1", "nvidia-smi:3", "GPU-3f2a"')
    asked.add_argument("--render", help='the device that renders: "same", "cpu", "egl:2", or as for --device')
    asked.add_argument("--renderer", help=f"the library that renders: {', '.join(renderers.NAMES)}")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, for a bug report")
    parser.add_argument("--verify", action="store_true", help="test every renderer, each in its own process")
    parser.add_argument("--pid", type=int, metavar="N", help="report on the GPUs of a running process and its children")


def run(arguments: argparse.Namespace) -> int:
    """Run ``rl-ext doctor``."""
    # The report contains everything that is logged.
    logging.getLogger("rl_ext_core").addHandler(logging.NullHandler())
    if arguments.verify and arguments.render == "none":
        raise InvalidArgumentError('--verify with --render "none" has nothing to test. Use --render "same"')
    console = new_console()
    report = _create_report(arguments, console) if arguments.pid is None else _create_process_report(arguments)
    if arguments.json:
        sys.stdout.write(f"{report.to_json()}\n")
    else:
        print_report(report, console)
    return 0 if (report.healthy if report.process is None else report.process.mismatch is None) else 1


def _create_process_report(arguments: argparse.Namespace) -> DoctorReport:
    """Create the report for the process in ``--pid``, with the variables with which it was started."""
    others = ("device", "render", "renderer", "verify")
    given = next((name for name in others if getattr(arguments, name)), None)
    if given is not None:
        raise InvalidArgumentError(f"--pid and --{given} cannot be combined. Use one of them")
    folder, inventory = Path("/proc", str(arguments.pid)), Inventory.current()
    try:
        entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        program = os.readlink(folder / "exe")
    except OSError as error:
        raise InvalidArgumentError(
            f"--pid {arguments.pid} cannot be read: {error.strerror}. Use the ID of a running process of this user, "
            "which nvidia-smi lists"
        ) from error
    environ = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if re.match(r"python[\d.]*$", os.path.basename(program)):
        # A virtual environment's interpreter is a link, which only the command line names.
        named = shutil.which(command.split(" ")[0], path=environ.get("PATH"))
        versions = query_versions(named if named and os.path.realpath(named) == program else program)
        inventory = inventory if versions is None else dataclasses.replace(inventory, versions=versions)
    uses = list_gpu_uses({arguments.pid, *_find_children(arguments.pid)})
    return dataclasses.replace(examine(inventory, environ), process=ProcessUses(arguments.pid, command, uses))


def _find_children(pid: int) -> set[int]:
    """Return the IDs of the children of a process, and of their children."""
    found: set[int] = set()
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children = {int(word) for word in path.read_text().split()}
            found |= children.union(*map(_find_children, children))
    return found


def _create_report(arguments: argparse.Namespace, console: Console) -> DoctorReport:
    """Create the report for this machine."""
    given = {name: getattr(arguments, name) for name in _QUESTION if getattr(arguments, name) is not None}
    renders = given and (arguments.renderer is not None or arguments.verify)
    question = {**_QUESTION, **({"render": "same"} if renders else {}), **given}
    Request(question["device"], question["render"])
    # A renderer that is not installed becomes part of the report.
    with contextlib.suppress(MissingDependencyError):
        renderers.find_renderer(question["renderer"], {})
    seen = []
    for renderer in renderers.installed_renderers(installed_versions()) if arguments.verify else ():
        if renderer.select_egl_device is not None and arguments.renderer in (None, renderer.name):
            silent = arguments.json or not console.is_terminal
            text = f"testing {renderer.name}, {TIMEOUT_S:.0f} s at most"
            with contextlib.nullcontext() if silent else console.status(text):
                seen.append(verify(renderer.name, arguments.device or "auto", arguments.render or "same"))
    return examine(question=question, verified=seen)


# The reports


@dataclass(frozen=True)
class ProcessUses:
    """GPUs that a running process uses.

    :param uses: GPUs on which NVML lists the process and its children; None if they are unknown
    """

    pid: int
    command: str
    uses: tuple[GpuUse, ...] | None

    @property
    def mismatch(self) -> str | None:
        """Sentence that names the GPUs that render without computing; None if there is none."""
        computing, rendering = (
            {use.uuid for use in self.uses or () if use.kind == kind} for kind in ("compute", "graphics")
        )
        elsewhere = sorted(rendering - computing)
        if not computing or not elsewhere:
            return None
        return f"it renders on {', '.join(elsewhere)}, but computes on {', '.join(sorted(computing))}"


@dataclass(frozen=True)
class DoctorReport:
    """Report of ``rl-ext doctor`` on a machine.

    :param environ: the environment variables that select devices, of a process those with which it was started
    :param question: arguments of ``resolve`` for the decision to explain
    :param decision: the decision; None if :func:`rl_ext_core.devices.resolve` raises the error ``refusal``
    :param renderers: where each installed renderer renders with these variables
    """

    inventory: Inventory
    environ: Mapping[str, str]
    question: Mapping[str, str]
    decision: Decision | None
    refusal: str | None
    renderers: tuple[Prediction, ...]
    findings: tuple[Finding, ...]
    verified: tuple[Verification, ...] = ()
    process: ProcessUses | None = None

    @property
    def healthy(self) -> bool:
        """Whether there is a decision, no finding is an error, and no installed renderer fails."""
        renders = all(renderer.where != "fails" for renderer in self.renderers)
        return renders and self.refusal is None and all(finding.severity != "error" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as JSON text, for a bug report."""
        plain = {"format": 1, "rl_ext": rl_ext_core.__version__, **dataclasses.asdict(self)}
        return json.dumps(plain, indent=2, sort_keys=True)


def examine(
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    question: Mapping[str, str] = _QUESTION,
    verified: Sequence[Verification] = (),
) -> DoctorReport:
    """Examine a machine, by default this one. No variable is set, and CUDA is not initialized if NVML answers."""
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
        decision = resolve(**question, inventory=inventory, environ=variables)  # type: ignore[arg-type]
    except RlExtError as error:
        refusal = str(error)
    return DoctorReport(
        inventory=machine,
        environ=variables,
        question=dict(question),
        decision=decision,
        refusal=refusal,
        renderers=tuple(predict(row, situation) for row in situation.renderers),
        findings=tuple(sorted(found, key=lambda finding: finding.severity)),
        verified=tuple(verified),
    )


def _is_reported(name: str) -> bool:
    """Return whether reports contain a variable: it concerns devices, and is not a secret."""
    if name in _REPORTED_PATHS:
        return True
    return _REPORTED_NAMES.fullmatch(name) is not None and _PRIVATE_WORDS.search(name) is None


# The report as text


def print_report(report: DoctorReport, console: Console) -> None:
    """Print a report. Lines to copy are not wrapped, and no text is truncated."""
    if report.process is not None:
        _print_process(report.process, report, console)
    packages = {name: report.inventory.versions[name] for name in PACKAGES if name in report.inventory.versions}
    if "torch" in packages:
        cuda = report.inventory.versions.get("torch.cuda", "")
        built = cuda if cuda.startswith("rocm") else f"CUDA {cuda}" if cuda else "without CUDA"
        packages["torch"] += f" ({built})"
    versions = {"rl-ext": rl_ext_core.__version__, **packages}
    _print_line(console, "  ".join(f"{name} {version}" for name, version in versions.items()))
    columns = ("nvidia-smi", "name", "PCI", "UUID", "torch", "EGL", "DRM", "free / total")
    _print_table(console, columns, _gpu_rows(report))
    for text in _describe_other_devices(report.inventory):
        _print_line(console, text)
    device, render, renderer = map(json.dumps, report.question.values())
    _print_heading(console, f"resolve({device}, render={render}, renderer={renderer})")
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
        named = finding.variable in ("EGL", "torch", *renderers.NAMES)
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
    visible, uuids = situation.shown, [gpu.uuid for gpu in inventory.gpus]
    # The shortest prefix of the UUIDs that is unique, because resolve() accepts it as a device.
    length = next(n for n in range(len("GPU-01234567"), 99) if len({uuid[:n] for uuid in uuids}) == len(set(uuids)))
    for gpu in inventory.gpus:
        if situation.torch_without_cuda:
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


def _print_process(process: ProcessUses, report: DoctorReport, console: Console) -> None:
    """Print the GPUs that a process uses, and its variables."""
    _print_line(console, f"{process.pid}  {process.command}")
    if process.uses is None:
        why = report.inventory.nvml_error or "NVML lists processes by the host's IDs, which are unknown in a container"
        _print_line(console, f"GPUs: unknown ({why})")
    elif not process.uses:
        _print_line(console, "GPUs: NVML lists the process and its children on no GPU")
    numbers = {gpu.uuid: str(gpu.index) for gpu in report.inventory.gpus}
    sizes = ["-" if use.memory is None else f"{use.memory / 2**20:.0f} MiB" for use in process.uses or ()]
    rows = [
        (str(use.pid), use.kind, numbers.get(use.uuid, "-"), use.uuid, size)
        for use, size in zip(process.uses or (), sizes, strict=True)
    ]
    _print_table(console, ("process", "use", "nvidia-smi", "UUID", "memory"), rows)
    if process.mismatch:
        _print_line(console, f"error: {process.mismatch}", _SEVERITY_STYLES["error"])
    _print_heading(console, "variables when the process started")
    for name, value in report.environ.items():
        _print_line(console, f"{name}={value}")
    console.print()


def _print_heading(console: Console, text: str) -> None:
    console.print()
    _print_line(console, text, "bold cyan")


def _print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line without wrapping it, so that it is copied from the terminal as one line."""
    from rich.text import Text

    console.print(Text(_escape_unprintable(text), style), soft_wrap=True, highlight=False)


def _print_table(console: Console, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
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
    """Escape unprintable characters, which a variable may contain."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
