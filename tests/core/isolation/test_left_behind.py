"""A probe touches nothing of the caller's and leaves nothing: no process, no file, no state, however it ends."""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe, trials
from rl_ext_core.isolation.experiments import ALONE, APART
from tests.boundaries import ROOT
from tests.core.isolation import simulator

PROBES = """
import functools, sys
from rl_ext_core.isolation import probe
from tests.core.isolation import simulator
probe(functools.partial(simulator.{name}, *sys.argv[1:]), cache=False)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of data, a small file and a big one."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "offset.txt").write_text("1")
    (folder / "offset.txt").write_text("2")
    (folder / "big.bin").write_bytes(bytes(3 << 20))
    (tmp_path / "offset.txt").write_text("3")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "temporary"


@pytest.fixture
def notes(own_cache: Path) -> Path:
    """A file that trials may write to, since it is in the folder for caches."""
    own_cache.mkdir(parents=True)
    return own_cache / "notes.txt"


@pytest.fixture(autouse=True)
def others() -> set[psutil.Process]:
    """Children that earlier tests have left on purpose, such as fork servers, and multiprocessing's own."""
    resource_tracker.ensure_running()
    return set(psutil.Process().children(recursive=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_until_gone(*pids: int) -> None:
    until = time.monotonic() + 120
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def mentioned(notes: Path) -> list[list[str]]:
    return [line.split(maxsplit=2) for line in notes.read_text().splitlines()]


def test_a_messy_environment_leaves_neither_files_nor_processes(
    notes: Path, folder: Path, temporary: Path, others: set[psutil.Process], capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    verdict = probe(functools.partial(simulator.Messy, str(notes)), cache=False)
    assert verdict.isolation is Isolation.INDEPENDENT
    assert contents(folder) == before
    assert list(temporary.iterdir()) == []
    lines = mentioned(notes)
    assert len(lines) >= 8
    assert not any(psutil.pid_exists(int(pid)) for child, parent, _ in lines for pid in (child, parent))
    assert not any(Path(cwd).exists() for *_, cwd in lines)
    assert capfd.readouterr() == ("", "")
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.slow
def test_nothing_is_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("built in the caller's process")

    instance = simulator.Plain()
    instance.reset(seed=3)
    state = dict(vars(instance))
    monkeypatch.setattr(simulator.Plain, "__init__", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    environ, path = dict(os.environ), list(sys.path)
    assert probe(instance, cache=False).isolation is Isolation.INDEPENDENT
    assert probe(simulator.Plain, cache=False).isolation is Isolation.INDEPENDENT
    assert (dict(os.environ), list(sys.path), vars(instance)) == (environ, path, state)
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Writes(simulator.Plain):
    """Keeps a log at some path, and knows no better way if it cannot."""

    def __init__(self, operation: str, path: str) -> None:
        super().__init__()
        self._operation, self._path = operation, path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        match self._operation:
            case "append":
                Path(self._path).open("a").close()
            case "descriptor":
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT))
            case "mkdir":
                os.makedirs(f"{self._path}/deep")
            case "remove":
                Path(self._path).unlink()
            case "rename":
                os.rename(self._path, f"{self._path}.old")
            case "sqlite":
                sqlite3.connect(self._path).close()
            case "link":
                os.symlink(self._path, "link")
                Path("link").write_text("spoilt")
        return super().reset(seed=seed)


@pytest.mark.sample(quick=2, ci=7)
@pytest.mark.parametrize("operation", ["append", "descriptor", "mkdir", "remove", "rename", "sqlite", "link"])
def test_trials_write_no_files_by_absolute_paths(operation: str, tmp_path: Path, folder: Path) -> None:
    before = contents(tmp_path)
    path = folder / ("new" if operation == "mkdir" else "offset.txt")
    verdict = probe([functools.partial(Writes, operation, str(path))] * 2, cache=False)
    assert verdict.isolation is Isolation.UNKNOWN
    assert f"could not be tried: it writes to '{path}" in verdict.explanation
    assert 'write isolation="process"' in verdict.explanation
    assert contents(tmp_path) == before
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_trials_write_files_by_relative_paths_into_an_empty_directory(tmp_path: Path) -> None:
    before = contents(tmp_path)
    verdict = probe([functools.partial(Writes, "append", "offset.txt")] * 2, cache=False)
    assert verdict.isolation is Isolation.INDEPENDENT
    assert contents(tmp_path) == before


class Reads(simulator.Plain):
    """Uses a file or folder of the working directory, at some time and in some way."""

    def __init__(self, how: str, when: str) -> None:
        super().__init__()
        self._how, self._when = how, when
        self._use("init")

    def _use(self, when: str) -> None:
        if when == self._when:
            eval(self._how, {"os": os, "Path": Path})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._use("reset")
        return super().reset(seed=seed)


@pytest.mark.sample(quick=2, ci=12)
@pytest.mark.parametrize("when", ["init", "reset"])
@pytest.mark.parametrize(
    "how",
    [
        "open('offset.txt').read()",
        "open('offset.txt', 'r+').read()",
        "Path('../offset.txt').read_text()",
        "os.path.exists('data/offset.txt')",
        "open(os.path.join(os.getcwd(), 'data', 'offset.txt'))",
        "os.listdir('data')",
    ],
)
def test_an_environment_that_uses_files_of_the_working_directory_cannot_be_tried(
    how: str, when: str, tmp_path: Path
) -> None:
    before = contents(tmp_path)
    verdict = probe([functools.partial(Reads, how, when)] * 2, cache=False)
    assert verdict.isolation is Isolation.UNKNOWN
    assert "in the working directory, and a trial has an empty one" in verdict.explanation
    assert contents(tmp_path) == before


def test_a_module_beside_the_script_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_own_module.py").write_text(
        "from tests.core.isolation.simulator import Plain\ndef make(): return Plain()"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    import my_own_module  # type: ignore[import-not-found]

    assert probe(my_own_module.make, cache=False).isolation is Isolation.INDEPENDENT


@pytest.mark.sample
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_ends_takes_everything_along(ending: signal.Signals, notes: Path, temporary: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = PROBES.format(name="Messy")
    caller = subprocess.Popen(
        [sys.executable, "-c", code, str(notes), "hangs"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not notes.exists() or not notes.read_text():
        assert caller.poll() is None
        time.sleep(0.005)
    caller.send_signal(ending)
    caller.communicate(timeout=120)
    assert caller.returncode in (-ending, 130, 1)
    wait_until_gone(*(int(pid) for line in mentioned(notes) for pid in line[:2]))
    until = time.monotonic() + 120
    while list(temporary.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(temporary.iterdir()) == []


def test_a_caller_killed_before_it_has_said_what_to_probe_leaves_no_folder(temporary: Path) -> None:
    dies = "from rl_ext_core.isolation import trials\ntrials.main_module = lambda: os.kill(os.getpid(), 9)"
    code = f"import os\n{dies}{PROBES.format(name='Plain')}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == -signal.SIGKILL
    until = time.monotonic() + 120
    while list(temporary.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(temporary.iterdir()) == []


# Once it has a child, say which ones, and kill it.
MEANWHILE = (
    "for _ in {{1..600}}; do pgrep -P {0} > /dev/null && break; sleep 0.1; done; sleep 0.3; pgrep -P {0}; kill -9 {0}"
)


@pytest.mark.slow
def test_a_supervisor_that_is_killed_is_an_error_and_takes_its_processes_along(
    temporary: Path, others: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trials.TrialRunner([as_factory(simulator.hangs)]) as runner:
        (supervisor,) = set(psutil.Process().children()) - others
        answer = runner._answer
        found: list[int] = []

        def kill_meanwhile() -> object:
            process = subprocess.Popen(["bash", "-c", MEANWHILE.format(supervisor.pid)], stdout=subprocess.PIPE)
            try:
                return answer()
            finally:
                found.extend(map(int, process.communicate()[0].split()))

        monkeypatch.setattr(runner, "_answer", kill_meanwhile)
        with pytest.raises(WorkerError, match="ended"):
            runner.run([ALONE], 10)
    assert found
    wait_until_gone(*found)
    assert list(temporary.iterdir()) == []


def test_python_that_does_not_start_is_an_error(
    folder: Path, temporary: Path, others: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ends_the_process.py").write_text("import os, sys\nsys.stderr.write('no licence')\nos._exit(5)")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    factory = as_factory(simulator.Plain).then(lambda env: env, preload=("ends_the_process",))
    with pytest.raises(WorkerError, match=r"'ends_the_process', .* first, ended .* with exit code 5, and printed:\nno"):
        probe(factory, cache=False)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/nowhere/python")
    with pytest.raises(WorkerError, match=r"cannot be started: .*No such file"):
        probe(simulator.Plain, cache=False)
    assert list(temporary.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= others


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    lock = threading.Lock()
    factory = as_factory(simulator.Plain).then(lambda env: (lock, env)[1])
    with pytest.raises(InvalidTypeError, match="cannot be packed"):
        probe(factory, cache=False)


@pytest.mark.slow
def test_a_process_that_waits_for_a_dead_one_whose_child_lives_goes_on() -> None:
    with trials.TrialRunner([as_factory(simulator.DiesWithALivingChild)], timeout=5) as runner:
        first, second, third = runner.run(APART, 10)
    assert first.done
    assert second.end == third.end == "ends the process with exit code 5"
