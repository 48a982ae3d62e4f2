"""Plan the variables of a program from its command line and the options of ``rl-ext run``."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_ext_core.devices.cuda import MASK, Machine, cuda_order, strip_hidden_index
from rl_ext_core.devices.decide import Request, decide
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import Inventory
from rl_ext_core.devices.launchers import Picker, find_rank_variable
from rl_ext_core.devices.renderers import installed_renderers
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError

# Programs that start the training processes. A variable that they inherit would be the same in all of them.
_LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun"),
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
)
_PER_RANK = "torchrun --no-python --nproc-per-node=4 rl-ext run --per-rank -- python train.py"


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
