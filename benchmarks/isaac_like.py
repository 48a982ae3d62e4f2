"""Environment in the style of Isaac Lab, and stand-ins for its modules.

It imitates the interface: a Dict of observations, buffers that every step overwrites, resets within the step, and
``final_obs`` on request. There is no simulation, so a step costs only its tensor operations.
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

OBSERVATION_SIZE = 48  # Sizes of observations and actions, those of a walking quadruped.
ACTION_SIZE = 12


class ManagerBasedEnv:
    """Empty class in place of ``isaaclab.envs.ManagerBasedEnv``, for TorchRL's type checks."""


class DirectRLEnv:
    """Empty class in place of ``isaaclab.envs.DirectRLEnv``, for TorchRL's type checks."""


class DirectMARLEnv:
    """Empty class in place of ``isaaclab.envs.DirectMARLEnv``, for TorchRL's type checks."""


class IsaacLike(ManagerBasedEnv):
    """
    Batch of sub-environments that count their steps and reset themselves at a time limit.

    :param num_envs: Number of sub-environments.
    :param final_obs: Whether a step's extras contain the observations from before resets (an option of Isaac Lab).
    :param episode_length: Steps after which a sub-environment is truncated and reset.
    :param device: Device of all tensors. Steps on a GPU do not wait for it.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012 (as in gymnasium's environments)
    render_mode = None
    spec = None

    def __init__(
        self, num_envs: int, *, final_obs: bool = False, episode_length: int = 100, device: str = "cpu"
    ) -> None:
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = gymnasium.spaces.Dict({"policy": _box(OBSERVATION_SIZE)})
        self.single_action_space = _box(ACTION_SIZE)
        self.observation_space = gymnasium.spaces.Dict({"policy": _box(num_envs, OBSERVATION_SIZE)})
        self.action_space = _box(num_envs, ACTION_SIZE)
        self.cfg = SimpleNamespace(is_finite_horizon=False, compute_final_obs=final_obs)
        self._final_obs, self._episode_length = final_obs, episode_length
        self.obs_buf = {"policy": torch.zeros(num_envs, OBSERVATION_SIZE, device=device)}
        self._reward_buf = torch.zeros(num_envs, device=device)
        self._terminated = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._time_outs = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._lengths = torch.zeros(num_envs, dtype=torch.long, device=device)
        self._extras: dict[str, Any] = {}

    @property
    def unwrapped(self) -> IsaacLike:
        """This environment, which has no wrappers."""
        return self

    def seed(self, seed: int = -1) -> int:
        """Return the seed, which has no effect on this deterministic environment."""
        return seed

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        env_ids: torch.Tensor | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Reset all sub-environments, or those of ``env_ids``.

        After a full reset, episode lengths differ, so that some episodes end at every step.
        """
        if env_ids is None:
            self.obs_buf["policy"].zero_()
            torch.remainder(torch.arange(self.num_envs, device=self.device), self._episode_length, out=self._lengths)
        else:
            self.obs_buf["policy"][env_ids] = 0
            self._lengths[env_ids] = 0
        return dict(self.obs_buf), self._extras

    def step(
        self, action: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Step all sub-environments, and reset those at their time limit."""
        observation = self.obs_buf["policy"]
        self._lengths += 1
        observation += 1
        observation[:, :ACTION_SIZE].add_(action, alpha=1e-3)
        torch.sum(observation[:, :4], dim=1, out=self._reward_buf)
        torch.ge(self._lengths, self._episode_length, out=self._time_outs)
        self._extras = {}
        if self.device != "cpu":
            # Finding the rows would wait for the device.
            if self._final_obs:
                self._extras["final_obs"] = {"policy": observation.clone()}
            observation.masked_fill_(self._time_outs[:, None], 0)
            self._lengths.masked_fill_(self._time_outs, 0)
        elif len(done := self._time_outs.nonzero().squeeze(-1)):
            if self._final_obs:
                self._extras["final_obs"] = {"policy": observation.clone()}
            observation[done] = 0
            self._lengths[done] = 0
        return dict(self.obs_buf), self._reward_buf, self._terminated, self._time_outs, self._extras

    def close(self) -> None:
        """Do nothing, since there is nothing to close."""


def _box(*shape: int) -> gymnasium.spaces.Box:
    """Return an unbounded float32 Box of this shape."""
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)


def install() -> None:
    """Install the stand-ins as ``isaaclab.envs`` in this process, also for TorchRL."""
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
