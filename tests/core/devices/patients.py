"""Machines for the doctor, each with the variables that are in force on it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from rl_ext_core.devices import Inventory
from rl_ext_core.devices.doctor import Report, examine, show
from tests.core.devices.machines import egl, gpus, machine, uuid

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
    "empty mask": (machine(2), {**EGL, "CUDA_VISIBLE_DEVICES": ""}),
    "CPU torch": (machine(4, versions=CPU_TORCH), EGL),
    "MIG": (machine(4, mig=MIG), {**EGL, "CUDA_VISIBLE_DEVICES": "MIG-22222222-0000"}),
    "no EGL": (WITHOUT_EGL, EGL),
    "a launcher": (machine(4, order=[1, 0, 3, 2]), {**EGL, "LOCAL_RANK": "2"}),
    "a rank too many": (machine(2), {**EGL, "LOCAL_RANK": "5"}),
    "mujoco 4": (machine(4, order=[1, 0, 3, 2], versions={"mujoco": "4.0.0"}), {**EGL, "CUDA_VISIBLE_DEVICES": "3"}),
    "order unknown": (Inventory(gpus(2), egl([0, 1]), None, machine(2).versions, True), EGL),
    "EGL was not asked": (Inventory(gpus(2), None, (uuid(0), uuid(1)), machine(2).versions), EGL),
    "no renderer": (machine(2, without=["mujoco", "robosuite", "dm_control"]), {}),
    "a display": (machine(2), {"DISPLAY": ":0"}),
    "no rendering": (machine(2), {"MUJOCO_GL": "off"}),
    "two platforms": (machine(2), {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"}),
    "eleven devices": (
        machine(4, versions={"mujoco": "4.0.0"}, order=[3, 2, 1, 0]),
        {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "11"},
    ),
}


def report_of(case: str, **options: Any) -> Report:
    inventory, environ = CASES[case]
    return examine(inventory, environ, **options)


def shown(report: Report, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(report, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def fake_nvml() -> Any:
    """NVML with one GPU and three processes, one of which has no name."""

    class NvmlError(Exception):
        pass

    def name_of(pid: int) -> bytes:
        if pid == 8:
            raise NvmlError("not found")
        return {7: b"/usr/bin/python train.py", 9: b"/usr/lib/xorg/Xorg"}[pid]

    def process(pid: int, memory: int | None) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, usedGpuMemory=memory)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_LibraryNotFound=type("Missing", (NvmlError,), {}),
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30, free=79 * 2**30),
        nvmlDeviceGetUUID=lambda handle: uuid(0),
        nvmlDeviceGetName=lambda handle: "NVIDIA H100",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId="00000000:1A:00.0"),
        nvmlDeviceGetMigMode=lambda handle: (0, 0),
        nvmlSystemGetProcessName=name_of,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [process(7, 300), process(8, 2**64 - 1)],
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: [process(7, 200), process(9, None)],
    )
