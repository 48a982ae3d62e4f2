"""The GPUs of this machine, each with what every numbering calls it.

nvidia-smi counts by PCI address, CUDA by speed and under a mask, EGL by the driver's own order. The identity that
all of them share is the UUID. NVML tells the GPUs, a probe in a subprocess tells EGL's order; CUDA is never
initialised here, because a process that has done so can no longer fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_ext_core._system import after_fork
from rl_ext_core.devices import _probe
from rl_ext_core.errors import CorruptFileError

__all__ = ["EglDevice", "Gpu", "Inventory"]

_FORMAT = 1
_WSL_DEVICE = Path("/dev/dxg")  # the GPU as WSL shows it, in containers on WSL too
PACKAGES = ("torch", "mujoco", "robosuite", "dm_control", "gymnasium", "pyrender", "sapien")


@dataclass(frozen=True)
class Gpu:
    """One GPU, named as every numbering names it, but for those that depend on variables.

    :param uuid: ``GPU-<uuid>``, the identity that does not change
    :param name: the model's name
    :param pci: PCI address, ``<domain>:<bus>:<device>.<function>`` in lower-case hexadecimal digits
    :param index: what nvidia-smi calls it: its place among the PCI addresses
    :param memory_total: bytes; 0 where the driver does not tell, as for a GPU that shares the CPU's memory
    :param memory_free: bytes, when the inventory was made; 0 likewise
    :param mig: UUIDs (``MIG-<uuid>``) of the slices that it is cut into; empty where MIG is off

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


@dataclass(frozen=True)
class EglDevice:
    """One device as EGL enumerates it (``eglQueryDevicesEXT``), where no mask applies.

    :param index: its place in EGL's order: the number that renderers call raw
    :param software: Mesa's renderer on the CPU (llvmpipe)
    :param uuid: the GPU behind it; None for a software device, and where nothing tells
    :param drm: its render node, ``/dev/dri/renderD<n>``, where it has one
    :param cuda: whether the driver relates it to CUDA (``EGL_NV_device_cuda``)

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
    """What a decision is made from: the machine's GPUs, EGL's devices, and the versions that are installed.

    ``Inventory.current()`` reads this machine, ``Inventory.from_json(text)`` another one that somebody reported.

    :param gpus: in nvidia-smi's order
    :param egl: EGL's devices in its order; None if EGL was not asked
    :param fastest_first: UUIDs in the order that CUDA uses by default; None where it could not be found out
    :param versions: installed packages that matter here, and ``torch.cuda``: the CUDA version that torch was built
        for, empty for a build without
    :param osmesa: whether OSMesa's library is installed; None if EGL was not asked
    :param nvml_error: why NVML told nothing
    :param egl_error: why EGL told nothing
    :param wsl: whether this is Windows's Subsystem for Linux, where NVIDIA's driver has no EGL

    >>> from rl_ext_core.devices import Inventory, resolve
    >>> machine = Inventory.current()
    >>> decision = resolve("auto", inventory=machine)
    >>> Inventory.from_json(machine.to_json()) == machine
    True
    """

    gpus: tuple[Gpu, ...] = ()
    egl: tuple[EglDevice, ...] | None = None
    fastest_first: tuple[str, ...] | None = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    osmesa: bool | None = None
    nvml_error: str | None = None
    egl_error: str | None = None
    wsl: bool = False

    @classmethod
    def current(cls, *, egl: bool = True, refresh: bool = False) -> Inventory:
        """Read this machine's, once per process: what was read is kept.

        :param egl: ask EGL too, in a subprocess
        :param refresh: read again; free memory is as old as the inventory
        :return: the inventory; a machine without GPUs has an empty one that says why
        """
        global _cached_inventory
        with _lock:
            if _cached_inventory is None or refresh:
                _cached_inventory = _read_inventory()
            if egl and _cached_inventory.egl is None:
                _cached_inventory = _add_egl_devices(_cached_inventory)
            return _cached_inventory

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        """Read what :meth:`to_json` wrote, on any machine.

        :param text: JSON
        :return: the inventory
        :raises CorruptFileError: not an inventory, or of a format that this version does not read
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise CorruptFileError(f"this inventory is not of format {_FORMAT}, the one that this version reads")
            # What stands for "not asked" and "not found out" has to be said, not left out.
            for name in ("gpus", "egl", "fastest_first"):
                if name not in data:
                    raise KeyError(name)
            inventory: Inventory = read_record(cls, data, "it")
        except CorruptFileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            detail = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CorruptFileError(
                f"not an inventory: {detail}. Expected what Inventory.current().to_json() wrote"
            ) from error
        return inventory

    def to_json(self) -> str:
        """Write it down for a bug report or a test.

        :return: JSON with sorted keys; it names GPUs and versions, no user and no path
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`to_json` writes, as plain dicts, tuples, numbers and text.

        :return: a new dict
        """
        data = dataclasses.asdict(dataclasses.replace(self, versions=dict(self.versions)))
        return {"format": _FORMAT, **data}

    def gpu(self, uuid: str) -> Gpu:
        """Look a GPU up by its UUID.

        :param uuid: the whole of it
        :return: the GPU
        :raises StopIteration: there is none
        """
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def egl_of(self, uuid: str) -> EglDevice | None:
        """Look up the EGL device that renders on a GPU.

        :param uuid: the GPU's
        :return: the device; None where EGL does not list the GPU, or was not asked
        """
        devices = [device for device in self.egl or () if device.uuid == uuid]
        # Mesa lists the nodes of other drivers' GPUs too, and cannot render on them.
        return next((device for device in devices if device.cuda), devices[0] if devices else None)


def read_record(hint: Any, value: Any, where: str) -> Any:
    """Build what a type hint declares from plain values of JSON, which may hold anything.

    :param hint: a dataclass, or a type that stands in a field of one
    :param value: what JSON gave
    :param where: what it was found in, for the error
    :return: an instance of ``hint``
    :raises TypeError: the value is not what the hint declares
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        unknown = [name for name in value if name not in hints]
        if unknown:
            raise TypeError(f"{where} has no field {unknown[0][:60]!r}")
        return hint(**{name: read_record(hints[name], entry, name) for name, entry in value.items()})  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        for argument in arguments:
            with contextlib.suppress(TypeError):
                return read_record(argument, value, where)
    elif origin is tuple and isinstance(value, list):
        return tuple(read_record(arguments[0], entry, where) for entry in value)
    elif origin is Mapping and isinstance(value, dict):
        return {name: read_record(arguments[1], entry, where) for name, entry in value.items()}
    elif type(value) is hint or (origin is Literal and value in arguments):  # True is no number here
        return value
    raise TypeError(f"{where} holds {str(value)[:60]!r}")


_lock = threading.Lock()
_cached_inventory: Inventory | None = None

# A thread may hold the lock while another one forks.
after_fork(lambda: globals().update(_lock=threading.Lock()))


def _read_inventory() -> Inventory:
    versions = installed_versions()
    try:
        gpus = read_gpus()
    except NvmlUnavailableError as error:
        return Inventory(versions=versions, nvml_error=str(error), wsl=_WSL_DEVICE.exists())
    order = tuple(gpu.uuid for gpu in gpus)
    if len({gpu.name for gpu in gpus}) > 1:
        # CUDA puts the fastest first; between equal ones the PCI address decides.
        order = _probe.query_cuda_order() or ()
    fastest_first = order if len(order) == len(gpus) else None
    return Inventory(gpus=gpus, versions=versions, fastest_first=fastest_first, wsl=_WSL_DEVICE.exists())


def _add_egl_devices(inventory: Inventory) -> Inventory:
    result = _probe.egl()
    if result.get("error"):
        return dataclasses.replace(inventory, egl=(), osmesa=result["osmesa"], egl_error=result["error"])
    devices = tuple(_match_egl_device(entry, inventory.gpus) for entry in result["devices"])
    return dataclasses.replace(inventory, egl=devices, osmesa=result["osmesa"])


def _match_egl_device(entry: Mapping[str, Any], gpus: Sequence[Gpu]) -> EglDevice:
    """Return which GPU is behind an EGL device: by its UUID, its PCI address, or its CUDA ordinal under PCI order."""
    known = {gpu.uuid for gpu in gpus}
    by_pci = {gpu.pci: gpu.uuid for gpu in gpus}
    uuid = entry["uuid"] if entry["uuid"] in known else by_pci.get(entry["pci"] or "")
    ordinal = entry["cuda"]
    if uuid is None and ordinal is not None and 0 <= ordinal < len(gpus):
        uuid = gpus[ordinal].uuid
    return EglDevice(
        index=entry["index"], software=entry["software"], uuid=uuid, drm=entry["drm"], cuda=ordinal is not None
    )


class NvmlUnavailableError(Exception):
    """NVML cannot be asked; the text says why."""


@contextlib.contextmanager
def nvml_session() -> Iterator[types.ModuleType]:
    """Initialise NVML for the length of a block, as a process that forks should."""
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
        raise NvmlUnavailableError(f"the NVIDIA driver refused a question: {error}") from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_gpus() -> tuple[Gpu, ...]:
    """Read all GPUs as they are now, in nvidia-smi's order. CUDA is neither initialised nor its mask heeded.

    :raises NvmlUnavailableError: NVML cannot be asked
    """
    with nvml_session() as nvml:
        count = nvml.nvmlDeviceGetCount()
        return tuple(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index) for index in range(count))


def _read_gpu(nvml: types.ModuleType, handle: Any, index: int) -> Gpu:
    total, free = _read_memory(nvml, handle)
    return Gpu(
        uuid=_to_str(nvml.nvmlDeviceGetUUID(handle)),
        name=_to_str(nvml.nvmlDeviceGetName(handle)),
        pci=pci_address(_to_str(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        index=index,
        memory_total=total,
        memory_free=free,
        mig=_read_mig_slices(nvml, handle),
    )


def _read_memory(nvml: types.ModuleType, handle: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:  # the GPU shares the CPU's
        return 0, 0
    return int(memory.total), int(memory.free)


def _read_mig_slices(nvml: types.ModuleType, handle: Any) -> tuple[str, ...]:
    """List the MIG slices. Most GPUs know nothing of MIG and answer with an error."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return ()
    found = []
    for index in range(count):
        try:
            slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # places between slices are empty
            continue
        found.append(_to_str(nvml.nvmlDeviceGetUUID(slice_)))
    return tuple(found)


def pci_address(bus_id: str) -> str:
    """Write NVML's ``00000000:3B:00.0`` as Linux does: ``0000:3b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _to_str(value: str | bytes) -> str:
    # Releases of nvidia-ml-py before 11.515 return bytes.
    return value.decode() if isinstance(value, bytes) else value


@cache
def _read_versions() -> tuple[tuple[str, str], ...]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        found["torch.cuda"] = _read_torch_cuda_version()
    return tuple(found.items())


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that matter, without importing them, and what torch was built for.

    :return: by package; ``"torch.cuda"`` is ``""`` for a build without CUDA and ``"rocm <version>"`` for AMD's
    """
    return dict(_read_versions())


def _read_torch_cuda_version() -> str:
    spec = util.find_spec("torch")
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if source is None or not source.is_file():
        return ""
    text = source.read_text(encoding="utf-8")
    hip = _read_assignment(text, "hip")
    return f"rocm {hip}" if hip else _read_assignment(text, "cuda")


def _read_assignment(source: str, name: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match[1] if match else ""
