"""Pick one of the visible GPUs for ``"auto"``: by rank, worker or free memory.

Sources: torchrun's "Environment Variables", the manuals of Open MPI's ``mpirun`` and MPICH's Hydra, and ``man srun``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices.cuda import MASK, Machine, format_gpu_count
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

Pick = Literal["rank", "free-memory"]
LOCAL_RANK = "LOCAL_RANK"
_MPIEXEC = "mpiexec -ppn {} python train.py"  # of MVAPICH2, Intel MPI and MPICH (Hydra), Cray and other PMI launchers
# A process inherits the variables of all launchers around it, of which the innermost one is used. torchrun runs inside
# mpirun or srun, and mpirun inside a batch script, where SLURM_LOCALID is 0. The values start one process per GPU.
_COMMANDS = {
    LOCAL_RANK: "torchrun --nproc-per-node={} train.py",
    "OMPI_COMM_WORLD_LOCAL_RANK": "mpirun --map-by ppr:{}:node python train.py",
    "MV2_COMM_WORLD_LOCAL_RANK": _MPIEXEC,
    "MPI_LOCALRANKID": _MPIEXEC,
    "PMI_LOCAL_RANK": _MPIEXEC,
    "SLURM_LOCALID": "srun --ntasks-per-node={} python train.py",
}
RANK_VARIABLES = tuple(_COMMANDS)


@dataclass(frozen=True)
class Picker:
    """Arguments of :func:`rl_ext_core.devices.resolve` by which ``"auto"`` picks a GPU.

    :param current: torch's current device, or None if torch has not started CUDA
    """

    pick: Pick = "rank"
    rank: int | None = None
    worker: int | None = None
    current: int | None = None

    def __post_init__(self) -> None:
        if self.pick not in ("rank", "free-memory"):
            raise InvalidArgumentError(
                f'pick={self.pick!r} is not valid: expected "rank" or "free-memory". Use pick="rank"'
            )
        for name in ("rank", "worker"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                error = InvalidArgumentError if type(value) is int else InvalidTypeError
                raise error(f"{name}={value!r} is not an index: expected an int from 0. Use {name}=0 for the first")


def pick_gpu(picker: Picker, machine: Machine) -> tuple[int, str]:
    """Pick one of the visible GPUs; return its torch ordinal, and the reason as the end of a sentence."""
    uuids = machine.visible.uuids
    count = len(uuids)
    if picker.worker is not None:
        ordinal = picker.worker % count
        return ordinal, f"worker {picker.worker} takes GPU {ordinal} of {count} visible in turn"
    if picker.rank is not None:
        return _pick_by_rank(picker.rank, f"rank={picker.rank}", machine)
    if picker.pick == "free-memory":
        free = [machine.inventory.gpu(uuid).memory_free for uuid in uuids]
        return free.index(max(free)), f"it has the most free memory: {max(free) / 2**30:.1f} GiB"
    name = find_rank_variable(machine.environ)
    if name is not None:
        source, rank = f"{name}={machine.environ[name]!r}", parse_rank(machine.environ[name])
        if rank is None:
            raise InvalidArgumentError(
                f"{source} is not a rank: expected an index from 0. Use `unset {name}`, or {name}=0"
            )
        return _pick_by_rank(rank, source, machine)
    if picker.current is not None and picker.current < count:
        return picker.current, "it is torch's current device"
    return 0, f"it is the first of {count} visible" if count > 1 else "it is the only one visible"


def find_rank_variable(environ: Mapping[str, str]) -> str | None:
    """Return the rank variable of the innermost launcher, or None if there is no launcher."""
    return next((name for name in RANK_VARIABLES if name in environ), None)


def parse_rank(value: str) -> int | None:
    """Return the rank in a launcher's variable; None if its value is not an index from 0."""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def _pick_by_rank(rank: int, source: str, machine: Machine) -> tuple[int, str]:
    """Return the ordinal of the GPU for a rank, and the reason; raise if there is no such GPU."""
    if rank < len(machine.visible.uuids):
        return rank, f"{source} is this process's place on this machine"
    if _has_own_gpu(rank, machine):
        return 0, f"{source}, and {MASK}={machine.environ[MASK]!r} shows this process one GPU of its own"
    count, mask = len(machine.visible.uuids), machine.environ.get(MASK)
    raise DeviceUnavailableError(
        f"{source} asks for cuda:{rank}: expected a rank below {count}, because this process sees "
        f"{format_gpu_count(count)}{'' if mask is None else f' ({MASK}={mask!r})'}. "
        f'Use `{launch_command(rank, machine)}`, or device="cuda:0" for processes that share a GPU or see one each'
    )


def _has_own_gpu(rank: int, machine: Machine) -> bool:
    """Return whether a launcher shows one GPU to a process whose rank is beyond it."""
    # Slurm, MPI scripts and Ray set the mask of each process. torchrun's processes share the visible GPUs.
    environ = machine.environ
    if len(machine.visible.uuids) != 1 or MASK not in environ or {LOCAL_RANK, "GROUP_RANK"} <= environ.keys():
        return False
    if machine.visible.mig and machine.visible.stop_reason:
        return False  # the mask has several slices, of which CUDA shows the first one to all processes
    same = [name for name in RANK_VARIABLES if parse_rank(environ.get(name, "")) == rank]
    return "RAY_JOB_ID" in environ or any(name != LOCAL_RANK for name in same)


def launch_command(rank: int, machine: Machine) -> str:
    """Return the command that starts one process per GPU, with the launcher that set the rank."""
    environ = machine.environ
    name = next((name for name in RANK_VARIABLES if parse_rank(environ.get(name, "")) == rank), LOCAL_RANK)
    return _COMMANDS[name].format(len(machine.visible.uuids))
