"""EGL and CUDA are asked from outside of this process, and whatever they do there is an answer."""

from __future__ import annotations

import json
import sys
import time

import pytest

from rl_ext_core.devices import _probe
from tests.core.devices import machines
from tests.core.devices.fakes import build

ASK = "import json; from rl_ext_core.devices import _probe; print(json.dumps(_probe.{}()))"


def ask_egl(drivers: build.Drivers, settings: dict[str, str], *, without: tuple[str, ...] = ()) -> dict[str, object]:
    answer: dict[str, object] = json.loads(drivers.python(ASK.format("egl"), settings, without=without))
    return answer


def devices(drivers: build.Drivers, *keys: str, **settings: object) -> list[tuple[object, ...]]:
    answer = ask_egl(drivers, build.configuration(**settings))  # type: ignore[arg-type]
    assert answer["error"] is None
    assert isinstance(answer["devices"], list)
    return [tuple(device[key] for key in keys) for device in answer["devices"]]


def test_devices_come_in_the_order_of_egl_with_all_that_names_them(drivers: build.Drivers) -> None:
    found = devices(drivers, "index", "software", "uuid", "drm", "cuda", egl_order=(2, -1, 0))
    assert found == [
        (0, False, machines.uuid(2), "/dev/dri/renderD130", 2),
        (1, True, None, None, None),
        (2, False, machines.uuid(0), "/dev/dri/renderD128", 0),
    ]


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        (("uuid",), (None, "/dev/dri/renderD131", 3)),
        (("drm",), (machines.uuid(3), None, 3)),
        (("cuda",), (machines.uuid(3), "/dev/dri/renderD131", None)),
        (("uuid", "drm"), (None, None, 3)),
        (("uuid", "drm", "cuda"), (None, None, None)),
    ],
)
def test_a_driver_without_an_extension_tells_the_rest(
    lacks: tuple[str, ...], expected: tuple[object, ...], drivers: build.Drivers
) -> None:
    assert devices(drivers, "uuid", "drm", "cuda", egl_order=(3,), egl_lacks=lacks) == [expected]


@pytest.mark.parametrize(
    "mask",
    [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": machines.uuid(3), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
    ],
)
def test_neither_the_mask_nor_the_order_of_this_process_matters(mask: dict[str, str], drivers: build.Drivers) -> None:
    settings = build.configuration(fastest_first=(3, 1, 0, 2), egl_order=(1, 3, 2, 0))
    answer = ask_egl(drivers, {**settings, **mask})
    assert isinstance(answer["devices"], list)
    assert [device["cuda"] for device in answer["devices"]] == [1, 3, 2, 0]
    order = json.loads(drivers.python(ASK.format("cuda_order"), {**settings, **mask}))
    assert order == [machines.uuid(number) for number in (3, 1, 0, 2)]


def test_no_device_is_no_error(drivers: build.Drivers) -> None:
    assert devices(drivers, "index", egl_order=()) == []


def test_more_devices_than_renderers_ask_for_are_all_listed(drivers: build.Drivers) -> None:
    order = (*range(8), *range(100, 108), -1)
    found = devices(drivers, "index", "software", gpus=8, egl_order=order)
    assert found == [(index, index == 16) for index in range(17)]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("crash", "the process that asked it (exit -6): the driver has crashed"),
        ("missing", "libEGL.so.1 has no eglQueryDevicesEXT"),
        ("exit", ""),
    ],
)
def test_a_broken_driver_is_an_answer(fault: str, error: str, drivers: build.Drivers) -> None:
    answer = ask_egl(drivers, build.configuration(egl_fault=fault))
    assert answer["error"]
    assert error in str(answer["error"])
    assert answer["devices"] == []


def test_what_a_driver_prints_does_not_disturb(drivers: build.Drivers) -> None:
    assert devices(drivers, "cuda", egl_fault="chatter", egl_order=(1, 0)) == [(1,), (0,)]


def test_a_driver_that_hangs_is_given_up(drivers: build.Drivers) -> None:
    code = "from rl_ext_core.devices import _probe; _probe._TIMEOUT_S = 0.5; " + ASK.format("egl")
    start = time.monotonic()
    answer = json.loads(drivers.python(code, build.configuration(egl_fault="hang")))
    assert time.monotonic() - start < 10
    assert "did not answer within" in answer["error"]
    assert answer["devices"] == []


def test_without_a_library_the_answer_says_what_to_install(drivers: build.Drivers) -> None:
    answer = ask_egl(drivers, build.configuration(), without=("egl.c",))
    assert "libEGL.so.1" in str(answer["error"])
    assert "apt-get install libegl1" in str(answer["error"])


@pytest.mark.parametrize("code", [1, 3, 100, 999])
def test_a_cuda_that_does_not_start_tells_no_order(code: int, drivers: build.Drivers) -> None:
    assert drivers.python(ASK.format("cuda_order"), build.configuration(cuda_fail=code)) == "null"


def test_without_libcuda_there_is_no_order(drivers: build.Drivers) -> None:
    assert drivers.python(ASK.format("cuda_order"), build.configuration(), without=("cuda.c",)) == "null"


def test_an_interpreter_that_cannot_be_started_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    answer = _probe.egl()
    assert "/no/such/python could not be started" in answer["error"]
    assert answer["devices"] == []
    assert _probe.cuda_order() is None


@pytest.mark.parametrize("number", range(8))
def test_sixteen_bytes_become_the_uuid_that_nvml_writes(number: int) -> None:
    digits = machines.uuid(number).removeprefix("GPU-").replace("-", "")
    assert _probe.format_uuid(bytes.fromhex(digits)) == machines.uuid(number)
