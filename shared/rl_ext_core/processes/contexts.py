"""Contexts of multiprocessing whose processes are workers."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context as mp_context
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, ClassVar

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.processes import _child
from rl_ext_core.processes._popen import ForkPopen, ForkServerPopen, Settings, SpawnPopen

if TYPE_CHECKING:
    from rl_ext_core.processes._popen import WorkerPopen

__all__ = ["Worker", "WorkerContext", "get_context", "registered"]

_names = itertools.count()


class Worker(BaseProcess):
    """A process of multiprocessing that reports to its parent and ends with it.

    :ivar worker: its number: how many processes its context had made before
    """

    worker: int
    settings: Settings
    _context: ClassVar[Any]
    _plain: ClassVar[type[Worker]]

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.worker, self.settings = self._context.next_worker()
        name = name or f"{self._context.label}-{self.worker}"
        super().__init__(group, target, name, args, kwargs or {}, daemon=daemon)

    @property
    def popen(self) -> WorkerPopen | None:
        """What the parent holds of the started process."""
        popen: WorkerPopen | None = vars(self)["_popen"]
        return popen

    def start(self) -> None:
        """Start the process; it is killed if that is interrupted, or if ``on_start`` raises."""
        try:
            super().start()
            if self._context.on_start is not None:
                self._context.on_start(self)
        except BaseException:
            if self.popen is not None:
                self.kill()
                self.join()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # The class that belongs to one context exists in the parent only.
        cls = self._plain if type(self) is self._context.Process else type(self)
        state = {name: value for name, value in vars(self).items() if name != "settings"}
        return _blank, (cls,), state

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        start: _child.Start | None = vars(self).pop("start_in_fork", None)
        if start is not None:
            start.begin()
        vars(self)["run"] = _child.reporting(self.run)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return _child.leave(code, forked=not isinstance(self, _SpawnWorker))


class _ForkWorker(Worker, mp_context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> ForkPopen:  # noqa: N802 multiprocessing calls it
        return ForkPopen(process_obj)


class _SpawnWorker(Worker, mp_context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> SpawnPopen:  # noqa: N802 multiprocessing calls it
        return SpawnPopen(process_obj)


class _ForkServerWorker(Worker, mp_context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> ForkServerPopen:  # noqa: N802 multiprocessing calls it
        return ForkServerPopen(process_obj)


class WorkerContext(mp_context.BaseContext):
    """What the contexts of all methods have in common; made by :func:`get_context`.

    :ivar Process: the class of its workers
    """

    Process: type[Worker]

    _worker_class: ClassVar[type[Worker]]

    def __init__(
        self,
        preload: tuple[str, ...],
        environs: tuple[Mapping[str, str | None], ...] | None,
        import_time: tuple[str, ...],
        label: str,
        on_start: Callable[[BaseProcess], None] | None,
    ) -> None:
        self.label = label
        self.on_start = on_start
        self._preload, self._environs, self._import_time = preload, environs, import_time
        self._count = itertools.count()
        # multiprocessing's objects take the class from the context and call it without naming the context.
        attributes = {"_context": self, "_plain": self._worker_class}
        self.Process = type("Worker", (self._worker_class,), attributes)

    def Event(self) -> Any:  # noqa: N802 multiprocessing's name
        """Make an event that stays usable when a process is killed while it sets it."""
        return KernelEvent() if hasattr(os, "eventfd") else super().Event()

    def next_worker(self) -> tuple[int, Settings]:
        """Number a process that is made, and give its settings."""
        worker = next(self._count)
        if self._environs is None:
            return worker, Settings({}, self._preload, self._import_time)
        if worker >= len(self._environs):
            raise InvalidArgumentError(
                f"environs has variables for {len(self._environs)} workers, and this context makes process number "
                f"{worker + 1}: give one mapping for each process, get_context(environs=[{{}}] * {worker + 1})"
            )
        return worker, Settings(self._environs[worker], self._preload, self._import_time)


class _ForkContext(WorkerContext, mp_context.ForkContext):  # type: ignore[misc]
    _worker_class = _ForkWorker


class _SpawnContext(WorkerContext, mp_context.SpawnContext):  # type: ignore[misc]
    _worker_class = _SpawnWorker


class _ForkServerContext(WorkerContext, mp_context.ForkServerContext):  # type: ignore[misc]
    _worker_class = _ForkServerWorker


_CONTEXTS: dict[str, type[WorkerContext]] = {
    "forkserver": _ForkServerContext,
    "spawn": _SpawnContext,
    "fork": _ForkContext,
}


class KernelEvent:
    """Does what ``multiprocessing.Event`` does, with one counter in the kernel.

    That one is a lock and four counters: a process that is killed while it sets or clears the event takes the lock
    with it, and whoever sets the event next waits forever.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self.wait(0)

    def set(self) -> None:
        """Set it."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it as if it had never been set."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        :param timeout: seconds
        :return: whether it is set
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout in (None, math.inf) else max(timeout, 0) * 1e3))

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited_event, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _inherited_event(descriptor: Any) -> KernelEvent:
    return KernelEvent(descriptor.detach())


def get_context(
    method: str | None = None,
    *,
    preload: Sequence[str] = (),
    environs: Sequence[Mapping[str, str | None]] | None = None,
    import_time: Sequence[str] = (),
    label: str = "worker",
    on_start: Callable[[BaseProcess], None] | None = None,
) -> WorkerContext:
    """Make a context of multiprocessing whose processes are workers.

    Its processes get the parent's environment variables as they are when they start, whatever the method, before
    anything of the user's is imported, and the default signal handlers. They lead a process group each, pass over
    Ctrl-C, and die when the parent does, however it does, with all that they have started, even while they hang in C.
    What ends them goes to a :class:`Watch`; where none takes it, it is printed as usual.

    Fork servers are the context's own: one for each list of preloaded modules and values of the variables that these
    read at import. They are kept for later contexts and end with the interpreter. Variables that the dynamic linker
    or the interpreter read at their start (``LD_LIBRARY_PATH``, ``PYTHONHASHSEED``) are those of the parent.

    :param method: "forkserver", "spawn" or "fork"; None is "forkserver" where there is one, else "spawn"
    :param preload: modules that fork servers import once for all workers; other methods have no use for it. Name
        modules whose import starts no threads and changes nothing but themselves. One that cannot be imported is
        left to the workers
    :param environs: for each process in the order of their making, variables to set; None unsets
    :param import_time: names of the variables that preloaded modules read at import
    :param label: what a worker is called in names and messages
    :param on_start: called in the parent with each process that has started
    :return: a context, with ``Process``, ``Pipe``, ``Event`` and all else; processes have the attribute ``worker``
    :raises InvalidArgumentError: there is no such method
    :raises InvalidTypeError: a list of names or of mappings is something else
    """
    available = [name for name in _CONTEXTS if name in multiprocessing.get_all_start_methods()]
    method = available[0] if method is None else method
    if method not in available:
        raise InvalidArgumentError(
            f"method={method!r} is no way to start processes here; expected one of {', '.join(available)}. "
            f'Write method="{available[0]}"'
        )
    checked = None if environs is None else tuple(_checked_environ(environ) for environ in environs)
    context_class = _CONTEXTS[method]
    return context_class(
        _checked_names("preload", preload), checked, _checked_names("import_time", import_time), label, on_start
    )


def _checked_names(option: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(f'{option}={names!r} is no list of names; write {option}=["a_name"]')
    return tuple(names)


def _checked_environ(environ: Mapping[Any, Any]) -> dict[str, str | None]:
    for name, value in environ.items():
        if not isinstance(name, str) or not isinstance(value, str | None):
            raise InvalidTypeError(
                f"environs sets {name!r} to {value!r}; expected strings, or None to unset. Write {{{str(name)!r}: "
                f"{str(value)!r}}}"
            )
    return dict(environ)


@contextmanager
def registered(context: mp_context.BaseContext) -> Iterator[str]:
    """Give a context a name for ``multiprocessing.get_context``, for libraries that take only names.

    :param context: made by :func:`get_context`
    :return: a context manager; the name, which no other context has, is known while it is open
    """
    name = f"{context.get_start_method()}-workers-{os.getpid()}-{next(_names)}"
    contexts = mp_context._concrete_contexts  # type: ignore[attr-defined]
    contexts[name] = context
    try:
        yield name
    finally:
        del contexts[name]


def _blank(cls: type[Worker]) -> Worker:
    return cls.__new__(cls)
