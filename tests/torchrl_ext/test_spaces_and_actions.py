"""Spaces of a batch alone, integers that count from elsewhere, devices, text, and what transforms do to actions."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl import envs as upstream
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs import transforms as t

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.comparing import assert_same, assert_same_rollouts, seeded_rollout, vector
from tests.torchrl_ext.environments import F32, Isaac, Sampled, Walk, box
from torchrl_ext import GymEnv, GymWrapper


class Batch:
    """Four of a batch: NumPy, with the spaces of all of them and no others."""

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, observation: Any, action: Any, *, count: int | None = 4) -> None:
        self.observation_space, self.action_space = observation, action
        self.received: list[Any] = []
        if count is not None:
            self.num_envs = count

    @property
    def unwrapped(self) -> Any:
        return self

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.received.append(action)
        none = np.zeros(4, bool)
        return self.observation_space.sample(), np.ones(4), none, none, {}


BATCHES = {
    "boxes": (box(4, 3), box(4, 2)),
    "a dict": (spaces.Dict(a=box(4, 3), b=spaces.Dict(c=box(4))), box(4, 2)),
    "indices": (box(4, 3), spaces.MultiDiscrete([3, 3, 3, 3])),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("by", ["num_envs", "batch_size"])
def test_batches_with_no_other_spaces(name: str, by: str) -> None:
    def made(cls: Any) -> Any:
        count, kwargs = (4, {}) if by == "num_envs" else (None, {"batch_size": [4]})
        return cls(Batch(*BATCHES[name], count=count), **kwargs)

    ours, theirs = made(GymWrapper), made(upstream.GymWrapper)
    for spec in ("full_observation_spec", "full_action_spec", "full_done_spec"):
        assert getattr(ours, spec) == getattr(theirs, spec)
    assert ours.reward_spec.shape == (4, 1)
    rollouts = []
    for env in (ours, theirs):
        torch.manual_seed(0)
        rollouts.append(env.rollout(5, break_when_any_done=False))
    found, expected = rollouts
    for key in found.exclude("next").keys(True, True):
        assert torch.equal(found[key], expected[key]), key
    for action, other in zip(ours._env.received, theirs._env.received, strict=True):
        np.testing.assert_array_equal(action, other)


def test_a_batch_whose_spaces_are_those_of_one() -> None:
    class Single(Batch):
        def reset(self, **kwargs: Any) -> Any:
            return np.zeros((4, 3), F32), {}

        def step(self, action: Any) -> Any:
            assert action.shape == (4, 2)
            return np.zeros((4, 3), F32), *super().step(action)[1:]

    assert GymWrapper(Single(box(3), box(2))).rollout(3)["observation"].shape == (4, 3, 3)


COUNTED = {
    "Discrete": spaces.Discrete(3, start=1),
    "negative": spaces.Discrete(3, start=-2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "equal MultiDiscrete": spaces.MultiDiscrete([3, 3], start=[0, 5]),
    "Dict": spaces.Dict(a=spaces.Discrete(3, start=1), b=spaces.Discrete(2), c=box(2)),
    "Tuple": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Discrete(3)]),
}


def counted_back(data: Any, space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: counted_back(data[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Box):
        return data
    if isinstance(space, spaces.Tuple):
        return np.array([part.start for part in space.spaces]) + data
    return np.asarray(space.start) + data


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("mode", [None, "SameStep", "Disabled"])
def test_integers_that_count_from_elsewhere(name: str, categorical: bool, mode: str | None) -> None:
    if mode and name == "Tuple":
        return
    space = COUNTED[name]

    def make() -> Any:
        observation = spaces.Dict(o=space) if isinstance(space, spaces.Dict) else space
        return Sampled(observation, space, 3)

    if mode:
        inner: Any = gymnasium.vector.SyncVectorEnv([make, make], autoreset_mode=mode)
        each = inner.envs
    else:
        inner = make()
        each = [inner]
    env = GymWrapper(inner, categorical_action_encoding=categorical)
    check_env_specs(env)
    rollout = seeded_rollout(env, 8)
    assert all(type(part).__name__ != "HalfBounded" for part in env.full_action_spec.values())
    for sampled in each:
        assert len(sampled.received) >= 8
        for action in sampled.received:
            as_tuple = tuple(np.asarray(action).tolist()) if isinstance(space, spaces.Tuple) else action
            if isinstance(as_tuple, dict):
                as_tuple = {key: np.asarray(part, space[key].dtype)[()] for key, part in as_tuple.items()}
            assert space.contains(as_tuple), as_tuple
    assert not rollout.isnan().any() if categorical else True


def test_observations_that_count_from_elsewhere_are_the_values() -> None:
    class Ages(Walk):
        observation_space = spaces.Discrete(20, start=5)  # type: ignore[assignment]

        def observation(self) -> Any:
            return self.step_count + 5

    for mode in (None, "SameStep", "NextStep", "Disabled"):
        inner = vector(lambda: Ages(4, 4), 2, mode) if mode else Ages(4, 4)
        rollout = GymWrapper(inner, categorical_action_encoding=True).rollout(8, break_when_any_done=False)
        steps = rollout["observation"].reshape(-1, 8)[0].tolist()
        assert steps == [0, 1, 2, 3] * 2
        assert rollout["next", "observation"].reshape(-1, 8)[0].tolist() == [1, 2, 3, 4] * 2


def test_a_start_that_upstreams_spec_has_no_place_for_is_refused() -> None:
    observation = spaces.Dict(action_mask=spaces.Box(0, 1, (3, 4), np.int8), o=box(2))
    env = GymWrapper(Sampled(observation, spaces.MultiDiscrete([3, 4], start=[1, 2])))
    with pytest.raises(InvalidArgumentError, match=r"counts from \[1 2\].*Write it with start=0"):
        env.rollout(2)


# -- devices


class HasDevice(Walk):
    """NumPy, with a device for a network of its own."""

    device = torch.device("cpu")


def test_a_numpy_environment_with_a_device_does_not_move_the_wrapper() -> None:
    env = GymWrapper(HasDevice())
    assert env.device is None
    assert_same(seeded_rollout(env, 30), seeded_rollout(upstream.GymWrapper(HasDevice()), 30))
    assert GymWrapper(HasDevice(), device="cpu").device == torch.device("cpu")
    assert GymWrapper(HasDevice(), env_type="torch").device is not None
    assert GymWrapper(Isaac(3)).device == torch.device("cpu")
    assert GymWrapper(Isaac(3), env_type="numpy").device is None


# -- text, and integers in Dicts


class Spoken(Walk):
    observation_space = spaces.Dict(place=spaces.Box(-np.inf, np.inf, (4,), F32), mission=spaces.Text(10))  # type: ignore[assignment]

    def observation(self) -> Any:
        return {"place": super().observation(), "mission": f"go {self.step_count}"}


@pytest.mark.parametrize("device", [None, "cpu"])
def test_text_across_the_end_of_an_episode(device: Any) -> None:
    ours, theirs = (cls(Spoken(), device=device) for cls in (GymWrapper, upstream.GymWrapper))
    found = assert_same_rollouts(ours, theirs, 30)
    assert found["next"].get("mission").device == theirs.rollout(2)["next"].get("mission").device
    assert [data["mission"] for data in found["next"].unbind(0)][:2] == ["go 1", "go 2"]


@pytest.mark.parametrize("categorical", [False, True])
def test_an_integer_in_a_dict_of_actions_is_an_array(categorical: bool) -> None:
    received = []
    for cls in (upstream.GymWrapper, GymWrapper):
        inner = Sampled(box(2), spaces.Dict(a=spaces.Discrete(4), b=box(2), m=spaces.MultiDiscrete([2, 3])))
        seeded_rollout(cls(inner, categorical_action_encoding=categorical), 5)
        received.append(inner.received)
    for one, other in zip(*received, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert type(one[key]) is type(other[key]) is np.ndarray
            assert (one[key].dtype, one[key].shape) == (other[key].dtype, other[key].shape)
            np.testing.assert_array_equal(one[key], other[key])


# -- options


def test_clipping_where_nothing_can_be_clipped_is_refused() -> None:
    for inner in (Walk(), Sampled(box(2), spaces.Dict(a=spaces.Discrete(2))), vector(Walk, 2, "SameStep")):
        with pytest.raises(
            InvalidArgumentError, match=r"clip_actions=0\.5 was given, and the action space .* Leave it"
        ):
            GymWrapper(inner, clip_actions=0.5)


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("configured", [True, False])
def test_time_outs_of_a_finite_horizon_are_terminations(asked: bool | None, configured: bool) -> None:
    def rollout(**kwargs: Any) -> Any:
        inner = Isaac(4)
        inner.cfg.is_finite_horizon = configured
        return GymWrapper(inner, **kwargs).rollout(30, break_when_any_done=False)["next"]

    plain, found = rollout(finite_horizon=False), rollout(finite_horizon=asked)
    assert plain["truncated"].any()
    assert plain["terminated"].any()
    assert torch.equal(found["done"], plain["done"])
    finite = configured if asked is None else asked
    assert torch.equal(found["terminated"], plain["done"] if finite else plain["terminated"])
    assert torch.equal(found["truncated"], plain["truncated"] & (not finite))


def test_a_finite_horizon_of_single_and_numpy_environments() -> None:
    for make in (Walk, lambda: vector(Walk, 3, "SameStep"), lambda: gymnasium.wrappers.TimeLimit(Walk(), 3)):
        rollout = GymWrapper(make(), finite_horizon=True).rollout(40, break_when_any_done=False)["next"]
        assert rollout["done"].any()
        assert torch.equal(rollout["terminated"], rollout["done"])
        assert not rollout["truncated"].any()
    for frame_skip in (1, 3):
        rollout = GymWrapper(Walk(), finite_horizon=True, frame_skip=frame_skip).rollout(40, break_when_any_done=False)
        assert torch.equal(rollout["next", "terminated"], rollout["next", "done"])
    with pytest.raises(InvalidArgumentError, match="finite_horizon='yes' is none of None, True, False"):
        GymWrapper(Walk(), finite_horizon="yes")


class Hides:
    """A wrapper that has no spaces; its environment has."""

    def __init__(self, env: Any) -> None:
        self.unwrapped = env
        self.reset, self.step = env.reset, env.step


def test_spaces_under_unwrapped_alone() -> None:
    assert_same(seeded_rollout(GymWrapper(Hides(Walk())), 30), seeded_rollout(GymWrapper(Walk()), 30))
    with pytest.raises(TypeError, match="env is not of type"):
        GymWrapper(Hides(object.__new__(type("Empty", (), {"reset": None, "step": None}))))
    with pytest.raises(InvalidArgumentError, match=r"from_pixels=True was given, and Hides has no observation_space"):
        GymWrapper(Hides(Walk()), from_pixels=True)


def test_what_to_do_with_a_space_of_ones_own() -> None:
    class Mission(spaces.Space[str]):
        """As MiniGrid's."""

        def __init__(self) -> None:
            super().__init__(dtype=str)

        def sample(self, *args: Any, **kwargs: Any) -> str:
            return "go"

        def contains(self, x: Any) -> bool:
            return isinstance(x, str)

    with pytest.raises(InvalidArgumentError, match=r"Mission is none.*register_gym_spec_conversion"):
        GymWrapper(Sampled(spaces.Dict(mission=Mission(), o=box(2)), spaces.Discrete(2)))


# -- specs of half-bounded Boxes among others


def test_half_bounded_specs_are_equal_to_torchrls_and_stack_with_them() -> None:
    space = spaces.Box(np.array([0, -np.inf, -1], F32), np.array([np.inf, 1, 1], F32), dtype=F32)
    ours = GymWrapper(Sampled(space, spaces.Discrete(2))).observation_spec
    theirs = upstream.GymWrapper(Sampled(space, spaces.Discrete(2))).observation_spec
    assert ours == theirs
    assert theirs == ours
    one, other = ours["observation"], theirs["observation"]
    assert one == other
    assert other == one
    assert one != Bounded(-1, 1, (3,))
    assert one != 3
    for pair in ([one, other], [other, one]):
        stacked = torch.stack(pair)
        assert stacked.shape == (2, 3)
        assert stacked.rand().isfinite().all()


# -- transforms of actions


class Masked(Walk):
    """Only the action 2 is allowed."""

    observation_space = spaces.Dict(o=box(2), action_mask=spaces.MultiBinary(3))  # type: ignore[assignment]

    def observation(self) -> Any:
        return {"o": np.zeros(2, F32), "action_mask": np.array([0, 0, 1], np.int8)}

    def step(self, action: Any) -> Any:
        assert action == 2
        return super().step(action)


PENDULUM = {
    "discretised": lambda: t.ActionDiscretizer(5),
    "scaled": lambda: t.ActionScaling(),
    "cast": lambda: t.DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["action"]),
    "renamed": lambda: t.RenameTransform([], [], ["action"], ["act"]),
    "unsqueezed": lambda: t.UnsqueezeTransform(-1, in_keys=[], in_keys_inv=["action"]),
    "several": lambda: t.MultiAction(stack_rewards=False),
}


@pytest.mark.parametrize("name", PENDULUM)
def test_random_actions_under_transforms_of_actions(name: str) -> None:
    ours, theirs = (TransformedEnv(cls("Pendulum-v1"), PENDULUM[name]()) for cls in (GymEnv, upstream.GymEnv))
    assert_same_rollouts(ours, theirs, 12)
    check_env_specs(ours)


def test_random_actions_under_a_mask() -> None:
    cast = t.DTypeCastTransform(torch.int8, torch.bool, in_keys=["action_mask"])
    env = TransformedEnv(GymWrapper(Masked()), t.Compose(cast, t.ActionMask()))
    assert env.rollout(30, break_when_any_done=False).shape == (30,)


def test_a_collector_that_begins_at_random_under_a_transform_of_actions() -> None:
    env = TransformedEnv(GymEnv("Pendulum-v1"), t.ActionScaling())

    def policy(td: Any) -> Any:
        return td.set("action", torch.zeros(1))

    collector = Collector(env, policy, frames_per_batch=10, total_frames=40, init_random_frames=20)
    batches = [data["action"].clone() for data in collector]
    collector.shutdown()
    assert len(batches) == 4
    assert batches[0].any()
    assert not batches[3].any()


def test_random_actions_of_a_subclass_that_draws_its_own() -> None:
    class Draws(GymWrapper):
        def rand_action(self, tensordict: Any = None) -> Any:
            return super().rand_action(tensordict).set("action", torch.tensor([0, 0, 1]))

    rollout = TransformedEnv(Draws(Walk()), t.StepCounter()).rollout(20, break_when_any_done=False)
    assert rollout["action"][:, 2].all()
