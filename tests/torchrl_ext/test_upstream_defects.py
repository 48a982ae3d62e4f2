"""What goes wrong with TorchRL's wrappers, shown, and right with ours.

Each test asserts upstream's outcome too: when one of them fails there, upstream has mended it.
"""

from __future__ import annotations

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
from tests.torchrl_ext.environments import STAGGERED, Isaac, IsaacByIds, SamplingEnv, Walk, box
from torchrl_ext import GymEnv, GymWrapper


def test_rewards_and_flags_of_buffers_that_are_reused() -> None:
    theirs = seeded_rollout(MJLabWrapper(IsaacByIds(4)), 12)["next"]
    for key in ("reward", "truncated"):
        assert (theirs[key] == theirs[key][:, -1:]).all()
    ours = seeded_rollout(GymWrapper(IsaacByIds(4, final_obs=True)), 12)
    reward = ours["next", "policy"][..., 2] * 10 + ours["policy"][..., 0]
    assert torch.equal(ours["next", "reward"], reward.unsqueeze(-1))
    assert 0 < ours["next", "truncated"].sum() < ours["next", "done"].sum() < 20


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
    for cls, expected in ((GymEnv, {1.0}), (upstream.GymEnv, {0.0, 1.0})):
        env = cls("CartPole-v1", num_envs=2)
        assert set(seeded_rollout(env, 80)["next", "reward"].flatten().tolist()) == expected
        env.close()


class DoublePrecisionEnv(gymnasium.Env[Any, Any]):
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
    theirs = upstream.GymWrapper(DoublePrecisionEnv(), convert_actions_to_numpy=False)
    step = theirs.rand_step(theirs.reset())
    assert step["next", "observation"].requires_grad
    assert step["next", "reward"].requires_grad
    ours = GymWrapper(DoublePrecisionEnv())
    step = ours.rand_step(ours.reset())
    for key in ("observation", "reward"):
        assert not step["next", key].requires_grad
        assert step["next", key].dtype is torch.float32
    check_env_specs(ours)


def test_discrete_actions_of_torch_environments() -> None:
    for cls, expected in ((upstream.GymWrapper, [0, 0, 1]), (GymWrapper, 2)):
        env = SamplingEnv(box(2), spaces.Discrete(3))
        wrapped = cls(env, convert_actions_to_numpy=False)
        wrapped.step(wrapped.reset().set("action", torch.tensor([0, 0, 1])))
        assert env.received[0].tolist() == expected


def test_a_reset_after_a_rollout_that_an_episode_ended() -> None:
    for cls, right in ((upstream.GymWrapper, False), (GymWrapper, True)):
        env = cls(vector(STAGGERED, 3, "SameStep"))
        seeded_rollout(env, 50, break_when_any_done=True)
        inner = env.base_env._env if hasattr(env, "base_env") else env._env
        data = env.reset()["observation"]  # upstream gives that of the step before
        assert torch.equal(data, torch.from_numpy(np.stack(inner._env_obs))) == right
