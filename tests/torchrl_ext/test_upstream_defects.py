"""What goes wrong with TorchRL's wrappers, shown, and right with ours.

Each test asserts upstream's outcome too: when one of them fails there, upstream has mended it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl import envs as upstream
from torchrl.envs import check_env_specs
from torchrl.envs.libs.mjlab import MJLabWrapper

from tests.torchrl_ext.comparing import seeded_rollout, vector
from tests.torchrl_ext.environments import STAGGERED, Buffered, Isaac, IsaacByIds, Sampled, Walk, box, fake_isaaclab
from torchrl_ext import GymEnv, GymWrapper


@pytest.fixture
def isaac_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_isaaclab(monkeypatch) as wrapper:
        yield lambda env, **kwargs: wrapper(env, device="cpu", **kwargs)


def expected_next(rollout: Any) -> torch.Tensor:
    """What follows from Isaac's observations and actions, resets left aside."""
    after = rollout["policy"].clone()
    after[..., 2] += 1
    after[..., 3:5] += rollout["action"]
    return after


def test_rewards_and_flags_of_buffers_that_are_reused() -> None:
    theirs = seeded_rollout(MJLabWrapper(IsaacByIds(4)), 12)["next"]
    for key in ("reward", "truncated"):
        assert (theirs[key] == theirs[key][:, -1:]).all()
    ours = seeded_rollout(GymWrapper(IsaacByIds(4, final_obs=True)), 12)
    reward = ours["next", "policy"][..., 2] * 10 + ours["policy"][..., 0]
    assert torch.equal(ours["next", "reward"], reward.unsqueeze(-1))
    assert 0 < ours["next", "truncated"].sum() < ours["next", "done"].sum() < 20


def test_last_observations_are_read_and_buffers_left_alone(isaac_lab: Any) -> None:
    env = Isaac(4, final_obs=True)
    theirs = isaac_lab(env).rollout(12, break_when_any_done=False)
    done = theirs["next", "done"].squeeze(-1)
    assert done.any()
    assert env.state.isnan().any()
    env = Isaac(4, final_obs=True, in_place=False)
    theirs = isaac_lab(env).rollout(12, break_when_any_done=False)
    assert theirs["next", "policy"][theirs["next", "done"].squeeze(-1)].isnan().all()
    env = Isaac(4, final_obs=True)
    ours = GymWrapper(env).rollout(12, break_when_any_done=False)
    assert ours["next", "done"].any()
    assert env.state.isfinite().all()
    assert torch.equal(ours["next", "policy"], expected_next(ours))


def test_the_last_frame_of_a_rollout(isaac_lab: Any) -> None:
    theirs = isaac_lab(Isaac(2, lengths=[4, 9], final_obs=True, in_place=False), native_autoreset=True)
    data = theirs.rollout(4, break_when_any_done=False)
    assert data["next", "done"][0, -1]
    assert (data["next", "policy"][0, -1, 2:] == 0).all()  # of the episode after
    ours = GymWrapper(Isaac(2, lengths=[4, 9], final_obs=True))
    data = ours.rollout(4, break_when_any_done=False)
    assert torch.equal(data["next", "policy"], expected_next(data))


def test_all_done_at_once_are_reset_once(isaac_lab: Any) -> None:
    for make, twice in ((isaac_lab, True), (GymWrapper, False)):
        env = Isaac(3, lengths=[4] * 3, final_obs=True, in_place=False)
        data = make(env).rollout(10, break_when_any_done=False)
        # Each reset begins another episode.
        episodes = data["policy"][0, :, 1] - data["policy"][0, 0, 1]
        assert episodes.unique().tolist() == ([0, 2, 4] if twice else [0, 1, 2])
    for cls, twice in ((upstream.GymWrapper, True), (GymWrapper, False)):
        env: Any = cls(vector(lambda: Walk(4, 4), 3, "SameStep"))
        episodes = seeded_rollout(env, 10)["observation"][0, :, 0]
        assert (episodes - episodes[0]).unique().tolist() == ([0, 2, 4] if twice else [0, 1, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=2),
        lambda: vector(Walk, 2, "NextStep"),  # gymnasium's default
        lambda: gymnasium.vector.VectorWrapper(vector(Walk, 2, "SameStep")),
        lambda: Isaac(3, foreign=True),
    ],
)
def test_environments_that_upstream_refuses(make: Any) -> None:
    with pytest.raises((AttributeError, RuntimeError, ImportError)):
        upstream.GymWrapper(make())
    check_env_specs(GymWrapper(make()))


def test_environments_by_their_id_take_a_step_that_only_resets() -> None:
    def rewards(cls: Any) -> set[float]:
        env = cls("CartPole-v1", num_envs=2)
        try:
            return set(seeded_rollout(env, 80)["next", "reward"].flatten().tolist())
        finally:
            env.close()

    assert rewards(GymEnv) == {1.0}
    assert rewards(upstream.GymEnv) == {0.0, 1.0}


class InDouble(gymnasium.Env[Any, Any]):
    """A differentiable environment of float64."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = box(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.state = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        return self.state, {}

    def step(self, action: torch.Tensor) -> Any:
        self.state = self.state * 0.9 + action
        return self.state, self.state.sum(), False, False, {}


def test_dtypes_and_graphs() -> None:
    torch.manual_seed(0)
    theirs = upstream.GymWrapper(InDouble(), convert_actions_to_numpy=False)
    step = theirs.rand_step(theirs.reset())
    assert step["next", "observation"].requires_grad
    assert step["next", "reward"].requires_grad
    ours = GymWrapper(InDouble())
    step = ours.rand_step(ours.reset())
    for key in ("observation", "reward"):
        assert not step["next", key].requires_grad
        assert step["next", key].dtype is torch.float32
    check_env_specs(ours)


@pytest.mark.parametrize("torch_tensors", [True, False])
def test_actions_that_the_environment_edits(torch_tensors: bool) -> None:
    def played(cls: Any, **kwargs: Any) -> torch.Tensor:
        env = cls(Buffered("fresh", torch_tensors=torch_tensors), **kwargs)
        data = env.reset().set("action", torch.tensor([0.25, -0.5]))
        return env.step(data)["action"]

    assert played(upstream.GymWrapper, convert_actions_to_numpy=not torch_tensors).tolist() == [99.0, 99.0]
    assert played(GymWrapper).tolist() == [0.25, -0.5]


def test_discrete_actions_of_torch_environments() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)

    def received(cls: Any, **kwargs: Any) -> Any:
        env = Sampled(space, spaces.Discrete(3))
        wrapped = cls(env, **kwargs)
        wrapped.step(wrapped.reset().set("action", torch.tensor([0, 0, 1])))
        return env.received[0].tolist()

    assert received(upstream.GymWrapper, convert_actions_to_numpy=False) == [0, 0, 1]
    assert received(GymWrapper, convert_actions_to_numpy=False) == 2


def test_infos_by_name_in_a_batch() -> None:
    reader = upstream.default_info_dict_reader(["age"])
    with pytest.raises(ValueError, match="shape"):
        upstream.GymWrapper(vector(Walk, 3, "Disabled")).set_info_dict_reader(reader)
    env = GymWrapper(vector(Walk, 3, "Disabled")).set_info_dict_reader(reader)
    rollout = seeded_rollout(env, 30)
    assert torch.equal(rollout["next", "age"].float(), rollout["next", "observation"][..., 1])
    assert reader.info_spec.shape == ()  # it can be used again


def test_a_reset_after_a_rollout_that_an_episode_ended() -> None:
    def after(cls: Any) -> tuple[Any, Any]:
        env = cls(vector(STAGGERED, 3, "SameStep"))
        seeded_rollout(env, 50, break_when_any_done=True)
        inner = env.base_env._env if hasattr(env, "base_env") else env._env
        return env.reset()["observation"], torch.from_numpy(np.stack(inner._env_obs))

    data, truth = after(upstream.GymWrapper)
    assert not torch.equal(data, truth)  # that of the step before
    data, truth = after(GymWrapper)
    assert torch.equal(data, truth)
