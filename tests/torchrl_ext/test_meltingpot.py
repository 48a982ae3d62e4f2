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


def run(part: str, num_workers: int, folder: Path) -> dict[str, Any]:
    mark = f"{folder}/simulators"
    done = subprocess.run(
        [python(), FOLDER / "program.py", part, str(num_workers)],
        env=environment(LAB2D_LOG=mark, PYTHONPATH=str(FOLDER), CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert left(mark) == []
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def left(mark: str) -> list[str]:
    """List what still runs of those that were given this variable; the fork server ends just after its parent."""
    deadline = time.monotonic() + 120
    while True:
        running = [process for process in psutil.process_iter() if marked(process, mark)]
        if not running or time.monotonic() > deadline:
            return [str(process) for process in running]
        time.sleep(0.1)


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("LAB2D_LOG") == mark
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    num_workers = 6 if psutil.virtual_memory().available > NEEDED else 2
    return num_workers, run("the line", num_workers, tmp_path_factory.mktemp("line"))


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("the instance", 2, tmp_path_factory.mktemp("instance"))


def test_the_line_that_users_write_gives_a_rollout_of_all_workers(line: tuple[int, dict[str, Any]]) -> None:
    num_workers, answer = line
    assert answer["shape"] == [num_workers, 5]


def test_each_worker_plays_a_game_of_its_own(line: tuple[int, dict[str, Any]]) -> None:
    num_workers, answer = line
    assert answer["frames differ"]
    assert len(set(answer["first seeds"])) == num_workers


def test_the_parent_builds_no_simulator_but_that_of_the_instance(line: tuple[int, dict[str, Any]]) -> None:
    assert line[1]["simulators of the parent"] == 1


def test_close_leaves_no_worker(line: tuple[int, dict[str, Any]]) -> None:
    assert line[1]["workers left"] == []


def test_workers_share_what_they_import(line: tuple[int, dict[str, Any]]) -> None:
    # One process that imports TorchRL and Melting Pot has a gigabyte of its own.
    assert max(line[1]["private MiB"]) < 300


def test_one_seed_gives_each_worker_the_same_chain_of_seeds_again(instance: dict[str, Any]) -> None:
    first, again = instance["chains"]
    assert first == again
    for chain in first:
        assert chain == [(chain[0] + count) % 2**32 for count in range(3)]
    assert first[0][0] != first[1][0]


def test_workers_have_what_was_changed_after_construction(instance: dict[str, Any]) -> None:
    assert instance["ends"] == [[[3, 7]] * 2] * 2


def test_the_instance_goes_on_where_no_simulator_was_built_beside_it(instance: dict[str, Any]) -> None:
    assert instance["simulators of the parent"] == 0
    assert instance["instance afterwards"] == [4]
