"""The GPUs that CUDA shows to a process.

``CUDA_VISIBLE_DEVICES`` is read by CUDA's rules, as torch replicates them. Sources:
``torch.cuda._parse_visible_devices`` and ``_transform_uuid_to_ordinals``, to which the tests compare this module, and
the CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rl_ext_core.devices.inventory import Gpu, Inventory
from rl_ext_core.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
INDEX = "MUJOCO_EGL_DEVICE_ID"


@dataclass(frozen=True)
class VisibleGpus:
    """GPUs that CUDA shows to a process.

    :param uuids: UUIDs by torch ordinal
    :param stop_reason: why some entries of the mask have no effect; None if all of them have
    :param mig: UUID of the MIG slice that is the only device, or None; its GPU is in ``uuids``
    """

    uuids: tuple[str, ...]
    stop_reason: str | None = None
    mig: str | None = None


def visible(inventory: Inventory, environ: Mapping[str, str]) -> VisibleGpus:
    """Apply the mask and the device order in ``environ`` to the machine's GPUs."""
    mask = environ.get(MASK)
    mask = mask and strip_hidden_index(mask, environ)
    if mask is not None and mask.startswith("MIG-"):
        return _parse_mig_mask(mask, inventory.gpus)
    if mask is not None and mask.startswith("GPU-"):
        shown = _parse_uuid_mask(mask, [gpu.uuid for gpu in inventory.gpus])
    else:
        order = cuda_order(inventory, environ)
        shown = VisibleGpus(order) if mask is None else _parse_numeric_mask(mask, order)
    # CUDA shows only the first MIG slice (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
    slices = {gpu.uuid: gpu.mig[0] for gpu in inventory.gpus if gpu.mig}
    cut = next((uuid for uuid in shown.uuids if uuid in slices), None)
    if cut is None:
        return shown
    reason = f"CUDA shows the first MIG slice of {cut}, {slices[cut]}, and no other device"
    return VisibleGpus((cut,), reason, slices[cut])


def strip_hidden_index(mask: str, environ: Mapping[str, str]) -> str:
    """Return a mask without the ending that :func:`add_hidden_index` has added to it."""
    index = environ.get(INDEX, "")
    return mask.removesuffix(f",-1,{index}") if index.isdigit() else mask


def add_hidden_index(mask: str, index: str) -> str:
    """Return a mask that shows the same GPUs to CUDA, and that contains ``index`` for programs that look for it.

    CUDA stops reading at the first invalid index. Source: the CUDA Programming Guide, whose example ``0,2,-1,1`` shows
    the devices 0 and 2.
    """
    return mask if index in mask else f"{mask},-1,{index}"


def cuda_order(inventory: Inventory, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs in the order in which CUDA counts without a mask; raise if it is unknown."""
    if environ.get(ORDER) == "PCI_BUS_ID":
        return tuple(gpu.uuid for gpu in inventory.gpus)
    if inventory.fastest_first is None:
        raise DeviceUnavailableError(
            f"{ORDER}={environ.get(ORDER)!r} lets CUDA count the fastest GPU first, but the GPUs differ, and the "
            f"fastest is unknown. Use `export {ORDER}=PCI_BUS_ID`"
        )
    return inventory.fastest_first


def _parse_numeric_mask(mask: str, order: tuple[str, ...]) -> VisibleGpus:
    numbers: list[int] = []
    stop_reason = None
    for entry in mask.split(","):
        number = parse_leading_number(entry.strip())
        if number < 0:
            stop_reason = _bad_number_reason(entry)
            break
        if number in numbers:
            return VisibleGpus((), f"{number} is listed twice, so CUDA shows no device at all")
        numbers.append(number)
    for place, number in enumerate(numbers):
        if number >= len(order):
            numbers, stop_reason = numbers[:place], _bad_number_reason(str(number))
            break
    return VisibleGpus(tuple(order[number] for number in numbers), stop_reason)


def _bad_number_reason(entry: str) -> str:
    return f"CUDA stops reading at {entry!r}, which is not the number of a GPU"


def format_gpu_count(count: int) -> str:
    """Return ``"1 GPU"`` or, for example, ``"4 GPUs"``."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def parse_leading_number(text: str) -> int:
    """Parse the digits before the first other character, as ``strtoul`` does; -1 if there are none."""
    # 18 digits are enough for any machine, and Python refuses to parse thousands.
    match = re.match(r"[+-]?0*\d{0,18}", text)
    digits = match[0] if match else ""
    return int(digits) if digits.strip("+-") else -1


def _parse_uuid_mask(mask: str, uuids: list[str]) -> VisibleGpus:
    """Return the GPUs that CUDA shows for a mask of UUIDs or beginnings of UUIDs."""
    entries: list[str] = []
    stop_reason = None
    for entry in mask.split(","):
        if entry in entries:
            return VisibleGpus((), f"{entry!r} is listed twice, so CUDA shows no device at all")
        if not entry.startswith("GPU-"):
            stop_reason = f"CUDA stops reading at {entry!r}, which is not a UUID like those before it"
            break
        entries.append(entry)
    found: list[str] = []
    for entry in entries:
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        if len(matches) != 1:
            why = f"fits {len(matches)} GPUs" if matches else "fits no GPU"
            return VisibleGpus(tuple(found), f"CUDA stops reading at {entry!r}, which {why}")
        if matches[0] in found:
            return VisibleGpus((), f"{entry!r} names a GPU that is already listed, so CUDA shows no device at all")
        found += matches
    return VisibleGpus(tuple(found), stop_reason)


def _parse_mig_mask(mask: str, gpus: tuple[Gpu, ...]) -> VisibleGpus:
    """Return the GPU of a mask that begins with a MIG slice. CUDA shows only the first entry."""
    entry, _, more = mask.partition(",")
    stop_reason = "CUDA shows one MIG slice to a process, the first" if more else None
    for gpu in gpus:
        # MIG-<uuid> since driver 470; before that MIG-GPU-<uuid of the GPU>/<instance>/<compute instance>.
        if entry in gpu.mig or (gpu.mig and entry.startswith(f"MIG-{gpu.uuid}/")):
            return VisibleGpus((gpu.uuid,), stop_reason, entry)
    return VisibleGpus((), f"CUDA stops reading at {entry!r}, which is not a MIG slice of this machine")


@dataclass(frozen=True)
class Machine:
    """A machine with its environment variables."""

    inventory: Inventory
    environ: Mapping[str, str]

    @cached_property
    def visible(self) -> VisibleGpus:
        """GPUs that CUDA shows to a process with these variables."""
        return visible(self.inventory, self.environ)

    @cached_property
    def shown(self) -> VisibleGpus | None:
        """The same, or None if CUDA's order is unknown."""
        try:
            return self.visible
        except DeviceUnavailableError:
            return None

    @property
    def count(self) -> int:
        """Number of CUDA devices that torch finds."""
        return len(self.visible.uuids) or self.inventory.unlisted

    def gpu(self, ordinal: int) -> Gpu:
        """Return the GPU that torch calls ``cuda:<ordinal>``."""
        return self.inventory.gpu(self.visible.uuids[ordinal])

    def no_device_reason(self) -> str:
        """Return why torch finds no CUDA device, as the end of a sentence."""
        if self.torch_without_cuda:
            return f"the installed torch {self.inventory.versions['torch']} is built without CUDA"
        mask = self.environ.get(MASK)
        if mask is not None and (self.inventory.gpus or not self.inventory.nvml_error):
            reason = f": {self.visible.stop_reason}" if self.visible.stop_reason and mask else ""
            return f"{MASK}={mask!r} shows none{reason}"
        return self.inventory.nvml_error or "NVML lists no GPU on this machine"

    @property
    def torch_without_cuda(self) -> bool:
        """Whether the installed torch is built without CUDA."""
        versions = self.inventory.versions
        return "torch" in versions and not versions.get("torch.cuda")


def find_late_mask(machine: Machine) -> str | None:
    """Return an error text if the mask was changed after torch had started CUDA in this process, else None."""
    torch_uuids = _uuids_seen_by_torch()
    if torch_uuids is None or not machine.inventory.gpus:
        return None
    shown = machine.shown
    if shown is None or shown.mig or torch_uuids == shown.uuids:
        return None
    return (
        f"{MASK}={machine.environ.get(MASK)!r} was changed after torch had started CUDA: it shows "
        f"{format_gpu_count(len(shown.uuids))}, but torch uses {format_gpu_count(len(torch_uuids))} (other "
        f"ones, or in another order). Set {MASK} before the program starts"
    )


def _uuids_seen_by_torch() -> tuple[str, ...] | None:
    """Return the UUIDs that torch sees; None if it has not started CUDA, or is too old to report UUIDs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not all(hasattr(device, "uuid") for device in devices):
        return None
    return tuple(f"GPU-{device.uuid}" for device in devices)


def torch_current_device() -> int | None:
    """Return torch's current CUDA device, or None if torch has not started CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())
