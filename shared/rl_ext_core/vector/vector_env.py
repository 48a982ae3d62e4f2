"""``SharedMemoryVectorEnv``: environments in workers, for gymnasium."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError, _combined_error_class
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.environments import PoolOptions, qualified_name, store_reward
from rl_ext_core.vector.pool import make_pool
from rl_ext_core.vector.worker import OTHER_REWARD, TERMINATED, TRUNCATED

__all__ = ["SharedMemoryVectorEnv"]


class SharedMemoryVectorEnv(VectorEnv[Any, Any, Any]):
    """gymnasium's ``AsyncVectorEnv``, several times as fast, whose errors say what has happened.

    In place of ``AsyncVectorEnv``, with its arguments and these. Observations, actions, rewards and flags are in shared
    memory; infos are pickled where there is something in them. No environment is built in this process, and none twice.
    Workers load what the environment needs.

    :param env_fns: functions that build the environments, or whatever :func:`~rl_ext_core.factory.as_factory` takes
    :param shared_memory: without effect: observations are in shared memory, and copied unless ``copy=False``
    :param copy: whether observations are the caller's to keep; False returns the shared memory itself, which the next
        step writes to
    :param context: start method: ``"forkserver"`` (the default where there is one), ``"spawn"`` or ``"fork"``
    :param daemon: without effect: workers end with this process, and may have children of their own
    :param worker: None
    :param observation_mode: ``"same"``
    :param autoreset_mode: when environments are reset whose episodes have ended
    :param max_concurrency: number of environments that step at a time, which is ``n_workers``
    :param n_workers: number of processes that share the environments; default: one each
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until they must have answered a step, a reset or another call
    :param close_timeout: seconds until workers must have closed their environments and ended; None waits
    :param restart: ``"truncate"`` replaces a worker that has failed: the episodes of its environments are reported as
        truncated, with the last observation that was returned, and ``info["worker_error"]`` says why, also after a
        reset. The new environments get what ``set_attr`` had set and the options of the last reset, and the same seed
        if the failure came in that reset, else one drawn from it; the text names calls that were not repeated
    :param max_restarts: after so many, the failure is raised
    :raises WorkerError: If a worker has failed, at any call: which environment, in what, and why; the cause is the
        environment's own exception. All workers are gone then
    :raises EnvironmentOutputError: If the environments' spaces differ; also a RuntimeError
    :raises InvalidArgumentError: If an option has another value, or observations are not arrays of fixed shape; also at
        any call but ``close`` in a process that was forked from the one that made it

    :ivar timings: how long the start and the steps have taken

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
    ) -> None:
        self.closed = True  # until there is something to close
        for name, value, allowed in (("worker", worker, None), ("observation_mode", observation_mode, "same")):
            if value != allowed:
                raise InvalidArgumentError(
                    f"{name}={value!r} is for gymnasium's AsyncVectorEnv; expected {allowed!r} here. Leave it out, or "
                    f"write gymnasium.vector.AsyncVectorEnv(env_fns, {name}=...)"
                )
        if max_concurrency is not None and n_workers is not None:
            raise InvalidArgumentError(
                f"max_concurrency={max_concurrency!r} and n_workers={n_workers!r} say the same; leave one out"
            )
        options = PoolOptions(
            context,
            max_concurrency if n_workers is None else n_workers,
            start_timeout,
            step_timeout,
            close_timeout,
            restart,
            max_restarts,
        )
        mode = AutoresetMode(Autoreset.parse(autoreset_mode, write="NextStep").value)
        self.copy, self.autoreset_mode = copy, mode
        try:
            pool = self._pool = make_pool(env_fns, options, autoreset=Autoreset(mode.value))
        except EnvironmentOutputError as error:
            raise _combined_error_class(EnvironmentOutputError, RuntimeError())(*error.args) from None
        self.closed, self._pending, self.num_envs = False, "", len(pool.worker_by_env)
        self.timings = pool.timings
        self.single_observation_space, self.single_action_space = pool.spaces
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        try:
            with contextlib.suppress(Exception):  # there is none, or it cannot leave its process
                self.metadata = pool.call([0], "get_attr", "metadata")[0]
                self.render_mode = pool.call([0], "get_attr", "render_mode")[0]
        except BaseException:
            self.close(terminate=True)
            raise
        self.metadata = {**self.metadata, "autoreset_mode": mode}

    # -- resets and steps

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environments.

        :param seed: of the first; each other's is one more. Or a list of ``num_envs``
        :param options: for all; ``{"reset_mask": (num_envs,) bool}`` resets some and leaves the others as they are
        :return: observations, ``(num_envs, ...)`` each, and information
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset environments: see :meth:`reset`."""
        self._require_idle("reset_async")
        options = None if options is None else dict(options)
        chosen = _parse_reset_mask(None if options is None else options.pop("reset_mask", None), self.num_envs)
        if isinstance(seed, int | np.integer):
            seed = range(int(seed), int(seed) + self.num_envs)
        seeds: list[int | None] = [None] * self.num_envs if seed is None else list(seed)
        if len(seeds) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(seeds)} seeds for {self.num_envs} environments; expected one each. Write seed=0"
            )
        self._pool.begin_reset([(seed, options) if this else None for seed, this in zip(seeds, chosen, strict=True)])
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> Any:
        """Wait for the resets.

        :param timeout: seconds; None: forever
        :raises TimeoutError: ``multiprocessing``'s, when it is reached; another call may follow
        """
        self._wait("reset", timeout)
        infos: dict[str, Any] = {}
        for index, entry in self._pool.entries(to_reset=True):
            infos = self._add_info(infos, entry[1] or {}, index)
        self._pool.warn_about_conversions("AsyncVectorEnv")
        return self._pool.observations(copy=self.copy), infos

    def step_async(self, actions: Any) -> None:
        """Begin a step, with actions of ``action_space``, (num_envs, ...)."""
        if self.closed or self._pending:
            self._require_idle("step_async")
        self._pool.begin_step(actions, lambda given: list(iterate(self.action_space, given)))
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Any:
        """Wait for the step.

        :param timeout: seconds; None: forever
        :return: observations, ``(num_envs, ...)`` each; rewards, (num_envs,) float64; terminated and truncated,
            (num_envs,) bool; information
        :raises TimeoutError: ``multiprocessing``'s, when it is reached; another call may follow
        """
        self._wait("step", timeout)
        pool = self._pool
        infos: dict[str, Any] = {}
        if pool.is_plain_step():
            rewards, (terminated, truncated) = pool.arrays["reward"].copy(), np.zeros((2, self.num_envs), bool)
        else:
            entries = pool.entries()  # which writes into the arrays where a worker is replaced
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
        """Step all environments: see :meth:`step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    # -- attributes and methods of environments

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or get an attribute; what one raises is raised here, and all live on."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_some(self, indices: Sequence[int], name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of some environments, or get an attribute: see :meth:`call`.

        :param indices: their numbers
        """
        self._require_callable("call_some", name)
        return self._pool.call(indices, "call", (name, args, kwargs))

    def env_is_wrapped(self, wrapper_class: type, indices: Sequence[int] | None = None) -> list[bool]:
        """Return which environments have a wrapper of a class, or of one of the same name and module.

        :param indices: their numbers; None: all
        """
        self._require_idle("env_is_wrapped")
        chosen = range(self.num_envs) if indices is None else indices
        return self._pool.call(chosen, "env_is_wrapped", qualified_name(wrapper_class))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call of a method: see :meth:`call`."""
        self._require_callable("call_async", name)
        self._pool.begin_call(range(self.num_envs), "call", [(name, args, kwargs)] * self.num_envs)
        self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for what was called.

        :param timeout: seconds; None: forever
        :raises TimeoutError: ``multiprocessing``'s, when it is reached; another call may follow
        """
        self._wait("call", timeout)
        return tuple(self._pool.results())

    def render(self) -> tuple[Any, ...]:
        """Render each environment."""
        return self.call("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Get an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment.

        :param values: a list or tuple with one for each, or one for all
        """
        self._require_idle("set_attr")
        values = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(values)} values for {self.num_envs} environments; expected one each, or one for all"
            )
        self._pool.begin_call(range(self.num_envs), "set_wrapper_attr", [(name, value) for value in values])
        self._pool.results()

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of each environment's generator."""
        return self.get_attr("np_random")

    # -- life

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments and end the workers; it always returns.

        :param timeout: seconds until workers must have done so; None: ``close_timeout``
        :param terminate: end the workers without closing the environments
        :raises WorkerError: an environment fails in its ``close``
        """
        if terminate:
            self._pool.end()
        else:
            self._pool.close(timeout)

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close(terminate=True)

    def _require_idle(self, method: str) -> None:
        self._require_open()
        self._pool.raise_failure()
        if self._pending:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{self._pending}` to complete. Write "
                f"{self._pending}_wait() first",
                self._pending,
            )

    def _require_callable(self, method: str, name: str) -> None:
        self._require_idle(method)
        if name in ("reset", "step", "close", "_setattr", "_check_spaces"):  # AsyncVectorEnv's own commands
            raise InvalidArgumentError(f"call({name!r}) is not supported; write envs.{name}(...)")

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"this {type(self).__name__} is closed; make a new one: {type(self).__name__}(env_fns)"
            )

    def _wait(self, what: str, timeout: float | None) -> None:
        self._require_open()
        if self._pending != what:
            raise NoAsyncCallError(
                f"Calling `{what}_wait` without any prior call to `{what}_async`. Write {what}_async(...) first", what
            )
        if timeout is not None and not self._pool.is_ready(timeout):
            # What is answered later belongs to nobody: the next command waits for it and drops it.
            self._pending = ""
            raise multiprocessing.TimeoutError(f"the environments did not {what} within {timeout:g} s")
        self._pool.wait(raise_failures=what == "call")
        # From here on, Ctrl-C could not be followed by another wait.
        self._pending = ""


def _parse_reset_mask(found: Any, num_envs: int) -> Sequence[bool]:
    """Return which environments are to be reset."""
    if found is None:
        return [True] * num_envs
    line = f"Write numpy.zeros({num_envs}, bool), with True where an environment is to be reset"
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_:
        kind = getattr(found, "dtype", type(found).__name__)
        raise InvalidTypeError(f"`options['reset_mask']` must be an array of booleans, got {kind}. {line}")
    if found.shape != (num_envs,):
        text = f"`options['reset_mask']` must have shape `({num_envs},)`, got {found.shape}. {line}"
        raise InvalidArgumentError(text)
    if not found.any():
        raise InvalidArgumentError(f"`options['reset_mask']`={found} names no environment. {line}")
    return found.tolist()  # type: ignore[no-any-return]
