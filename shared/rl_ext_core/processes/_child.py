"""What happens in a worker before and around the function that it runs."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, NoReturn

from rl_ext_core.processes._report import Stage, Writer

_EXIT_GRACE_S = 0.25
_CHAIN_LIMIT = 20

_writer: Writer | None = None
_notes: dict[str, Any] = {}
# Where the parent's main module is, for as long as it was not imported.
_OF_MAIN = ("init_main_from_name", "init_main_from_path")
_postponed: dict[str, Any] = {}
_ending = False


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
        # Ctrl-C reaches the whole process group. It is for the parent, which ends its workers: a KeyboardInterrupt
        # here would be a second, misleading error. Held back by the parent until now, see _popen.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _replace_environment(self.environ)
        for descriptor in (self.report, self.lifeline):
            os.set_inheritable(descriptor, False)
        _notes.clear()
        _writer = Writer(self.report)
        # Straight to the descriptor, from C: fatal signals, and stacks when the parent asks.
        faulthandler.enable(file=self.report, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=self.report, all_threads=True)
        _die_with_parent(self.lifeline)
        _writer.enter(Stage.IMPORTING)


def unpack(
    report: Any, lifeline: Any, environ: dict[str, str], preparation: bytes, process: bytes, needs_main: bool
) -> Any:
    """Do what ``multiprocessing.spawn._main`` does to start a process, and report what goes wrong.

    The pickle of a process calls this in place of building the process: everything was read from the parent's pipe
    before it, and all that belongs to the user is unpickled within it.

    :param report: multiprocessing's wrapper of a descriptor
    :param lifeline: another one
    :param environ: all environment variables of the worker
    :param preparation: pickle of multiprocessing's preparation data
    :param process: pickle of the process
    :param needs_main: whether that refers to the main module; if not, it is left to :func:`import_main`
    :return: the process
    """
    Start(report.detach(), lifeline.detach(), environ).begin()
    assert _writer is not None
    try:
        data = pickle.loads(preparation)
        if not needs_main:
            _postponed.update({name: data.pop(name) for name in _OF_MAIN if name in data})
        spawn.prepare(data)
    except BaseException as error:
        _end_with(error, unguarded=_is_unguarded(error))
    _writer.enter(Stage.UNPICKLING)
    try:
        return pickle.loads(process)
    except BaseException as error:
        _end_with(error)


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
        _writer.enter(Stage.RUNNING)
        try:
            run()
        except BaseException as error:
            _end_with(error)

    return run_and_report


def _end_with(error: BaseException, *, unguarded: bool = False) -> NoReturn:
    """End the worker: quietly if the parent knows why, else by the exception, which multiprocessing prints."""
    global _ending
    # There is no report in a process that the worker has forked, and that runs out of the same function.
    if _writer is None or not _writer.raised(error, time.monotonic(), unguarded=unguarded):
        raise error
    # Threads that are waited for, and exit handlers, get a moment: the parent waits for the end of this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _EXIT_GRACE_S)
    _ending = True
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


def _replace_environment(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _die_with_parent(lifeline: int) -> None:
    """Have this process killed when its parent is gone, even if it hangs in C."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # The signal is for what happens from now on.
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        if poll.poll(0):
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_exit_after, args=(lifeline,), name="rl_ext_core-lifeline", daemon=True).start()


def _exit_after(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _forget() -> None:
    """In a process that a worker forks: its crashes are not the worker's."""
    global _writer
    if _writer is not None:
        _writer = None
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(file=sys.__stderr__) if sys.__stderr__ is not None else faulthandler.disable()


os.register_at_fork(after_in_child=_forget)
