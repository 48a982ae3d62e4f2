from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import signal
import threading
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core import resources
from rl_ext_core.errors import (
    EnvironmentOutputError,
    InvalidArgumentError,
    InvalidTypeError,
    NotCopyableError,
    WorkerError,
)
from rl_ext_core.recording.episode_log import LogMemory
from rl_ext_core.vector import channel
from rl_ext_core.vector.channel import SpinWaiter, should_spin
from rl_ext_core.vector.environments import EpisodeMonitor
from rl_ext_core.vector.pool import Pool
from sb3_ext import SharedMemoryVecEnv
from tests.environments import (
    EVENT_LOG,
    Counting,
    Failing,
    Gated,
    RandomEnv,
    Returning,
    Writing,
    change_result,
    count_events,
)
from tests.sb3_ext.vec_checks import FAST, expect_error, no_workers, raise_interrupt_in

ACTIONS = np.zeros(3, np.int64)


def run_episodes(venv: SharedMemoryVecEnv) -> None:
    """Seed, reset and step, until any failure has occurred."""
    venv.seed(40)
    venv.reset()
    for _ in range(12):
        venv.step(ACTIONS)


def test_error_names_environment_in_shared_worker() -> None:
    env_fns = [Counting, Counting, functools.partial(Failing, "step", "SIGSEGV")]
    with expect_error() as found:
        run_episodes(SharedMemoryVecEnv(env_fns, FAST, n_workers=1, step_timeout=60.0))
    assert (found.value.worker, found.value.notes["environment"], found.value.seed) == (0, 2, 42)
    assert str(found.value).startswith("environment 2 of 3 (seed 42), in step: ")


BOX, BYTES = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (2,), np.uint8)
NO_ARRAYS = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))))
OLD_API = itemgetter(0, 1, 2, 4)


def counting(method: str, change: Any) -> Any:
    """Make a Counting, one of whose methods returns a changed result."""
    return change_result(Counting(), method, change)


def add_lock(result: Any) -> Any:
    return *result[:4], {"fine": 1, "lock": threading.Lock()}


WRONG: list[tuple[Any, str, str]] = [
    (
        *(lambda: Returning(BOX, np.zeros(4, np.float32)), "reset"),
        "the observation has the shape (4,) where the observation space says (3,)",
    ),
    (
        *(lambda: Returning(spaces.Tuple((BOX, BYTES)), (np.zeros(3, np.float32), np.full(3, 1))), "reset"),
        "observation[1] has the shape (3,)",
    ),
    (lambda: counting("reset", lambda x: (x[0], None)), "reset", "reset() returned an info of type NoneType"),
    (lambda: counting("step", lambda x: (*x[:4], [] if x[2] else {})), "step", "step() returned an info of type list"),
    (lambda: counting("step", add_lock), "step", "info['lock'] cannot be pickled"),
    (lambda: counting("reset", itemgetter(0)), "reset", "reset() returned a value of type ndarray; expected the 2"),
    (lambda: counting("step", OLD_API), "step", "step() returned 4 values; expected the 5 of gymnasium"),
    (lambda: EpisodeMonitor(counting("step", OLD_API)), "step", "step() returned 4 values; expected the 5 of gym"),
]


@pytest.mark.parametrize(("build", "phase", "said"), WRONG)
def test_wrong_observations_and_infos_are_refused(build: Any, phase: str, said: str) -> None:
    with expect_error() as found:
        run_episodes(SharedMemoryVecEnv([build] * 3, FAST))
    assert said in str(found.value)
    assert isinstance(found.value.__cause__, EnvironmentOutputError)
    assert found.value.phase == phase


class Unreadable:
    def __reduce__(self) -> Any:
        return pickle.loads, (b"",)


def test_info_that_cannot_be_unpickled_raises_the_error_of_pickle(start_vec_env: Any) -> None:
    venv = start_vec_env([lambda: counting("step", lambda x: (*x[:4], {"unreadable": Unreadable()}))] * 2)
    venv.reset()
    with pytest.raises(EOFError, match="Ran out of input"):
        venv.step(ACTIONS[:2])


def test_exceptions_in_methods_leave_environments_usable(start_vec_env: Any) -> None:
    venv = start_vec_env([RandomEnv] * 3, n_workers=2)
    with pytest.raises(KeyError, match="raised in a call") as found:
        venv.env_method("raise_in_call")
    assert "in raise_in_call" in str(found.value.__cause__)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        venv.get_attr("no_such_attribute")
    with pytest.raises((TypeError, pickle.PicklingError), match="lock"):
        venv.env_method("make_lock", indices=1)
    assert venv.env_method("twice", 3) == [6, 6, 6]
    venv.step(ACTIONS)


def test_close_completes_pending_step(tmp_path: Path, start_vec_env: Any) -> None:
    venv = start_vec_env([functools.partial(Writing, tmp_path / "count"), Counting])
    venv.step_async(ACTIONS[:2])
    venv.close()
    assert (tmp_path / "count").read_text() == "1"


def test_calls_during_a_step_are_refused(start_vec_env: Any) -> None:
    venv = start_vec_env([RandomEnv] * 3)
    venv.step_async(ACTIONS)
    for call in (lambda: venv.step_async(ACTIONS), lambda: venv.env_method("twice", 2)):
        with pytest.raises(InvalidArgumentError, match="a step is pending"):
            call()
    venv.step_wait()


def test_step_wait_after_a_failure_raises_it_again(start_vec_env: Any) -> None:
    venv = start_vec_env([functools.partial(Failing, "step", "SIGSEGV")])
    for call in (lambda: venv.step(ACTIONS[:1]), venv.step_wait):
        with expect_error() as found:
            for _ in range(12):
                call()
        assert "SIGSEGV" in str(found.value)


def test_copies_are_refused(start_vec_env: Any) -> None:
    venv = start_vec_env([Counting] * 2)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError, match=r"cannot be copied or pickled.*SharedMemoryVecEnv\(env_fns\)"):
            duplicate(venv)
    venv.step(ACTIONS[:2])


@pytest.mark.parametrize(
    ("env_fns", "options", "kind", "said"),
    [
        ([], {}, InvalidArgumentError, "env_fns is empty"),
        (Counting, {}, InvalidTypeError, "is not a list"),
        ([3], {}, InvalidTypeError, "builds no environment"),
        ([Counting], {"n_workers": 1.5}, InvalidTypeError, r"n_workers=1\.5"),
        ([Counting], {"restart": "truncate", "max_restarts": -1}, InvalidArgumentError, "max_restarts=-1"),
        ([Counting], {"start_method": "thread"}, InvalidArgumentError, "^start_method='thread'.*Use start_method="),
        ([Counting], {"close_timeout": -1}, InvalidArgumentError, "close_timeout=-1"),
        ([Counting], {"cwd": "mine"}, InvalidArgumentError, "cwd='mine' is not a folder"),
        ([lambda: 3], {}, WorkerError, "InvalidTypeError.*the environment is a builtins.int"),
        ([functools.partial(RandomEnv, NO_ARRAYS)], {}, InvalidArgumentError, "no fixed arrays .*FlattenObservation"),
    ],
)
def test_invalid_arguments_are_refused(env_fns: Any, options: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        SharedMemoryVecEnv(env_fns, **{"start_method": FAST, **options})
    assert no_workers()


class Overwriting(Counting):
    """Environment that writes to wrong addresses, and dies."""

    def step(self, action: Any) -> Any:
        for found in gc.get_objects():
            if isinstance(found, LogMemory):
                found.memory[found._data_start : found._data_start + 1000] = b"?" * 1000
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_damaged_log_does_not_hide_the_failure(start_vec_env: Any) -> None:
    venv = start_vec_env([Counting, Overwriting])
    with expect_error() as found:
        venv.step(ACTIONS[:2])
    assert "killed by SIGSEGV" in str(found.value)
    assert "cannot be replayed, because its log is damaged" in str(found.value)


# -- closing ends environments and the processes that they started, within the timeout


class WithFork(Failing):
    """Environment that forks a process, which inherits its worker's descriptors.

    :param dies: whether its worker dies in the third step
    """

    def __init__(self, dies: bool = False) -> None:
        super().__init__("step" if dies else "", "SIGKILL", after=2)
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)


@pytest.mark.parametrize("options", [{}, {"restart": "truncate"}])
def test_worker_death_is_detected_while_its_child_process_lives(options: dict[str, Any], start_vec_env: Any) -> None:
    venv = start_vec_env([WithFork, functools.partial(WithFork, True)], **options)
    for _ in range(2):
        venv.step(ACTIONS[:2])
    if "restart" in options:
        assert venv.step(ACTIONS[:2])[2].tolist() == [False, True]
    else:
        with pytest.raises(WorkerError, match="environment 1 of 2"):
            venv.step(ACTIONS[:2])


@pytest.mark.slow
def test_dropped_vec_env_closes_environments_and_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENT_LOG, str(tmp_path / "log"))

    def use_and_drop(*, dropped: bool) -> int:
        """Use and delete a VecEnv, closed unless ``dropped``; count open descriptors."""
        venv = SharedMemoryVecEnv([Counting] * 2, FAST, restart="truncate")
        venv.reset()
        venv.step(ACTIONS[:2])
        if not dropped:
            venv.close()
        del venv
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads = use_and_drop(dropped=False), threading.active_count()
    assert [use_and_drop(dropped=True) for _ in range(3)] == [before] * 3
    assert threading.active_count() == threads
    assert no_workers()
    assert count_events("closed", in_this_process=False) == 8


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seconds"), [("close", 6.5), ("thread", 1.5)])
def test_close_waits_for_environments_by_default(how: str, seconds: float, tmp_path: Path, start_vec_env: Any) -> None:
    start_vec_env([Counting, functools.partial(Writing, str(tmp_path / "video"), how, seconds)]).close()
    assert (tmp_path / "video").exists()


def test_error_in_close_does_not_interrupt_other_environments(tmp_path: Path, start_vec_env: Any) -> None:
    slow = functools.partial(Writing, str(tmp_path / "video"), "close", 1)
    venv = start_vec_env([functools.partial(Failing, "close"), slow])
    said = r"environment 0 of 2, in close: raised ValueError\('the rope has snapped'\)"
    with pytest.raises(WorkerError, match=said) as found:
        venv.close()
    assert repr(found.value.__cause__) == "ValueError('the rope has snapped')"
    assert (tmp_path / "video").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("close", "in close"), ("thread", "in threads that go on after its close")])
def test_exceeded_close_timeout_warns(how: str, said: str, tmp_path: Path, start_vec_env: Any) -> None:
    venv = start_vec_env([Counting, functools.partial(Writing, str(tmp_path / "video"), how, 1000)], close_timeout=1)
    text = f"environment 1 of 2 was still {said} after [\\d.]+ s of closing.*Use close_timeout=None"
    with pytest.warns(UserWarning, match=text) as found:
        venv.close()
    assert found[0].filename == __file__


def test_close_does_not_wait_for_interrupted_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_vec_env: Any
) -> None:
    monkeypatch.setattr("rl_ext_core.vector.pool.UNFINISHED_SECONDS", 0.3)
    venv = start_vec_env([functools.partial(Gated, tmp_path / "never")] * 2)
    with raise_interrupt_in(Pool, "_receive"), pytest.raises(KeyboardInterrupt):
        venv.step(ACTIONS[:2])
    with pytest.warns(UserWarning, match="environment 0 of 2 was still in step after"):
        venv.close()


# -- waits that spin before they block, as on machines with a core for each process

LONG_S = 1.0


@pytest.fixture
def long_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits spin for a second on any machine; forked workers inherit this."""
    monkeypatch.setattr(channel, "should_spin", lambda num_workers: True)
    for name in ("ANSWER_SECONDS", "COMMAND_SECONDS", "_PREEMPTED_SECONDS"):
        monkeypatch.setattr(SpinWaiter, name, LONG_S)


def test_waiting_spins_only_if_each_process_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, num_workers, expected in ((3, 2, True), (2, 2, False), (2, 1, True), (1, 1, False)):
        monkeypatch.setattr(resources, "usable_cores", lambda cores=cores: cores)
        assert should_spin(num_workers) is expected


@pytest.mark.usefixtures("long_spinning")
def test_worker_death_is_detected_while_spinning(start_vec_env: Any) -> None:
    venv = start_vec_env([Counting, lambda: Failing("step", "os._exit", after=0)])
    with pytest.raises(WorkerError, match="environment 1 of 2, in step"):
        venv.step(np.zeros(2, np.int64))


@pytest.mark.usefixtures("long_spinning")
def test_unread_wake_bytes_do_not_block(start_vec_env: Any) -> None:
    venv = start_vec_env([Counting])
    (worker,) = venv._pool.workers
    for _ in range(70_000):  # more than a pipe holds
        worker.wake_worker()
    worker.interrupt_wait()
    assert [venv.step(np.zeros(1, np.int64))[0][0, 0] for _ in range(3)] == [1, 2, 3]
    time.sleep(LONG_S + 0.2)  # the worker blocks now
    assert venv.step(np.zeros(1, np.int64))[0][0, 0] == 4
