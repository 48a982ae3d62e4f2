"""``SharedMemoryVectorEnv``, gymnasium environments in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.environments import PoolOptions, store_reward
from rl_ext_core.vector.memory_layout import OTHER_REWARD, TERMINATED, TRUNCATED
from rl_ext_core.vector.pool import Pool

_INTERRUPTED = "interrupted step"  # pending call after Ctrl-C in step()


class SharedMemoryVectorEnv(VectorEnv[Any, Any, Any]):
    """Replacement for gymnasium's ``AsyncVectorEnv`` that is several times as fast.

    Error messages name the environment that failed, its call and the reason. Observations, actions, rewards and flags
    are in shared memory. Infos are pickled unless they are empty. Each environment is built once, in its worker.

    :param env_fns: functions that build the environments, or other arguments of
        :func:`~rl_ext_core.factory.as_factory`
    :param shared_memory: No effect. Observations are always in shared memory.
    :param copy: bool, whether to copy observations, default True. If False, the next step overwrites them.
    :param context: str, start method: ``"forkserver"`` (default on Linux), ``"spawn"`` (default elsewhere) or
        ``"fork"``
    :param daemon: No effect. Workers end with this process, and may have child processes.
    :param worker: must be None
    :param observation_mode: must be ``"same"``
    :param autoreset_mode: AutoresetMode or str, when to reset environments whose episodes have ended, default
        ``NEXT_STEP``
    :param max_concurrency: int, same as ``n_workers``
    :param n_workers: int, number of worker processes, default: one per environment
    :param start_timeout: float, seconds until all environments must be built, default: no limit
    :param step_timeout: float, seconds until a step, reset or call must be answered, default: no limit
    :param close_timeout: float, seconds until workers must have closed their environments, default: no limit
    :param restart: ``"truncate"`` replaces failed workers, default None raises their failure. See below.
    :param max_restarts: int, number of replacements after which a failure is raised, default 100
    :param recorder: folder for records of failed episodes, which ``rl-ext replay`` repeats. True: the working
        directory; at most ten files ``crash-*.rlx`` are written to a folder. False: record nothing. Default: True
    :raises WorkerError: If a worker has failed, in any call. Its cause is the environment's exception, if there is one.
        All workers have ended.
    :raises EnvironmentOutputError: If the spaces of environments differ.
    :raises InvalidArgumentError: If an option has another value, or observations are not arrays of fixed shape. Also in
        calls other than ``close`` from a process that was forked from the one that created the environments.

    :ivar timings: durations of the start and the steps

    If ``restart="truncate"`` replaces a worker, the episodes of its environments are truncated, with the last
    observation that was returned. ``info["worker_error"]`` has the reason, also after a reset. The new environments get
    the attributes set by ``set_attr`` and the options of the last reset. Their seed is the same if the failure was in
    this reset. Otherwise it is drawn from the last one. The text in ``worker_error`` lists calls that were not
    repeated.

    Source: https://gymnasium.farama.org/api/vector/async_vector_env/

    >>> import gymnasium
    >>> from rl_ext_core.vector import SharedMemoryVectorEnv
    >>> envs = SharedMemoryVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, n_workers=2)
    >>> observations, infos = envs.reset(seed=0)
    >>> observations.shape
    (4, 4)
    >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: Literal["same"] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        n_workers: int | None = None,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        close_timeout: float | None = None,
        restart: Literal["truncate"] | None = None,
        max_restarts: int = 100,
        recorder: bool | str | os.PathLike[str] = True,
    ) -> None:
        self.closed = True  # until the pool exists
        for name, value, allowed in (("worker", worker, None), ("observation_mode", observation_mode, "same")):
            if value != allowed:
                raise InvalidArgumentError(
                    f"{name}={value!r} is for gymnasium's AsyncVectorEnv; expected {allowed!r} here. Leave it out, or "
                    f"write gymnasium.vector.AsyncVectorEnv(env_fns, {name}=...)"
                )
        if max_concurrency is not None and n_workers is not None:
            raise InvalidArgumentError(
                f"max_concurrency={max_concurrency!r} and n_workers={n_workers!r} mean the same; expected one of them. "
                "Leave one out"
            )
        n_workers = max_concurrency if n_workers is None else n_workers
        options = PoolOptions(
            context, n_workers, start_timeout, step_timeout, close_timeout, restart, max_restarts, recorder=recorder
        )
        mode = AutoresetMode(Autoreset.parse(autoreset_mode, suggestion="NextStep").value)
        self.copy, self.autoreset_mode = copy, mode
        pool = self._pool = Pool(env_fns, options, autoreset=Autoreset(mode.value))
        self.closed, self._pending, self.num_envs = False, "", pool.num_envs
        self.timings = pool.timings
        self.single_observation_space, self.single_action_space = pool.spaces
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        try:
            with contextlib.suppress(Exception):  # the attribute may be missing, or cannot be pickled
                self.metadata = pool.call([0], "get_attr", "metadata")[0]
                self.render_mode = pool.call([0], "get_attr", "render_mode")[0]
        except BaseException:
            self.close(terminate=True)
            raise
        self.metadata = {**self.metadata, "autoreset_mode": mode}

    # -- resets and steps

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environments.

        :param seed: int, seed of the first environment; each further one has the next number. Or a list of a seed, or
            None, for each environment. Default: None
        :param options: dict of options for all environments; ``{"reset_mask": (num_envs,) bool}`` resets only some
        :return: observations, ``(num_envs, ...)`` each, and infos
        :raises InvalidTypeError: If ``reset_mask`` is not a bool array.
        :raises InvalidArgumentError: If ``reset_mask`` or the list of seeds has another length, or the mask is empty.
        """
        if self._pending == _INTERRUPTED:
            self._pending = ""  # the pool drops the answers
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset environments. :meth:`reset_wait` returns the result.

        :raises AlreadyPendingCallError: If the result of another call is pending.
        """
        self._require_idle("reset_async")
        options = None if options is None else dict(options)
        chosen = _parse_reset_mask(None if options is None else options.pop("reset_mask", None), self.num_envs)
        if isinstance(seed, int | np.integer):
            seed = range(int(seed), int(seed) + self.num_envs)
        given: Any = [None] * self.num_envs if seed is None else seed
        seeds = [int(one) if isinstance(one, np.integer) else one for one in given]  # gymnasium refuses NumPy's
        if len(seeds) != self.num_envs:
            raise InvalidArgumentError(
                f"number of seeds: {len(seeds)}, expected {self.num_envs}, one for each environment. Use seed=0"
            )
        self._pool.begin_reset([(seed, options) if this else None for seed, this in zip(seeds, chosen, strict=True)])
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> Any:
        """Wait for the resets.

        :param timeout: float, time limit in seconds, default: none
        :return: observations, ``(num_envs, ...)`` each, and infos
        :raises TimeoutError: If the limit is reached (``multiprocessing.TimeoutError``). The result is dropped.
        """
        self._wait("reset", timeout)
        infos: dict[str, Any] = {}
        for index, entry in self._pool.entries(to_reset=True):
            infos = self._add_info(infos, entry[1] or {}, index)
        self._pool.warn_about_conversions("AsyncVectorEnv")
        return self._pool.observations(copy=self.copy), infos

    def step_async(self, actions: Any) -> None:
        """Begin a step. :meth:`step_wait` returns the result.

        :param actions: ``(num_envs, ...)`` actions of ``action_space``
        :raises AlreadyPendingCallError: If the result of another call is pending.
        """
        if self.closed or self._pending:
            self._require_idle("step_async")
        self._pool.begin_step(actions, lambda given: list(iterate(self.action_space, given)))
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Any:
        """Wait for the step.

        :param timeout: float, time limit in seconds, default: none
        :return: observations, ``(num_envs, ...)`` each; rewards, ``(num_envs,)`` float64; terminated and truncated,
            ``(num_envs,)`` bool; infos
        :raises TimeoutError: If the limit is reached (``multiprocessing.TimeoutError``). The result is dropped.
        """
        self._wait("step", timeout)
        pool = self._pool
        infos: dict[str, Any] = {}
        if pool.is_plain_step():
            rewards, (terminated, truncated) = pool.arrays["reward"].copy(), np.zeros((2, self.num_envs), bool)
        else:
            entries = pool.entries()  # may replace a worker, which writes to the arrays below
            rewards, kinds, flags = pool.arrays["reward"].copy(), pool.arrays["reward kind"], pool.arrays["flags"]
            for index, (info, reset_info, reward, final) in entries:
                if reset_info is not None:
                    info = {"final_info": info, "final_obs": final, **reset_info}
                infos = self._add_info(infos, info, index)
                if kinds[index] == OTHER_REWARD:
                    store_reward(rewards, index, reward)
            pool.warn_about_conversions("AsyncVectorEnv")
            terminated, truncated = (flags & TERMINATED).astype(bool), (flags & TRUNCATED).astype(bool)
        result = pool.observations(copy=self.copy), rewards, terminated, truncated, infos
        self.timings.add_step(time.perf_counter() - pool.step_start)
        return result

    def step(self, actions: Any) -> Any:
        """Step all environments. After an interrupt, such as Ctrl-C, :meth:`reset` continues.

        :param actions: ``(num_envs, ...)`` actions of ``action_space``
        :return: as :meth:`step_wait`
        """
        self.step_async(actions)
        try:
            return self.step_wait()
        except BaseException:
            self._pending = self._pending and _INTERRUPTED
            raise

    # -- attributes and methods of environments

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or get an attribute, and return the results.

        An exception in an environment is raised here. The environments stay usable.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_some(self, indices: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of some environments, or get an attribute, as :meth:`call` does for all.

        :param indices: numbers of the environments
        """
        self._require_callable("call_some", name)
        return self._pool.call(indices, "call", (name, args, kwargs))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin to call a method, or get an attribute. :meth:`call_wait` returns the results.

        :raises AlreadyPendingCallError: If the result of another call is pending.
        """
        self._require_callable("call_async", name)
        self._pool.begin_call(range(self.num_envs), "call", [(name, args, kwargs)] * self.num_envs)
        self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of :meth:`call_async`, one for each environment.

        :param timeout: float, time limit in seconds, default: none
        :raises TimeoutError: If the limit is reached (``multiprocessing.TimeoutError``). The result is dropped.
        """
        self._wait("call", timeout)
        return tuple(self._pool.results())

    def render(self) -> tuple[Any, ...]:
        """Return the rendered frame of each environment."""
        return self.call("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment.

        :param values: list or tuple of a value for each environment, or one value for all
        :raises InvalidArgumentError: If the number of values is not the number of environments.
        """
        self._require_idle("set_attr")
        several = isinstance(values, (list, tuple))
        arguments = [(name, value) for value in values] if several else [(name, values)] * self.num_envs
        if len(arguments) != self.num_envs:
            raise InvalidArgumentError(
                f"number of values: {len(arguments)}, expected {self.num_envs}, one for each environment. Use one "
                "value outside a list for all environments"
            )
        self._pool.begin_call(range(self.num_envs), "set_wrapper_attr", arguments)
        self._pool.results()

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Seed of each environment's random number generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copy of each environment's random number generator."""
        return self.get_attr("np_random")

    # -- end

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments, and end the workers.

        :param timeout: float, seconds after which workers are killed, default: ``close_timeout``
        :param terminate: bool, whether to end the workers without closing the environments, default False
        :raises WorkerError: If an environment fails in ``close``. All workers have ended even then.
        """
        if terminate:
            self._pool.end()
        else:
            self._pool.close(timeout)

    def __reduce__(self) -> NoReturn:
        raise Pool.copy_error(type(self).__name__)

    def __del__(self) -> None:
        """Do nothing, because the pool ends its workers when it is garbage-collected. gymnasium's would call close."""

    def _require_idle(self, method: str) -> None:
        self._require_open()
        self._pool.raise_failure()
        if not self._pending:
            return
        text = f"while waiting for a pending call to `{self._pending}` to complete. Use {self._pending}_wait() first"
        if self._pending == _INTERRUPTED:
            text = (
                "after an interrupted step, whose result belongs to other actions: expected a reset. Use envs.reset(), "
                "or model.set_env(model.get_env()) before learn() of Stable Baselines3"
            )
        raise AlreadyPendingCallError(f"Calling `{method}` {text}", self._pending)

    def _require_callable(self, method: str, name: str) -> None:
        self._require_idle(method)
        if name in ("reset", "step", "close", "_setattr", "_check_spaces"):  # AsyncVectorEnv's own commands
            raise InvalidArgumentError(f"call({name!r}) is not supported; use envs.{name}(...)")

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"this {type(self).__name__} is closed; create a new one: {type(self).__name__}(env_fns)"
            )

    def _wait(self, what: str, timeout: float | None) -> None:
        """Wait for the async call ``what``; raise if it is not pending or exceeds the timeout."""
        self._require_open()
        if self._pending != what and self._pending != f"interrupted {what}":
            raise NoAsyncCallError(
                f"Calling `{what}_wait` without any prior call to `{what}_async`. Use {what}_async(...) first", what
            )
        if timeout is not None and not self._pool.is_ready(timeout):
            # The next command waits for late answers, and drops them.
            self._pending = ""
            raise multiprocessing.TimeoutError(f"the environments did not {what} within {timeout:g} s")
        self._pool.wait()
        # Until here, another wait can follow Ctrl-C.
        self._pending = ""


def _parse_reset_mask(found: Any, num_envs: int) -> Sequence[bool]:
    """Return which environments to reset, by ``options["reset_mask"]``; None means all."""
    if found is None:
        return [True] * num_envs
    advice = f"Use numpy.zeros({num_envs}, bool), with True where an environment is to be reset"
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_:
        kind = getattr(found, "dtype", type(found).__name__)
        raise InvalidTypeError(f"`options['reset_mask']` must be an array of booleans, got {kind}. {advice}")
    if found.shape != (num_envs,):
        text = f"`options['reset_mask']` must have shape `({num_envs},)`, got {found.shape}. {advice}"
        raise InvalidArgumentError(text)
    if not found.any():
        raise InvalidArgumentError(f"`options['reset_mask']`={found} names no environment. {advice}")
    return found.tolist()  # type: ignore[no-any-return]
