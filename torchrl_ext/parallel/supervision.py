"""TorchRL's ``ParallelEnv`` whose workers are watched: what ends one of them is raised, and ends the others."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torchrl.envs import batched_envs as upstream

from rl_ext_core import processes, resources
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.processes.failures import require_same_process
from torchrl_ext.parallel.plan import WorkerPlan, SpeedCheck

__all__ = ["SupervisedEnv"]

# An attribute that all environments have, and that a ParallelEnv does not ask its workers for.
_PING = "batch_size"
# After this it is said that closing takes long.
_SLOW_CLOSE_S = 10.0

_log = logging.getLogger("torchrl_ext")


def _as_operation(name: str, phase: str | None = None, *, drain_after: bool = False) -> Any:
    """Return upstream's method, as an operation that waits for the workers."""
    method = getattr(upstream.ParallelEnv, name)

    @functools.wraps(method)
    def call(self: SupervisedEnv, *args: Any, **kwargs: Any) -> Any:
        with self._operation(phase or name):
            result = method(self, *args, **kwargs)
            if drain_after:
                self._drain_answers()
            return result

    return call


class SupervisedEnv(upstream.ParallelEnv):
    """Surrounds whatever waits for workers, so that it ends when one of them has failed.

    After a failure, and after Ctrl-C, it is closed and has no workers; a reset starts new ones.
    """

    is_closed: bool
    _mp_start_method: str | None
    _events: Any
    _n_torch_threads: int

    # Before upstream's constructor, torch's modules take no attribute by assignment.
    _plan: WorkerPlan
    _start_timeout: float | None = None
    _step_timeout: float | None = None
    _user_start_method: str | None = None
    _watch: processes.Watch | None = None
    _failure_summary: str | None = None
    _speed_check: SpeedCheck | None = None
    _closing = _has_open_call = False

    def _check_buffers(self, method: str) -> None:
        if method == "fork" and self._use_buffers and not (self._share_memory or self._memmap):
            raise InvalidArgumentError(
                "shared_memory=False keeps the buffers in memory that forked workers have a copy of, and what they "
                "write there reaches nobody; leave shared_memory out, or write memmap=True, use_buffers=False or "
                'mp_start_method="forkserver"'
            )

    def _start_workers(self) -> None:
        if not isinstance(self._mp_start_method, _ContextName):  # it is where the last start was interrupted
            self._user_start_method = self._mp_start_method
        self._n_torch_threads = torch.get_num_threads()
        if self._speed_check is None:
            self._speed_check = self._plan.make_speed_check()
        resources.check_open_file_limit(self.num_workers, "ParallelEnv({}, ...)")
        started: list[Any] = []
        try:
            with contextlib.ExitStack() as stack:
                starting = [self]  # emptied below: workers would keep this object alive for as long as they live

                def watch(process: Any) -> None:
                    # Upstream starts all of them and then waits: from here on somebody looks after them.
                    started.append(process)
                    for env in starting:
                        if len(started) == env.num_workers:
                            stack.enter_context(env._start_watch(started).operation("start", env._start_timeout))

                context = self._plan.context(self._user_start_method, watch)
                self._check_buffers(context.get_start_method())
                self._mp_start_method = _ContextName(stack.enter_context(processes.named_context(context)))
                super()._start_workers()
                starting.clear()
            self._failure_summary, self._has_open_call = None, False
        except BaseException:
            if self._watch is None and started:
                self._start_watch(started)
            self._kill_workers()
            raise
        finally:
            self._mp_start_method = self._user_start_method

    def _cleanup_failed_worker_startup(self) -> None:
        """Leave the workers to what surrounds this: ended here, they would seem to have failed."""

    def _start_watch(self, started: Sequence[Any]) -> processes.Watch:
        # Nothing of this may refer to the ParallelEnv, which ends its workers when nobody refers to it any more.
        wake = functools.partial(_wake_parent, self._events, self._shm_done_flags, self.parent_channels)
        watch = processes.Watch(list(started), seeds=self._plan.seeds, on_failure=wake)
        self.__dict__["_watch"] = watch
        return watch

    def _operation(self, phase: str, timeout: float | None = None) -> _WorkerOperation:
        """Surround a call that waits for the workers."""
        return _WorkerOperation(self, phase, self._step_timeout if timeout is None else timeout)

    def _owning_env(self) -> SupervisedEnv:
        """Return who has started the workers: this, or what this is a view of."""
        return self.__dict__.get("_parent_env") or self

    def _discard_if_interrupted(self) -> None:
        """End the workers if a call was broken off: nobody knows what they will answer, and to which call."""
        owner = self._owning_env()
        watch = owner._watch
        # The ending of the workers may have been broken off as well.
        if owner._has_open_call or (watch is not None and watch.is_closing):
            owner._kill_workers()

    def _drain_answers(self) -> None:
        """Read what the workers have still to say, so that no later call takes it for its own answer."""
        for channel in self.parent_channels:
            channel.send((_PING, ((), {})))
        for channel in self.parent_channels:
            while f"{_PING}_done".encode() not in channel.recv_bytes():
                pass
        for index, event in zip(self._worker_indices, self._events, strict=True):
            self._shm_done_flags[index] = 0
            event.clear()

    def _kill_workers(self) -> None:
        """End the workers by force."""
        watch = self._watch
        if watch is not None:
            self._failure_summary = "a call was interrupted" if watch.failure is None else watch.failure.summary
            self._release_workers(watch)
            torch.set_num_threads(self._n_torch_threads)
        self._has_open_call = False

    def _release_workers(self, watch: processes.Watch) -> None:
        """Let go of the workers, the channels to them and the memory that they share."""
        watch.kill()
        watch.stop()
        for channel in self.__dict__.get("parent_channels") or ():
            channel.close()
        for name in ("_workers", "parent_channels", "shared_tensordicts", "shared_tensordict_parent"):
            self.__dict__.pop(name, None)
        # At once: who finds no watch after an interrupt has to find that it is closed, too.
        self.__dict__.update(_events=None, event=None, _watch=None, is_closed=True)

    def _shutdown_workers(self) -> None:
        watch = self._watch
        if not self._closing or watch is None:
            return  # upstream has found a dead worker and will raise: the operation says which and why
        if not watch.is_owner:
            return self._release_workers(watch)  # in a forked child, whose parent goes on with them
        limit = None if math.isinf(self.shutdown_timeout) else self.shutdown_timeout
        members = list(zip(self.parent_channels, self._workers, strict=True))
        try:
            with _WorkerOperation(self, "close", limit):
                watch.expect_exit()
                # In this mode renderers are to be gone before the next one goes, as upstream has it.
                for group in [[member] for member in members] if self._metadata_from_workers else [members]:
                    for channel, _ in group:
                        channel.send(("close", None))
                    for _, worker in group:
                        _join_and_report(worker)
                if any(worker.exitcode for worker in self._workers):
                    raise EOFError
        except WorkerError as error:
            if error.kind != "timeout":
                raise
            self._failure_summary = None
            what = str(error).partition(";")[0]
            _log.warning("%s: the workers were ended. ParallelEnv(shutdown_timeout=None) waits for them", what)
        else:
            self._release_workers(watch)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the workers.

        :param raise_if_closed: object to closing twice; to close after a worker's failure is not that
        """
        if self._owning_env() is self:
            self._discard_if_interrupted()
            raise_if_closed = raise_if_closed and self._failure_summary is None
        self._failure_summary, self._closing = None, True
        # Upstream forgets the specs before it says so: interrupted in between, nobody would make them again.
        self.__dict__["_properties_set"] = False
        try:
            super().close(raise_if_closed=raise_if_closed)
        finally:
            self._closing = False

    _reset = _as_operation("_reset", "reset")
    set_seed = _as_operation("set_seed")
    state_dict = _as_operation("state_dict")
    # Upstream leaves flags set by which it would take the next step's data for ready.
    load_state_dict = _as_operation("load_state_dict", drain_after=True)
    __setitem__ = _as_operation("__setitem__", drain_after=True)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        with self._operation("step"), self._speed_check or contextlib.nullcontext():
            return super()._step(*args, **kwargs)

    def step_and_maybe_reset(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and reset what has ended, as upstream's does."""
        if not self._use_buffers:  # it calls the two above
            return super().step_and_maybe_reset(*args, **kwargs)
        with self._operation("step"), self._speed_check or contextlib.nullcontext():
            return super().step_and_maybe_reset(*args, **kwargs)

    def __getattr__(self, attr: str) -> Any:
        value = super().__getattr__(attr)
        return _WorkerCall(attr, self) if isinstance(value, upstream._dispatch_caller_parallel) else value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None, "_shm_done_flags": None, "_has_open_call": False}


class _WorkerOperation:
    """A call that waits for the workers.

    No generator with ``yield``: what Ctrl-C leaves of one runs later, whenever it is collected.
    """

    def __init__(self, env: SupervisedEnv, phase: str, timeout: float | None) -> None:
        self._env, self._phase, self._timeout = env, phase, timeout
        self._watch: processes.Watch | None = None
        self._watch_operation: Any = None

    def __enter__(self) -> None:
        env = self._env
        owner = env._owning_env()
        if owner._watch is not None and self._phase != "close":
            require_same_process(owner._watch.owner)
        env._discard_if_interrupted()
        if owner is env and env._owns_workers and env.is_closed:
            if self._phase == "step" and env._failure_summary is not None:
                raise WorkerError(
                    f"there are no workers, because {env._failure_summary}; reset() starts new ones", phase=self._phase
                )
            env._create_td()
            env._start_workers()
        watch = env._watch
        if watch is None or watch is not owner._watch or not (env._owns_workers or owner is not env):
            # A view of workers that have ended: upstream says so, unless others have taken their place.
            env.is_closed = env.is_closed or not owner.is_closed
            return
        self._watch_operation = watch.operation(self._phase, timeout=self._timeout)
        owner.__dict__["_has_open_call"] = True  # torch's modules take a while to set an attribute
        try:
            self._watch_operation.__enter__()
        except WorkerError:
            owner._kill_workers()
            raise
        self._watch = watch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        watch, owner = self._watch, self._env._owning_env()
        if watch is None or watch is not owner._watch:
            return
        try:
            if isinstance(error, Exception) and watch.failure is None:
                self._drain_answers()
            self._watch_operation.__exit__(kind, error, where)
            # Where upstream waits for flags, it was woken by these, and has read what the worker did not write.
            with watch.operation(self._phase):
                pass
        except BaseException:
            if watch.failure is not None:
                owner._kill_workers()
            raise
        if error is None or isinstance(error, Exception):
            owner.__dict__["_has_open_call"] = False
        else:
            owner._kill_workers()

    def _drain_answers(self) -> None:
        # A worker may have failed meanwhile, which is told in a better way.
        with contextlib.suppress(EOFError, OSError):
            self._env._drain_answers()


class _WorkerCall(upstream._dispatch_caller_parallel):
    """A method or attribute of the workers' environments."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        env: SupervisedEnv = self.parallel_env
        with env._operation(self.attr if isinstance(self.attr, str) else ".".join(self.attr)):
            return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> _WorkerCall:
        return _WorkerCall(super().__getattr__(name).attr, self.parallel_env)


class _ContextName(str):
    """The name of a context of ours, which stands in for the user's start method while workers are started."""

    __slots__ = ()


def _wake_parent(events: Sequence[Any], flags: Any, channels: Sequence[Any]) -> None:
    """Have upstream's waiting for workers end: for these events and flags, and for messages.

    The other end of a channel may be open in a process that the worker has forked.
    """
    for index, event in enumerate(events):
        flags[index] = 1
        event.set()
    for channel in channels:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)


def _join_and_report(worker: Any) -> None:
    """Wait until a worker has closed its environment, and say when that takes long."""
    worker.join(_SLOW_CLOSE_S)
    if worker.is_alive():
        _log.warning(
            "%s has been closing its environment for %g s and is waited for; ParallelEnv(shutdown_timeout=60) would "
            "end it after a minute",
            worker.name,
            _SLOW_CLOSE_S,
        )
        worker.join()
