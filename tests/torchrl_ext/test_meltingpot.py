"""ParallelEnv of one instance of Melting Pot, in an environment of its own: scripts/make_meltingpot_venv.sh."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.core.devices.processes import environment
from tests.torchrl_ext.in_meltingpot.venv import python

FOLDER = Path(__file__).parent / "in_meltingpot"
# Of workers, their fork server and the parent; several times what was measured.
NEEDED = 8 * 2**30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def num_workers() -> int:
    return 6 if psutil.virtual_memory().available > NEEDED else 2


@pytest.fixture(scope="module")
def answers(num_workers: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("meltingpot")
    mark = f"{folder}/simulators"
    done = subprocess.run(
        [python(), FOLDER / "program.py", str(num_workers)],
        env=environment(LAB2D_LOG=mark, PYTHONPATH=str(FOLDER), CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert wait_for_processes(mark) == []
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def wait_for_processes(mark: str) -> list[str]:
    """List what still runs of those that were given this variable; the fork server ends just after its parent."""
    deadline = time.monotonic() + 120
    while True:
        running = [process for process in psutil.process_iter() if has_variable(process, mark)]
        if not running or time.monotonic() > deadline:
            return [str(process) for process in running]
        time.sleep(0.1)


def has_variable(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("LAB2D_LOG") == mark
    except psutil.Error:
        return False


def test_the_line_that_users_write(answers: list[dict[str, Any]], num_workers: int) -> None:
    answer = answers[0]
    assert answer["shape"] == [num_workers, 5]
    assert answer["frames differ"]
    assert len(set(answer["first seeds"])) == num_workers
    assert answer["simulators of the parent"] == 1  # that of the instance
    assert answer["workers left"] == []
    # One process that imports TorchRL and Melting Pot has a gigabyte of its own.
    assert max(answer["private MiB"]) < 300


def test_an_instance_that_was_changed_and_a_seed(answers: list[dict[str, Any]]) -> None:
    answer = answers[1]
    first, again = answer["chains"]
    assert first == again
    for chain in first:
        assert chain == [(chain[0] + count) % 2**32 for count in range(3)]
    assert first[0][0] != first[1][0]
    assert answer["ends"] == [[[3, 7]] * 2] * 2
    assert answer["simulators of the parent"] == 0  # beside the instance, which goes on
    assert answer["instance afterwards"] == [4]
