"""Specs: of anybody's spaces, with finite samples, and bounds that hold for what the environment gets."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import GymWrapper as Upstream
from torchrl.envs import check_env_specs

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.comparing import vector
from tests.torchrl_ext.environments import ForeignBox, ForeignDict, Isaac, Sampled, Walk, box
from torchrl_ext import GymWrapper

INF = float("inf")
LOW, HIGH = np.array([-INF, 0, -INF, -1], np.float32), np.array([INF, INF, 2, 1], np.float32)
MIXED = spaces.Box(LOW, HIGH)

FOREIGN: dict[str, tuple[Any, Any]] = {
    "box": (ForeignBox(-1.0, 1.0, (3,), np.float32), box(3)),
    "box of arrays": (ForeignBox(-np.ones(2), np.ones(2)), box(2)),
    "box of tensors": (ForeignBox(-torch.ones(2), torch.ones(2), dtype=torch.float64), box(2, dtype=np.float64)),
    "box of bytes": (ForeignBox(0, 255, (4, 4, 3), "uint8"), spaces.Box(0, 255, (4, 4, 3), np.uint8)),
    "box in half precision": (ForeignBox(-1.0, 1.0, (2,), torch.bfloat16), box(2)),
    "box without a shape": (ForeignBox(-1.0, 1.0, (), np.float32), box()),
    "discrete": (SimpleNamespace(n=3, shape=()), spaces.Discrete(3)),
    "discrete, a tensor": (SimpleNamespace(n=torch.tensor(3)), spaces.Discrete(3)),
    "binary": (SimpleNamespace(n=3, shape=(3,)), spaces.MultiBinary(3)),
    "many discrete": (SimpleNamespace(nvec=[3, 4]), spaces.MultiDiscrete([3, 4])),
    "dict": (ForeignDict(a=ForeignBox(-1.0, 1.0, (2,), np.float32)), spaces.Dict(a=box(2))),
    "plain dict": ({"a": box(2), "b": SimpleNamespace(n=2)}, spaces.Dict(a=box(2), b=spaces.Discrete(2))),
    "tuple": (SimpleNamespace(spaces=[box(2), box(2)]), spaces.Tuple([box(2), box(2)])),
}


def bare(observed: Any, taken: Any) -> Any:
    """No more than spaces."""
    return SimpleNamespace(observation_space=observed, action_space=taken, reset=None, step=None)


@pytest.mark.parametrize("name", FOREIGN)
def test_spaces_of_other_libraries(name: str) -> None:
    found, expected = (GymWrapper(bare(space, spaces.Discrete(2))).observation_spec for space in FOREIGN[name])
    assert [*found.values()] == [*expected.values()]  # TorchRL names images of gymnasium's "pixels"


@pytest.mark.parametrize(
    "space",
    [
        object(),
        "Box",
        None,
        SimpleNamespace(shape=(3,)),
        spaces.Graph(box(2), None),
        spaces.OneOf([box(2), box(3)]),
        spaces.Dict(a=spaces.Graph(box(2), None)),
        {"a": object()},
        spaces.Box(0, 60000, (2,), np.uint16),
        spaces.MultiBinary((2, 3)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unknown_spaces(space: Any) -> None:
    for observed, taken in ((space, spaces.Discrete(2)), (box(2), space)):
        with pytest.raises(InvalidArgumentError, match="Write"):
            GymWrapper(bare(observed, taken))


@pytest.mark.parametrize("space", [spaces.Tuple([box(2), box(2)]), spaces.Text(4), spaces.Sequence(box(2), stack=True)])
def test_spaces_that_make_no_batch(space: Any) -> None:
    for observed, taken in ((space, spaces.Discrete(2)), (box(2), space), (spaces.Dict(a=space), spaces.Discrete(2))):
        with pytest.raises(InvalidArgumentError, match=r"vectorised environments.*Write"):
            GymWrapper(vector(lambda observed=observed, taken=taken: Sampled(observed, taken), 2, "Disabled"))


def test_spaces_that_torchrl_was_taught() -> None:
    from torchrl.envs.libs.gym import _conversion_registry, register_gym_spec_conversion

    class Angle(spaces.Space[Any]):
        def sample(self, mask: Any = None, probability: Any = None) -> Any:
            return np.float32(0.5)

    try:

        @register_gym_spec_conversion(Angle)
        def convert(spec: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
            return Bounded(0.0, 1.0, shape=(1,), device=device)

        env = GymWrapper(Sampled(Angle((), np.float32), spaces.Discrete(2)))
        check_env_specs(env)
        assert env.observation_spec["observation"].shape == (1,)
        batch: Any = Isaac(3)
        batch.single_action_space = Angle((), np.float32)
        assert GymWrapper(batch).action_spec.shape == (3, 1)
    finally:
        _conversion_registry.pop(Angle, None)


class Minimal:
    """What is asked of an environment, and nothing else."""

    observation_space = ForeignBox(-INF, INF, (2,), np.float32)
    action_space = SimpleNamespace(n=3)

    def reset(self, seed: int | None = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert type(action) is int
        return np.ones(2, np.float32), 1.0, False, False, {}


def test_an_environment_with_nothing_but_its_methods() -> None:
    env = GymWrapper(Minimal())
    check_env_specs(env)
    assert env.set_seed(3) != 3
    assert type(env.observation_spec["observation"]) is type(Unbounded(2))


def test_specs_are_upstreams_where_those_are_good() -> None:
    for env_id in ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"):
        ours, theirs = (cls(gymnasium.make(env_id)) for cls in (GymWrapper, Upstream))
        assert ours.action_spec == theirs.action_spec
        assert ours.output_spec["full_done_spec"] == theirs.output_spec["full_done_spec"]
        assert ours.reward_spec == theirs.reward_spec
    ours, theirs = (cls(vector(Walk, 3, "Disabled")) for cls in (GymWrapper, Upstream))
    assert ours.input_spec == theirs.input_spec
    assert ours.output_spec == theirs.output_spec


# -- Boxes with some infinite bounds


def check_samples(samples: torch.Tensor) -> None:
    assert samples.isfinite().all()
    assert (samples >= torch.from_numpy(LOW)).all()
    assert (samples <= torch.from_numpy(HIGH)).all()
    flat = samples.reshape(-1, 4)
    assert (flat.std(0) > 0.1).all()  # of all of the four
    assert flat[:, 1].max() > 1.5
    assert flat[:, 2].min() < 0.5
    assert flat[:, 3].max() > 0.5
    assert flat[:, 3].min() < -0.5


VARIANTS: dict[str, Any] = {
    "itself": lambda spec: spec,
    "clone": lambda spec: spec.clone(),
    "to": lambda spec: spec.to("cpu"),
    "to another dtype": lambda spec: spec.to(torch.float64),
    "expand": lambda spec: spec.expand(5, 4),
    "index": lambda spec: spec.expand(5, 4)[1:3],
    "one of them": lambda spec: spec.expand(5, 4)[2],
    "unbind": lambda spec: spec.expand(5, 4).unbind(0)[1],
    "stack": lambda spec: torch.stack([spec, spec], 0),
    "unsqueeze": lambda spec: spec.unsqueeze(0).squeeze(0),
    "reshape": lambda spec: spec.expand(6, 4).reshape(2, 3, 4),
    "flatten": lambda spec: spec.expand(2, 3, 4).flatten(0, 1),
    "unflatten": lambda spec: spec.expand(6, 4).unflatten(0, (2, 3)),
    "pickle": lambda spec: pickle.loads(pickle.dumps(spec)),
    "deepcopy": lambda spec: copy.deepcopy(spec),
    "in a Composite": lambda spec: Composite(a=spec).expand(3).clone().to("cpu")["a"],
    "in a locked Composite": lambda spec: Composite(a=Composite(b=spec)).lock_(recurse=True)["a", "b"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_samples_stay_finite_whatever_becomes_of_the_spec(name: str) -> None:
    spec = VARIANTS[name](GymWrapper(bare(MIXED, spaces.Discrete(2))).observation_spec["observation"])
    samples = spec.rand((300,))
    assert samples.shape == (300, *spec.shape)
    check_samples(samples)
    assert spec.is_in(samples[0])
    assert torch.equal(spec.project(samples[0] * 0 + 1e9)[..., 3:], torch.ones_like(samples[0][..., 3:]))


def test_random_actions_are_finite_and_in_dicts_and_batches_too() -> None:
    single = GymWrapper(Sampled(box(2), MIXED))
    check_samples(torch.stack([single.rand_action()["action"] for _ in range(300)]))
    nested = GymWrapper(Sampled(box(2), spaces.Dict(a=spaces.Dict(b=MIXED), c=spaces.Discrete(2))))
    check_samples(torch.stack([nested.rand_action()["a", "b"] for _ in range(300)]))
    batch = GymWrapper(vector(lambda: Sampled(MIXED, MIXED), 5, "SameStep"))
    check_samples(torch.stack([batch.rand_action()["action"] for _ in range(100)]))
    assert GymWrapper(Sampled(MIXED, MIXED)).observation_spec.rand()["observation"].isfinite().all()
    assert batch.observation_spec.rand()["observation"].isfinite().all()
    for env in (single, nested, batch):
        check_env_specs(env)


# -- clip_actions


@pytest.mark.parametrize("torch_tensors", [False, True])
def test_clipped_actions(torch_tensors: bool) -> None:
    inner: Any = (
        Isaac(3) if torch_tensors else vector(lambda: Sampled(box(2), spaces.Box(-INF, INF, (2,))), 3, "Disabled")
    )
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
    assert torch.equal(data["action"], action)  # the policy's


def test_clipping_narrows_and_never_widens() -> None:
    low, high = np.array([-0.1, -5], np.float32), np.array([5, 0.2], np.float32)
    space = spaces.Dict(
        a=spaces.Box(low, high), b=spaces.Discrete(3), c=spaces.Box(-9, 9, (2,), np.int64), d=spaces.MultiBinary(2)
    )
    inner = Sampled(box(2), space)
    env = GymWrapper(inner, clip_actions=1.0, categorical_action_encoding=True)
    bounds = env.full_action_spec["a"].space
    assert torch.equal(bounds.low, torch.tensor([-0.1, -1.0]))
    assert torch.equal(bounds.high, torch.tensor([1.0, 0.2]))
    env.step(env.rand_action(env.reset()).set("c", torch.tensor([9, -9])).set("b", torch.tensor(2)))
    assert inner.received[0]["c"].tolist() == [9, -9]
    assert inner.received[0]["b"] == 2


# -- options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("env_type", "jax"),
        ("env_type", None),
        ("copy", "sometimes"),
        ("copy", 1),
        ("copy", None),
        ("missing_final_obs", 0.0),
        ("clip_actions", 0),
        ("clip_actions", -1.0),
        ("clip_actions", "1"),
        ("clip_actions", float("nan")),
    ],
)
def test_options_with_values_that_they_cannot_have(option: str, value: Any) -> None:
    from torchrl_ext import GymEnv

    for make in (lambda **kwargs: GymWrapper(Walk(), **kwargs), lambda **kwargs: GymEnv("CartPole-v1", **kwargs)):
        with pytest.raises(InvalidArgumentError, match=f"{option}=.*Write {option}="):
            make(**{option: value})


def test_the_wrong_library_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"env_type='torch'.*NumPy arrays.*Write env_type='numpy'"):
        GymWrapper(Walk(), env_type="torch").reset()
    with pytest.raises(InvalidArgumentError, match=r"env_type='numpy'.*torch tensors.*Write env_type='torch'"):
        GymWrapper(Isaac(2), env_type="numpy").reset()


def test_upstreams_arguments_of_batches() -> None:
    with pytest.raises(InvalidArgumentError, match="missing_final_obs="):
        GymWrapper(Isaac(2), missing_obs_value=0.0)
    assert GymWrapper(Isaac(2), native_autoreset=True).rollout(3).shape == (2, 3)


@pytest.mark.parametrize("wrong", [object(), 5, "CartPole-v1"])
def test_what_is_no_environment(wrong: Any) -> None:
    for cls in (GymWrapper, Upstream):
        with pytest.raises((TypeError, AttributeError)):
            cls(wrong)
