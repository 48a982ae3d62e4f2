"""How long environments take, beside what training takes."""

from __future__ import annotations

import dataclasses

from stable_baselines3.common.callbacks import BaseCallback

__all__ = ["Timings", "VecEnvTimings"]


@dataclasses.dataclass
class Timings:
    """What a :class:`SharedMemoryVecEnv` has taken.

    :ivar start_seconds: until all environments were built
    :ivar steps: how many it has done, each of all environments
    :ivar total_step_seconds: of all of them, from the actions to what is returned
    :ivar restarts: workers that were put in the place of others
    """

    start_seconds: float
    steps: int = 0
    total_step_seconds: float = 0.0
    restarts: int = 0

    @property
    def step_seconds(self) -> float:
        """The mean of a step; 0 before the first."""
        return self.total_step_seconds / self.steps if self.steps else 0.0

    def add_step(self, seconds: float) -> None:
        """Count one."""
        self.steps += 1
        self.total_step_seconds += seconds


class VecEnvTimings(BaseCallback):
    """Has what the environments take logged beside Stable Baselines3's own ``time/fps``.

    ``time/env_start`` and ``time/env_step`` are seconds, the latter the mean of a rollout's steps;
    ``time/env_restarts`` counts. Of vectorised environments that are no :class:`SharedMemoryVecEnv` it logs nothing.

    .. code-block:: python

        model.learn(100_000, callback=VecEnvTimings())
    """

    def _on_rollout_start(self) -> None:
        timings = self._timings()
        self._before = (0, 0.0) if timings is None else (timings.steps, timings.total_step_seconds)

    def _on_rollout_end(self) -> None:
        timings = self._timings()
        if timings is None or timings.steps == self._before[0]:
            return
        steps, seconds = timings.steps - self._before[0], timings.total_step_seconds - self._before[1]
        self.logger.record("time/env_start", timings.start_seconds)
        self.logger.record("time/env_step", seconds / steps)
        self.logger.record("time/env_restarts", timings.restarts)

    def _on_step(self) -> bool:
        return True

    def _timings(self) -> Timings | None:
        found = getattr(self.training_env.unwrapped, "timings", None)
        return found if isinstance(found, Timings) else None
