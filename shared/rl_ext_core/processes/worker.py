"""What happens in a worker before and around the function that it runs, and how it ends with all that it has started.

Each worker leads a process group, so that what it starts can be found when it is gone. What shall outlive it makes a
group or session of its own, as daemons do, and is found only while the worker lives.
"""

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
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, reduction, spawn
from pathlib import Path
from typing import Any, NoReturn

from rl_ext_core._import_path import import_path
from rl_ext_core._system import after_fork
from rl_ext_core.processes.report import Progress, Writer

# How long a worker that ends early may take to close what it has.
CLOSE_S = 3.0
# And then for its exit handlers, and the threads that it waits for.
_EXIT_GRACE_S = 0.25
# Descriptors in one message: Linux takes 253, of which multiprocessing's fork servers need four.
SENT_AT_ONCE = 240
# By which the parent asks a worker to end.
END_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)  # Windows imports this, and starts none
# Not reset: faulthandler's, and those that nobody can handle.
_KEPT = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "FPE", "ABRT", "BUS", "ILL", "KILL", "STOP")}
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # which ends a process as surely on Windows
# Signals that end a process by default and that launchers may send to a whole process group, as SLURM's --signal does.
# The others stop it, continue it, or are passed over; SIGINT is treated on its own.
GROUP_SIGNALS = frozenset(
    signal.valid_signals()
    - _KEPT
    - {getattr(signal, f"SIG{name}", None) for name in ("INT", "CHLD", "CONT", "TSTP", "TTIN", "TTOU", "URG", "WINCH")}
)
_CHAIN_LIMIT = 20
# Something may fork while it is looked for.
_ROUNDS = 3
# Where the parent's main module is, of multiprocessing's preparation data.
_OF_MAIN = ("init_main_from_name", "init_main_from_path")

_writer: Writer | None = None
_notes: dict[str, Any] = {}
# For as long as the parent's main module was not imported.
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
    """What a worker is given by its parent; descriptors are wrapped by multiprocessing on their way."""

    report: Any
    lifeline: Any  # reading end of a pipe that the parent never writes to and alone holds open
    environ: dict[str, str]  # all of its variables
    own_session: bool  # not only a group
    parent: int  # the number of that process
    handled: tuple[int, ...]  # signals of GROUP_SIGNALS that the parent handles or ignores

    def begin(self) -> None:
        """Set the process up; called before anything that is not the standard library's or ours is imported."""
        global _writer
        os.setsid() if self.own_session else lead_group()
        _writer = None
        _set_signals(self.parent, self.handled)
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for descriptor in (self.report, self.lifeline):
            os.set_inheritable(descriptor, False)
        _notes.clear()
        _to_close.clear()
        _writer = Writer(self.report)
        # Straight to the descriptor, from C: fatal signals, and stacks when the parent asks.
        faulthandler.enable(file=self.report, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=self.report, all_threads=True)
        _die_with_parent(self.lifeline)
        _writer.enter(Progress.IMPORTING)
        _end_if_asked()  # before it could hear


def unpacked(start: Start, more: Any, count: int, preparation: bytes, process: bytes, needs_main: bool) -> Any:
    """Do in a new worker what ``multiprocessing.spawn._main`` does, and give the process.

    It is called when all was read from the parent's pipe, and all that belongs to the user is unpickled within it, so
    that what goes wrong is reported.

    :param more: a socket, by which so many descriptors come that the fork server has not taken
    :param needs_main: whether the process refers to the main module; if not, that is left to :func:`import_main`
    """
    replace(start, report=start.report.detach(), lifeline=start.lifeline.detach()).begin()
    assert _writer is not None
    try:
        if more is not None:
            _receive(more.detach(), count)
        data = pickle.loads(preparation)
        if not needs_main:
            postpone_main({name: data.pop(name) for name in _OF_MAIN if name in data})
        spawn.prepare(data)
    except BaseException as error:
        _end_with(error, unguarded=_is_unguarded(error))
    _writer.enter(Progress.UNPICKLING)
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


def preparation(name: str) -> dict[str, Any]:
    """Return multiprocessing's preparation data for a process, in its parent."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    try:
        return {**spawn.get_preparation_data(name), "sys_path": import_path()}
    finally:
        if not chosen:
            # Asking for the default has fixed it: the user could not set another any more.
            multiprocessing.set_start_method(None, force=True)


def main_module() -> dict[str, Any]:
    """Say where this process's main module is, for :func:`postpone_main` in another one."""
    return {name: value for name, value in preparation("").items() if name in _OF_MAIN}


def postpone_main(main: Mapping[str, Any]) -> None:
    """Have :func:`import_main` import a module as the main one of this process's parent."""
    _postponed.update(main)


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
    """Wrap a worker's function so that what it raises reaches the parent."""

    def run_and_report() -> None:
        assert _writer is not None
        global _finished
        _writer.enter(Progress.RUNNING)
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
    if _writer is None or not (asked or _writer.raised(error, unguarded=unguarded)):
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
    """End a worker that has reported a failure, without taking the interpreter down, which may take a large library
    half a second, as forked workers never do; else give its exit code back.
    """
    if _writer is not None:
        _writer.write_exitcode(code)
    if _ending:
        # Those of whom it was forked by are not its own, and would close what is not open here. From Python 3.13 on,
        # multiprocessing has removed them.
        if not forked or sys.version_info >= (3, 13):
            atexit._run_exitfuncs()
        os._exit(code)
    return code


def _is_unguarded(error: BaseException | None) -> bool:
    """Return whether processes were started by a main module that is being imported."""
    for _ in range(_CHAIN_LIMIT):
        if isinstance(error, RuntimeError) and "bootstrapping phase" in str(error):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _set_signals(parent: int, handled: Collection[int]) -> None:
    """Leave signals as a fresh process has them: a forked one has its parent's handlers, and those of its libraries.

    What is ignored stays so, as for any program that is started, except SIGCHLD: environments could not learn how the
    processes end that they start.
    """
    signal.set_wakeup_fd(-1)
    # Until lead_group() this process was in the parent's group, and these were blocked: they were meant for the parent.
    while handled and (info := signal.sigtimedwait(handled, 0)) is not None:
        if info.si_pid == parent:  # terminate()
            os.kill(os.getpid(), info.si_signo)
            break
    for number in signal.valid_signals() - _KEPT:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
            signal.signal(number, signal.SIG_DFL)
    # A KeyboardInterrupt here would be a second, misleading error. Not ignored, which programs that are started from
    # here would inherit: some are to be ended by it.
    signal.signal(signal.SIGINT, _pass)
    signal.signal(END_SIGNAL, _end_if_asked)
    # Ctrl-C was held back by the parent until now; and who knows what a forking thread holds back.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _pass(number: int, frame: object) -> None:
    pass


def _end_if_asked(number: int = 0, frame: object = None) -> None:
    if _writer is not None and not (_ending or _finished) and _writer.is_asked_to_end():
        raise _Asked(1)


def _die_with_parent(lifeline: int) -> None:
    """Have this process and its group killed when its parent is gone, even if it hangs in C."""
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The signal is for what happens from now on.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):
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


def lead_group() -> None:
    """Make this process the leader of a group, not the terminal's own: Ctrl-C and Ctrl-Z there are its parent's.

    No session: Linux schedules sessions as groups (``sched_autogroup``), and on a busy machine a wake-up from one to
    another waits.
    """
    with suppress(PermissionError):  # it leads a session
        os.setpgid(0, 0)


def hides_exit_codes() -> bool:
    """Return whether SIGCHLD is ignored here: ``subprocess`` gives exit code 0 then, however a child ends."""
    return hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def kill_families(living: Collection[int], ended: Collection[int] = ()) -> None:
    """Kill leaders that have not been waited for, and what these and those that are gone have started."""
    leaders = {*living, *ended}
    found = {*living, *_members(leaders)}
    for _ in range(_ROUNDS):
        for leader in leaders:
            kill_group(leader)
        _kill(found)
        found = _members(leaders) - found
        if not found:
            return


def kill_group(leader: int) -> None:
    """Kill the members of a group, where there are groups."""
    with suppress(OSError, AttributeError):
        os.killpg(leader, _KILL)


def kill_own_family() -> None:
    """Kill what this process has started, and leave it alone."""
    _kill(_members([os.getpid()]) - {os.getpid()})


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it is gone, or is another user's
            os.kill(pid, _KILL)


def _members(leaders: Collection[int]) -> set[int]:
    """Find the members of groups, and what descends from their leaders, as far as the system tells."""
    parents: dict[int, list[int]] = {}
    found = set()
    for pid, parent, group in _processes():
        parents.setdefault(parent, []).append(pid)
        if group in leaders:
            found.add(pid)
    waiting = list(leaders)
    while waiting:
        children = parents.pop(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def _processes() -> list[tuple[int, int, int]]:
    """List each process's number, its parent's and that of its group; zombies are gone already."""
    if not Path("/proc").is_dir():
        return _processes_by_psutil()
    found = []
    entries: list[Path] = []
    with suppress(OSError):  # no descriptor is left: groups are found all the same
        entries = list(Path("/proc").iterdir())
    for entry in entries:
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                state, parent, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if state != b"Z":
                    found.append((int(entry.name), int(parent), int(group)))
    return found


def _processes_by_psutil() -> list[tuple[int, int, int]]:
    """Likewise, of those that are younger than this one: numbers of parents that are gone may be others' by now."""
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return []
    began, found = psutil.Process().create_time(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.create_time() >= began:
                found.append((process.pid, process.ppid(), 0))  # groups are killed as such
    return found
