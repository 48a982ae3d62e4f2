"""CUDA_DEVICE_ORDER, and the ranks that launchers give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ext_core.devices import _picks
from rl_ext_core.devices._mask import MASK, ORDER
from rl_ext_core.devices._picks import LOCAL_RANK, SLURM_RANK
from rl_ext_core.devices.checks._base import mistake, named, unquoted
from rl_ext_core.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices.checks._base import Mistake, Situation

_BY_PCI = "PCI_BUS_ID"
_BY_SPEED = "FASTEST_FIRST"


def find_order(situation: Situation) -> Iterator[Mistake]:
    """Find orders that CUDA does not know, and numbers that are not nvidia-smi's."""
    value = situation.environ.get(ORDER)
    if value is not None and value.strip() and value not in (_BY_PCI, _BY_SPEED):
        meant = _BY_SPEED if "FAST" in value.upper() else _BY_PCI
        effect = f"CUDA does not know it and counts the fastest first{_first(situation)}"
        yield mistake(situation, ORDER, effect, {ORDER: meant}, "error" if _unlike(situation) else "warning")
        return
    # A mask of UUIDs does not count; and who writes FASTEST_FIRST means it.
    by_name = situation.environ.get(MASK, "").startswith(("GPU-", "MIG-"))
    if value == _BY_PCI or by_name or not _unlike(situation):
        return
    if situation.inventory.fastest_first is None:
        effect = (
            "the GPUs differ, CUDA counts the fastest first, and which one that is could not be found out, so that "
            "resolve() refuses to guess which GPU is cuda:0"
        )
        yield mistake(situation, ORDER, effect, {ORDER: _BY_PCI})
    elif value != _BY_SPEED:
        effect = f"the GPUs differ, and CUDA counts the fastest first{_first(situation)}"
        yield mistake(situation, ORDER, effect, {ORDER: _BY_PCI}, "warning")


def _unlike(situation: Situation) -> bool:
    """Tell whether CUDA's default order is another one than nvidia-smi's, or unknown."""
    inventory = situation.inventory
    return bool(inventory.gpus) and inventory.fastest_first != tuple(gpu.uuid for gpu in inventory.gpus)


def _first(situation: Situation) -> str:
    order = situation.inventory.fastest_first
    first = next((gpu for gpu in situation.inventory.gpus if order and gpu.uuid == order[0]), None)
    return f": number 0 is {named(first)}" if first and first.index else ""


def find_rank(situation: Situation) -> Iterator[Mistake]:
    """Find ranks that are none, or that stand for a GPU which is not visible."""
    name = next((name for name in (LOCAL_RANK, SLURM_RANK) if name in situation.environ), None)
    if name is None:
        return
    value = situation.environ[name]
    if not _picks.is_rank(value):
        text = unquoted(value)
        meant = text if _picks.is_rank(text) else None
        effect = f'{value!r} is no rank: int(os.environ["{name}"]) and resolve("auto") refuse it'
        yield mistake(situation, name, effect, {name: meant})
    elif situation.visible is not None and situation.visible.uuids and not situation.machine.torch_without_cuda:
        yield from _beyond(name, int(value), situation)


def _beyond(name: str, rank: int, situation: Situation) -> Iterator[Mistake]:
    visible = situation.machine.visible
    try:
        _picks.pick(_picks.Picker(), visible, situation.inventory, situation.environ)
    except DeviceUnavailableError:
        count = len(visible.uuids)
        effect = (
            f"it asks for cuda:{rank}, and torch sees {count} GPU{'' if count == 1 else 's'} counted from 0: "
            f'torch.cuda.set_device({rank}) ends in "CUDA error: invalid device ordinal"'
        )
        line = f"torchrun --nproc-per-node={count} train.py"
        if name == SLURM_RANK:
            line = f"srun --ntasks-per-node={count} python train.py"
        yield mistake(situation, name, effect, line, then={name: "0"})
