"""What workers do where there are none of ours; run by ``test_stand_ins.py`` where much of Linux is hidden."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from torchrl import envs as upstream

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.isolation import probe
from sb3_ext import AutoVecEnv, as_factory, make_vec_env
from tests.platforms.buffers import main, refused
from torchrl_ext import GymEnv, GymWrapper, ParallelEnv


class Single(gymnasium.Env[Any, Any]):
    """Allows only one instance per process, as many libraries do."""

    observation_space = gymnasium.spaces.Box(-9, 99, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    instances: ClassVar[list[int]] = []

    def __init__(self, ends: str = "") -> None:
        if self.instances:
            raise RuntimeError("Cannot create multiple instances per process")
        if ends == "in its constructor":
            raise OSError("no licence")
        self.instances.append(os.getpid())
        self.ends, self.count = ends, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(3, np.float32), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 3 and self.ends == "in a step":
            os._exit(7)
        return self.np_random.random(3, np.float32), float(action), self.count == 5, False, {"pid": os.getpid()}


class Declared(Single):
    metadata: ClassVar[dict[str, Any]] = {"isolation": "in-process", "render_modes": []}

    def __init__(self) -> None:
        self.ends, self.count = "", 0


def steps_of(venv: VecEnv, seed: int = 3) -> list[Any]:
    with contextlib.closing(venv):
        venv.seed(seed)
        seen = [venv.reset()]
        for number in range(12):
            observations, rewards, dones, _ = venv.step(np.array([number % 2, 1]))
            seen += [observations, rewards, dones]
        return seen


def assert_same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def none_left() -> None:
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_one_instance_per_process() -> None:
    venv = make_vec_env(Single, 2, seed=0)
    assert isinstance(venv, SubprocVecEnv)
    assert "Each has its own process" in venv.isolation_report
    theirs = env_util.make_vec_env(Single, 2, 0, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "spawn"})
    found = steps_of(venv)
    assert found[2].dtype == np.float32
    assert_same(found, steps_of(theirs))
    assert not Single.instances
    none_left()


def test_a_list_and_a_process_each_as_asked() -> None:
    venv = AutoVecEnv([Single] * 2, isolation="process")
    pids = {info["pid"] for info in (venv.reset(), venv.step(np.array([0, 0])))[1][3]}
    venv.close()
    assert len(pids) == 2
    assert os.getpid() not in pids
    none_left()


def test_what_declares_that_it_shares_a_process_does() -> None:
    for venv in (make_vec_env(Declared, 2), make_vec_env("CartPole-v1", 2, isolation="in-process")):
        assert isinstance(venv, DummyVecEnv)
        venv.close()
    assert isinstance(make_vec_env(Single, 1), DummyVecEnv)
    Single.instances.clear()  # the one, which nothing closes


def test_an_instance_is_copied_and_compared() -> None:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    env.unwrapped.gravity = 3.0
    assert as_factory(env).examination is not None
    venv = make_vec_env(env, 2, seed=0)
    assert venv.env_method("get_wrapper_attr", "gravity") == [3.0, 3.0]
    venv.close()
    none_left()


def test_who_has_died_is_said() -> None:
    venv = make_vec_env(lambda: Single("in a step"), 2)
    venv.reset()
    for _ in range(2):
        venv.step(np.zeros(2, int))
    died = "the process of environment 0 of 2 has ended, with exit code 7"
    refused(WorkerError, died, lambda: venv.step(np.zeros(2, int)))
    venv.close()
    none_left()
    refused(WorkerError, "has ended, with exit code 1", lambda: make_vec_env(lambda: Single("in its constructor"), 2))
    none_left()


def test_options_of_our_own_workers_and_probes_are_refused() -> None:
    options = {"n_workers": 2}
    refused(InvalidArgumentError, "n_workers", lambda: make_vec_env(Single, 2, vec_env_kwargs=options))
    refused(WorkerError, "need Linux", lambda: probe("CartPole-v1", cache=False))


def test_torchrls_workers_take_an_instance() -> None:
    env = ParallelEnv(2, GymEnv("Pendulum-v1"), seed=0)
    rollout = env.rollout(5)
    env.close()
    assert rollout.shape == (2, 5)
    assert (rollout["observation"][0] != rollout["observation"][1]).any()
    ours = ParallelEnv(2, lambda: GymWrapper(Single()), mp_start_method="spawn")
    ours.set_seed(0)
    torch.manual_seed(0)
    found = ours.rollout(4)
    ours.close()
    theirs = upstream.ParallelEnv(
        2,
        as_factory(lambda: GymWrapper(Single())),
        mp_start_method="spawn",
        metadata_from_workers=True,
        use_buffers=False,
    )
    theirs.set_seed(0)
    torch.manual_seed(0)
    expected = theirs.rollout(4)
    theirs.close()
    assert not Single.instances
    assert (found == expected).all()
    none_left()


if __name__ == "__main__":
    sys.exit(main(globals()))
