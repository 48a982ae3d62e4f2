"""Tests of ``ParallelEnv``: closing, pickles, child processes, Ctrl-C, warnings."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.envs import ParallelEnv as Upstream

from rl_ext_core.errors import NotCopyableError, WorkerError
from tests.interrupts import interrupt_at
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_checks import event_log, no_workers_left, workers_left
from tests.torchrl_ext.parallel_environments import Failing, Well, count_events
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["event_log", "no_workers_left"]

slow = pytest.mark.slow


def test_close_ends_workers_and_closes_environments(event_log: Any) -> None:
    env = ParallelEnv(2, Failing)
    env.reset()
    env.close()
    assert not running_workers()
    assert count_events("closed", in_this_process=False) >= 2
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        env.close()
    env.close(raise_if_closed=False)
    assert env.rollout(3).shape == (2, 3)
    env.close()


@slow
def test_close_frees_descriptors_and_threads_and_restores_num_threads() -> None:
    env = ParallelEnv(2, Failing, create_env_kwargs=[{}, {"when": "step"}])
    counts, before = [], torch.get_num_threads()
    try:
        for _ in range(3):
            torch.set_num_threads(5)
            env.reset()
            with pytest.raises(WorkerError):
                env.rollout(5)
            assert torch.get_num_threads() == 5
            env.reset()
            env.close()
            gc.collect()
            counts.append((psutil.Process().num_fds(), psutil.Process().num_threads()))
    finally:
        torch.set_num_threads(before)
    assert counts[-1] <= counts[1]


# -- pickles


@pytest.mark.sample
@pytest.mark.parametrize(
    ("source", "dumps"),
    [(lambda: GymWrapper(Well()), pickle.dumps), (Well(4.0), cloudpickle.dumps)],
    ids=["lambda", "instance"],
)
def test_pickling_closes_the_environment_and_the_copy_starts_new_workers(
    source: Any, dumps: Callable[[Any], bytes]
) -> None:
    env = ParallelEnv(2, source, seed=3)
    before = env.rollout(3)["observation"]
    copy = pickle.loads(dumps(env))
    assert env.is_closed  # as with upstream
    assert not running_workers()
    torch.manual_seed(0)
    found = copy.rollout(3)["observation"]
    copy.close()
    assert torch.equal(found[:, 0], before[:, 0])


# -- processes that environments start, and closing


class EnvWithSimulator(Failing):
    """Environment with a simulator process, and a forked daemon that inherits all descriptors."""

    def __init__(self, pids: str, **options: Any) -> None:
        self.simulator = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
        self.daemon = os.fork()
        if self.daemon == 0:
            os.setsid()
            time.sleep(30)
            os._exit(0)
        with Path(pids).open("a") as file:
            file.write(f"{self.simulator.pid}\n")
        super().__init__(**options)

    def close(self) -> None:
        for pid in (self.simulator.pid, self.daemon):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        super().close()


def is_running(pid: int) -> bool:
    """Return whether a process runs; zombies do not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
@pytest.mark.parametrize("when", ["step", "method"])
def test_worker_failure_is_detected_while_its_children_live(when: str, how: str, method: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    kwargs = [{"pids": str(pids)}, {"pids": str(pids), "when": when, "how": how}]
    env = ParallelEnv(2, EnvWithSimulator, create_env_kwargs=kwargs, mp_start_method=method, step_timeout=60)
    with pytest.raises(WorkerError, match="worker 1 of 2") as caught:  # noqa: PT012
        env.reset()
        env.rollout(5, break_when_any_done=False)
        env.fetch()
    assert caught.value.kind != "timeout"
    end = time.monotonic() + 120
    while (left := list(filter(is_running, map(int, pids.read_text().split())))) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left
    env.close()


@pytest.mark.sample(quick=1, ci=2)
@pytest.mark.parametrize("how", ["Ctrl-C", "raise", "hang"])
def test_environments_are_closed_when_another_one_fails(how: str, event_log: Path) -> None:
    fault = {"when": "step", "how": f"interrupt {os.getpid()}" if how == "Ctrl-C" else how}
    env = ParallelEnv(3, Failing, create_env_kwargs=[{}, fault, {}], step_timeout=3 if how == "hang" else None)
    env.reset()
    before = count_events("closed", in_this_process=False)
    with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else WorkerError):
        env.rollout(5)
    assert count_events("closed", in_this_process=False) - before == 3


class SlowToClose(Well):
    """Environment that closes slowly, and then writes a file in a thread."""

    def __init__(self, file: str, seconds: float) -> None:
        super().__init__()
        self.file, self.seconds = file, seconds

    def close(self) -> None:
        time.sleep(self.seconds)
        threading.Thread(target=self._write_file_later).start()

    def _write_file_later(self) -> None:
        """Write a line to the file after ``seconds``."""
        time.sleep(self.seconds)
        with Path(self.file).open("a") as file:
            file.write("video\n")


@slow
def test_close_waits_for_slow_environments(tmp_path: Path) -> None:
    env = ParallelEnv(2, SlowToClose, create_env_kwargs={"file": str(tmp_path / "video"), "seconds": 0.7})
    env.rollout(3)
    (tmp_path / "video").unlink(missing_ok=True)  # written by the copy that was tested
    env.close()
    assert (tmp_path / "video").read_text() == "video\n" * 2


@slow
def test_close_warns_after_shutdown_timeout(tmp_path: Path) -> None:
    kwargs = [{"file": str(tmp_path / "video"), "seconds": seconds} for seconds in (0, 1000)]
    env = ParallelEnv(2, SlowToClose, create_env_kwargs=kwargs, shutdown_timeout=2)
    env.reset()
    with pytest.warns(UserWarning, match=r"worker 1 of 2 was still in close after 2.*Use shutdown_timeout=None"):
        env.close()
    assert not running_workers()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="trying to close a closed environment"):
        env.close()


class SlowToStep(Well):
    """Environment whose step takes 0.6 seconds without computing."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.6)
        return super().step(action)


def test_waiting_for_workers_takes_no_core_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.resources.usable_cores", lambda: 2)
    env = ParallelEnv(2, SlowToStep)
    data = env.rand_action(env.reset())
    env.step(data.clone())
    begin = time.process_time()
    env.step(data)
    assert time.process_time() - begin < 0.4, "TorchRL polls for 0.6 seconds"
    env.close()


class ManyKeys(Well):
    """Environment whose observations have 300 keys."""

    observation_space = spaces.Dict({f"k{index}": spaces.Box(-1, 1, (2,), np.float32) for index in range(300)})

    def _observation(self) -> Any:
        """Return two numbers under each of the keys."""
        return {key: np.full(2, self.count / 10, np.float32) for key in self.observation_space}


@slow
def test_observations_with_many_keys_work_with_a_fork_server() -> None:
    env = ParallelEnv(2, ManyKeys, mp_start_method="forkserver")
    data = env.rollout(3, break_when_any_done=False)
    assert all((data["next", f"k{index}"][:, 2] == 0.3).all() for index in range(300))
    env.close()


def make_cartpole() -> GymEnv:
    """Make TorchRL's environment of a CartPole, with our class."""
    return GymEnv("CartPole-v1")


def make_nested_parallel() -> ParallelEnv:
    """Make a ParallelEnv of two CartPoles, which starts its own workers."""
    return ParallelEnv(2, make_cartpole)


def make_async_vector() -> GymWrapper:
    """Make a wrapped AsyncVectorEnv of two CartPoles, which starts its own workers."""
    return GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"))


NESTED: dict[str, Callable[[], Any]] = {
    "a function": lambda: make_nested_parallel,
    "an instance": make_nested_parallel,
    "gymnasium's processes": lambda: make_async_vector,
    "upstream's": lambda: lambda: Upstream(2, make_cartpole),
}


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("form", NESTED)
def test_environments_may_start_their_own_processes(form: str) -> None:
    env = ParallelEnv(2, NESTED[form]())
    assert env.rollout(3, break_when_any_done=False).shape == (2, 2, 3)
    env.close()
    assert not workers_left()


# -- Ctrl-C

CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action(env.reset())),
    "step_and_maybe_reset": lambda env: env.step_and_maybe_reset(env.rand_action(env.reset())),
    "method": lambda env: env.fetch(litres=2),
    "state": lambda env: env.load_state_dict(env.state_dict()),
    "close": lambda env: env.close(),
}
CODE_PATHS = ("/torchrl_ext/parallel/", "/rl_ext_core/processes/", "/rl_ext_core/vector/")


# Python turns exceptions in finalizers into warnings.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sample(quick=0, ci=3)
@pytest.mark.parametrize("in_torchrl", [False, True], ids=["gymnasium", "TorchRL"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("every", [151, pytest.param(17, marks=pytest.mark.exhaustive)])
def test_ctrl_c_at_any_line_leaves_a_usable_environment(call: str, every: int, in_torchrl: bool) -> None:
    """After the interrupt, the next call works or its error names ``reset``."""
    env = ParallelEnv(2, TransformedEnv(GymWrapper(Failing()), RewardSum()) if in_torchrl else Failing)
    env.reset()
    at = 1
    while where := interrupt_at(functools.partial(CALLS[call], env), at, code_paths=CODE_PATHS):
        # A step of a closed environment would start workers without a reset.
        said = continue_without_reset(env, stepping=at % 2 == 1 and not env.is_closed)
        assert said == "" or "interrupted" in said or "closed/non started" in said, where
        data = env.rollout(3, break_when_any_done=False)
        assert data["next", "observation"][..., 1].tolist() == [[1, 2, 3]] * 2, where
        assert len(running_workers()) == 2, where
        at += every
    env.close(raise_if_closed=False)
    assert not workers_left()


def continue_without_reset(env: ParallelEnv, *, stepping: bool) -> str:
    """Step or call a method without a reset, and return the error's text."""
    try:
        env.step(env.fake_tensordict()) if stepping else env.fetch()
    except RuntimeError as error:
        return str(error)
    return ""


def test_shallow_copies_are_refused() -> None:
    env = ParallelEnv(2, Well)
    env.reset()
    with pytest.raises(NotCopyableError, match=r"share the workers.*Use ParallelEnv\(2, create_env_fn\)"):
        copy.copy(env)
    assert env.rollout(3).shape == (2, 3)
    env.close()


# -- the user's environments


class Logged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that writes each reset and step to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._path = Path(path)

    def _log(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line)

    def reset(self, **options: Any) -> Any:
        self._log("r")
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        self._log("s")
        return self.env.step(action)


def test_only_the_caller_resets_and_steps_an_environment(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    env = ParallelEnv(1, lambda: GymWrapper(Logged(str(log))))
    env.reset()
    assert log.read_text() == "r"
    env.rollout(3, auto_reset=False, tensordict=env.reset())
    env.close()
    assert log.read_text() == "rrsss"


# -- warnings about memory


@slow
def test_memory_warning_appears_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.resources.available_memory", lambda: 10**6)
    env = ParallelEnv(2, Well)
    with caplog.at_level(logging.WARNING, logger="torchrl_ext"):
        for _ in range(2):
            env.rollout(3, break_when_any_done=False)
            env.close()
    (memory,) = (record.getMessage() for record in caplog.records if record.name == "torchrl_ext")
    pattern = r"2 workers need about 0\.\d+ GB \(\d+ MB each, measured\), but only 0\.0 GB are available: use 1 or"
    assert re.match(pattern, memory)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_closing_in_a_forked_child_keeps_the_workers() -> None:
    env = ParallelEnv(2, "CartPole-v1")
    env.reset()
    for leave in (env.close, lambda: env._pool.end("a call was interrupted")):
        child = os.fork()
        if child == 0:
            try:
                leave()
            finally:
                os._exit(0 if env.is_closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert env.rollout(3).shape == (2, 3)
    env.close()
