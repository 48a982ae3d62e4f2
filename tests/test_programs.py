"""Forked programs have the results of new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

SHOWS = """
import json, os, pickle, signal, sys, tempfile, threading
import stable_baselines3, torch
class Own: pass
def main():
    model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", seed=1, n_steps=16, batch_size=8, device="cpu").learn(32)
    weights = [part.double().sum().item() for part in model.policy.state_dict().values()]
    shown = [__name__, globals().get("__file__"), sys.argv, sys.path[0], os.getcwd(), os.environ["MARK"], weights]
    shown += [repr(sys.stdin.read()), signal.getsignal(signal.SIGINT) is signal.default_int_handler]
    shown += [signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, threading.active_count(), tempfile.gettempdir()]
    shown += [type(pickle.loads(pickle.dumps(Own()))) is Own, sorted(globals()), torch.rand(3).tolist()]
    print(json.dumps(shown))
main()
print("to stderr", file=sys.stderr)
raise ArithmeticError("at the end")
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("is_script", [True, False])
def test_forked_program_shows_the_same_as_a_new_interpreter(is_script: bool, tmp_path: Path) -> None:
    file = tmp_path / "script.py" if is_script else None
    environ = {**os.environ, "MARK": "own", "TMPDIR": str(tmp_path), "PYTHONPATH": str(programs.ROOT)}
    if file is not None:
        file.write_text(SHOWS)
    command = [sys.executable, *([str(file)] if file else ["-c", SHOWS]), "a", "b"]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "cwd": tmp_path, "env": environ}
    cold = subprocess.run(command, check=False, **options)
    warm = programs.run(SHOWS, "sb3", "a", "b", file=file, cwd=tmp_path, environ=environ)
    assert warm.stdout == cold.stdout != ""
    assert warm.stderr == cold.stderr
    assert warm.returncode == cold.returncode == 1
