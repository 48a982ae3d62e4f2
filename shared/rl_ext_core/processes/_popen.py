"""How the processes of each method are started: multiprocessing's way, with a report and a lifeline for each."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import (
    connection,
    forkserver,
    get_start_method,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    set_start_method,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from typing import Any, ClassVar

from rl_ext_core._families import kill_families
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import after_fork
from rl_ext_core.processes import _child, _servers
from rl_ext_core.processes._report import Report

__all__ = ["ForkPopen", "ForkServerPopen", "Settings", "SpawnPopen", "WorkerPopen"]

# multiprocessing's exit code for a process whose fork server has died.
_LOST = 255
# After the children were joined: until then they may still write their reports.
_EXIT_PRIORITY = -10
_KILL_S = 1.0

# Writing ends of all lifelines. A forked child must not hold them: it would keep its siblings from seeing the end.
_lifelines: set[int] = set()


def _close_lifelines() -> None:
    while _lifelines:
        os.close(_lifelines.pop())


after_fork(_close_lifelines)


@dataclass(frozen=True)
class Settings:
    """What distinguishes one worker from another, besides its function.

    :param environ: variables to set on top of the parent's; None unsets
    :param preload: modules that its fork server has imported
    :param import_time: names of the variables that these read at import
    """

    environ: Mapping[str, str | None]
    preload: Sequence[str]
    import_time: Sequence[str]

    def environment(self) -> dict[str, str]:
        """All environment variables of a worker that is started now."""
        together = {**os.environ, **self.environ}
        return {name: value for name, value in together.items() if value is not None}


class WorkerPopen(popen_fork.Popen):
    """A started worker, as its parent sees it.

    :cvar method: by which it is started
    :ivar report: what it says of its end
    :ivar lost: its fork server died, so that its exit code is not known
    """

    method: ClassVar[str]

    def _launch(self, process_obj: Any) -> None:
        self.lost = self._cleared = False
        self._polling = threading.Lock()
        self._sentinel_is_its_own = self.method == "forkserver"
        reading, writing = os.pipe()
        _lifelines.add(writing)
        # At exit the kernel closes it, after the children that are waited for have ended.
        self._cut_lifeline = util.Finalize(self, _close_lifeline, (writing,))
        self._close_report: util.Finalize | None = None
        self._close_sentinel: util.Finalize | None = None
        try:
            self.report = Report()
            self._close_report = util.Finalize(self, _end_report, (self.report,), exitpriority=_EXIT_PRIORITY)
            self._start(process_obj, _child.Start(self.report.fd, reading, process_obj.settings.environment()))
        except BaseException:
            if hasattr(self, "pid"):
                # Interrupted. Half a pickle would make the worker complain.
                self.kill()
                self.wait(_KILL_S)
            self.close()
            raise
        finally:
            os.close(reading)

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        raise NotImplementedError

    def _watch_process(self) -> None:
        """Have the sentinel tell the end of the process; multiprocessing's waits for all that it has forked, too."""
        with suppress(AttributeError, OSError):  # not Linux, or an old one
            self.sentinel = os.pidfd_open(self.pid)
            self._sentinel_is_its_own = True
            self._close_sentinel = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Fetch the exit code; what a worker that has failed leaves behind is killed."""
        if flag != os.WNOHANG and self.returncode is None:
            if self._sentinel_is_its_own:
                connection.wait([self.sentinel])
            else:
                super().poll(flag)
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
            code: int | None = self.returncode
            return code

    def _read_exitcode(self) -> None:
        super().poll(os.WNOHANG)

    def ask_to_end(self) -> bool:
        """Ask the worker to close what it has, if it has something, and to end.

        :return: whether it was asked
        """
        asked = self.report.ask_to_end()
        if asked:
            self._send_signal(_child.END_SIGNAL)  # type: ignore[attr-defined]
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
        if self._close_sentinel is not None:
            self._close_sentinel()
        self._cut_lifeline()
        if self._close_report is not None:
            self._close_report()


class ForkPopen(WorkerPopen):
    """Started by forking the parent."""

    method = "fork"

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        process_obj.start_in_fork = start
        # A worker that had to start one would take it with it.
        resource_tracker.ensure_running()
        with _servers.interrupts_held():
            super(WorkerPopen, self)._launch(process_obj)  # type: ignore[misc]
        del process_obj.start_in_fork
        self._watch_process()


class SpawnPopen(WorkerPopen, popen_spawn_posix.Popen):
    """Started as a fresh interpreter."""

    method = "spawn"
    _fds: list[int]

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self._fds.append(tracker)
        pickled, _ = _pack(self, process_obj, start)
        parent_r, child_w, child_r, parent_w = _two_pipes()
        self.finalizer = util.Finalize(self, _close_all, (parent_r, parent_w))
        self.sentinel = parent_r
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_r)
            with _servers.interrupts_held():
                self.pid = util.spawnv_passfds(
                    os.fsencode(spawn.get_executable()), command, [*self._fds, child_r, child_w]
                )
        finally:
            os.close(child_r)
            os.close(child_w)
        self._watch_process()
        _send(parent_w, pickled)


class ForkServerPopen(WorkerPopen, popen_forkserver.Popen):
    """Started by a fork server of ours."""

    method = "forkserver"
    _fds: list[int]

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pickled, sys_path = _pack(self, process_obj, start, theirs.fileno())
            settings = process_obj.settings
            read_at_import = {name: start.environ.get(name) for name in settings.import_time}
            first, more = self._fds[: _child.SENT_AT_ONCE], self._fds[_child.SENT_AT_ONCE :]
            _servers.connect(settings.preload, read_at_import, sys_path, first, self._accept)
            _send(self._data, pickled)
            with suppress(ConnectionError):  # a worker that is dead already is found like any other
                for at in range(0, len(more), _child.SENT_AT_ONCE):
                    reduction.sendfds(ours, more[at : at + _child.SENT_AT_ONCE])

    def _accept(self, status: int, data: int, pid: int) -> None:
        self.sentinel, self._data, self.pid = status, data, pid
        # The worker sees the other end of its data as multiprocessing's sentinel of its parent: it stays open.
        self.finalizer = util.Finalize(self, _close_all, (data, status))

    def _read_exitcode(self) -> None:
        if connection.wait([self.sentinel], 0):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = _LOST
                self.lost = True
                # The worker may live, and nobody would wait for it; its id may be another's soon.
                self._cut_lifeline()


def _pack(popen: Any, process_obj: Any, start: _child.Start, more: int | None = None) -> tuple[bytes, list[str]]:
    """Pickle a process such that our part runs first, then the main module's, then that of its function.

    :param more: descriptor by which those come that a fork server does not take
    :return: what the interpreter reads that multiprocessing starts, and ``sys.path`` for it
    """
    pickled = io.BytesIO()
    preparation = _preparation(process_obj.name)
    set_spawning_popen(popen)
    try:
        # Before those of its arguments, which may be many.
        mine = [None if fd is None else reduction.DupFd(fd) for fd in (start.report, start.lifeline, more)]
        file = io.BytesIO()
        noting = _NotingPickler(file)
        noting.dump(process_obj)
        process = file.getvalue()
        # The path alone comes first: this package may be found by it only.
        reduction.dump({"sys_path": preparation["sys_path"]}, pickled)
        envelope = _Envelope(
            *mine,
            0 if more is None else max(0, len(popen._fds) - _child.SENT_AT_ONCE),
            start.environ,
            bytes(reduction.ForkingPickler.dumps(preparation)),
            process,
            noting.needs_main,
        )
        reduction.dump(envelope, pickled)
    finally:
        set_spawning_popen(None)
    return pickled.getvalue(), preparation["sys_path"]


class _NotingPickler(reduction.ForkingPickler):
    """Notes whether a worker has to import the main module to unpickle this.

    What cloudpickle has packed brings the main module's functions and classes along: most workers need not run the
    user's script again, with all that it imports.
    """

    needs_main = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
            self.needs_main = True
        return NotImplemented


class _Envelope:
    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _child.unpack, self._parts


def main_module() -> dict[str, str]:
    """Say where the main module is, for :func:`~rl_ext_core.processes._child.postpone_main` in another process."""
    prepared = _preparation("")
    return {name: prepared[name] for name in _child.OF_MAIN if name in prepared}


def _preparation(name: str) -> dict[str, Any]:
    chosen = get_start_method(allow_none=True)
    try:
        return spawn.get_preparation_data(name)
    finally:
        if not chosen:
            # Asking for the default has fixed it: the user could not set another any more.
            set_start_method(None, force=True)


def _send(descriptor: int, data: bytes) -> None:
    # A worker that is dead already is found like any other.
    with suppress(BrokenPipeError), open(descriptor, "wb", closefd=False) as file:
        file.write(data)


@uninterrupted
def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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
