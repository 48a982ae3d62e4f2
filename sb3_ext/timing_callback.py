"""Callback that logs how long environments, rollouts and updates take."""

from __future__ import annotations

import dataclasses
import time
import types

from stable_baselines3.common.callbacks import BaseCallback, EventCallback

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.pool import Timings

__all__ = ["VecEnvTimingCallback"]


class VecEnvTimingCallback(BaseCallback):
    """Callback that logs how long environments, rollouts and updates take, in seconds, next to SB3's ``time/fps``.

    - ``time/rollout`` is the mean duration of a rollout: environments, actions of the policy, and other callbacks.
    - ``time/update`` is the mean duration between two rollouts: gradients and logs.
    - ``time/env_start`` is the duration of the start of :class:`SharedMemoryVecEnv` and :class:`RayVecEnv`.
    - ``time/env_step`` is the mean duration of their steps.
    - ``time/env_restarts`` is the number of their restarted workers.

    :raises InvalidArgumentError: From ``learn()``, if it is inside an ``EventCallback``, such as ``EveryNTimesteps``

    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import VecEnvTimingCallback, make_vec_env
    >>> env = make_vec_env("CartPole-v1", n_envs=2)
    >>> PPO("MlpPolicy", env, n_steps=64).learn(128, callback=VecEnvTimingCallback()).num_timesteps
    128
    """

    def _init_callback(self) -> None:
        # Times of the present learn(), which mean nothing in another process: ResumeCallback does not save them.
        self._marks = types.SimpleNamespace(rollout_end=None)
        self._require_rollouts()

    def _on_training_start(self) -> None:
        self._require_rollouts()  # a CallbackList sets its parent late

    def _require_rollouts(self) -> None:
        """Raise if another callback calls this one only at its events."""
        if isinstance(self.parent, EventCallback):
            raise InvalidArgumentError(
                f"{type(self.parent).__name__} calls VecEnvTimingCallback only at events; expected a call in each "
                "rollout. Use learn(..., callback=[other_callback, VecEnvTimingCallback()])"
            )

    def _on_rollout_start(self) -> None:
        now = time.perf_counter()
        if self._marks.rollout_end is not None:
            self.logger.record_mean("time/update", now - self._marks.rollout_end)
        timings = dataclasses.replace(self._current_timings())
        self._marks = types.SimpleNamespace(rollout_start=now, rollout_end=None, timings=timings)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        marks = self._marks
        marks.rollout_end = time.perf_counter()
        self.logger.record_mean("time/rollout", marks.rollout_end - marks.rollout_start)
        timings, before = self._current_timings(), marks.timings
        if steps := timings.steps - before.steps:
            self.logger.record("time/env_start", timings.start_seconds)
            self.logger.record_mean("time/env_step", (timings.total_step_seconds - before.total_step_seconds) / steps)
            self.logger.record("time/env_restarts", timings.restarts)

    def _current_timings(self) -> Timings:
        """Return the timings of the training environment; empty ones if it has none."""
        found = getattr(self.training_env.unwrapped, "timings", None)
        return found if isinstance(found, Timings) else Timings()
