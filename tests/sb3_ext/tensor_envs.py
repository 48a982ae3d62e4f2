"""Torch environment in Isaac Lab's style, whose trajectories depend on the actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rl_ext_core.vector.array_frameworks import map_arrays


class Points:
    """Points that are pushed towards the origin. Episodes end at a time limit or far from the origin.

    Outputs are buffers that the next step overwrites. The seed of ``reset`` determines all random numbers.

    :param num_envs: number of points
    :param length: steps until the time limit
    :param as_dict: whether observations are a Dict of two parts
    :param truncates: whether the time limit truncates episodes, else it terminates them
    :param final_obs: whether infos contain last observations
    :param discrete: whether actions are discrete
    :param transposed: whether observations are transposed in memory, as those of gymnasium's vector CartPole. Products
        of matrices add up in the order of their memory
    :param device: device of all tensors
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None
    spec = None

    def __init__(
        self,
        num_envs: int = 4,
        *,
        length: int = 12,
        as_dict: bool = False,
        truncates: bool = True,
        final_obs: bool = True,
        discrete: bool = False,
        transposed: bool = False,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.num_envs, self._length, self._as_dict, self._truncates = num_envs, length, as_dict, truncates
        self.final_obs, self._discrete, self._transposed = final_obs, discrete, transposed
        box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_observation_space = spaces.Dict({"position": box, "velocity": box}) if as_dict else box
        self.single_action_space: Any = spaces.Discrete(3) if discrete else spaces.Box(-2, 3, (2,), np.float32)
        self._state, self._output = (torch.zeros(num_envs, 8, device=device) for _ in range(2))
        self._rewards = torch.zeros(num_envs, device=device)
        self._steps = torch.zeros(num_envs, dtype=torch.long, device=device)
        self._terminated, self._truncated = (torch.zeros(num_envs, dtype=torch.bool, device=device) for _ in range(2))
        self._generator = torch.Generator()

    @property
    def unwrapped(self) -> Points:
        return self

    def close(self) -> None:
        """Nothing to close."""

    def _observe(self) -> Any:
        """Write the state into the output buffer, and return views of it."""
        self._output.copy_(self._state)
        output = self._output.t().contiguous().t() if self._transposed else self._output
        position, velocity = output[:, :4], output[:, 4:]
        return {"position": position, "velocity": velocity} if self._as_dict else position

    def _draw_states(self) -> torch.Tensor:
        """Draw the first states of new episodes in all rows."""
        return torch.randn(self.num_envs, 8, generator=self._generator)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._generator.manual_seed(seed)
        self._state.copy_(self._draw_states())
        self._steps.copy_(torch.arange(self.num_envs) % self._length)
        return self._observe(), {}

    def step(self, action: torch.Tensor) -> Any:
        push = torch.stack([action - 1.0, 1.0 - action], 1) if self._discrete else action
        self._state[:, 4:6] += 0.1 * push
        self._state[:, :4] += 0.1 * self._state[:, 4:]
        self._steps += 1
        torch.sum(-self._state[:, :4].square(), 1, out=self._rewards)
        late, far = self._steps >= self._length, self._state[:, 0].abs() > 2.5
        self._terminated.copy_(far | (late & (not self._truncates)))
        self._truncated.copy_(late & self._truncates)
        done = self._terminated | self._truncated
        info: dict[str, Any] = {"is_success": self._truncated}
        if self.final_obs:
            info["final_obs"] = map_arrays(torch.clone, self._observe())
        self._state.copy_(torch.where(done[:, None], self._draw_states().to(self.device), self._state))
        self._steps.masked_fill_(done, 0)
        return self._observe(), self._rewards, self._terminated, self._truncated, info


class AnySpaces(Points):
    """Points whose observations and actions have other spaces.

    Observations are random numbers that depend on the state, and actions push all points by their sum.
    """

    def __init__(self, observation_space: Any, action_space: Any, num_envs: int = 4) -> None:
        super().__init__(num_envs, length=5)
        self.single_observation_space, self.single_action_space = observation_space, action_space

    def _observe(self) -> Any:
        return self._draw(self.single_observation_space)

    def _draw(self, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._draw(part) for key, part in space.spaces.items()}
        numbers = torch.rand(self.num_envs, *space.shape, generator=self._generator)
        numbers += self._state[:, 0].view(-1, *[1] * len(space.shape)).sigmoid()
        low, high = {
            spaces.Box: lambda: (space.low, np.minimum(space.high, 200)),
            spaces.Discrete: lambda: (space.start, space.start + space.n - 1),
            spaces.MultiDiscrete: lambda: (0, space.nvec - 1),
            spaces.MultiBinary: lambda: (0, 1),
        }[type(space)]()
        low, high = (torch.from_numpy(np.asarray(bound, np.float64)) for bound in (low, high))
        return (low + (high - low) * numbers / 2).round().to(torch.from_numpy(np.zeros(0, space.dtype)).dtype)

    def step(self, action: torch.Tensor) -> Any:
        push = action.reshape(self.num_envs, -1).sum(1, dtype=torch.float32)
        return super().step(push[:, None].expand(-1, 2).clamp(-2, 3))
