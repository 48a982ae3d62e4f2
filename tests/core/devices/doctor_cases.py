"""Machines with environment variables for tests of ``rl-ext doctor``, and a fake pynvml."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from rich.console import Console

from rl_ext_core.cli.doctor import DoctorReport, examine, print_report
from rl_ext_core.devices import Gpu, Inventory
from tests.core.devices.machines import gpus, machine, uuid

EGL = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
MIG = {0: ["MIG-11111111-0000", "MIG-22222222-0000"], 1: [], 2: [], 3: []}
NO_GPU = "no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)"
CPU_TORCH = {"torch": "2.13.0+cpu", "torch.cuda": ""}
WITHOUT_EGL = Inventory(
    gpus=gpus(2),
    egl=(),
    fastest_first=(uuid(0), uuid(1)),
    versions=machine(2).versions,
    osmesa=False,
    egl_error="libEGL.so.1 is not installed (on Debian: apt-get install libegl1)",
)
CASES: dict[str, tuple[Inventory, dict[str, str]]] = {
    "no GPU": (machine(0), {}),
    "no GPU, nothing that renders": (machine(0, software=False, osmesa=False), EGL),
    "no GPU, OSMesa": (machine(0, software=False), {"MUJOCO_GL": "osmesa"}),
    "wrong mask": (machine(4, order=[2, 3, 0, 1]), {**EGL, "CUDA_VISIBLE_DEVICES": "1,7"}),
    "other order": (machine(4, order=[3, 2, 1, 0]), {**EGL, "CUDA_VISIBLE_DEVICES": "2"}),
    "all is well": (machine(4), {**EGL, "CUDA_VISIBLE_DEVICES": "0", "MUJOCO_EGL_DEVICE_ID": "0"}),
    "CPU torch": (machine(4, versions=CPU_TORCH), EGL),
    "MIG": (machine(4, mig=MIG), {**EGL, "CUDA_VISIBLE_DEVICES": "MIG-22222222-0000"}),
    "no EGL": (WITHOUT_EGL, EGL),
    "a launcher": (machine(4, order=[1, 0, 3, 2]), {**EGL, "LOCAL_RANK": "2"}),
    "a rank too many": (machine(2), {**EGL, "LOCAL_RANK": "5"}),
}


def report_of(case: str, **options: Any) -> DoctorReport:
    """Return the doctor's report on the machine and the variables of one of ``CASES``."""
    inventory, environ = CASES[case]
    return examine(inventory, environ, **options)


def report_as_text(report: DoctorReport, width: int = 120) -> str:
    """Return the text that ``rl-ext doctor`` prints for a report on a console of this width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console)
    text: str = console.file.getvalue()
    return text


class FakeNvml(ModuleType):
    """Fake of the module pynvml.

    :param fails: error class and text by name of the function that fails
    :param computing, rendering: index of the GPU by process ID
    """

    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_LibraryNotFound = type("NVMLError_LibraryNotFound", (NVMLError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})

    def __init__(
        self,
        gpus: Sequence[Gpu],
        fails: Mapping[str, Any] | None = None,
        computing: Mapping[int, int] | None = None,
        rendering: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__("pynvml")
        self.fails, self.started = fails or {}, 0
        answers = {
            "Init": lambda: self._add_to_started(1),
            "Shutdown": lambda: self._add_to_started(-1),
            "DeviceGetCount": lambda: len(gpus),
            "DeviceGetHandleByIndex": lambda index: gpus[index],
            "DeviceGetUUID": lambda gpu: getattr(gpu, "uuid", gpu),
            "DeviceGetName": lambda gpu: gpu.name,
            "DeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"0000{gpu.pci.upper()}"),
            "DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.memory_total, free=gpu.memory_free),
            "DeviceGetMigMode": lambda gpu: (len(gpu.mig) > 0, 0),
            "DeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "DeviceGetMigDeviceHandleByIndex": lambda gpu, place: self._get_slice(gpu, place),
            "DeviceGetComputeRunningProcesses": lambda gpu: self._processes_on(gpu, computing or {}),
            "DeviceGetGraphicsRunningProcesses": lambda gpu: self._processes_on(gpu, rendering or {}),
        }
        for name, answer in answers.items():
            setattr(self, f"nvml{name}", partial(self._answer_or_raise, f"nvml{name}", answer))

    def _answer_or_raise(self, name: str, answer: Any, *args: Any) -> Any:
        if name in self.fails:
            kind, text = self.fails[name]
            raise getattr(self, kind)(text)
        return answer(*args)

    def _add_to_started(self, change: int) -> None:
        self.started += change

    def _get_slice(self, gpu: Gpu, place: int) -> str:
        """Return a GPU's MIG slice at an index, or raise pynvml's error for an unused index."""
        if place % 2 or place // 2 >= len(gpu.mig):  # indices between slices are unused
            raise self.NVMLError("Not Found")
        return gpu.mig[place // 2]

    def _processes_on(self, gpu: Gpu, gpu_by_pid: Mapping[int, int]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=2**21) for pid, index in gpu_by_pid.items() if index == gpu.index
        ]
