"""Decisions in the workers of gymnasium's AsyncVectorEnv, which also creates one environment in the parent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.devices.binding import EXPECTED, UNSET
from tests.core.devices.run_code import run

GYMNASIUM = """
import gymnasium as gym
from tests.core.devices.binding import bound, bind_to_mesa
from tests.core.devices.reporting_env import reports
"""


@pytest.mark.sample(quick=2, ci=2)
@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_applies_decision_before_unpickling_its_factory(context: str, tmp_path: Path) -> None:
    ended = run(
        GYMNASIUM,
        f"""
        folder, context = {str(tmp_path)!r}, {context!r}
        venv = gym.vector.AsyncVectorEnv(bound(folder), context=context)
        venv.reset()
        venv.close()
        answer = [reports(folder), variables()]
        """,
    )
    (in_parent, *workers), parent = ended.answer
    assert [report["called"] for report in workers] == EXPECTED
    # A forked worker inherits the imported module and the factory from its parent.
    assert [report["unpickled"] for report in workers] == ([None] * 3 if context == "fork" else EXPECTED)
    assert [report["imported"] for report in workers] == ([UNSET] * 3 if context == "fork" else EXPECTED)
    assert context == "fork" or [report["loaded"] for report in workers] == [[]] * 3, (
        "no slow import because of this package"
    )
    assert in_parent["in_parent"]
    assert in_parent["called"] == parent == EXPECTED[0], "the parent did not use the first worker's decision"


def test_parent_keeps_its_applied_decision(tmp_path: Path) -> None:
    ended = run(
        GYMNASIUM,
        f"""
        folder = {str(tmp_path)!r}
        factories = bound(folder)
        factories[2].decision.apply()
        gym.vector.AsyncVectorEnv(factories, context="forkserver").close()
        answer = [[report["called"] for report in reports(folder)], variables()]
        """,
    )
    (in_parent, *workers), parent = ended.answer
    assert workers == EXPECTED
    assert in_parent == parent == EXPECTED[2]
    assert ended.stderr.count("a worker's environment is built in the parent process") == 1


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_render_with_mesa(context: str, tmp_path: Path) -> None:
    ended = run(
        GYMNASIUM,
        f"""
        venv = gym.vector.AsyncVectorEnv(bind_to_mesa({str(tmp_path)!r}), context={context!r})
        venv.reset()
        answer = [[list(image.shape), float(image.std())] for image in venv.render()]
        venv.close()
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert ended.error == ""
    assert all(shape == [64, 64, 3] and spread > 10 for shape, spread in ended.answer)
