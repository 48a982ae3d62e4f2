"""Tests of workers and probes on any operating system, run by ``test_stand_ins.py``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rl_ext_core._system import set_variables
from rl_ext_core.errors import WorkerError
from rl_ext_core.isolation import Isolation, probe
from sb3_ext import AutoVecEnv, SharedMemoryVecEnv, as_factory, make_vec_env
from tests.platforms import simulators
from tests.platforms.buffers import expect_error, main, temporary_folder

psutil: Any = importlib.import_module("psutil") if importlib.util.find_spec("psutil") else None


class Single(simulators.Single):
    """Environment class of the main script, as users define them."""


def record_steps(venv: VecEnv, seed: int = 3) -> list[Any]:
    """Step two environments twelve times, close them, and return all results."""
    with contextlib.closing(venv):
        venv.seed(seed)
        seen = [venv.reset()]
        for number in range(12):
            observations, rewards, dones, _ = venv.step(np.array([number % 2, 1]))
            seen += [observations, rewards, dones]
        return seen


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Assert that two lists of arrays are equal."""
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_no_children() -> None:
    """Wait for the end of this process's children, and fail after a time limit."""
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    # multiprocessing's resource tracker runs until this process exits.
    assert psutil is None or all(
        "resource_tracker" in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)
    )


def test_make_vec_env_starts_one_process_per_single_instance_env() -> None:
    venv = make_vec_env(Single, 2, seed=0)
    assert isinstance(venv, SharedMemoryVecEnv)
    assert "Cannot create multiple instances" in venv.isolation_report
    assert "has its own process" in venv.isolation_report
    theirs = env_util.make_vec_env(Single, 2, 0, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "spawn"})
    found = record_steps(venv)
    assert found[2].dtype == np.float32
    assert_same(found, record_steps(theirs))
    assert not Single.instances
    assert_no_children()


def test_probe_verdicts() -> None:
    single = Isolation.SINGLE_INSTANCE
    ends = "ends the process with" if os.name == "nt" else "kills the process by SIGABRT"
    for source, expected, text in (
        (simulators.Aborts, single, f"building the second {ends}"),
        (simulators.Shares, Isolation.SHARED_STATE, "returns something else from its step"),
        (simulators.Unrepeatable, Isolation.NON_DETERMINISTIC, "does not return the same twice"),
        (lambda: Single("in its constructor"), Isolation.UNKNOWN, "building it raises OSError: no license"),
    ):
        verdict = probe(source)
        assert verdict.isolation is expected, verdict
        assert text in verdict.explanation, verdict
    assert_no_children()


def test_probe_kills_hanging_env_and_its_children() -> None:
    with temporary_folder() as place:
        (place / "temporary").mkdir()
        before = {name: os.environ.pop(name, None) for name in ("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")}
        os.environ.update(dict.fromkeys(before, str(place / "temporary")))
        os.environ["XDG_CACHE_HOME"] = str(place)  # trials may write to the cache
        tempfile.tempdir = None
        try:
            verdict = probe(functools.partial(simulators.Hangs, str(place / "note")), timeout=1)
        finally:
            set_variables(before)
            tempfile.tempdir = None
        assert verdict.isolation is Isolation.UNKNOWN, verdict
        assert "building it hangs" in verdict.explanation
        deadline = time.monotonic() + 60
        # Without psutil, only the deletion of the folder shows it: a running child would keep it on Windows.
        while psutil is not None and any(psutil.pid_exists(int(pid)) for pid in (place / "note").read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not list((place / "temporary").iterdir())
    assert_no_children()


def test_independent_envs_share_a_process_without_a_main_guard() -> None:
    with temporary_folder() as place:
        script = place / "script.py"
        script.write_text(
            "from sb3_ext import make_vec_env\n"
            "for _ in range(2):\n"
            "    print(type(make_vec_env('CartPole-v1', 2)).__name__)\n"
            "from rl_ext_core.isolation import probe\n"
            "print(probe('CartPole-v1').declared_by)\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["DummyVecEnv", "DummyVecEnv", "probe"], done


def test_workers_can_have_separate_working_directories() -> None:
    venv = AutoVecEnv([simulators.Locks] * 2, cwd="own")
    assert isinstance(venv, SharedMemoryVecEnv)
    assert venv.working_directory is not None
    assert venv.working_directory in venv.isolation_report, venv.isolation_report
    venv.reset()
    assert sorted(path.name for path in Path(venv.working_directory).iterdir()) == ["0", "1"]
    assert not Path("lock").exists()
    venv.close()
    shutil.rmtree(venv.working_directory, ignore_errors=True)
    assert_no_children()


def test_envs_declared_in_process_share_a_process() -> None:
    for venv in (make_vec_env(simulators.Declared, 2), make_vec_env("CartPole-v1", 2, isolation="in-process")):
        assert isinstance(venv, DummyVecEnv)
        venv.close()
    assert isinstance(make_vec_env(Single, 1), DummyVecEnv)
    Single.instances.clear()  # close() does not remove the instance


def test_instance_is_copied_to_all_envs() -> None:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    env.unwrapped.gravity = 3.0
    assert as_factory(env).examination is not None
    venv = make_vec_env(env, 2, seed=0)
    assert venv.env_method("get_wrapper_attr", "gravity") == [3.0, 3.0]
    venv.close()
    assert_no_children()


def test_error_names_how_a_worker_died() -> None:
    with temporary_folder() as folder:
        options = {"recorder": folder}
        venv = make_vec_env(lambda: Single("in a step"), 2, isolation="process", vec_env_kwargs=options)
        venv.reset()
        for _ in range(2):
            venv.step(np.zeros(2, int))
        died = ", in step: ended with exit code 7"
        expect_error(WorkerError, died, lambda: venv.step(np.zeros(2, int)))
        venv.close()
        assert len(os.listdir(folder)) == 1
    assert_no_children()
    build = functools.partial(make_vec_env, lambda: Single("in its constructor"), 2, isolation="process")
    expect_error(WorkerError, "in its constructor: raised OSError('no license')", build)
    assert_no_children()


def test_dead_worker_is_replaced() -> None:
    venv = SharedMemoryVecEnv(
        [lambda: Single("in a step"), Single], restart="truncate", step_timeout=300, recorder=False
    )
    venv.reset()
    dones = [venv.step(np.zeros(2, int))[2].tolist() for _ in range(3)]
    assert dones == [[False, False], [False, False], [True, False]]
    assert venv.timings.restarts == 1
    venv.close()
    assert_no_children()


def test_parallel_env_accepts_an_instance() -> None:
    import torch  # imported here, because each spawned process runs the module's imports
    from torchrl import envs as upstream

    from torchrl_ext import GymEnv, GymWrapper, ParallelEnv

    env = ParallelEnv(2, GymEnv("Pendulum-v1"), seed=0)
    rollout = env.rollout(5)
    env.close()
    assert rollout.shape == (2, 5)
    assert (rollout["observation"][0] != rollout["observation"][1]).any()
    ours = ParallelEnv(2, lambda: GymWrapper(Single()), mp_start_method="spawn")
    ours.set_seed(0)
    torch.manual_seed(0)
    found = ours.rollout(4)
    ours.close()
    theirs = upstream.ParallelEnv(
        2,
        as_factory(lambda: GymWrapper(Single())),
        mp_start_method="spawn",
        metadata_from_workers=True,
        use_buffers=False,
    )
    theirs.set_seed(0)
    torch.manual_seed(0)
    expected = theirs.rollout(4)
    theirs.close()
    assert not Single.instances
    assert (found == expected).all()
    assert_no_children()


if __name__ == "__main__":
    sys.exit(main(globals()))
