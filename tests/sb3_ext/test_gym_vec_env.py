"""GymVecEnv returns the results of DummyVecEnv, over vectorized environments of every kind."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env as upstream_make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.resources import usable_cores
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import GymVecEnv, _compat, make_vec_env
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.vec_checks import action_of, assert_equal
from tests.sb3_ext.vec_test_envs import OBSERVATIONS, RandomEnv, ReusedArrayEnv
from tests.torchrl_ext.environments import SameStep


class Images(gym.Env[Any, Any]):
    """Environment that draws random images, with episodes of different lengths."""

    observation_space = spaces.Box(0, 255, (12, 12, 3), np.uint8)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    render_mode = "rgb_array"
    mark = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 9))
        self.options = options
        return self._image(), {"fresh": self.left}

    def _image(self) -> Any:
        return self.np_random.integers(0, 256, (12, 12, 3), np.uint8)

    def step(self, action: Any) -> Any:
        self.left -= 1
        ended = self.left == 0
        truncated = ended and bool(self.np_random.integers(2))
        info = {"left": self.left, **({"odd": True} if self.left % 2 else {})}
        return self._image(), float(action) + 0.1, ended and not truncated, truncated, info

    def render(self) -> Any:
        return self._image()

    def double(self, value: int) -> int:
        """Return twice a value, plus the attribute ``mark``."""
        return 2 * value + self.mark

    def return_arguments(self, **arguments: Any) -> dict[str, Any]:
        """Return all keyword arguments."""
        return arguments


cart_pole = functools.partial(gym.make, "CartPole-v1", max_episode_steps=30)


class PassThrough(VectorWrapper[Any, Any, Any, Any, Any]):
    """Empty wrapper, because of which GymVecEnv steps batches instead of sub-environments."""


def make_vector_env(kind: str, build: Callable[[], Any], n_envs: int, mode: AutoresetMode) -> Any:
    """Make a vectorized environment: "sync", "not copied", "wrapped", "async" or "ours"."""
    if kind in ("async", "ours"):
        workers = AsyncVectorEnv if kind == "async" else SharedMemoryVectorEnv
        return workers([build] * n_envs, autoreset_mode=mode, context="fork")
    sync = SyncVectorEnv([build] * n_envs, autoreset_mode=mode, copy=kind != "not copied")
    return sync if kind in ("sync", "not copied") else PassThrough(sync)


def roll_out(venv: VecEnv, actions: list[Any], seed: int = 3) -> list[Any]:
    """Take steps, and return all results that are the same in DummyVecEnv."""
    venv.seed(seed)
    kept: list[Any] = [venv.reset()]
    copies = copy.deepcopy(kept)
    for action in actions:
        observations, rewards, dones, infos = venv.step(action)
        last = [
            (info["terminal_observation"], info["TimeLimit.truncated"]) if done else info["TimeLimit.truncated"]
            for done, info in zip(dones, infos, strict=True)
        ]
        kept.append([observations, rewards, dones, last])
        copies.append(copy.deepcopy(kept[-1]))
    assert_equal(kept, copies, "what the caller keeps")
    return copies


def compare_with_dummy(
    ours: VecEnv, build: Callable[[], Any], steps: int = 60, wrap: Any = lambda venv: venv
) -> list[Any]:
    """Check that a rollout equals that of DummyVecEnv, and return its results."""
    theirs = wrap(DummyVecEnv([build] * ours.num_envs))
    theirs.action_space.seed(0)
    actions = [action_of(theirs.action_space, ours.num_envs) for _ in range(steps)]
    seen = roll_out(ours, actions)
    assert_equal(seen, roll_out(theirs, actions))
    theirs.close()
    ours.close()
    return seen


@pytest.mark.sample(quick=6, ci=12)
@pytest.mark.parametrize(("kind", "n_envs"), [("sync", 1), ("wrapped", 4)])
@pytest.mark.parametrize("observations", list(OBSERVATIONS))
def test_observation_spaces_give_results_of_dummy_vec_env(observations: str, kind: str, n_envs: int) -> None:
    build = functools.partial(RandomEnv, observations)
    try:
        theirs = DummyVecEnv([build])
    except (NotImplementedError, AttributeError, AssertionError):
        pytest.skip("SB3 does not take it")
    theirs.close()
    if observations == "Box without dimensions" and kind == "wrapped":
        pytest.skip("rows of an array without dimensions are scalars")
    compare_with_dummy(GymVecEnv(make_vector_env(kind, build, n_envs, AutoresetMode.SAME_STEP)), build, steps=25)


@pytest.mark.parametrize("kind", ["sync", "wrapped"])
def test_last_observation_is_copied_if_environments_reuse_their_array(kind: str) -> None:
    """In DummyVecEnv, the reset overwrites it."""
    ours, sane = (
        GymVecEnv(make_vector_env(kind, build, 2, AutoresetMode.DISABLED)) for build in (ReusedArrayEnv, RandomEnv)
    )
    actions = [np.zeros(2, int)] * 30
    assert_equal(roll_out(ours, actions), roll_out(sane, actions))


def test_invalid_arguments_are_refused() -> None:
    env = AsyncVectorEnv([cart_pole], shared_memory=False, context="fork")
    next_step: Any = SameStep([2], None)
    next_step.metadata = {"autoreset_mode": "NextStep"}
    given: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (next_step, {}, InvalidArgumentError, 'use autoreset_mode="Disabled"'),
        (gym.make("CartPole-v1"), {}, InvalidTypeError, "make_vec_env"),
        (DummyVecEnv([cart_pole]), {}, InvalidTypeError, "Use it without GymVecEnv"),
        (SyncVectorEnv([cart_pole]), {"autoreset_mode": "x"}, InvalidArgumentError, "autoreset_mode='x'"),
        (SyncVectorEnv([cart_pole]), {"clip_actions": "x"}, InvalidArgumentError, "clip_actions='x' is not a positive"),
        (env, {}, InvalidArgumentError, 'autoreset_mode="SameStep"'),
    ]
    for option in ("env_type", "missing_final_obs", "infos"):
        given.append((SameStep([2], "batch"), {option: "x"}, InvalidArgumentError, f"{option}='x'"))
    for vector_env, options, error, said in given:
        with pytest.raises(error, match=said):
            GymVecEnv(vector_env, **options)
    env.close()


# -- methods of VecEnv


@pytest.mark.parametrize("kind", ["wrapped", "async", "ours"])
def test_methods_and_attributes_reach_sub_environments(kind: str) -> None:
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.SAME_STEP))
    venv.reset()
    assert venv.env_method("double", 4) == [8, 8, 8]
    venv.set_attr("mark", 1, indices=[0, 2])
    assert venv.get_attr("mark") == [1, 0, 1]
    assert venv.get_attr("mark", indices=-1) == [1]
    assert venv.env_method("double", 4, indices=1) == [8]
    arguments = dict.fromkeys(("name", "required_attr", "args", "kwargs", "env", "base", "func"), 1)
    assert venv.env_method("return_arguments", **arguments) == [arguments] * 3
    assert venv.env_method("return_arguments", indices=[2, 0], **arguments) == [arguments] * 2
    assert venv.has_attr("double")
    assert not venv.has_attr("missing")
    with pytest.raises(AttributeError):
        venv.get_attr("missing")
    with pytest.raises(AttributeError):
        venv.env_method("missing")
    assert venv.env_is_wrapped(Monitor) == [False] * 3
    assert venv.env_is_wrapped(PassThrough) == [kind == "wrapped"] * 3
    assert [image.shape for image in venv.get_images()] == [(12, 12, 3)] * 3
    frame = venv.render()
    assert frame is not None
    assert frame.shape == (24, 24, 3)
    assert venv.metadata["render_fps"] == 7
    venv.set_options({"a": 1})
    venv.reset()
    assert venv.get_attr("options") == [{"a": 1}] * 3
    venv.reset()
    assert venv.get_attr("options", 0) == [None]
    venv.close()
    venv.close()
    for call in (venv.reset, lambda: venv.step(np.zeros(3, int)), lambda: venv.get_attr("mark")):
        with pytest.raises(InvalidArgumentError, match="closed"):
            call()


def test_calls_of_some_workers_are_refused_without_private_names_of_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "_CAN_CALL_SOME", False)
    with contextlib.closing(GymVecEnv(make_vector_env("async", Images, 2, AutoresetMode.SAME_STEP))) as venv:
        venv.seed(3)
        venv.reset()
        assert venv.get_attr("np_random_seed", indices=[1, 0]) == [4, 3]
        venv.set_attr("mark", 1)
        assert venv.get_attr("mark") == [1, 1]
        with pytest.raises(InvalidArgumentError, match=r"calls all or none\. Leave indices out"):
            venv.get_attr("mark", indices=[1])


class DerivedMonitor(Monitor):
    """Subclass of Monitor, to be detected as a Monitor."""


def make_wrapped_env() -> Any:
    """Make ``Images`` with three wrappers, which has no spec that pickles."""
    env = DerivedMonitor(gym.wrappers.TimeLimit(Images(), 30))  # has no spec
    return gym.wrappers.TransformReward(env, lambda reward: reward / 10)  # its spec does not pickle


@pytest.mark.sample(quick=1)
@pytest.mark.parametrize("kind", ["async", "ours", "sync"])
def test_wrappers_of_sub_environments_are_detected(kind: str) -> None:
    venv = GymVecEnv(make_vector_env(kind, make_wrapped_env, 2, AutoresetMode.SAME_STEP))
    found = [venv.env_is_wrapped(each, [1, 0]) for each in (Monitor, gym.wrappers.TimeLimit, gym.wrappers.ClipAction)]
    assert found == [[True, True], [True, True], [False, False]]
    idle: Any = types.SimpleNamespace(predict=lambda seen, **_: (np.zeros(len(seen), int), None))
    returns, lengths = evaluate_policy(idle, venv, 3, return_episode_rewards=True)
    np.testing.assert_allclose(returns, np.multiply(lengths, 0.1))  # returns of the monitor
    venv.close()


@pytest.mark.parametrize("kind", ["wrapped", "sync"])
def test_infos_of_finished_and_running_envs(kind: str) -> None:
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.NEXT_STEP))
    venv.seed(0)
    venv.reset()
    assert all(set(info) == {"fresh"} for info in venv.reset_infos)
    _, _, dones, infos = venv.step(np.zeros(3, int))
    assert not dones.any()
    assert infos[0] == {"TimeLimit.truncated": False}
    with pytest.raises(InvalidTypeError, match="cannot be changed"):
        infos[0]["mine"] = 1
    with pytest.raises(KeyError, match='infos="all"'):
        infos[0]["left"]
    for copied in (infos[0].copy(), copy.deepcopy(infos[0]), copy.copy(infos[0]), pickle.loads(pickle.dumps(infos[0]))):
        assert type(copied) is dict
        assert copied == infos[0]
    while not dones.any():
        held = venv.reset_infos
        _, _, dones, infos = venv.step(np.zeros(3, int))
    index = int(dones.argmax())
    assert infos[index]["left"] == 0
    assert set(venv.reset_infos[index]) == {"fresh"}
    assert venv.reset_infos is not held
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.NEXT_STEP), infos="all")
    venv.seed(0)
    venv.reset()
    infos = [info for _ in range(2) for info in venv.step(np.zeros(3, int))[3]]
    assert all(info["TimeLimit.truncated"] is False and ("odd" in info) == info["left"] % 2 for info in infos)
    assert {info["left"] % 2 for info in infos} == {0, 1}


def test_reset_discards_pending_step() -> None:
    venv = GymVecEnv(make_vector_env("sync", cart_pole, 2, AutoresetMode.SAME_STEP))
    venv.reset()
    with pytest.raises(InvalidArgumentError, match="number of actions: 3, expected 2, one for each environment"):
        venv.step(np.zeros(3, int))
    venv.step_async(np.zeros(2, int))
    venv.reset()
    with pytest.raises(InvalidArgumentError, match="no step is pending"):
        venv.step_wait()


# -- SB3's wrappers and algorithms


def test_ppo_learns_same_weights_as_with_dummy_vec_env(tmp_path: Path) -> None:
    def train(venv: VecEnv) -> Any:
        model = PPO("MlpPolicy", venv, n_steps=64, batch_size=64, n_epochs=2, seed=0, device="cpu")
        return without_logger(model).learn(512)

    ours = train(GymVecEnv(gym.make_vec("CartPole-v1", 4, vectorization_mode="sync")))
    theirs = train(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4))
    for mine, other in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        np.testing.assert_array_equal(mine.detach().numpy(), other.detach().numpy())
    assert len(ours.ep_info_buffer) > 3
    ours.save(tmp_path / "model")
    env = GymVecEnv(gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point"))
    loaded = PPO.load(tmp_path / "model", env=env, device="cpu")
    without_logger(loaded).learn(256)
    mean, _ = evaluate_policy(loaded, VecMonitor(env), n_eval_episodes=4)
    assert mean > 5


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
def test_make_vec_env_with_vectorization_mode_returns_gym_vec_env(mode: str) -> None:
    venv = make_vec_env("CartPole-v1", 3, seed=5, vectorization_mode=mode)
    theirs = upstream_make_vec_env("CartPole-v1", 3, seed=5)
    assert isinstance(venv, GymVecEnv)
    if mode != "vector_entry_point":  # it draws other start states
        assert np.array_equal(venv.reset(), theirs.reset())
        for _ in range(30):
            actions = np.array([theirs.action_space.sample() for _ in range(3)])
            for ours, other in zip(venv.step(actions)[:3], theirs.step(actions)[:3], strict=True):
                assert np.array_equal(ours, other)
    venv.close()


def test_make_vec_env_accepts_vectorized_environments() -> None:
    envs = SyncVectorEnv([cart_pole] * 2)
    venv = make_vec_env(envs, seed=1, vec_env_kwargs={"infos": "all"})
    assert isinstance(venv, GymVecEnv)
    assert venv.num_envs == 2
    model = without_logger(PPO("MlpPolicy", venv, n_steps=32, batch_size=64, device="cpu"))
    assert model.learn(64).num_timesteps == 64
    single = {"monitor_dir": "logs", "wrapper_class": gym.Wrapper, "isolation": "process", "wrapper_kwargs": {"a": 1}}
    for options in [{name: value} for name, value in {**single, "probe_timeout": 3.0, "start_index": 3}.items()]:
        with pytest.raises(InvalidArgumentError, match="is for single environments"):
            make_vec_env(envs, **options)
    with pytest.raises(InvalidArgumentError, match=r"n_envs=4 .* has 2\. Leave it out"):
        make_vec_env(envs, 4)
    with pytest.raises(InvalidTypeError, match="vectorization_mode='sync' is for ids"):
        make_vec_env(cart_pole, 4, vectorization_mode="sync")
    assert make_vec_env("CartPole-v1", None, vectorization_mode="sync").num_envs == usable_cores()
    with pytest.raises(InvalidArgumentError, match="n_envs=0 must be at least 1"):
        make_vec_env("CartPole-v1", 0, vectorization_mode="sync")
