from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_ext_core.processes import get_context
from tests.core.processes.test_scripts import Program, delete_pymp_folders, program
from tests.core.processes.worker_groups import LIMIT_S, group, pair_with_start_methods

__all__ = ["program"]  # a fixture


@pytest.fixture
def handle() -> Iterator[Callable[..., None]]:
    """Return a function that sets signal handlers, which are restored at the end."""
    before: dict[int, Any] = {}

    def handle(number: int, handler: Any = lambda *_: None) -> None:
        """Set the handler of a signal, by default one that does nothing."""
        before[number] = signal.signal(number, handler)

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


# -- unreported ends of child processes


UNKNOWN = "worker 0 of 1 ended in step; its exit code is unknown: this process ignores SIGCHLD"


@pytest.mark.parametrize(
    ("method", "command", "text"),
    [
        ("fork", "kill", UNKNOWN),
        ("spawn", "kill", UNKNOWN),
        ("spawn", "raise_bad_level", "worker 0 of 1 raised ValueError"),
        ("forkserver", "kill", "worker 0 of 1 was killed by SIGKILL in step"),
    ],
)
def test_worker_death_raises_although_sigchld_is_ignored(
    method: str, command: str, text: str, handle: Callable[..., None]
) -> None:
    handle(signal.SIGCHLD, signal.SIG_IGN)
    with group(method, 1) as workers:
        assert str(workers.fail(command, 0)).startswith(text)


def test_normal_exit_is_not_a_failure_although_sigchld_is_ignored(handle: Callable[..., None]) -> None:
    handle(signal.SIGCHLD, signal.SIG_IGN)
    with group("fork", 2) as workers:
        workers.close()
        assert workers.watch.failure is None


# -- signals to the process group


GROUP_SCRIPT = """
    with suppress(OSError):  # SIGKILL
        signal.signal(signal.{name}, {handler})
    with group(METHOD, 2) as workers:
        workers.ask(0, "pid")
        print("ready", flush=True)
        sys.stdin.readline()
        pids = [workers.ask(worker, "pid") for worker in (0, 1)]
        with group(METHOD, 1) as more:  # the fork server still starts workers
            print(more.ask(0, "pid") not in pids, *came, flush=True)
        workers.close()
"""
TOP = """
import signal
from contextlib import suppress
came = []
def note(number, frame): came.append(signal.Signals(number).name)
"""


@pytest.mark.parametrize(
    ("name", "handler", "method"),
    [
        ("SIGUSR1", "note", "forkserver"),
        *(
            pytest.param(name, "note", method, marks=pytest.mark.slow)
            for name, method in pair_with_start_methods("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGALRM", "SIGXCPU")
        ),
        pytest.param("SIGUSR1", "signal.SIG_IGN", "forkserver", marks=pytest.mark.slow),
        # This ends the parent. The fixture ``program`` fails if a process of its session is left.
        ("SIGKILL", "signal.SIG_DFL", "forkserver"),
    ],
)
def test_signals_to_the_process_group_do_not_reach_workers(
    name: str, handler: str, method: str, program: Program
) -> None:
    body = GROUP_SCRIPT.format(name=name, handler=handler)
    process = program.start(method, body, top=TOP, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.Signals[name])
    output, errors = process.communicate("\n", timeout=LIMIT_S)
    if handler == "signal.SIG_DFL":
        assert process.returncode == -signal.Signals[name]
        delete_pymp_folders(program)
    else:
        assert (output.split(), process.returncode) == (["True", *([name] if handler == "note" else [])], 0), errors


PRELOADED = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)  # to the server, while it imports
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))  # to workers that start
"""


def test_group_signals_during_start_do_not_end_server_or_worker(
    handle: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle(signal.SIGUSR1)
    (tmp_path / "sends_signals.py").write_text(PRELOADED)
    monkeypatch.syspath_prepend(str(tmp_path))
    with group("forkserver", 2, preload=["sends_signals"]) as workers:
        assert workers.ask(1, "pid")
        workers.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_terminate_right_after_start_kills_although_sigterm_is_handled(
    method: str, handle: Callable[..., None]
) -> None:
    handle(signal.SIGTERM)
    for _ in range(5):
        process = get_context(method).Process(target=time.sleep, args=(600,))
        process.start()
        process.terminate()
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
