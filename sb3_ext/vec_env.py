"""``SharedMemoryVecEnv`` and ``RayVecEnv``: environments in workers, for Stable Baselines3, and how long they take."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.vector.channel import WorkerHandle
from rl_ext_core.vector.pool import Pool, WorkerPool
from rl_ext_core.vector.ray import RayPool
from rl_ext_core.vector.worker import CHANGED, DONE, OTHER, TRUNCATED
from sb3_ext._arguments import check_env_fns, check_options

__all__ = ["PoolVecEnv", "RayVecEnv", "SharedMemoryVecEnv", "Timings", "VecEnvTimings", "factories_of"]

_log = logging.getLogger("sb3_ext")

# By the number of the kind, see rl_ext_core.vector.worker.KINDS.
_REWARD_DTYPES = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64), np.dtype(bool)]

Indices = int | Iterable[int] | None


def _is_like(actions: Any, shared: np.ndarray[Any, Any]) -> bool:
    return type(actions) is np.ndarray and actions.dtype == shared.dtype and actions.shape == shared.shape


class PoolVecEnv(VecEnv):
    """A vectorised environment over workers.

    :param env_fns: build the environments
    :param n_workers: how many share them; None: one each
    :param new_pool: makes the pool, given factories and ``num_workers``

    :ivar reward_dtype: of rewards; None: what environments return, as with ``SubprocVecEnv``. ``DummyVecEnv`` gives
        32-bit floats, and so does what is chosen in its place
    """

    reward_dtype: type[np.float32] | None = None

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], n_workers: int | None, new_pool: Callable[..., WorkerPool]
    ) -> None:
        check_env_fns(env_fns)
        began = time.perf_counter()
        pool = self._pool = new_pool(factories_of(env_fns), num_workers=min(n_workers or len(env_fns), len(env_fns)))
        self.timings = Timings(time.perf_counter() - began)
        self.closed = self.waiting = False
        arrays, layout = pool.arrays, pool.layout
        # Taken out of the dict once: this is the path of every step.
        self._observations = [arrays[f"observation {index}"] for index in range(len(layout.keys))]
        self._actions = arrays.get("action")
        self._rewards, self._reward_kinds, self._flags = arrays["reward"], arrays["reward kind"], arrays["flags"]
        self._flag_bytes, self._kind_bytes = self._flags.data, self._reward_kinds.data
        self._zeros = bytes(len(pool.worker_of))
        self._restarts: Restarts | None = None  # the failure of one is the failure of all
        self._changes_told = False
        try:
            super().__init__(len(pool.worker_of), *pool.spaces)
            # What records videos takes the frames per second from it.
            with contextlib.suppress(Exception):  # there is none, or it cannot leave its process
                self.metadata = {**self.get_attr("metadata", 0)[0], **self.metadata}
        except BaseException:
            pool.end()
            raise

    def step_async(self, actions: Any) -> None:
        """Have all environments start a step.

        :param actions: (n_envs, ...)
        """
        if self.closed or self.waiting:
            self._require_idle()
        self._pool.settle()
        self._began = time.perf_counter()
        shared = self._actions
        if shared is not None and _is_like(actions, shared):
            shared[...] = actions
            self._pool.step()
        elif len(actions) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(actions)} actions for {self.num_envs} environments; expected an action for each"
            )
        else:
            # One by one, as SubprocVecEnv sends them: a conversion could change their bits.
            for worker in self._pool.workers:
                self._pool.send(worker, "step", list(actions[worker.first : worker.last]))
        self.waiting = True

    def step_wait(self) -> Any:
        """Wait for the step.

        :return: observations, (n_envs, ...) each; rewards, (n_envs,); dones, (n_envs,) bool; a list of infos
        :raises WorkerError: a worker has failed
        """
        self._require_open()
        if not self.waiting:
            raise InvalidArgumentError("no step was begun; write step_async(actions) first, or step(actions)")
        pool = self._pool
        pool.wait_for_step()
        # From here on, Ctrl-C could not be followed by another step_wait.
        self.waiting = False
        # Most steps end no episode and have nothing to say: told by comparing bytes, a tenth of what NumPy takes.
        if self._flag_bytes == self._kind_bytes == self._zeros and all(
            worker.answer is None for worker in pool.workers
        ):
            quiet: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
            dtype = self.reward_dtype
            rewards = self._rewards.copy() if dtype is None else self._rewards.astype(dtype)
            result = self._returned(), rewards, np.zeros(self.num_envs, bool), quiet
        else:
            self._tell_of_changes()
            infos, others = self._informations()
            for info, value in zip(infos, (self._flags & TRUNCATED).tolist(), strict=True):
                info["TimeLimit.truncated"] = value != 0
            result = self._returned(), self._rewards_of_step(others), (self._flags & DONE).astype(bool), infos
        self.timings.add_step(time.perf_counter() - self._began)
        return result

    def _informations(self) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Return the informations that workers have sent, and rewards that are no plain numbers."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        reset_infos = list(self.reset_infos)  # those before are the caller's to keep
        rewards: dict[int, Any] = {}
        for worker in self._pool.workers:
            for index, entry in enumerate(self._answer_of(worker) or (), worker.first):
                if entry is not None:
                    infos[index], reset_info, rewards[index] = entry
                    if reset_info is not None:
                        reset_infos[index] = reset_info
        self.reset_infos = reset_infos
        return infos, rewards

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n_envs, ...) each
        :raises WorkerError: a worker has failed
        """
        self._require_open()
        pool = self._pool
        pool.settle()
        self.waiting = False
        asked = list(zip(self._seeds, self._options, strict=True))
        for worker in pool.workers:
            pool.reset(worker, asked[worker.first : worker.last])
        pool.wait_for_step()
        infos = [reset_info for worker in pool.workers for _, reset_info, _ in self._answer_of(worker)]
        self._tell_of_changes()
        self.reset_infos = infos
        self._reset_seeds()
        self._reset_options()
        return self._returned()

    def _tell_of_changes(self) -> None:
        if self._changes_told or not (self._flags & CHANGED).any():
            return
        self._changes_told = True
        who = int(np.argmax(self._flags & CHANGED))
        warnings.warn(
            f"environment {who} returns observations with values that the dtype of its observation space, "
            f"{self.observation_space}, cannot hold: they are changed to such that it can, as DummyVecEnv does. Give "
            "the space the dtype of what reset and step return",
            stacklevel=4,
        )

    def _answer_of(self, worker: Any) -> Any:
        """Return a worker's answer to a step or a reset; if it has failed, that of the one in its place."""
        answer = worker.answer
        if not isinstance(answer, WorkerError):
            return answer
        if self._restarts is None:
            raise answer
        return self._restarts.replace(worker, answer)

    def close(self) -> None:
        """Close the environments and end the workers; it always returns.

        :raises WorkerError: an environment fails in its ``close``
        """
        self.closed = True
        self._pool.close()  # again, if Ctrl-C has come before it was done

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Render all environments.

        :return: (height, width, 3) uint8 each; None where the render mode is another one
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._call("render", None, None)

    def has_attr(self, attr_name: str) -> bool:
        """Tell whether all environments have an attribute."""
        return all(self._call("has_attr", attr_name, None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of environments.

        :raises AttributeError: there is none; the environments live on
        """
        return self._call("get_attr", attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of environments."""
        self._call("set_attr", (attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of environments; what one raises is raised here, and the environments live on."""
        return self._call("env_method", (method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Tell which environments have a wrapper of a class."""
        # By name: to unpickle the class, a worker would have to import its module.
        return self._call("env_is_wrapped", (wrapper_class.__module__, wrapper_class.__qualname__), indices)

    def _call(self, name: str, data: Any, indices: Indices) -> list[Any]:
        self._require_idle()
        numbers = range(len(self._pool.worker_of))  # the base class may not know yet how many there are
        chosen = numbers if indices is None else [numbers[index] for index in self._get_indices(indices)]
        return self._pool.call(chosen, name, data)

    def _returned(self) -> Any:
        if self._restarts is not None:
            self._restarts.remember(self._observations)
        return self._pool.layout.joined([array.copy() for array in self._observations])

    def _rewards_of_step(self, others: dict[int, Any]) -> Any:
        kinds = self._reward_kinds
        if self.reward_dtype is not None:
            rewards = self._rewards.astype(self.reward_dtype)
            for index, value in others.items():
                if kinds[index] == OTHER:
                    rewards[index] = value
            return rewards
        if not kinds.any():
            return self._rewards.copy()
        # As SubprocVecEnv does it: the environments' own objects decide on the dtype.
        return np.stack(
            [
                others[index] if kind == OTHER else _REWARD_DTYPES[kind].type(value)
                for index, (kind, value) in enumerate(zip(kinds.tolist(), self._rewards.tolist(), strict=True))
            ]
        )

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidArgumentError(
                f"this {type(self).__name__} is closed; make a new one: {type(self).__name__}(env_fns)"
            )

    def _require_idle(self) -> None:
        self._require_open()
        self._pool.raise_failure()
        if self.waiting:
            raise InvalidArgumentError(
                "a step was begun, and what it returns was not taken yet; write step_wait(), or reset(), first"
            )


class Restarts:
    """Replaces workers, up to a limit.

    :param pool: of the workers
    :param limit: how many times
    :param timings: where it is counted
    """

    def __init__(self, pool: Pool, limit: int, timings: Timings) -> None:
        self._pool, self._limit, self._timings = pool, limit, timings
        self._last: list[np.ndarray[Any, Any]] = []

    def remember(self, observations: Sequence[np.ndarray[Any, Any]]) -> None:
        """Keep what is returned: the last that anybody has seen of an episode, should its worker fail."""
        self._last = [array.copy() for array in observations]

    def replace(self, worker: WorkerHandle, failure: WorkerError) -> list[tuple[dict[str, Any], dict[str, Any], None]]:
        """Put a new worker in, with its environments reset.

        :param worker: that has failed
        :param failure: what it died of
        :return: what the worker would have answered: its environments' episodes are truncated
        :raises WorkerError: the limit is reached; the other workers are gone then as well
        """
        pool, first = self._pool, failure
        while True:
            if self._timings.restarts >= self._limit:
                pool.end(failure)
                raise failure
            self._timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, self._timings.restarts, self._limit)
            try:
                infos = pool.restart(worker, first)
                break
            except WorkerError as again:
                failure = again
            finally:
                # Ctrl-C may come at any time: then all of this is done again.
                worker.answer = first
        rows = slice(worker.first, worker.last)
        pool.arrays["reward"][rows], pool.arrays["reward kind"][rows] = 0.0, 0
        pool.arrays["flags"][rows] = DONE | TRUNCATED
        answer = [
            ({"terminal_observation": self._last_of(index), "worker_error": str(first)}, info, None)
            for index, (_, info, _) in enumerate(infos, worker.first)
        ]
        pool.replaced(worker, answer)
        return answer

    def _last_of(self, index: int) -> Any:
        # Nothing was returned yet where the first reset fails: then nobody reads this.
        return self._pool.layout.joined([array[index].copy() for array in self._last]) if self._last else None


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
        timeouts = {"start_timeout": start_timeout, "step_timeout": step_timeout, "close_timeout": close_timeout}
        of_pool: dict[str, Any] = {"start_method": start_method, **timeouts, "cure": cure}
        check_options(**of_pool, n_workers=n_workers, restart=restart, max_restarts=max_restarts)
        apart = restart is not None
        super().__init__(env_fns, n_workers, functools.partial(Pool, **of_pool, apart=apart))
        if isinstance(self._pool, Pool) and apart:
            self._restarts = Restarts(self._pool, max_restarts, self.timings)
        _warn_of_memory([worker.process.pid for worker in self._pool.workers])


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
        timeouts: dict[str, Any]
        timeouts = {"start_timeout": start_timeout, "step_timeout": step_timeout, "close_timeout": close_timeout}
        check_options(n_workers=n_workers, **timeouts)
        new_pool = functools.partial(RayPool, **timeouts, actor_options=actor_options or {})
        super().__init__(env_fns, n_workers, new_pool)


def factories_of(env_fns: Sequence[Callable[[], Any]]) -> list[EnvFactory[Any]]:
    """Turn functions, or what else stands for an environment, into factories, each for its place in the list.

    Those that are for a worker already stay as they are. The same object several times is turned only once.
    """
    made: dict[int, list[EnvFactory[Any]]] = {}
    factories = []
    for index, env_fn in enumerate(env_fns):
        if isinstance(env_fn, EnvFactory) and env_fn.worker is not None:
            factories.append(env_fn)
            continue
        if id(env_fn) not in made:
            made[id(env_fn)] = as_factory(env_fn).for_workers(len(env_fns))
        factories.append(made[id(env_fn)][index])
    return factories


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
