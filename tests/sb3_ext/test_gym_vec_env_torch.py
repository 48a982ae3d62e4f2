"""GymVecEnv over torch environments in the styles of Isaac Lab, mjlab and ManiSkill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from sb3_ext import GymVecEnv
from tests.torchrl_ext.environments import IsaacByIds


class Lab(IsaacByIds):
    """Isaac Lab's imitation with critic observations, rewards in a column, and a method."""

    def __init__(self, num_envs: int = 4, **options: Any) -> None:
        super().__init__(num_envs, **{"final_obs": True, "overwrites_actions": True, **options})
        self.single_observation_space["critic"] = self.single_observation_space["policy"]

    def count(self, factor: int) -> torch.Tensor:
        """Return a tensor with one number per row, multiplied by a factor."""
        return torch.arange(self.num_envs) * factor

    def add_critic(self, observation: Any) -> Any:
        """Add the critic's observation, which is the negative of the policy's."""
        return {**observation, "critic": -observation["policy"]}

    def reset(self, *arguments: Any, **options: Any) -> Any:
        observation, info = super().reset(*arguments, **options)
        return self.add_critic(observation), info

    def step(self, action: torch.Tensor) -> Any:
        self.given = action.clone()
        observation, reward, *flags, info = super().step(action)
        if "final_obs" in info:
            info = {**info, "final_obs": self.add_critic(info["final_obs"])}
        return self.add_critic(observation), reward[:, None], *flags, info


def test_actions_spaces_and_rewards_are_converted() -> None:
    """See tests/test_stepper.py for the other parts of a step."""
    venv = GymVecEnv(Lab(), clip_actions=1.0)
    assert venv.observation_space == spaces.Box(-np.inf, np.inf, (6,), np.float32)
    assert venv.action_space == spaces.Box(-1, 1, (2,), np.float32)
    venv.reset()
    actions = np.full((4, 2), 0.5)
    observations, rewards, _, _ = venv.step(actions)
    assert (actions == 0.5).all()  # the environment has overwritten its copy
    assert venv.env.given.dtype == torch.float32
    assert observations.dtype == np.float32
    np.testing.assert_array_equal(rewards, np.float32([10, 11, 12, 13]))  # returned as a column by the environment


def test_methods_and_attributes_return_rows_of_tensors() -> None:
    venv = GymVecEnv(Lab(3), clip_actions=1.0)
    venv.reset()
    venv.step(np.zeros((3, 2)))
    assert venv.get_attr("steps") == [1, 1, 1]
    assert venv.get_attr("final_obs", indices=[0]) == [True]
    assert venv.env_method("count", 3) == [0, 3, 6]
    (whole,) = venv.env_method("count", 3, indices=[1])
    np.testing.assert_array_equal(whole, [0, 3, 6])
    venv.set_attr("final_obs", False)
    assert venv.env.final_obs is False
    with pytest.raises(InvalidArgumentError, match="Set it for all"):
        venv.set_attr("final_obs", False, indices=[1])
    assert not venv.has_attr("missing")
    assert venv.get_attr("render_mode", [1]) == [None]


def refusal_cases() -> list[tuple[Any, dict[str, Any], type[Exception], str]]:
    """Return invalid environments and options, each with its expected error."""
    odd, small = Lab(), Lab()
    odd.single_observation_space = object()
    small.single_observation_space = spaces.Dict({"policy": spaces.Box(0, 1, (3,))})
    return [
        (Lab(), {"clip_actions": None}, InvalidArgumentError, r"clip_actions=1\.0"),
        (Lab(), {"clip_actions": -1}, InvalidArgumentError, "clip_actions=-1"),
        (Lab(), {"observation_key": "x"}, InvalidArgumentError, r"'(policy|critic)', '(policy|critic)'"),
        (odd, {}, InvalidTypeError, "expected one of gymnasium's"),
        (Lab(final_obs=False), {}, EnvironmentOutputError, "compute_final_obs"),
        (small, {}, EnvironmentOutputError, "as in its observation space"),
    ]


def roll_out(env: Any, options: dict[str, Any]) -> None:
    """Wrap an environment in GymVecEnv, reset it and take three steps."""
    venv = GymVecEnv(env, **options)
    venv.reset()
    for _ in range(3):
        venv.step(np.zeros((4, 2)))


def test_invalid_torch_environments_are_refused() -> None:
    for env, options, error, said in refusal_cases():
        with pytest.raises(error, match=said):
            roll_out(env, {"clip_actions": 1, **options})


def test_spaces_of_other_libraries_are_converted_and_observation_key_selects_one() -> None:
    env = Lab()
    box = SimpleNamespace(shape=(2,), low=-3.0, high=3.0, dtype=None)
    env.single_observation_space, env.single_action_space = SimpleNamespace(spaces={"policy": box}), box
    venv = GymVecEnv(env)
    assert venv.action_space == venv.observation_space == spaces.Box(-3, 3, (2,), np.float32)
    venv = GymVecEnv(Lab(), clip_actions=1, env_type="numpy", observation_key="critic")
    assert venv.reset().shape == (4, 6)
    env = Lab()
    del env.single_observation_space.spaces["policy"]
    assert set(GymVecEnv(env, clip_actions=1).reset()) == {"critic"}
