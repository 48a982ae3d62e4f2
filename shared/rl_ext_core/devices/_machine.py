"""The machine that a decision is made for: inventory and variables, each read when it is needed first."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING

from rl_ext_core.devices import _mask
from rl_ext_core.devices._mask import MASK, Visible
from rl_ext_core.devices._renderers import EglWorld
from rl_ext_core.devices.inventory import Gpu, Inventory
from rl_ext_core.errors import DeviceConflictError, DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Machine:
    """This machine, or another one whose inventory is given.

    :param inventory: None for this machine's
    :param environ: the variables that are in force
    """

    def __init__(self, inventory: Inventory | None, environ: Mapping[str, str]) -> None:
        self._given = inventory
        self.environ = environ

    @cached_property
    def inventory(self) -> Inventory:
        """GPUs and versions; EGL's devices only if they are known already."""
        return Inventory.current(egl=False) if self._given is None else self._given

    @cached_property
    def with_egl(self) -> Inventory:
        """The inventory with EGL's devices."""
        return Inventory.current() if self._given is None else self._given

    @cached_property
    def visible(self) -> Visible:
        """What CUDA shows to a process with these variables.

        :raises DeviceUnavailableError: the mask counts in an order that nobody knows
        :raises DeviceConflictError: torch has started CUDA under another mask
        """
        visible = _mask.visible(self.inventory, self.environ)
        started = None if self._given is not None else _started_uuids()
        if started is not None and self.inventory.gpus and not visible.mig and started != visible.uuids:
            raise DeviceConflictError(
                f"{MASK}={self.environ.get(MASK)!r} shows {len(visible.uuids)} GPUs, but torch started CUDA in this "
                f"process with {len(started)}, other ones or another order: the variable was changed afterwards. "
                f"Set {MASK} before the program starts"
            )
        return visible

    @property
    def world(self) -> EglWorld:
        """What a renderer finds when it asks EGL."""
        try:
            visible = self.visible.uuids
        except DeviceUnavailableError:
            visible = None  # most rules need no CUDA
        return EglWorld(self.with_egl.egl or (), visible)

    @cached_property
    def unlisted(self) -> int:
        """Count CUDA devices where NVML does not answer though torch is built for a GPU: ROCm, embedded boards.

        Only then is torch asked, which may start CUDA.
        """
        inventory = self.inventory
        if self._given is not None or inventory.nvml_error is None or not inventory.versions.get("torch.cuda"):
            return 0
        import torch

        return int(torch.cuda.device_count())

    def gpu(self, ordinal: int) -> Gpu:
        """Give the GPU that torch calls ``cuda:<ordinal>``."""
        return self.inventory.gpu(self.visible.uuids[ordinal])

    @property
    def count(self) -> int:
        """How many CUDA devices torch finds."""
        return len(self.visible.uuids) or self.unlisted

    def why_none(self) -> str:
        """Say why torch finds no CUDA device, as the end of a sentence."""
        versions = self.inventory.versions
        if "torch" in versions and not versions.get("torch.cuda"):
            return f"the installed torch {versions['torch']} is built without CUDA"
        mask = _mask.mask_of(self.environ)
        if mask is not None and (self.inventory.gpus or not self.inventory.nvml_error):
            return f"{MASK}={mask!r} shows none{f': {self.visible.ended}' if self.visible.ended and mask else ''}"
        return self.inventory.nvml_error or "NVML lists no GPU on this machine"

    @property
    def torch_without_cuda(self) -> bool:
        """Whether torch is installed in a build for the CPU."""
        versions = self.inventory.versions
        return "torch" in versions and not versions.get("torch.cuda")


def _started_uuids() -> tuple[str, ...] | None:
    """Ask a torch that has started CUDA what it sees. None if it has not, or is too old to tell UUIDs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not all(hasattr(device, "uuid") for device in devices):
        return None
    return tuple(f"GPU-{device.uuid}" for device in devices)
