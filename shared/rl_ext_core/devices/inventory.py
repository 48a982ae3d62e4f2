"""GPUs and EGL devices of a machine, each with its number in every numbering.

nvidia-smi numbers GPUs by PCI address, CUDA by speed and under a mask, EGL in the driver's order. The UUID identifies a
GPU in all of them. NVML reports the GPUs, and a probe in a subprocess reports EGL's order. CUDA is never initialized
here, because a process that has initialized CUDA can no longer fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rl_ext_core._system import after_fork
from rl_ext_core.devices import _probe


@dataclass(frozen=True)
class Gpu:
    """One GPU, with its name in each numbering that does not depend on environment variables.

    :param uuid: ``GPU-<uuid>``, which never changes
    :param name: name of the model
    :param pci: PCI address, ``<domain>:<bus>:<device>.<function>`` in lower-case hexadecimal digits
    :param index: index in nvidia-smi, which orders GPUs by PCI address
    :param memory_total: bytes; 0 if the driver does not report it, as for a GPU that shares the CPU's memory
    :param memory_free: bytes when the inventory was read; 0 if the driver does not report it
    :param mig: UUIDs (``MIG-<uuid>``) of its MIG slices; empty if MIG is off

    >>> from rl_ext_core.devices import Inventory
    >>> [gpu.name for gpu in Inventory.current().gpus]  # doctest: +SKIP
    ['NVIDIA H100', 'NVIDIA H100']
    """

    uuid: str
    name: str
    pci: str
    index: int
    memory_total: int
    memory_free: int
    mig: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.uuid} (nvidia-smi {self.index})"


@dataclass(frozen=True)
class EglDevice:
    """One device of EGL, as listed by ``eglQueryDevicesEXT``, which ignores ``CUDA_VISIBLE_DEVICES``.

    :param index: index in EGL's order
    :param software: whether it is Mesa's renderer on the CPU (llvmpipe)
    :param uuid: UUID of its GPU; None for a software device, or if the driver does not report it
    :param drm: its render node, ``/dev/dri/renderD<n>``, or None
    :param cuda: whether the driver relates it to a CUDA device (``EGL_NV_device_cuda``)

    >>> from rl_ext_core.devices import EglDevice
    >>> EglDevice(index=0, software=True).uuid is None
    True
    """

    index: int
    software: bool
    uuid: str | None = None
    drm: str | None = None
    cuda: bool = False


@dataclass(frozen=True)
class Inventory:
    """A machine's GPUs, EGL devices and installed renderers, from which :func:`resolve` decides.

    ``Inventory.current()`` reads this machine.

    :param gpus: GPUs in nvidia-smi's order
    :param egl: EGL's devices in its order; None if EGL was not queried
    :param fastest_first: UUIDs in CUDA's default order; None if it is unknown
    :param versions: versions of torch and the renderers, and ``torch.cuda``: the CUDA version that torch was built
        for, empty for a build without CUDA
    :param osmesa: whether OSMesa's library is installed; None if EGL was not queried
    :param nvml_error: why NVML failed, or None
    :param egl_error: why EGL failed, or None
    :param unlisted: number of CUDA devices that torch finds although NVML fails, as on ROCm and embedded boards

    >>> from rl_ext_core.devices import Inventory, resolve
    >>> decision = resolve("auto", inventory=Inventory.current())
    """

    gpus: tuple[Gpu, ...] = ()
    egl: tuple[EglDevice, ...] | None = None
    fastest_first: tuple[str, ...] | None = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    osmesa: bool | None = None
    nvml_error: str | None = None
    egl_error: str | None = None
    unlisted: int = 0

    @classmethod
    def current(cls, *, egl: bool = True, refresh: bool = False) -> Inventory:
        """Read the inventory of this machine. It is cached for the life of the process.

        :param egl: whether to query EGL too, in a subprocess
        :param refresh: whether to read again, for example to update the free memory
        :return: the inventory; without GPUs, ``gpus`` is empty and ``nvml_error`` says why
        """
        global _cached_inventory
        with _lock:
            if _cached_inventory is None or refresh:
                _cached_inventory = _read_inventory()
            if egl and _cached_inventory.egl is None:
                _cached_inventory = _add_egl_devices(_cached_inventory)
            return _cached_inventory

    def gpu(self, uuid: str) -> Gpu:
        """Return the GPU with this complete UUID, which must exist."""
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def egl_of(self, uuid: str) -> EglDevice | None:
        """Return the EGL device that renders on the GPU with this UUID; None if EGL does not list it."""
        return next((device for device in self.egl or () if device.uuid == uuid), None)


_lock = threading.Lock()
_cached_inventory: Inventory | None = None

# Another thread may hold the lock when this process forks, and the child could never acquire it.
after_fork(lambda: globals().update(_lock=threading.Lock()))


def _read_inventory() -> Inventory:
    """Read this machine's GPUs and package versions, but not EGL's devices."""
    versions = dict(installed_versions())
    try:
        gpus = read_gpus()
    except NvmlUnavailableError as error:
        # The query may start CUDA, so torch is asked only if NVML fails and torch is built for a GPU.
        unlisted = importlib.import_module("torch").cuda.device_count() if versions.get("torch.cuda") else 0
        return Inventory(versions=versions, nvml_error=str(error), unlisted=int(unlisted))
    order = tuple(gpu.uuid for gpu in gpus)
    if len({gpu.name for gpu in gpus}) > 1:
        # CUDA counts the fastest GPU first, and equal GPUs by PCI address. So it is queried only if the GPUs differ.
        order = tuple(_probe.query_driver("cuda").get("uuids", ()))
    fastest_first = order if len(order) == len(gpus) else None
    return Inventory(gpus=gpus, versions=versions, fastest_first=fastest_first)


def _add_egl_devices(inventory: Inventory) -> Inventory:
    """Return a copy of an inventory that contains EGL's devices, or EGL's error."""
    result = {"osmesa": False, "devices": [], **_probe.query_driver("egl")}
    devices = tuple(_match_egl_device(entry, inventory.gpus) for entry in result["devices"])
    return dataclasses.replace(inventory, egl=devices, osmesa=result["osmesa"], egl_error=result.get("failure"))


def _match_egl_device(entry: Mapping[str, Any], gpus: Sequence[Gpu]) -> EglDevice:
    """Find the GPU of an EGL device by its UUID, or its CUDA ordinal in PCI order. Mesa's devices have neither."""
    uuid = next((gpu.uuid for gpu in gpus if gpu.uuid == entry["uuid"]), None)
    ordinal = entry["cuda"]
    counted = () if any(gpu.mig for gpu in gpus) else gpus  # next to a MIG slice, CUDA counts no other GPU
    if uuid is None and ordinal is not None and 0 <= ordinal < len(counted):
        uuid = counted[ordinal].uuid
    return EglDevice(
        index=entry["index"], software=entry["software"], uuid=uuid, drm=entry["drm"], cuda=ordinal is not None
    )


class NvmlUnavailableError(Exception):
    """Raised if NVML cannot be queried."""


@contextlib.contextmanager
def nvml_session() -> Iterator[types.ModuleType]:
    """Initialize NVML within a ``with`` block. It is shut down at the end, so that the process may fork."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise NvmlUnavailableError('the package nvidia-ml-py is not installed: pip install "nvidia-ml-py"') from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NvmlUnavailableError("no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)") from error
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(f"the NVIDIA driver refused a query: {error}") from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_gpus() -> tuple[Gpu, ...]:
    """Read all GPUs and their present free memory, in nvidia-smi's order, without CUDA and its mask."""
    with nvml_session() as nvml:
        count = nvml.nvmlDeviceGetCount()
        return tuple(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index) for index in range(count))


def _read_gpu(nvml: types.ModuleType, handle: Any, index: int) -> Gpu:
    total, free = 0, 0
    with contextlib.suppress(nvml.NVMLError_NotSupported):  # the GPU shares the CPU's memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    return Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        pci=pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
        index=index,
        memory_total=total,
        memory_free=free,
        mig=_read_mig_slices(nvml, handle),
    )


def _read_mig_slices(nvml: types.ModuleType, handle: Any) -> tuple[str, ...]:
    """Return the UUIDs of a GPU's MIG slices. GPUs without MIG answer with an error."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return ()
    found = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):  # indices between slices may be unused
            slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found.append(nvml.nvmlDeviceGetUUID(slice_))
    return tuple(found)


def pci_address(bus_id: str) -> str:
    """Convert NVML's ``00000000:3B:00.0`` to Linux's notation, ``0000:3b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


@cache
def installed_versions() -> dict[str, str]:
    """Return what :func:`rl_ext_core.devices._probe.read_versions` returns, read once per process."""
    return _probe.read_versions()
