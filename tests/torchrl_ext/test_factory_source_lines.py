from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
import torchrl.envs
from torchrl.envs import Compose, RewardSum, SerialEnv, StepCounter, TransformedEnv

import torchrl_ext
from rl_ext_core.factory import as_factory
from rl_ext_core.factory.record import source_of_environment

CASES = [
    (lambda: torchrl.envs.GymEnv("CartPole-v1"), "lambda: GymEnv('CartPole-v1')"),
    (
        lambda: torchrl.envs.GymEnv("CartPole-v1", frame_skip=2, device="cpu", max_episode_steps=9),
        "lambda: GymEnv('CartPole-v1', frame_skip=2, device='cpu', max_episode_steps=9)",
    ),
    (
        lambda: torchrl_ext.GymWrapper(gym.make("CartPole-v1"), frame_skip=3),
        "lambda: GymWrapper(gymnasium.make('CartPole-v1'), frame_skip=3)",
    ),
    (
        lambda: TransformedEnv(torchrl.envs.GymEnv("CartPole-v1"), Compose(StepCounter(5), RewardSum())),
        "lambda: TransformedEnv(GymEnv('CartPole-v1'), ...)",
    ),
    (
        lambda: SerialEnv(2, torchrl.envs.GymEnv, create_env_kwargs={"env_name": "CartPole-v1"}),
        "lambda: SerialEnv(2, GymEnv, create_env_kwargs={'env_name': 'CartPole-v1'})",
    ),
]


@pytest.mark.parametrize(("make", "line"), CASES, ids=[line for _, line in CASES])
def test_source_lines_rebuild_the_environment(make: Any, line: str) -> None:
    env = make()
    assert f"lambda: {source_of_environment(env)}" == line
    package = torchrl_ext if type(env).__module__.startswith("torchrl_ext") else torchrl.envs
    names = {"gymnasium": gym, "SerialEnv": SerialEnv, "GymEnv": package.GymEnv, "GymWrapper": package.GymWrapper}
    rollouts = []
    for each in (env, env if "..." in line else eval(line, names)()):
        torch.manual_seed(0)
        each.set_seed(3)
        rollouts.append(each.rollout(5))
    assert (rollouts[0] == rollouts[1]).all()


def test_appended_transforms_are_part_of_the_recorded_call() -> None:
    env = TransformedEnv(torchrl.envs.GymEnv("CartPole-v1"), StepCounter(5)).append_transform(RewardSum())
    copied = as_factory(env)()
    assert [type(one) for one in copied.transform] == [StepCounter, RewardSum]
    assert set(copied.rollout(9).keys(True)) == set(env.rollout(9).keys(True))
    assert copied.base_env is not env.base_env
