"""Signals that concern more than one process: to the process group, and those about the ends of children."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes import get_context
from tests.core.processes.groups import LIMIT_S, group, in_turns
from tests.core.processes.test_scripts import Program, program

__all__ = ["program"]  # a fixture


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """Ignore SIGCHLD, so that the system reports no exit code of a child."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def _exit(code: int) -> None:
    sys.exit(code)


# -- exit codes where SIGCHLD is ignored


@pytest.mark.usefixtures("ignored_children")
@pytest.mark.parametrize(("code", "method"), [(0, "fork"), (3, "fork"), (0, "spawn"), (3, "spawn"), (3, "forkserver")])
def test_exit_code_of_worker_where_sigchld_is_ignored(code: int, method: str) -> None:
    process = get_context(method).Process(target=_exit, args=(code,))
    process.start()
    process.join(LIMIT_S)
    assert not process.is_alive()
    assert process.exitcode == code


@pytest.mark.usefixtures("ignored_children")
@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fork", "worker 0 of 1 ended in step; why is not known, because this process ignores SIGCHLD"),
        ("spawn", "worker 0 of 1 ended in step; why is not known, because this process ignores SIGCHLD"),
        ("forkserver", "worker 0 of 1 was killed by SIGKILL in step"),
    ],
)
def test_death_of_worker_where_sigchld_is_ignored(method: str, text: str) -> None:
    with group(method, 1) as workers, pytest.raises(WorkerError, match=text), workers.watch.operation("step"):
        workers.ask(0, "kill")


@pytest.mark.usefixtures("ignored_children")
def test_closing_of_workers_where_sigchld_is_ignored() -> None:
    with group("fork", 2) as workers:
        workers.close()
        assert workers.watch.failure is None


def test_exit_code_of_worker_that_another_part_of_the_process_waited_for() -> None:
    process = get_context("fork").Process(target=_exit, args=(3,))
    process.start()
    os.waitpid(process.pid or 0, 0)
    process.join(LIMIT_S)
    assert process.exitcode == 3


# -- signals to the process group


GROUP_SCRIPT = """
    before = signal.signal(signal.{name}, {handler})
    with group(METHOD, 2) as workers:
        workers.ask(0, "pid")
        print("ready", flush=True)
        sys.stdin.readline()
        pids = [workers.ask(worker, "pid") for worker in (0, 1)]
        with group(METHOD, 1) as more:  # the fork server still starts workers
            print(more.ask(0, "pid") not in pids, *came, flush=True)
        workers.close()
    signal.signal(signal.{name}, signal.SIG_DFL)
"""
TOP = """
import signal
came = []
def note(number, frame): came.append(signal.Signals(number).name)
"""


@pytest.mark.parametrize(
    ("name", "handler", "method"),
    [
        ("SIGUSR1", "note", "forkserver"),
        *(
            pytest.param(name, "note", method, marks=pytest.mark.slow)
            for name, method in in_turns("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGALRM", "SIGXCPU")
        ),
        pytest.param("SIGUSR1", "signal.SIG_IGN", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_group_that_the_parent_handles(name: str, handler: str, method: str, program: Program) -> None:
    body = GROUP_SCRIPT.format(name=name, handler=handler)
    process = program.start(method, body, top=TOP, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.Signals[name])
    output, errors = process.communicate("\n", timeout=LIMIT_S)
    assert (output.split(), process.returncode) == (["True", *([name] if handler == "note" else [])], 0), errors


@pytest.mark.parametrize(("number", "method"), in_turns(signal.SIGUSR1, signal.SIGQUIT, signal.SIGKILL))
def test_signal_to_the_group_that_ends_the_parent(number: signal.Signals, method: str, program: Program) -> None:
    # Program's fixture fails if a process of its session is left.
    # Programs that shells start in the background inherit an ignored SIGQUIT.
    ends = "" if number == signal.SIGKILL else f"signal.signal({int(number)}, signal.SIG_DFL)\n"
    body = GROUP_SCRIPT.format(name="SIGUSR2", handler="note")
    process = program.start(method, body, top=TOP + ends, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == -number
    for folder in (program.folder / "tmp").glob("pymp-*"):
        shutil.rmtree(folder)  # multiprocessing's, for sockets


PRELOADED = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)  # to the server, while it imports
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))  # to workers that start
"""


@pytest.fixture
def handled() -> Iterator[Callable[[str], None]]:
    """Handle a signal in this process; the earlier handlers come back at the end."""
    before: dict[int, Any] = {}

    def handle(name: str) -> None:
        number = signal.Signals[name]
        before[number] = signal.signal(number, lambda *_: None)

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handled_signal_to_the_group_while_server_and_worker_start(
    handled: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled("SIGUSR1")
    (tmp_path / "sends_signals.py").write_text(PRELOADED)
    monkeypatch.syspath_prepend(str(tmp_path))
    with group("forkserver", 2, preload=["sends_signals"]) as workers:
        assert workers.ask(1, "pid")
        workers.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_terminate_right_after_the_start_where_sigterm_is_handled(method: str, handled: Callable[[str], None]) -> None:
    handled("SIGTERM")
    for _ in range(5):
        process = get_context(method).Process(target=time.sleep, args=(600,))
        process.start()
        process.terminate()
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
