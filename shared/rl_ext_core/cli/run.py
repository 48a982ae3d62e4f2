"""Run a program with the variables that make it compute and render on the same GPU.

The variables are set before the program imports anything, so the program needs no change. Without a launcher, --gpu
restricts it to one GPU, which it sees as cuda:0. Under torchrun, srun or mpirun, the mask is kept, and each rank
renders on the GPU of its rank. Signals and the exit status are the program's.

examples:
  rl-ext run --gpu auto -- python train.py
  rl-ext run --gpu 2 --verify -- lerobot-train
  torchrun --no-python --nproc-per-node=4 rl-ext run --per-rank -- python train.py
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rl_ext_core.devices import Decision, Inventory, renderers
from rl_ext_core.devices._probe import query_versions
from rl_ext_core.devices.cuda import MASK, Machine, cuda_order, strip_hidden_index
from rl_ext_core.devices.decide import Request, decide
from rl_ext_core.devices.launchers import Picker, find_rank_variable
from rl_ext_core.devices.renderers import installed_renderers
from rl_ext_core.devices.verify import verify_decision
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, RlExtError

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
# Programs that start the training processes. A variable that they inherit would be the same in all of them.
_LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun"),
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
)
_PER_RANK = "torchrun --no-python --nproc-per-node=4 rl-ext run --per-rank -- python train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rl-ext run`` to a parser."""
    parser.add_argument(
        "--gpu", metavar="N", help='the GPU: an index as in cuda:N, "nvidia-smi:3", "GPU-3f2a" or "auto"'
    )
    parser.add_argument("--render", metavar="N", help='"same" (default), "cpu", "none", an index, or as for --gpu')
    parser.add_argument("--renderer", help=f"the library that renders: {', '.join(renderers.NAMES[:-1])}")
    parser.add_argument("--per-rank", action="store_true", help="fail if no launcher has set a rank")
    parser.add_argument("--dry-run", action="store_true", help="print lines for a shell, and run nothing")
    parser.add_argument("--verify", action="store_true", help="render a frame first, and check which GPU rendered")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="the program to run")


def run(arguments: argparse.Namespace) -> int:
    """Run ``rl-ext run``. If the program starts, this function does not return."""
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command and not arguments.dry_run:
        raise InvalidArgumentError("the command needs a program. Write `rl-ext run --gpu auto -- python train.py`")
    python = _find_interpreter(command) if command else sys.executable
    inventory = Inventory.current(egl=arguments.render != "none")
    versions = None if python in (None, sys.executable) else query_versions(python)
    if versions is not None:
        inventory = dataclasses.replace(inventory, versions=versions)
    try:
        plan = plan_program(
            command,
            inventory,
            os.environ,
            gpu=arguments.gpu,
            render=arguments.render,
            renderer=arguments.renderer,
            per_rank=arguments.per_rank,
        )
    except RlExtError as error:
        raise type(error)(_as_options(str(error))) from error
    _print_note(plan.summary)
    if versions is None and python != sys.executable:
        _print_note(f"the versions are those of {sys.executable}, because {command[0]!r} is not a Python interpreter")
    for step in plan.decision.steps:
        if step.startswith("import check"):  # the reason why the mask looks strange
            _print_note(step)
    for warning in plan.decision.warnings:
        _print_note(f"warning: {warning}")
    if arguments.verify and not _verify(plan, python or sys.executable):
        return 1
    if arguments.dry_run:
        sys.stdout.write(plan.to_shell())
        return 0
    _execute(command, plan.environment(os.environ))


def _find_interpreter(command: Sequence[str]) -> str | None:
    """Return the Python that the command names; None if it names another program, such as a script."""
    path = shutil.which(command[0])
    if path is None:
        fix = f"Write `python {command[0]}`" if os.path.exists(command[0]) else "Write its path"
        raise InvalidArgumentError(f"the program {command[0]!r} is not found, or is not executable. {fix}")
    return path if _PYTHON.fullmatch(os.path.basename(path)) else None


def _as_options(text: str) -> str:
    """Return an error text with arguments of Python written as options of the command."""
    text = text.replace('device="cpu", or ', "")  # the program, not this command, decides to compute on the CPU
    text = re.sub(r"""\bdevice=(['"])(?:cuda:)?(.+?)\1""", r"--gpu \2", text)
    return re.sub(r"""\b(render|renderer)=(['"])(?:cuda:)?(.+?)\2""", r"--\1 \3", text)


def _verify(plan: ProgramPlan, python: str) -> bool:
    """Render a frame with the program's interpreter and the plan's variables; return whether it is as decided."""
    if plan.decision.render == "none":
        raise InvalidArgumentError("--verify has nothing to test, because nothing renders. Leave --verify out")
    seen = verify_decision(plan.decision, plan.environment(os.environ), python=python)
    _print_note(f"verify: {seen.gl_renderer or seen.name}: {seen.result}")
    return seen.problem is None


def _print_note(line: str) -> None:
    """Print a line to standard error, because standard output belongs to the program."""
    sys.stderr.write(f"rl-ext run: {line}\n")


def _execute(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace this process by the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program inherits that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise InvalidArgumentError(
            f"the program {command[0]!r} cannot be started: {error.strerror}. Write its interpreter before it"
        ) from error


# The plan


@dataclass(frozen=True)
class ProgramPlan:
    """Variables to set (text) or to unset (None), the decision under them, and one line that explains it."""

    decision: Decision
    variables: Mapping[str, str | None]
    summary: str

    def to_shell(self) -> str:
        """Return the lines that set and unset the variables in a shell or in a script for Slurm."""
        lines = [
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in self.variables.items()
        ]
        return "".join(f"{line}\n" for line in lines)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` with the plan's variables."""
        merged = {**environ, **self.variables}
        return {name: value for name, value in merged.items() if value is not None}


def plan_program(
    command: Sequence[str],
    inventory: Inventory,
    environ: Mapping[str, str],
    *,
    gpu: str | None = None,
    render: str | None = None,
    renderer: str | None = None,
    per_rank: bool = False,
) -> ProgramPlan:
    """Plan the variables of a program. Nothing is read or set.

    Without a launcher's rank, ``gpu`` restricts the program to one GPU, which it sees as ``cuda:0``. With a rank, the
    mask is kept, because the program selects its GPU by the rank, and only rendering is set.

    :param inventory: the machine, with the versions of the program's interpreter
    :param gpu: index of a visible GPU, or another form that :func:`resolve` accepts. ``"auto"`` takes the GPU with the
        most free memory, and None leaves the mask as it is
    :param render: as in :func:`resolve`, or the index of a visible GPU; default: ``"same"`` if a renderer is installed
    :param renderer: name of the renderer; default: an installed one, robosuite first
    :param per_rank: whether the program must have been started by a launcher
    """
    for option, value, fix in (("gpu", gpu, "auto"), ("render", render, "same"), ("renderer", renderer, "mujoco")):
        if value == "":  # a variable of the shell that is not set
            raise InvalidArgumentError(f"--{option} is empty. Leave it out, or use --{option} {fix}")
    rank = find_rank_variable(environ)
    _check_options(command, environ, gpu, rank, per_rank=per_rank)
    machine = Machine(inventory, environ)
    name = renderer or _default_renderer(inventory)
    shown = render or ("none" if name is None else "same")
    shown = f"cuda:{shown}" if shown.isdigit() else shown
    if name is None and shown != "none":
        raise InvalidArgumentError(
            f"--render {render} needs a renderer, but the program's interpreter has none. Use --render none, or "
            "`pip install mujoco` in the program's environment"
        )
    device = "auto" if gpu is None else f"cuda:{gpu}" if gpu.isdigit() else gpu
    picker = Picker("rank" if gpu is None or rank else "free-memory")
    request = Request(device, shown, name or "mujoco", picker)
    if request.compute.kind == "cpu":
        raise InvalidArgumentError("--gpu cpu is not a GPU. Use --render cpu to render on the CPU")
    if gpu is None or rank is not None:
        decision = decide(inventory, environ, request)
        return ProgramPlan(decision, dict(decision.variables), _describe_plan(decision, gpu, rank))
    compute = decide(inventory, environ, dataclasses.replace(request, render="none"))
    if compute.gpu is None and compute.device != "cpu":
        raise DeviceUnavailableError(f"--gpu {gpu}: {compute.warnings[0]}. Leave --gpu out, and set {MASK}")
    mask = {} if compute.gpu is None else {MASK: _narrow_mask(compute, machine)}
    if request.rendering.kind == "cuda":  # the index counts the GPUs before the mask is narrowed
        other = decide(inventory, environ, Request(device=shown))
        shown = other.gpu.uuid if other.gpu else shown
    narrowed = dataclasses.replace(request, device="cuda:0" if mask else "auto", render=shown, picker=Picker())
    decision = decide(inventory, {**environ, **mask}, narrowed)
    decision = dataclasses.replace(decision, reason=compute.reason)
    return ProgramPlan(decision, {**mask, **decision.variables}, _describe_plan(decision, gpu, rank))


def _check_options(
    command: Sequence[str], environ: Mapping[str, str], gpu: str | None, rank: str | None, *, per_rank: bool
) -> None:
    """Raise if the options contradict the launcher, or if the program is a launcher itself."""
    if per_rank and rank is None:
        raise InvalidArgumentError(
            f"--per-rank needs a rank such as LOCAL_RANK or SLURM_LOCALID, which no launcher has set. Use `{_PER_RANK}`"
        )
    if rank is not None and gpu not in (None, "auto"):
        raise InvalidArgumentError(
            f"--gpu {gpu} contradicts {rank}={environ[rank]!r}, by which the program selects its GPU. Use --per-rank, "
            f"or `env -u {rank} rl-ext run --gpu {gpu}` for a program that does not read it"
        )
    words = [os.path.basename(word) for word in command[:1]] + list(command[1:3])
    launcher = next((word for word in words if word in _LAUNCHERS), None)
    if launcher is not None and gpu is None:
        raise InvalidArgumentError(
            f"{launcher} starts several processes, which would all render on one GPU. Use rl-ext inside of the "
            f"launcher: `{_PER_RANK}`"
        )


def _default_renderer(inventory: Inventory) -> str | None:
    """Return the renderer whose decision suits most programs of an interpreter, or None if none is installed."""
    # Under mujoco 3, all renderers of MuJoCo follow robosuite's variables, whose import check must pass.
    names = [row.name for row in installed_renderers(inventory.versions) if row.select_egl_device is not None]
    return next((name for name in ("robosuite", "mujoco", *names) if name in names), None)


def _narrow_mask(decision: Decision, machine: Machine) -> str:
    """Return the mask that shows only the decision's GPU, with a number if the present mask has numbers."""
    assert decision.gpu is not None
    if decision.mig is not None:
        return decision.mig
    mask = strip_hidden_index(machine.environ.get(MASK, ""), machine.environ)
    if mask.startswith("GPU-"):
        return decision.gpu.uuid
    return str(cuda_order(machine.inventory, machine.environ).index(decision.gpu.uuid))


def _describe_plan(decision: Decision, gpu: str | None, rank: str | None) -> str:
    """Return what was decided and why, as one line."""
    place = "the CPU" if decision.device == "cpu" else decision.device
    if decision.gpu is not None:
        place = f"nvidia-smi {decision.gpu.index} ({decision.gpu.name})"
    computes = f"computes on {place},"
    if gpu is None and rank is None and decision.gpu is not None:
        computes = f"the program sees the GPUs as before; if it computes on {decision.device}, {place}, it"
    where = "on the CPU" if decision.render == "cpu" else "on a GPU that NVML does not list"
    if decision.render_gpu is not None:
        where = "there" if decision.render_gpu == decision.gpu else f"on nvidia-smi {decision.render_gpu.index}"
    egl = "" if decision.egl is None else f" (EGL {decision.egl.index})"
    renders = f"renders {where} through {decision.renderer}{egl}"
    if decision.render == "none":
        renders = "no rendering device is set"
    why = f"--gpu {gpu} was asked for" if gpu not in (None, "auto") else decision.reason
    return f"{computes} {renders}, because {why.partition(', because ')[2] or why}"
