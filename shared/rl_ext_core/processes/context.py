"""multiprocessing contexts whose processes are workers.

Workers start by multiprocessing's ``spawn`` or ``fork``, or by a second instance of its fork server (see ``server``).
They differ from multiprocessing's processes:

- All environment variables are set before the worker imports user code.
- The main module is imported only if the worker's function refers to it.
- The worker ends with its parent.
"""

from __future__ import annotations

import gc
import io
import itertools
import logging
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
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
from rl_ext_core._system import IMPORT_TIME_VARIABLES, after_fork, picklable_descriptor
from rl_ext_core.errors import InvalidArgumentError, StorageError
from rl_ext_core.processes import server
from rl_ext_core.processes.process_groups import kill_process_trees
from rl_ext_core.processes.report import WorkerReport
from rl_ext_core.processes.worker import WorkerStart, finish_worker

if sys.platform == "win32":
    from multiprocessing import popen_spawn_win32
else:
    from multiprocessing import forkserver, popen_fork, popen_forkserver, popen_spawn_posix

_log = logging.getLogger("rl_ext_core.processes")

# multiprocessing's exit code for a process whose fork server has died. Here it stands for every unknown exit code.
_UNKNOWN_EXIT_CODE = 255
_UNREPORTED_REASON = (
    "this process ignores SIGCHLD, or another part of it has waited for the worker. Use "
    "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before the workers start"
)
_POLL_S = 0.1
# The fork server exists on macOS too, but macOS's libraries do not support forked processes.
_DEFAULT = "forkserver" if hasattr(os, "memfd_create") else "spawn"
# Keys of the main module's location in multiprocessing's preparation data.
_MAIN_MODULE_KEYS = ("init_main_from_name", "init_main_from_path")
# Attributes of the process object that are sent to the worker, next to its start data.
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

# Writing ends of all lifelines. A forked child closes them: an open one would hide the end of the parent from workers.
_lifelines: set[int] = set()


def _drop_parent_workers() -> None:
    while _lifelines:
        os.close(_lifelines.pop())
    # multiprocessing would terminate and join its children when this process ends.
    children: set[Any] = mp_process._children  # type: ignore[attr-defined]
    children.difference_update([child for child in children if isinstance(child, Worker)])


after_fork(_drop_parent_workers)


class Worker(BaseProcess):
    """Process that reports to its parent and ends with it; created by :class:`WorkerContext`.

    :ivar worker: number of the process in its context, from 0
    :ivar report: the worker's report
    """

    worker: int
    report: WorkerReport
    _modules: Sequence[str]
    _environ: Mapping[str, str | None]
    _main: Mapping[str, Any]
    _worker_start: WorkerStart
    _lifeline: Any = None
    _job: Any = None

    @property
    def popen(self) -> Any:
        """Multiprocessing's handle of the started process; None before the start."""
        return vars(self)["_popen"]

    def start(self) -> None:
        """Start the process. If the start is interrupted, kill it.

        Daemonic processes, such as the workers of ``multiprocessing.Pool``, may start workers too.
        """
        assert vars(self)["_popen"] is None, "a process is started only once"
        try:
            self._launch()
        except BaseException:
            if self.popen is not None:
                self.kill()
                self.join()
            elif self._lifeline is not None:
                self._lifeline()
            raise

    @defer_signals
    def _launch(self) -> None:
        """Create the report and the lifeline, then start the process."""
        config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        daemon = {name: config.pop(name) for name in ("daemon",) if name in config}
        self.report, reading = WorkerReport(), None
        try:
            if not _system.WINDOWS:
                reading, writing = os.pipe()
                _lifelines.add(writing)
                # At exit the kernel closes the lifeline, after the wait for the children.
                self._lifeline = util.Finalize(self, _close_lifeline, (writing,))
            environ = {name: value for name, value in {**os.environ, **self._environ}.items() if value is not None}
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
        """Start the process by its start method. If the fork server fails, spawn it."""
        if process._start_method == "fork":
            server.import_modules(process._modules)
            return _ForkPopen(process)
        if process._start_method == "forkserver":
            try:
                return _ForkServerPopen(process)
            except server.UnusableError as error:
                _log.info("%s is spawned: %s", process.name, error)
                process._start_method = "spawn"
        return _SpawnPopen(process)

    def kill(self) -> None:
        """Kill the process, and the processes that it has started."""
        kill_workers([self])

    terminate = kill

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.exitcode is None:
            os.kill(self.pid or 0, number)

    def __getstate__(self) -> dict[str, Any]:
        # The function is pickled separately, so that no user code is unpickled before the worker is set up.
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
        """Return the function that the process calls, with its arguments."""
        return self._target, self._args, self._kwargs  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run the function, in the worker. multiprocessing calls this method."""
        begin = self._worker_start
        if begin.function is None:  # the worker is forked
            gc.freeze()  # a collection would write to all objects of the parent, and so copy their memory
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
    """Kill started workers and their child processes, also those of workers that have ended."""
    if _system.WINDOWS:
        for process in workers:
            process._job.end()
    else:
        living = [process.pid or 0 for process in workers if process.popen.poll() is None]
        kill_process_trees(living, [process.pid or 0 for process in workers])


class _MainModulePickler(reduction.ForkingPickler):
    """Pickler that detects whether unpickling the data requires the main module.

    cloudpickle pickles functions and classes of the main module by value. So most workers need not run the user's
    script again.
    """

    needs_main = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            self.needs_main = True
        return NotImplemented


_original_preparation_data = spawn.get_preparation_data
_spawning = threading.local()


def _get_preparation_data(name: str) -> dict[str, Any]:
    """Return multiprocessing's preparation data, for workers without the main module.

    Workers get the location of the main module separately.
    """
    process = getattr(_spawning, "process", None)
    chosen = multiprocessing.get_start_method(allow_none=True)
    try:
        data: dict[str, Any] = _original_preparation_data(name)
    except FileNotFoundError as error:
        raise StorageError(
            "the working directory was deleted, expected an existing one for new processes. Change to another one first"
        ) from error
    finally:
        if process is not None and not chosen:
            # Reading the default has fixed it. Without this reset, the user could not set a start method.
            multiprocessing.set_start_method(None, force=True)
    if process is None:
        return data
    process._main = {name: data.pop(name) for name in _MAIN_MODULE_KEYS if name in data}
    return {**data, "sys_path": import_path()}


# multiprocessing has no hook for the data of spawned processes. It spawns its own processes as before.
spawn.get_preparation_data = _get_preparation_data


@contextmanager
def _worker_preparation(process: Any) -> Iterator[None]:
    """Send this package's preparation data to the process spawned in the ``with`` block."""
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
                    raise  # if it has a pid, the worker has died already, which the watch reports

else:

    class _ExitCodePopen(popen_fork.Popen):
        """Popen that several threads can poll, and that tolerates missing exit codes."""

        unknown_reason = ""  # why the exit code is unknown
        sentinel: int
        pid: int
        _fds: list[int]

        def __init__(self, process: Any) -> None:
            self._polling = threading.Lock()
            super().__init__(process)

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            """Return the exit code; None while the process runs."""
            while (code := self._poll_once()) is None and flag != os.WNOHANG:
                # If the sentinel is a pipe, a process that the worker has forked may keep it open.
                connection.wait([self.sentinel], _POLL_S)
            return code

        @defer_signals  # an interrupt could leave the lock locked
        def _poll_once(self) -> int | None:
            """Return the exit code, None while the process runs; one thread at a time."""
            with self._polling:
                if self.returncode is None:
                    self._read_exit_code()
                code: int | None = self.returncode
                return code

        def _read_exit_code(self) -> None:
            """Set the exit code if the process has ended; set a substitute if it is unknown."""
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode, self.unknown_reason = _UNKNOWN_EXIT_CODE, _UNREPORTED_REASON
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None

        def _watch_process(self) -> None:
            """Replace the pipe in ``sentinel`` by a pidfd, because forked children keep a pipe open."""
            with suppress(AttributeError, OSError):  # macOS and old Linux kernels have no pidfd
                self.sentinel = os.pidfd_open(self.pid)
                util.Finalize(self, os.close, (self.sentinel,))

    class _ForkPopen(_ExitCodePopen):
        def _launch(self, process: Any) -> None:
            with server.block_signals():
                super()._launch(process)  # type: ignore[misc]
            self._watch_process()

    class _SpawnPopen(_ExitCodePopen, popen_spawn_posix.Popen):
        def _launch(self, process: Any) -> None:
            # BrokenPipeError means that the worker has died already, which the watch reports.
            with server.block_signals(), _worker_preparation(process), suppress(BrokenPipeError):
                super()._launch(process)  # type: ignore[misc]
            self._watch_process()

    class _ForkServerPopen(_ExitCodePopen, popen_forkserver.Popen):
        def _launch(self, process: Any) -> None:
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
            # The other end of this pipe is the worker's sentinel of its parent, so this end stays open.
            self.finalizer = util.Finalize(self, util.close_fds, (writing, self.sentinel))  # type: ignore[attr-defined]
            with suppress(BrokenPipeError), open(writing, "wb", closefd=False) as file:
                file.write(data.getbuffer())

        def _read_exit_code(self) -> None:
            """Set the exit code that the fork server reports; kill the worker if the server died."""
            if connection.wait([self.sentinel], 0):
                try:
                    self.returncode = forkserver.read_signed(self.sentinel)
                except (OSError, EOFError):
                    # The worker may still run without a parent that waits for it, and its pid may be reused.
                    kill_process_trees([self.pid])
                    self.returncode, self.unknown_reason = (
                        _UNKNOWN_EXIT_CODE,
                        "the fork server that started it was killed",
                    )
                self._server = None


@dataclass(eq=False)
class WorkerContext(mp_context.BaseContext):
    """multiprocessing context whose processes are workers. :func:`get_context` creates it."""

    _name: str
    preload: Sequence[str]
    environs: Sequence[Mapping[str, str | None]] | None
    label: str
    _count: Iterator[int] = field(default_factory=itertools.count)

    def Process(self, *arguments: Any, **options: Any) -> Worker:  # noqa: N802 multiprocessing's name
        """Create a worker, with the arguments of ``multiprocessing.Process``."""
        number = next(self._count)
        process = Worker(*arguments, **{"name": f"{self.label}-{number}", **options})
        process.worker, process._start_method = number, self._name  # type: ignore[attr-defined]
        process._modules, process._environ = self.preload, {} if self.environs is None else self.environs[number]
        return process


def get_context(
    method: str | None = None,
    *,
    preload: Sequence[str] = (),
    environs: Sequence[Mapping[str, str | None]] | None = None,
    label: str = "worker",
) -> WorkerContext:
    """Create a multiprocessing context whose processes are workers.

    Workers get the parent's environment variables of the moment when they start, before user code is imported. They
    have the default signal handlers. Each worker leads its own process group and ignores Ctrl-C. If the parent dies,
    even by SIGKILL, each worker is killed together with the processes that it has started. Failures are reported to a
    :class:`Watch`, or printed if there is none.

    The dynamic linker and the interpreter read some variables at their start, such as ``LD_LIBRARY_PATH`` and
    ``PYTHONHASHSEED``. Changes of these by ``environs`` have no effect.

    :param method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; default: ``"forkserver"`` on Linux, else ``"spawn"``
    :param preload: names of modules that the fork server imports once for all workers; with ``"fork"``, this process
        does. Their import must not start threads or change global state. ``"spawn"`` ignores this parameter
    :param environs: environment variables to set, one mapping per process in the order of creation; a value of None
        unsets the variable
    :param label: name of the workers, for process names and messages
    :return: the context, with ``Process``, ``Pipe`` and so on. Its processes have their number as ``worker``
    :raises InvalidArgumentError: If this system does not support the method.

    >>> from rl_ext_core.processes import get_context
    >>> process = get_context(environs=[{"OMP_NUM_THREADS": "1"}]).Process(target=sum, args=([1, 2],))
    >>> process.start()
    >>> process.join()
    >>> process.exitcode
    0
    """
    available = multiprocessing.get_all_start_methods()
    method = _DEFAULT if method is None else method
    if method not in available:
        raise InvalidArgumentError(
            f"method={method!r} does not start processes here; expected one of {', '.join(available)}. "
            f'Use method="{_DEFAULT}"'
        )
    return WorkerContext(method, tuple(preload), environs, label)
