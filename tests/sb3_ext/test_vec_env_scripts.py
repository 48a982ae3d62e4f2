from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.core.factory.main_script import CHECKS, DEFINITIONS
from tests.core.processes.test_scripts import LIMIT_S, Program, program
from tests.launch_modes import LAUNCH_MODES, run_program

__all__ = ["program"]

SCRIPT = """
import os, sys, time
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from sb3_ext import SharedMemoryVecEnv, make_vec_env

SEEN = os.environ["SEEN"]
open(SEEN, "a").write("x")  # counts the runs of this script

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
        return np.ones(2, np.float32), 1.0, False, False, {}

class Around(gym.Wrapper):
    pass

gym.register("World-v0", entry_point=World)
def make(): return Around(World(3))
def use(venv):
    venv.reset()
    venv.step(np.zeros(2, np.int64))
    level = venv.get_attr("level")
    assert venv.env_is_wrapped(Around) == [level[0] == 3] * 2
    print(level, flush=True)
    venv.close()
"""

USE = """
if True:
    for options in ({}, {"start_method": "spawn"}):
        for env_fns in (
            [World] * 2, [make] * 2, [lambda level=level: World(level) for level in range(2)],
            [lambda: gym.make("World-v0")] * 2,
        ):
            use(SharedMemoryVecEnv(env_fns, **options))
        use(make_vec_env("World-v0", 2, isolation="process", vec_env_kwargs=options))
    use(make_vec_env(World, 2))
"""
PRINTED = ["[1, 1]", "[3, 3]", "[0, 1]", "[1, 1]", "[1, 1]"]

SPAWNED = """
def train(kind):
    use(SharedMemoryVecEnv([World] * 2))
    use(make_vec_env(World(4), 2, isolation="process"))
    from torchrl_ext import ParallelEnv, GymWrapper
    env = ParallelEnv(2, lambda: GymWrapper(World()))
    print(env.rollout(2)["action"].shape, flush=True)
    env.close()

if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context("%s").Process(target=train, args=(World,))
    process.start()
    process.join()
"""
BY_SPAWNED = ["[1, 1]", "[4, 4]", "torch.Size([2, 2, 2])"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "printed"),
    [(USE, [*PRINTED, *PRINTED, "[1, 1]"]), *((SPAWNED % method, BY_SPAWNED) for method in ("forkserver", "spawn"))],
    ids=["without guard", "in forkserver", "in spawned process"],
)
def test_environments_of_main_script_work_in_workers(
    text: str, printed: list[str], program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = program.folder / "train.py", program.folder / "seen"
    script.write_text(SCRIPT + text)
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setenv("XDG_CACHE_HOME", str(program.folder / "cache"))
    output, errors = program.run([str(script)]).communicate(timeout=4 * LIMIT_S)
    assert (errors, output.splitlines()) == ("", printed)
    assert text != USE or seen.read_text() == "x"


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
