"""Tests of ParallelEnv with Melting Pot; see scripts/make_meltingpot_venv.sh."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.core.devices.run_code import environment
from tests.ray_scripts import MARK, wait_for_marked_processes
from tests.torchrl_ext.in_meltingpot.venv import python

FOLDER = Path(__file__).parent / "in_meltingpot"
# Bytes for workers, fork server and parent, several times the measured need.
NEEDED = 8 * 2**30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def num_workers() -> int:
    return 6 if psutil.virtual_memory().available > NEEDED else 2


@pytest.fixture(scope="module")
def answers(num_workers: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("meltingpot")
    variables = {"LAB2D_LOG": f"{folder}/simulators", MARK: str(folder)}
    done = subprocess.run(
        [python(), FOLDER / "program.py", str(num_workers)],
        env=environment(**variables, PYTHONPATH=str(FOLDER), CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert wait_for_marked_processes(str(folder)) == []
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_documented_line_starts_independent_workers(answers: list[dict[str, Any]], num_workers: int) -> None:
    answer = answers[0]
    assert answer["shape"] == [num_workers, 5]
    assert answer["frames differ"]
    assert len(set(answer["first seeds"])) == num_workers
    assert answer["simulators of the parent"] == 1  # the instance's own simulator
    assert answer["workers left"] == []
    # A process that imports TorchRL and Melting Pot itself has a gigabyte of private memory.
    assert max(answer["private MiB"]) < 300


def test_seeded_workers_copy_a_changed_instance_reproducibly(answers: list[dict[str, Any]]) -> None:
    answer = answers[1]
    first, again = answer["chains"]
    assert first == again
    for chain in first:
        assert chain == [(chain[0] + count) % 2**32 for count in range(3)]
    assert first[0][0] != first[1][0]
    assert answer["ends"] == [[[3, 7]] * 2] * 2
    assert answer["simulators of the parent"] == 0  # except the instance's own simulator
    assert answer["instance afterwards"] == [4]
