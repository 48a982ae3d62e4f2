"""Errors of workers of SB3's SubprocVecEnv that import a renderer first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.devices.run_code import environment


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
