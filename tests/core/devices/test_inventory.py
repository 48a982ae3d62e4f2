from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_ext_core.devices import EglDevice, Gpu, Inventory, _probe, inventory
from tests.core.devices import machines
from tests.core.devices.doctor_cases import NO_GPU, FakeNvml
from tests.core.devices.fakes import build


def logged_calls(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


FOUR, ONE = machines.gpus(4), machines.gpus(1)
SHARED_MEMORY = (dataclasses.replace(ONE[0], memory_total=0, memory_free=0),)  # the GPU shares the CPU's memory
MISMATCH = ("NVMLError", "Driver/library version mismatch")


@pytest.mark.parametrize(
    ("gpus", "fails", "expected", "reason"),
    [
        (FOUR, {}, FOUR, None),
        ((), {}, (), None),
        (machines.gpus(4, mig={0: ["MIG-a", "MIG-b"]}), {}, machines.gpus(4, mig={0: ["MIG-a", "MIG-b"]}), None),
        (machines.gpus(1, mig={0: ["MIG-a"]}), {"nvmlDeviceGetMigMode": MISMATCH}, ONE, None),
        (machines.gpus(1, mig={0: ["MIG-a"]}), {"nvmlDeviceGetMaxMigDeviceCount": MISMATCH}, ONE, None),
        (FOUR, {"nvmlShutdown": MISMATCH}, FOUR, None),
        (ONE, {"nvmlDeviceGetMemoryInfo": ("NVMLError_NotSupported", "")}, SHARED_MEMORY, None),
        (FOUR, {"nvmlInit": ("NVMLError_LibraryNotFound", "")}, (), NO_GPU),
        (FOUR, {"nvmlInit": MISMATCH}, (), "does not answer: Driver/library version mismatch"),
        (FOUR, {"nvmlDeviceGetCount": MISMATCH}, (), "refused a query: Driver/library version mismatch"),
    ],
)
def test_gpus_are_read_from_nvml(
    gpus: Sequence[Gpu], fails: Any, expected: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(gpus, fails)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(inventory, "_cached_inventory", None)
    found = Inventory.current(egl=False)
    assert found.gpus == expected
    assert found.fastest_first == tuple(gpu.uuid for gpu in expected)
    assert found.nvml_error is None if reason is None else reason in str(found.nvml_error)
    assert nvml.started == (1 if "nvmlShutdown" in fails else 0)


# Inventories from fake driver libraries, each in a new process.


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize(
    ("order", "software"),
    [((2, 3, 0, 1), True), ((3, 1), True), ((7, 0, 6, 1, 5, 2, 4, 3), True), ((2, 3, 0, 1), False)],
)
def test_inventory_matches_drivers(order: tuple[int, ...], software: bool, drivers: build.Drivers) -> None:
    count = max(4, len(order))
    found = drivers.inventory(build.configuration(count, egl_order=(*order, -1) if software else order))
    expected = machines.machine(count, order=order, software=software)
    # Versions and OSMesa are those of the machine that runs the tests.
    assert dataclasses.replace(found, versions=expected.versions, osmesa=expected.osmesa) == expected


@pytest.mark.sample(quick=3)
@pytest.mark.parametrize("lacks", [("uuid",), ("uuid", "drm"), ("drm",), ("cuda",)])
def test_gpu_of_egl_device_is_found_by_uuid_or_cuda_ordinal(lacks: tuple[str, ...], drivers: build.Drivers) -> None:
    settings = build.configuration(fastest_first=(3, 1, 0, 2), egl_order=(3, 0, 2, 1, -1), egl_lacks=lacks)
    # The mask and the order of this process must not matter.
    found = drivers.inventory({**settings, "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert found.egl == tuple(
        dataclasses.replace(
            device, drm=None if "drm" in lacks else device.drm, cuda=device.cuda and "cuda" not in lacks
        )
        for device in machines.egl((3, 0, 2, 1))
    )


def test_cuda_ordinal_identifies_no_gpu_next_to_a_mig_slice() -> None:
    entry = {"index": 0, "software": False, "uuid": None, "drm": None, "cuda": 0}
    assert inventory._match_egl_device(entry, machines.gpus(2)).uuid == machines.uuid(0)
    assert inventory._match_egl_device(entry, machines.gpus(2, mig={1: ["MIG-a"]})).uuid is None


# Mesa lists the GPUs too. Its devices come first if libglvnd loads Mesa first.
@pytest.mark.parametrize(
    ("order", "index"), [((2, 0, 1, 3, 100, 101, 102, 103, -1), 1), ((100, 101, 102, 103, -1, 2, 0, 1, 3), 6)]
)
def test_egl_device_of_gpu_belongs_to_its_own_driver(order: Sequence[int], index: int, drivers: build.Drivers) -> None:
    device = drivers.inventory(build.configuration(egl_order=order)).egl_of(machines.uuid(0))
    assert device is not None
    assert device.index == index


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize(
    ("settings", "without", "error"),
    [
        ({"egl_fault": "crash"}, (), "ended by signal 6 (Aborted): the driver has crashed"),
        ({"egl_fault": "missing"}, (), "has no eglQueryDevicesEXT"),
        ({"egl_fault": "exit"}, (), "ended with exit status 0: it printed no error"),
        ({"egl_fault": "hang"}, (), "did not answer"),
        ({}, ("egl.c",), "libEGL.so.1"),
        ({"egl_fault": "chatter"}, (), None),
        ({"gpus": 8, "egl_order": (*range(8), *range(100, 108), -1)}, (), None),  # more than renderers query
        ({"egl_order": (-1,)}, ("nvml.c", "cuda.c"), None),
    ],
)
def test_failures_of_egl_are_reported_in_inventory(
    settings: dict[str, Any], without: tuple[str, ...], error: str | None, drivers: build.Drivers
) -> None:
    limit = "from rl_ext_core.devices import _probe; _probe._TIMEOUT_S = 3; " if "hang" in settings.values() else ""
    found = drivers.inventory(build.configuration(**settings), setup=limit, without=without)
    assert len(found.gpus) == (0 if "nvml.c" in without else settings.get("gpus", 4))
    if error:
        assert found.egl == ()
        assert error in str(found.egl_error)
    else:
        count = len(settings.get("egl_order", range(5)))
        assert [device.index for device in found.egl or ()] == list(range(count))
        assert (found.egl or ())[-1] == EglDevice(count - 1, software=True)


@pytest.mark.parametrize(
    ("file", "version"),
    [("cuda = '12.6'\nhip = None", "12.6"), ("cuda = None\nhip = '6.4'", "rocm 6.4"), ("cuda = None", "")],
)
def test_cuda_version_is_read_from_torch_files(
    file: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(file)
    monkeypatch.setattr(_probe.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert _probe.read_versions()["torch.cuda"] == version


NAMES = ("NVIDIA A2", "NVIDIA H100", "NVIDIA H100", "NVIDIA A2")
RESOLVE = """
import itertools, os
from concurrent.futures import ThreadPoolExecutor
import torch
from rl_ext_core.devices import Inventory, inventory, resolve
from tests.core.devices.machines import VERSIONS, uuid
first = Inventory.current(egl=False)
assert first.egl is None and first.osmesa is None and Inventory.current(egl=False) is first
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: Inventory.current(), range(8)))
assert all(each is found[0] for each in found) and found[0].gpus == first.gpus
assert Inventory.current(egl=False) is found[0]
assert first.fastest_first == tuple(map(uuid, (2, 1, 0, 3))), first
inventory.installed_versions = lambda: dict(VERSIONS)
Inventory.current(refresh=True)
devices = ["auto", "cpu", "cuda:1", torch.device("cuda:0"), uuid(2), "nvidia-smi:2", "pci:0000:3a:00.0"]
renders = ["none", "same", "auto", "cpu", "cuda:0", "egl:4", uuid(3), "nvidia-smi:1"]
for device, render, renderer in itertools.product(devices, renders, ["mujoco", "gymnasium", "dm_control", "robosuite"]):
    decision = resolve(device, render=render, renderer=renderer)
    assert decision.device == "cpu" if device == "cpu" else decision.gpu is not None
assert not torch.cuda.is_initialized()
loaded = open("/proc/self/maps").read()
assert "libnvidia-ml" in loaded and "libcuda" not in loaded and "libEGL" not in loaded
os.environ["FAKE_EGL_ORDER"] = "3,-1"
assert len(Inventory.current().egl) == 5 and len(Inventory.current(refresh=True).egl) == 2
print(os.getpid())
"""


def test_machine_is_read_once_and_decisions_load_only_nvml(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = build.configuration(names=NAMES, fastest_first=(2, 1, 0, 3), egl_order=(2, 3, 0, 1, -1), log=log)
    settings["CUDA_VISIBLE_DEVICES"] = "0,2"
    process = drivers.run([sys.executable, "-c", RESOLVE], settings).strip()
    calls = logged_calls(log)
    for function in ("cuInit", "eglQueryDevicesEXT"):  # in the first call and two with refresh=True
        others = {other for name, other in calls if name == function}
        assert (len(others), process in others) == (3, False)
    own = Counter(name for name, caller in calls if caller == process)
    assert own == {"nvmlInitWithFlags": 3, "nvmlShutdown": 3}


def test_cuda_order_is_unknown_if_cuda_fails_and_not_queried_for_equal_gpus(
    drivers: build.Drivers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    failed = drivers.inventory(build.configuration(names=NAMES, cuda_fail=100))
    assert (failed.fastest_first, len(failed.gpus), len(failed.egl or ())) == (None, 4, 5)
    alike = drivers.inventory(build.configuration(log=log), without=("cuda.c",))
    assert alike.fastest_first == tuple(machines.uuid(number) for number in range(4))
    assert not [name for name, _ in logged_calls(log) if name == "cuInit"]


# One thread holds the lock while EGL hangs, and another thread forks.
FORK = """
import os, signal, sys, threading, time
from pathlib import Path
from rl_ext_core.devices import Inventory, _probe
_probe._TIMEOUT_S = 5.0
thread = threading.Thread(target=Inventory.current)
thread.start()
while "eglQueryDevicesEXT" not in Path(sys.argv[1]).read_text():
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(len(Inventory.current(egl=False).gpus))
_, status = os.waitpid(child, 0)
thread.join()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_fork_while_another_thread_reads_does_not_deadlock(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    settings = build.configuration(egl_fault="hang", log=log)
    assert drivers.run([sys.executable, "-c", FORK, log], settings).strip() == "4"
