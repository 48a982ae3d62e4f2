from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv, channel
from rl_ext_core.vector.pool import Pool
from sb3_ext import GymVecEnv, SharedMemoryVecEnv
from tests.environments import Counting, Failing
from tests.interrupts import interrupt_everywhere
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.vec_checks import FAST, no_workers, raise_interrupt_in

CODE_PATHS = ("rl_ext_core/vector", "rl_ext_core/processes/watch", "sb3_ext/vec_env")
ACTIONS = np.zeros(3, np.int64)
OPTIONS: dict[str, dict[str, Any]] = {
    "one each": {},
    "sharing": {"n_workers": 2},
    "spinning": {"n_workers": 2},
    "with a time limit": {"step_timeout": 100},
    "restarting": {"restart": "truncate", "step_timeout": 100},
}


CALLS: dict[str, Callable[[VecEnv], Any]] = {
    "reset": lambda venv: venv.reset(),
    "step": lambda venv: venv.step(ACTIONS),
    "step with a list": lambda venv: venv.step([0, 0, 0]),  # type: ignore[arg-type]
    "step_async": lambda venv: venv.step_async(ACTIONS),
    "env_method": lambda venv: venv.env_method("twice", 3),
    "large answers": lambda venv: venv.env_method("large"),
    "large arguments": lambda venv: venv.set_attr("label", "x" * 300_000),
    "get_images": lambda venv: venv.get_images(),
    "env_is_wrapped": lambda venv: venv.env_is_wrapped(Counting),
}


def call_or_none(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or None if it reports a pending step, or one that only some have taken."""
    try:
        return call()
    except InvalidArgumentError as error:
        if "step_wait()" not in str(error) and "Use reset()" not in str(error):
            raise
        return None


def assert_equals_dummy(venv: VecEnv, model: VecEnv) -> None:
    """Reset and step both, and compare the results."""
    for one in (venv, model):
        one.seed(7)
    np.testing.assert_array_equal(venv.reset(), model.reset())
    for _ in range(2):
        for ours, theirs in zip(venv.step(ACTIONS), model.step(ACTIONS), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert venv.get_attr("_count") == [2, 2, 2]


@pytest.mark.sample(ci=14)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.exhaustive), 13])
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("call", list(CALLS))
def test_calls_after_interrupted_call_match_dummy_vec_env(
    call: str, options: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "should_spin", lambda num_workers: options == "spinning")
    venv, model = SharedMemoryVecEnv([Counting] * 3, FAST, **OPTIONS[options]), DummyVecEnv([Counting] * 3)

    def prepare() -> Callable[[], Any]:
        assert_equals_dummy(venv, model)
        return lambda: CALLS[call](venv)

    seen = 0
    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        seen += 1
        # The next call must see the environments as the interrupted call left them.
        then = seen % 4
        if then == 0 and (found := call_or_none(lambda: venv.get_attr("_count"))) is not None:
            assert set(found) <= {0, 2, 3}, where
        elif then == 1 and (step := call_or_none(lambda: venv.step(ACTIONS))) is not None:
            assert step[0][:, 0].tolist() == venv.get_attr("_count"), where
            assert call == "reset" or len(set(step[0][:, 0])) == 1, where
        elif then == 2 and venv.waiting:
            assert venv.step_wait()[0][:, 0].tolist() == venv.get_attr("_count"), where
        elif then == 3 and (found := call_or_none(lambda: venv.env_method("twice", 8))) is not None:
            assert found == [16] * 3, where
    assert_equals_dummy(venv, model)
    assert seen > 20 // every
    venv.close()
    assert no_workers()


def test_step_with_action_that_cannot_be_sent_steps_no_environment(start_vec_env: Any) -> None:
    venv = start_vec_env([Counting] * 3)
    with pytest.raises(TypeError, match="cannot pickle"):
        venv.step([0, threading.Lock(), 0])  # type: ignore[arg-type]
    assert venv.get_attr("_count") == [0] * 3
    assert venv.step(ACTIONS)[0][:, 0].tolist() == [1] * 3


@pytest.mark.parametrize("kind", [SharedMemoryVecEnv, SharedMemoryVectorEnv])
def test_step_after_interrupt_between_commands_is_refused(kind: Any) -> None:
    env = kind([Counting] * 3)
    env.reset()
    with raise_interrupt_in(env._pool.workers[1], "send"), pytest.raises(KeyboardInterrupt):
        env.step(ACTIONS)
    with pytest.raises(InvalidArgumentError, match=r"only some environments had got their action.* Use reset\(\)"):
        env.step(ACTIONS)
    env.reset()
    assert env.step(ACTIONS)[0][:, 0].tolist() == [1] * 3
    env.close()


denser = pytest.mark.parametrize("every", [pytest.param(7, marks=pytest.mark.exhaustive), 41])


@pytest.mark.slow
@denser
@pytest.mark.parametrize(("options", "begun"), [("one each", True), ("restarting", False)])
def test_second_close_completes_interrupted_close(options: str, begun: bool, every: int) -> None:
    made: list[SharedMemoryVecEnv] = []

    def prepare() -> Callable[[], Any]:
        made.append(SharedMemoryVecEnv([Counting] * 2, FAST, **OPTIONS[options]))
        made[-1].reset()
        if begun:
            made[-1].step_async(ACTIONS[:2])
        return made[-1].close

    prepare()()
    made.clear()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        made.pop().close()
        assert no_workers(), where
    made.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.slow
@denser
def test_interrupted_start_leaves_no_workers(every: int) -> None:
    def prepare() -> Callable[[], Any]:
        return lambda: SharedMemoryVecEnv([Counting] * 2, FAST).close()

    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        assert no_workers(), where


@pytest.mark.slow
@denser
def test_interrupted_restart_is_repeated_or_raises_clear_error(every: int) -> None:
    made: list[SharedMemoryVecEnv] = []

    def prepare() -> Callable[[], Any]:
        for venv in made:
            venv.close()
        made[:] = [
            SharedMemoryVecEnv([Counting, lambda: Failing("step", "os._exit", after=1)], FAST, restart="truncate")
        ]
        made[0].reset()
        made[0].step(ACTIONS[:2])
        return lambda: made[0].step(ACTIONS[:2])

    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        venv = made[0]
        try:
            if venv.waiting:
                _, _, dones, infos = venv.step_wait()
                assert dones.tolist() == [False, True], where
                assert set(infos[1]) >= {"worker_error", "terminal_observation"}, where
            assert venv.reset()[:, 0].tolist() == [0, 0], where
        except WorkerError as error:  # interrupted while the worker was replaced
            if "replacement of one was interrupted. Make new environments" not in str(error):
                raise
            continue
        _, _, dones, _ = venv.step(ACTIONS[:2])
        assert not dones[0], where
        if dones[1]:  # interrupted before the worker failed, which it does now
            assert venv.reset()[:, 0].tolist() == [0, 0], where
            assert venv.step(ACTIONS[:2])[0][:, 0].tolist() == [1, 1], where
    made[0].close()
    assert no_workers()


@pytest.mark.parametrize("kind", ["SharedMemoryVecEnv", "GymVecEnv"])
def test_interrupted_learn_continues_after_the_line_of_the_error(kind: str) -> None:
    venv: Any = SharedMemoryVecEnv([Counting] * 2, FAST)
    if kind == "GymVecEnv":
        venv.close()
        venv = GymVecEnv(SharedMemoryVectorEnv([Counting] * 2, context=FAST))
    model = without_logger(PPO("MlpPolicy", VecMonitor(venv), n_steps=4, batch_size=4, n_epochs=1, device="cpu"))
    model.learn(8)
    with raise_interrupt_in(Pool, "_receive"), pytest.raises(KeyboardInterrupt):
        model.learn(8, reset_num_timesteps=False)
    with pytest.raises((InvalidArgumentError, AlreadyPendingCallError), match=r"model\.set_env\(model\.get_env\(\)\)"):
        model.learn(8, reset_num_timesteps=False)
    model.set_env(model.get_env())
    model.learn(8, reset_num_timesteps=False)
    assert model.rollout_buffer.observations[:4, 0].tolist() == [0, 1, 2, 3]  # the steps of a new episode
    venv.close()
