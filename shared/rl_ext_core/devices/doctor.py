"""Report on the devices of a machine: which GPU computes, which renders, and mistakes with their fixes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rl_ext_core
from rl_ext_core.devices._probe import query_versions
from rl_ext_core.devices.decide import resolve
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.findings import Finding, Prediction, Situation, check_environment, predict
from rl_ext_core.devices.inventory import Inventory
from rl_ext_core.devices.verify import GpuUse, Verification, list_gpu_uses
from rl_ext_core.errors import InvalidArgumentError, RlExtError

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
    """Arguments of :func:`rl_ext_core.devices.resolve` for the decision to explain."""

    device: str = "auto"
    render: str = "none"
    renderer: str = "mujoco"

    def __str__(self) -> str:
        device, render, renderer = map(json.dumps, dataclasses.astuple(self))
        return f"resolve({device}, render={render}, renderer={renderer})"


@dataclass(frozen=True)
class DoctorReport:
    """Report of ``rl-ext doctor`` on a machine.

    :param environ: the environment variables that select devices
    :param decision: the decision; None if :func:`rl_ext_core.devices.resolve` raises the error ``refusal``
    :param renderers: where each installed renderer renders with these variables
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

    def to_json(self) -> str:
        """Return the report as JSON text, for a bug report."""
        plain = {"format": 1, "rl_ext": rl_ext_core.__version__, **dataclasses.asdict(self)}
        return json.dumps(plain, indent=2, sort_keys=True)


def examine(
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    question: Question | None = None,
    verified: Sequence[Verification] = (),
) -> DoctorReport:
    """Examine a machine, by default this one. No variable is set, and CUDA is not initialized if NVML answers."""
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
        decision = resolve(
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
        renderers=tuple(predict(row, situation) for row in situation.renderers),
        findings=tuple(sorted(found, key=lambda finding: finding.severity)),
        verified=tuple(verified),
    )


def _is_reported(name: str) -> bool:
    """Return whether reports contain a variable: it concerns devices, and is not a secret."""
    if name in _REPORTED_PATHS:
        return True
    return _REPORTED_NAMES.fullmatch(name) is not None and _PRIVATE_WORDS.search(name) is None


# Running processes


@dataclass(frozen=True)
class ProcessReport:
    """Report on a running process and its children.

    :param environ: the environment variables that select devices, as they were when the process started
    :param uses: GPUs on which NVML lists the process and its children; None if they are unknown
    :param renderers: where each renderer of its interpreter renders with these variables
    """

    pid: int
    command: str
    environ: Mapping[str, str]
    uses: tuple[GpuUse, ...] | None
    renderers: tuple[Prediction, ...]

    @property
    def mismatch(self) -> str | None:
        """Sentence that names the GPUs that render without computing; None if there is none."""
        places: dict[str, set[str]] = {"compute": set(), "graphics": set()}
        for use in self.uses or ():
            places[use.kind].add(use.uuid)
        elsewhere = sorted(places["graphics"] - places["compute"])
        if not places["compute"] or not elsewhere:
            return None
        return f"it renders on {', '.join(elsewhere)}, but computes on {', '.join(sorted(places['compute']))}"

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)


def examine_process(pid: int, inventory: Inventory) -> ProcessReport:
    """Examine a running process, from NVML and from the variables with which it was started.

    :raises InvalidArgumentError: If there is no such process, or another user owns it.
    """
    folder = Path("/proc", str(pid))
    try:
        entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        program = os.readlink(folder / "exe")
    except OSError as error:
        raise InvalidArgumentError(
            f"--pid {pid} cannot be read: {error.strerror}. Use the ID of a running process of this user, which "
            "nvidia-smi lists"
        ) from error
    given = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    environ = {name: given[name] for name in sorted(given) if _is_reported(name)}
    python = program if re.match(r"python[\d.]*$", os.path.basename(program)) else None
    # A virtual environment's interpreter is a link, which only the command line names.
    named = shutil.which(command.split(" ")[0], path=given.get("PATH"))
    python = named if python and named and os.path.realpath(named) == program else python
    versions = None if python is None else query_versions(python)
    machine = inventory if versions is None else dataclasses.replace(inventory, versions=versions)
    situation = Situation(machine, environ, environ)
    predictions = tuple(predict(row, situation) for row in situation.renderers)
    return ProcessReport(pid, command, environ, list_gpu_uses({pid, *_find_children(pid)}), predictions)


def _find_children(pid: int) -> set[int]:
    """Return the IDs of the children of a process, and of their children."""
    found: set[int] = set()
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        try:
            children = {int(word) for word in path.read_text().split()}
        except OSError:
            continue  # the thread has ended
        found |= children.union(*map(_find_children, children))
    return found
