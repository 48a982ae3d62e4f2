"""``SharedMemoryVecEnv``: environments in worker processes, for Stable Baselines3, through shared memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rl_ext_core import resources
from rl_ext_core.vector.pool import Pool
from sb3_ext._pool_vec_env import PoolVecEnv
from sb3_ext._restarts import Restarts
from sb3_ext._vec_env_arguments import check_env_fns, check_options, factories_of
from sb3_ext.timings import Timings

__all__ = ["SharedMemoryVecEnv"]

_log = logging.getLogger("sb3_ext")


class SharedMemoryVecEnv(PoolVecEnv):
    """Stable Baselines3's ``SubprocVecEnv``, several times as fast, whose errors say what has happened.

    In place of ``SubprocVecEnv``, with its arguments and these. Observations, actions, rewards and flags are in shared
    memory; informations are pickled where there is something in them. What it returns is the caller's to keep. Workers
    load what the environment needs, not Stable Baselines3 or torch.

    :param env_fns: build the environments: functions, or whatever :func:`as_factory` takes
    :param start_method: ``"forkserver"`` (the default where there is one), ``"spawn"`` or ``"fork"``
    :param n_workers: how many processes share the environments; default: one each
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until they must have answered a step, a reset or another call
    :param close_timeout: seconds until they must have closed their environments and ended; None waits, as
        ``SubprocVecEnv`` does. When it is reached, their processes are killed, and a warning says so
    :param restart: ``"truncate"`` puts a new worker in the place of one that has failed: the episodes of its
        environments are reported as truncated, with the last observation that was returned, and training goes on
    :param max_restarts: after so many, the failure is raised
    :param cure: for environments whose processes disturb each other: ``"working directory"``, ``"TMPDIR"`` or
        ``"library copy"`` gives each worker its own, see :func:`rl_ext_core.isolation.apply_cure`
    :raises WorkerError: at any call: a worker has failed; the text says which environment, in what, and why; the cause
        is the environment's own exception. All workers are gone then
    :raises EnvironmentOutputError: the environments' spaces differ
    :raises InvalidArgumentError: an option with another value, observations that are not arrays of fixed shape

    :ivar timings: how long the start and the steps have taken, see :class:`VecEnvTimings`

    Source: https://github.com/DLR-RM/stable-baselines3/issues/1890
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: str | None = None,
        *,
        n_workers: int | None = None,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        close_timeout: float | None = None,
        restart: Literal["truncate"] | None = None,
        max_restarts: int = 100,
        cure: str | None = None,
    ) -> None:
        check_env_fns(env_fns)
        check_options(
            start_method=start_method,
            n_workers=n_workers,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            close_timeout=close_timeout,
            restart=restart,
            max_restarts=max_restarts,
            cure=cure,
        )
        began = time.perf_counter()
        pool = Pool(
            factories_of(env_fns),
            num_workers=min(n_workers or len(env_fns), len(env_fns)),
            start_method=start_method,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            close_timeout=close_timeout,
            apart=restart is not None,
            cure=cure,
        )
        timings = Timings(time.perf_counter() - began)
        super().__init__(pool, timings, restarts=None if restart is None else Restarts(pool, max_restarts, timings))
        _warn_of_memory([seat.process.pid for seat in pool.seats])


def _warn_of_memory(pids: Sequence[int]) -> None:
    private, available = resources.private_memory(pids[0]), resources.available_memory()
    if private is not None and available is not None and available < private:
        _log.warning(
            "%d workers take %.0f MB each, and %.0f MB are left: use fewer environments, or have fewer workers share "
            "them: n_workers=%d",
            len(pids),
            private / 1e6,
            available / 1e6,
            max(1, len(pids) // 2),
        )
