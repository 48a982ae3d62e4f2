from __future__ import annotations

import functools
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from sb3_ext import as_factory
from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.environments import Counting, Failing, FailingOnce, RandomEnv
from tests.sb3_ext.vec_checks import FAST, no_workers

RESTARTING: dict[str, Any] = {"restart": "truncate", "step_timeout": 60.0}


@pytest.mark.parametrize(
    ("how", "start_method"),
    [
        ("SIGSEGV", "fork"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("raise", "forkserver"), ("hang", "fork"))),
    ],
)
def test_episode_of_replaced_worker_is_truncated_with_last_observation(
    how: str, start_method: str, start_vec_env: Any
) -> None:
    env_fns = [Counting, functools.partial(Failing, "step", how, after=4), Counting]
    options = {**RESTARTING, "step_timeout": 3.0 if how == "hang" else 60.0}
    venv = start_vec_env(env_fns, start_method, **options)
    for _ in range(4):
        before = venv.step(np.zeros(3, np.int64))[0]
    after, rewards, dones, infos = venv.step(np.zeros(3, np.int64))
    assert (dones.tolist(), rewards.tolist()) == ([False, True, False], [1.0, 0.0, 1.0])
    assert infos[1]["TimeLimit.truncated"] is True
    np.testing.assert_array_equal(infos[1]["terminal_observation"], before[1])
    assert infos[1]["worker_error"].startswith("environment 1 of 3, in step: ")
    assert set(infos[0]) == {"TimeLimit.truncated"}
    assert after[:, 0].tolist() == [5, 0, 5]
    assert venv.reset_infos[1]["world"] == pytest.approx(after[1, 1])
    assert venv.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [6, 1, 6]
    assert venv.timings.restarts == 1


@pytest.mark.slow
def test_answering_workers_do_not_time_out_while_another_is_replaced(tmp_path: Path, start_vec_env: Any) -> None:
    class SlowToBuild(FailingOnce):
        """Environment that fails once, and takes three seconds to be built again."""

        def __init__(self, mark: str, when: str) -> None:
            super().__init__(mark, when)
            if self._mark.exists():
                time.sleep(3)

    env_fns = [functools.partial(SlowToBuild, str(tmp_path / "mark"), "step"), Counting, Counting]
    venv = start_vec_env(env_fns, restart="truncate", step_timeout=2.0)
    assert venv.step(np.zeros(3, np.int64))[2].tolist() == [True, False, False]
    time.sleep(2.5)  # longer than step_timeout, but no step is pending
    assert venv.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [1, 2, 2]
    assert venv.timings.restarts == 1


class Settable(Counting):
    """Environment that returns its attributes; action 2 or a file makes it exit."""

    level: Any = 1
    bonus = 0

    def __init__(self, mark: str | None = None) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)
        self._mark, self._options = mark, None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._mark is not None and os.path.exists(self._mark):
            os.remove(self._mark)
            os._exit(3)
        self._options = options
        # Negative seeds are accepted, which gymnasium's generator refuses.
        return super().reset(seed=None if seed is None else abs(seed), options=options)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 2:
            os._exit(3)
        return super().step(action)

    def get_state(self) -> Any:
        """Return the attributes that were set, and the options of the last reset."""
        return self.level, self.bonus, self._options

    def set_bonus(self, bonus: int) -> None:
        self.bonus = bonus

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "read_only":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_replaced_environment_gets_attributes_and_reset_options(start_vec_env: Any) -> None:
    venv = start_vec_env([Settable] * 3, n_workers=2, **RESTARTING)
    level = {"name": "first"}
    venv.set_attr("level", level)
    venv.set_attr("level", level, indices=[1, 2])
    level["name"] = "changed later"
    venv.set_attr("level", {"name": "third"}, indices=2)
    venv.env_method("set_bonus", 4, indices=[2])
    with pytest.raises(AttributeError):
        venv.set_attr("read_only", 1)
    venv.seed(5)
    venv.set_options({"start": 9})
    venv.reset()
    pids = venv.env_method("pid", indices=[0, 1, 2])
    dying = next(index for index in (0, 2) if pids.count(pids[index]) == 2)
    after, _, dones, infos = venv.step(np.array([2 if index == dying else 0 for index in range(3)]))
    replaced = [pid == pids[dying] for pid in pids]
    assert dones.tolist() == replaced
    for index in np.flatnonzero(replaced):
        text = infos[index]["worker_error"]
        again = re.search(
            r"Repeated for the new environment: set_attr\('level'\), reset\(seed=(\d+), options={'start': 9}\)\.", text
        )
        assert again
        assert int(again[1]) != 5 + index, "the same seed would repeat the same episodes"
        missing = "env_method('set_bonus'), env_method('pid')" if index == 2 else "env_method('pid')"
        assert f"Not repeated: {missing}. Call them again for environment {index}." in text
        assert venv.reset_infos[index]["worker_error"] == text
        assert after[index, 1] == np.float32(np.random.default_rng(int(again[1])).random())
    levels = [{"name": "first"}, {"name": "first"}, {"name": "third"}]
    bonus = 0 if replaced[2] else 4
    assert venv.env_method("get_state") == [(levels[index], bonus * (index == 2), {"start": 9}) for index in range(3)]


def test_reset_with_worker_death_keeps_seed_and_options(tmp_path: Path, start_vec_env: Any) -> None:
    mark = tmp_path / "mark"
    venv = start_vec_env([Settable, functools.partial(Settable, str(mark))], **RESTARTING)
    venv.seed(5)
    expected = venv.reset()
    mark.touch()
    venv.seed(5)
    venv.set_options({"start": 9})
    np.testing.assert_array_equal(venv.reset(), expected)
    assert "worker_error" not in venv.reset_infos[0]
    assert venv.reset_infos[1]["worker_error"].startswith("environment 1 of 2 (seed 6), in reset: ended with exit code")
    assert [options for *_, options in venv.env_method("get_state")] == [{"start": 9}] * 2


def test_failure_in_a_call_is_recorded_once(tmp_path: Path, start_vec_env: Any) -> None:
    env_fns = [Counting, functools.partial(Failing, "method", "SIGSEGV")]
    venv = start_vec_env(env_fns, recorder=tmp_path, **RESTARTING)
    for call in (lambda: venv.env_method("method"), lambda: venv.get_attr("label")):
        with pytest.raises(WorkerError, match="environment 1 of 2, in method: "):
            call()
    infos = venv.step(np.zeros(2, np.int64))[3]
    assert infos[1]["worker_error"].startswith("environment 1 of 2, in method: ")
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(WorkerError, match="environment 1 of 2, in method: "):
        venv.env_method("method")
    assert len(list(tmp_path.iterdir())) == 2


def test_call_that_cannot_be_sent_keeps_earlier_attributes(start_vec_env: Any) -> None:
    venv = start_vec_env([Settable] * 2, **RESTARTING)
    venv.set_attr("level", 7)
    for call in (
        lambda: venv.set_attr("level", threading.Lock()),
        lambda: venv.env_method("set_bonus", threading.Lock()),
    ):
        with pytest.raises(TypeError, match="pickle"):
            call()
    venv.reset()
    text = venv.step(np.array([2, 0]))[3][0]["worker_error"]
    assert "Repeated for the new environment: set_attr('level')." in text
    assert "Not repeated" not in text
    assert venv.get_attr("level") == [7, 7]


def test_environment_with_negative_seed_is_replaced(start_vec_env: Any) -> None:
    venv = start_vec_env([Settable] * 2, **RESTARTING)
    venv.seed(-5)
    venv.reset()
    assert venv.step(np.array([2, 0]))[2].tolist() == [True, False]


@pytest.mark.parametrize("when", ["step", "reset"])
def test_error_is_raised_after_max_restarts(when: str, caplog: pytest.LogCaptureFixture) -> None:
    env_fns = [Counting, functools.partial(Failing, when, "SIGSEGV", after=0)]
    venv = SharedMemoryVecEnv(env_fns, FAST, max_restarts=3, **RESTARTING)

    def step_repeatedly() -> None:
        venv.reset()
        for _ in range(4):
            venv.step(np.zeros(2, np.int64))

    with caplog.at_level(logging.WARNING, "sb3_ext"), pytest.raises(WorkerError, match=f"in {when}: .*SIGSEGV"):
        step_repeatedly()
    assert venv.timings.restarts == 3
    assert no_workers()
    assert [f"(restart {count} of 3)" in caplog.messages[count - 1] for count in (1, 2, 3)] == [True] * 3
    with pytest.raises((WorkerError, InvalidArgumentError)):
        venv.step(np.zeros(2, np.int64))
    venv.close()


def test_restarted_environments_draw_differently(start_vec_env: Any) -> None:
    venv = start_vec_env(as_factory(RandomEnv).for_workers(2, seed=3), **RESTARTING)
    seen = []
    for _ in range(3):
        seen.append(venv.env_method("draws", indices=0)[0])
        os.kill(venv.env_method("pid", indices=0)[0], signal.SIGKILL)
        venv.step(np.zeros(2, np.int64))
        venv.reset()
    for name in ("random", "numpy", "torch", "libc", "own"):
        assert len({tuple(draws[name]) for draws in seen}) == 3, name
