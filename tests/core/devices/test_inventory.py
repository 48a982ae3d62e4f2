"""The machine is read without touching CUDA, whatever its drivers do; and what was read can be written down."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_ext_core.devices import EglDevice, Inventory
from rl_ext_core.errors import CorruptFileError
from tests.core.devices import machines
from tests.core.devices.fakes import build


def alike(found: Inventory, expected: Inventory) -> None:
    """Compare but for what is installed on the machine that runs the tests."""
    assert dataclasses.replace(found, versions=expected.versions, osmesa=expected.osmesa) == expected


def calls(log: Path) -> Counter[str]:
    """Count the calls that the libraries have noted, by function and process."""
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def noted(log: Path, function: str) -> list[str]:
    """List the processes that have called a function."""
    return [line.split()[1] for line in calls(log) if line.split()[0] == function]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("count", "order", "software"),
    [
        (1, (0,), True),
        (4, (0, 1, 2, 3), True),
        (4, (2, 3, 0, 1), True),
        (4, (3, 1), True),
        (8, (7, 0, 6, 1, 5, 2, 4, 3), True),
        (4, (2, 3, 0, 1), False),
    ],
)
def test_gpus_and_egl_devices_are_those_of_the_machine(
    count: int, order: tuple[int, ...], software: bool, drivers: build.Drivers
) -> None:
    found = drivers.inventory(build.configuration(count, egl_order=(*order, -1) if software else order))
    alike(found, machines.machine(count, order=order, software=software))


@pytest.mark.parametrize("lacks", [("uuid",), ("uuid", "drm"), ("drm",), ("cuda",)])
def test_gpus_are_found_behind_egl_devices_by_what_the_driver_tells(
    lacks: tuple[str, ...], drivers: build.Drivers
) -> None:
    found = drivers.inventory(build.configuration(egl_order=(3, 0, 2, 1, -1), egl_lacks=lacks))
    assert found.egl == tuple(
        dataclasses.replace(
            device, drm=None if "drm" in lacks else device.drm, cuda=device.cuda and "cuda" not in lacks
        )
        for device in machines.egl((3, 0, 2, 1))
    )


# The nodes of the fake GPUs, as Linux has them below /sys; the probe runs in the same process, so that it sees them.
WITH_NODES = f"""
import os
from rl_ext_core.devices import _probe
addresses = dict(enumerate({[gpu.pci for gpu in machines.gpus(8)]}, 128))
nodes = {{f"/sys/class/drm/renderD{{n}}/device": f"/sys/devices/pci0000:00/{{a}}" for n, a in addresses.items()}}
realpath = os.path.realpath
os.path.realpath = lambda path, **how: nodes.get(path) or realpath(path, **how)
_probe._run = lambda question: _probe._answer_egl()
"""


@pytest.mark.parametrize("lacks", [("uuid", "cuda"), ("uuid",)])
def test_the_address_of_its_node_tells_a_gpu_where_egl_tells_no_uuid(
    lacks: tuple[str, ...], drivers: build.Drivers
) -> None:
    settings = build.configuration(egl_order=(3, 0, 2, 1, -1), egl_lacks=lacks)
    found = Inventory.from_json(drivers.python(WITH_NODES + build.INVENTORY, settings))
    assert [device.uuid for device in found.egl or ()] == [*(machines.uuid(number) for number in (3, 0, 2, 1)), None]


@pytest.mark.parametrize(
    ("order", "index"),
    [
        ((2, 0, 1, 3, 100, 101, 102, 103, -1), 1),
        # Where libglvnd has Mesa come first.
        ((100, 101, 102, 103, -1, 2, 0, 1, 3), 6),
    ],
)
def test_a_gpu_that_mesa_lists_too_renders_through_its_own_driver(
    order: Sequence[int], index: int, drivers: build.Drivers
) -> None:
    settings = build.configuration(egl_order=order)
    found = Inventory.from_json(drivers.python(WITH_NODES + build.INVENTORY, settings))
    assert [device.index for device in found.egl or () if device.uuid == machines.uuid(0)] == sorted(
        [order.index(0), order.index(100)]
    )
    device = found.egl_of(machines.uuid(0))
    assert device is not None
    assert device.index == index


NAMES = ("NVIDIA A2", "NVIDIA H100", "NVIDIA H100", "NVIDIA A2")


def test_between_gpus_that_differ_cuda_tells_the_order(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = build.configuration(names=NAMES, fastest_first=(2, 1, 0, 3), log=log)
    code = f"import os; print(os.getpid()); {build.INVENTORY}"
    process, _, text = drivers.python(code, {**settings, "CUDA_VISIBLE_DEVICES": "3"}).partition("\n")
    found = Inventory.from_json(text)
    assert [gpu.name for gpu in found.gpus] == list(NAMES)
    assert found.fastest_first == tuple(machines.uuid(number) for number in (2, 1, 0, 3))
    assert len(noted(log, "cuInit")) == 1
    assert process not in noted(log, "cuInit")


def test_between_gpus_that_are_alike_nobody_asks_cuda(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = drivers.inventory(build.configuration(log=log), without=("cuda.c",))
    assert found.fastest_first == tuple(machines.uuid(number) for number in range(4))
    assert noted(log, "cuInit") == []


@pytest.mark.parametrize(("code", "without"), [(100, ()), (None, ("cuda.c",))])
def test_where_cuda_does_not_tell_its_order_is_unknown(
    code: int | None, without: tuple[str, ...], drivers: build.Drivers
) -> None:
    found = drivers.inventory(build.configuration(names=NAMES, cuda_fail=code), without=without)
    assert found.fastest_first is None
    assert len(found.gpus) == 4
    assert len(found.egl or ()) == 5


def test_without_a_driver_the_inventory_is_empty_and_says_why(drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(egl_order=(-1,)), without=("nvml.c", "cuda.c"))
    alike(found, machines.machine(0))


def test_a_machine_without_gpus_has_none(drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(0))
    assert (found.gpus, found.fastest_first, found.nvml_error) == ((), (), None)
    assert found.egl == (EglDevice(0, software=True),)


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("nvmlInitWithFlags", 9, "does not answer: Driver Not Loaded"),
        ("nvmlInitWithFlags", 18, "version mismatch"),
        ("nvmlDeviceGetCount_v2", 999, "refused a question: Unknown Error"),
        ("nvmlDeviceGetHandleByIndex_v2", 15, "refused a question: GPU is lost"),
        ("nvmlDeviceGetUUID", 4, "refused a question: Insufficient Permissions"),
    ],
)
def test_a_driver_that_fails_leaves_the_inventory_empty_and_says_why(
    function: str, code: int, reason: str, drivers: build.Drivers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found = drivers.inventory(build.configuration(nvml_fail={function: code}, egl_order=(-1,), log=log))
    assert found.gpus == ()
    assert reason in str(found.nvml_error)
    assert found.egl == (EglDevice(0, software=True),)
    started = 0 if function == "nvmlInitWithFlags" else 1
    assert len(noted(log, "nvmlShutdown")) == started


def test_nvml_is_shut_down_as_often_as_it_is_started(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
from rl_ext_core.devices import Inventory
from rl_ext_core.devices.inventory import read_gpus
for _ in range(3):
    Inventory.current(refresh=True, egl=False)
read_gpus()
"""
    drivers.python(code, build.configuration(log=log))
    assert {line.split()[0]: count for line, count in calls(log).items()} == {"nvmlInitWithFlags": 4, "nvmlShutdown": 4}


def test_a_shutdown_that_fails_is_no_error(drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(nvml_fail={"nvmlShutdown": 999}))
    assert found.gpus == machines.gpus(4)


@pytest.mark.parametrize("function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"])
def test_a_driver_that_knows_nothing_of_mig_shows_whole_gpus(function: str, drivers: build.Drivers) -> None:
    settings = build.configuration(mig={0: ["MIG-a"]}, nvml_fail={function: 3})
    assert drivers.inventory(settings).gpus == machines.gpus(4)


def test_mig_slices_are_listed_with_their_gpu(drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(mig={0: ["MIG-a", "", "MIG-b"], 2: []}))
    assert found.gpus == machines.gpus(4, mig={0: ["MIG-a", "MIG-b"]})


@pytest.mark.parametrize("fault", ["crash", "missing", "exit"])
def test_an_egl_that_fails_leaves_its_devices_empty_and_says_why(fault: str, drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(egl_fault=fault))
    assert found.gpus == machines.gpus(4)
    assert found.egl == ()
    assert found.egl_error


def test_an_egl_that_hangs_is_given_up(drivers: build.Drivers) -> None:
    code = "from rl_ext_core.devices import _probe; _probe._TIMEOUT_S = 0.5; " + build.INVENTORY
    found = Inventory.from_json(drivers.python(code, build.configuration(egl_fault="hang")))
    assert found.gpus == machines.gpus(4)
    assert found.egl == ()
    assert "did not answer" in str(found.egl_error)


def test_without_egl_its_devices_are_empty_and_the_error_says_why(drivers: build.Drivers) -> None:
    found = drivers.inventory(build.configuration(), without=("egl.c",))
    assert found.egl == ()
    assert "libEGL.so.1" in str(found.egl_error)


def test_the_machine_is_read_once_and_egl_only_where_it_matters(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
from rl_ext_core.devices import Inventory
first = Inventory.current(egl=False)
assert first.egl is None and first.osmesa is None
assert Inventory.current(egl=False) is first
second = Inventory.current()
assert second.egl and second.gpus == first.gpus
assert Inventory.current() is second and Inventory.current(egl=False) is second
"""
    drivers.python(code, build.configuration(log=log))
    assert len(noted(log, "eglQueryDevicesEXT")) == 1
    assert [count for line, count in calls(log).items() if line.startswith("nvmlInit")] == [1]


def test_a_refreshed_inventory_is_read_anew(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import os
from rl_ext_core.devices import Inventory
first = Inventory.current()
os.environ.update(FAKE_FREE_GIB="7,6,5,4", FAKE_EGL_ORDER="3,-1")
assert Inventory.current() is first
second = Inventory.current(refresh=True)
assert [gpu.memory_free >> 30 for gpu in second.gpus] == [7, 6, 5, 4]
assert len(first.egl) == 5 and len(second.egl) == 2
assert Inventory.current() is second
"""
    drivers.python(code, build.configuration(log=log))
    assert len(noted(log, "eglQueryDevicesEXT")) == 2


def test_threads_that_ask_at_once_share_one_reading(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
from concurrent.futures import ThreadPoolExecutor
from rl_ext_core.devices import Inventory
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: Inventory.current(), range(8)))
assert all(inventory is found[0] for inventory in found)
"""
    drivers.python(code, build.configuration(log=log))
    assert len(noted(log, "eglQueryDevicesEXT")) == 1


# A thread holds the lock while EGL hangs, and meanwhile another one forks.
FORK = """
import os, signal, sys, threading, time
from pathlib import Path
from rl_ext_core.devices import Inventory, _probe
_probe._TIMEOUT_S = 3.0
thread = threading.Thread(target=Inventory.current)
thread.start()
while "eglQueryDevicesEXT" not in Path(sys.argv[1]).read_text():
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(len(Inventory.current(egl=False).gpus))
_, status = os.waitpid(child, 0)
assert thread.is_alive(), "the child has waited for the parent's thread"
thread.join()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    settings = build.configuration(egl_fault="hang", log=log)
    assert drivers.run([sys.executable, "-c", FORK, log], settings).strip() == "4"


RESOLVE = """
import itertools, os
import torch
from rl_ext_core.devices import Inventory, inventory, resolve
from tests.core.devices.machines import VERSIONS, uuid
inventory.installed_versions = lambda: dict(VERSIONS)
devices = ["auto", "cpu", "cuda", "cuda:1", 1, torch.device("cuda:0"), uuid(2), "GPU-bbbb", "nvidia-smi:2"]
devices += ["pci:0000:3a:00.0"]
renders = ["none", "same", "auto", "cpu", "cuda:0", 1, "egl:4", "egl:0", uuid(3), "nvidia-smi:1", "pci:1a:00.0"]
made = 0
for device, render, renderer in itertools.product(devices, renders, ["mujoco", "gymnasium", "dm_control", "robosuite"]):
    decision = resolve(device, render=render, renderer=renderer)
    assert decision.device == "cpu" if device == "cpu" else decision.gpu is not None
    made += 1
for how in ({"pick": "free-memory"}, {"rank": 1}, {"worker": 5}, {"on_missing": "cpu"}):
    resolve("auto", render="auto", **how)
assert not torch.cuda.is_initialized()
loaded = open("/proc/self/maps").read()
assert "libnvidia-ml" in loaded
print(made, os.getpid(), "libcuda" in loaded, "libEGL" in loaded)
"""


@pytest.mark.slow
def test_no_decision_starts_cuda_or_loads_a_driver_but_nvml(drivers: build.Drivers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = build.configuration(names=NAMES, fastest_first=(2, 1, 0, 3), egl_order=(2, 3, 0, 1, -1), log=log)
    settings |= {"CUDA_VISIBLE_DEVICES": "0,2", "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    made, process, *drivers_loaded = drivers.run([sys.executable, "-c", RESOLVE], settings).split()
    assert int(made) == 10 * 11 * 4
    assert drivers_loaded == ["False", "False"]
    assert len(noted(log, "cuInit")) == 1
    assert process not in [*noted(log, "cuInit"), *noted(log, "eglQueryDevicesEXT")]


INVENTORIES = [
    machines.machine(),
    machines.machine(8, order=(7, 6, 5), software=False, osmesa=False),
    machines.machine(mig={0: ["MIG-a", "MIG-b"]}, without=("torch", "torch.cuda")),
    machines.machine(0),
    dataclasses.replace(machines.machine(), fastest_first=None, egl=(), egl_error="the driver »hängt«"),
    dataclasses.replace(machines.machine(), egl=None, osmesa=None),
    Inventory(),
]


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_an_inventory_comes_back_from_json_as_it_was(inventory: Inventory) -> None:
    text = inventory.to_json()
    again = Inventory.from_json(text)
    assert again == inventory
    assert hash(again.gpus) == hash(inventory.gpus)
    assert again.to_json() == text
    assert json.loads(text) == json.loads(json.dumps(inventory.to_dict()))


def test_what_to_dict_gives_is_a_copy() -> None:
    inventory = machines.machine()
    inventory.to_dict()["versions"]["torch"] = "another"
    assert inventory == machines.machine()


def test_json_that_is_cut_short_anywhere_is_refused() -> None:
    text = machines.machine(1, mig={0: ["MIG-a"]}).to_json()
    for length in range(len(text)):
        with pytest.raises(CorruptFileError):
            Inventory.from_json(text[:length])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "[1, 2]",
        "5",
        '"text"',
        "true",
        "{}",
        '{"format": 1}',
        "\0",
        "[" * 100_000,
        '{"format": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError, match=r"(?s)not an inventory|not of format"):
        Inventory.from_json(text)


@pytest.mark.parametrize("number", [0, 2, "1", None, [], 1.5])
def test_another_format_is_refused_by_name(number: object) -> None:
    with pytest.raises(CorruptFileError, match="format 1, the one that this version reads"):
        Inventory.from_json(json.dumps(machines.machine().to_dict() | {"format": number}))


@pytest.mark.parametrize("field", ["format", "gpus", "egl", "fastest_first"])
def test_a_field_that_is_missing_is_refused(field: str) -> None:
    data = machines.machine().to_dict()
    del data[field]
    with pytest.raises(CorruptFileError):
        Inventory.from_json(json.dumps(data))


def test_a_field_that_is_not_known_is_refused() -> None:
    with pytest.raises(CorruptFileError):
        Inventory.from_json(json.dumps(machines.machine().to_dict() | {"tpus": []}))


WRONG: dict[str, list[Any]] = {
    "gpus": [None, 5, "abc", {}, {"uuid": 1}, [5], ["abc"], [[]], [{}], True],
    "egl": [5, "abc", {"index": 0}, [5], ["abc"], [{}], [None], False],
    "fastest_first": [5, "abc", {"a": 1}, [1], [None], True],
    "versions": [None, 5, "abc", ["torch"], {"torch": 2}, {"torch": None}],
    "osmesa": ["yes", 1, [], {}],
    "nvml_error": [5, [], {}, False],
    "egl_error": [5, [], {}, False],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values], ids=repr
)
def test_a_field_of_a_wrong_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(CorruptFileError):
        Inventory.from_json(json.dumps(machines.machine().to_dict() | {field: value}))


WRONG_IN: dict[tuple[str, str], list[Any]] = {
    ("gpus", "uuid"): [None, 5, []],
    ("gpus", "name"): [None, 5],
    ("gpus", "pci"): [None, 5],
    ("gpus", "index"): [None, "0", 1.5, True],
    ("gpus", "memory_total"): [None, "80", 1.5],
    ("gpus", "memory_free"): [None, "80", 1.5],
    ("gpus", "mig"): [None, 5, "MIG-a", [5], {"MIG-a": 1}],
    ("egl", "index"): [None, "0", 1.5, True],
    ("egl", "software"): [None, 0, "no"],
    ("egl", "uuid"): [5, []],
    ("egl", "drm"): [5, []],
    ("egl", "cuda"): [None, 1, "yes"],
}


@pytest.mark.parametrize(
    ("records", "field", "value"),
    [(*place, value) for place, values in WRONG_IN.items() for value in values],
    ids=repr,
)
def test_a_record_with_a_wrong_type_is_refused(records: str, field: str, value: object) -> None:
    data = machines.machine().to_dict()
    data[records][0][field] = value
    with pytest.raises(CorruptFileError):
        Inventory.from_json(json.dumps(data))
