"""``SharedMemoryVecEnv`` and ``RayVecEnv``, and the base of all vectorized environments for SB3."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.environments import PoolOptions, qualified_name, store_reward
from rl_ext_core.vector.memory_layout import ENDED, OTHER_REWARD, TRUNCATED
from rl_ext_core.vector.pool import Pool
from rl_ext_core.vector.ray_workers import ActorHandle, launch_actors

__all__ = ["CheckedVecEnv", "Indices", "PoolVecEnv", "RayVecEnv", "SharedMemoryVecEnv"]

# Indexed by the kind of a reward, see rl_ext_core.vector.memory_layout.REWARD_KINDS.
_REWARD_TYPES = (np.float64, np.float32, np.int64, np.bool_)

Indices = int | Iterable[int] | None


class CheckedVecEnv(VecEnv):
    """Base of all vectorized environments here: raises errors for calls in the wrong order."""

    closed = False
    _actions: Any = None  # actions of the pending step
    constructor_argument = "env_fns"
    row_noun = "environment"

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Render all environments.

        :return: (height, width, 3) uint8 each; None if the render mode is not ``"rgb_array"``
        """
        if self.render_mode == "rgb_array":
            self._require_open()
            return self._render()
        warnings.warn(
            f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
            stacklevel=2,
        )
        return [None] * self.num_envs

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next reset.

        :param options: a dict for all environments, or a list with one each; default: none
        """
        if isinstance(options, Sequence) and len(options) != self.num_envs:
            raise InvalidArgumentError(
                f"number of options: {len(options)}, expected {self.num_envs}, one for each {self.row_noun}. "
                "Use set_options({...}) with one dict for all"
            )
        super().set_options(options)

    def _render(self) -> Sequence[Any]:
        """Return one image per environment."""
        raise NotImplementedError

    def _require_open(self) -> None:
        """Raise an error if the vectorized environment is closed."""
        if self.closed:
            name = type(self).__name__
            raise InvalidArgumentError(f"this {name} is closed. Make a new one: {name}({self.constructor_argument})")

    def _store_actions(self, actions: Any) -> None:
        """Store the actions of the next step, after checking their number."""
        self._require_open()
        if len(actions) != self.num_envs:
            raise InvalidArgumentError(
                f"number of actions: {len(actions)}, expected {self.num_envs}, one for each {self.row_noun}"
            )
        self._actions = actions

    def _take_actions(self) -> Any:
        """Return the stored actions and remove them; raise an error if there are none."""
        self._require_open()
        actions, self._actions = self._actions, None
        self._require_pending_step(actions is not None)
        return actions

    def _require_pending_step(self, begun: bool) -> None:
        """Raise an error if no step has begun."""
        if not begun:
            raise InvalidArgumentError("no step is pending. Call step_async(actions) first, or step(actions)")

    def _resolve_indices(self, indices: Indices, count: int) -> Sequence[int]:
        """Return the selected row numbers, without negative ones; None selects all."""
        # The constructor of the base class calls this before it sets num_envs.
        numbers = range(count)
        return numbers if indices is None else [numbers[index] for index in self._get_indices(indices)]


class PoolVecEnv(CheckedVecEnv):
    """Vectorized environment whose sub-environments run in the workers of a pool."""

    # None: dtype of the environments' rewards, as in SubprocVecEnv. make_vec_env and AutoVecEnv set float32, as in
    # DummyVecEnv, so that their choice does not change the numbers.
    reward_dtype: type[np.float32] | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.timings = pool.timings
        self.waiting = False
        self._rewards, self._reward_kinds, self._flags = (
            pool.arrays[name] for name in ("reward", "reward kind", "flags")
        )
        try:
            super().__init__(pool.num_envs, *pool.spaces)
            # VecVideoRecorder reads the frame rate from metadata.
            with contextlib.suppress(Exception):  # metadata may be missing, or not picklable
                self.metadata = {**self.get_attr("metadata", 0)[0], **self.metadata}
        except BaseException:
            pool.end()
            raise

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments with actions, (n_envs, ...)."""
        if self.closed or self.waiting:
            self._require_idle()
        self._pool.begin_step(actions)
        self.waiting = True

    def step_wait(self) -> Any:
        """Wait for the pending step.

        :return: observations, (n_envs, ...) each; rewards, (n_envs,); dones, (n_envs,) bool; a list of infos
        :raises WorkerError: If a worker has failed.
        """
        if self.closed or not self.waiting:
            self._require_open()
            self._require_pending_step(self.waiting)
        pool = self._pool
        pool.wait()
        # The answers are received: after Ctrl-C, another step_wait would have nothing to wait for.
        self.waiting = False
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        if pool.is_plain_step():
            rewards, dones = self._rewards.astype(self.reward_dtype or np.float64), np.zeros(self.num_envs, bool)
        else:
            pool.warn_about_conversions("DummyVecEnv")
            reset_infos = list(self.reset_infos)  # the caller may keep the previous list
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
        :raises WorkerError: If a worker has failed.
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
        """Close the environments and end the workers. In a forked process, leave them alone.

        :raises WorkerError: If an environment fails in its ``close``.
        """
        self.closed = True
        self._pool.close()  # even if closed is True: Ctrl-C may have interrupted an earlier call

    def __reduce__(self) -> NoReturn:
        raise Pool.copy_error(type(self).__name__)

    def _render(self) -> Sequence[Any]:
        return self._call_pool("render", None, None)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute."""
        return all(self._call_pool("has_attr", attr_name, None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of environments.

        :raises AttributeError: If the attribute does not exist. The environments stay usable.
        """
        return self._call_pool("get_attr", attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of environments."""
        self._call_pool("set_attr", (attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of environments. If it raises, the environments stay usable.

        :raises RuntimeError: If the method's exception cannot be recreated in this process; the text contains it.
        """
        return self._call_pool("env_method", (method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return whether each environment has a wrapper of a class. Classes are compared by name and module."""
        return self._call_pool("env_is_wrapped", qualified_name(wrapper_class), indices)

    def _call_pool(self, name: str, data: Any, indices: Indices) -> list[Any]:
        """Send a request to the workers of these environments, and return the answers."""
        self._require_idle()
        return self._pool.call(self._resolve_indices(indices, self._pool.num_envs), name, data)

    def _build_rewards(self, other_rewards: dict[int, Any]) -> Any:
        """Return the rewards of a step, in the dtype that ``SubprocVecEnv`` returns by default."""
        kinds = self._reward_kinds.tolist()
        if self.reward_dtype is None and any(kinds):
            # As in SubprocVecEnv, NumPy derives the dtype from the environments' own objects.
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
        """Raise an error if the workers are closed or have failed, or if a step is pending."""
        self._require_open()
        self._pool.raise_failure()
        if self.waiting:
            raise InvalidArgumentError(
                "a step is pending, as after Ctrl-C in learn(): expected its step_wait(), or a reset. Use "
                "model.set_env(model.get_env()) before the next learn(); without a model, env.reset()"
            )


class SharedMemoryVecEnv(PoolVecEnv):
    """Faster ``SubprocVecEnv``, with shared memory, detailed errors and worker restarts.

    It takes the arguments of ``SubprocVecEnv``, and the ones below. Observations, actions, rewards and flags are in
    shared memory; non-empty infos are pickled. Returned arrays are never overwritten. Workers import only what the
    environment needs, not Stable Baselines3 or torch.

    :param env_fns: functions that build the environments, or anything that :func:`as_factory` takes
    :param start_method: ``"forkserver"`` (the default where available), ``"spawn"`` or ``"fork"``
    :param n_workers: number of processes that share the environments; default: one each
    :param start_timeout: seconds until all environments must be built; None: no limit
    :param step_timeout: seconds until a step, a reset or another call must be answered; None: no limit
    :param close_timeout: seconds until workers must have closed their environments and ended. Later they are killed,
        with a warning. None waits, as ``SubprocVecEnv`` does
    :param restart: ``"truncate"`` replaces a failed worker, and reports the episodes of its environments as truncated,
        with the last returned observation. The new environments get the attributes of ``set_attr`` and the options of
        the last reset. They get its seed if the failure was in that reset, else a seed derived from it.
        ``info["worker_error"]``, also in :attr:`reset_infos`, describes the failure. It lists calls of ``env_method``
        that were not repeated
    :param max_restarts: number of restarts after which the failure is raised
    :param cwd: ``"own"`` starts each worker in an empty folder below :attr:`working_directory`, which is kept if it
        contains files at the end. A path starts each worker in a copy of that folder. By default workers share the
        working directory of this process
    :param recorder: folder for records of failed episodes, which ``rl-ext replay`` repeats. True: the working
        directory; at most ten files ``crash-*.rlx`` are written to a folder. False: record nothing. Default: True
    :raises WorkerError: From any call, if a worker has failed. It names the environment, the call and the reason; its
        cause is the environment's own exception. All workers have ended then.
    :raises EnvironmentOutputError: If the environments' spaces differ.
    :raises InvalidArgumentError: If an option has an invalid value, or observations are not arrays of fixed shape.
    :raises InvalidArgumentError: From any call except ``close`` in a process that was forked from the creating one.

    :ivar timings: durations of the start and of the steps; :class:`~sb3_ext.VecEnvTimingCallback` logs them
    :ivar working_directory: folder that contains the workers' directories ``"0"``, ``"1"`` and so on; None if workers
        share the directory of this process

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
        recorder: bool | str | os.PathLike[str] = True,
    ) -> None:
        options = PoolOptions(
            start_method, n_workers, start_timeout, step_timeout, close_timeout, restart, max_restarts, cwd, recorder
        )
        super().__init__(Pool(env_fns, options))
        self.working_directory = self._pool.working_directory


class RayVecEnv(PoolVecEnv):
    """Vectorized environment in the actors of a Ray cluster.

    It suits simulators whose steps take milliseconds, and more of them than fit on one machine. With two actors, a step
    takes about a millisecond in addition to the environments' time. On one machine, :class:`SharedMemoryVecEnv` is
    faster, and returns the same. Actors import only what the environment needs, not Stable Baselines3 or torch.

    It uses the cluster that ``ray.init(address=...)`` has connected to. Without one, Ray starts a cluster on this
    machine, which keeps running after ``close``. Every machine needs this package and the environment's dependencies.

    :param env_fns: functions that build the environments, or anything that :func:`as_factory` takes
    :param n_workers: number of actors that share the environments; default: one each
    :param start_timeout: seconds until all environments must be built; None: no limit
    :param step_timeout: seconds until a step, a reset or another call must be answered; None: no limit
    :param close_timeout: seconds until actors must have closed their environments. Later they are killed, with a
        warning. None waits
    :param actor_options: options of each actor, as ``ray.remote`` takes them: ``{"num_cpus": 1, "num_gpus": 0.25}``
    :raises MissingDependencyError: If Ray is not installed.
    :raises WorkerError: From any call, if an environment or its actor has failed. It names the environment, the call
        and the reason; its cause is the environment's own exception. All actors have ended then.
    :raises EnvironmentOutputError: If the environments' spaces differ.
    :raises InvalidArgumentError: If an option has an invalid value, or observations are not arrays of fixed shape.

    :ivar timings: durations of the start and of the steps; :class:`~sb3_ext.VecEnvTimingCallback` logs them

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
        options = PoolOptions(None, n_workers, start_timeout, step_timeout, close_timeout, recorder=False)
        launch = functools.partial(launch_actors, actor_options=actor_options or {})
        super().__init__(Pool(env_fns, options, new_worker=ActorHandle, launch=launch))
