from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.core.factory.main_script import CHECKS, DEFINITIONS
from tests.core.processes.test_scripts import LIMIT_S, Program, program
from tests.launch_modes import LAUNCH_MODES, run_program

__all__ = ["program"]

SPAWNED = """
import multiprocessing
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from sb3_ext import SharedMemoryVecEnv, make_vec_env

class World(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, level=1):
        self.level = level

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, {}

class Around(gym.Wrapper):
    pass

def make():
    return Around(World(3))

def use(venv):
    venv.reset()
    venv.step(np.zeros(2, np.int64))
    print(venv.get_attr("level"), venv.env_is_wrapped(Around), flush=True)
    venv.close()

def train(kind):
    use(SharedMemoryVecEnv([World, make]))
    use(make_vec_env(World(4), 2, isolation="process"))
    from torchrl_ext import ParallelEnv, GymWrapper
    env = ParallelEnv(2, lambda: GymWrapper(World()))
    print(env.rollout(2)["action"].shape, flush=True)
    env.close()

if __name__ == "__main__":
    process = multiprocessing.get_context("%s").Process(target=train, args=(World,))
    process.start()
    process.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_environments_of_main_script_work_in_workers_of_a_started_process(
    method: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = program.folder / "train.py"
    script.write_text(SPAWNED % method)
    monkeypatch.setenv("XDG_CACHE_HOME", str(program.folder / "cache"))
    output, errors = program.run([str(script)]).communicate(timeout=4 * LIMIT_S)
    printed = ["[1, 3] [False, True]", "[4, 4] [False, False]", "torch.Size([2, 2, 2])"]
    assert (errors, output.splitlines()) == ("", printed)


KEPT_AT_EXIT = """
import sys, threading, types
import gymnasium as gym
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import GymVecEnv, SharedMemoryVecEnv

keeper = types.ModuleType("keeper")
keeper.main = sys.modules["__main__"]  # as dill does, so that objects of the script outlive modules
sys.modules["keeper"] = keeper
keeper.itself = keeper
fns = [lambda: gym.make("CartPole-v1")] * 2

def start():
    global envs
    envs = [{make} for _ in range(2)]
    for env in envs:
        env.reset()

if {in_thread}:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
del keeper, start
"""


@pytest.mark.sample(quick=2, ci=6)
@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "thread"])
@pytest.mark.parametrize(
    "make",
    [
        "SharedMemoryVecEnv(fns)",
        "GymVecEnv(SharedMemoryVectorEnv(fns))",
        "SharedMemoryVectorEnv(fns, restart='truncate')",
    ],
)
def test_environments_that_outlive_modules_at_exit_raise_nothing(make: str, in_thread: bool, tmp_path: Path) -> None:
    text = KEPT_AT_EXIT.format(make=make, in_thread=in_thread)
    done = programs.run(text, "sb3", cwd=tmp_path, timeout_s=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


CLOSED_AT_EXIT = """
import gymnasium as gym
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import SharedMemoryVecEnv

class Trainer:
    def __init__(self, env):
        self.env, self.itself = env, self  # so that the interpreter deletes it after the workers have ended

    def __del__(self):
        self.env.close()
        print("closed", flush=True)

trainer = Trainer({make}([lambda: gym.make("CartPole-v1")] * 2))
trainer.env.reset()
{call}
"""


@pytest.mark.sample(quick=1, ci=2)
@pytest.mark.parametrize("call", ["", "trainer.env.step_async([0, 0])"], ids=["idle", "in a step"])
@pytest.mark.parametrize("make", ["SharedMemoryVecEnv", "SharedMemoryVectorEnv"])
def test_environments_may_be_closed_after_their_workers_at_exit(make: str, call: str, tmp_path: Path) -> None:
    done = programs.run(CLOSED_AT_EXIT.format(make=make, call=call), "sb3", cwd=tmp_path, timeout_s=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


# Classes and functions of the script cross processes in both directions, and are then the same objects.
POOLS = """
import enum
from stable_baselines3.common.vec_env import SubprocVecEnv
from sb3_ext import SharedMemoryVecEnv

class Task(enum.Enum):
    WALK = 1

class Lost(Exception): ...

def fail(*_):
    raise Lost(LEVEL)

def observe(envs):
    if type(envs) is SharedMemoryVecEnv:
        envs.set_attr("task", [Task.WALK, make])
        assert all(one is other for one, other in zip(envs.get_attr("task")[0], [Task.WALK, make]))
        envs.set_options({"task": Task.WALK})
        envs.set_attr("fail", fail)
        try:
            envs.env_method("fail")
        except Lost as error:
            assert error.args == (1,)
    return envs.reset().tolist()

if __name__ == "__main__":
    # SubprocVecEnv's workers would look for a file named <stdin>.
    for pool in [SharedMemoryVecEnv] if globals().get("__file__") == "<stdin>" else [SubprocVecEnv, SharedMemoryVecEnv]:
        def use(factories):
            envs = pool(factories)
            try:
                return observe(envs)
            finally:
                envs.close()
        check(use)
    print("as expected")
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("launch_mode", LAUNCH_MODES)
def test_definitions_of_main_script_work_in_workers_in_every_launch_mode(launch_mode: str, tmp_path: Path) -> None:
    assert "as expected" in run_program(launch_mode, DEFINITIONS + CHECKS + POOLS, tmp_path, preloaded="sb3")
