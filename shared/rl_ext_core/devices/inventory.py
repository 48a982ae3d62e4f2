"""The GPUs of this machine, each with what every numbering calls it.

nvidia-smi counts by PCI address, CUDA by speed and under a mask, EGL by the driver's own order. The identity that
all of them share is the UUID. NVML tells the GPUs, a probe in a subprocess tells EGL's order; CUDA is never
initialised here, because a process that has done so can no longer fork.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rl_ext_core._system import after_fork
from rl_ext_core.devices import _nvml, _probe, _versions
from rl_ext_core.errors import CorruptFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["EglDevice", "Gpu", "Inventory"]

_FORMAT = 1
_Record = TypeVar("_Record", "EglDevice", "Gpu", "Inventory")


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
    """

    gpus: tuple[Gpu, ...] = ()
    egl: tuple[EglDevice, ...] | None = None
    fastest_first: tuple[str, ...] | None = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    osmesa: bool | None = None
    nvml_error: str | None = None
    egl_error: str | None = None

    @classmethod
    def current(cls, *, egl: bool = True, refresh: bool = False) -> Inventory:
        """Read this machine's, once per process: what was read is kept.

        :param egl: ask EGL too, in a subprocess
        :param refresh: read again; free memory is as old as the inventory
        :return: the inventory; a machine without GPUs has an empty one that says why
        """
        global _cached
        with _lock:
            if _cached is None or refresh:
                _cached = _read_gpus()
            if egl and _cached.egl is None:
                _cached = _with_egl(_cached)
            return _cached

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
            egl, order = data.pop("egl"), data.pop("fastest_first")
            gpus = [_checked(Gpu(**{**entry, "mig": _tuple(entry["mig"])})) for entry in _tuple(data.pop("gpus"))]
            devices = None if egl is None else tuple(_checked(EglDevice(**entry)) for entry in _tuple(egl))
            fastest_first = None if order is None else _tuple(order)
            return _checked(cls(**{**data, "gpus": tuple(gpus), "egl": devices, "fastest_first": fastest_first}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptFileError):
                raise
            raise CorruptFileError(
                f"not an inventory: {error}. Expected what Inventory.current().to_json() wrote"
            ) from error

    def to_json(self) -> str:
        """Write it down for a bug report or a test.

        :return: JSON with sorted keys; it names GPUs and versions, no user and no path
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Give what :meth:`to_json` writes, as plain dicts, tuples, numbers and text.

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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(values: Any) -> bool:
    return all(map(_is_text, values))


# By the annotation of a field that is read from JSON.
_FITS: dict[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "str | None": lambda value: value is None or _is_text(value),
    "int": lambda value: type(value) is int,
    "bool": lambda value: type(value) is bool,
    "bool | None": lambda value: value is None or type(value) is bool,
    "tuple[str, ...]": _are_texts,
    "tuple[str, ...] | None": lambda value: value is None or _are_texts(value),
    "Mapping[str, str]": lambda value: isinstance(value, dict) and _are_texts(value.values()),
}


def _checked(record: _Record) -> _Record:
    """See that the fields are of the types that they are declared with."""
    for field in dataclasses.fields(record):
        fits, value = _FITS.get(str(field.type)), getattr(record, field.name)
        if fits is not None and not fits(value):
            raise TypeError(f"{field.name} is {value!r}, expected {field.type}")
    return record


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"a list is expected in place of {value!r}")
    return tuple(value)


_lock = threading.Lock()
_cached: Inventory | None = None

# A thread may hold the lock while another one forks.
after_fork(lambda: globals().update(_lock=threading.Lock()))


def _read_gpus() -> Inventory:
    versions = _versions.installed()
    try:
        gpus = tuple(Gpu(**entry) for entry in _nvml.read())
    except _nvml.UnavailableError as error:
        return Inventory(versions=versions, nvml_error=str(error))
    order = tuple(gpu.uuid for gpu in gpus)
    if len({gpu.name for gpu in gpus}) > 1:
        # CUDA puts the fastest first; between equal ones the PCI address decides.
        order = _probe.cuda_order() or ()
    return Inventory(gpus=gpus, versions=versions, fastest_first=order if len(order) == len(gpus) else None)


def _with_egl(inventory: Inventory) -> Inventory:
    result = _probe.egl()
    if result.get("error"):
        return dataclasses.replace(inventory, egl=(), osmesa=result["osmesa"], egl_error=result["error"])
    devices = tuple(_egl_device(entry, inventory.gpus) for entry in result["devices"])
    return dataclasses.replace(inventory, egl=devices, osmesa=result["osmesa"])


def _egl_device(entry: Mapping[str, Any], gpus: Sequence[Gpu]) -> EglDevice:
    """Say which GPU is behind an EGL device: by its UUID, its PCI address, or its CUDA ordinal under PCI order."""
    known = {gpu.uuid for gpu in gpus}
    by_pci = {gpu.pci: gpu.uuid for gpu in gpus}
    uuid = entry["uuid"] if entry["uuid"] in known else by_pci.get(entry["pci"] or "")
    ordinal = entry["cuda"]
    if uuid is None and ordinal is not None and 0 <= ordinal < len(gpus):
        uuid = gpus[ordinal].uuid
    return EglDevice(
        index=entry["index"], software=entry["software"], uuid=uuid, drm=entry["drm"], cuda=ordinal is not None
    )
