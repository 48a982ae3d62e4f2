from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3 as sb3
import torch as th
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeAwareObservation, TransformObservation
from stable_baselines3.common import callbacks as sb3_callbacks
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.logger import Image, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, StorageError
from sb3_ext import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedPrioritizedHerReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    ResumeCallback,
    SharedMemoryVecEnv,
    make_vec_env,
    resume,
    tensor,
)
from tests import programs
from tests.sb3_ext.buffer_envs import LogRows, without_logger
from tests.sb3_ext.vec_checks import assert_equal


@pytest.fixture(autouse=True)
def _logs_of_sb3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path_factory.mktemp("logs"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)


class Masked(gymnasium.Wrapper):
    """CartPole whose second action is sometimes invalid."""

    def action_masks(self) -> np.ndarray:
        return np.array([True, bool(self.unwrapped.state[0] > 0)])


class Nondeterministic(gymnasium.ObservationWrapper):
    """Environment with noise that no seed controls."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation + np.frombuffer(os.urandom(1), np.uint8)[0].astype(np.float32)


class StopAt(BaseCallback):
    """Callback that stops training by an exception."""

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.timesteps:
            raise KeyboardInterrupt
        return True


def cartpole(wrap: Callable[[Any], Any] = Monitor) -> gymnasium.Env:
    return wrap(gymnasium.make("CartPole-v1"))


def cartpoles(n_envs: int = 1) -> DummyVecEnv:
    return DummyVecEnv([cartpole] * n_envs)


def normalized(env: gymnasium.Env) -> gymnasium.Env:
    return NormalizeReward(NormalizeObservation(TimeAwareObservation(env)))


def made(env_id: str) -> Callable[[], gymnasium.Env]:
    return lambda: Monitor(gymnasium.make(env_id))


def goal_env() -> gymnasium.Env:
    return Monitor(BitFlippingEnv(n_bits=4, continuous=True, max_steps=7))


def images(*shape: int) -> gymnasium.Env:
    """Make CartPole whose observations are images."""
    space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
    draw = lambda obs: np.resize((50 * obs).astype(np.uint8), shape)  # noqa: E731
    return cartpole(lambda env: Monitor(TransformObservation(env, draw, space)))


def state_of(model: Any) -> dict[str, Any]:
    """Return what must be equal, as arrays and numbers."""
    state: dict[str, Any] = {"num_timesteps": model.num_timesteps, "n_updates": model._n_updates}
    state["episodes"] = [(float(info["r"]), info["l"]) for info in model.ep_info_buffer]
    state["parameters"] = model.get_parameters()
    state["observations"] = model._last_obs
    buffer = getattr(model, "replay_buffer", None)
    if buffer is not None:
        state["position"] = buffer.pos, buffer.full
        if isinstance(buffer, sb3.HerReplayBuffer):
            state["episodes_of_goals"] = np.array([buffer.ep_start, buffer.ep_length])
        rows = buffer.size()
        for name in ("observations", "actions", "rewards", "dones", "timeouts"):
            values = getattr(buffer, name)
            parts = values if isinstance(values, dict) else {"": values}
            state[name] = {key: np.asarray(part[:rows]) for key, part in parts.items()}
    return state


SMALL = {"net_arch": [8]}
OFF = {"learning_starts": 40, "buffer_size": 90, "batch_size": 8, "policy_kwargs": SMALL}
ON = {"n_steps": 16, "policy_kwargs": SMALL}
PPO_ONCE = {**ON, "batch_size": 8, "n_epochs": 1}


def of_buffer(cls: Any, **options: Any) -> dict[str, Any]:
    """Return the options of an algorithm with a replay buffer."""
    return {**copy.deepcopy(OFF), "replay_buffer_class": cls, "replay_buffer_kwargs": options}


def schedule(progress: float) -> float:
    return 1.0 - progress / 4


GOALS = (sb3.DDPG, "MultiInputPolicy", goal_env, 2)
IMAGES = (sb3.DQN, "MlpPolicy", functools.partial(images, 4, 4), 2)
CASES: dict[str, tuple[Any, str, Callable[[], gymnasium.Env], int, dict[str, Any]]] = {
    "dqn": (sb3.DQN, "MlpPolicy", cartpole, 1, {**OFF, "target_update_interval": 30}),
    "sac": (sb3.SAC, "MlpPolicy", made("Pendulum-v1"), 1, OFF),
    "ppo": (sb3.PPO, "MlpPolicy", cartpole, 2, {**ON, "batch_size": 8, "n_epochs": 2}),
    "recurrent": (sb3_contrib.RecurrentPPO, "MlpLstmPolicy", cartpole, 2, PPO_ONCE),
    "dqn_compressed": (sb3.DQN, "MlpPolicy", cartpole, 2, {**OFF, "replay_buffer_class": CompressedReplayBuffer}),
    "sac_sde": (sb3.SAC, "MlpPolicy", made("Pendulum-v1"), 2, {**OFF, "use_sde": True}),
    "td3": (sb3.TD3, "MlpPolicy", made("Pendulum-v1"), 1, OFF),
    "a2c": (sb3.A2C, "MlpPolicy", cartpole, 2, ON),
    "a2c_sde": (sb3.A2C, "MlpPolicy", made("Pendulum-v1"), 2, {**ON, "use_sde": True}),
    "qrdqn": (sb3_contrib.QRDQN, "MlpPolicy", cartpole, 2, OFF),
    "tqc": (sb3_contrib.TQC, "MlpPolicy", made("Pendulum-v1"), 1, OFF),
    "maskable": (sb3_contrib.MaskablePPO, "MlpPolicy", lambda: cartpole(lambda env: Monitor(Masked(env))), 2, PPO_ONCE),
    "dqn_frozen_lake": (sb3.DQN, "MlpPolicy", made("FrozenLake-v1"), 2, OFF),
    "image": (*IMAGES, of_buffer(CompressedReplayBuffer, storage_dir="buffer")),
    "prioritized": (*IMAGES, of_buffer(CompressedPrioritizedReplayBuffer, storage_dir="buffer", beta=schedule)),
    "prioritized_her": (*GOALS, of_buffer(CompressedPrioritizedHerReplayBuffer, storage_dir="buffer")),
    "her_files": (*GOALS, of_buffer(CompressedHerReplayBuffer, storage_dir="buffer")),
    "dict_files": (*GOALS, of_buffer(CompressedDictReplayBuffer, storage_dir="buffer")),
    "her": (*GOALS, of_buffer(sb3.HerReplayBuffer)),
    "dict": (*GOALS, of_buffer(DictReplayBuffer)),
    "her_compressed": (*GOALS, of_buffer(CompressedHerReplayBuffer)),
}
IN_WORKERS = ("dqn", "sac", "maskable", "recurrent", "dqn_frozen_lake")
TOTAL, EVERY = 230, 50


@pytest.mark.sample(quick=5, ci=25)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, DummyVecEnv) for name in CASES), *((name, SharedMemoryVecEnv) for name in IN_WORKERS)]
)
def test_resumed_run_equals_the_run_that_was_not_stopped(
    name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, policy, env_fn, n_envs, options = CASES[name]
    in_files = "storage_dir" in options.get("replay_buffer_kwargs", {})
    if name == "td3":
        options = {**options, "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1) * 0.1)}
    envs = [kind([env_fn] * n_envs) for _ in range(3)]

    def build(env: Any, folder: str) -> Any:
        """Use a working directory per run, because ``storage_dir`` is relative."""
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        return cls(policy, env, seed=7, **copy.deepcopy(options))  # SB3 changes policy_kwargs

    whole = build(envs[0], "whole").learn(TOTAL, callback=ResumeCallback("saves", EVERY))
    killed = build(envs[1], "run")
    with pytest.raises(KeyboardInterrupt):
        killed.learn(TOTAL, callback=[StopAt(187), ResumeCallback("saves", EVERY)])
    if in_files:
        with pytest.raises(StorageError, match="in use by this process"):
            resume("saves", kind([env_fn] * n_envs))
        killed.replay_buffer.close()
    np.random.seed(0)
    th.manual_seed(0)
    model = resume("saves", envs[2])
    assert 90 < model.num_timesteps <= 187
    continue_to(TOTAL, model, ResumeCallback("saves", EVERY))
    assert_equal(state_of(whole), state_of(model))
    assert len(list((tmp_path / "run" / "saves").iterdir())) == 2
    assert len(list((tmp_path / "run").iterdir())) == 1 + in_files
    for part in (*envs, *((whole.replay_buffer, model.replay_buffer) if in_files else ())):
        part.close()


def ppo(env: Any = None) -> sb3.PPO:
    """Make PPO of CartPole, or of ``env``."""
    return sb3.PPO("MlpPolicy", env or cartpoles(), seed=1, **copy.deepcopy(PPO_ONCE))


def continue_to(total: int, model: Any, *callbacks: BaseCallback, **options: Any) -> Any:
    """Continue a resumed run up to a number of timesteps."""
    return model.learn(total - model.num_timesteps, list(callbacks), reset_num_timesteps=False, **options)


class MeanOfSteps(BaseCallback):
    """Callback that logs a mean, and an image, which is not saved."""

    def _on_step(self) -> bool:
        self.logger.record_mean("steps", self.num_timesteps)
        self.logger.record("image", Image(np.zeros((1, 1, 3), np.uint8), "HWC"), exclude="csv")
        return True


@pytest.mark.parametrize("cls", [sb3.PPO, sb3.DQN])
def test_logged_values_equal_those_of_the_run_that_was_not_stopped(cls: Any, tmp_path: Path) -> None:
    options = {**OFF, "train_freq": 3} if cls is sb3.DQN else PPO_ONCE
    model, rows = cls("MlpPolicy", cartpoles(), seed=7, **copy.deepcopy(options)), []
    for _ in range(2):
        output = LogRows()
        model.set_logger(Logger(None, [output]))
        continue_to(160, model, ResumeCallback(tmp_path, 60), MeanOfSteps(), log_interval=1)
        rows.append([{k: v for k, v in row.items() if not k.startswith(("time/", "image"))} for row in output.rows])
        model = resume(tmp_path, cartpoles())
    assert 0 < len(rows[1]) < len(rows[0])
    assert rows[1] == rows[0][-len(rows[1]) :]
    assert "train/loss" in rows[1][0]


class Warmup(gymnasium.Wrapper):
    """Environment whose episodes begin with random actions, from the generator from which a model draws, too."""

    def reset(self, **kwargs: Any) -> Any:
        self.env.reset(**kwargs)
        for _ in range(3):
            observation, _, _, _, info = self.env.step(self.action_space.sample())
        return observation, info


@pytest.mark.parametrize("kind", [DummyVecEnv, SharedMemoryVecEnv])
def test_environment_that_draws_from_its_action_space(kind: Any, tmp_path: Path) -> None:
    envs = [kind([lambda: cartpole(lambda env: Monitor(Warmup(env)))] * 2) for _ in range(2)]
    whole = sb3.DQN("MlpPolicy", envs[0], seed=7, **copy.deepcopy(OFF))
    whole.learn(230, callback=ResumeCallback(tmp_path, 90))
    model = continue_to(230, resume(tmp_path, envs[1]), ResumeCallback(tmp_path, 90))
    assert_equal(state_of(whole), state_of(model))
    for env in envs:
        env.close()


@pytest.mark.filterwarnings("ignore:The environment is already wrapped with a `Monitor`:UserWarning")
def test_wrappers_files_and_callbacks_continue(tmp_path: Path) -> None:
    def build(name: str) -> Any:
        env = DummyVecEnv([lambda: Monitor(gymnasium.make("CartPole-v1"), str(tmp_path / name))])
        env = VecMonitor(env, str(tmp_path / f"{name}_vec"))
        return VecNormalize(VecFrameStack(env, 3))

    def callbacks(name: str) -> list[BaseCallback]:
        env = VecNormalize(VecFrameStack(VecMonitor(cartpoles()), 3), training=False)
        stop = sb3_callbacks.StopTrainingOnNoModelImprovement(100)
        options = {"callback_after_eval": stop, "eval_freq": 20, "n_eval_episodes": 1, "verbose": 0}
        return [sb3_callbacks.EvalCallback(env, **options), ResumeCallback(tmp_path / f"saves_{name}", EVERY)]

    whole_callbacks, callbacks_after = callbacks("a"), callbacks("b")
    stopped = build("b")
    whole = ppo(build("a")).learn(TOTAL, callback=whole_callbacks)
    with pytest.raises(KeyboardInterrupt):
        ppo(stopped).learn(TOTAL, callback=[*callbacks("b"), StopAt(97)])
    stopped_again = build("b")
    with pytest.raises(KeyboardInterrupt):
        continue_to(TOTAL, resume(tmp_path / "saves_b", stopped_again), *callbacks("b"), StopAt(157))
    model = continue_to(TOTAL, resume(tmp_path / "saves_b", build("b")), *callbacks_after)
    assert_equal(state_of(whole), state_of(model))
    assert_equal(vars(whole.env.obs_rms), vars(model.env.obs_rms))
    assert_equal(whole.env.returns, model.env.returns)
    assert callbacks_after[0].n_calls == whole_callbacks[0].n_calls
    assert callbacks_after[0].callback.n_calls == whole_callbacks[0].callback.n_calls
    for suffix in ("", "_vec"):
        lines = [(tmp_path / f"{name}{suffix}.monitor.csv").read_text().splitlines() for name in "ab"]
        without_times = [[line.rsplit(",", 1)[0] for line in part[1:]] for part in lines]
        assert without_times[0] == without_times[1]
        assert len(without_times[0]) > 3
    for env in (whole.env, stopped, stopped_again, model.env):
        env.close()


@pytest.mark.parametrize(
    ("cls", "buffer_class", "kind"),
    [
        (sb3.PPO, None, DummyVecEnv),
        (sb3.DQN, None, DummyVecEnv),
        (sb3.DQN, CompressedReplayBuffer, SharedMemoryVecEnv),  # in files
    ],
)
def test_environments_that_are_not_deterministic_start_new_episodes(
    cls: Any, buffer_class: Any, kind: Any, tmp_path: Path
) -> None:
    def build() -> Any:
        envs.append(kind([lambda: gymnasium.make("CartPole-v1"), lambda: cartpole(Nondeterministic)]))
        return VecNormalize(VecFrameStack(VecMonitor(envs[-1]), 2))

    envs: list[Any] = []
    options: Any = {"n_steps": 16, "batch_size": 8}
    files = {"storage_dir": tmp_path / "files"} if cls is sb3.DQN and kind is SharedMemoryVecEnv else {}
    if cls is sb3.DQN:
        options = {"buffer_size": 200, "replay_buffer_class": buffer_class, "replay_buffer_kwargs": files}
    model = cls("MlpPolicy", build(), seed=1, policy_kwargs={**SMALL}, **options)
    model.learn(100, callback=ResumeCallback(tmp_path / "saves", 50))
    if files:
        model.replay_buffer.close()
    with pytest.warns(UserWarning, match="Environment 1 is not deterministic.*all environments start new") as caught:
        model = resume(tmp_path / "saves", build())
    assert not [each for each in caught if "Environment 0" in str(each.message)]
    if cls is sb3.DQN:
        buffer, row = model.replay_buffer, model.replay_buffer.pos - 1
        if files:  # the ends of the episodes are in the files, too
            buffer.close()
            spaces = model.observation_space, model.action_space
            buffer = CompressedReplayBuffer(200, *spaces, **files, n_envs=2, resume=True)
        assert np.asarray(buffer.dones[row]).all()
        assert np.asarray(buffer.timeouts[row]).any()
    if files:
        buffer.close()
    else:
        assert continue_to(100, model, ResumeCallback(tmp_path / "saves", 50)).num_timesteps >= 100
    for env in envs:
        env.close()


def test_damaged_save_is_skipped(tmp_path: Path) -> None:
    ppo().learn(160, callback=ResumeCallback(tmp_path, 32))
    older, newest = sorted(tmp_path.iterdir(), key=lambda path: int(path.name[5:]))
    (newest / "model.zip").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="is damaged"):
        model = resume(tmp_path, cartpoles())
    assert older.name == f"save-{model.num_timesteps}"
    continue_to(160, model, ResumeCallback(tmp_path, 32))
    assert resume(tmp_path, cartpoles()).num_timesteps == int(newest.name[5:])


def test_save_of_another_version_is_not_damaged(tmp_path: Path) -> None:
    ppo().learn(32, callback=ResumeCallback(tmp_path, 16))
    marker = max(tmp_path.iterdir()) / "save.json"
    marker.write_text(marker.read_text().replace("sb3_ext save 6", "sb3_ext save 9"))
    with pytest.raises(CorruptFileError, match=r"'sb3_ext save 9': expected 'sb3_ext save 6'\. Use the version"):
        resume(tmp_path, cartpoles())


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [(KeyboardInterrupt(), KeyboardInterrupt, None), (OSError(28, "full"), StorageError, "Earlier saves are complete")],
)
def test_save_that_fails_leaves_the_previous_one(
    error: BaseException, raised: Any, match: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "save-1").mkdir()
    model = ppo().learn(64, callback=ResumeCallback(tmp_path, 32))

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("sb3_ext.resume_callback._flush_to_disk", fail)
        with pytest.raises(raised, match=match):
            model.learn(100, callback=ResumeCallback(tmp_path, 32), reset_num_timesteps=False)
    model = resume(tmp_path, cartpoles())
    assert model.num_timesteps == 32
    with pytest.warns(UserWarning, match="schedules differ"):
        model.learn(64, reset_num_timesteps=False, callback=ResumeCallback(tmp_path, 32))
    assert {"notes.txt", "save-1"} <= {path.name for path in tmp_path.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".unfinished")]


def test_saves_of_another_run_are_kept(tmp_path: Path) -> None:
    for name in ("one", "other"):
        ppo().learn(128 if name == "one" else 200, callback=ResumeCallback(tmp_path / name, 32))
    saves = sorted(tmp_path.glob("*/save-*"))
    for folder, options, match in (
        ("one", {}, "reset_num_timesteps=False"),
        ("other", {"reset_num_timesteps": False}, "another run"),
    ):
        model = resume(tmp_path / "one", cartpoles())
        with pytest.raises(InvalidArgumentError, match=match):
            model.learn(32, callback=ResumeCallback(tmp_path / folder, 1000), **options)  # type: ignore[arg-type]
    assert sorted(tmp_path.glob("*/save-*")) == saves


def test_other_number_of_callbacks_than_in_the_run_is_reported(tmp_path: Path) -> None:
    ppo().learn(64, callback=[ResumeCallback(tmp_path, 32), StopAt(1000)])
    model = resume(tmp_path, cartpoles())
    with pytest.warns(UserWarning, match="2 callbacks StopAt, but 1"):
        continue_to(64, model, ResumeCallback(tmp_path, 32), StopAt(1000), StopAt(2000))


class Ages(gymnasium.Wrapper):
    """Wrapper whose episodes depend on earlier ones, in length or reward. Episodes change a port of the process."""

    def __init__(self, env: gymnasium.Env, what: str) -> None:
        super().__init__(env)
        self.what, self.port, self.folder = what, random.SystemRandom().random(), tempfile.mkdtemp()

    def reset(self, **kwargs: Any) -> Any:
        inner: Any = self.unwrapped
        inner.age = getattr(inner, "age", 0) + 1
        self.time = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.time += 1
        inner: Any = self.unwrapped
        if self.what == "length":
            truncated = truncated or self.time >= (2 if inner.age % 7 == 0 else 9)
        else:
            reward = float(reward) / inner.age
        self.port += terminated or truncated
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("isolation", ["in-process", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("wrap", "every", "names"),
    [(normalized, 32, ()), (functools.partial(Ages, what="length"), 160, ("port", "folder"))],
)
def test_attributes_that_last_over_episodes_continue_and_those_of_the_process_stay(
    isolation: Any, wrap: Any, every: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    def build() -> Any:
        return make_vec_env(lambda: cartpole(wrap), 2, 3, isolation=isolation)

    envs = [build(), build()]
    whole = ppo(envs[0]).learn(320, callback=ResumeCallback(tmp_path, every))
    before = [envs[1].get_attr(name) for name in names]
    said = r"Environment \d: construction has set Ages\.port otherwise"
    with pytest.warns(UserWarning, match=said) if names else contextlib.nullcontext():
        model = resume(tmp_path, envs[1])
    assert before == [envs[1].get_attr(name) for name in names]
    continue_to(320, model, ResumeCallback(tmp_path, every))
    assert_equal(state_of(whole), state_of(model))
    for env in envs:
        env.close()


@pytest.mark.filterwarnings("ignore:.*construction has set Ages.port otherwise")
def test_rewards_that_cannot_be_repeated_are_reported(tmp_path: Path) -> None:
    envs = [DummyVecEnv([lambda: cartpole(functools.partial(Ages, what="reward"))]) for _ in range(2)]
    ppo(envs[0]).learn(64, callback=ResumeCallback(tmp_path, 32))
    with pytest.warns(UserWarning, match="is not deterministic, or its episode depends on earlier ones"):
        resume(tmp_path, envs[1])


class Anneal(BaseCallback):
    def _on_rollout_start(self) -> None:
        self.model.ent_coef *= 0.5

    def _on_step(self) -> bool:
        return True


def test_callback_of_rollouts_before_resume_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Anneal comes before.*\[ResumeCallback\(\.\.\.\), \.\.\.\]"):
        ppo().learn(64, callback=[Anneal(), ResumeCallback(tmp_path, 32)])
    whole = ppo().learn(64, callback=[ResumeCallback(tmp_path, 32), Anneal()])
    model = continue_to(64, resume(tmp_path, cartpoles()), ResumeCallback(tmp_path, 32), Anneal())
    assert whole.ent_coef == model.ent_coef


def test_callback_inside_another_one_is_refused(tmp_path: Path) -> None:
    callback = sb3_callbacks.EveryNTimesteps(40, ResumeCallback(tmp_path, 32))
    with pytest.raises(InvalidArgumentError, match=r"inside EveryNTimesteps.* never save.*every=32\), \.\.\.\]"):
        ppo().learn(64, callback=callback)
    assert not list(tmp_path.iterdir())


def test_relative_folder_is_that_of_the_start_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    move = sb3_callbacks.ConvertCallback(lambda *_: os.chdir("/") is None)  # as libraries of experiments do
    ppo().learn(96, callback=[ResumeCallback("saves", 32), move])
    assert {path.name for path in (tmp_path / "saves").iterdir()} == {"save-32", "save-64"}


def test_unsupported_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="every=0"):
        ResumeCallback(tmp_path, 0)
    with pytest.raises(CorruptFileError, match="found none"):
        resume(tmp_path / "missing", cartpoles())
    lossy = of_buffer(CompressedReplayBuffer, storage_dir=tmp_path / "buffer", max_bytes=10_000_000)
    model = sb3.DQN("MlpPolicy", cartpole(), **lossy)
    with pytest.raises(InvalidArgumentError, match=r"storage_dir=.*max_bytes"):
        model.learn(10, callback=ResumeCallback(tmp_path))
    model.replay_buffer.close()
    env = SubprocVecEnv([cartpole], start_method="fork")
    with contextlib.closing(env), pytest.raises(InvalidTypeError, match="SubprocVecEnv"):
        ppo(env).learn(10, callback=ResumeCallback(tmp_path))
    on_tensors = tensor.A2C("MlpPolicy", tensor.TensorVecNormalize(cartpoles()), device="cpu")
    with pytest.raises(InvalidTypeError, match="from stable_baselines3 import A2C"):
        on_tensors.learn(10, callback=ResumeCallback(tmp_path))


SCRIPT = """
import sys
from stable_baselines3 import PPO
from sb3_ext import ResumeCallback
PPO("MlpPolicy", "CartPole-v1", seed=1, n_steps=16, batch_size=8, n_epochs=1, policy_kwargs={"net_arch": [8]}).learn(
    1_000_000, callback=ResumeCallback(sys.argv[1], 32)
)
"""


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("seconds", [0.0, 0.037])
def test_killed_process_leaves_a_save_and_a_living_one_keeps_its_folder(seconds: float, tmp_path: Path) -> None:
    process = programs.start(SCRIPT, "sb3", str(tmp_path))
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("save-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        model = resume(tmp_path, cartpoles())
        with pytest.raises(StorageError, match=f"in use by process {process.pid}, which saves"):
            model.learn(64, reset_num_timesteps=False, callback=ResumeCallback(tmp_path, 32))
        time.sleep(seconds)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    model = resume(tmp_path, cartpoles())
    steps = model.num_timesteps
    with pytest.warns(UserWarning, match="schedules differ"):
        model.learn(64, reset_num_timesteps=False, callback=ResumeCallback(tmp_path, 32))
    assert_equal(state_of(ppo().learn(steps + 64)), state_of(model))
    assert not (tmp_path / "lock").exists()


class Stateful(BaseCallback):
    """Callback with an argument, an attribute that follows from it, state, a file that changes, and a lock."""

    def __init__(self, folder: str, limit: int = 5) -> None:
        super().__init__()
        self.path, self.twice, self.limit = Path(folder), 2 * limit, limit
        self.seen: set[int] = set()
        self.history, self.lock = io.StringIO(), threading.Lock()

    def _on_step(self) -> bool:
        self.seen.add(self.num_timesteps)
        self.history.write("step")
        return True


def test_callbacks_keep_their_arguments_and_continue_their_state(tmp_path: Path) -> None:
    said = r"not saved.*: Stateful\.history \(StringIO\), Stateful\.lock \(lock\)\. Use"
    with pytest.warns(UserWarning, match=said) as caught:
        ppo().learn(96, callback=[ResumeCallback(tmp_path, 32), Stateful("a")])
    assert len(caught) == 1  # of two saves
    model = resume(tmp_path, cartpoles())
    callback = Stateful("b", 7)
    seen = callback.seen
    with pytest.warns(UserWarning, match=r"Callback: Stateful\.history cannot be restored"):
        continue_to(96, model, ResumeCallback(tmp_path, 32), callback)
    assert (callback.path, callback.twice, callback.limit) == (Path("b"), 14, 7)
    assert callback.seen is seen
    assert seen == set(range(1, 97))


def test_render_mode_and_arguments_of_wrappers_of_a_vec_env_may_differ(tmp_path: Path) -> None:
    ppo(VecNormalize(cartpoles())).learn(64, callback=ResumeCallback(tmp_path, 32))
    rendering = DummyVecEnv([lambda: Monitor(gymnasium.make("CartPole-v1", render_mode="rgb_array"))])
    env = VecNormalize(rendering, clip_obs=3.0)
    resume(tmp_path, env)
    assert env.clip_obs == 3.0
    assert env.obs_rms.count > 30


class Sliced(VecEnvWrapper):
    """Wrapper whose observations are views of larger arrays."""

    def __init__(self, venv: Any) -> None:
        super().__init__(venv, gymnasium.spaces.Box(-9, 9, (3,)))

    def reset(self) -> Any:
        return self.venv.reset()[:, :3]

    def step_wait(self) -> Any:
        observations, *rest = self.venv.step_wait()
        return observations[:, :3], *rest


# The order in which torch adds depends on the layout.
def test_layout_of_the_last_observations_continues(tmp_path: Path) -> None:
    model = ppo(Sliced(cartpoles(2))).learn(64, callback=ResumeCallback(tmp_path, 32))
    found = resume(tmp_path, Sliced(cartpoles(2)))._last_obs
    assert (found.strides, found.shape) == (model._last_obs.strides, model._last_obs.shape) == ((16, 4), (2, 3))


CHANGED = """
import sys
from stable_baselines3 import PPO
from sb3_ext import ResumeCallback, make_vec_env, resume
class Mine(PPO):
    def train(self):
        self.trained_by = {version!r}
        super().train()
env = make_vec_env("CartPole-v1", isolation="in-process")
if {version!r} == "old":
    Mine("MlpPolicy", env, n_steps=16, batch_size=8, n_epochs=1).learn(48, callback=ResumeCallback("run", 16))
else:
    model = resume("run", env)
    model.learn(16, reset_num_timesteps=False)
    print(type(model) is Mine, model.trained_by)
"""


def test_classes_of_the_script_are_those_of_the_present_script(tmp_path: Path) -> None:
    for version, printed in (("old", ""), ("new", "True new\n")):
        done = programs.run(CHANGED.format(version=version), "sb3", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_missing_modules_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_algorithms.py").write_text("from stable_baselines3 import PPO\nclass Mine(PPO):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from my_algorithms import Mine  # type: ignore[import-not-found]

    model = Mine("MlpPolicy", cartpoles(), n_steps=16, batch_size=8, n_epochs=1)
    model.learn(32, callback=ResumeCallback(tmp_path / "run", 16))
    monkeypatch.delattr("my_algorithms.Mine")
    with pytest.raises(
        InvalidArgumentError, match=r"uses Mine of .*no such name now\..*my_algorithms\.Mine = my_algorithms\.NewName"
    ):
        resume(tmp_path / "run", cartpoles())
    monkeypatch.setitem(sys.modules, "my_algorithms", None)
    with pytest.raises(InvalidArgumentError, match=r"cannot be imported.*sys\.modules\[.my_algorithms.\] = new_name"):
        resume(tmp_path / "run", cartpoles())


def test_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = ppo()
    with pytest.raises(StorageError, match=r"file is a file\. Use another folder"):
        model.learn(64, callback=ResumeCallback(tmp_path / "file" / "run"))
    assert model.num_timesteps == 0
    for options in ({"monitor_dir": str(tmp_path / "file")}, {"recorder": tmp_path / "file" / "crashes"}):
        with pytest.raises(StorageError, match=rf"^{next(iter(options))}='.*file is a file"):
            make_vec_env("CartPole-v1", **options)
    with pytest.raises(StorageError, match=r"^storage_dir='.*file is a file"):
        sb3.DQN("MlpPolicy", cartpoles(), **of_buffer(CompressedReplayBuffer, storage_dir=tmp_path / "file" / "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- storage_dir: files are unchanged if the environments or arguments do not fit


def two_cartpoles(**options: Any) -> Any:
    return make_vec_env("CartPole-v1", 2, 0, isolation="in-process", **options)


def same(env: gymnasium.Env[Any, Any], space: Any = None) -> gymnasium.Env[Any, Any]:
    return TransformObservation(env, lambda observation: observation, space)


def unchanged(**options: Any) -> Any:
    return two_cartpoles(wrapper_class=same, **options)


WIDER = gymnasium.spaces.Box(-9, 9, (4,))


def make_dqn(env: Any, folder: Path, cls: Any = CompressedReplayBuffer, **options: Any) -> Any:
    """Make a DQN whose replay buffer is in a folder."""
    return without_logger(sb3.DQN("MlpPolicy", env, **of_buffer(cls, storage_dir=folder, **options)))


def other_cartpole() -> gymnasium.Env[Any, Any]:
    """Build CartPole-v1 with another id."""
    spec = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    spec.id = "OtherPole-v1"
    return same(Monitor(gymnasium.make(spec)))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = make_dqn(unchanged(), folder / "files")
    model.learn(100, callback=ResumeCallback(folder / "saves", 40)).replay_buffer.close()
    return folder


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (two_cartpoles, {}, "environment 0 is Monitor of TimeLimit.*: expected TransformObservation of Monitor of "),
        (lambda: unchanged(wrapper_kwargs={"space": WIDER}), {}, "Observation spaces do not match"),
        (
            lambda: unchanged(env_kwargs={"max_episode_steps": 9}),
            *({}, r"TimeLimit\(9\) .*: expected .*TimeLimit\(500\) .*DQN\.load\(.*model\.zip', env=env\)"),
        ),
        (
            lambda: unchanged(env_kwargs={"sutton_barto_reward": True}),
            *({}, r"CartPoleEnv \('CartPole-v1', sutton_barto_reward=True\): expected .*CartPoleEnv \('CartPole-v1'\)"),
        ),
        (lambda: DummyVecEnv([other_cartpole] * 2), {}, r"\('OtherPole-v1'\): .*\('CartPole-v1'\)"),
        (lambda: DummyVecEnv([other_cartpole]), {}, "env has 1 environments: expected 2"),
        (lambda: None, {}, "env is of type NoneType"),
        (lambda: VecFrameStack(unchanged(), 1), {}, "env has the wrappers"),
        (unchanged, {"device": "nothing"}, "device"),
        (unchanged, {"custom_objects": {"replay_buffer_kwargs": {}}}, "not in storage_dir"),
    ],
)
def test_refused_resume_leaves_the_files_of_the_buffer(
    build: Callable[[], Any], arguments: dict[str, Any], message: str, saved_run: Path
) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (saved_run / "files").rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        resume(saved_run / "saves", build(), **arguments)
    assert contents() == before


def test_folder_opened_by_load_replay_buffer_must_be_in_the_arguments(tmp_path: Path) -> None:
    other = make_dqn(two_cartpoles(), tmp_path / "b")
    other.learn(16).save_replay_buffer(tmp_path / "saved")
    other.replay_buffer.close()
    model = make_dqn(two_cartpoles(), tmp_path / "a").learn(16)
    model.load_replay_buffer(tmp_path / "saved")
    assert model.replay_buffer.size() == 8
    with pytest.raises(InvalidArgumentError, match=r"is in '.*b', expected replay_buffer_kwargs") as caught:
        model.learn(16, reset_num_timesteps=False, callback=ResumeCallback(tmp_path / "saves", 8))
    exec(str(caught.value).partition("Use ")[2].removesuffix(" before learn()"), {"model": model})
    model.learn(16, reset_num_timesteps=False, callback=ResumeCallback(tmp_path / "saves", 8))
    model.replay_buffer.close()
    assert resume(tmp_path / "saves", two_cartpoles()).replay_buffer.size() == 12
