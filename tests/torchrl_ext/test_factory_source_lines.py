from __future__ import annotations

import re

import gymnasium as gym
import pytest
import torchrl.envs
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv

import torchrl_ext
from rl_ext_core.factory import as_factory
from rl_ext_core.factory.record import source_of_environment

NAMES = {"gymnasium": gym, "GymWrapper": torchrl_ext.GymWrapper, **vars(torchrl.envs)}


@pytest.mark.parametrize(
    "line",
    [
        "GymEnv('CartPole-v1')",
        "GymEnv('CartPole-v1', frame_skip=2, device='cpu', max_episode_steps=9)",
        "GymWrapper(gymnasium.make('CartPole-v1'), frame_skip=3)",
        "SerialEnv(2, GymEnv, create_env_kwargs={'env_name': 'CartPole-v1'})",
        "TransformedEnv(GymEnv('CartPole-v1'), Compose(StepCounter(5), RewardSum()))",
    ],
)
def test_source_lines_are_the_calls_that_made_the_environment_without_transforms(line: str) -> None:
    assert source_of_environment(eval(line, NAMES)) == re.sub(r"Compose\(.*\)", "...)", line)


def test_appended_transforms_are_part_of_the_recorded_call() -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5)).append_transform(RewardSum())
    copied = as_factory(env)()
    assert [type(one) for one in copied.transform] == [StepCounter, RewardSum]
    assert set(copied.rollout(9).keys(True)) == set(env.rollout(9).keys(True))
    assert copied.base_env is not env.base_env
