from __future__ import annotations

import copy
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import one_hot
from torchrl import envs as upstream
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import ActionMask, FlattenObservation, TransformedEnv, check_env_specs

from rl_ext_core.errors import InvalidArgumentError
from tests.environments import change_results
from tests.torchrl_ext.comparison import assert_same, make_vector_env, seeded_rollout
from tests.torchrl_ext.environments import ForeignBox, ForeignDict, Isaac, SamplingEnv, Walk, box
from torchrl_ext import GymEnv, GymWrapper

INF = float("inf")
LOW, HIGH = np.array([-INF, 0, -INF, -1], np.float32), np.array([INF, INF, 2, 1], np.float32)
MIXED = spaces.Box(LOW, HIGH)

FOREIGN: dict[str, tuple[Any, Any]] = {
    "box": (ForeignBox(-1.0, 1.0, (3,), np.float32), box(3)),
    "box of tensors": (ForeignBox(-torch.ones(2), torch.ones(2), dtype=torch.float64), box(2, dtype=np.float64)),
    "box in half precision": (ForeignBox(-1.0, 1.0, (2,), torch.bfloat16), box(2)),
    "discrete, a tensor": (SimpleNamespace(n=torch.tensor(3)), spaces.Discrete(3)),
    "binary": (SimpleNamespace(n=3, shape=(3,)), spaces.MultiBinary(3)),
    "dict": (ForeignDict(a=ForeignBox(-1.0, 1.0, (2,), np.float32)), spaces.Dict(a=box(2))),
    "tuple": (SimpleNamespace(spaces=[box(2), box(2)]), spaces.Tuple([box(2), box(2)])),
}


def make_env_with_spaces(observed: Any, taken: Any) -> Any:
    return SimpleNamespace(observation_space=observed, action_space=taken, reset=None, step=None)


@pytest.mark.parametrize("name", FOREIGN)
def test_specs_of_foreign_spaces_equal_those_of_gymnasium_spaces(name: str) -> None:
    found, expected = (
        GymWrapper(make_env_with_spaces(space, spaces.Discrete(2))).observation_spec for space in FOREIGN[name]
    )
    assert [*found.values()] == [*expected.values()]  # keys may differ, since TorchRL names images "pixels"


@pytest.mark.parametrize(
    "space",
    [
        object(),
        None,
        spaces.Space(dtype=str),
        spaces.Graph(box(2), None),
        spaces.Dict(a=spaces.Graph(box(2), None)),
        spaces.Box(0, 60000, (2,), np.uint16),
        spaces.Tuple([spaces.Discrete(3), box(2)]),
        spaces.Tuple([box(2), box(3)]),
        spaces.MultiDiscrete([[3, 4], [2, 5]]),
        spaces.Sequence(box(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unknown_spaces_are_rejected(space: Any) -> None:
    is_single = isinstance(space, (spaces.Tuple, spaces.MultiDiscrete))
    text = r"Use gymnasium\.spaces\.Dict, with a key for each part" if is_single else "Use"
    text = "register_gym_spec_conversion" if type(space) is spaces.Space else text
    for observed, taken in ((space, spaces.Discrete(2)), (box(2), space)):
        for categorical in (False, True):
            with pytest.raises(InvalidArgumentError, match=text):
                GymWrapper(make_env_with_spaces(observed, taken), categorical_action_encoding=categorical)


@pytest.mark.parametrize("space", [spaces.Tuple([box(2), box(2)]), spaces.Text(4), spaces.Sequence(box(2), stack=True)])
def test_spaces_without_a_batched_form_are_rejected(space: Any) -> None:
    for observed, taken in ((spaces.Dict(a=space), spaces.Discrete(2)), (box(2), space)):
        with pytest.raises(InvalidArgumentError, match=r"vectorized environments.*Use"):
            GymWrapper(make_vector_env(partial(SamplingEnv, observed, taken), 2, "Disabled"))


def test_registered_space_conversions_are_used() -> None:
    from torchrl.envs.libs.gym import _conversion_registry, register_gym_spec_conversion

    class AngleSpace(spaces.Space[Any]):
        def sample(self, mask: Any = None, probability: Any = None) -> Any:
            return np.float32(0.5)

    register_gym_spec_conversion(AngleSpace)(lambda *_, device=None, **__: Bounded(0.0, 1.0, (1,), device=device))
    try:
        env = GymWrapper(SamplingEnv(AngleSpace((), np.float32), spaces.Discrete(2)))
        check_env_specs(env)
        assert env.observation_spec["observation"].shape == (1,)
        batch: Any = Isaac(3)
        batch.single_action_space = AngleSpace((), np.float32)
        assert GymWrapper(batch).action_spec.shape == (3, 1)
    finally:
        del _conversion_registry[AngleSpace]


def test_minimal_environment_without_base_class_is_wrapped() -> None:
    inner = make_env_with_spaces(ForeignBox(-INF, INF, (2,), np.float32), SimpleNamespace(n=3))
    inner.reset = lambda seed=None: (np.zeros(2, np.float32), {})
    inner.step = lambda action: (np.ones(2, np.float32), float(type(action) is int), False, False, {})
    env = GymWrapper(inner)
    check_env_specs(env)
    assert env.rollout(3)["next", "reward"].all()
    assert env.set_seed(3) != 3
    assert type(env.observation_spec["observation"]) is type(Unbounded(2))


def test_key_shared_by_observation_and_action_is_rejected() -> None:
    env = SamplingEnv(spaces.Dict(joint=box(2)), spaces.Dict(joint=box(2)))
    with pytest.raises(InvalidArgumentError, match=r"joint names an observation and an action.*Rename one"):
        GymWrapper(env)


# -- Boxes with some infinite bounds


def check_samples(samples: torch.Tensor) -> None:
    """Assert that samples are finite, in their bounds, and vary in all entries."""
    assert samples.isfinite().all()
    assert (samples >= torch.from_numpy(LOW)).all()
    assert (samples <= torch.from_numpy(HIGH)).all()
    flat = samples.reshape(-1, 4)
    assert (flat.std(0) > 0.1).all()  # of all four entries
    assert flat[:, 1].max() > 1.5
    assert flat[:, 2].min() < 0.5
    assert flat[:, 3].max() > 0.5
    assert flat[:, 3].min() < -0.5


VARIANTS: dict[str, Any] = {
    "to another dtype": lambda spec: spec.to(torch.float64),
    "index": lambda spec: spec.expand(5, 4)[1:3],
    "unbind": lambda spec: spec.clone().expand(5, 4).unbind(0)[1],
    "stack": lambda spec: torch.stack([spec, spec], 0),
    "reshape": lambda spec: (
        spec.unsqueeze(0).squeeze(0).expand(6, 4).reshape(2, 3, 4).flatten(0, 1).unflatten(0, (2, 3))
    ),
    "pickle": lambda spec: copy.deepcopy(pickle.loads(pickle.dumps(spec))),
    "in a Composite": lambda spec: (
        Composite(a=Composite(b=spec)).expand(3).clone().to("cpu").lock_(recurse=True)["a", "b"]
    ),
    "of an environment, nested": lambda _: GymWrapper(
        SamplingEnv(box(2), spaces.Dict(a=spaces.Dict(b=MIXED), c=spaces.Discrete(2)))
    ).full_action_spec["a", "b"],
    "of a batch": lambda _: GymWrapper(
        make_vector_env(partial(SamplingEnv, MIXED, MIXED), 5, "SameStep")
    ).full_action_spec["action"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_samples_of_transformed_specs_stay_finite(name: str) -> None:
    spec = VARIANTS[name](GymWrapper(make_env_with_spaces(box(2), MIXED)).action_spec)
    samples = spec.rand((300,))
    assert samples.shape == (300, *spec.shape)
    check_samples(samples)
    assert spec.is_in(samples[0])
    assert torch.equal(spec.project(samples[0] * 0 + 1e9)[..., 3:], torch.ones_like(samples[0][..., 3:]))


# -- clip_actions


@pytest.mark.parametrize("torch_tensors", [False, True])
def test_clip_actions_clips_only_what_the_environment_gets(torch_tensors: bool) -> None:
    numpy = partial(SamplingEnv, box(2), spaces.Box(-INF, INF, (2,)))
    inner: Any = Isaac(3) if torch_tensors else make_vector_env(numpy, 3, "Disabled")
    received: list[Any] = []
    step = inner.step
    inner.step = lambda action: received.append(torch.as_tensor(action).clone()) or step(action)  # type: ignore[func-returns-value]
    env = GymWrapper(inner, clip_actions=0.5)
    assert (env.action_spec.space.low == -0.5).all()
    assert (env.action_spec.space.high == 0.5).all()
    assert env.rand_action()["action"].abs().max() <= 0.5
    check_env_specs(env)
    action = torch.tensor([[9.0, -9.0], [0.25, -0.25], [0.5, float("inf")]])
    data = env.step(env.reset().set("action", action.clone()))
    assert received[-1].tolist() == [[0.5, -0.5], [0.25, -0.25], [0.5, 0.5]]
    assert torch.equal(data["action"], action)  # the policy's actions stay unclipped


def test_clip_actions_never_widens_bounds() -> None:
    low, high = np.array([-0.1, -5], np.float32), np.array([5, 0.2], np.float32)
    space = spaces.Dict(
        a=spaces.Box(low, high), b=spaces.Discrete(3), c=spaces.Box(-9, 9, (2,), np.int64), d=spaces.MultiBinary(2)
    )
    inner = SamplingEnv(box(2), space)
    env = GymWrapper(inner, clip_actions=1.0, categorical_action_encoding=True)
    bounds = env.full_action_spec["a"].space
    assert torch.equal(bounds.low, torch.tensor([-0.1, -1.0]))
    assert torch.equal(bounds.high, torch.tensor([1.0, 0.2]))
    env.step(env.rand_action(env.reset()).set("c", torch.tensor([9, -9])).set("b", torch.tensor(2)))
    assert inner.received[0]["c"].tolist() == [9, -9]
    assert inner.received[0]["b"] == 2
    for nothing in (
        Walk(),
        SamplingEnv(box(2), spaces.Dict(a=spaces.Discrete(2))),
        make_vector_env(Walk, 2, "SameStep"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"clip_actions=0\.5 has no effect, because .* Leave"):
            GymWrapper(nothing, clip_actions=0.5)


# -- options


@pytest.mark.parametrize("make", [lambda **kwargs: GymWrapper(Walk(), **kwargs), partial(GymEnv, "CartPole-v1")])
def test_invalid_option_values_are_rejected(make: Any) -> None:
    wrong = [("env_type", "cupy"), ("copy", 1), ("copy", None), ("missing_final_obs", 0.0), ("finite_horizon", "yes")]
    for option, value in [*wrong, ("clip_actions", 0), ("clip_actions", "1"), ("clip_actions", float("nan"))]:
        with pytest.raises(InvalidArgumentError, match=f"{option}=.*Use {option}="):
            make(**{option: value})


BATCHES = {
    "boxes": (box(4, 3), box(4, 2)),
    "a dict": (spaces.Dict(a=box(4, 3), b=spaces.Dict(c=box(4))), box(4, 2)),
    "indices": (box(4, 3), spaces.MultiDiscrete([3, 3, 3, 3])),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("by", ["num_envs", "batch_size"])
def test_batches_with_batched_spaces_only_match_upstream(name: str, by: str) -> None:
    none = np.zeros(4, bool)

    def make_env(cls: Any) -> Any:
        inner: Any = SamplingEnv(*BATCHES[name])
        change_results(inner, lambda observation, *_: (observation, np.ones(4), none, none, {}))
        if by == "num_envs":
            inner.num_envs = 4
        return cls(inner, **({"batch_size": [4]} if by == "batch_size" else {}))

    ours, theirs = make_env(GymWrapper), make_env(upstream.GymWrapper)
    for spec in ("full_observation_spec", "full_action_spec", "full_done_spec"):
        assert getattr(ours, spec) == getattr(theirs, spec)
    assert ours.reward_spec.shape == (4, 1)
    found, expected = (seeded_rollout(env, 5).exclude("next") for env in (ours, theirs))
    assert_same(found, expected)
    for action, other in zip(ours._env.received, theirs._env.received, strict=True):
        np.testing.assert_array_equal(action, other)


def test_error_about_a_wrong_env_type_names_the_right_one() -> None:
    with pytest.raises(InvalidArgumentError, match=r"env_type='torch'.*are numpy.*Use env_type='numpy'"):
        GymWrapper(Walk(), env_type="torch").reset()
    with pytest.raises(InvalidArgumentError, match=r"env_type='numpy'.*are torch.*Use env_type='torch'"):
        GymWrapper(Isaac(2), env_type="numpy").reset()


# -- devices


def test_device_attribute_of_a_numpy_environment_is_ignored() -> None:
    class HasDevice(Walk):
        device = torch.device("cpu")

    assert_same(seeded_rollout(GymWrapper(HasDevice()), 9), seeded_rollout(upstream.GymWrapper(Walk()), 9))
    assert GymWrapper(HasDevice()).device is None
    assert GymWrapper(HasDevice(), device="cpu").device == torch.device("cpu")
    assert GymWrapper(HasDevice(), env_type="torch").device is not None
    assert GymWrapper(Isaac(3)).device == torch.device("cpu")
    assert GymWrapper(Isaac(3), env_type="numpy").device is None


def make_isaac(is_finite: bool) -> Isaac:
    inner = Isaac(4)
    inner.cfg.is_finite_horizon = is_finite
    return inner


HORIZONS: dict[str, tuple[Any, bool]] = {
    "Isaac Lab": (partial(make_isaac, False), False),
    "Isaac Lab, finite": (partial(make_isaac, True), True),
    "single": (Walk, False),
    "single, TimeLimit": (lambda: gymnasium.wrappers.TimeLimit(Walk(), 5), False),
    "NumPy batch": (partial(make_vector_env, Walk, 3, "SameStep"), False),
}


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("name", HORIZONS)
def test_time_outs_of_a_finite_horizon_are_terminations(name: str, asked: bool | None) -> None:
    make, finite = HORIZONS[name]
    skip, finite = 2 if "single" in name else 1, finite if asked is None else asked
    plain, found = (
        seeded_rollout(GymWrapper(make(), finite_horizon=option, frame_skip=skip), 40)["next"]
        for option in (False, asked)
    )
    assert plain["truncated"].any()
    assert plain["terminated"].any()
    assert torch.equal(found["done"], plain["done"])
    assert torch.equal(found["terminated"], plain["done"] if finite else plain["terminated"])
    assert torch.equal(found["truncated"], plain["truncated"] & (not finite))


# -- tests of actions: shapes follow the spec, and values are in the action space

torch_or_numpy = pytest.mark.parametrize("in_torch", [False, True], ids=["NumPy", "torch"])


def to_torch_env(env: Any) -> Any:
    return (gymnasium.wrappers.vector if hasattr(env, "num_envs") else gymnasium.wrappers).NumpyToTorch(env)


def make_env(space: Any, count: int | None, in_torch: bool) -> tuple[Any, list[Any]]:
    """Make an environment, and return it with its sub-environments."""
    make = partial(SamplingEnv, box(2), space)
    env = make() if count is None else make_vector_env(make, count, "SameStep")
    return to_torch_env(env) if in_torch else env, getattr(env, "envs", [env])


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
    inner, singles = make_env(spaces.Dict(a=space) if nested else space, count, in_torch)
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
    assert not any(single.received for single in singles), "no step was taken"


@torch_or_numpy
@pytest.mark.parametrize("count", [None, 3])
def test_actions_may_have_or_lack_an_axis_of_length_one(count: int | None, in_torch: bool) -> None:
    index = torch.arange(count or 1).reshape(() if count is None else (count,))
    for space, kwargs, action, expected in (
        (spaces.Discrete(4), {}, one_hot(index, 4)[..., None, :], index),
        (spaces.Discrete(4), {"categorical_action_encoding": True}, index[..., None], index),
        (box(1), {}, index.float(), index[..., None].float()),
    ):
        inner, singles = make_env(space, count, in_torch)
        env = GymWrapper(inner, **kwargs)
        env.step(env.reset().set("action", action))
        received = [single.received[-1] for single in singles]
        assert np.array_equal(received[0] if count is None else np.stack(received), expected.numpy())


# -- one choice for all parts of a MultiDiscrete, which TorchRL uses with a mask of its shape


class Board(gymnasium.Env[Any, Any]):
    """Board on which each action takes a free place; actions are numbered from ``start``."""

    def __init__(self, shape: tuple[int, ...] = (3, 4), start: Any = None) -> None:
        self.shape = shape
        self.action_space = spaces.MultiDiscrete(shape, start=start)
        mask = spaces.Box(0, 1, shape, np.bool_)
        self.observation_space = spaces.Dict(observation=box(*shape), action_mask=mask)

    def observe(self) -> Any:
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
@pytest.mark.parametrize("kind", ["single", "torch", "batch", "torch batch"])
@pytest.mark.parametrize(("shape", "start"), BOARDS)
def test_action_masks_of_multidiscrete_spaces_are_respected(
    shape: Any, start: Any, kind: str, categorical: bool
) -> None:
    make, size, is_batch = partial(Board, shape, start), int(np.prod(shape)), "batch" in kind
    inner = make_vector_env(make, 2, "NextStep") if is_batch else make()
    env = GymWrapper(to_torch_env(inner) if "torch" in kind else inner, categorical_action_encoding=categorical)
    if is_batch:  # TorchRL makes this spec for single environments only
        lead = env.batch_size
        env.action_spec = Categorical(size, shape=lead) if categorical else OneHot(size, shape=(*lead, size))
    env = TransformedEnv(env)
    # The masks of a batch have to be in one axis.
    env.append_transform(FlattenObservation(-len(shape), -1, in_keys=["action_mask"]))
    env.append_transform(ActionMask())
    rollout = env.rollout(2 * size, break_when_any_done=False)
    assert rollout["next", "done"].sum() == 2 * (2 if is_batch else 1)
    indices = rollout["action"] if categorical else rollout["action"].long().argmax(-1)
    places = torch.stack(torch.unravel_index(indices, shape), -1)
    taken = rollout["next", "observation"] - rollout["observation"]
    assert torch.equal(taken.nonzero()[:, -len(shape) :], places.reshape(-1, len(shape)))


def test_wrong_number_of_joint_choices_is_rejected() -> None:
    env = GymWrapper(SamplingEnv(box(2), spaces.MultiDiscrete([3, 4])))
    env.action_spec = Categorical(10)
    with pytest.raises(InvalidArgumentError, match=r"10 choices.*\[3 4\].*12"):
        env.rollout(2)
