"""Worker processes of a ``ParallelEnv``, which start at the first use and again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv
from rl_ext_core.vector.pool import Pool
from torchrl_ext.parallel.plan import WorkerPlan

__all__ = ["EACH", "WorkerPool"]

# Key of an option of reset: the options of each environment.
EACH = "options of each environment"
_DISABLED = gymnasium.vector.AutoresetMode.DISABLED


class WorkerPool(SharedMemoryVectorEnv):
    """Vectorized environment whose workers start at the first use, and again after ``close`` or a failure.

    :param plan: factories and options
    :ivar stepped: numbers of the environments that steps step; None: all
    """

    _pool: Any = None
    stepped: Sequence[int] | None = None

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan, self.num_envs, self._pending = plan, len(plan.factories), ""
        self.copy = False  # GymWrapper and ParallelEnv copy observations
        self.metadata, self.autoreset_mode = {"autoreset_mode": _DISABLED}, _DISABLED
        self.single_observation_space, self.single_action_space = plan.spaces
        self.observation_space, self.action_space = (batch_space(space, self.num_envs) for space in plan.spaces)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether there are no workers."""
        return self._pool is None or self._pool._ended

    @property
    def failure(self) -> WorkerError | None:
        """Failure that has ended the workers; None if they run, or were closed."""
        return None if self._pool is None else self._pool._failure

    def running_pool(self) -> Pool:
        """Return the pool of workers, after starting them if there are none."""
        if self.closed:
            self._pool, self._pending = None, ""
            self._pool = self._plan.start()
            self.timings = self._pool.timings
        return self._pool

    def close(self, timeout: float | None = None, **_: Any) -> None:
        """Close the environments, and end the workers."""
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                pool.raise_if_ended()
                pool.close(timeout)
            finally:
                pool.end()

    def step(self, actions: Any) -> Any:
        """Step the environments of ``stepped``."""
        if self.failure is not None:
            reason = str(self.failure).partition("\n")[0].rstrip(":")
            raise WorkerError(f"there are no workers, because {reason}. Use reset() to start new ones", phase="step")
        if self._pending:
            raise InvalidArgumentError(f"the last {self._pending} was interrupted: expected a reset. Use reset()")
        self.running_pool().begin_step(actions, lambda given: list(iterate(self.action_space, given)), self.stepped)
        self._pending = "step"
        return self.step_wait()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset environments.

        :param seed: None, or a list with a seed or None for each environment
        :param options: options for all environments. ``{"reset_mask": (num_envs,) bool}`` resets only some, and
            ``{EACH: [...]}`` has the options of each environment
        """
        options = dict(options or {})
        rows = options.pop("reset_mask", np.ones(self.num_envs, bool))
        each = options.pop(EACH, None) or [options or None] * self.num_envs
        requests = zip(seed or [None] * self.num_envs, each, rows, strict=True)
        self.running_pool().begin_reset([(own, arguments) if this else None for own, arguments, this in requests])
        self._pending = "reset"
        return self.reset_wait()

    def call_each(self, command: str, arguments: Sequence[Any], environments: Sequence[int] = ()) -> list[Any]:
        """Make a call of :data:`~rl_ext_core.vector.environments.CALLS` for all environments, or for some."""
        pool = self.running_pool()
        pool.begin_call(environments or range(self.num_envs), command, arguments)
        return pool.results()

    @property
    def processes(self) -> list[Any]:
        """Processes of the running workers."""
        return [worker.process for worker in self._pool.workers]
