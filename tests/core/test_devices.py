"""The device that is named is used or refused; only "auto" chooses."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable

import pytest
import torch

from rl_ext_core import devices
from rl_ext_core.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
)

Gpus = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Let torch say that it sees ``count`` CUDA devices; CUDA is initialised if one is ``current``."""

    def pretend(count: int, *, current: int | None = None) -> None:
        def current_device() -> int:
            assert current is not None, "CUDA must not be initialised by asking"
            return current

        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", current_device)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(devices, "_logged_cpu", False)

    return pretend


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_cpu_is_the_cpu(device: str | torch.device, gpus: Gpus) -> None:
    gpus(2)
    assert devices.resolve(device).compute == torch.device("cpu")


def test_auto_without_cuda_is_the_cpu_and_logs_why_once(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    gpus(0)
    with caplog.at_level(logging.INFO, logger="rl_ext_core.devices"):
        decisions = [devices.resolve() for _ in range(3)]
    assert {decision.compute for decision in decisions} == {torch.device("cpu")}
    assert [record.getMessage() for record in caplog.records] == [decisions[0].reason]
    assert "no CUDA device" in decisions[2].reason


def test_auto_with_cuda_carries_an_index_and_logs_nothing(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    gpus(2)
    with caplog.at_level(logging.INFO, logger="rl_ext_core.devices"):
        decision = devices.resolve("auto")
    assert decision.compute == torch.device("cuda:0")
    assert decision.reason == "auto: cuda:0 of 2 CUDA devices"
    assert not caplog.records


@pytest.mark.parametrize("device", ["auto", "cuda", torch.device("cuda")])
def test_the_current_device_is_kept_once_cuda_is_initialised(device: str | torch.device, gpus: Gpus) -> None:
    gpus(3, current=2)
    assert devices.resolve(device).compute == torch.device("cuda:2")


@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1)])
def test_an_index_is_used_as_given(device: str | torch.device, gpus: Gpus) -> None:
    gpus(2, current=0)
    assert devices.resolve(device).compute == torch.device("cuda:1")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99", torch.device("cuda:0")])
def test_cuda_by_name_without_cuda_is_refused(device: str | torch.device, gpus: Gpus) -> None:
    gpus(0)
    with pytest.raises(DeviceUnavailableError, match='Write device="cpu"') as caught:
        devices.resolve(device)
    assert repr(str(device)) in str(caught.value)


def test_an_index_beyond_the_visible_devices_is_refused(gpus: Gpus) -> None:
    gpus(2)
    with pytest.raises(DeviceUnavailableError, match=r"'cuda:2'.*sees 2 CUDA devices.*device=\"cuda:1\""):
        devices.resolve("cuda:2")


def test_the_reason_names_the_mask_that_hides_the_devices(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7'" in devices.resolve("auto").reason
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "on this machine" in devices.resolve("auto").reason


def test_the_reason_names_a_torch_without_cuda(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert f"torch {torch.__version__} is built without CUDA" in devices.resolve("auto").reason


@pytest.mark.parametrize(
    "device",
    [
        "",
        "gpu",
        "CPU",
        "cuda:",
        "cuda:-1",
        "cuda:01",
        "cuda:1 ",
        "cuda:x",
        "cuda:¹",
        "mps",
        "0",
        torch.device("meta"),
    ],
)
def test_text_that_names_no_device_is_refused(device: str | torch.device, gpus: Gpus) -> None:
    gpus(2)
    with pytest.raises(InvalidArgumentError, match='Write device="auto"') as caught:
        devices.resolve(device)
    assert repr(str(device)) in str(caught.value)


@pytest.mark.parametrize(
    ("device", "line"),
    [(1, "cuda:1"), (0, "cuda:0"), (-1, "auto"), (True, "auto"), (None, "auto"), (b"cpu", "auto")],
)
def test_other_types_are_refused(device: object, line: str) -> None:
    with pytest.raises(InvalidTypeError, match=f'Write device="{line}"') as caught:
        devices.resolve(device)  # type: ignore[arg-type]
    assert repr(device) in str(caught.value)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "rl-ext\[sb3\]"'):
        devices.resolve("cpu")


def test_a_decision_cannot_be_changed() -> None:
    decision = devices.resolve("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.reason = "other"  # type: ignore[misc]
