"""Worker processes of a ``ParallelEnv``, which start at the first use and again after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torchrl._utils
from gymnasium.vector.utils import iterate

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.failures import require_same_process
from rl_ext_core.vector import SharedMemoryVectorEnv
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.pool import Pool
from torchrl_ext.parallel.plan import WorkerPlan

__all__ = ["EACH", "WorkerPool"]

# Key of an option of reset: the options of each environment.
EACH = "options of each environment"
_DISABLED = gymnasium.vector.AutoresetMode.DISABLED


class WorkerPool(SharedMemoryVectorEnv):
    """Vectorized environment whose workers start at the first use, and again after ``close`` or a failure.

    After Ctrl-C the workers are ended, because later calls would get answers of the interrupted one.

    :param plan: factories and options
    :ivar stepped: numbers of the environments that steps step; None: all
    """

    _pool: Pool
    stepped: Sequence[int] | None = None
    failure_summary: str | None = None  # why there are no workers; None if they were closed
    _has_open_call = False

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan, self.closed, self.num_envs = plan, True, len(plan.factories)
        self.copy, self._pending, self._is_interrupted = True, "", False
        self.metadata, self.autoreset_mode = {"autoreset_mode": _DISABLED}, _DISABLED
        self.single_observation_space, self.single_action_space = plan.spaces
        self.observation_space, self.action_space = (
            gymnasium.vector.utils.batch_space(space, self.num_envs) for space in plan.spaces
        )

    def start(self) -> None:
        """Start the workers, and seed their environments."""
        plan = self._plan
        plan.warn_about_memory()
        self.failure_summary = None
        pool = Pool(plan.factories, plan.options(torchrl._utils.BATCHED_PIPE_TIMEOUT), autoreset=Autoreset.DISABLED)
        try:
            self._pool, self.timings, self._pending = pool, pool.timings, ""
            plan.set_up_environments(pool)
            self.closed = False
        except BaseException:
            pool.end()
            raise

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that uses the workers; start them first, and end them if it is interrupted.

        :param name: name of the operation. A ``"step"`` after a failure is refused
        :raises WorkerError: If a worker fails. The workers have ended.
        """
        self.end_interrupted()
        if not self.closed:
            require_same_process(self._pool._owner)
        elif name == "step" and self.failure_summary is not None:
            raise WorkerError(
                f"there are no workers, because {self.failure_summary}. Use reset() to start new ones", phase=name
            )
        self._has_open_call = True
        try:
            if self.closed:
                self.start()
            result = function(*arguments, **options)
        except WorkerError as error:
            self.end(str(error).partition("\n")[0].rstrip(":"))
            raise
        except Exception:
            self._pending, self._has_open_call = "", False
            raise
        except BaseException:
            self.end("a call was interrupted")
            raise
        self._has_open_call = False
        return result

    def end(self, reason: str | None) -> None:
        """End the workers at once. Their environments are closed if they react within seconds.

        :param reason: why there are no workers, for later errors
        """
        if hasattr(self, "_pool"):
            self._pool.end()
        self.failure_summary = reason or self.failure_summary
        self.closed, self._pending, self._has_open_call = True, "", False

    def end_interrupted(self) -> None:
        """End the workers if a call was interrupted while it ended them."""
        if self._has_open_call:
            self.end("a call was interrupted")

    def close(self, timeout: float | None = None, **_: Any) -> None:
        """Close the environments, and end the workers."""
        self.failure_summary = None
        if self.closed:
            return
        self._has_open_call, reason = True, None
        try:
            self._pool.raise_if_ended()
            self._pool.close(timeout)
        except WorkerError:
            reason = "a worker failed"
            raise
        finally:
            self.end(reason)

    # -- steps, resets and calls

    def step(self, actions: Any) -> Any:
        """Step the environments of ``stepped``."""
        return self.run("step", self._step, actions)

    def _step(self, actions: Any) -> Any:
        self._pool.begin_step(actions, lambda given: list(iterate(self.action_space, given)), self.stepped)
        self._pending = "step"
        return self.step_wait()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset environments.

        :param seed: None, or a list with a seed or None for each environment
        :param options: options for all environments. ``{"reset_mask": (num_envs,) bool}`` resets only some, and
            ``{EACH: [...]}`` has the options of each environment
        """
        return self.run("reset", self._reset, seed, dict(options or {}))

    def _reset(self, seed: Any, options: dict[str, Any]) -> Any:
        rows = options.pop("reset_mask", np.ones(self.num_envs, bool))
        each = options.pop(EACH, None) or [options or None] * self.num_envs
        seeds = [None] * self.num_envs if seed is None else list(seed)
        requests = zip(seeds, each, rows, strict=True)
        self._pool.begin_reset([(own, arguments) if this else None for own, arguments, this in requests])
        self._pending = "reset"
        return self.reset_wait()

    def call_each(self, command: str, arguments: Sequence[Any], environments: Sequence[int] = ()) -> list[Any]:
        """Make a call of :data:`~rl_ext_core.vector.environments.CALLS` for all environments, or for some."""

        def call() -> list[Any]:
            self._pool.begin_call(environments or range(self.num_envs), command, arguments)
            return self._pool.results()

        found: list[Any] = self.run("call", call)
        return found

    @property
    def processes(self) -> list[Any]:
        """Processes of the running workers."""
        return [worker.process for worker in self._pool.workers]
