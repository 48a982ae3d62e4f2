"""Which of the visible GPUs ``"auto"`` means: by the rank, by the worker, by free memory, or the current one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _nvml
from rl_ext_core.devices._mask import MASK, mask_of
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ext_core.devices._mask import Visible
    from rl_ext_core.devices.inventory import Inventory

Pick = Literal["rank", "free-memory"]
PICKS = ("rank", "free-memory")
LOCAL_RANK = "LOCAL_RANK"
SLURM_RANK = "SLURM_LOCALID"
# Where one of these is set, SLURM shows each task GPUs of its own.
_SLURM_OWN_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")


@dataclass(frozen=True)
class Picker:
    """How ``"auto"`` chooses.

    :param pick: the rule where neither ``rank`` nor ``worker`` is given
    :param rank: this process among those of this machine that train together
    :param worker: this environment worker, counted from 0; workers share GPUs in turn
    """

    pick: Pick = "rank"
    rank: int | None = None
    worker: int | None = None

    def __post_init__(self) -> None:
        if self.pick not in PICKS:
            raise InvalidArgumentError(f'pick={self.pick!r} is none of "rank", "free-memory". Write pick="rank"')
        for name in ("rank", "worker"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidTypeError(f"{name}={value!r} is not an index. Write {name}=0 for the first")
            if value is not None and value < 0:
                raise InvalidArgumentError(f"{name}={value!r} is negative. Write {name}=0 for the first")


def pick(picker: Picker, visible: Visible, inventory: Inventory, environ: Mapping[str, str]) -> tuple[int, str]:
    """Choose among the visible GPUs, of which there is at least one.

    :return: the torch ordinal, and the reason as the end of a sentence
    :raises DeviceUnavailableError: the rank is beyond the visible GPUs
    :raises InvalidArgumentError: a launcher's variable holds no rank
    """
    count = len(visible.uuids)
    if picker.worker is not None:
        ordinal = picker.worker % count
        return ordinal, f"worker {picker.worker} takes GPU {ordinal} of the {count} visible ones in turn"
    if picker.rank is not None:
        return _of_rank(picker.rank, f"rank={picker.rank}", count, inventory, environ)
    if picker.pick == "free-memory":
        return _most_free(visible, inventory)
    launched = _launched_rank(environ)
    if launched is not None:
        return _of_rank(*launched, count, inventory, environ)
    current = _current_of_torch()
    if current is not None and current < count:
        return current, "it is torch's current device"
    return 0, f"it is the first of {count} visible" if count > 1 else "it is the only one visible"


def _launched_rank(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Read the rank that a launcher gave: torchrun's or Ray Train's, then SLURM's."""
    for name in (LOCAL_RANK, SLURM_RANK):
        value = environ.get(name)
        if value is None:
            continue
        if not is_rank(value):
            raise InvalidArgumentError(
                f"{name}={value!r} holds no rank: expected an index from 0. Write: unset {name}, or {name}=0"
            )
        return int(value), f"{name}={value!r}"
    return None


def is_rank(value: str) -> bool:
    """Tell whether a launcher's variable holds an index from 0."""
    return value.isascii() and value.isdigit() and len(value) < 10


def _of_rank(rank: int, source: str, count: int, inventory: Inventory, environ: Mapping[str, str]) -> tuple[int, str]:
    if rank < count:
        return rank, f"{source} is this process's place on this machine"
    own = next((name for name in _SLURM_OWN_GPUS if environ.get(name)), None)
    if count == 1 and own:
        return 0, f"{source}, and SLURM shows each task its own GPU ({own}={environ[own]!r})"
    mask = mask_of(environ)
    start = f"srun --ntasks-per-node={count}" if source.startswith(SLURM_RANK) else f"torchrun --nproc-per-node={count}"
    more = f", or let {MASK} name {rank + 1} GPUs" if rank < len(inventory.gpus) else ""
    raise DeviceUnavailableError(
        f"{source} asks for GPU {rank}, but this process sees {count}, counted from 0"
        f"{'' if mask is None else f' ({MASK}={mask!r})'}. Start {count} process{'es' if count > 1 else ''} a machine: "
        f"{start}{more}"
    )


def _most_free(visible: Visible, inventory: Inventory) -> tuple[int, str]:
    free = {gpu.uuid: gpu.memory_free for gpu in inventory.gpus}
    try:
        # Free memory is the one thing that an inventory does not keep true.
        now = _nvml.free_memory()
    except _nvml.UnavailableError:
        now = {}
    if now.keys() == free.keys():
        free = now
    ordinal = max(range(len(visible.uuids)), key=lambda place: free[visible.uuids[place]])
    return ordinal, f"it has the most free memory: {free[visible.uuids[ordinal]] / 2**30:.1f} GiB"


def _current_of_torch() -> int | None:
    """Give the current CUDA device if this process uses CUDA already; asking must not start it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())
