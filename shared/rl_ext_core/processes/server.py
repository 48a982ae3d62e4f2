"""Fork server of this package, separate from multiprocessing's.

multiprocessing has one fork server per process. Its first use fixes its preloaded modules and its environment
variables. This module has a second instance of the same class, so that user code can use the first one.

The server has imported the modules of all workers so far. It is replaced if a worker needs another module, or other
values of the variables that these modules read at import. The old server ends when its last worker has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker, util
from multiprocessing.forkserver import MAXFDS_TO_SEND, ForkServer, read_signed
from typing import Any

from rl_ext_core._import_path import import_path
from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.processes.process_groups import create_process_group

_SERVER_GONE = (ChildProcessError, ConnectionError, EOFError, FileNotFoundError)
_POLL_S = 0.05
_UNHANDLED = {getattr(signal, f"SIG{name}", None) for name in ("KILL", "STOP")}
_FATAL = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "FPE", "ABRT", "BUS", "ILL")}
# Signals that end a process by default, and that launchers may send to a process group, as SLURM's --signal does. The
# other signals stop or continue a process, or have no effect. SIGINT is handled separately.
GROUP_SIGNALS = frozenset(
    signal.valid_signals()
    - _UNHANDLED
    - _FATAL
    - {getattr(signal, f"SIG{name}", None) for name in ("INT", "CHLD", "CONT", "TSTP", "TTIN", "TTOU", "URG", "WINCH")}
)


class UnusableError(Exception):
    """The fork server cannot start this process. The caller spawns it instead."""


class _Server(ForkServer):
    """Fork server that is killed with its workers when nothing refers to it. Workers refer to it."""

    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None
    _forkserver_address: Any

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
        super().__init__()
        self.modules, self.variables, self.has_answered = tuple(modules), dict(variables), False
        # A list of names is not enough: before its first import, the server needs its environment variables and, if
        # this package is not installed, ``sys.path``.
        self.set_forkserver_preload(
            _PreloadProgram(
                f"import sys\nsys.path[:] = {import_path()!r}\nfrom rl_ext_core.processes import server\n"
                f"server.prepare({list(modules)!r}, {dict(variables)!r})"
            )
        )
        _servers.add(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An argument, because the interpreter may have cleared the globals of this module.
        if not is_finalizing():
            self.end()

    def end(self) -> None:
        """Kill the server and its workers.

        Closing its pipe is not enough, because the workers have it open too.
        """
        pid, address = self._forkserver_pid, self._forkserver_address
        self.disown()
        if pid is not None and not _has_ended(pid):
            os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if address is not None and not util.is_abstract_socket_namespace(address):
            with suppress(FileNotFoundError):
                os.unlink(address)

    def disown(self) -> None:
        """Close this process's handles of the server, without ending the server."""
        descriptor, self._forkserver_alive_fd = self._forkserver_alive_fd, None
        self._forkserver_pid = self._forkserver_address = None
        if descriptor is not None:
            os.close(descriptor)


class _PreloadProgram(list[str]):
    """Empty list of modules to preload, whose ``repr`` runs a program.

    multiprocessing writes this ``repr`` into the command line of the server.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def __repr__(self) -> str:
        return f"(exec({self._source!r}), [])[1]"


_server: _Server | None = None
_servers: weakref.WeakSet[_Server] = weakref.WeakSet()
_lock = threading.Lock()


def start_process(
    modules: Sequence[str], variables: Mapping[str, str | None], descriptors: Sequence[int]
) -> tuple[int, int, int, object]:
    """Start a process by the fork server. Start or replace the server if needed.

    :param modules: modules that the server must have imported
    :param variables: environment variables that these modules read at import; None for unset
    :param descriptors: file descriptors for the new process
    :return: descriptor for reading the exit code, descriptor for writing the pickled process, process number, and the
        server. The caller keeps the server until it has read the exit code
    :raises UnusableError: If the server cannot start, dies, or accepts fewer descriptors.
    """
    global _server
    if len(descriptors) + 4 >= MAXFDS_TO_SEND:
        raise UnusableError(f"a fork server does not accept {len(descriptors)} descriptors")
    with _lock:
        if _server is not None and _has_ended(_server._forkserver_pid):
            _end_server()
        if _server is None or not {*modules} <= {*_server.modules} or variables != _server.variables:
            _server = _Server([*dict.fromkeys([*(_server.modules if _server else ()), *modules])], variables)
        try:
            return *_request_process(_server, descriptors), _server
        except BaseException as error:
            # A module may have ended the server. After an interrupt of its imports, it would still start the process.
            if not _server.has_answered:
                _end_server()
            # The socket is in the folder for temporary files, whose path may be too long. Other errors, such as too few
            # descriptors, concern the caller.
            if isinstance(error, _SERVER_GONE) or "path too long" in str(error):
                raise UnusableError(str(error) or repr(error)) from error
            raise


def _request_process(server: _Server, descriptors: Sequence[int]) -> tuple[int, int, int]:
    """Ask the fork server for a process; return file descriptors of its pipes, and its pid."""
    # Reserve descriptors for a socket and two pipes. An incomplete request would end the server and its workers.
    opened: list[int] = []
    try:
        for _ in range(5):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        util.close_fds(*opened)  # type: ignore[attr-defined]
    with block_signals():
        server.ensure_running()
    status, data = server.connect_to_new_process(descriptors)
    try:
        while not server.has_answered and not connection.wait([status], _POLL_S):
            run_pending_handlers()  # for Ctrl-C, while the server imports modules
        pid = read_signed(status)
    except BaseException:
        util.close_fds(status, data)  # type: ignore[attr-defined]
        raise
    server.has_answered = True
    return status, data, pid


@contextmanager
def block_signals() -> Iterator[None]:
    """Block Ctrl-C and group signals in processes that the ``with`` block starts.

    They stay blocked in such a process until :func:`reset_signals`; in multiprocessing's own processes, until the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
    try:
        # Start the tracker now: its start unblocks SIGINT, and a tracker started by a worker would end with it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_signals() -> None:
    """Restore the default signal handlers, and drop pending signals to the group.

    A forked process inherits the handlers of its parent and its libraries. Ignored signals stay ignored, as in every
    new program. SIGCHLD is an exception: while it is ignored, environments cannot read exit codes of processes.
    """
    signal.set_wakeup_fd(-1)
    faulthandler.disable()  # it would call the handlers that libraries such as pygame have installed
    for number in signal.valid_signals() - _UNHANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN or number == getattr(signal, "SIGCHLD", None):
            with suppress(OSError):
                # Ignoring a signal drops it if it is pending. It was sent to the parent's group.
                if number in GROUP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                signal.signal(number, signal.SIG_DFL)
    # A KeyboardInterrupt in a worker would be a second, misleading error. SIG_IGN would be inherited by programs that
    # the worker starts, which may need SIGINT.
    signal.signal(signal.SIGINT, _ignore_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ignore_signal(number: int, frame: object) -> None:
    pass


def _has_ended(pid: int | None) -> bool:
    """Return whether a child process has ended; False for None."""
    try:
        return pid is not None and os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # SIGCHLD is ignored, or another part of this process has waited for the server
        return True


def _end_server() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.end()


@defer_signals
def stop_server() -> None:
    """End the fork server and its workers. The next worker starts a new server."""
    with _lock:
        _end_server()


def prepare(modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Set up a new fork server: its process group, variables and preloaded modules."""
    create_process_group()
    reset_signals()
    set_variables(variables)
    # Garbage collections during the imports would take a tenth of their time and find nothing.
    gc.disable()
    # All workers need this package's module. Without it here, each worker would import it.
    import_modules(["rl_ext_core.processes.context", *modules])
    gc.collect()
    # A collection in a worker would write to all objects, and so copy all pages that workers share.
    gc.freeze()
    gc.enable()


def import_modules(names: Sequence[str]) -> None:
    """Import modules before workers are forked from this process.

    A module that cannot be imported is skipped. The worker that imports it reports the error.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:  # of the process that forks its workers
            raise
        except BaseException:  # an import may call sys.exit, but the other modules must be imported
            continue


def _disown_servers() -> None:
    """Drop the parent's servers in a forked process, because they must end with the parent."""
    global _server, _lock
    for server in list(_servers):
        server.disown()
    _lock, _server = threading.Lock(), None


after_fork(_disown_servers)
