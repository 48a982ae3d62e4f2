"""``SharedMemoryVecEnv`` and ``RayVecEnv``: environments in workers, for Stable Baselines3, and how long they take."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.environments import PoolOptions, qualified_name, store_reward
from rl_ext_core.vector.pool import Pool, Timings, make_pool
from rl_ext_core.vector.ray import RayPool
from rl_ext_core.vector.worker import ENDED, OTHER_REWARD, TRUNCATED

__all__ = ["CheckedVecEnv", "Indices", "PoolVecEnv", "RayVecEnv", "SharedMemoryVecEnv", "VecEnvTimingCallback"]

# By the number of the kind, see rl_ext_core.vector.worker.KINDS.
_REWARD_TYPES = (np.float64, np.float32, np.int64, np.bool_)

Indices = int | Iterable[int] | None


class CheckedVecEnv(VecEnv):
    """Base of this package's vectorized environments. An error says what is wrong with a call out of order."""

    closed = False
    _actions: Any = None  # of the step that was begun
    constructor_argument = "env_fns"
    row_noun = "environments"

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Render all environments.

        :return: (height, width, 3) uint8 each; None where the render mode is another one
        """
        if self.render_mode == "rgb_array":
            self._require_open()
            return self._render()
        warnings.warn(
            f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
            stacklevel=2,
        )
        return [None] * self.num_envs

    def _render(self) -> Sequence[Any]:
        raise NotImplementedError

    def _require_open(self) -> None:
        if self.closed:
            name = type(self).__name__
            raise InvalidArgumentError(f"this {name} is closed; make a new one: {name}({self.constructor_argument})")

    def _store_actions(self, actions: Any) -> None:
        self._require_open()
        if len(actions) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(actions)} actions for {self.num_envs} {self.row_noun}; expected an action for each"
            )
        self._actions = actions

    def _take_actions(self) -> Any:
        self._require_open()
        actions, self._actions = self._actions, None
        self._require_pending_step(actions is not None)
        return actions

    def _require_pending_step(self, begun: bool) -> None:
        if not begun:
            raise InvalidArgumentError("no step was begun; write step_async(actions) first, or step(actions)")

    def _resolve_indices(self, indices: Indices, count: int) -> Sequence[int]:
        # The base class asks before it knows how many there are.
        numbers = range(count)
        return numbers if indices is None else [numbers[index] for index in self._get_indices(indices)]


class PoolVecEnv(CheckedVecEnv):
    """A vectorized environment over the workers of a pool."""

    # Of rewards; None: what environments return, as with ``SubprocVecEnv``. ``DummyVecEnv`` gives 32-bit floats, and so
    # does what is chosen in its place.
    reward_dtype: type[np.float32] | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.timings = pool.timings
        self.waiting = False
        self._rewards, self._reward_kinds, self._flags = (
            pool.arrays[name] for name in ("reward", "reward kind", "flags")
        )
        try:
            super().__init__(len(pool.worker_by_env), *pool.spaces)
            # VecVideoRecorder reads the frame rate from it.
            with contextlib.suppress(Exception):  # there is none, or it cannot leave its process
                self.metadata = {**self.get_attr("metadata", 0)[0], **self.metadata}
        except BaseException:
            pool.end()
            raise

    def step_async(self, actions: Any) -> None:
        """Begin a step of all environments, with actions (n_envs, ...)."""
        if self.closed or self.waiting:
            self._require_idle()
        self._pool.begin_step(actions)
        self.waiting = True

    def step_wait(self) -> Any:
        """Wait for the step.

        :return: observations, (n_envs, ...) each; rewards, (n_envs,); dones, (n_envs,) bool; a list of infos
        :raises WorkerError: a worker has failed
        """
        if self.closed or not self.waiting:
            self._require_open()
            self._require_pending_step(self.waiting)
        pool = self._pool
        pool.wait()
        # From here on, Ctrl-C could not be followed by another step_wait.
        self.waiting = False
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        if pool.is_plain_step():
            rewards, dones = self._rewards.astype(self.reward_dtype or np.float64), np.zeros(self.num_envs, bool)
        else:
            pool.warn_about_conversions("DummyVecEnv")
            reset_infos = list(self.reset_infos)  # those before are the caller's to keep
            other_rewards: dict[int, Any] = {}
            for index, (info, reset_info, other_rewards[index], final) in pool.entries():
                infos[index] = info
                if reset_info is not None:
                    reset_infos[index], info["terminal_observation"] = reset_info, final
            self.reset_infos = reset_infos
            ended = self._flags & ENDED
            for info, value in zip(infos, ended.tolist(), strict=True):
                info["TimeLimit.truncated"] = value == TRUNCATED  # and not terminated as well
            rewards, dones = self._build_rewards(other_rewards), ended.astype(bool)
        result = pool.observations(), rewards, dones, infos
        self.timings.add_step(time.perf_counter() - pool.step_start)
        return result

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n_envs, ...) each
        :raises WorkerError: a worker has failed
        """
        self._require_open()
        pool = self._pool
        pool.begin_reset([(seed, options or None) for seed, options in zip(self._seeds, self._options, strict=True)])
        self.waiting = False
        pool.wait()
        entries = pool.entries(to_reset=True)
        self.reset_infos = [reset_info for _, (_, reset_info, _, _) in entries]  # type: ignore[misc]
        pool.warn_about_conversions("DummyVecEnv")
        self._reset_seeds()
        self._reset_options()
        return pool.observations()

    def close(self) -> None:
        """Close the environments and end the workers; it always returns. In a forked process it does nothing to them.

        :raises WorkerError: an environment fails in its ``close``
        """
        self.closed = True
        self._pool.close()  # again, if Ctrl-C has come before it was done

    def _render(self) -> Sequence[Any]:
        return self._call_pool("render", None, None)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute."""
        return all(self._call_pool("has_attr", attr_name, None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of environments.

        :raises AttributeError: there is none; the environments live on
        """
        return self._call_pool("get_attr", attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of environments."""
        self._call_pool("set_attr", (attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of environments; what one raises is raised here, and the environments live on.

        :raises RuntimeError: in place of an exception that cannot be made again in this process; it names it
        """
        return self._call_pool("env_method", (method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return which environments have a wrapper of a class, or of one of the same name and module."""
        return self._call_pool("env_is_wrapped", qualified_name(wrapper_class), indices)

    def _call_pool(self, name: str, data: Any, indices: Indices) -> list[Any]:
        self._require_idle()
        return self._pool.call(self._resolve_indices(indices, len(self._pool.worker_by_env)), name, data)

    def _build_rewards(self, other_rewards: dict[int, Any]) -> Any:
        kinds = self._reward_kinds.tolist()
        if self.reward_dtype is None and any(kinds):
            # As SubprocVecEnv does it: the environments' own objects decide on the dtype.
            each = enumerate(zip(kinds, self._rewards.tolist(), strict=True))
            return np.stack(
                [other_rewards[n] if kind == OTHER_REWARD else _REWARD_TYPES[kind](value) for n, (kind, value) in each]
            )
        rewards = self._rewards.astype(self.reward_dtype or np.float64)
        for index, kind in enumerate(kinds):
            if kind == OTHER_REWARD:
                store_reward(rewards, index, other_rewards[index])
        return rewards

    def _require_idle(self) -> None:
        self._require_open()
        self._pool.raise_failure()
        if self.waiting:
            raise InvalidArgumentError(
                "a step was begun, and what it returns was not taken yet; write step_wait(), or reset(), first"
            )


class SharedMemoryVecEnv(PoolVecEnv):
    """Stable Baselines3's ``SubprocVecEnv``, several times as fast, whose errors say what has happened.

    In place of ``SubprocVecEnv``, with its arguments and these. Observations, actions, rewards and flags are in shared
    memory; infos are pickled where there is something in them. What it returns is the caller's to keep. Workers load
    what the environment needs, not Stable Baselines3 or torch.

    :param env_fns: functions that build the environments, or whatever :func:`as_factory` takes
    :param start_method: ``"forkserver"`` (the default where there is one), ``"spawn"`` or ``"fork"``
    :param n_workers: number of processes that share the environments; default: one each
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until they must have answered a step, a reset or another call
    :param close_timeout: seconds until workers must have closed their environments and ended, else they are killed with
        a warning; None waits, as ``SubprocVecEnv`` does
    :param restart: ``"truncate"`` replaces a worker that has failed: the episodes of its environments are reported as
        truncated, with the last observation that was returned. The new environments get what ``set_attr`` had set and
        the options of the last reset, and the same seed if the failure came in that reset, else one drawn from it.
        ``info["worker_error"]``, also in :attr:`reset_infos`, says what failed, and names calls of ``env_method`` that
        were not repeated
    :param max_restarts: after so many, the failure is raised
    :param cwd: ``"own"`` gives each worker an empty working directory below :attr:`working_directory`, which is kept if
        files are written there; a folder gives each a copy of it. By default workers share that of this process
    :raises WorkerError: If a worker has failed, at any call: which environment, in what, and why; the cause is the
        environment's own exception. All workers are gone then
    :raises EnvironmentOutputError: If the environments' spaces differ
    :raises InvalidArgumentError: If an option has another value, or observations are not arrays of fixed shape; also at
        any call but ``close`` in a process that was forked from the one that made it

    :ivar timings: how long the start and the steps have taken, see :class:`VecEnvTimingCallback`
    :ivar working_directory: folder that has a working directory for each worker, ``"0"``, ``"1"`` and so on; None: they
        share that of this process

    Source: https://github.com/DLR-RM/stable-baselines3/issues/1890

    >>> import gymnasium
    >>> from sb3_ext import SharedMemoryVecEnv
    >>> env = SharedMemoryVecEnv([lambda: gymnasium.make("CartPole-v1")] * 4, n_workers=2)
    >>> env.reset().shape
    (4, 4)
    >>> env.close()
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
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        options = PoolOptions(
            start_method, n_workers, start_timeout, step_timeout, close_timeout, restart, max_restarts, cwd
        )
        super().__init__(make_pool(env_fns, options))
        self.working_directory = self._pool.working_directory


class RayVecEnv(PoolVecEnv):
    """Environments in the actors of a Ray cluster.

    For simulators whose steps take milliseconds, and for more of them than one machine can hold: with two actors, a
    step costs about a millisecond beside the environments'. On one machine, :class:`SharedMemoryVecEnv` is faster. What
    it returns is the same. Actors load what the environment needs, not Stable Baselines3 or torch.

    It takes the cluster that ``ray.init(address=...)`` has connected to; without it, Ray starts one on this machine,
    which lives on when this is closed. Every machine needs this package and what the environment imports.

    :param env_fns: functions that build the environments, or whatever :func:`as_factory` takes
    :param n_workers: number of actors that share the environments; default: one each
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until they must have answered a step, a reset or another call
    :param close_timeout: seconds until actors must have closed their environments, else they are killed with a warning;
        None waits
    :param actor_options: of each actor, as ``ray.remote`` takes them: ``{"num_cpus": 1, "num_gpus": 0.25}``
    :raises MissingDependencyError: If Ray is not installed
    :raises WorkerError: If an environment or its actor has failed, at any call: which environment, in what, and why;
        the cause is the environment's own exception. All actors are gone then
    :raises EnvironmentOutputError: If the environments' spaces differ
    :raises InvalidArgumentError: If an option has another value, or observations are not arrays of fixed shape

    :ivar timings: how long the start and the steps have taken, see :class:`VecEnvTimingCallback`

    Source: https://docs.ray.io/en/latest/ray-core/actors.html

    >>> env = RayVecEnv([make_env] * 16, n_workers=4)  # doctest: +SKIP
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
        options = PoolOptions(None, n_workers, start_timeout, step_timeout, close_timeout)
        super().__init__(RayPool(env_fns, options, actor_options=actor_options or {}))


class VecEnvTimingCallback(BaseCallback):
    """Log how long environments take, next to Stable Baselines3's ``time/fps``.

    ``time/env_start`` is in seconds, ``time/env_step`` is the mean of a rollout's steps in seconds, and
    ``time/env_restarts`` counts restarted workers. Only environments in workers are timed, those of
    :class:`SharedMemoryVecEnv` and :class:`RayVecEnv`. For other VecEnvs nothing is logged.

    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import VecEnvTimings, make_vec_env
    >>> env = make_vec_env("CartPole-v1", n_envs=2)
    >>> PPO("MlpPolicy", env, n_steps=64).learn(128, callback=VecEnvTimings()).num_timesteps
    128
    """

    def _on_rollout_start(self) -> None:
        self._timings_before = dataclasses.replace(self._current_timings())

    def _on_rollout_end(self) -> None:
        timings, before = self._current_timings(), self._timings_before
        if steps := timings.steps - before.steps:
            self.logger.record("time/env_start", timings.start_seconds)
            self.logger.record("time/env_step", (timings.total_step_seconds - before.total_step_seconds) / steps)
            self.logger.record("time/env_restarts", timings.restarts)

    def _on_step(self) -> bool:
        return True

    def _current_timings(self) -> Timings:
        found = getattr(self.training_env.unwrapped, "timings", None)
        return found if isinstance(found, Timings) else Timings()
