"""Classes and functions of a script cross processes unchanged, in every way of running the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch_modes import LAUNCH_MODES, run_program

TEXT = """
import dataclasses, enum
import gymnasium as gym
import numpy as np
from rl_ext_core.errors import WorkerError
from sb3_ext import SharedMemoryVecEnv, as_factory

LEVEL = 1
CALLS = []

class Outcome(enum.Enum):
    WON = 1

class Lost(Exception):
    pass

@dataclasses.dataclass
class Task:
    level: int
    made = 0
    def doubled(self):
        Task.made += 1
        return 2 * self.level * LEVEL

def reward_of(task):
    CALLS.append(task)
    return float(task.level)

class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    render_mode = None
    built = 0
    def __init__(self):
        Env.built += 1
        self.task, self.reward = Task(1), None
    def configure(self, task, raising=False):
        global LEVEL
        if raising:
            raise Lost("the way")
        assert type(task) is Task and isinstance(task, Task)
        self.task, LEVEL = task, 10
        return task.doubled()
    def level(self):
        return LEVEL
    def counted(self):
        return Env.built, Task.made, len(CALLS)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if options: self.task = options["task"]
        return np.zeros(2, np.float32), {"task": self.task}
    def step(self, action):
        reward = reward_of(self.task) if self.reward is None else self.reward(self.task)
        return np.zeros(2, np.float32), reward, False, False, {"outcome": Outcome.WON, "task": self.task}
# %%
venv = SharedMemoryVecEnv([Env] * 3, n_workers=1)
venv.set_options([{"task": Task(level)} for level in (4, 5, 6)])
venv.reset()
assert [info["task"] for info in venv.reset_infos] == [Task(4), Task(5), Task(6)]
assert all(type(info["task"]) is Task for info in venv.reset_infos)
_, rewards, _, infos = venv.step(np.zeros(3, np.int64))
assert rewards.tolist() == [4, 5, 6]
assert all(info["outcome"] is Outcome.WON for info in infos), infos
assert venv.env_method("configure", Task(3)) == [60, 60, 60], "globals of the script are one in a worker"
assert venv.env_method("configure", Task(2), indices=[1]) == [40]
built, made, calls = venv.env_method("counted")[0]
assert (built, made, calls) == (3, 4, 3), (built, made, calls)
venv.set_attr("task", Task(7))
assert venv.get_attr("task") == [Task(7)] * 3
assert type(venv.get_attr("task")[0]) is Task
venv.set_attr("reward", reward_of)
assert venv.get_attr("reward")[0] is reward_of
venv.step(np.zeros(3, np.int64))
assert venv.env_method("counted")[0] == (3, 4, 6), "what was sent later appends to the same list"
try:
    venv.env_method("configure", None, raising=True)
except Lost as error:
    assert str(error) == "the way"
assert (LEVEL, CALLS, Env.built, Task.made) == (1, [], 0, 0), "this process is left alone"
venv.close()
factory = as_factory(lambda: Env())
LEVEL = 7
venv = SharedMemoryVecEnv([factory])
assert venv.env_method("level") == [7], "globals of the script are those of when it is sent"
venv.close()
print("well")
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("launch_mode", LAUNCH_MODES)
def test_classes_of_main_script_cross_processes_in_every_launch_mode(launch_mode: str, tmp_path: Path) -> None:
    assert run_program(launch_mode, TEXT, tmp_path, preloaded="sb3").strip() == "well"
