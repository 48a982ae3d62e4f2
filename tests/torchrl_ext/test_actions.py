"""Tests of actions: shapes follow the spec, and values are in the action space."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import one_hot
from torchrl.collectors import Collector
from torchrl.data import Categorical, OneHot
from torchrl.envs import ActionMask, FlattenObservation, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.comparison import make_vector_env
from tests.torchrl_ext.environments import Isaac, SamplingEnv, Walk, box
from torchrl_ext import GymWrapper

torch_or_numpy = pytest.mark.parametrize("in_torch", [False, True], ids=["NumPy", "torch"])


class ActionRecorder(Isaac):
    """Batch of torch environments that records actions of any space."""

    def __init__(self, count: int, space: Any) -> None:
        super().__init__(count)
        self.single_action_space, self.received = space, []

    def step(self, action: Any) -> Any:
        self.received.append(action)
        return super().step(torch.zeros(self.num_envs, 2))


def make_env(space: Any, count: int | None, in_torch: bool) -> tuple[Any, Any]:
    """Make an environment, and a function that returns its last actions."""
    make = partial(SamplingEnv, box(2), space)
    if count is None:
        one = make()
        return gymnasium.wrappers.NumpyToTorch(one) if in_torch else one, lambda: one.received[-1]
    if in_torch:
        batch = ActionRecorder(count, space)
        return batch, lambda: batch.received[-1]
    several = make_vector_env(make, count, "SameStep")
    return several, lambda: np.stack([env.received[-1] for env in several.envs])


WRONG: dict[str, Any] = {
    "an index": (spaces.Discrete(4), None, torch.tensor(3)),
    "too few classes": (spaces.Discrete(4), None, torch.tensor([0, 1])),
    "indices": (spaces.Discrete(4), 3, torch.tensor([1, 2, 3])),
    "indices of MultiDiscrete": (spaces.MultiDiscrete([3, 4]), None, torch.tensor([1, 2])),
    "one number for two choices of a batch": (spaces.MultiDiscrete([3, 4]), 3, torch.ones(3, 1, dtype=torch.int64)),
    "one number for two": (box(2), None, torch.zeros(1)),
    "bits": (spaces.MultiBinary(3), None, torch.zeros(2, dtype=torch.int8)),
}


@torch_or_numpy
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a Dict"])
@pytest.mark.parametrize("name", WRONG)
def test_actions_of_wrong_shape_are_rejected(name: str, nested: bool, in_torch: bool) -> None:
    space, count, action = WRONG[name]
    inner, received = make_env(spaces.Dict(a=space) if nested else space, count, in_torch)
    env = GymWrapper(inner)
    key = "a" if nested else "action"
    for take in (env.step, env.step_and_maybe_reset):
        data = env.rand_action(env.reset())
        wanted = tuple(data[key].shape)
        with pytest.raises(InvalidArgumentError) as caught:
            take(data.set(key, action))
        assert f"the shape {tuple(action.shape)}; expected {wanted}" in str(caught.value)
        is_index = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and "choices" not in name
        assert ("Use categorical_action_encoding=True" in str(caught.value)) == is_index
    with pytest.raises(IndexError):  # no step was taken
        received()


@torch_or_numpy
@pytest.mark.parametrize("count", [None, 3])
def test_actions_may_have_or_lack_an_axis_of_length_one(count: int | None, in_torch: bool) -> None:
    lead = () if count is None else (count,)
    index = torch.arange(count or 1).reshape(lead)
    for space, kwargs, action, expected in (
        (spaces.Discrete(4), {}, one_hot(index, 4)[..., None, :], index),
        (spaces.Discrete(4), {"categorical_action_encoding": True}, index[..., None], index),
        (box(1), {}, index.float(), index[..., None].float()),
    ):
        inner, received = make_env(space, count, in_torch)
        env = GymWrapper(inner, **kwargs)
        env.step(env.reset().set("action", action))
        assert np.array_equal(np.asarray(received()), expected.numpy())


@pytest.mark.parametrize("count", [None, 3])
def test_collector_rejects_index_policy_for_one_hot_actions(count: int | None) -> None:
    def choose_index(data: Any) -> Any:
        """Set actions to category indices, although the spec is one-hot."""
        return data.set("action", torch.randint(0, 3, data["done"].shape))

    env = GymWrapper(make_vector_env(Walk, count, "SameStep") if count else Walk())
    collector = Collector(env, choose_index, frames_per_batch=6, total_frames=6, trust_policy=True)
    with pytest.raises(InvalidArgumentError, match="categorical_action_encoding=True"):
        next(iter(collector))


# -- one choice for all parts of a MultiDiscrete, which TorchRL uses with a mask of its shape


class Board(gymnasium.Env[Any, Any]):
    """Board on which each action takes a free place; actions are numbered from ``start``."""

    def __init__(self, shape: tuple[int, ...] = (3, 4), start: Any = None) -> None:
        self.shape = shape
        self.action_space = spaces.MultiDiscrete(shape, start=start)
        mask = spaces.Box(0, 1, shape, np.bool_)
        self.observation_space = spaces.Dict(observation=box(*shape), action_mask=mask)

    def observe(self) -> Any:
        """Return the places that are taken, and a mask of the free ones."""
        return {"observation": self.taken.astype(np.float32), "action_mask": ~self.taken}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.taken = np.zeros(self.shape, bool)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        place = tuple(action - self.action_space.start)
        assert not self.taken[place], "it was masked"
        self.taken[place] = True
        return self.observe(), 1.0, bool(self.taken.all()), False, {}


BOARDS = [((3, 4), None), ((2, 2), [5, -1]), ((2, 3, 2), None)]


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("mode", [None, "SameStep"])
@pytest.mark.parametrize(("shape", "start"), BOARDS)
def test_action_masks_of_multidiscrete_spaces_are_respected(
    shape: Any, start: Any, mode: str | None, categorical: bool
) -> None:
    make, size = partial(Board, shape, start), int(np.prod(shape))
    inner = make_vector_env(make, 2, mode) if mode else make()
    env = GymWrapper(inner, categorical_action_encoding=categorical)
    if mode:  # TorchRL makes this spec for single environments only
        lead = env.batch_size
        env.action_spec = Categorical(size, shape=lead) if categorical else OneHot(size, shape=(*lead, size))
    env = TransformedEnv(env)
    # The masks of a batch have to be in one axis.
    env.append_transform(FlattenObservation(-len(shape), -1, in_keys=["action_mask"]))
    env.append_transform(ActionMask())
    rollout = env.rollout(2 * size, break_when_any_done=False)
    assert rollout["next", "done"].sum() == 2 * (2 if mode else 1)
    indices = rollout["action"] if categorical else rollout["action"].long().argmax(-1)
    places = torch.stack(torch.unravel_index(indices, shape), -1)
    taken = rollout["next", "observation"] - rollout["observation"]
    assert torch.equal(taken.nonzero()[:, -len(shape) :], places.reshape(-1, len(shape)))


@pytest.mark.parametrize("count", [None, 2])
def test_joint_choice_of_multidiscrete_is_decoded_in_torch(count: int | None) -> None:
    space = spaces.MultiDiscrete([3, 4], start=[1, 0])
    inner, _ = make_env(space, count, True)
    masks = spaces.Box(0, 1, (3, 4), np.bool_)
    if count is None:
        inner = gymnasium.wrappers.NumpyToTorch(SamplingEnv(spaces.Dict(o=box(2), action_mask=masks), space))
    env = GymWrapper(inner, categorical_action_encoding=True)
    if count:
        env.action_spec = Categorical(12, shape=env.batch_size)
    env.step(env.reset().set("action", torch.full(env.batch_size, 7)))
    got = inner.unwrapped.received[-1]
    assert np.array_equal(np.asarray(got), np.broadcast_to([2, 3], (*env.batch_size, 2)))


def test_wrong_number_of_joint_choices_is_rejected() -> None:
    env = GymWrapper(SamplingEnv(box(2), spaces.MultiDiscrete([3, 4])))
    env.action_spec = Categorical(10)
    with pytest.raises(InvalidArgumentError, match=r"10 choices.*\[3 4\].*12"):
        env.rollout(2)
