"""What NVML tells about the GPUs. It neither initialises CUDA nor heeds CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


class UnavailableError(Exception):
    """NVML cannot be asked; the text says why."""


@contextmanager
def session() -> Iterator[ModuleType]:
    """Initialise NVML for the length of a block, as a process that forks should."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise UnavailableError('the package nvidia-ml-py is not installed: pip install "nvidia-ml-py"') from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise UnavailableError("no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)") from error
    except pynvml.NVMLError as error:
        raise UnavailableError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise UnavailableError(f"the NVIDIA driver refused a question: {error}") from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read() -> list[dict[str, Any]]:
    """Read the fields of :class:`~rl_ext_core.devices.Gpu` for every GPU, in nvidia-smi's order."""
    with session() as nvml:
        count = nvml.nvmlDeviceGetCount()
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index) for index in range(count)]


def free_memory() -> dict[str, int]:
    """Read how many bytes are free on each GPU just now, by UUID."""
    return {entry["uuid"]: entry["memory_free"] for entry in read()}


def _gpu(nvml: ModuleType, handle: Any, index: int) -> dict[str, Any]:
    total, free = _memory(nvml, handle)
    return {
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "pci": pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "index": index,
        "memory_total": total,
        "memory_free": free,
        "mig": _slices(nvml, handle),
    }


def _memory(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:  # the GPU shares the CPU's
        return 0, 0
    return int(memory.total), int(memory.free)


def _slices(nvml: ModuleType, handle: Any) -> tuple[str, ...]:
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
        found.append(_text(nvml.nvmlDeviceGetUUID(slice_)))
    return tuple(found)


def pci_address(bus_id: str) -> str:
    """Write NVML's ``00000000:3B:00.0`` as Linux does: ``0000:3b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(value: str | bytes) -> str:
    # Releases of nvidia-ml-py before 11.515 return bytes.
    return value.decode() if isinstance(value, bytes) else value
