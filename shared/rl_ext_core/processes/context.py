"""Contexts of multiprocessing whose processes are workers, and how these are started.

They start by multiprocessing's own ways: its fork server (another instance of it, see ``server``), its ``spawn``, its
``fork``. But a worker has all of its environment variables before it imports anything of the user's, it imports the
main module only if what it runs refers to that, and it ends with its parent.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import multiprocessing
import os
import select
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, reduction, spawn, util
from multiprocessing import context as mp_context
from multiprocessing import process as mp_process
from multiprocessing.process import BaseProcess
from typing import Any

from rl_ext_core import _system
from rl_ext_core._import_path import import_path
from rl_ext_core._interrupts import defer_signals
from rl_ext_core._system import after_fork, picklable_descriptor
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.processes import server
from rl_ext_core.processes.families import kill_process_trees
from rl_ext_core.processes.report import WorkerReport
from rl_ext_core.processes.worker import WorkerStart, finish_worker

if sys.platform == "win32":
    from multiprocessing import popen_spawn_win32
else:
    from multiprocessing import forkserver, popen_fork, popen_forkserver, popen_spawn_posix

__all__ = ["Worker", "WorkerContext", "get_context", "kill_workers", "named_context"]

_log = logging.getLogger("rl_ext_core.processes")

# multiprocessing's exit code for a process whose fork server has died, and here for any that is not known.
_UNKNOWN_EXIT_CODE = 255
_UNREPORTED_REASON = (
    "this process ignores SIGCHLD, or another part of it has waited for the worker. Write "
    "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before the workers start"
)
_POLL_S = 0.1
# macOS has a fork server, whose forks its own libraries do not support.
_DEFAULT = "forkserver" if hasattr(os, "memfd_create") else "spawn"
# Where the parent's main module is, in multiprocessing's preparation data.
_MAIN_MODULE_KEYS = ("init_main_from_name", "init_main_from_path")
# What a worker has of its process object, besides what it runs.
_SENT_ATTRIBUTES = (
    "_identity",
    "_config",
    "_parent_pid",
    "_parent_name",
    "_popen",
    "_closed",
    "_name",
    "_start_method",
    "worker",
)

_context_numbers = itertools.count()
# Writing ends of all lifelines. A forked child must not hold them: it would keep its siblings from seeing the end.
_lifelines: set[int] = set()


def _drop_parent_workers() -> None:
    """Drop the workers of the process that this one was forked from."""
    while _lifelines:
        os.close(_lifelines.pop())
    # multiprocessing would terminate and join them when this process ends.
    children: set[Any] = mp_process._children  # type: ignore[attr-defined]
    children.difference_update([child for child in children if isinstance(child, Worker)])


after_fork(_drop_parent_workers)


class Worker(BaseProcess):
    """A process of multiprocessing that reports to its parent and ends with it; made by :class:`WorkerContext`.

    :ivar worker: how many processes its context had made before
    :ivar report: how far it got, and what it says of its end
    """

    worker: int
    report: WorkerReport
    _context: WorkerContext | None
    _modules: Sequence[str]
    _main: Mapping[str, Any]
    _worker_start: WorkerStart
    _lifeline: Any = None
    _job: Any = None

    @property
    def popen(self) -> Any:
        """What the parent holds of the started process; None before."""
        return vars(self)["_popen"]

    def start(self) -> None:
        """Start the process; if that is interrupted, or ``on_start`` raises, the process ends.

        Daemons may start it, such as the workers of a ``Pool``: it ends with them, whoever waits for it.
        """
        context, self._context = self._context, None  # which would live as long as this, and in a forked worker
        assert context is not None
        try:
            self._launch(context)
            if context.on_start is not None:
                context.on_start(self)
        except BaseException:
            if self.popen is not None:
                self.kill()
                self.join()
            elif self._lifeline is not None:
                self._lifeline()
            raise

    @defer_signals
    def _launch(self, context: WorkerContext) -> None:
        config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        daemon = {name: config.pop(name) for name in ("daemon",) if name in config}
        self.report, self._modules, reading = WorkerReport(), context.preload, None
        try:
            if not _system.WINDOWS:
                reading, writing = os.pipe()
                _lifelines.add(writing)
                # At exit the kernel closes it, after the children that are waited for have ended.
                self._lifeline = util.Finalize(self, _close_lifeline, (writing,))
            own = {} if context.environs is None else context.environs[self.worker]
            environ = {name: value for name, value in {**os.environ, **own}.items() if value is not None}
            self._worker_start = WorkerStart(self.report.fd, reading, environ)
            super().start()
            if _system.WINDOWS:
                self._job = _system._windows.Job(self.pid)
        finally:
            config.update(daemon)
            if reading is not None:
                os.close(reading)

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 multiprocessing's name
        if process._start_method == "fork":
            return _ForkPopen(process)
        if process._start_method == "forkserver":
            try:
                return _ForkServerPopen(process)
            except server.UnusableError as error:
                _log.info("%s is spawned: %s", process.name, error)
                process._start_method = "spawn"
        return _SpawnPopen(process)

    def kill(self) -> None:
        """Kill the process, and what it has started."""
        kill_workers([self])

    terminate = kill

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.exitcode is None:
            os.kill(self.pid or 0, number)

    def __getstate__(self) -> dict[str, Any]:
        # The function is pickled apart: nothing of the user's is unpickled before the worker is set up.
        file = io.BytesIO()
        pickler = _MainModulePickler(file)
        pickler.dump(self._function())
        begin = replace(
            self._worker_start,
            report=picklable_descriptor(self.report.fd),
            lifeline=None if self._worker_start.lifeline is None else reduction.DupFd(self._worker_start.lifeline),
            function=file.getvalue(),
            needs_main=pickler.needs_main,
            main=self._main,
        )
        return {**{name: vars(self)[name] for name in _SENT_ATTRIBUTES}, "_worker_start": begin}

    def _function(self) -> tuple[Any, Any, Any]:
        return self._target, self._args, self._kwargs  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run the function; called in the worker."""
        begin = self._worker_start
        if begin.function is None:  # it is forked
            begin = replace(begin, function=self._function())
        else:
            lifeline = None if begin.lifeline is None else begin.lifeline.detach()
            begin = replace(begin, report=begin.report.detach(), lifeline=lifeline)
        begin.run()

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return finish_worker(code, spawned=self._start_method == "spawn")  # type: ignore[attr-defined]


@defer_signals
def _close_lifeline(writing: int) -> None:
    _lifelines.discard(writing)
    os.close(writing)


def kill_workers(workers: Sequence[Worker]) -> None:
    """Kill workers that have started, with all that they have started, and what is left of those that have ended."""
    if _system.WINDOWS:
        for process in workers:
            process._job.end()
    else:
        living = [process.pid or 0 for process in workers if process.popen.poll() is None]
        kill_process_trees(living, [process.pid or 0 for process in workers])


class _MainModulePickler(reduction.ForkingPickler):
    """Notes whether a worker has to import the main module to unpickle this.

    What cloudpickle has packed brings the main module's functions and classes along: most workers need not run the
    user's script again, with all that it imports.
    """

    needs_main = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            self.needs_main = True
        return NotImplemented


_original_preparation_data = spawn.get_preparation_data
_spawning = threading.local()


def _get_preparation_data(name: str) -> dict[str, Any]:
    """Return multiprocessing's preparation data; those of a worker lack the main module, which it sends itself."""
    process = getattr(_spawning, "process", None)
    chosen = multiprocessing.get_start_method(allow_none=True)
    try:
        data: dict[str, Any] = _original_preparation_data(name)
    finally:
        if process is not None and not chosen:
            # Asking for the default has fixed it: the user could not set another any more.
            multiprocessing.set_start_method(None, force=True)
    if process is None:
        return data
    process._main = {name: data.pop(name) for name in _MAIN_MODULE_KEYS if name in data}
    return {**data, "sys_path": import_path()}


# multiprocessing has no other way to it for what is spawned, and spawns its own processes as before.
spawn.get_preparation_data = _get_preparation_data


@contextmanager
def _worker_preparation(process: Any) -> Iterator[None]:
    _spawning.process = process
    try:
        yield
    finally:
        _spawning.process = None


if sys.platform == "win32":

    class _SpawnPopen(popen_spawn_win32.Popen):
        unknown_reason = ""

        def __init__(self, process: Any) -> None:
            try:
                with _worker_preparation(process):
                    super().__init__(process)
            except OSError:
                if not hasattr(self, "pid"):
                    raise  # else the worker has died already, which is found like any other death

else:

    class _ExitCodePopen(popen_fork.Popen):
        """Fetches the exit code once, whichever thread asks, and also where the system does not report it."""

        unknown_reason = ""  # why the exit code is not known
        sentinel: int
        pid: int
        _fds: list[int]

        def __init__(self, process: Any) -> None:
            self._polling = threading.Lock()
            super().__init__(process)

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            """Fetch the exit code."""
            while (code := self._poll_once()) is None and flag != os.WNOHANG:
                # What the worker has forked may hold the sentinel, where that is a pipe.
                connection.wait([self.sentinel], _POLL_S)
            return code

        @defer_signals  # the lock would stay locked
        def _poll_once(self) -> int | None:
            with self._polling:
                if self.returncode is None:
                    self._read_exit_code()
                code: int | None = self.returncode
                return code

        def _read_exit_code(self) -> None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode, self.unknown_reason = _UNKNOWN_EXIT_CODE, _UNREPORTED_REASON
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None

        def _watch_process(self) -> None:
            """Have the sentinel tell the end of the process; a pipe's end waits for all that it has forked, too."""
            with suppress(AttributeError, OSError):  # there is none: macOS, an old Linux
                self.sentinel = os.pidfd_open(self.pid)
                util.Finalize(self, os.close, (self.sentinel,))

    class _ForkPopen(_ExitCodePopen):
        method = "fork"

        def _launch(self, process: Any) -> None:
            with server.block_signals():
                super()._launch(process)  # type: ignore[misc]
            self._watch_process()

    class _SpawnPopen(_ExitCodePopen, popen_spawn_posix.Popen):
        method = "spawn"

        def _launch(self, process: Any) -> None:
            # A worker that has died already is found like any other.
            with server.block_signals(), _worker_preparation(process), suppress(BrokenPipeError):
                super()._launch(process)  # type: ignore[misc]
            self._watch_process()

    class _ForkServerPopen(_ExitCodePopen, popen_forkserver.Popen):
        method = "forkserver"

        def _launch(self, process: Any) -> None:
            from rl_ext_core.devices import IMPORT_TIME_VARIABLES

            data = io.BytesIO()
            mp_context.set_spawning_popen(self)
            try:
                with _worker_preparation(process):
                    reduction.dump(_get_preparation_data(process.name), data)
                reduction.dump(process, data)
            finally:
                mp_context.set_spawning_popen(None)
            variables = {name: process._worker_start.environ.get(name) for name in IMPORT_TIME_VARIABLES}
            answer = server.start_process(process._modules, variables, self._fds)
            self.sentinel, writing, self.pid, self._server = answer
            # The worker sees the other end of its data as multiprocessing's sentinel of its parent: it stays open.
            self.finalizer = util.Finalize(self, util.close_fds, (writing, self.sentinel))  # type: ignore[attr-defined]
            with suppress(BrokenPipeError), open(writing, "wb", closefd=False) as file:
                file.write(data.getbuffer())

        def _read_exit_code(self) -> None:
            if connection.wait([self.sentinel], 0):
                try:
                    self.returncode = forkserver.read_signed(self.sentinel)
                except (OSError, EOFError):
                    # The worker may live, and nobody would wait for it; its number may be another's soon.
                    kill_process_trees([self.pid])
                    self.returncode, self.unknown_reason = (
                        _UNKNOWN_EXIT_CODE,
                        "the fork server that started it was killed",
                    )
                self._server = None


@dataclass(eq=False)
class WorkerContext(mp_context.BaseContext):
    """A context of multiprocessing whose processes are workers; made by :func:`get_context`."""

    _name: str
    preload: Sequence[str]
    environs: Sequence[Mapping[str, str | None]] | None
    label: str
    on_start: Callable[[BaseProcess], None] | None
    _count: Iterator[int] = field(default_factory=itertools.count)

    def Process(self, *arguments: Any, **options: Any) -> Worker:  # noqa: N802 multiprocessing's name
        """Make a process, as multiprocessing's contexts do."""
        number = next(self._count)
        process = Worker(*arguments, **{"name": f"{self.label}-{number}", **options})
        process.worker, process._context, process._start_method = number, self, self._name  # type: ignore[attr-defined]
        return process

    def Event(self) -> Any:  # noqa: N802 multiprocessing's name
        """Make an event; on Linux it stays usable when a process is killed while it sets it."""
        return KernelEvent() if hasattr(os, "eventfd") else super().Event()


def get_context(
    method: str | None = None,
    *,
    preload: Sequence[str] = (),
    environs: Sequence[Mapping[str, str | None]] | None = None,
    label: str = "worker",
    on_start: Callable[[BaseProcess], None] | None = None,
) -> WorkerContext:
    """Make a context of multiprocessing whose processes are workers.

    Its processes get the parent's environment variables as they are when they start, whatever the method, before
    anything of the user's is imported, and the default signal handlers. They lead a process group each, have no effect
    of Ctrl-C, and die when the parent does, however it does, with all that they have started. What ends them goes to a
    :class:`Watch`.

    Variables that the dynamic linker or the interpreter read at their start (``LD_LIBRARY_PATH``, ``PYTHONHASHSEED``)
    are those of the parent.

    :param method: "forkserver", "spawn" or "fork"; None is "forkserver" on Linux, else "spawn"
    :param preload: modules that the fork server imports once for all workers; other methods have no use for it. Name
        modules whose import starts no threads and changes nothing but themselves
    :param environs: for each process in the order of their making, variables to set; None unsets
    :param label: what a worker is called in names and messages
    :param on_start: called in the parent with each process that has started; what it raises ends the process
    :return: a context, with ``Process``, ``Pipe``, ``Event`` and all else; processes have the attribute ``worker``
    :raises InvalidArgumentError: If there is no such method
    """
    available = multiprocessing.get_all_start_methods()
    method = _DEFAULT if method is None else method
    if method not in available:
        raise InvalidArgumentError(
            f"method={method!r} does not start processes here; expected one of {', '.join(available)}. "
            f'Write method="{_DEFAULT}"'
        )
    return WorkerContext(method, tuple(preload), environs, label, on_start)


@contextmanager
def named_context(context: mp_context.BaseContext) -> Iterator[str]:
    """Give a context a name for ``multiprocessing.get_context``, for libraries that take only names.

    :param context: made by :func:`get_context`
    :return: a context manager; the name, which no other context has, is known while it is open
    """
    name = f"{context.get_start_method()}-workers-{os.getpid()}-{next(_context_numbers)}"
    contexts = mp_context._concrete_contexts  # type: ignore[attr-defined]
    contexts[name] = context
    try:
        yield name
    finally:
        del contexts[name]


class KernelEvent:
    """Does what ``multiprocessing.Event`` does, with one counter in the kernel.

    That one is a lock and four counters: a process that is killed while it sets or clears the event takes the lock
    with it, and whoever sets the event next waits forever.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def is_set(self) -> bool:
        return self.wait(0)

    def set(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def wait(self, timeout: float | None = None) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout in (None, math.inf) else max(timeout, 0) * 1e3))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_event, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _rebuild_event(descriptor: Any) -> KernelEvent:
    return KernelEvent(descriptor.detach())
