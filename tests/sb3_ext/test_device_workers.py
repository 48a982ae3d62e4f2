"""Device decisions in the workers of SB3's SubprocVecEnv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.devices.binding import EXPECTED, UNSET
from tests.core.devices.run_code import environment, run

SB3 = """
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from tests.core.devices.binding import bound, bind_to_mesa
from tests.core.devices.reporting_env import Reporter, reports
import sys, torch
"""


@pytest.mark.slow
def test_gpu_is_set_before_factory_is_unpickled_in_worker(tmp_path: Path) -> None:
    ended = run(
        SB3,
        f"""
        folder = {str(tmp_path)!r}
        venv = SubprocVecEnv(bound(folder), start_method="forkserver")
        venv.reset()
        venv.close()
        answer = [reports(folder), variables(), torch.cuda.is_initialized()]
        DummyVecEnv(bound(folder)).close()
        answer += [[report["called"] for report in reports(folder)], variables()]
        """,
    )
    workers, before, cuda, built, after = ended.answer
    for when in ("imported", "unpickled", "called"):
        assert [report[when] for report in workers] == EXPECTED
    assert not any(report["in_parent"] for report in workers)
    assert before == UNSET
    assert not cuda
    assert built == [EXPECTED[0]] * 3
    assert after == EXPECTED[0]
    assert ended.stderr.count("a worker's environment is built in the parent process") == 1


@pytest.mark.slow
def test_workers_render_with_mesa(tmp_path: Path) -> None:
    ended = run(
        SB3,
        f"""
        venv = SubprocVecEnv(bind_to_mesa({str(tmp_path)!r}), start_method="forkserver")
        venv.reset()
        answer = [[list(image.shape), float(image.std())] for image in venv.get_images()]
        venv.close()
        """,
        CUDA_VISIBLE_DEVICES="1",
    )
    for shape, spread in ended.answer:
        assert shape == [64, 64, 3]
        assert spread > 10


@pytest.mark.slow
def test_error_for_renderer_import_at_top_of_script_names_fix(tmp_path: Path) -> None:
    # multiprocessing imports the script in its workers before it unpickles their arguments.
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from rl_ext_core.devices import resolve\n"
        "if sys.argv[1:]: resolve('cpu', render='same').apply()\n"
        "import mujoco\n"
        "def build():\n"
        "    import gymnasium\n"
        "    return gymnasium.make('CartPole-v1')\n"
        "if __name__ == '__main__':\n"
        "    from stable_baselines3.common.vec_env import SubprocVecEnv\n"
        "    from rl_ext_core.factory import as_factory\n"
        "    decision = resolve('cpu', render='same')\n"
        "    SubprocVecEnv(as_factory(build).for_workers(1, devices=decision)).close()\n"
    )
    for arguments, is_fixed in ([], False), (["applied"], True):
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode == 0) is is_fixed, done.stderr
        assert ("call resolve(...).apply() above `import mujoco`" in done.stderr) is not is_fixed
