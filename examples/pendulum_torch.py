"""Pendulums to swing up, many at once, in torch: an environment in the style of Isaac Lab, without a simulator.

Like those, it speaks torch tensors, writes every observation into the same memory, resets what is done within the step,
and gives the observation from before that as ``final_obs``.

Source of the dynamics and the reward: gymnasium's ``Pendulum-v1``.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch

GRAVITY = 10.0
TIME_STEP = 0.05
MAX_SPEED = 8.0
MAX_TORQUE = 2.0
LARGEST_COST = math.pi**2 + 0.1 * MAX_SPEED**2 + 0.001 * MAX_TORQUE**2  # rewards lie between -1 and 0


class Pendulums:
    """
    Pendulums of 1 kg and 1 m, seen as cosine, sine and angular velocity.

    :param num_envs: How many.
    :param episode_length: Steps after which one is truncated.
    :param device: Where they swing.
    """

    def __init__(self, num_envs: int, *, episode_length: int = 200, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        high = np.array([1, 1, MAX_SPEED], np.float32)
        self.single_observation_space = gymnasium.spaces.Box(-high, high)
        self.single_action_space = gymnasium.spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,))
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._episode_length = episode_length
        self._angle = torch.zeros(num_envs, device=device)
        self._speed = torch.zeros(num_envs, device=device)
        self._steps = torch.zeros(num_envs, dtype=torch.long, device=device)
        self._observation = torch.zeros(num_envs, 3, device=device)
        self._reward = torch.zeros(num_envs, device=device)
        self._terminated = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._truncated = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._random = torch.Generator(device)

    @property
    def unwrapped(self) -> Pendulums:
        """The environment without wrappers."""
        return self

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Reset all. Their first episodes get different lengths, so that some end at every step."""
        if seed is not None:
            self._random.manual_seed(seed)
        self._begin(torch.arange(self.num_envs, device=self.device))
        self._steps.random_(0, self._episode_length, generator=self._random)
        return self._observe(), {}

    def step(
        self, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Swing on for 0.05 s; reset those whose time is over."""
        torque = action.squeeze(-1).clamp(-MAX_TORQUE, MAX_TORQUE)
        from_top = torch.remainder(self._angle + math.pi, 2 * math.pi) - math.pi
        self._reward.copy_(-(from_top**2 + 0.1 * self._speed**2 + 0.001 * torque**2) / LARGEST_COST)
        self._speed.add_(TIME_STEP * (1.5 * GRAVITY * self._angle.sin() + 3 * torque)).clamp_(-MAX_SPEED, MAX_SPEED)
        self._angle.add_(TIME_STEP * self._speed)
        self._steps.add_(1)
        torch.ge(self._steps, self._episode_length, out=self._truncated)
        rows = self._truncated.nonzero().squeeze(-1)
        info = {}
        if len(rows):
            info["final_obs"] = self._observe().clone()
            self._begin(rows)
        return self._observe(), self._reward, self._terminated, self._truncated, info

    def _begin(self, rows: torch.Tensor) -> None:
        drawn = torch.rand(2, len(rows), generator=self._random, device=self.device) * 2 - 1
        self._angle[rows], self._speed[rows] = math.pi * drawn[0], drawn[1]
        self._steps[rows] = 0

    def _observe(self) -> torch.Tensor:
        torch.stack((self._angle.cos(), self._angle.sin(), self._speed), dim=-1, out=self._observation)
        return self._observation

    def close(self) -> None:
        """Close nothing."""
