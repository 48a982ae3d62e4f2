"""Pick one of the visible GPUs for ``"auto"``: by rank, worker or free memory.

Sources: torchrun's "Environment Variables", the manuals of Open MPI's ``mpirun`` and MPICH's Hydra, and ``man srun``
(``--gpu-bind``, ``--tres-bind``, ``--gpus-per-task``, ``--ntasks-per-gpu``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _cuda
from rl_ext_core.devices._cuda import MASK, Machine
from rl_ext_core.devices.inventory import NvmlUnavailableError, read_gpus
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

Pick = Literal["rank", "free-memory"]
LOCAL_RANK = "LOCAL_RANK"
SLURM_RANK = "SLURM_LOCALID"
# Open MPI, MVAPICH2, Intel MPI and MPICH (Hydra), Cray and other PMI launchers.
MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
# A process inherits the variables of all launchers around it, of which the innermost one is used. torchrun runs inside
# mpirun or srun, and mpirun inside a batch script, where SLURM_LOCALID is 0.
RANK_VARIABLES = (LOCAL_RANK, *MPI_RANK_VARIABLES, SLURM_RANK)

_TORCHRUN = "GROUP_RANK"  # only torchrun sets it
_RAY = "RAY_JOB_ID"
_GPU_BIND, _TRES_BIND, _TASKS_PER_GPU = "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_NTASKS_PER_GPU"
_BINDINGS = ("closest", "single", "per_task", "map", "map_gpu", "mask", "mask_gpu")


@dataclass(frozen=True)
class Picker:
    """Rule by which ``"auto"`` picks a GPU.

    :param pick: rule to use if neither ``rank`` nor ``worker`` is given
    :param rank: index of this process among the training processes of this machine
    :param worker: index of this environment worker, from 0; worker ``i`` takes visible GPU ``i`` modulo their number
    """

    pick: Pick = "rank"
    rank: int | None = None
    worker: int | None = None

    def __post_init__(self) -> None:
        if self.pick not in ("rank", "free-memory"):
            raise InvalidArgumentError(
                f'pick={self.pick!r} is not valid: expected "rank" or "free-memory". Use pick="rank"'
            )
        for name in ("rank", "worker"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidTypeError(
                    f"{name}={value!r} is not an index: expected an int from 0. Use {name}=0 for the first"
                )
            if value is not None and value < 0:
                raise InvalidArgumentError(
                    f"{name}={value!r} is negative: expected an int from 0. Use {name}=0 for the first"
                )

    @property
    def uses_launcher_rank(self) -> bool:
        """Whether the rank that a launcher sets selects the GPU."""
        return self.pick == "rank" and self.rank is None and self.worker is None


def pick(picker: Picker, machine: Machine) -> tuple[int, str]:
    """Pick one of the visible GPUs, of which there must be at least one.

    :return: the torch ordinal, and the reason as the end of a sentence
    :raises DeviceUnavailableError: If the rank is beyond the visible GPUs.
    :raises InvalidArgumentError: If a launcher's variable is not a rank.
    """
    count = len(machine.visible.uuids)
    if picker.worker is not None:
        ordinal = picker.worker % count
        return ordinal, f"worker {picker.worker} takes GPU {ordinal} of {count} visible in turn"
    if picker.rank is not None:
        return _pick_by_given_rank(picker.rank, f"rank={picker.rank}", machine)
    if picker.pick == "free-memory":
        return _pick_by_free_memory(machine)
    name = find_rank_variable(machine.environ)
    if name is not None:
        return _pick_by_launcher_rank(name, machine)
    current = _cuda.torch_current_device()
    if current is not None and current < count:
        return current, "it is torch's current device"
    return 0, f"it is the first of {count} visible" if count > 1 else "it is the only one visible"


# Ranks of launchers


def find_rank_variable(environ: Mapping[str, str]) -> str | None:
    """Return the rank variable of the innermost launcher, or None if there is no launcher."""
    return next((name for name in RANK_VARIABLES if name in environ), None)


def is_rank(value: str) -> bool:
    """Return whether the value of a launcher's variable is an index from 0."""
    return value.isascii() and value.isdigit() and len(value) < 10


def _parse_rank(environ: Mapping[str, str], name: str) -> int | None:
    """Return the rank in a launcher's variable; None if its value is not an index."""
    value = environ.get(name, "")
    return int(value) if is_rank(value) else None


def _variables_with_other_ranks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the rank variables that differ from the innermost launcher's."""
    found = [name for name in RANK_VARIABLES if name in environ]
    return tuple(outer for outer in found if _parse_rank(environ, outer) != _parse_rank(environ, found[0]))


def find_rank_contradiction(machine: Machine) -> tuple[str, str] | None:
    """Find a rank variable that was copied into several processes, so that they would share a GPU.

    ``export LOCAL_RANK=$SLURM_LOCALID`` in a batch script gives every task the 0 of the script. A launcher that runs
    inside another one is not reported. It leaves the outer rank at 0, or sets more variables, as torchrun and Ray do.

    :return: the variable in use and the one that contradicts it, or None
    """
    environ, name = machine.environ, find_rank_variable(machine.environ)
    nested = _TORCHRUN in environ or _RAY in environ
    if name is None or nested or _parse_rank(environ, name) is None or len(machine.visible.uuids) < 2:
        return None
    outer = next((outer for outer in _variables_with_other_ranks(environ) if _parse_rank(environ, outer)), None)
    return None if outer is None else (name, outer)


def _pick_by_launcher_rank(name: str, machine: Machine) -> tuple[int, str]:
    """Return the ordinal of the GPU for the rank that a launcher set, and the reason."""
    environ = machine.environ
    rank = _parse_rank(environ, name)
    if rank is None:
        raise InvalidArgumentError(
            f"{name}={environ[name]!r} is not a rank: expected an index from 0. Use `unset {name}`, or {name}=0"
        )
    ordinal, why = _pick_by_given_rank(rank, f"{name}={environ[name]!r}", machine)
    others = " and ".join(f"{outer}={environ[outer]!r}" for outer in _variables_with_other_ranks(environ))
    return ordinal, f"{why} ({name} comes before {others})" if others else why


def _pick_by_given_rank(rank: int, source: str, machine: Machine) -> tuple[int, str]:
    """Return the ordinal of the GPU for a rank, and the reason; raise if there is no such GPU."""
    count = len(machine.visible.uuids)
    if rank < count:
        return rank, f"{source} is this process's place on this machine"
    why = _explain_high_rank(rank, count, machine.environ)
    if why is not None:
        return rank % count, f"{source}, and {why}"
    raise DeviceUnavailableError(_high_rank_error(rank, source, machine))


def _explain_high_rank(rank: int, count: int, environ: Mapping[str, str]) -> str | None:
    """Return why a rank beyond the visible GPUs is valid, or None if it is not.

    It is valid if each process sees GPUs of its own, counted from 0.
    """
    if _TORCHRUN in environ and LOCAL_RANK in environ:
        return None  # torchrun's processes share the visible GPUs
    same = [name for name in RANK_VARIABLES if _parse_rank(environ, name) == rank]
    if SLURM_RANK in same or SLURM_RANK not in environ:
        per_gpu = _parse_rank(environ, _TASKS_PER_GPU) or 0
        if count > 1 and count <= rank < count * per_gpu:
            return f"Slurm starts {per_gpu} tasks per GPU ({_TASKS_PER_GPU}={environ[_TASKS_PER_GPU]!r})"
        binding = _find_slurm_binding(environ)
        if binding is not None:
            gpus = "a GPU" if count == 1 else "GPUs"
            return f"Slurm shows each task {gpus} of its own ({binding}={environ[binding]!r})"
    mask = environ.get(MASK)
    if mask is None or count > 1:
        return None
    # Under MPI and Ray, a script or an actor sets the mask. Slurm and torchrun have their own options for it.
    by_script = any(name in same for name in MPI_RANK_VARIABLES) or (SLURM_RANK in same and mask == str(rank))
    return f"{MASK}={mask!r} shows this process one GPU" if by_script or _RAY in environ else None


def _find_slurm_binding(environ: Mapping[str, str]) -> str | None:
    """Return the variable with which Slurm binds tasks to GPUs, or None if each task sees all GPUs of the job."""
    explicit = _find_explicit_binding(environ)
    if explicit is not None:
        name, kind = explicit
        return name if kind in _BINDINGS else None
    for name in ("SLURM_GPUS_PER_TASK", _TASKS_PER_GPU):
        if environ.get(name):
            return name
    # Slurm sets it for --cpus-per-task too, as "cpu=8".
    if "gpu" in environ.get("SLURM_TRES_PER_TASK", ""):
        return "SLURM_TRES_PER_TASK"
    return "SLURM_ACCEL_BIND_TYPE" if "g" in environ.get("SLURM_ACCEL_BIND_TYPE", "") else None


def _find_explicit_binding(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that binds tasks to GPUs and its kind, or None.

    The kind of ``gres/gpu:verbose,single:2`` is ``"single"``.
    """
    entries = re.split(r"\+", environ.get(_TRES_BIND, ""))
    found = [re.sub(r"^gres[/:]gpu:", "", entry) for entry in entries if re.match(r"gres[/:]gpu:", entry)]
    for name, value in (*((_TRES_BIND, text) for text in found), (_GPU_BIND, environ.get(_GPU_BIND, ""))):
        kind = re.sub(r"^(v|verbose)(,|$)", "", value.strip().lower()).partition(":")[0]
        if kind:
            return name, kind
    return None


# Ranks that are beyond the visible GPUs


def mig_slice_of_rank(machine: Machine) -> str | None:
    """Return the MIG slice for this process's rank, or None if there is none."""
    name = find_rank_variable(machine.environ)
    rank = 0 if name is None else _parse_rank(machine.environ, name)
    slices = _visible_mig_slices(machine)
    return slices[rank] if rank is not None and rank < len(slices) else None


def _visible_mig_slices(machine: Machine) -> list[str]:
    """Return the UUIDs of the MIG slices that this process may use."""
    mask, inventory = machine.environ.get(MASK), machine.inventory
    if not machine.visible.mig:
        return []
    if mask is None:
        return [slice_ for gpu in inventory.gpus for slice_ in gpu.mig]
    if not mask.startswith("MIG-"):
        return list(machine.gpu(0).mig)
    return [entry for entry in mask.split(",") if _cuda.visible(inventory, {MASK: entry}).mig]


def variables_for_high_rank(rank: int, machine: Machine) -> dict[str, str] | None:
    """Return variables that give a rank beyond the visible GPUs its own MIG slice, or None if there is none."""
    slices = _visible_mig_slices(machine)
    return {MASK: slices[rank], LOCAL_RANK: "0"} if rank < len(slices) else None


def launch_command(rank: int, machine: Machine) -> str:
    """Return the command that starts one process per GPU, with the launcher that set the rank."""
    environ = machine.environ
    count = max(len(machine.visible.uuids), len(_visible_mig_slices(machine)))
    name = next((name for name in RANK_VARIABLES if _parse_rank(environ, name) == rank), LOCAL_RANK)
    if name == SLURM_RANK:
        return f"srun --ntasks-per-node={count} python train.py"
    if name == MPI_RANK_VARIABLES[0]:
        return f"mpirun --map-by ppr:{count}:node python train.py"
    if name in MPI_RANK_VARIABLES:
        return f"mpiexec -ppn {count} python train.py"
    return f"torchrun --nproc-per-node={count} train.py"


def _high_rank_error(rank: int, source: str, machine: Machine) -> str:
    """Return the error text for a rank that is beyond the visible GPUs."""
    environ, count = machine.environ, len(machine.visible.uuids)
    mask = environ.get(MASK)
    shown = "" if mask is None else f" ({MASK}={mask!r})"
    changes = variables_for_high_rank(rank, machine)
    if changes is not None:
        line = f"`export {MASK}={changes[MASK]} {LOCAL_RANK}=0`"
        if source.startswith("rank="):  # the argument, which no variable overrides
            line = f"rank=0 and `export {MASK}={changes[MASK]}`"
        return (
            f"{source} asks for cuda:{rank}: expected 0, because CUDA shows one MIG slice to a process{shown}. "
            f"Use {line} for this process"
        )
    line, more = launch_command(rank, machine), ""
    explicit = _find_explicit_binding(environ)
    if explicit is not None and explicit[1] == "none":
        shown += f", and {explicit[0]}={environ[explicit[0]]!r} shows every task all GPUs of the job"
    elif line.startswith("srun"):
        more = ", or `srun --gpus-per-task=1 python train.py`"
    elif line.startswith("mpi"):
        more = ', or device="cuda:0" for processes that share a GPU'
    elif rank < len(machine.inventory.gpus):
        more = f", or list {_cuda.format_gpu_count(rank + 1)} in {MASK}"
    return (
        f"{source} asks for cuda:{rank}: expected a rank below {count}, because this process sees "
        f"{_cuda.format_gpu_count(count)}{shown}. Use `{line}`{more}"
    )


# Free memory


def _pick_by_free_memory(machine: Machine) -> tuple[int, str]:
    """Return the ordinal of the visible GPU with the most free memory, and the reason."""
    free = {gpu.uuid: gpu.memory_free for gpu in machine.inventory.gpus}
    uuids = machine.visible.uuids
    try:
        # The inventory's free memory is out of date.
        now = {gpu.uuid: gpu.memory_free for gpu in read_gpus()}
    except NvmlUnavailableError:
        now = {}
    if now.keys() == free.keys():
        free = now
    ordinal = max(range(len(uuids)), key=lambda place: free[uuids[place]])
    return ordinal, f"it has the most free memory: {free[uuids[ordinal]] / 2**30:.1f} GiB"
