"""Tests of ``RayVecEnv``, which ``test_ray_vec_env`` runs in a separate process.

Ray stores its files in the folder that the variable ``RAY`` names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from stable_baselines3.common.vec_env import SubprocVecEnv

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from sb3_ext import RayVecEnv, make_vec_env
from tests.environments import Counting, Failing, RandomEnv
from tests.interrupts import interrupt_everywhere
from tests.sb3_ext.vec_checks import FAST, action_of, assert_equal, rollout


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start a cluster, stop it at the end, and wait before that until all actors have ended."""
    start_ray()
    yield
    end = time.monotonic() + 120
    while left := actor_processes():
        assert time.monotonic() < end, left
        time.sleep(0.1)
    ray.shutdown()


def start_ray() -> None:
    """Start a local Ray cluster with four CPUs."""
    options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 2**27, "log_to_driver": False}
    ray.init("local", _temp_dir=os.environ["RAY"], **options)


def actor_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any time
            if "ray::Actor" in child.name():
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("build", "n_workers"),
    [
        (functools.partial(RandomEnv, "Dict", "Box", "float32"), 2),
        (functools.partial(RandomEnv, "Tuple", "Tuple", "large int"), None),
    ],
)
def test_results_equal_those_of_subproc_vec_env(build: Any, n_workers: int | None) -> None:
    space = build().action_space
    space.seed(0)
    actions = [action_of(space, 3) for _ in range(25)]
    theirs = SubprocVecEnv([build] * 3, start_method=FAST)
    ours = RayVecEnv([build] * 3, n_workers=n_workers)
    assert_equal(rollout(ours, actions), rollout(theirs, actions))
    assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"))
    assert_equal(ours.get_images(), list(theirs.get_images()))
    ours.close()
    theirs.close()


def test_methods_reach_the_environments() -> None:
    venv = make_vec_env(RandomEnv, 3, seed=3, vec_env_cls=RayVecEnv, vec_env_kwargs={"n_workers": 2})
    assert isinstance(venv, RayVecEnv)
    venv.set_attr("label", "other", 1)
    assert venv.get_attr("label", indices=[2, 1]) == ["drawn", "other"]
    with pytest.raises(KeyError, match="raised in a call"):
        venv.env_method("raise_in_call", indices=1)
    assert venv.env_method("loaded", ["stable_baselines3", "torch"]) == [[]] * 3
    pids = venv.env_method("pid")
    assert set(pids) <= {actor.pid for actor in actor_processes()}
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 1]
    draws = [json.dumps(draw) for draw in venv.env_method("draws")]
    assert len(set(draws)) == 3
    venv.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        venv.reset()


def run_episodes(venv: RayVecEnv, said: str) -> None:
    """Reset and step; after a failure, check that the next reset raises the same error."""
    try:
        venv.seed(40)
        venv.reset()
        for _ in range(12):
            venv.step(np.array([0, 1, 0]))
    except WorkerError:
        with pytest.raises(WorkerError, match=said):
            venv.reset()
        raise
    finally:
        venv.close()


def assert_fails(when: str, how: str, said: str, phase: str, **options: Any) -> WorkerError:
    """Check that a failing environment raises WorkerError with this text; return the error."""
    with pytest.raises(WorkerError, match=said) as caught:
        run_episodes(
            RayVecEnv([Counting, functools.partial(Failing, when, how), Counting], n_workers=2, **options), said
        )
    assert caught.value.phase == phase
    return caught.value


def test_exceptions_raise_worker_errors() -> None:
    for phase in ("constructor", "reset", "step", "close"):
        error = assert_fails(phase, "raise", "environment 1 of 3.*ValueError.'the rope has snapped'", phase)
        assert isinstance(error.__cause__, ValueError)
        assert "environments.py" in error.traceback
        assert (error.seed, error.worker) == (None if phase == "constructor" else 41, 0)
    assert assert_fails("step", "raise what does not pickle", "UnpicklableError: a lock|UnpicklableError", "step").kind
    assert assert_fails("step", "sys.exit", "SystemExit", "step").kind == "exception"


def test_deaths_of_actors_raise_worker_errors() -> None:
    for how in ("SIGSEGV", "SIGKILL", "os._exit"):
        error = assert_fails(
            "step", how, r"environment [01] of 3 .*its actor, with environments 0 to 1, has died", "step"
        )
        assert error.kind == "exit"


def test_interrupted_steps_can_be_awaited_again() -> None:
    venv = RayVecEnv([Counting] * 3, n_workers=2)
    actions = np.zeros(3, dtype=np.int64)

    def prepare() -> Callable[[], Any]:
        venv.reset()
        venv.step(actions)
        venv.step_async(actions)
        return venv.step_wait

    n_waited = 0
    for where in interrupt_everywhere(prepare, code_paths=("/vector/ray_workers.py",)):
        if venv.waiting:
            n_waited += 1
            assert venv.step_wait()[0][:, 0].tolist() == [2, 2, 2], where
    assert n_waited > 10
    venv.close()


def test_ray_is_not_restarted_after_shutdown() -> None:
    closed, used = RayVecEnv([RandomEnv]), RayVecEnv([RandomEnv] * 2)
    ray.shutdown()
    closed.close()
    with pytest.raises(WorkerError, match=r"environment 0 of 2, in reset: ray.shutdown\(\) has ended it"):
        used.reset()
    used.close()
    assert not ray.is_initialized()
    start_ray()


def test_hanging_environments_exceed_timeouts() -> None:
    assert_fails("step", "hang", "did not answer within 1 s", "step", step_timeout=1)
    assert_fails("constructor", "hang", "did not answer within 10 s", "constructor", start_timeout=10)
