"""Workers end with all that they have started, close what they can before, and are waited for when they close."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from torchrl.envs import GymEnv
from torchrl.envs import ParallelEnv as Upstream

from rl_ext_core.errors import WorkerError
from tests.interrupts import interrupt
from tests.torchrl_ext.parallel_checks import AT_MOST_S, diary, no_workers_left, workers, workers_left
from tests.torchrl_ext.parallel_environments import Failing, Well, make_failing, told
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["diary", "no_workers_left"]

slow = pytest.mark.slow
buffers = pytest.mark.parametrize("use_buffers", [True, pytest.param(False, marks=slow)], ids=["buffers", "pipes"])
METHODS = ["forkserver", pytest.param("fork", marks=slow), pytest.param("spawn", marks=slow)]


class Simulated(Failing):
    """Has a simulator that is a process, and one that was forked, is a daemon and holds all descriptors."""

    def __init__(self, pids: str, **options: Any) -> None:
        program = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
        self.simulator = subprocess.Popen(program)
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


def simulators(file: Path) -> list[int]:
    """Return those that run, after a while in which they may end."""
    end = time.monotonic() + AT_MOST_S
    while left := [pid for pid in map(int, file.read_text().split()) if _runs(pid)]:
        if time.monotonic() > end:
            return left
        time.sleep(0.01)
    return []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
@pytest.mark.parametrize("when", ["step", "method", "reset"])
@buffers
def test_a_worker_fails_while_what_it_has_forked_lives_on(
    when: str, how: str, method: str, use_buffers: bool, tmp_path: Path
) -> None:
    kwargs = [{"pids": str(tmp_path / "pids")}, {"pids": str(tmp_path / "pids"), "when": when, "how": how}]
    env = ParallelEnv(
        2, make_simulated, create_env_kwargs=kwargs, mp_start_method=method, use_buffers=use_buffers, step_timeout=60
    )
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 of 2"):  # noqa: PT012
        env.reset()
        env.rollout(5, break_when_any_done=False)
        env.fetch()
    assert time.monotonic() - begin < 50
    assert not simulators(tmp_path / "pids")
    env.close()


def make_simulated(**options: Any) -> GymWrapper:
    return GymWrapper(Simulated(**options))


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_environments_are_closed_when_another_one_fails(how: str, diary: Path) -> None:
    env = ParallelEnv(3, make_failing, create_env_kwargs=[{}, {"when": "step", "how": how}, {}], step_timeout=3)
    built = told("built", here=False)
    closed = told("closed", here=False)
    env.reset()
    with pytest.raises(WorkerError):
        env.rollout(5)
    assert told("built", here=False) - built == 3
    assert told("closed", here=False) - closed == 3


def test_environments_are_closed_after_ctrl_c(diary: Path) -> None:
    env = ParallelEnv(2, make_failing, create_env_kwargs=[{}, {"when": "step", "how": "hang"}])
    env.reset()
    before = told("closed", here=False)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        env.rollout(5)
    assert told("closed", here=False) - before == 2


class Slow(Well):
    """Takes a while to close, and then still writes."""

    def __init__(self, file: str, seconds: float) -> None:
        super().__init__()
        self.file, self.seconds = file, seconds

    def close(self) -> None:
        time.sleep(self.seconds)
        threading.Thread(target=self._write).start()

    def _write(self) -> None:
        time.sleep(self.seconds)
        with Path(self.file).open("a") as file:
            file.write("video\n")


def make_slow(**options: Any) -> GymWrapper:
    return GymWrapper(Slow(**options))


@pytest.mark.sample(quick=0)
@buffers
def test_closing_takes_as_long_as_it_takes(
    use_buffers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchrl_ext.parallel.supervision._LONG_S", 0.2)
    kwargs = {"file": str(tmp_path / "video"), "seconds": 1.5}
    env = ParallelEnv(2, make_slow, create_env_kwargs=kwargs, use_buffers=use_buffers)
    env.rollout(3)
    (tmp_path / "video").unlink(missing_ok=True)  # of a copy that was tried
    env.close()
    assert (tmp_path / "video").read_text() == "video\n" * 2
    assert "has been closing its environment for 0.2 s and is waited for" in caplog.text


@pytest.mark.sample(quick=0)
@buffers
def test_where_closing_has_a_limit_it_ends_with_a_sentence(
    use_buffers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = [{"file": str(tmp_path / "video"), "seconds": seconds} for seconds in (0, 1000)]
    env = ParallelEnv(2, make_slow, create_env_kwargs=kwargs, use_buffers=use_buffers, shutdown_timeout=2)
    env.reset()
    with caplog.at_level(logging.WARNING):
        env.close()
    assert "worker 1 of 2 did not answer within 2 s in close: the workers were ended" in caplog.text
    assert not workers()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="trying to close a closed environment"):
        env.close()


def make_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


class Many(Well):
    """Has an observation of many keys."""

    observation_space = spaces.Dict({f"k{index}": spaces.Box(-1, 1, (2,), np.float32) for index in range(300)})

    def _observation(self) -> Any:
        return {key: np.full(2, self.count / 10, np.float32) for key in self.observation_space}


@pytest.mark.slow
def test_any_number_of_observations_goes_through_a_fork_server() -> None:
    env = ParallelEnv(2, lambda: GymWrapper(Many()), mp_start_method="forkserver")
    data = env.rollout(3, break_when_any_done=False)
    assert all((data["next", f"k{index}"][:, 2] == 0.3).all() for index in range(300))
    env.close()


def make_pair() -> ParallelEnv:
    return ParallelEnv(2, make_cartpole)


def make_vector() -> GymWrapper:
    return GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"))


NESTED: dict[str, Callable[[], Any]] = {
    "a function": lambda: make_pair,
    "an instance": make_pair,
    "gymnasium's processes": lambda: make_vector,
    "upstream's": lambda: lambda: Upstream(2, make_cartpole),
}


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    "form",
    [
        "a function",
        *(pytest.param(form, marks=slow) for form in [*NESTED][1:]),
    ],
)
def test_environments_may_have_processes_of_their_own(form: str) -> None:
    env = ParallelEnv(2, NESTED[form]())
    assert env.rollout(3, break_when_any_done=False).shape == (2, 2, 3)
    env.close()
    assert not workers_left()


CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action(env.reset())),
    "step_and_maybe_reset": lambda env: env.step_and_maybe_reset(env.rand_action(env.reset())),
    "method": lambda env: env.fetch(litres=2),
    "state": lambda env: env.load_state_dict(env.state_dict()),
    "close": lambda env: env.close(),
}


BELOW = ("/torchrl_ext/parallel/", "/rl_ext_core/processes/", "/batched_envs.py")

# What is raised while Python finalizes an object ends there, and is told as a warning.
in_finalizers = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.sample(quick=0, ci=5)
@in_finalizers
@pytest.mark.parametrize("use_buffers", [True, False], ids=["buffers", "pipes"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("every", [151, pytest.param(17, marks=pytest.mark.exhaustive)])
def test_ctrl_c_anywhere(call: str, every: int, use_buffers: bool) -> None:
    check_interrupts(call, use_buffers, below=BELOW, every=every)


@pytest.mark.exhaustive
@in_finalizers
def test_ctrl_c_at_every_line_of_close() -> None:
    check_interrupts("close", True, below=("/torchrl_ext/parallel/supervision.py", "/batched_envs.py"), every=1)


def check_interrupts(call: str, use_buffers: bool, *, below: tuple[str, ...], every: int) -> None:
    """Interrupt a call at many of its lines; whatever comes next works, or names ``reset``."""
    env = ParallelEnv(2, make_failing, use_buffers=use_buffers)
    env.reset()
    at = 1
    while where := interrupt(functools.partial(CALLS[call], env), at, below=below):
        # A step of one that is closed would start workers whose environments nobody has reset.
        said = _go_on(env, stepping=at % 2 == 1 and not env.is_closed)
        assert said == "" or "interrupted" in said or "closed/non started" in said, where
        data = env.rollout(3, break_when_any_done=False)
        assert data["next", "observation"][..., 1].tolist() == [[1, 2, 3]] * 2, where
        assert len(workers()) == 2, where
        at += every
    env.close(raise_if_closed=False)
    assert not workers_left()


def _go_on(env: ParallelEnv, *, stepping: bool) -> str:
    """Go on without a reset, and return what is said against it."""
    try:
        env.step(env.fake_tensordict()) if stepping else env.fetch()
    except RuntimeError as error:
        return str(error)
    return ""


# Ctrl-C may come while torch makes one of these, or while multiprocessing opens the socket that fetches a tensor.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(StorageWeakRef|socket.socket):pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("use_buffers", [True, pytest.param(False, marks=slow)], ids=["buffers", "pipes"])
def test_ctrl_c_in_steps_then_reset(use_buffers: bool) -> None:
    env = ParallelEnv(2, make_failing, use_buffers=use_buffers)
    for attempt in range(8):
        data = env.reset()
        killer = threading.Timer(0.02 + 0.007 * attempt, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            killer.start()
            while True:
                env.step(env.rand_action(data))
        killer.join()
    assert env.rollout(3, break_when_any_done=False)["next", "observation"][..., 1].tolist() == [[1, 2, 3]] * 2
    env.close()
