from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe
from tests.core.isolation import simulator
from tests.core.isolation.conftest import Variant
from tests.leaks import wait_until_ended
from tests.programs import ROOT
from tests.requirements import skip_or_fail

INDEPENDENT, SINGLE, SHARED = Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE, Isolation.SHARED_STATE
COLLIDE, NON_DETERMINISTIC, BROKEN = Isolation.PROCESSES_COLLIDE, Isolation.NON_DETERMINISTIC, Isolation.BROKEN
UNKNOWN = Isolation.UNKNOWN

OWN_CWD, ONE_AT_A_TIME = 'use make_vec_env(..., cwd="own")', "so only one instance can run at a time"
# Expected verdict of each variant, and a part of the explanation.
VARIANTS = {
    "SEEDED_BY_CLOCK": (NON_DETERMINISTIC, "does not return the same twice"),
    "GOOD": (INDEPENDENT, "bit for bit"),
    "BACKGROUND_THREAD": (INDEPENDENT, "bit for bit"),
    "NULL_FOR_SECOND": (SINGLE, "building the second raises RuntimeError: the toy simulator gives no handle"),
    "NULL_FOR_LATER": (SINGLE, "building the third, after the first was closed, raises RuntimeError"),
    "CRASH_OF_SECOND": (SINGLE, "building the second kills the process by SIGSEGV"),
    "EXIT_OF_SECOND": (SINGLE, "exit code 3 (it printed: 'toy simulator: the license is for one instance')"),
    "ABORT_IN_STEP": (SINGLE, "step 3 of the first kills the process by SIGABRT"),
    "CLOSE_KILLS_OTHERS": (SINGLE, "of the first, after the second was closed, kills the process by SIGSEGV"),
    "CRASH_OF_LAST_CLOSE": (SINGLE, "closing the first, after the second was closed, kills the process by SIGABRT"),
    "SHARED_GLOBALS": (SHARED, "the first returns something else from its"),
    "SHARED_RANDOM": (SHARED, "returns something else from its step"),
    "SHARED_AT_RESET": (SHARED, "returns something else from its"),
    "SHARED_LATER": (SHARED, "the first returns something else from its step 5"),
    "LAZY_TABLE": (SHARED, "returns something else from its step"),
    "CLOSE_CHANGES_OTHERS": (SHARED, "returns something else from its step"),
    "LAST_CLOSE_CHANGES_LATER": (SHARED, "the third returns something else from its step 1"),
    "NOTHING_SEEN": (NON_DETERMINISTIC, "nothing that it returned depended on seeds or actions"),
    "NULL_ALWAYS": (UNKNOWN, "could not be tested: building it raises RuntimeError: the toy simulator gives no handle"),
    "CRASH_IN_STEP": (BROKEN, "step 5 of it kills the process by SIGSEGV"),
    "HANG_OF_SECOND": (SINGLE, "building the second hangs"),  # until the timeout
    "LOCK_IN_CWD": (COLLIDE, OWN_CWD),
    "LOCK_IN_TMPDIR": (COLLIDE, ONE_AT_A_TIME),
    "LOCK_NEXT_TO_LIBRARY": (COLLIDE, ONE_AT_A_TIME),
    "LOCK_PER_PROCESS": (COLLIDE, OWN_CWD),
    "STATE_IN_FILES": (COLLIDE, OWN_CWD),
    "SHARED_MEMORY": (COLLIDE, ONE_AT_A_TIME),
}
# Variants of which one process may run several.
IN_PROCESS = ("GOOD", "BACKGROUND_THREAD", "NULL_ALWAYS", "LOCK_PER_PROCESS", "STATE_IN_FILES")


@pytest.mark.sample(ci=7)
@pytest.mark.parametrize("name", VARIANTS)
def test_verdict_on_each_variant_of_the_simulator(name: str, variant: Variant) -> None:
    expected, text = VARIANTS[name]
    verdict = probe(variant(name), timeout=2 if name == "HANG_OF_SECOND" else None)
    assert verdict.isolation is expected, verdict
    assert text in verdict.explanation
    assert (verdict.in_process, verdict.declared_by) == (name in IN_PROCESS, "probe")


@pytest.mark.sample(ci=5)
@pytest.mark.parametrize(
    ("source", "expected", "text"),
    [
        (simulator.Plain, INDEPENDENT, "in 100 steps"),
        (simulator.DrawsFromNumPy, SHARED, "They share state. Use one process per environment."),
        (simulator.DrawsWhenBuilt, INDEPENDENT, "bit for bit"),
        (simulator.ClassAttribute, SHARED, "returns something else from its step"),
        (simulator.ActsOnAll, SHARED, "returns something else from its step"),
        (simulator.IgnoresSeeds, INDEPENDENT, "bit for bit"),
        (simulator.SharedOutput, SHARED, "a result of the first is overwritten before its step"),
        (simulator.OwnOutput, INDEPENDENT, "bit for bit"),
        (functools.partial(simulator.BadClose, 1), SINGLE, "closing one raises RuntimeError: another one is there"),
        (simulator.exit_while_building, UNKNOWN, "could not be tested: building it raises SystemExit: no license"),
        (simulator.ReadsAFile, UNKNOWN, "Trials have an empty working directory"),
        (simulator.NotAnEnvironment, UNKNOWN, "simulator.NotAnEnvironment cannot be stepped: expected"),
        (simulator.FailsAtReset, BROKEN, "A single instance fails: resetting it raises RuntimeError: no world"),
        (functools.partial(simulator.Slow, reset=2.1), INDEPENDENT, "in 6 steps"),
        (functools.partial(simulator.Masked, "count"), SHARED, "has a different info['count']"),
        (lambda: gymnasium.wrappers.TimeLimit(simulator.MaskedByMethod(""), 7), SHARED, "action_masks()"),
        ([simulator.Plain, simulator.ClassAttribute, simulator.ClassAttribute], SHARED, "something else"),
        ([simulator.Plain, simulator.FailsAtReset], BROKEN, "Source 2 fails: resetting it raises"),
    ],
)
def test_verdict_on_environments_written_in_python(source: Any, expected: Isolation, text: str) -> None:
    verdict = probe(source)
    assert verdict.isolation is expected, verdict
    assert text in verdict.explanation


@pytest.mark.slow
def test_fewer_steps_are_compared_if_they_are_slow() -> None:
    verdict = probe(functools.partial(simulator.Slow, step=0.15))
    assert verdict.isolation is INDEPENDENT
    assert "in 13 steps" in verdict.explanation or "in 12 steps" in verdict.explanation
    assert (verdict.step_seconds or 0) > 0.1


def test_verdict_is_unknown_if_a_source_cannot_be_pickled() -> None:
    lock = threading.Lock()
    for source in (lambda: lock and simulator.Plain(), as_factory(simulator.Plain).then(lambda env: (lock, env)[1])):
        verdict = probe(source)
        assert (verdict.isolation, verdict.in_process) == (UNKNOWN, True)
        assert "could not be tested" in verdict.explanation


# -- real environments


def skip_without(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        skip_or_fail(f"{module} is not installed")


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize(
    "source", ["CartPole-v1", "HalfCheetah-v5", gymnasium.spec("FrozenLake-v1"), "ale_py:ALE/Pong-v5"]
)
def test_verdict_on_independent_real_environments(source: Any) -> None:
    verdict = probe(source)
    assert verdict.isolation is INDEPENDENT, verdict
    assert (verdict.step_seconds or 0) > 1e-6
    assert verdict.private_bytes is None or 2**20 < verdict.private_bytes < 2**30


@pytest.mark.slow
def test_verdict_on_a_library_that_allows_a_single_instance() -> None:
    skip_without("stable_retro")
    verdict = probe("Airstriker-Genesis-v0")
    assert verdict.isolation is SINGLE
    assert "building the second raises RuntimeError: Cannot create multiple" in verdict.explanation


@pytest.mark.sample
@pytest.mark.parametrize("flag", ["true", "false"])
def test_verdict_on_the_description_of_an_fmu_with_and_without_the_flag(flag: str) -> None:
    skip_without("fmpy")
    verdict = probe(functools.partial(simulator.HoldsFmu, flag))
    expected = (SINGLE, "environment") if flag == "true" else (INDEPENDENT, "probe")
    assert (verdict.isolation, verdict.declared_by) == expected
    assert ("canBeInstantiatedOnlyOncePerProcess" in verdict.explanation) is (flag == "true")
    assert verdict.step_seconds is not None


# -- files and processes that remain after a probe


@pytest.fixture
def empty_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty temporary folder, an empty working directory, and a cache folder that trials write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "temporary"


def wait_for_processes(notes: Path) -> None:
    wait_until_ended([int(pid) for pid in notes.read_text().split() if pid.isdigit()])


def test_probe_leaves_no_files_and_processes_of_a_messy_environment(
    tmp_path: Path, empty_temporary_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    assert probe(functools.partial(simulator.Messy, str(notes))).isolation is INDEPENDENT
    assert list(Path().iterdir()) == []
    assert [path for path in empty_temporary_folder.iterdir() if not path.name.startswith("pymp-")] == []
    wait_for_processes(notes)
    assert not any(Path(line.split()[2]).exists() for line in notes.read_text().splitlines())
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_verdict_on_a_hanging_environment_is_unknown_and_nothing_remains(
    tmp_path: Path, empty_temporary_folder: Path
) -> None:
    notes = tmp_path / "notes.txt"
    verdict = probe(functools.partial(simulator.Messy, str(notes), True), timeout=3)
    assert verdict.isolation is UNKNOWN
    for words in ("building it hangs, or takes more than 3 s", "timeout=", "probe_timeout=", 'isolation="process"'):
        assert words in verdict.explanation
    wait_for_processes(notes)


def test_trials_close_their_environments(tmp_path: Path, empty_temporary_folder: Path) -> None:
    verdict = probe(functools.partial(simulator.LeavesALock, str(tmp_path / "lock")))
    assert verdict.isolation is COLLIDE
    assert not (tmp_path / "lock").exists()


@pytest.mark.slow
def test_probe_builds_nothing_in_the_calling_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("built in the caller's process")

    instance = simulator.Plain()
    instance.reset(seed=3)
    state, environ, path = dict(vars(instance)), dict(os.environ), list(sys.path)
    monkeypatch.setattr(simulator.Plain, "__init__", refuse)
    assert probe(simulator.Plain).isolation is INDEPENDENT
    descriptors = len(os.listdir("/proc/self/fd"))
    assert probe(simulator.Plain).isolation is INDEPENDENT
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (dict(os.environ), list(sys.path), vars(instance)) == (environ, path, state)


ENDS = """
import functools, sys
from rl_ext_core.isolation import probe
from tests.core.isolation import simulator
probe(functools.partial(simulator.Messy, sys.argv[1], True))
"""


@pytest.mark.sample
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_trials_end_if_the_calling_process_is_killed(
    ending: signal.Signals, tmp_path: Path, empty_temporary_folder: Path
) -> None:
    notes, environ = tmp_path / "notes.txt", {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    caller = subprocess.Popen([sys.executable, "-c", ENDS, str(notes)], env=environ, **pipes)
    while not notes.exists() or not notes.read_text():
        assert caller.poll() is None
        time.sleep(0.005)
    caller.send_signal(ending)
    caller.communicate(timeout=120)
    assert caller.returncode in (-ending, 130, 1)
    wait_for_processes(notes)
    assert ending is signal.SIGKILL or list(empty_temporary_folder.iterdir()) == []
