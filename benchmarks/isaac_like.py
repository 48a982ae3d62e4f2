"""An environment in the style of Isaac Lab, and stand-ins for its modules, so that TorchRL's IsaacLabWrapper runs.

What is imitated is the interface: a Dict of observations, buffers that every step writes into again, resets within the
step, and ``final_obs`` where asked for. There is no simulation: what a step takes is what its tensors take.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.envs.libs import gym as torchrl_gym
from torchrl.envs.libs import isaac_lab as torchrl_isaac_lab

OBSERVATION_SIZE = 48  # numbers in an observation and in an action: those of a walking quadruped
ACTION_SIZE = 12


class ManagerBasedEnv:
    """Stands for ``isaaclab.envs.ManagerBasedEnv``."""


class DirectRLEnv:
    """Stands for ``isaaclab.envs.DirectRLEnv``."""


class DirectMARLEnv:
    """Stands for ``isaaclab.envs.DirectMARLEnv``."""


class IsaacLike(ManagerBasedEnv):
    """
    Sub-environments that count, a time limit apart from each other.

    :param num_envs: How many.
    :param final_obs: Whether a step's extras hold the observations from before resets, as an option of Isaac Lab does.
    :param episode_length: Steps after which one is truncated and resets itself.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012 (gymnasium's environments have it so)
    render_mode = None
    spec = None

    def __init__(self, num_envs: int, *, final_obs: bool = False, episode_length: int = 100) -> None:
        self.num_envs, self.device = num_envs, "cpu"
        self.single_observation_space = gymnasium.spaces.Dict({"policy": _box(OBSERVATION_SIZE)})
        self.single_action_space = _box(ACTION_SIZE)
        self.observation_space = gymnasium.spaces.Dict({"policy": _box(num_envs, OBSERVATION_SIZE)})
        self.action_space = _box(num_envs, ACTION_SIZE)
        self.cfg = SimpleNamespace(is_finite_horizon=False, compute_final_obs=final_obs)
        self._final_obs, self._episode_length = final_obs, episode_length
        self.obs_buf = {"policy": torch.zeros(num_envs, OBSERVATION_SIZE)}
        self._reward_buf = torch.zeros(num_envs)
        self._terminated = torch.zeros(num_envs, dtype=torch.bool)
        self._time_outs = torch.zeros(num_envs, dtype=torch.bool)
        self._lengths = torch.zeros(num_envs, dtype=torch.long)
        self._extras: dict[str, Any] = {}

    @property
    def unwrapped(self) -> IsaacLike:
        """The environment without wrappers."""
        return self

    def seed(self, seed: int = -1) -> int:
        """Seed nothing: there is no chance in it."""
        return seed

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        env_ids: torch.Tensor | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Reset all, or some. The first episodes get different lengths, so that some end at every step."""
        if env_ids is None:
            self.obs_buf["policy"].zero_()
            torch.remainder(torch.arange(self.num_envs), self._episode_length, out=self._lengths)
        else:
            self.obs_buf["policy"][env_ids] = 0
            self._lengths[env_ids] = 0
        return dict(self.obs_buf), self._extras

    def step(
        self, action: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Count, and reset what has reached its time limit."""
        observation = self.obs_buf["policy"]
        self._lengths += 1
        observation += 1
        observation[:, :ACTION_SIZE].add_(action, alpha=1e-3)
        torch.sum(observation[:, :4], dim=1, out=self._reward_buf)
        torch.ge(self._lengths, self._episode_length, out=self._time_outs)
        done = self._time_outs.nonzero().squeeze(-1)
        self._extras = {}
        if len(done):
            if self._final_obs:
                self._extras["final_obs"] = {"policy": observation.clone()}
            observation[done] = 0
            self._lengths[done] = 0
        return dict(self.obs_buf), self._reward_buf, self._terminated, self._time_outs, self._extras

    def close(self) -> None:
        """Close nothing."""


def _box(*shape: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)


def install() -> None:
    """Let ``import isaaclab.envs`` find the stand-ins, in this process, and TorchRL know of them."""
    envs = ModuleType("isaaclab.envs")
    for name, stand_in in {
        "ManagerBasedEnv": ManagerBasedEnv,
        "ManagerBasedRLEnv": ManagerBasedEnv,
        "DirectRLEnv": DirectRLEnv,
        "DirectMARLEnv": DirectMARLEnv,
    }.items():
        setattr(envs, name, stand_in)
    package = ModuleType("isaaclab")
    package.envs = envs  # type: ignore[attr-defined]
    sys.modules.update({"isaaclab": package, "isaaclab.envs": envs})
    torchrl_gym._has_isaaclab = torchrl_isaac_lab._has_isaaclab = True
