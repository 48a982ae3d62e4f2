"""Returns and lengths of episodes, recorded in the worker without loading Stable Baselines3 there."""

from __future__ import annotations

import time
from typing import Any

import gymnasium

from rl_ext_core.errors import EnvironmentOutputError

__all__ = ["EpisodeMonitor"]


class EpisodeMonitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does what Stable Baselines3's ``Monitor`` does without a file.

    ``info["episode"]`` of an episode's last step is its return (``"r"``), its length (``"l"``) and the seconds since
    this object was made (``"t"``).

    :param env: the environment
    """

    # What ``env_is_wrapped`` is asked for.
    stands_for = (("stable_baselines3.common.monitor", "Monitor"),)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.t_start = time.time()
        self.rewards: list[float] = []
        self.needs_reset = True
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []
        self.episode_times: list[float] = []
        self.total_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.rewards = []
        self.needs_reset = False
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and say what the episode was where it ends."""
        if self.needs_reset:
            raise EnvironmentOutputError("this environment needs a reset before it is stepped; write env.reset() first")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        if terminated or truncated:
            self.needs_reset = True
            total, taken = sum(self.rewards), time.time() - self.t_start
            self.episode_returns.append(total)
            self.episode_lengths.append(len(self.rewards))
            self.episode_times.append(taken)
            info["episode"] = {"r": round(total, 6), "l": len(self.rewards), "t": round(taken, 6)}
        self.total_steps += 1
        return observation, reward, terminated, truncated, info

    def get_total_steps(self) -> int:
        """Give the number of steps."""
        return self.total_steps

    def get_episode_rewards(self) -> list[float]:
        """Give the returns of all episodes."""
        return self.episode_returns

    def get_episode_lengths(self) -> list[int]:
        """Give the lengths of all episodes."""
        return self.episode_lengths

    def get_episode_times(self) -> list[float]:
        """Give the seconds from the start to the end of each episode."""
        return self.episode_times
