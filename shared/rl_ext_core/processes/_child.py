"""What happens in a worker before and around the function that it runs."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, spawn
from typing import Any, NoReturn

from rl_ext_core._families import kill_own_family, lead_group
from rl_ext_core._system import after_fork
from rl_ext_core.processes._report import Stage, Writer

# How long a worker that ends early may take to close what it has.
CLOSE_S = 3.0
# And then for its exit handlers, and the threads that it waits for.
_EXIT_GRACE_S = 0.25
# Descriptors in one message: Linux takes 253, of which multiprocessing's fork servers need four.
SENT_AT_ONCE = 240
# By which the parent asks a worker to end.
END_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)
# faulthandler's, and those that nobody can handle.
_NOT_RESET = {
    getattr(signal, name, None) for name in ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL", "SIGKILL", "SIGSTOP")
}
_CHAIN_LIMIT = 20

_writer: Writer | None = None
_notes: dict[str, Any] = {}
# Where the parent's main module is, for as long as it was not imported.
OF_MAIN = ("init_main_from_name", "init_main_from_path")
_postponed: dict[str, Any] = {}
_ending = _finished = False
_to_close: list[Callable[[], object]] = []


class _Asked(SystemExit):
    """The parent wants this worker to end."""


class _Failed(BaseException):
    """The cause ends this worker, whoever catches exceptions between here and its function."""


def fail(error: Exception) -> NoReturn:
    """End this worker as if its function had raised an exception; outside of workers, raise it.

    :param error: the exception
    """
    if _writer is None:
        raise error
    raise _Failed from error


def at_end(close: Callable[[], object]) -> None:
    """Have a function called if this worker ends early: by an exception, or because its parent ends it.

    It may take three seconds, with all others. When the worker's function returns it is not called. What it raises
    goes unseen: why the worker ends is known already. Outside of workers nothing happens.

    :param close: closes what would stay behind otherwise, such as an environment's simulator
    """
    if _writer is not None:
        _to_close.append(close)
        _writer.has_to_close()


def note(**values: Any) -> None:
    """Say in a worker what it is at, for the message if it dies, however it dies.

    It takes about two microseconds. ``seed`` and ``phase`` have places of their own in the message. Outside of
    workers nothing happens.

    :param values: numbers, strings and lists of these; anything else arrives as its ``repr``
    """
    _notes.update(values)
    if _writer is not None:
        _writer.write_notes(_notes)


@dataclass(frozen=True)
class Start:
    """What a worker is given by its parent.

    :param report: descriptor of its report
    :param lifeline: reading end of a pipe that the parent never writes to and alone holds open
    :param environ: all of its environment variables
    """

    report: int
    lifeline: int
    environ: dict[str, str]

    def begin(self) -> None:
        """Set the process up; called before anything that is not the standard library's or ours is imported."""
        global _writer
        lead_group()
        _writer = None
        _set_signals()
        _replace_environment(self.environ)
        for descriptor in (self.report, self.lifeline):
            os.set_inheritable(descriptor, False)
        _notes.clear()
        _to_close.clear()
        _writer = Writer(self.report)
        # Straight to the descriptor, from C: fatal signals, and stacks when the parent asks.
        faulthandler.enable(file=self.report, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=self.report, all_threads=True)
        _die_with_parent(self.lifeline)
        _writer.enter(Stage.IMPORTING)
        _end_if_asked()  # before it could hear


def unpack(
    report: Any,
    lifeline: Any,
    more: Any,
    count: int,
    environ: dict[str, str],
    preparation: bytes,
    process: bytes,
    needs_main: bool,
) -> Any:
    """Do what ``multiprocessing.spawn._main`` does to start a process, and report what goes wrong.

    The pickle of a process calls this in place of building the process: everything was read from the parent's pipe
    before it, and all that belongs to the user is unpickled within it.

    :param report: multiprocessing's wrapper of a descriptor
    :param lifeline: another one
    :param more: one of a socket, by which descriptors come that the fork server has not taken
    :param count: of these
    :param environ: all environment variables of the worker
    :param preparation: pickle of multiprocessing's preparation data
    :param process: pickle of the process
    :param needs_main: whether that refers to the main module; if not, it is left to :func:`import_main`
    :return: the process
    """
    Start(report.detach(), lifeline.detach(), environ).begin()
    assert _writer is not None
    try:
        if more is not None:
            _receive(more.detach(), count)
        data = pickle.loads(preparation)
        if not needs_main:
            postpone_main({name: data.pop(name) for name in OF_MAIN if name in data})
        spawn.prepare(data)
    except BaseException as error:
        _end_with(error, unguarded=_is_unguarded(error))
    _writer.enter(Stage.UNPICKLING)
    try:
        return pickle.loads(process)
    except BaseException as error:
        _end_with(error)


def _receive(descriptor: int, count: int) -> None:
    """Append descriptors to those that were inherited, by whose places they are known."""
    with socket.socket(fileno=descriptor) as more:
        while count > 0:
            received = reduction.recvfds(more, min(count, SENT_AT_ONCE))
            forkserver.get_inherited_fds().extend(received)  # type: ignore[union-attr]
            count -= len(received)


def postpone_main(where: Mapping[str, str]) -> None:
    """Leave the parent's main module to :func:`import_main`.

    :param where: it is, of multiprocessing's preparation data
    """
    _postponed.update(where)


def import_main() -> bool:
    """Import the parent's main module into this worker, if that was not needed to start it.

    :return: whether that has just been done: what it registers is there now
    """
    data = dict(_postponed)
    _postponed.clear()
    if not data:
        return False
    current: Any = multiprocessing.current_process()
    # As while multiprocessing imports it: a script without a guard would start workers in here, and these theirs.
    current._inheriting = True
    try:
        spawn.prepare(data)
    finally:
        del current._inheriting
    return True


def reporting(run: Callable[[], object]) -> Callable[[], None]:
    """Wrap a worker's function so that what it raises reaches the parent.

    :param run: what the worker runs
    :return: what it runs instead
    """

    def run_and_report() -> None:
        assert _writer is not None
        global _finished
        _writer.enter(Stage.RUNNING)
        try:
            run()
            _finished = True  # nobody needs to ask any more
        except BaseException as error:
            _end_with(error)

    return run_and_report


def _end_with(error: BaseException, *, unguarded: bool = False) -> NoReturn:
    """End the worker: quietly if the parent knows why, else by the exception, which multiprocessing prints."""
    global _ending
    if isinstance(error, _Failed) and error.__cause__ is not None:
        error = error.__cause__
    asked = isinstance(error, _Asked)
    # There is no report in a process that the worker has forked, and that runs out of the same function.
    if _writer is None or not (asked or _writer.raised(error, time.monotonic(), unguarded=unguarded)):
        raise error
    _ending = True
    # The parent waits for the end of this process. Where it has asked for that, it looks at the clock itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if not asked:
        signal.setitimer(signal.ITIMER_REAL, CLOSE_S)
    while _to_close:
        # An environment that has failed may well fail again when it is closed.
        with suppress(BaseException):
            _to_close.pop()()
    kill_own_family()
    signal.setitimer(signal.ITIMER_REAL, _EXIT_GRACE_S)
    code = error.code if isinstance(error, SystemExit) else 1
    raise SystemExit(code if code is None or isinstance(code, int) else 1) from None


def leave(code: int, *, forked: bool) -> int:
    """End a worker that has reported a failure, without taking the interpreter down.

    That may take a large library half a second. Forked workers never do it.

    :param code: the exit code
    :param forked: by the parent or by a fork server, whose exit handlers are not the worker's: they would close what
        is not open here. From Python 3.13 on, multiprocessing has removed them
    :return: the exit code of a worker without a failure, which ends as multiprocessing has it
    """
    if _ending:
        if not forked or sys.version_info >= (3, 13):
            atexit._run_exitfuncs()
        os._exit(code)
    return code


def _is_unguarded(error: BaseException | None) -> bool:
    """Tell whether processes were started by a main module that is being imported."""
    for _ in range(_CHAIN_LIMIT):
        if isinstance(error, RuntimeError) and "bootstrapping phase" in str(error):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _set_signals() -> None:
    """Leave signals as a fresh process has them: a forked one has its parent's handlers, and those of its libraries.

    What is ignored stays so, as for any program that is started.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - _NOT_RESET:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # A KeyboardInterrupt here would be a second, misleading error. Not ignored, which programs that are started from
    # here would inherit: some are to be ended by it.
    signal.signal(signal.SIGINT, _pass)
    signal.signal(END_SIGNAL, _end_if_asked)
    # Ctrl-C was held back by the parent until now, see _popen; and who knows what a forking thread holds back.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _pass(number: int, frame: object) -> None:
    pass


def _end_if_asked(number: int = 0, frame: object = None) -> None:
    if _writer is not None and not (_ending or _finished) and _writer.is_asked_to_end():
        raise _Asked(1)


def _replace_environment(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _die_with_parent(lifeline: int) -> None:
    """Have this process and its group killed when its parent is gone, even if it hangs in C."""
    import fcntl

    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # The signal is for what happens from now on.
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        if poll.poll(0):
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_after, args=(lifeline,), name="rl_ext_core-lifeline", daemon=True).start()


def _exit_after(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _forget() -> None:
    """In a process that a worker forks: its crashes are not the worker's."""
    global _writer
    if _writer is not None:
        _writer = None
        _to_close.clear()
        signal.signal(END_SIGNAL, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(file=sys.__stderr__) if sys.__stderr__ is not None else faulthandler.disable()


after_fork(_forget)
