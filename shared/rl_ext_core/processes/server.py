"""This package's own fork server, apart from multiprocessing's, which is the user's.

multiprocessing has one fork server per process: what it preloads, and its environment variables, are fixed by whoever
starts it first. This module has another instance of the same class, so that neither disturbs the other. It has imported
the modules of all workers so far. A worker that needs one more, or other values of the variables that these modules
read at import, gets a new server. The old one ends when its last worker has ended.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker, util
from multiprocessing.forkserver import MAXFDS_TO_SEND, ForkServer, read_signed
from typing import Any

from rl_ext_core._import_path import import_path
from rl_ext_core._interrupts import run_pending_handlers, defer_signals
from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.processes.families import create_process_group

__all__ = [
    "GROUP_SIGNALS",
    "UnusableError",
    "start_process",
    "prepare",
    "reset_signals",
    "block_signals",
    "stop_server",
]

_SERVER_GONE = (ChildProcessError, ConnectionError, EOFError, FileNotFoundError)
_POLL_S = 0.05
_UNHANDLED = {getattr(signal, f"SIG{name}", None) for name in ("KILL", "STOP")}
_FATAL = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "FPE", "ABRT", "BUS", "ILL")}
# Signals that end a process by default and that launchers may send to a whole process group, as SLURM's --signal does.
# The others stop it, continue it, or have no effect; SIGINT is treated on its own.
GROUP_SIGNALS = frozenset(
    signal.valid_signals()
    - _UNHANDLED
    - _FATAL
    - {getattr(signal, f"SIG{name}", None) for name in ("INT", "CHLD", "CONT", "TSTP", "TTIN", "TTOU", "URG", "WINCH")}
)


class UnusableError(Exception):
    """The fork server cannot start this process; a spawned one can."""


class _Server(ForkServer):
    """A fork server that ends when it is dropped: workers refer to it until their exit codes were read."""

    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None
    _forkserver_address: Any

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
        super().__init__()
        self.modules, self.variables, self.has_answered = tuple(modules), dict(variables), False
        # Names of modules alone would not do: the server needs its environment and, where this package is not
        # installed, ``sys.path`` before it imports anything.
        self.set_forkserver_preload(
            _PreloadProgram(
                f"import sys\nsys.path[:] = {import_path()!r}\nfrom rl_ext_core.processes import server\n"
                f"server.prepare({list(modules)!r}, {dict(variables)!r})"
            )
        )
        _servers.add(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.end()

    def end(self) -> None:
        """Kill the server, and so its workers. Closing its pipe would not do: they hold that as well."""
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
        """Leave the server to the process that has started it."""
        descriptor, self._forkserver_alive_fd = self._forkserver_alive_fd, None
        self._forkserver_pid = self._forkserver_address = None
        if descriptor is not None:
            os.close(descriptor)


class _PreloadProgram(list[str]):
    """An empty list of modules to preload whose ``repr``, which multiprocessing writes into the command line of the
    server, is an expression that first runs a program.
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
    """Have the fork server start a process; start or replace the server if needed.

    :param modules: what the server should have imported
    :param variables: what these modules read at import; None is unset
    :param descriptors: for the new process
    :return: descriptors to read its exit code from and to write its pickle to; its number; and the server, which the
        caller keeps until it has read the exit code
    :raises UnusableError: If the server cannot start, dies, or takes fewer descriptors
    """
    global _server
    if len(descriptors) + 4 >= MAXFDS_TO_SEND:
        raise UnusableError(f"a fork server does not take {len(descriptors)} descriptors")
    with _lock:
        if _server is not None and _has_ended(_server._forkserver_pid):
            _end_server()
        if _server is None or not {*modules} <= {*_server.modules} or variables != _server.variables:
            _server = _Server([*dict.fromkeys([*(_server.modules if _server else ()), *modules])], variables)
        try:
            return *_request_process(_server, descriptors), _server
        except BaseException as error:
            # Interrupted while the server imports, after which it would start that process; or a module ends it.
            if not _server.has_answered:
                _end_server()
            # The socket is in the folder for temporary files. Other errors are the caller's: too few descriptors.
            if isinstance(error, _SERVER_GONE) or "path too long" in str(error):
                raise UnusableError(str(error) or repr(error)) from error
            raise


def _request_process(server: _Server, descriptors: Sequence[int]) -> tuple[int, int, int]:
    # A socket and two pipes: the server, and so its workers, would die of half a request.
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
            run_pending_handlers()  # Ctrl-C, while it imports
        pid = read_signed(status)
    except BaseException:
        util.close_fds(status, data)  # type: ignore[attr-defined]
        raise
    server.has_answered = True
    return status, data, pid


@contextmanager
def block_signals() -> Iterator[None]:
    """Hold Ctrl-C and signals to the process group back from the processes that are started meanwhile.

    They stay blocked there until :func:`reset_signals`, or for good in processes of multiprocessing's own.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
    try:
        # Here, because its start unblocks SIGINT, and because a worker that had to start it would take it with it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_signals() -> None:
    """Handle signals as a new program does, in a process that leads its group; drop those that came before.

    A forked process has its parent's handlers, and those of its libraries. What is ignored stays so, as for any program
    that is started, except SIGCHLD: environments could not read the exit codes of the processes that they start.
    """
    signal.set_wakeup_fd(-1)
    faulthandler.disable()  # it would go on to the handlers that libraries set before, as pygame does
    for number in signal.valid_signals() - _UNHANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN or number == getattr(signal, "SIGCHLD", None):
            with suppress(OSError):
                # Until this process led its group, signals were meant for the parent: to ignore one drops it.
                if number in GROUP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                signal.signal(number, signal.SIG_DFL)
    # A KeyboardInterrupt here would be a second, misleading error. Not ignored, which programs that are started from
    # here would inherit: some are to be ended by it.
    signal.signal(signal.SIGINT, _ignore_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ignore_signal(number: int, frame: object) -> None:
    pass


def _has_ended(pid: int | None) -> bool:
    try:
        return pid is not None and os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # SIGCHLD is ignored, or another part of this process has waited for it
        return True


def _end_server() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.end()


@defer_signals
def stop_server() -> None:
    """End the fork server; the next process that needs one starts it again. Its workers end with it."""
    with _lock:
        _end_server()


def prepare(modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """In a fork server: leave the parent's process group, set variables, and import modules, which workers share.

    A module that fails to be imported is left to the workers, which report it.
    """
    create_process_group()
    reset_signals()
    set_variables(variables)
    # Collections would look at all that the imports make, again and again, and find nothing: a tenth of their time.
    gc.disable()
    # What every worker is made of comes first: without it here, each would import it for itself.
    for module in ("rl_ext_core.processes.context", *modules):
        with suppress(BaseException):  # an import may call sys.exit; the server has other modules to import
            importlib.import_module(module)
    gc.collect()
    # A collection in a worker would write to every object that it looks at, and so copy every page.
    gc.freeze()
    gc.enable()


def _disown_servers() -> None:
    """In a forked child: the servers are the parent's, and must end with it even if this child lives on."""
    global _server, _lock
    for server in list(_servers):
        server.disown()
    _lock, _server = threading.Lock(), None


after_fork(_disown_servers)
