from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import ResumeCallback, SharedMemoryVecEnv, VecEnvTimingCallback, resume
from tests.environments import Slow, cart_pole
from tests.sb3_ext.buffer_envs import LogRows, without_logger
from tests.sb3_ext.vec_checks import FAST

PPO_OPTIONS = {"n_steps": 16, "batch_size": 16, "n_epochs": 1}
STEP, UPDATE = 5e-3, 30e-3  # seconds of a step of Slow, and of an update


def train(venv: Any, callback: BaseCallback, timesteps: int) -> list[dict[str, Any]]:
    model, rows = PPO("MlpPolicy", venv, device="cpu", **PPO_OPTIONS), LogRows()  # type: ignore[arg-type]
    model.set_logger(Logger(None, [rows]))
    update = model.train

    def train_slowly() -> None:
        time.sleep(UPDATE)
        update()

    model.train = train_slowly  # type: ignore[method-assign]
    model.learn(timesteps, callback=callback, log_interval=1)
    return rows.rows


def test_durations_of_environments_rollouts_and_updates_are_logged() -> None:
    venv = SharedMemoryVecEnv([Slow] * 3, FAST)
    rows = train(VecNormalize(venv), VecEnvTimingCallback(), 16 * 3 * 3)
    timings = venv.timings
    venv.close()
    assert {row["time/env_start"] for row in rows} == {timings.start_seconds}
    assert timings.start_seconds > 0
    assert {row["time/env_restarts"] for row in rows} == {0}
    assert timings.steps == 48
    assert timings.step_seconds == pytest.approx(np.mean([row["time/env_step"] for row in rows]))
    assert all(STEP <= row["time/env_step"] < row["time/rollout"] / 16 for row in rows)
    assert ["time/update" in row for row in rows] == [False, True, True]
    assert all(row["time/update"] >= UPDATE for row in rows[1:])


def test_times_of_a_saved_run_do_not_continue(tmp_path: Path) -> None:
    model = without_logger(PPO("MlpPolicy", DummyVecEnv([cart_pole]), **PPO_OPTIONS))
    model.learn(48, callback=[ResumeCallback(tmp_path, 16), VecEnvTimingCallback()])
    model, rows = resume(tmp_path, DummyVecEnv([cart_pole])), LogRows()
    model.set_logger(Logger(None, [rows]))
    callbacks = [ResumeCallback(tmp_path, 16), VecEnvTimingCallback()]
    model.learn(48 - model.num_timesteps, callbacks, log_interval=1, reset_num_timesteps=False)
    assert "time/rollout" in rows.rows[0]
    assert "time/update" not in rows.rows[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda timing: EveryNTimesteps(8, timing),
        lambda timing: EveryNTimesteps(8, CallbackList([timing])),
        lambda timing: EvalCallback(DummyVecEnv([cart_pole]), timing, verbose=0),
    ],
    ids=["direct", "list", "best model"],
)
def test_callback_in_an_event_callback_is_refused(wrap: Callable[[Any], BaseCallback]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"only at events.*callback=\[other_callback, VecEnvTiming"):
        train(DummyVecEnv([cart_pole]), wrap(VecEnvTimingCallback()), 64)
