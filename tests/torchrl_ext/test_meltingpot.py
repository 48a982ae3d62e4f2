"""Test of ParallelEnv with Melting Pot; see scripts/make_meltingpot_venv.sh."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.core.devices.run_code import environment
from tests.ray_scripts import MARK, wait_for_marked_processes
from tests.requirements import find_python

FOLDER = Path(__file__).parent / "in_meltingpot"
# Bytes for workers, fork server and parent, several times the measured need.
NEEDED = 8 * 2**30


@pytest.mark.slow
def test_workers_are_independent_and_copy_a_changed_instance(tmp_path: Path) -> None:
    variables = {"LAB2D_LOG": f"{tmp_path}/simulators", MARK: str(tmp_path)}
    num_workers = 6 if psutil.virtual_memory().available > NEEDED else 2
    done = subprocess.run(
        [find_python("meltingpot"), FOLDER / "program.py", str(num_workers)],
        env=environment(**variables, PYTHONPATH=str(FOLDER), CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert wait_for_marked_processes(str(tmp_path)) == []
