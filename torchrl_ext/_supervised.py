"""TorchRL's ``ParallelEnv`` whose workers are watched: what ends one of them is raised, and ends the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchrl.envs import batched_envs as upstream

from rl_ext_core import processes
from rl_ext_core.errors import WorkerError
from torchrl_ext._advice import SpeedCheck
from torchrl_ext._plan import Plan

__all__ = ["SupervisedEnv"]

# An attribute that all environments have, and that a ParallelEnv does not ask its workers for.
_PING = "batch_size"


class SupervisedEnv(upstream.ParallelEnv):
    """Surrounds whatever waits for workers, so that it ends when one of them has failed.

    After a failure, and after Ctrl-C, it is closed and has no workers; a reset starts new ones.
    """

    is_closed: bool
    _mp_start_method: str | None
    _events: Any
    _plan: Plan
    _watch: processes.Watch | None
    _failed: str | None
    _closing: bool
    _speed: SpeedCheck | None
    _threads: int
    _start_timeout: float | None
    _step_timeout: float | None

    def _prepare(self, plan: Plan, start_timeout: float | None, step_timeout: float | None) -> None:
        """Set attributes before upstream's constructor: torch's modules take none by assignment until then."""
        self.__dict__.update(
            _plan=plan,
            _watch=None,
            _failed=None,
            _closing=False,
            _speed=None,
            _start_timeout=start_timeout,
            _step_timeout=step_timeout,
        )

    def _start_workers(self) -> None:
        method, self._threads = self._mp_start_method, torch.get_num_threads()
        if self._speed is None:
            self._speed = self._plan.advice()
        started: list[Any] = []
        try:
            with contextlib.ExitStack() as stack:

                def watch(process: Any) -> None:
                    # Upstream starts all of them and then waits: from here on somebody looks after them.
                    started.append(process)
                    if len(started) == self.num_workers:
                        stack.enter_context(self._watched(started).operation("start", self._start_timeout))

                context = self._plan.context(method, watch)
                self._mp_start_method = stack.enter_context(processes.registered(context))
                super()._start_workers()
                context.on_start = None  # it would keep this object alive for as long as the workers live
        except BaseException:
            if self._watch is None and started:
                self._watched(started)
            self._discard()
            raise
        finally:
            self._mp_start_method = method
        self._failed = None

    def _watched(self, started: Sequence[Any]) -> processes.Watch:
        # Nothing of this may refer to the ParallelEnv, which ends its workers when nobody refers to it any more.
        wake = functools.partial(_wake, self._events, self._shm_done_flags)
        watch = processes.Watch(list(started), seeds=self._plan.seeds, on_failure=wake)
        self.__dict__["_watch"] = watch
        return watch

    @contextlib.contextmanager
    def _operation(self, phase: str, timeout: float | None = None) -> Iterator[None]:
        """Surround a call that waits for the workers."""
        owner = self.__dict__.get("_parent_env") or self
        if owner is self and self.is_closed:
            if phase == "step" and self._failed is not None:
                raise WorkerError(f"there are no workers, because {self._failed}; reset() starts new ones", phase=phase)
            self._create_td()
            self._start_workers()
        watch = self._watch
        if watch is None or watch is not owner._watch:
            self.is_closed = True  # a view of workers that have ended; upstream says so
            yield
            return
        try:
            with watch.operation(phase, timeout=self._step_timeout if timeout is None else timeout):
                try:
                    yield
                except Exception:
                    if watch.failure is None:
                        self._drain()
                    raise
            # Where upstream waits for flags, it was woken by these, and has read what the worker did not write.
            with watch.operation(phase):
                pass
        except BaseException as error:
            if watch.failure is not None or not isinstance(error, Exception):
                # Where this process was interrupted, nobody knows what the workers will answer, and to which call.
                owner._discard()
            raise

    def _drain(self) -> None:
        """Read what the workers have still to say, so that no later call takes it for its own answer."""
        for channel in self.parent_channels:
            channel.send((_PING, ((), {})))
        for channel in self.parent_channels:
            while f"{_PING}_done".encode() not in channel.recv_bytes():
                pass
        for index, event in zip(self._worker_indices, self._events, strict=True):
            self._shm_done_flags[index] = 0
            event.clear()

    def _discard(self) -> None:
        """End the workers by force."""
        watch = self._watch
        if watch is not None:
            self._failed = "a call was interrupted" if watch.failure is None else watch.failure.summary
            self._release(watch)
            torch.set_num_threads(self._threads)

    def _release(self, watch: processes.Watch) -> None:
        """Let go of the workers, the channels to them and the memory that they share."""
        watch.kill()
        watch.stop()
        for channel in self.__dict__.get("parent_channels") or ():
            channel.close()
        for name in ("_workers", "parent_channels", "shared_tensordicts", "shared_tensordict_parent"):
            self.__dict__.pop(name, None)
        self._events = self.event = self._watch = None
        self.is_closed = True

    def _shutdown_workers(self) -> None:
        watch = self._watch
        if not self._closing or watch is None:
            return  # upstream has found a dead worker and will raise: the operation says which and why
        members = list(zip(self.parent_channels, self._workers, strict=True))
        with self._operation("close", self.shutdown_timeout):
            watch.closing()
            # In this mode renderers are to be gone before the next one goes, as upstream has it.
            for group in [[member] for member in members] if self._metadata_from_workers else [members]:
                for channel, _ in group:
                    channel.send(("close", None))
                for _, worker in group:
                    worker.join()
            if any(worker.exitcode for worker in self._workers):
                raise EOFError
        self._release(watch)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the workers.

        :param raise_if_closed: object to closing twice; to close after a worker's failure is not that
        """
        raise_if_closed = raise_if_closed and self._failed is None
        self._failed, self._closing = None, True
        try:
            super().close(raise_if_closed=raise_if_closed)
        finally:
            self._closing = False

    def _reset(self, *args: Any, **kwargs: Any) -> Any:
        with self._operation("reset"):
            return super()._reset(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        with self._operation("step"), self._speed or contextlib.nullcontext():
            return super()._step(*args, **kwargs)

    def step_and_maybe_reset(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and reset what has ended, as upstream's does."""
        with self._operation("step"), self._speed or contextlib.nullcontext():
            return super().step_and_maybe_reset(*args, **kwargs)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the workers' environments, as upstream's does."""
        with self._operation("set_seed"):
            return super().set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> Any:
        """Give the workers' states, as upstream's does."""
        with self._operation("state_dict"):
            return super().state_dict()

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Load the workers' states, as upstream's does."""
        with self._operation("load_state_dict"):
            super().load_state_dict(state_dict, **kwargs)
            self._drain()  # upstream leaves flags set by which it would take the next step's data for ready

    def __setitem__(self, item: Any, source: Any) -> None:
        with self._operation("__setitem__"):
            super().__setitem__(item, source)
            self._drain()  # as above

    def __getattr__(self, attr: str) -> Any:
        value = super().__getattr__(attr)
        return _Call(attr, self) if isinstance(value, upstream._dispatch_caller_parallel) else value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None, "_shm_done_flags": None}


class _Call(upstream._dispatch_caller_parallel):
    """A method or attribute of the workers' environments."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        env: SupervisedEnv = self.parallel_env
        with env._operation(self.attr if isinstance(self.attr, str) else ".".join(self.attr)):
            return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> _Call:
        return _Call(super().__getattr__(name).attr, self.parallel_env)


def _wake(events: Sequence[Any], flags: Any) -> None:
    """Have upstream's waiting for workers end: these events and flags are what it waits for."""
    for index, event in enumerate(events):
        flags[index] = 1
        event.set()
