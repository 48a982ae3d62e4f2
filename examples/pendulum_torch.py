"""Batch of pendulums in torch, in the style of Isaac Lab's environments.

Like those, it uses torch tensors, writes every observation into the same memory, and resets finished sub-environments
within the step. The observations from before the reset are in ``info["final_obs"]``.

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
LARGEST_COST = math.pi**2 + 0.1 * MAX_SPEED**2 + 0.001 * MAX_TORQUE**2  # scales rewards to -1..0


class Pendulums:
    """
    Pendulums of 1 kg and 1 m, observed as cosine, sine and angular velocity in rad/s.

    :param num_envs: Number of pendulums.
    :param episode_length: Steps after which an episode is truncated, 200 by default.
    :param device: Device of all tensors.
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
        """This environment, which has no wrappers."""
        return self

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Reset all pendulums.

        Their first episodes get random lengths, so that some end at every step.
        """
        if seed is not None:
            self._random.manual_seed(seed)
        self._start_episodes(torch.arange(self.num_envs, device=self.device))
        self._steps.random_(0, self._episode_length, generator=self._random)
        return self._observe(), {}

    def step(
        self, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Simulate 0.05 s, and reset pendulums at the time limit."""
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
            self._start_episodes(rows)
        return self._observe(), self._reward, self._terminated, self._truncated, info

    def _start_episodes(self, rows: torch.Tensor) -> None:
        """Start new episodes in these rows, at random angles and speeds."""
        drawn = torch.rand(2, len(rows), generator=self._random, device=self.device) * 2 - 1
        self._angle[rows], self._speed[rows] = math.pi * drawn[0], drawn[1]
        self._steps[rows] = 0

    def _observe(self) -> torch.Tensor:
        """Write cosine, sine and speed into the observation tensor, and return it."""
        torch.stack((self._angle.cos(), self._angle.sin(), self._speed), dim=-1, out=self._observation)
        return self._observation

    def close(self) -> None:
        """Do nothing, since there is nothing to close."""
