"""Tests of the report of where the time of a training run goes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
)
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import SharedMemoryVecEnv, VecEnvTimingCallback, tensor
from sb3_ext.timing_callback import PARTS, advice
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.vec_test_envs import cart_pole


def pendulum() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1")


SHORT: dict[type, dict[str, Any]] = {
    PPO: {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    A2C: {"n_steps": 16},
    RecurrentPPO: {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    OffPolicyAlgorithm: {"learning_starts": 10, "buffer_size": 200},
}


def train(kind: type, venv: Any, callback: Any, n_steps: int = 64) -> Any:
    policy = "MlpLstmPolicy" if kind is RecurrentPPO else "MlpPolicy"
    options = next(options for each, options in SHORT.items() if issubclass(kind, each))
    model = without_logger(kind(policy, venv, seed=0, device="cpu", **options))
    return model.learn(n_steps, callback=callback)


@pytest.mark.parametrize("kind", [PPO, A2C, RecurrentPPO, DQN, SAC])
def test_report_adds_up_and_changes_nothing(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    env_fn = pendulum if kind is SAC else cart_pole
    methods = {(each, name): value for each in kind.__mro__ for name, value in vars(each).items()}
    expected = train(kind, VecNormalize(DummyVecEnv([env_fn] * 2)), None).policy.state_dict()
    timing = VecEnvTimingCallback(report=True)
    begin = time.perf_counter()
    model = train(kind, VecNormalize(DummyVecEnv([env_fn] * 2)), timing)
    assert 0 < sum(timing.seconds.values()) < time.perf_counter() - begin
    used = {part for part, seconds in timing.seconds.items() if seconds > 0}
    off_policy = kind in (DQN, SAC)
    assert used == PARTS.keys() - {"waiting", "transfer", "callbacks"} - ({"returns"} if off_policy else set())
    assert all(torch.equal(value, expected[name]) for name, value in model.policy.state_dict().items())
    assert {(each, name): value for each in kind.__mro__ for name, value in vars(each).items()} == methods
    text = capsys.readouterr().out
    assert "steps of 2 environments" in text
    assert "Most of the time goes to" in text


def test_workers_report_their_time() -> None:
    timing = VecEnvTimingCallback(report=True)
    with_stack = VecFrameStack(SharedMemoryVecEnv([cart_pole] * 3, n_workers=2), 2)
    train(PPO, with_stack, timing)
    assert timing.seconds["environment"] > 0
    assert timing.seconds["waiting"] > 0
    assert timing.seconds["transfer"] > 0
    with_stack.close()


def test_saves_contain_nothing_of_the_callback(tmp_path: Path) -> None:
    saving = CheckpointCallback(20, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True)
    model = train(DQN, VecNormalize(DummyVecEnv([cart_pole])), [VecEnvTimingCallback(report=True), saving])
    model_path, buffer_path = (str(tmp_path / f"rl_model_{name}60_steps") for name in ("", "replay_buffer_"))
    script = (
        "import sys\n"
        "from stable_baselines3 import DQN\n"
        f"DQN.load({model_path!r}).load_replay_buffer({buffer_path!r})\n"
        "assert not any(name.startswith('sb3_ext') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "step" not in vars(VecNormalize.load(str(tmp_path / "rl_model_vecnormalize_60_steps.pkl"), model.get_env()))


def test_time_of_an_evaluation_is_that_of_callbacks() -> None:
    env = DummyVecEnv([cart_pole])
    timing = VecEnvTimingCallback(report=True)
    evaluation = EvalCallback(DummyVecEnv([lambda: Monitor(cart_pole())]), eval_freq=8, n_eval_episodes=5, verbose=0)
    train(PPO, env, [timing, evaluation])
    assert timing.seconds["callbacks"] > 2 * timing.seconds["policy"]


class _Raising(VecEnvTimingCallback):
    def _on_step(self) -> bool:
        raise KeyboardInterrupt


class _RaisingAtEnd(VecEnvTimingCallback):
    def _on_training_end(self) -> None:
        raise KeyboardInterrupt


def methods_of_training() -> list[Any]:
    """Return the methods that the callback replaces."""
    owners = [PPO, DQN, OffPolicyAlgorithm, OnPolicyAlgorithm, ActorCriticPolicy, RolloutBuffer, ReplayBuffer]
    return [dict(vars(owner)) for owner in [*owners, DummyVecEnv, VecEnv, BaseCallback, CallbackList]]


@pytest.mark.parametrize("kind", [PPO, DQN])
@pytest.mark.parametrize("place", ["callback", "last callback", "environment", "update", "log"])
def test_interrupted_training_is_reported_and_methods_are_restored(
    kind: type, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    timing = VecEnvTimingCallback(report=True)
    venv = DummyVecEnv([cart_pole])
    if place == "environment":
        monkeypatch.setattr(venv.envs[0], "step", interrupt)
    if place == "update":
        monkeypatch.setattr(kind, "train", interrupt)
    if place == "log":
        monkeypatch.setattr(kind, "dump_logs", interrupt)
    callbacks: Any = {"callback": [timing, _Raising()], "last callback": [_RaisingAtEnd(), timing]}.get(place, timing)
    before = methods_of_training()
    with pytest.raises(KeyboardInterrupt):
        train(kind, venv, callbacks)
    assert methods_of_training() == before
    assert sum(timing.seconds.values()) > 0
    assert capsys.readouterr().out.count("Most of the time goes to") == 1


def test_two_reports_of_one_training_restore_all_methods() -> None:
    before = methods_of_training()
    timings = [VecEnvTimingCallback(report=True) for _ in range(2)]
    train(PPO, DummyVecEnv([cart_pole]), timings)
    assert methods_of_training() == before
    assert all(timing.seconds["update"] > 0 for timing in timings)


def test_trainings_of_two_threads_that_end_in_the_order_of_their_begin() -> None:
    before = methods_of_training()
    timings = [VecEnvTimingCallback(report=True) for _ in range(2)]
    has_begun = [threading.Event() for _ in timings]
    first_has_ended = threading.Event()

    def wait_for_the_second(*_: Any) -> bool:
        has_begun[0].set()
        return has_begun[1].wait(60)

    def wait_for_the_end_of_the_first(*_: Any) -> bool:
        has_begun[1].set()
        return first_has_ended.wait(60)

    def train_second() -> None:
        has_begun[0].wait(60)
        train(PPO, DummyVecEnv([cart_pole]), [timings[1], ConvertCallback(wait_for_the_end_of_the_first)])

    thread = threading.Thread(target=train_second)
    thread.start()
    train(PPO, DummyVecEnv([cart_pole]), [timings[0], ConvertCallback(wait_for_the_second)])
    first_has_ended.set()
    thread.join()
    assert methods_of_training() == before
    assert all(timing.seconds["update"] > 0 for timing in timings)


def test_model_of_a_script_is_measured_except_for_its_own_methods() -> None:
    class Script(PPO):
        pass

    class ScriptPolicy(ActorCriticPolicy):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    Script.__module__ = ScriptPolicy.__module__ = "__main__"
    timing, before = VecEnvTimingCallback(report=True), (dict(vars(Script)), dict(vars(ScriptPolicy)))
    found: list[Any] = []
    recorder = ConvertCallback(lambda *_: not found.append((dict(vars(Script)), dict(vars(ScriptPolicy)))))
    model = without_logger(Script(ScriptPolicy, DummyVecEnv([cart_pole]), device="cpu", **SHORT[PPO]))
    model.learn(32, callback=[timing, recorder])
    assert found == [before] * 32
    assert timing.seconds["update"] > 0
    assert timing.seconds["policy"] > 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda timing: EveryNTimesteps(8, timing),
        lambda timing: EveryNTimesteps(8, CallbackList([timing])),
        lambda timing: EvalCallback(DummyVecEnv([cart_pole]), timing, verbose=0),
    ],
    ids=["direct", "list", "best model"],
)
def test_callback_in_an_event_callback_is_refused(wrap: Any) -> None:
    before = methods_of_training()
    for report in (False, True):
        with pytest.raises(InvalidArgumentError, match=r"only at its events.*callback=\[other_callback, VecEnvTiming"):
            train(PPO, DummyVecEnv([cart_pole]), wrap(VecEnvTimingCallback(report=report)))
    assert methods_of_training() == before


OTHERS = [TD3, DDPG, tensor.PPO, tensor.A2C, tensor.DQN, tensor.SAC, tensor.TD3]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_parts_of_other_algorithms(kind: type) -> None:
    timing = VecEnvTimingCallback(report=True)
    begin = time.perf_counter()
    train(kind, DummyVecEnv([cart_pole if kind.__name__ in ("PPO", "A2C", "DQN") else pendulum]), timing)
    assert 0 < sum(timing.seconds.values()) < time.perf_counter() - begin
    assert all(timing.seconds[part] > 0 for part in ("environment", "policy", "buffer", "sample", "update", "other"))


@pytest.mark.parametrize(
    ("part", "venv_class", "expected"),
    [
        ("environment", DummyVecEnv, "SharedMemoryVecEnv"),
        pytest.param("environment", SubprocVecEnv, "instead of SubprocVecEnv", marks=pytest.mark.slow),
        ("waiting", DummyVecEnv, "fewer workers"),
        ("callbacks", DummyVecEnv, "eval_freq"),
        ("sample", DummyVecEnv, "batch_size"),
        ("buffer", DummyVecEnv, "store smaller observations"),
        ("other", DummyVecEnv, "to a module"),
    ],
)
def test_advice_names_what_to_change(
    part: str, venv_class: type, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sb3_ext.timing_callback.usable_cores", lambda: 8)
    venv = venv_class([cart_pole] * 2)
    model = without_logger(PPO("MlpPolicy", venv, device="cpu", **SHORT[PPO]))
    seconds = {**dict.fromkeys(PARTS, 0.1), part: 10.0}
    assert expected in advice(seconds, 1000, model, venv)
    venv.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_advice_for_networks(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = without_logger(PPO("MlpPolicy", DummyVecEnv([cart_pole]), device="cpu", **SHORT[PPO]))
        text = advice({**dict.fromkeys(PARTS, 0.0), "update": 1.0}, 10, model, model.get_env())
    finally:
        torch.set_num_threads(before)
    assert ("set_num_threads(1)" in text) == (threads > 1)
