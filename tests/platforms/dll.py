"""Tests of a C library that allows one instance per process, without pytest.

``test_stand_ins.py`` runs this script on imitations of other systems, ``scripts/windows_under_wine.sh`` on Windows.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.errors import WorkerError
from tests.platforms.buffers import expect_error, is_missing, main

# The environment variable with the library's path. The caller of this script compiles it from simulator.c.
LIBRARY = "RL_EXT_TEST_LIBRARY"
ON_WINDOWS = os.name == "nt"
NOTHING, CRASH, CRASH_IN_A_THREAD, ABORT, EXIT = range(5)


class Simulator(gymnasium.Env[Any, Any]):
    """Environment of a C simulator that allows one instance per process."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(1)  # only NOTHING, so that probes do not crash

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ[LIBRARY])
        self.library.simulator_new.restype = ctypes.c_void_p
        self.library.simulator_step.restype = ctypes.c_double
        if self.library.simulator_new() is None:
            raise RuntimeError("the simulator allows only one instance per process")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.library.simulator_reset(int(self.np_random.integers(1000)))
        return np.zeros(1), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        value = self.library.simulator_step(int(action))
        return np.array([value]), value, False, False, {"pid": os.getpid()}

    def close(self) -> None:
        self.library.simulator_free()


gymnasium.register("rl_ext_tests/Simulator-v0", Simulator, max_episode_steps=6)


def assert_no_children() -> None:
    """Wait for the end of this process's children, and fail after a time limit."""
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def collect_rewards(environment: Any, seed: int) -> list[float]:
    environment.reset(seed=seed)
    return [float(environment.step(NOTHING)[1]) for _ in range(5)]


def test_make_vec_env_starts_one_process_per_instance() -> None:
    if is_missing("sb3_ext"):
        return
    from sb3_ext import AutoVecEnv, make_vec_env

    with contextlib.closing(Simulator()) as environment:
        expected = [collect_rewards(environment, seed) for seed in (5, 6)]
    with contextlib.closing(make_vec_env("rl_ext_tests/Simulator-v0", 2, seed=5)) as vec_env:
        vec_env.reset()
        steps = [vec_env.step(np.full(2, NOTHING)) for _ in range(5)]
        np.testing.assert_array_equal(np.float32(expected).T, [rewards for _, rewards, _, _ in steps])
        pids = {info["pid"] for _, _, _, infos in steps for info in infos}
        assert len(pids) == 2
        assert os.getpid() not in pids
    assert_no_children()
    expect_error(RuntimeError, "only one instance", lambda: AutoVecEnv([Simulator] * 2, isolation="in-process"))


def test_error_names_how_a_worker_died() -> None:
    if is_missing("sb3_ext"):
        return
    from sb3_ext import make_vec_env

    # ctypes turns an access violation on Windows into an OSError.
    crashed = "ended with exit code 0xC0000005" if ON_WINDOWS else "was killed by SIGSEGV"
    aborted = "ended with exit code 3" if ON_WINDOWS else "was killed by SIGABRT"
    crashed_in_call = "raised OSError" if ON_WINDOWS else crashed
    deaths = {CRASH: crashed_in_call, CRASH_IN_A_THREAD: crashed, ABORT: aborted, EXIT: "ended with exit code 7"}
    for action, how in deaths.items():
        vec_env = make_vec_env(Simulator, 2, isolation="process", recorder=False)
        vec_env.reset()
        vec_env.step(np.array([NOTHING, NOTHING]))
        expect_error(WorkerError, f", in step: {how}", functools.partial(vec_env.step, np.array([NOTHING, action])))
        assert_no_children()
        vec_env.close()


if __name__ == "__main__":
    sys.exit(main(globals()))
