"""Drivers of environments that consist of several, and of TorchRL's, which may."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.factory._drawing import OfSpaces, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GymnasiumVector", "SB3Vector", "TorchRL", "Vmas"]


class TorchRL:
    """torchrl.envs.EnvBase."""

    seeded = True

    def __init__(self, env: Any, rng: np.random.Generator) -> None:
        self._env, self._rng = env, rng
        self._data: Any = None

    def reset(self, seed: int | None) -> Any:
        if seed is not None:
            try:
                self._env.set_seed(seed)
                self.seeded = True
            except NotImplementedError:
                self.seeded = False
        self._data = self._env.reset()
        return plain(self._data)

    def step(self) -> Any:
        if self._data is None:
            self._data = self._env.reset()
        torch = sys.modules["torch"]
        # Specs draw from torch's own generator, which the environment may draw from too.
        with torch.random.fork_rng(devices=_gpus(self._env.device)):
            torch.manual_seed(int(self._rng.integers(2**31)))
            drawn = self._env.rand_action(self._data)
        taken, self._data = self._env.step_and_maybe_reset(drawn)
        return [plain(taken.get("next")), plain(self._data)]


def _gpus(device: Any) -> list[Any]:
    return [device] if device is not None and device.type == "cuda" else []


class GymnasiumVector(OfSpaces):
    """gymnasium.vector.VectorEnv."""

    def reset(self, seed: int | None) -> Any:
        return plain(self._env.reset(seed=seed)[0])

    def step(self) -> Any:
        result = plain(self._env.step(self._spaces.draw("", self._env.action_space))[:4])
        ended = np.asarray(result[2]) | np.asarray(result[3])
        mode: Mapping[str, Any] = self._env.metadata or {}
        if ended.any() and getattr(mode.get("autoreset_mode"), "name", "") == "DISABLED":
            return [result, plain(self._env.reset(options={"reset_mask": ended})[0])]
        return result


class SB3Vector(OfSpaces):
    """Stable Baselines3's VecEnv."""

    def reset(self, seed: int | None) -> Any:
        if seed is not None:
            self._env.seed(seed)
        return plain(self._env.reset())

    def step(self) -> Any:
        drawn = [self._spaces.draw("", self._env.action_space) for _ in range(self._env.num_envs)]
        return plain(self._env.step(np.stack(drawn))[:3])


class Vmas(OfSpaces):
    """VMAS's Environment."""

    def reset(self, seed: int | None) -> Any:
        return plain(self._env.reset(seed=seed))

    def step(self) -> Any:
        *result, _ = self._env.step([self._draw(agent) for agent in self._env.agents])
        result = plain(result)
        ended = result[2] if len(result) == 3 else result[2] | result[3]
        again = [plain(self._env.reset_at(int(index))) for index in ended.nonzero()]
        return [*result, again]

    def _draw(self, agent: Any) -> Any:
        space = self._env.get_agent_action_space(agent)
        drawn = np.stack([self._spaces.draw(agent.name, space) for _ in range(self._env.num_envs)])
        return sys.modules["torch"].as_tensor(drawn, device=self._env.device)
