"""``RayVecEnv``: environments in Ray actors, on this machine or on others, for Stable Baselines3."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_ext_core.vector.ray_pool import RayPool
from sb3_ext._pool_vec_env import PoolVecEnv
from sb3_ext._vec_env_arguments import check_env_fns, check_options, factories_of
from sb3_ext.timings import Timings

__all__ = ["RayVecEnv"]


class RayVecEnv(PoolVecEnv):
    """Environments in the actors of a Ray cluster.

    For simulators whose steps take milliseconds, and for more of them than one machine can hold: with two actors, a
    step costs about a millisecond beside the environments'. On one machine, :class:`SharedMemoryVecEnv` is faster. What
    it returns is the same. Actors load what the environment needs, not Stable Baselines3 or torch.

    It takes the cluster that ``ray.init(address=...)`` has connected to; without it, Ray starts one on this machine,
    which lives on when this is closed. Every machine needs this package and what the environment imports.

    :param env_fns: build the environments: functions, or whatever :func:`as_factory` takes
    :param n_workers: how many actors share the environments; default: one each
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until they must have answered a step, a reset or another call
    :param close_timeout: seconds until they must have closed their environments; None waits. When it is reached, the
        actors are killed, and a warning says so
    :param actor_options: of each actor, as ``ray.remote`` takes them: ``{"num_cpus": 1, "num_gpus": 0.25}``
    :raises MissingDependencyError: Ray is not installed
    :raises WorkerError: at any call: an environment or its actor has failed; the text says which environment, in what,
        and why; the cause is the environment's own exception. All actors are gone then
    :raises EnvironmentOutputError: the environments' spaces differ
    :raises InvalidArgumentError: an option with another value, observations that are not arrays of fixed shape

    :ivar timings: how long the start and the steps have taken, see :class:`VecEnvTimings`

    Source: https://docs.ray.io/en/latest/ray-core/actors.html
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        n_workers: int | None = None,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        close_timeout: float | None = None,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_env_fns(env_fns)
        check_options(
            n_workers=n_workers, start_timeout=start_timeout, step_timeout=step_timeout, close_timeout=close_timeout
        )
        began = time.perf_counter()
        pool = RayPool(
            factories_of(env_fns),
            num_workers=min(n_workers or len(env_fns), len(env_fns)),
            actor_options=actor_options or {},
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            close_timeout=close_timeout,
        )
        super().__init__(pool, Timings(time.perf_counter() - began))
