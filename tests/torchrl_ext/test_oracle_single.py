"""Single environments: rollouts that TorchRL's wrappers give, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from torchrl import envs as upstream
from torchrl.envs import check_env_specs, step_mdp

from tests.torchrl_ext.comparing import assert_same, assert_same_rollouts, seeded_rollout
from tests.torchrl_ext.environments import DictWalk, Sampled, VectorRewards, Walk, box
from torchrl_ext import GymEnv, GymWrapper, ParallelEnv

gymnasium.register_envs(ale_py)
DEVICES = pytest.mark.parametrize("device", [None, "cpu"])
ENCODINGS = pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])


def pong() -> Any:
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env, noop_max=5), 4)


MAKERS = {
    "CartPole": partial(gymnasium.make, "CartPole-v1"),
    "Pendulum": partial(gymnasium.make, "Pendulum-v1"),
    "HalfCheetah": partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=70),
    "Pong": pong,
    "Walk": Walk,
    "DictWalk": DictWalk,
    "VectorRewards": VectorRewards,
}


@pytest.mark.sample
@DEVICES
@pytest.mark.parametrize("name", MAKERS)
def test_rollouts_are_those_of_upstream(name: str, device: str | None) -> None:
    ours, theirs = (cls(MAKERS[name](), device=device) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs)
    check_env_specs(ours)
    assert ours.device == theirs.device
    if name not in ("Pendulum", "Pong"):
        assert rollout["next", "done"].any()


@ENCODINGS
@pytest.mark.parametrize("stop", [True, False])
def test_discrete_actions(categorical: bool, stop: bool) -> None:
    ours, theirs = (cls("CartPole-v1", categorical_action_encoding=categorical) for cls in (GymEnv, upstream.GymEnv))
    assert_same_rollouts(ours, theirs, break_when_any_done=stop)
    assert ours.action_spec == theirs.action_spec
    check_env_specs(ours)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_frame_skip(env_id: str) -> None:
    ours, theirs = GymEnv(env_id, frame_skip=3), upstream.GymEnv(env_id, frame_skip=3)
    assert_same_rollouts(ours, theirs)


OBSERVATIONS: dict[str, Any] = {
    "scalar": box(),
    "float64": box(2, dtype=np.float64),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "int8": spaces.Box(-5, 5, (2,), np.int8),
    "bool": spaces.Box(0, 1, (2,), bool),
    "Discrete": spaces.Discrete(4),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiDiscrete, all the same": spaces.MultiDiscrete([3, 3]),
    "MultiDiscrete, a matrix": spaces.MultiDiscrete([[3, 3], [3, 3]]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict(a=box(2), b=spaces.Discrete(3)),
    "nested Dict": spaces.Dict(a=spaces.Dict(x=box(2), y=spaces.Dict(z=box(1))), b=box(3)),
    "state, renamed": spaces.Dict(state=box(2)),
    "underscored": spaces.Dict(_a=box(2), b=box(1)),
    "Tuple of Discrete": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]),
    "Text": spaces.Text(5),
    "Dict with Text": spaces.Dict(a=spaces.Text(5), b=box(2)),
}


@ENCODINGS
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space(name: str, categorical: bool) -> None:
    ours, theirs = (
        cls(Sampled(OBSERVATIONS[name], spaces.Discrete(3)), categorical_action_encoding=categorical)
        for cls in (GymWrapper, upstream.GymWrapper)
    )
    assert_same_rollouts(ours, theirs, 12)
    check_env_specs(ours)


def received(value: Any) -> Any:
    """An action in a form that can be compared: 0-dimensional arrays and integers are the same."""
    if isinstance(value, dict):
        return {key: received(part) for key, part in value.items()}
    return value if isinstance(value, str) else (np.asarray(value).dtype.kind, np.asarray(value).tolist())


ACTIONS = {
    **{name: space for name, space in OBSERVATIONS.items() if name != "state, renamed"},
    "Tuple": spaces.Tuple([box(2), box(2)]),
}


@ENCODINGS
@pytest.mark.parametrize("name", ACTIONS)
def test_actions_of_every_space(name: str, categorical: bool) -> None:
    ours, theirs = (
        cls(Sampled(box(2), ACTIONS[name]), categorical_action_encoding=categorical)
        for cls in (GymWrapper, upstream.GymWrapper)
    )
    assert_same_rollouts(ours, theirs, 12)
    assert [received(action) for action in ours._env.received] == [received(action) for action in theirs._env.received]
    if name == "Discrete":
        assert {type(action) for action in ours._env.received} == {int}


def test_sequences_of_any_length() -> None:
    space = spaces.Sequence(box(2), stack=True)
    ours, theirs = (cls(Sampled(space, spaces.Discrete(3))) for cls in (GymWrapper, upstream.GymWrapper))
    found, expected = (seeded_rollout(env, 12, return_contiguous=False) for env in (ours, theirs))
    for one, other in zip(found.unbind(0), expected.unbind(0), strict=True):
        assert_same(one, other)


def test_a_tuple_of_boxes_is_stacked() -> None:
    space = spaces.Tuple([box(2), box(2)])
    env = GymWrapper(Sampled(space, spaces.Discrete(3)))
    space.seed(5)
    expected = np.stack(space.sample())
    space.seed(5)
    assert np.array_equal(env.reset()["observation"].numpy(), expected)


def test_a_dict_of_one_action_stays_a_dict() -> None:
    # Upstream hands the bare array to the environment.
    env = GymWrapper(Sampled(box(2), spaces.Dict(a=box(2))))
    rollout = env.rollout(3)
    assert [action["a"].tolist() for action in env._env.received] == rollout["a"].tolist()


@pytest.mark.parametrize("vector", [[0, 0], [2, 0], [1, 1]])
def test_vectors_that_are_not_one_hot(vector: list[int]) -> None:
    def received(cls: Any) -> Any:
        env = cls(Sampled(box(2), spaces.Discrete(2)))
        env.step(env.reset().set("action", torch.tensor(vector)))
        return int(env._env.received[0])

    assert received(GymWrapper) == received(upstream.GymWrapper)


def test_a_single_environment_has_no_part_to_reset() -> None:
    for cls in (GymWrapper, upstream.GymWrapper):
        env = cls(Walk())
        with pytest.raises(RuntimeError, match="Partial resets"):
            env.reset(env.reset().set("_reset", torch.zeros(1, dtype=torch.bool)))


@DEVICES
def test_stepping_by_hand(device: str | None) -> None:
    def played(cls: Any) -> list[Any]:
        env = cls(Walk(), device=device)
        env.set_seed(1)
        torch.manual_seed(0)
        seen, data = [], env.reset()
        for _ in range(40):
            data = env.step(env.rand_action(data))
            seen.append(data.copy())
            done = bool(data["next", "done"])
            data = step_mdp(data)
            if done:
                data = env.reset(data)
        return seen

    for one, other in zip(played(GymWrapper), played(upstream.GymWrapper), strict=True):
        assert_same(one, other)


def test_pixels() -> None:
    for options in ({}, {"pixels_only": False}):
        ours, theirs = (cls("CartPole-v1", from_pixels=True, **options) for cls in (GymEnv, upstream.GymEnv))
        rollout = assert_same_rollouts(ours, theirs, 5)
        assert rollout["pixels"].dtype is torch.uint8
        ours.close()
        theirs.close()


def test_an_environment_that_renders_and_one_of_pixels_alone() -> None:
    image = Sampled(spaces.Box(0, 255, (5, 5, 3), np.uint8), spaces.Discrete(2))
    rollout = GymWrapper(image).rollout(3)
    assert rollout["pixels"].shape == (3, 5, 5, 3)


def test_infos_that_are_registered() -> None:
    ours, theirs = (
        cls(gymnasium.make("HalfCheetah-v5")).auto_register_info_dict() for cls in (GymWrapper, upstream.GymWrapper)
    )
    rollout = assert_same_rollouts(ours, theirs, 30)
    assert rollout["next", "x_position"].unique().numel() > 20
    check_env_specs(ours)


def test_infos_by_name() -> None:
    ours, theirs = (
        cls(Walk()).set_info_dict_reader(upstream.default_info_dict_reader(["age", "length"]))
        for cls in (GymWrapper, upstream.GymWrapper)
    )
    rollout = assert_same_rollouts(ours, theirs, 30)
    assert (rollout["next", "age"] == rollout["next", "observation"][:, 1]).all()


def test_seeds() -> None:
    ours, theirs = GymWrapper(Walk()), upstream.GymWrapper(Walk())
    assert ours.set_seed(5) == theirs.set_seed(5)
    assert ours.set_seed(5, static_seed=True) == 5
    assert_same(ours.reset(seed=7), theirs.reset(seed=7))
    assert_same(ours.reset(), theirs.reset())


@pytest.mark.parametrize("cls", [GymEnv, GymWrapper])
def test_workers_of_one_environment(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("torchrl_ext.gym.wrapper.ParallelEnv", lambda *args, **kwargs: asked.append((*args, kwargs)))
    env: Any = "CartPole-v1" if cls is GymEnv else Walk(5, 5)
    cls(env, num_workers=3, copy=False)
    ((count, make, options),) = asked
    assert (count, options) == (3, {"metadata_from_workers": True})
    assert type(make()) is cls
    assert make().rollout(3).shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [GymEnv, pytest.param(GymWrapper, marks=pytest.mark.slow)])
def test_workers_of_one_environment_are_watched(cls: Any) -> None:
    env: Any = "CartPole-v1" if cls is GymEnv else Walk(5, 5)
    parallel = cls(env, num_workers=2)
    assert isinstance(parallel, ParallelEnv)
    assert not parallel.is_closed
    assert parallel.rollout(3).shape == (2, 3)
    parallel.close()
