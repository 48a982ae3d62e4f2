"""How the processes of each method are started: multiprocessing's way, with a report and a lifeline for each."""

from __future__ import annotations

import io
import os
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
from typing import Any

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


os.register_at_fork(after_in_child=_close_lifelines)


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

    :ivar report: what it says of its end
    :ivar lost: its fork server died, so that its exit code is not known
    """

    def _launch(self, process_obj: Any) -> None:
        self.lost = False
        reading, writing = os.pipe()
        _lifelines.add(writing)
        # At exit the kernel closes it, after the children that are waited for have ended.
        self._cut_lifeline = util.Finalize(self, _close_lifeline, (writing,))
        self._close_report: util.Finalize | None = None
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

    def death_handle(self) -> int:
        """Give a descriptor that becomes readable when the process has ended.

        multiprocessing's sentinel does only when whatever the process has forked has ended too.
        """
        if self.returncode is None:
            with suppress(AttributeError, OSError):
                return os.pidfd_open(self.pid)
        return self.sentinel

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
        self._cut_lifeline()
        if self._close_report is not None:
            self._close_report()


class ForkPopen(WorkerPopen):
    """Started by forking the parent."""

    method = "fork"

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        process_obj.start_in_fork = start
        with _servers.interrupts_held():
            super(WorkerPopen, self)._launch(process_obj)  # type: ignore[misc]
        del process_obj.start_in_fork


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
        _send(parent_w, pickled)


class ForkServerPopen(WorkerPopen, popen_forkserver.Popen):
    """Started by a fork server of ours."""

    method = "forkserver"
    _fds: list[int]

    def __init__(self, process_obj: Any) -> None:
        self._polling = threading.Lock()
        super().__init__(process_obj)

    def _start(self, process_obj: Any, start: _child.Start) -> None:
        pickled, sys_path = _pack(self, process_obj, start)
        settings = process_obj.settings
        read_at_import = {name: start.environ.get(name) for name in settings.import_time}
        _servers.connect(settings.preload, read_at_import, sys_path, self._fds, self._accept)
        _send(self._data, pickled)

    def _accept(self, status: int, data: int, pid: int) -> None:
        self.sentinel, self._data, self.pid = status, data, pid
        # The worker sees the other end of its data as multiprocessing's sentinel of its parent: it stays open.
        self.finalizer = util.Finalize(self, _close_all, (data, status))

    def death_handle(self) -> int:
        """Give the server's pipe, which brings the exit code."""
        return self.sentinel

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Read the exit code; from one thread at a time, because the server sends it once."""
        if flag != os.WNOHANG and self.returncode is None:
            connection.wait([self.sentinel])
        with self._polling:
            if self.returncode is None and connection.wait([self.sentinel], 0):
                try:
                    self.returncode = forkserver.read_signed(self.sentinel)
                except (OSError, EOFError):
                    self.returncode = _LOST
                    self.lost = True
                    # The worker may live, and nobody would wait for it; its id may be another's soon.
                    self._cut_lifeline()
            return self.returncode


def _pack(popen: Any, process_obj: Any, start: _child.Start) -> tuple[bytes, list[str]]:
    """Pickle a process such that our part runs first, then the main module's, then that of its function.

    :return: what the interpreter reads that multiprocessing starts, and ``sys.path`` for it
    """
    pickled = io.BytesIO()
    preparation = _preparation(process_obj.name)
    set_spawning_popen(popen)
    try:
        file = io.BytesIO()
        noting = _NotingPickler(file)
        noting.dump(process_obj)
        process = file.getvalue()
        # The path alone comes first: this package may be found by it only.
        reduction.dump({"sys_path": preparation["sys_path"]}, pickled)
        envelope = _Envelope(
            reduction.DupFd(start.report),
            reduction.DupFd(start.lifeline),
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


def _close_lifeline(writing: int) -> None:
    _lifelines.discard(writing)
    os.close(writing)


def _end_report(report: Report) -> None:
    try:
        report.print_if_untaken()
    finally:
        report.close()
