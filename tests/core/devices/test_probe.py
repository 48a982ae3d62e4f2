"""EGL and CUDA are asked from outside of this process, and whatever they do there is an answer."""

from __future__ import annotations

import json
import sys

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


def test_more_devices_than_renderers_ask_for_are_all_listed(drivers: build.Drivers) -> None:
    order = (*range(8), *range(100, 108), -1)
    found = devices(drivers, "index", "software", gpus=8, egl_order=order)
    assert found == [(index, index == 16) for index in range(17)]


def test_what_a_driver_prints_does_not_disturb(drivers: build.Drivers) -> None:
    assert devices(drivers, "cuda", egl_fault="chatter", egl_order=(1, 0)) == [(1,), (0,)]


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
