"""Stable Baselines3's vectorized environments accept factories, and each worker gets an independent copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ext import as_factory
from tests.core.factory.main_script import CHECKS, DEFINITIONS
from tests.launch_modes import LAUNCH_MODES, run_program


def make_changed_cart_pole() -> gym.Env[Any, Any]:
    env = gym.make("CartPole-v1", max_episode_steps=20)
    env.unwrapped.gravity = 5.0  # type: ignore[attr-defined]
    return env


def test_worker_copies_have_attributes_of_instance_and_overrides() -> None:
    env = make_changed_cart_pole()
    env.reset(seed=0)
    factories = as_factory(env).for_workers(2, overrides=[{"gravity": 1.0}, {"length": 2.0}])
    venv = SubprocVecEnv(factories, start_method="fork")
    assert (venv.get_attr("gravity"), venv.get_attr("length")) == ([1.0, 5.0], [0.5, 2.0])
    venv.close()
    env.step(0)


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
