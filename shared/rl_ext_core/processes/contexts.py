"""Contexts of multiprocessing whose processes are workers, and how these are started.

They are multiprocessing's own contexts, with processes and their starting (``Popen``) in a version that can do what
those cannot:

- A worker has all of its environment variables before it imports anything but the standard library and this package.
- What goes wrong before its function runs, such as while it is unpickled, is reported, as is what ends it later.
- It imports the main module only if what it runs refers to that: most scripts need no ``__main__`` guard.
- A pipe that its parent alone holds open, the lifeline, ends it with its parent.
- There are fork servers of our own, as many as there are kinds of workers, see ``servers``; and as many descriptors
  as anybody sends.
"""

from __future__ import annotations

import io
import itertools
import math
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import (
    connection,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing import context as mp_context
from multiprocessing import process as mp_process
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import after_fork
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.processes import servers, worker
from rl_ext_core.processes.report import Report
from rl_ext_core.processes.worker import GROUP_SIGNALS, kill_families, kill_group

__all__ = ["Worker", "WorkerContext", "WorkerPopen", "get_context", "registered"]

# multiprocessing's exit code for a process whose fork server has died, and here for any that is not known.
_UNKNOWN = 255
# After the children were joined: until then they may still write their reports.
_EXIT_PRIORITY = -10
_KILL_S = 1.0

_names = itertools.count()
# Writing ends of all lifelines. A forked child must not hold them: it would keep its siblings from seeing the end.
_lifelines: set[int] = set()


def _leave_to_parent() -> None:
    """Drop the workers of the process that this one was forked from."""
    while _lifelines:
        os.close(_lifelines.pop())
    # multiprocessing would terminate and join them when this process ends.
    children: set[Any] = mp_process._children  # type: ignore[attr-defined]
    children.difference_update([child for child in children if isinstance(child, Worker)])


after_fork(_leave_to_parent)


@dataclass(frozen=True)
class Settings:
    """What distinguishes one worker from another, besides its function; see :func:`get_context`."""

    environ: Mapping[str, str | None]
    preload: Sequence[str]
    import_time: Sequence[str]
    own_session: bool

    def start(self, report: int, lifeline: int) -> worker.Start:
        """Return what a worker is given that is started now."""
        together = {**os.environ, **self.environ}
        environ = {name: value for name, value in together.items() if value is not None}
        handled = tuple(number for number in GROUP_SIGNALS if signal.getsignal(number) is not signal.SIG_DFL)
        return worker.Start(report, lifeline, environ, self.own_session, os.getpid(), handled)


class Worker(BaseProcess):
    """A process of multiprocessing that reports to its parent and ends with it."""

    worker: int  # how many processes its context had made before
    settings: Settings
    on_start: Callable[[BaseProcess], None] | None

    @property
    def popen(self) -> WorkerPopen | None:
        """What the parent holds of the started process."""
        popen: WorkerPopen | None = vars(self)["_popen"]
        return popen

    def start(self) -> None:
        """Start the process; it is killed if that is interrupted, or if ``on_start`` raises.

        Daemons may start it, such as the workers of a ``Pool``: it ends with them, whoever waits for it.
        """
        config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        daemon = {name: config.pop(name) for name in ("daemon",) if name in config}
        # What it holds is not to live for as long as the worker.
        on_start, self.on_start = self.on_start, None
        try:
            super().start()
            if on_start is not None:
                on_start(self)
        except BaseException:
            if self.popen is not None:
                self.kill()
                self.join()
            raise
        finally:
            config.update(daemon)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        start: worker.Start | None = vars(self).pop("start_in_fork", None)
        if start is not None:
            start.begin()
        vars(self)["run"] = worker.reporting(self.run)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return worker.leave(code, forked=not isinstance(self, _SpawnWorker))


class WorkerPopen(popen_fork.Popen):
    """A started worker, as its parent sees it."""

    report: Report  # what it says of its end
    server_end: str | None  # how its fork server has ended, if that came first: the exit code is not known then
    is_unreported: bool  # the system has not reported the exit code, nor has the worker
    watched: bool  # what it has started ends with it, though it ends in order
    _fds: list[int]
    _send_signal: Callable[[int], None]

    def _launch(self, process_obj: Any) -> None:
        self.is_unreported = self.watched = self._cleared = False
        self.server_end = None
        self._polling = threading.Lock()
        reading, writing = os.pipe()
        _lifelines.add(writing)
        # At exit the kernel closes it, after the children that are waited for have ended.
        self._closing = [util.Finalize(self, _close_lifeline, (writing,))]
        try:
            self.report = Report()
            self._closing.append(util.Finalize(self, _end_report, (self.report,), exitpriority=_EXIT_PRIORITY))
            self._start(process_obj, process_obj.settings.start(self.report.fd, reading))
        except BaseException:
            if hasattr(self, "pid"):
                # Interrupted. Half a pickle would make the worker complain.
                self.kill()
                self.wait(_KILL_S)
            self.close()
            raise
        finally:
            os.close(reading)

    def _start(self, process_obj: Any, start: worker.Start) -> None:
        raise NotImplementedError

    def _watch_process(self) -> None:
        """Have the sentinel tell the end of the process; multiprocessing's waits for all that it has forked, too."""
        with suppress(AttributeError, OSError):  # an old Linux
            self.sentinel = os.pidfd_open(self.pid)
            self._closing.append(util.Finalize(self, os.close, (self.sentinel,)))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Fetch the exit code; what a worker leaves behind that has failed, or that is watched, is killed."""
        if flag != os.WNOHANG and self.returncode is None:
            connection.wait([self.sentinel])
        return self._fetched()

    @uninterrupted  # the lock would stay locked
    def _fetched(self) -> int | None:
        # One thread at a time gets it from the system.
        with self._polling:
            if self.returncode is None:
                self._read_exitcode()
            if self.returncode and not self._cleared:
                self._cleared = True
                kill_families([], [self.pid])
            elif self.returncode == 0 and self.watched and not self._cleared:
                self._cleared = True
                kill_group(self.pid)
            code: int | None = self.returncode
            return code

    def _read_exitcode(self) -> None:
        ended = connection.wait([self.sentinel], 0)
        super().poll(os.WNOHANG)
        if ended and self.returncode is None and not _is_child(self.pid):
            # SIGCHLD is ignored, or another part of this process has waited for all of its children.
            recorded = self.report.exitcode()
            self.is_unreported = recorded is None
            self.returncode = _UNKNOWN if recorded is None else recorded

    def ask_to_end(self) -> bool:
        """Ask the worker to close what it has and to end, if it has something; tell whether it was asked."""
        asked = self.report.ask_to_end()
        if asked:
            self._send_signal(worker.END_SIGNAL)
        return asked

    def kill(self) -> None:
        """Kill the worker, and what it has started."""
        if self.returncode is None:
            kill_families([self.pid])

    def final_exitcode(self) -> int | None:
        """Fetch the exit code of a process that has ended; the main thread may be fetching it at the same time."""
        for _ in range(100):
            code = self.poll()
            if code is not None:
                return code
            time.sleep(0.002)
        return None

    def close(self) -> None:
        """Close the descriptors; a worker that still lives dies."""
        super().close()
        for close in self._closing:
            close()


class _ForkPopen(WorkerPopen):
    method = "fork"

    def _start(self, process_obj: Any, start: worker.Start) -> None:
        process_obj.start_in_fork = start
        # A worker that had to start one would take it with it.
        servers.signals_held(resource_tracker.ensure_running)()
        servers.try_to_open(4)
        self._fork(process_obj)
        del process_obj.start_in_fork
        self._watch_process()

    @servers.signals_held
    def _fork(self, process_obj: Any) -> None:
        super(WorkerPopen, self)._launch(process_obj)  # type: ignore[misc]


class _SpawnPopen(WorkerPopen, popen_spawn_posix.Popen):
    method = "spawn"

    def _start(self, process_obj: Any, start: worker.Start) -> None:
        tracker = servers.signals_held(resource_tracker.getfd)()
        assert tracker is not None
        self._fds.append(tracker)
        pickled, _ = _pack(self, process_obj, start)
        parent_r, child_w, child_r, parent_w = _two_pipes()
        self.finalizer = util.Finalize(self, _close_all, (parent_r, parent_w))
        self.sentinel = parent_r
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_r)
            self._spawn(command, [*self._fds, child_r, child_w])
        finally:
            _close_all(child_r, child_w)
        self._watch_process()
        _send(parent_w, pickled)

    @servers.signals_held
    def _spawn(self, command: Sequence[str], fds: Sequence[int]) -> None:
        self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, fds)


class _ForkServerPopen(WorkerPopen, popen_forkserver.Popen):
    method = "forkserver"

    def _start(self, process_obj: Any, start: worker.Start) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pickled, sys_path = _pack(self, process_obj, start, theirs.fileno())
            settings = process_obj.settings
            read_at_import = {name: start.environ.get(name) for name in settings.import_time}
            first, more = self._fds[: worker.SENT_AT_ONCE], self._fds[worker.SENT_AT_ONCE :]
            self._server = servers.connect(settings.preload, read_at_import, sys_path, first, self._accept)
            _send(self._data, pickled)
            with suppress(ConnectionError):  # a worker that is dead already is found like any other
                for at in range(0, len(more), worker.SENT_AT_ONCE):
                    reduction.sendfds(ours, more[at : at + worker.SENT_AT_ONCE])

    _server: Any = None

    def _accept(self, status: int, data: int, pid: int) -> None:
        self.sentinel, self._data, self.pid = status, data, pid
        # The worker sees the other end of its data as multiprocessing's sentinel of its parent: it stays open.
        self.finalizer = util.Finalize(self, _close_all, (data, status))

    def _read_exitcode(self) -> None:
        if connection.wait([self.sentinel], 0):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = _UNKNOWN
                self.server_end = servers.end_of(self._server)
                # The worker may live, and nobody would wait for it; its id may be another's soon.
                self._closing[0]()


class _ForkWorker(Worker, mp_context.ForkProcess):
    _Popen = staticmethod(_ForkPopen)


class _SpawnWorker(Worker, mp_context.SpawnProcess):
    _Popen = staticmethod(_SpawnPopen)


class _ForkServerWorker(Worker, mp_context.ForkServerProcess):
    _Popen = staticmethod(_ForkServerPopen)


class WorkerContext(mp_context.BaseContext):
    """What the contexts of all methods have in common; made by :func:`get_context`."""

    _worker_class: ClassVar[type[Worker]]

    def __init__(
        self,
        settings: Settings,
        environs: tuple[Mapping[str, str | None], ...] | None,
        label: str,
        on_start: Callable[[BaseProcess], None] | None,
    ) -> None:
        self.label, self.on_start = label, on_start
        self._settings, self._environs = settings, environs
        self._count = itertools.count()

    def Process(  # noqa: N802 multiprocessing's name
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> Worker:
        """Make a process, as multiprocessing's contexts do."""
        number, settings = next(self._count), self._settings
        if self._environs is not None:
            if number >= len(self._environs):
                raise InvalidArgumentError(
                    f"environs has variables for {len(self._environs)} workers, and this context makes process number "
                    f"{number + 1}: give one mapping for each process, get_context(environs=[{{}}] * {number + 1})"
                )
            settings = replace(settings, environ=self._environs[number])
        process = self._worker_class(group, target, name or f"{self.label}-{number}", args, kwargs or {}, daemon=daemon)
        process.worker, process.settings, process.on_start = number, settings, self.on_start
        return process

    def Event(self) -> Any:  # noqa: N802 multiprocessing's name
        """Make an event that stays usable when a process is killed while it sets it."""
        return KernelEvent()


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


def get_context(
    method: str | None = None,
    *,
    preload: Sequence[str] = (),
    environs: Sequence[Mapping[str, str | None]] | None = None,
    import_time: Sequence[str] = (),
    label: str = "worker",
    on_start: Callable[[BaseProcess], None] | None = None,
    own_session: bool = False,
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
    :param on_start: called in the parent with each process that has started; what it raises ends the process
    :param own_session: whether each has a session, and so no terminal, and a share of the processor that does not
        depend on how many there are; what they wait for in other sessions comes later, see ``lead_group``
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
    names = _checked_names("preload", preload), _checked_names("import_time", import_time)
    settings = Settings({}, *names, own_session)
    return _CONTEXTS[method](settings, checked, label, on_start)


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


class KernelEvent:
    """Does what ``multiprocessing.Event`` does, with one counter in the kernel.

    That one is a lock and four counters: a process that is killed while it sets or clears the event takes the lock
    with it, and whoever sets the event next waits forever.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def is_set(self) -> bool:
        """Return whether it is set."""
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


def _pack(popen: Any, process_obj: Any, start: worker.Start, more: int | None = None) -> tuple[bytes, list[str]]:
    """Pickle a process such that our part runs first, then the main module's, then that of its function; give
    ``sys.path`` for the interpreter that reads it, too.

    :param more: descriptor by which those come that a fork server does not take
    """
    pickled = io.BytesIO()
    preparation = worker.preparation(process_obj.name)
    mp_context.set_spawning_popen(popen)
    try:
        # Before those of its arguments, which may be many.
        start = replace(start, report=reduction.DupFd(start.report), lifeline=reduction.DupFd(start.lifeline))
        others = None if more is None else reduction.DupFd(more)
        file = io.BytesIO()
        noting = _NotingPickler(file)
        noting.dump(process_obj)
        # The path alone comes first: this package may be found by it only.
        reduction.dump({"sys_path": preparation["sys_path"]}, pickled)
        count = 0 if more is None else max(0, len(popen._fds) - worker.SENT_AT_ONCE)
        data = bytes(reduction.ForkingPickler.dumps(preparation))
        reduction.dump(_Call(worker.unpacked, start, others, count, data, file.getvalue(), noting.needs_main), pickled)
    finally:
        mp_context.set_spawning_popen(None)
    return pickled.getvalue(), preparation["sys_path"]


class _Call:
    """Is pickled as a call of a function, and unpickled as what that returns."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _NotingPickler(reduction.ForkingPickler):
    """Notes whether a worker has to import the main module to unpickle this.

    What cloudpickle has packed brings the main module's functions and classes along: most workers need not run the
    user's script again, with all that it imports.
    """

    needs_main = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            self.needs_main = True
        return NotImplemented


def _is_child(pid: int) -> bool:
    """Return whether the system still has an exit code of a child, or will have it."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _send(descriptor: int, data: bytes) -> None:
    # A worker that is dead already is found like any other.
    with suppress(BrokenPipeError), open(descriptor, "wb", closefd=False) as file:
        file.write(data)


_close_all = uninterrupted(util.close_fds)  # type: ignore[attr-defined]


def _two_pipes() -> tuple[int, int, int, int]:
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except BaseException:
        _close_all(*first)
        raise


@uninterrupted
def _close_lifeline(writing: int) -> None:
    _lifelines.discard(writing)
    os.close(writing)


@uninterrupted
def _end_report(report: Report) -> None:
    try:
        report.print_if_untaken()
    finally:
        report.close()
