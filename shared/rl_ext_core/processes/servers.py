"""Fork servers of our own, one for each set of preloaded modules and of variables that these read at import.

multiprocessing has one fork server per process: what it preloads is fixed by whoever starts it first, and it keeps the
environment of that moment. These are instances of the same class, so that what changes between Python versions (3.14
has client and server prove to each other that they know a key) is on both sides the standard library's.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from multiprocessing.forkserver import ForkServer, read_signed
from typing import Any, TypeVar

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.failures import ending
from rl_ext_core.processes.worker import GROUP_SIGNALS

_log = logging.getLogger("rl_ext_core.processes")

_F = TypeVar("_F", bound=Callable[..., Any])
_Key = tuple[tuple[str, ...], tuple[tuple[str, str | None], ...]]

# After the children were joined, before multiprocessing removes the folder of the servers' sockets (-100).
_EXIT_PRIORITY = -50
_DIED = (ChildProcessError, ConnectionError, EOFError, FileNotFoundError)
# How long a server whose pipes are closed may take to end.
_ENDS_WITHIN_S = 0.2


class _Server(ForkServer):
    exitcode: int | None = None  # None: it runs, or the system has not reported it to this process


_servers: dict[_Key, _Server] = {}
# Those that have answered.
_served: set[_Key] = set()
_lock = threading.Lock()
_at_exit: util.Finalize | None = None


class _Program(list[str]):
    """A list of modules to preload that is empty, and whose ``repr`` is an expression that first runs a program.

    multiprocessing writes the ``repr`` into the command line of the server. Names of modules alone would not do: the
    server needs its environment and, where this package is not installed, ``sys.path`` before it imports anything.
    """

    def __init__(self, key: _Key, sys_path: Sequence[str]) -> None:
        super().__init__()
        self._source = (
            f"import sys\nsys.path[:] = {[str(path) for path in sys_path]!r}\n"
            "from rl_ext_core.processes import servers\n"
            "servers.leave_signals_to_parent()\n"
            f"servers.preload_modules({list(key[0])!r}, {dict(key[1])!r})"
        )

    def __repr__(self) -> str:
        return f"(exec({self._source!r}), [])[1]"


def connect(
    preload: Sequence[str],
    variables: Mapping[str, str | None],
    sys_path: Sequence[str],
    fds: Sequence[int],
    accept: Callable[[int, int, int], None],
) -> _Server:
    """Have a fork server start a process; start the server if there is none.

    :param preload: modules that the server has imported
    :param variables: what they read at import; None is unset
    :param fds: descriptors for the new process
    :param accept: called with descriptors to read its exit code from and to write its pickle to, and its id
    :return: the server, for :func:`end_of`
    :raises WorkerError: the server dies whenever it is started
    """
    key = (tuple(preload), tuple(variables.items()))
    last_try = False
    while True:
        server = _running(key, sys_path)
        try:
            # It answers at once when it has answered before; a worker that nobody talks to would complain.
            ask = uninterrupted(_ask) if key in _served else _ask
            ask(server, fds, accept)
            _served.add(key)
            return server
        except _DIED as error:
            how = end_of(server)
            _drop(key)
            code = server.exitcode
            if last_try:
                raise WorkerError(
                    f"the fork server of the workers {how} while it imported {list(preload)}: "
                    "leave out of preload what cannot be imported, or write preload=()",
                    kind="start",
                    exitcode=code,
                ) from error
            last_try = True
        except BaseException:
            if key not in _served:
                # Interrupted while it imports, after which it would start that worker.
                _drop(key)
            raise


@uninterrupted
def end_of(server: Any) -> str:
    """Return how a server has ended, as the end of a sentence."""
    until = time.monotonic() + _ENDS_WITHIN_S
    while True:
        with _lock:
            if server._forkserver_pid is None or _has_died(server) or time.monotonic() > until:
                return ending(server.exitcode)
        time.sleep(0.001)


def _ask(server: ForkServer, fds: Sequence[int], accept: Callable[[int, int, int], None]) -> None:
    try_to_open(1 + 4)  # a socket and two pipes: the server, and so its workers, would die of half a request
    status, data = server.connect_to_new_process(fds)
    try:
        pid = read_signed(status)
    except BaseException:
        os.close(status)
        os.close(data)
        raise
    accept(status, data, pid)


@uninterrupted
def try_to_open(count: int) -> None:
    """Open so many descriptors and close them: where they are too few, multiprocessing leaves open what it has opened.

    :raises OSError: there are too few
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        util.close_fds(*opened)  # type: ignore[attr-defined]


@uninterrupted
def _running(key: _Key, sys_path: Sequence[str]) -> _Server:
    global _at_exit
    with _lock:
        if _at_exit is None:
            _at_exit = util.Finalize(None, stop_servers, exitpriority=_EXIT_PRIORITY)
        server = _servers.get(key)
        if server is None or _has_died(server):
            if server is not None:
                _stop(server)
            _served.discard(key)
            server = _servers[key] = _Server()
            server.set_forkserver_preload(_Program(key, sys_path))
        # Signals are held back from it for good, except those that it handles.
        signals_held(resource_tracker.ensure_running)()
        with _short_enough():
            signals_held(server.ensure_running)()
        return server


@contextmanager
def _short_enough() -> Iterator[None]:
    """Say which variable makes the name of a server's socket too long."""
    try:
        yield
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise WorkerError(
            f"the folder for temporary files is {folder!r}, whose {len(os.fsencode(folder))} bytes leave too few for a "
            "socket's name; write export TMPDIR=/tmp before the program starts",
            kind="start",
        ) from error


def signals_held(start: _F) -> _F:
    """Hold Ctrl-C and other signals to the process group back from the process that a function starts, until that
    process has set what to do with them, and hold Ctrl-C back from the function.

    A mask does the former, and not the latter: other threads take the signal, which interrupts the main one.
    """

    @uninterrupted
    @functools.wraps(start)
    def held(*args: Any, **kwargs: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
        try:
            return start(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return held  # type: ignore[return-value]


@uninterrupted
def _drop(key: _Key) -> None:
    with _lock:
        _served.discard(key)
        server = _servers.pop(key, None)
        if server is not None:
            _stop(server)


@uninterrupted
def stop_servers() -> None:
    """End all servers; the next process that needs one starts a new one.

    Workers that come from them go on, but what their exit codes are is not known any more.
    """
    global _at_exit
    with _lock:
        while _servers:
            _stop(_servers.popitem()[1])
        _served.clear()
        if _at_exit is not None:
            _at_exit.cancel()
            _at_exit = None


def _has_died(server: Any) -> bool:
    """Return whether a server has ended, and record its exit code if the system reports it."""
    if server.exitcode is not None:
        return True
    if server._forkserver_pid is None:
        return False
    try:
        pid, status = os.waitpid(server._forkserver_pid, os.WNOHANG)
    except ChildProcessError:  # SIGCHLD is ignored, or another part of this process has waited for it
        return True
    if pid:
        server.exitcode = os.waitstatus_to_exitcode(status)
    return pid != 0


def _stop(server: Any) -> None:
    """End a server."""
    if server._forkserver_pid is None:
        return
    if not _has_died(server):
        # Closing the pipe that it listens to would not do: its workers hold it too, and what they have forked.
        os.kill(server._forkserver_pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            server.exitcode = os.waitstatus_to_exitcode(os.waitpid(server._forkserver_pid, 0)[1])
    os.close(server._forkserver_alive_fd)
    if not util.is_abstract_socket_namespace(server._forkserver_address):
        with suppress(FileNotFoundError):
            os.unlink(server._forkserver_address)
    server._forkserver_pid = None


_defaults: dict[int, Any] = {}


def leave_signals_to_parent() -> None:
    """Survive, in a fork server, the signals that are sent to the process group: the parent handles them or dies of
    them, and then the server ends as well.
    """
    for number in GROUP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            # Not ignored, which workers would inherit.
            _defaults[number] = signal.signal(number, _pass)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_signals)


def _pass(number: int, frame: object) -> None:
    pass


def _block_signals() -> None:
    if _defaults:  # else this is a worker, which has these hooks as well
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)


def _unblock_signals() -> None:
    if _defaults:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _restore_signals() -> None:
    """In a new worker: signals stay blocked until it has left the parent's process group."""
    while _defaults:
        signal.signal(*_defaults.popitem())


def preload_modules(modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Set variables and import modules before others are forked from here, which share them; what fails to be imported
    is left to those, which report it.
    """
    # Ctrl-C in the terminal is the parent's affair. Held back by the parent until now.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    set_variables(variables)
    # Collections would look at all that the imports make, again and again, and find nothing: a tenth of their time.
    gc.disable()
    # What every worker is made of comes first: without it here, each would import it for itself.
    for module in ("rl_ext_core.processes.contexts", *modules):
        before = threading.active_count()
        try:
            importlib.import_module(module)
        except BaseException as error:  # an import may call sys.exit; the server has other modules to serve
            _log.debug("preloading %s failed: %r", module, error)
        if threading.active_count() > before:
            names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            _log.warning(
                "importing %s starts threads (%s), which do not exist in workers forked from here: leave it out of "
                "preload",
                module,
                ", ".join(names),
            )
    gc.collect()
    # A collection in a worker would write to every object that it looks at, and so copy every page.
    gc.freeze()
    gc.enable()


def _forget() -> None:
    """In a forked child: the servers are the parent's, and must end with it even if this child lives on."""
    global _lock, _at_exit
    _lock = threading.Lock()
    _at_exit = None
    servers: list[Any] = list(_servers.values())
    for server in servers:
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
    _servers.clear()
    _served.clear()


after_fork(_forget)
