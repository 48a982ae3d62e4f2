"""Whole programs: environments of the main script, of notebooks, without a guard; and the deaths of programs."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import psutil
import pytest

from tests.core.processes.test_scripts import LIMIT_S, Program, clear_sockets, program, session_of

__all__ = ["program"]

SCRIPT = """
import os, sys, time
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from sb3_ext import SharedMemoryVecEnv, make_vec_env

SEEN = os.environ["SEEN"]
open(SEEN, "a").write("x")  # how often this script is run

class World(gym.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    level = 0

    def __init__(self, level=1, render_mode=None):
        self.level, self.render_mode = level, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        while self.level == "hang": pass
        return np.ones(2, np.float32), 1.0, False, False, {}

class Around(gym.Wrapper):
    pass

gym.register("World-v0", entry_point=World)
def make(): return Around(World(3))
"""

WAYS = {
    "a class": "SharedMemoryVecEnv([World] * 2{options})",
    "a function": "SharedMemoryVecEnv([make] * 2{options})",
    "lambdas": "SharedMemoryVecEnv([lambda level=level: World(level) for level in range(2)]{options})",
    "an id": "SharedMemoryVecEnv([lambda: gym.make('World-v0')] * 2{options})",
    "make_vec_env": "make_vec_env('World-v0', 2, isolation='process')",
    "make_vec_env, auto": "make_vec_env(World, 2)",
}
USE = """
    venv.reset()
    venv.step(np.zeros(2, np.int64))
    print(venv.get_attr("level"), venv.env_is_wrapped(Around), flush=True)
    venv.close()
"""
PRINTED = {"a function": "[3, 3] [True, True]", "lambdas": "[0, 1] [False, False]"}


def run(program: Program, text: str, name: str = "train.py") -> subprocess.CompletedProcess[str]:
    process = start(program, text, name)
    output, errors = process.communicate(timeout=4 * LIMIT_S)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def start(program: Program, text: str, name: str = "train.py") -> subprocess.Popen[str]:
    script = program.folder / name
    script.write_text(text)
    os.environ["SEEN"] = str(program.folder / "seen")
    os.environ["XDG_CACHE_HOME"] = str(program.folder / "cache")
    return program.run([str(script)])


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEEN", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")


@pytest.mark.sample(quick=0, ci=4)
@pytest.mark.parametrize("method", ["", pytest.param(", 'spawn'", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [way if way != "make_vec_env, auto" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_environments_of_the_main_script_need_no_guard(way: str, method: str, program: Program) -> None:
    ended = run(program, f"{SCRIPT}if True:\n    venv = {WAYS[way].format(options=method)}{USE}")
    assert ended.stderr == ""
    assert ended.stdout.strip() == PRINTED.get(way, "[1, 1] [False, False]")
    assert (program.folder / "seen").read_text() == "x"


DEATH = """
if __name__ == "__main__":
    venv = SharedMemoryVecEnv([lambda: World(), lambda: World("hang"), lambda: World()], {method!r})
    venv.reset()
    try:
        print("ready", flush=True)
        {work}
    finally:
        {last}
"""
STEP = "venv.step(np.zeros(3, np.int64))"


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
)
@pytest.mark.parametrize(
    ("end", "last"), [(signal.SIGKILL, "pass"), (signal.SIGTERM, "pass"), (signal.SIGINT, "venv.close()")]
)
def test_no_worker_outlives_the_program(method: str, end: signal.Signals, last: str, program: Program) -> None:
    last = last.replace(
        "venv.close()",
        "from rl_ext_core.errors import WorkerError\n        try: venv.close()\n        except WorkerError: pass",
    )
    process = start(program, SCRIPT + DEATH.format(method=method, work=STEP, last=last))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    assert len(psutil.Process(process.pid).children(recursive=True)) >= 3
    process.send_signal(end)
    process.wait(LIMIT_S)
    assert not session_of(process.pid)
    clear_sockets(program)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends(program: Program) -> None:
    ended = run(program, SCRIPT + "venv = SharedMemoryVecEnv([World] * 2)\nvenv.reset()\nprint('end')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
    assert not session_of(program.running[-1].pid)
