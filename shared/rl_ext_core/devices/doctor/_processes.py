"""Which processes use which GPU, by NVML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_ext_core.devices import _nvml

if TYPE_CHECKING:
    from types import ModuleType

_LISTS = (("nvmlDeviceGetComputeRunningProcesses", "C"), ("nvmlDeviceGetGraphicsRunningProcesses", "G"))


@dataclass(frozen=True)
class Process:
    """A process on a GPU.

    :param pid: as the driver counts, which is not as a container does
    :param name: the program's, without its folder; empty where it cannot be read
    :param kind: ``"C"`` computes, ``"G"`` renders, ``"C+G"`` both
    :param memory: bytes; None where the driver does not tell
    """

    pid: int
    name: str
    kind: str
    memory: int | None


@dataclass(frozen=True)
class Usage:
    """What a GPU is used for just now.

    :param uuid: the GPU's
    :param index: what nvidia-smi calls it
    :param name: the model's name
    :param memory_total: bytes
    :param memory_free: bytes
    :param processes: in order of their ids
    """

    uuid: str
    index: int
    name: str
    memory_total: int
    memory_free: int
    processes: tuple[Process, ...]


def read() -> list[Usage]:
    """Read what every GPU is used for, in nvidia-smi's order.

    :raises rl_ext_core.devices._nvml.UnavailableError: NVML cannot be asked
    """
    with _nvml.session() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_usage(nvml, handle, index) for index, handle in enumerate(handles)]


def gpus_of(pid: int) -> tuple[str, ...]:
    """Give the UUIDs of the GPUs on which NVML lists a process; none where it cannot be asked."""
    try:
        return tuple(usage.uuid for usage in read() if any(process.pid == pid for process in usage.processes))
    except _nvml.UnavailableError:
        return ()


def _usage(nvml: ModuleType, handle: Any, index: int) -> Usage:
    fields = _nvml._gpu(nvml, handle, index)
    found: dict[int, Process] = {}
    for function, kind in _LISTS:
        for entry in _listed(nvml, function, handle):
            known = found.get(entry.pid)
            both = "C+G" if known and known.kind != kind else kind
            # NVML says None, and older releases the largest number, where the driver does not tell.
            told = entry.usedGpuMemory if entry.usedGpuMemory != 2**64 - 1 else None
            memory = told if known is None or known.memory is None else max(known.memory, told or 0)
            found[entry.pid] = Process(entry.pid, _name(nvml, entry.pid), both, memory)
    processes = tuple(found[pid] for pid in sorted(found))
    return Usage(
        uuid=fields["uuid"],
        index=index,
        name=fields["name"],
        memory_total=fields["memory_total"],
        memory_free=fields["memory_free"],
        processes=processes,
    )


def _listed(nvml: ModuleType, function: str, handle: Any) -> list[Any]:
    try:
        return list(getattr(nvml, function)(handle))
    except nvml.NVMLError:  # a GPU without graphics, or a driver without permission
        return []


def _name(nvml: ModuleType, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:  # it has ended, or belongs to another container
        return ""
    return _nvml._text(name).split(" ")[0].rpartition("/")[2]
