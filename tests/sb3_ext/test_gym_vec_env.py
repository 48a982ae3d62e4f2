from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env as upstream_make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.resources import usable_cores
from rl_ext_core.vector import SharedMemoryVectorEnv, autoreset
from sb3_ext import GymVecEnv, _compat, make_vec_env
from tests.environments import OBSERVATIONS, RandomEnv, cart_pole, change_result
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.vec_checks import action_of, assert_equal, rollout
from tests.torchrl_ext.environments import IsaacByIds, SameStep, VectorRewards


class Images(RandomEnv):
    """RandomEnv of images with a mark, and infos whose keys depend on the first pixel."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    mark = 0

    def __init__(self) -> None:
        super().__init__("image")

    def reset(self, **given: Any) -> Any:
        self.options = given.get("options")
        return super().reset(**given)[0], {"fresh": 1}

    def step(self, action: Any) -> Any:
        observation, _, *flags, _ = super().step(action)
        first = int(observation[0, 0, 0])
        return observation, float(action) + 0.1, *flags, {"left": first, **({"odd": True} if first % 2 else {})}

    def return_arguments(self, **arguments: Any) -> dict[str, Any]:
        return arguments


class PassThrough(VectorWrapper[Any, Any, Any, Any, Any]):
    """Empty wrapper, because of which GymVecEnv steps batches instead of sub-environments."""


def make_vector_env(kind: str, build: Callable[[], Any], n_envs: int, mode: AutoresetMode) -> Any:
    """Make a vectorized environment: "sync", "wrapped", "list", "async" or "ours"."""
    if kind in ("async", "ours"):
        workers = AsyncVectorEnv if kind == "async" else SharedMemoryVectorEnv
        return workers([build] * n_envs, autoreset_mode=mode, context="fork")
    wrap = {"sync": lambda env: env, "wrapped": PassThrough, "list": DictInfoToList}[kind]
    return wrap(SyncVectorEnv([build] * n_envs, autoreset_mode=mode))


def without_times(step: Any) -> Any:
    """Remove the episode statistics, which DummyVecEnv lacks, from the infos of a step."""
    return [[{k: v for k, v in i.items() if k != "episode"} for i in p] if isinstance(p, list) else p for p in step]


@pytest.mark.sample(quick=6, ci=12)
@pytest.mark.parametrize(("kind", "n_envs"), [("sync", 1), ("wrapped", 4)])
@pytest.mark.parametrize("observations", list(OBSERVATIONS))
def test_observation_spaces_give_results_of_dummy_vec_env(observations: str, kind: str, n_envs: int) -> None:
    build = functools.partial(RandomEnv, observations, infos=False)
    try:
        theirs = DummyVecEnv([build])
    except (NotImplementedError, AttributeError, AssertionError):
        pytest.skip("SB3 does not take it")
    theirs.close()
    theirs = DummyVecEnv([build] * n_envs)
    if observations == "Box without dimensions" and kind == "wrapped":
        pytest.skip("rows of an array without dimensions are scalars")
    actions = [action_of(theirs.action_space, n_envs) for _ in range(25)]
    ours = GymVecEnv(make_vector_env(kind, build, n_envs, AutoresetMode.SAME_STEP), infos="all")
    found, expected = ([without_times(step) for step in rollout(venv, actions)] for venv in (ours, theirs))
    assert_equal(found, expected)


def make_isaac(**attributes: Any) -> IsaacByIds:
    """Make an imitation of Isaac Lab with four rows, and set attributes."""
    env = IsaacByIds(4, final_obs=True)
    for name, value in attributes.items():
        setattr(env, name, value)
    return env


two_rows = functools.partial(SameStep, [3, 4], "batch")


def set_next_step_mode(env: Any) -> Any:
    """Make an environment say that it resets rows one step late."""
    env.metadata = {"autoreset_mode": "NextStep"}
    return env


NOT_A_DICT = "expected a dict of arrays, or a list with a dict for each"
SMALL = spaces.Dict({"policy": spaces.Box(0, 1, (3,))})
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (lambda: set_next_step_mode(SameStep([2], None)), {}, InvalidArgumentError, 'use autoreset_mode="Disabled"'),
    (lambda: gym.make("CartPole-v1"), {}, InvalidTypeError, "make_vec_env"),
    (lambda: DummyVecEnv([cart_pole]), {}, InvalidTypeError, "Use it without GymVecEnv"),
    (lambda: SyncVectorEnv([cart_pole]), {"autoreset_mode": "x"}, InvalidArgumentError, "autoreset_mode='x'"),
    (lambda: SyncVectorEnv([cart_pole]), {"autoreset_mode": "SameStep"}, InvalidArgumentError, "declares 'NextStep'"),
    (lambda: SyncVectorEnv([cart_pole]), {"clip_actions": "x"}, InvalidArgumentError, "clip_actions='x' is not a pos"),
    (make_isaac, {"env_type": "x"}, InvalidArgumentError, "env_type='x'"),
    (make_isaac, {"missing_final_obs": "x"}, InvalidArgumentError, "missing_final_obs='x'"),
    (make_isaac, {"infos": "x"}, InvalidArgumentError, "infos='x'"),
    (make_isaac, {"clip_actions": None}, InvalidArgumentError, r"clip_actions=1\.0"),
    (make_isaac, {"clip_actions": -1}, InvalidArgumentError, "clip_actions=-1"),
    (
        *(make_isaac, {"observation_key": "x"}, InvalidArgumentError),
        "observation_key='x' is not in .*expected one of 'policy'",
    ),
    (lambda: make_isaac(single_observation_space=object()), {}, InvalidTypeError, "expected one of gymnasium's"),
    (lambda: make_isaac(final_obs=False), {}, EnvironmentOutputError, "compute_final_obs"),
    (lambda: make_isaac(single_observation_space=SMALL), {}, EnvironmentOutputError, "as in its observation space"),
    *(
        (lambda v=v: change_result(two_rows(), "reset", lambda x: (x[0], v)), {}, EnvironmentOutputError, NOT_A_DICT)
        for v in ([{}], [], "text", None)
    ),
    (
        *(lambda: change_result(two_rows(), "step", lambda x: (x[0], np.ones(3), *x[2:])), {}, EnvironmentOutputError),
        r"rewards of shape \(3,\); expected \(2,\)",
    ),
    (lambda: SyncVectorEnv([VectorRewards] * 2), {}, EnvironmentOutputError, r"a reward of the shape \(2,\)"),
]


@pytest.mark.parametrize(("make", "options", "error", "said"), REFUSED)
def test_invalid_environments_and_options_are_refused(
    make: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    def roll_out() -> None:
        venv = GymVecEnv(env, **{**({"clip_actions": 1} if isinstance(env, IsaacByIds) else {}), **options})
        venv.reset()
        for _ in range(3):
            venv.step(np.zeros((venv.num_envs, *(venv.action_space.shape or ())), int))

    env = make()
    with pytest.raises(error, match=said):
        roll_out()


def test_vectorized_environments_without_partial_resets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = AsyncVectorEnv([cart_pole], shared_memory=False, context="fork")
    with contextlib.closing(env), pytest.raises(InvalidArgumentError, match='autoreset_mode="SameStep"'):
        GymVecEnv(env)
    monkeypatch.setattr(autoreset, "version", lambda name: "0.12.0")
    with pytest.raises(InvalidArgumentError, match=r"Use pip install 'ale-py>=0\.12\.1', or AtariVectorEnv"):
        GymVecEnv(AtariVectorEnv("breakout", 3, autoreset_mode=AutoresetMode.NEXT_STEP))
    GymVecEnv(AtariVectorEnv("breakout", 3, autoreset_mode=AutoresetMode.SAME_STEP)).close()


# -- environments on tensors


class Lab(IsaacByIds):
    """IsaacByIds with a method that returns a tensor, and observations for a critic."""

    def __init__(self) -> None:
        super().__init__(4, final_obs=True)
        self.single_observation_space["critic"] = self.single_observation_space["policy"]

    def count(self, factor: int) -> torch.Tensor:
        return torch.arange(self.num_envs) * factor

    def reset(self, *arguments: Any, **options: Any) -> Any:
        observation, info = super().reset(*arguments, **options)
        return {**observation, "critic": -observation["policy"]}, info


def test_methods_attributes_and_actions_of_environments_on_tensors() -> None:
    inner = Lab()
    actions: list[Any] = []
    step = inner.step
    inner.step = lambda action: (actions.append(action), step(action))[1]  # type: ignore[method-assign]
    venv = GymVecEnv(inner, clip_actions=1.0)
    assert venv.observation_space == spaces.Box(-np.inf, np.inf, (6,), np.float32)
    assert venv.action_space == spaces.Box(-1, 1, (2,), np.float32)
    venv.reset()
    assert venv.step(np.zeros((4, 2)))[0].dtype == np.float32
    assert actions[0].dtype == torch.float32
    assert venv.get_attr("steps") == [1, 1, 1, 1]
    assert venv.get_attr("final_obs", indices=[0]) == [True]
    assert venv.env_method("count", 3) == [0, 3, 6, 9]
    (whole,) = venv.env_method("count", 3, indices=[1])
    np.testing.assert_array_equal(whole, [0, 3, 6, 9])
    venv.set_attr("final_obs", False)
    assert venv.env.final_obs is False
    with pytest.raises(InvalidArgumentError, match="Set it for all"):
        venv.set_attr("final_obs", False, indices=[1])
    assert not venv.has_attr("missing")
    assert venv.get_attr("render_mode", [1]) == [None]


def test_spaces_of_other_libraries_are_converted_and_observation_key_selects_one() -> None:
    box = types.SimpleNamespace(shape=(2,), low=-3.0, high=3.0, dtype=None)
    env = make_isaac(single_observation_space=types.SimpleNamespace(spaces={"policy": box}), single_action_space=box)
    venv = GymVecEnv(env)
    assert venv.action_space == venv.observation_space == spaces.Box(-3, 3, (2,), np.float32)
    critic = GymVecEnv(Lab(), clip_actions=1, observation_key="critic").reset()
    np.testing.assert_array_equal(critic, -GymVecEnv(Lab(), clip_actions=1).reset())
    lab = Lab()
    del lab.single_observation_space.spaces["policy"]
    assert set(GymVecEnv(lab, clip_actions=1).reset()) == {"critic"}


# -- methods of VecEnv


@pytest.mark.parametrize("kind", ["wrapped", "async", "ours"])
def test_methods_and_attributes_reach_sub_environments(kind: str) -> None:
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.SAME_STEP))
    venv.reset()
    assert venv.env_method("twice", 4, plus=1) == [9, 9, 9]
    venv.set_attr("mark", 1, indices=[0, 2])
    assert venv.get_attr("mark") == [1, 0, 1]
    assert venv.get_attr("mark", indices=-1) == [1]
    assert venv.env_method("twice", 4, indices=1) == [8]
    arguments = dict.fromkeys(("name", "required_attr", "args", "kwargs", "env", "base", "func"), 1)
    assert venv.env_method("return_arguments", **arguments) == [arguments] * 3
    assert venv.env_method("return_arguments", indices=[2, 0], **arguments) == [arguments] * 2
    assert venv.has_attr("twice")
    assert not venv.has_attr("missing")
    for call in (venv.get_attr, venv.env_method):
        with pytest.raises(AttributeError):
            call("missing")
    assert venv.env_is_wrapped(Monitor) == [False] * 3
    assert venv.env_is_wrapped(PassThrough) == [kind == "wrapped"] * 3
    assert [image.shape for image in venv.get_images()] == [(4, 6, 3)] * 3
    assert np.shape(venv.render()) == (8, 12, 3)
    assert venv.metadata["render_fps"] == 7
    venv.set_options({"a": 1})
    venv.reset()
    assert venv.get_attr("options") == [{"a": 1}] * 3
    venv.reset()
    assert venv.get_attr("options", 0) in ([None], [{}])
    venv.close()


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


@pytest.mark.parametrize("kind", ["wrapped", "sync", "list"])
def test_infos_of_finished_and_running_envs(kind: str) -> None:
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.NEXT_STEP))
    venv.seed(0)
    venv.reset()
    assert all(set(info) == {"fresh"} for info in venv.reset_infos)
    dones = np.zeros(3, bool)
    while not dones.any():
        held = venv.reset_infos
        _, _, dones, infos = venv.step(np.zeros(3, int))
    index = int(dones.argmax())
    assert "left" in infos[index]
    assert set(venv.reset_infos[index]) == {"fresh"}
    assert venv.reset_infos is not held
    info = infos[int(dones.argmin())]
    assert info == {"TimeLimit.truncated": False}
    with pytest.raises(InvalidTypeError, match="cannot be changed"):
        info["mine"] = 1
    for ask in (lambda: info["left"], lambda: info.get("left"), lambda: info.get("left", 0.0), lambda: "left" in info):
        with pytest.raises(KeyError, match='infos="all"'):
            ask()
    # SB3 reads some keys in every step. Keys that no environment returns are absent, not omitted.
    assert [info.get(key) for key in ("is_success", "episode", "terminal_observation", "missing")] == [None] * 4
    assert "missing" not in info
    assert "TimeLimit.truncated" in info
    for copied in (info.copy(), copy.deepcopy(info), copy.copy(info), pickle.loads(pickle.dumps(info))):
        assert type(copied) is dict
        assert copied == info
    venv = GymVecEnv(make_vector_env(kind, Images, 3, AutoresetMode.NEXT_STEP), infos="all")
    venv.reset()
    infos = [info for _ in range(3) for info in venv.step(np.zeros(3, int))[3]]
    assert all(("odd" in info) == info["left"] % 2 for info in infos)
    assert {info["left"] % 2 for info in infos} == {0, 1}


# -- SB3's wrappers and algorithms


def test_make_vec_env_accepts_vectorized_environments() -> None:
    envs = SyncVectorEnv([cart_pole] * 2)
    venv = make_vec_env(envs, seed=1, vec_env_kwargs={"infos": "all"})
    theirs = upstream_make_vec_env(cart_pole, 2, seed=1)
    assert isinstance(venv, GymVecEnv)
    np.testing.assert_array_equal(venv.reset(), theirs.reset())
    assert [venv.action_space.sample() for _ in range(9)] == [theirs.action_space.sample() for _ in range(9)]
    model = without_logger(PPO("MlpPolicy", venv, n_steps=32, batch_size=64, device="cpu"))
    assert model.learn(64).num_timesteps == 64
    single = {"monitor_dir": "logs", "wrapper_class": gym.Wrapper, "isolation": "process", "wrapper_kwargs": {"a": 1}}
    for name, value in {**single, "probe_timeout": 3.0, "start_index": 3, "recorder": False}.items():
        with pytest.raises(InvalidArgumentError, match="is for single environments"):
            make_vec_env(envs, **{name: value})
    with pytest.raises(InvalidArgumentError, match=r"n_envs=4 .* has 2\. Leave it out"):
        make_vec_env(envs, 4)
    assert make_vec_env("CartPole-v1", None, isolation="in-process").num_envs == usable_cores()
