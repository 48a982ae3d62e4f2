"""The device that is named is used or refused; only "auto" chooses; and what renders is what was asked for."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import sys
from typing import Any

import pytest
import torch

from rl_ext_core import devices
from rl_ext_core.devices import Decision, Inventory, _cuda, _resolve
from rl_ext_core.errors import (
    DeviceConflictError,
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
)
from tests.core.devices.machines import egl, machine, uuid

FOUR = machine(4, order=(2, 3, 0, 1))
NONE = machine(0)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resolve, "_said", set())


def resolve(device: Any = "auto", *, inventory: Inventory = FOUR, environ: Any = None, **options: Any) -> Decision:
    return devices.resolve(device, inventory=inventory, environ=environ or {}, **options)


def test_the_cpu_needs_no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(**_: bool) -> Inventory:
        raise AssertionError("not needed")

    monkeypatch.setattr(Inventory, "current", look)
    assert devices.resolve("cpu").device == "cpu"


def test_auto_without_a_gpu_is_the_cpu_and_logs_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rl_ext_core.devices"):
        decisions = [resolve(inventory=NONE) for _ in range(3)]
    assert {decision.compute for decision in decisions} == {torch.device("cpu")}
    assert [record.getMessage() for record in caplog.records] == [decisions[0].reason]
    assert "no NVIDIA driver" in decisions[2].reason


def test_auto_with_gpus_carries_an_index_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rl_ext_core.devices"):
        decision = resolve()
    assert decision.compute == torch.device("cuda:0")
    assert decision.gpu == FOUR.gpus[0]
    assert decision.reason == "auto: cuda:0, because it is the first of 4 visible"
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [
        ("cuda", 0),
        ("cuda:1", 1),
        (2, 2),
        (torch.device("cuda", 1), 1),
        (uuid(3), 0),
        ("GPU-bbbb", 2),
        ("GPU-AAAA1111", 1),
        ("nvidia-smi:3", 0),
        ("pci:0000:3a:00.0", 2),
        ("pci:00000000:3A:00.0", 2),
        ("pci:2a:00.0", 1),
    ],
)
def test_every_form_of_request_finds_its_gpu_under_a_mask(device: str | int | torch.device, ordinal: int) -> None:
    numbers = (3, 1, 2)
    decision = resolve(device, environ={"CUDA_VISIBLE_DEVICES": "3,1,2"})
    assert decision.device == f"cuda:{ordinal}"
    assert decision.gpu == FOUR.gpus[numbers[ordinal]]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99", 0, torch.device("cuda:0"), "nvidia-smi:0", "GPU-aa"])
def test_a_gpu_by_name_without_one_is_refused(device: str | int | torch.device) -> None:
    with pytest.raises(DeviceUnavailableError, match='Write device="cpu"') as caught:
        resolve(device, inventory=NONE)
    assert repr(str(device)) in str(caught.value)


def test_a_named_gpu_that_is_missing_may_become_the_cpu_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    decision = resolve("cuda:9", on_missing="cpu", render="same")
    assert (decision.device, decision.render) == ("cpu", "cpu")
    assert "on_missing: device='cuda:9'" in caplog.text


def test_a_rendering_gpu_that_is_missing_becomes_the_cpu_only_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    bare = dataclasses.replace(FOUR, egl=egl(()))
    with pytest.raises(DeviceUnavailableError, match=r"10_nvidia\.json"):
        resolve("cuda:1", render="same", inventory=bare)
    decision = resolve("cuda:1", render="same", inventory=bare, on_missing="cpu")
    assert (decision.device, decision.render) == ("cuda:1", "cpu")
    assert "10_nvidia.json" in caplog.text


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("", "auto"),
        ("gpu", "auto"),
        ("CPU", "cpu"),
        ("cuda:", "auto"),
        ("cuda:-1", "auto"),
        ("cuda:1 ", "cuda:1"),
        ("'cuda:1'", "cuda:1"),
        ("gpu:2", "cuda:2"),
        ("cuda:¹", "auto"),
        ("mps", "auto"),
        ("1", "cuda:1"),
        (torch.device("meta"), "auto"),
        ("same", "auto"),
        ("egl:0", "auto"),
    ],
)
def test_text_that_names_no_device_is_refused_with_what_was_meant(device: str | torch.device, line: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f'Write device="{line}"') as caught:
        resolve(device)
    assert repr(str(device)) in str(caught.value)


@pytest.mark.parametrize("device", [-1, True, None, b"cpu", 1.0, ["cpu"]])
def test_other_types_are_refused(device: object) -> None:
    with pytest.raises(InvalidTypeError, match='Write device="auto"') as caught:
        resolve(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pick": "first"}, 'pick="rank"'),
        ({"rank": -1}, "rank=0"),
        ({"worker": "1"}, "worker=0"),
        ({"rank": True}, "rank=0"),
        ({"on_missing": "ignore"}, 'on_missing="error"'),
        ({"render": "same", "renderer": "blender"}, 'renderer="mujoco"'),
        ({"render": "yes"}, 'render="same"'),
    ],
)
def test_options_that_nobody_knows_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=expected):
        resolve(**options)


def test_without_torch_a_decision_can_be_made_and_its_torch_device_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    decision = resolve("cuda:1", inventory=machine(2, without=("torch", "torch.cuda")), render="same")
    assert decision.device == "cuda:1"
    with pytest.raises(MissingDependencyError, match=r'pip install "rl-ext\[sb3\]"'):
        _ = decision.compute


def test_the_current_device_is_kept_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "current_of_torch", lambda: 2)
    assert resolve("auto").device == "cuda:2"
    assert resolve("cuda").device == "cuda:2"


def test_a_mask_that_was_changed_after_torch_had_started_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    monkeypatch.setattr(_cuda, "_started_uuids", lambda: (uuid(0), uuid(1)))
    assert devices.resolve("auto", environ={"CUDA_VISIBLE_DEVICES": "0,1"}).device == "cuda:0"
    with pytest.raises(DeviceConflictError, match=r"CUDA_VISIBLE_DEVICES='1'.*before the program starts"):
        devices.resolve("auto", environ={"CUDA_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize("renderer", ["robosuite", "mujoco", "gymnasium", "dm_control"])
def test_the_gpu_that_computes_renders(renderer: str) -> None:
    decision = resolve("cuda:1", render="same", renderer=renderer, environ={"CUDA_VISIBLE_DEVICES": "3,1"})
    assert decision.render_gpu == decision.gpu == FOUR.gpus[1]
    assert decision.egl is not None
    assert decision.egl.index == 3
    assert decision.variables == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "3"}


def test_the_explanation_names_every_numbering_and_each_step() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3,1,9", "LOCAL_RANK": "1"}
    text = resolve(render="same", renderer="robosuite", environ=environ).explain()
    for part in (
        "cuda:1",
        uuid(1),
        "nvidia-smi 1",
        "PCI 0000:2a:00.0",
        "EGL device 3",
        "/dev/dri/renderD129",
        "robosuite 1.5.1",
        "MUJOCO_EGL_DEVICE_ID=3",
        "CUDA_VISIBLE_DEVICES='3,1,9'",
        "LOCAL_RANK='1'",
        "CUDA stops reading at '9'",
    ):
        assert part in text


def test_a_decision_is_written_as_json_and_travels() -> None:
    decision = resolve("cuda:1", render="same", renderer="robosuite")
    data = json.loads(decision.to_json())
    assert data["device"] == "cuda:1"
    assert data["variables"]["MUJOCO_EGL_DEVICE_ID"] == "3"
    assert pickle.loads(pickle.dumps(decision)) == decision


def test_a_decision_cannot_be_changed() -> None:
    decision = resolve("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.reason = "other"  # type: ignore[misc]


def test_the_torch_device_alone() -> None:
    assert devices.resolve_device("cpu") == torch.device("cpu")
    assert devices.resolve_device("cuda:77", on_missing="cpu") == torch.device("cpu")
    with pytest.raises(DeviceUnavailableError):
        devices.resolve_device("cuda:77")
