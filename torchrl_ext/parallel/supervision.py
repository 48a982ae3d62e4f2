"""TorchRL's ``ParallelEnv`` with supervised workers, whose errors are raised."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torchrl.envs import batched_envs as upstream

from rl_ext_core import processes, resources
from rl_ext_core.errors import InvalidArgumentError, NotCopyableError, WorkerError
from rl_ext_core.processes.failures import require_same_process
from rl_ext_core.vector.channel import should_spin
from torchrl_ext.parallel.worker_plan import WorkerPlan

__all__ = ["SupervisedEnv"]

# An attribute of all environments that TorchRL never requests from workers.
_PING = "batch_size"
# A worker that closes its environment for longer is logged.
_SLOW_CLOSE_S = 10.0
# Pause between two readings of the workers' flags. A step of two CartPoles takes ten times as long.
_PAUSE_S = 1e-4

_log = logging.getLogger("torchrl_ext")


def _as_operation(name: str, phase: str | None = None, *, drain_after: bool = False) -> Any:
    """Wrap a method of TorchRL's class in an operation, which detects failures of workers.

    :param name: name of the method
    :param phase: name of the operation in errors; default: ``name``
    :param drain_after: whether to discard flags that the method leaves set
    """
    method = getattr(upstream.ParallelEnv, name)

    @functools.wraps(method)
    def call(self: SupervisedEnv, *args: Any, **kwargs: Any) -> Any:
        """Call the method within an operation, which raises an error if a worker fails."""
        with self._operation(phase or name):
            result = method(self, *args, **kwargs)
            if drain_after:
                self._drain_answers()
            return result

    return call


class SupervisedEnv(upstream.ParallelEnv):
    """``ParallelEnv`` whose calls raise an error if a worker fails.

    After a failure or Ctrl-C it is closed and has no workers. ``reset`` starts new ones.
    """

    is_closed: bool
    _mp_start_method: str | None
    _events: Any
    _n_torch_threads: int

    # Class attributes, because modules of torch do not support attributes before their constructor was called.
    _plan: WorkerPlan
    _start_timeout: float | None = None
    _step_timeout: float | None = None
    _answer_timeout: float | None = None  # _step_timeout, or the time limit of TorchRL's pipes
    _user_start_method: str | None = None
    _watch: processes.Watch | None = None
    _failure_summary: str | None = None
    _closing = _has_open_call = _polls = False

    def _check_buffers(self, method: str) -> None:
        """Raise an error if forked workers would not share the buffers."""
        if method == "fork" and self._use_buffers and not (self._share_memory or self._memmap):
            raise InvalidArgumentError(
                "shared_memory=False does not work with forked workers, because they would write to their own copies "
                "of the buffers. Leave shared_memory out, or use memmap=True, use_buffers=False or "
                'mp_start_method="forkserver"'
            )

    def _start_workers(self) -> None:
        if not isinstance(self._mp_start_method, _ContextName):  # it is one if the last start was interrupted
            self._user_start_method = self._mp_start_method
        self._n_torch_threads = torch.get_num_threads()
        self._plan.warn_about_memory()
        resources.check_open_file_limit(self.num_workers, "ParallelEnv({}, ...)")
        self.__dict__["_polls"] = should_spin(self.num_workers)
        started: list[Any] = []
        self._plan.open_logs()
        try:
            with contextlib.ExitStack() as stack:
                starting = [self]  # emptied below, because workers would keep this object alive

                def watch(process: Any) -> None:
                    """Record a started process; after the last one, start to watch for failures."""
                    # TorchRL starts all workers and then waits for them. The watch starts in between.
                    started.append(process)
                    for env in starting:
                        if len(started) == env.num_workers:
                            stack.enter_context(env._start_watch(started).operation("start", env._start_timeout))

                context = self._plan.make_context(self._user_start_method, watch)
                self._check_buffers(context.get_start_method())
                self._mp_start_method = _ContextName(stack.enter_context(processes.named_context(context)))
                super()._start_workers()
                starting.clear()
            limit = self.BATCHED_PIPE_TIMEOUT if self._step_timeout is None else self._step_timeout
            # The watch names the worker that hangs. TorchRL's own limit, whose error does not, comes later.
            self.__dict__.update(_answer_timeout=limit, BATCHED_PIPE_TIMEOUT=2 * limit)
            self._failure_summary, self._has_open_call = None, False
        except BaseException:
            if self._watch is None and started:
                self._start_watch(started)
            self._kill_workers()
            raise
        finally:
            self._mp_start_method = self._user_start_method
            self._plan.close_logs()

    def _cleanup_failed_worker_startup(self) -> None:
        """Do nothing. Workers that TorchRL ends here would be reported as failed."""

    def _start_watch(self, started: Sequence[Any]) -> processes.Watch:
        """Start to watch the workers for failures."""
        # The watch must not refer to the ParallelEnv, which ends its workers when it is garbage-collected.
        wake = functools.partial(_wake_parent, self._events, self._shm_done_flags, self.parent_channels)
        watch = processes.Watch(list(started), seeds=self._plan.seeds, on_failure=wake)
        self.__dict__["_watch"] = watch
        return watch

    def _operation(self, phase: str, timeout: float | None = None) -> _WorkerOperation:
        """Make the context manager for a call that waits for the workers."""
        return _WorkerOperation(self, phase, timeout)

    def _owning_env(self) -> SupervisedEnv:
        """Return the environment that started the workers, which this one may be a view of."""
        return self.__dict__.get("_parent_env") or self

    def _discard_if_interrupted(self) -> None:
        """End the workers if a call was interrupted, because later calls would get its answers."""
        owner = self._owning_env()
        watch = owner._watch
        # Ending the workers may have been interrupted as well.
        if owner._has_open_call or (watch is not None and watch.is_closing):
            owner._kill_workers()

    def _drain_answers(self) -> None:
        """Discard pending answers of the workers, so that later calls do not receive them."""
        for channel in self.parent_channels:
            channel.send((_PING, ((), {})))
        for channel in self.parent_channels:
            while f"{_PING}_done".encode() not in channel.recv_bytes():
                pass
        for index, event in zip(self._worker_indices, self._events, strict=True):
            self._shm_done_flags[index] = 0
            event.clear()

    def _kill_workers(self) -> None:
        """Kill the workers, and store the reason for later errors."""
        watch = self._watch
        if watch is not None:
            self._failure_summary = (
                "a call was interrupted" if watch.failure is None else watch.failure.summary.rstrip(":")
            )
            self._release_workers(watch)
            torch.set_num_threads(self._n_torch_threads)
        self._has_open_call = False

    def _release_workers(self, watch: processes.Watch) -> None:
        """Release the workers, their channels and the shared memory."""
        watch.kill()
        watch.stop()
        for channel in self.__dict__.get("parent_channels") or ():
            channel.close()
        for name in ("_workers", "parent_channels", "shared_tensordicts", "shared_tensordict_parent"):
            self.__dict__.pop(name, None)
        # In one step, so that an interrupt cannot leave it open without a watch.
        self.__dict__.update(_events=None, event=None, _watch=None, is_closed=True)

    def _shutdown_workers(self) -> None:
        watch = self._watch
        if not self._closing or watch is None:
            return  # TorchRL found a dead worker and will raise; the operation reports which one, and why
        if not watch.is_owner:
            return self._release_workers(watch)  # in a forked child, whose parent still uses them
        limit = None if math.isinf(self.shutdown_timeout) else self.shutdown_timeout
        members = list(zip(self.parent_channels, self._workers, strict=True))
        try:
            with _WorkerOperation(self, "close", limit):
                watch.expect_exit()
                # In this mode, TorchRL closes one environment after the other, because of their renderers.
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
            _log.warning("%s: the workers were ended. To wait for them, use ParallelEnv(shutdown_timeout=None)", what)
        else:
            self._release_workers(watch)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the workers.

        :param raise_if_closed: whether closing twice is an error; closing after a worker's failure is not
        """
        if self._owning_env() is self:
            self._discard_if_interrupted()
            raise_if_closed = raise_if_closed and self._failure_summary is None
        self._failure_summary, self._closing = None, True
        # TorchRL deletes the specs first. After an interrupt in between, they would not be made again.
        self.__dict__["_properties_set"] = False
        try:
            super().close(raise_if_closed=raise_if_closed)
        finally:
            self._closing = False

    def _wait_for_workers(self, workers_range: Sequence[int]) -> None:
        """Wait until workers have answered, without taking a core from them.

        TorchRL polls their flags without a pause.
        """
        if self._use_buffers and not self._owning_env()._polls:
            flags, end = self._shm_done_flags, time.monotonic() + self.BATCHED_PIPE_TIMEOUT
            for index in [self._worker_indices[number] for number in workers_range]:
                while not flags[index] and time.monotonic() < end:
                    time.sleep(_PAUSE_S)
        super()._wait_for_workers(workers_range)  # it resets the flags

    _reset = _as_operation("_reset", "reset")
    set_seed = _as_operation("set_seed")
    state_dict = _as_operation("state_dict")
    # TorchRL leaves flags set here. The next step would read its data before they are written.
    load_state_dict = _as_operation("load_state_dict", drain_after=True)
    __setitem__ = _as_operation("__setitem__", drain_after=True)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        with self._operation("step"):
            return super()._step(*args, **kwargs)

    def step_and_maybe_reset(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step and reset what is done, as in TorchRL's class."""
        if not self._use_buffers:  # it calls _step and _reset
            return super().step_and_maybe_reset(*args, **kwargs)
        with self._operation("step"):
            return super().step_and_maybe_reset(*args, **kwargs)

    def __getattr__(self, attr: str) -> Any:
        value = super().__getattr__(attr)
        return _WorkerCall(attr, self) if isinstance(value, upstream._dispatch_caller_parallel) else value

    def __copy__(self) -> NoReturn:
        raise NotCopyableError(
            "ParallelEnv cannot be copied by copy.copy, because both would share the workers: expected the functions "
            "that build its environments. Use ParallelEnv(2, create_env_fn), which starts new workers"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None, "_shm_done_flags": None, "_has_open_call": False}


class _WorkerOperation:
    """Context manager of a call that waits for the workers.

    It is a class, because a generator that Ctrl-C interrupts would be finished later, by the garbage collector.
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
                    f"there are no workers, because {env._failure_summary}. Use reset() to start new ones",
                    phase=self._phase,
                )
            env._create_td()
            env._start_workers()
        watch = env._watch
        if watch is None or watch is not owner._watch or not (env._owns_workers or owner is not env):
            # A view of ended workers: TorchRL raises an error, unless new workers have replaced them.
            env.is_closed = env.is_closed or not owner.is_closed
            return
        timeout = owner._answer_timeout if self._timeout is None and self._phase != "close" else self._timeout
        self._watch_operation = watch.operation(self._phase, timeout=timeout)
        owner.__dict__["_has_open_call"] = True  # setting an attribute of an nn.Module is slow
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
            # If a worker failed, _wake_parent set the flags, and TorchRL has read data that was not written.
            with watch.operation(self._phase):
                pass
        except BaseException as raised:
            if watch.failure is not None:
                if isinstance(raised, WorkerError):
                    owner._plan.record_crash(raised, owner._step_timeout)
                owner._kill_workers()
            raise
        if error is None or isinstance(error, Exception):
            owner.__dict__["_has_open_call"] = False
        else:
            owner._kill_workers()

    def _drain_answers(self) -> None:
        """Discard pending answers, and ignore the errors of a worker that has failed."""
        # If a worker failed meanwhile, the watch raises a better error.
        with contextlib.suppress(EOFError, OSError):
            self._env._drain_answers()


class _WorkerCall(upstream._dispatch_caller_parallel):
    """Caller of a method, or reader of an attribute, of the workers' environments."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        env: SupervisedEnv = self.parallel_env
        with env._operation(self.attr if isinstance(self.attr, str) else ".".join(self.attr)):
            return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> _WorkerCall:
        return _WorkerCall(super().__getattr__(name).attr, self.parallel_env)


class _ContextName(str):
    """Name of a context, which replaces the start method while workers are started."""

    __slots__ = ()


def _wake_parent(events: Sequence[Any], flags: Any, channels: Sequence[Any]) -> None:
    """End TorchRL's waiting for a failed worker's events, flags or messages.

    Channels are shut down, because a process that the worker forked may still have the other end open.
    """
    for index, event in enumerate(events):
        flags[index] = 1
        event.set()
    for channel in channels:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)


def _join_and_report(worker: Any) -> None:
    """Wait until a worker has closed its environment, and log if that takes long."""
    worker.join(_SLOW_CLOSE_S)
    if worker.is_alive():
        _log.warning(
            "%s has been closing its environment for %g s and is waited for. To end it after a minute, use "
            "ParallelEnv(shutdown_timeout=60)",
            worker.name,
            _SLOW_CLOSE_S,
        )
        worker.join()
