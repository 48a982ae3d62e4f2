"""Tests of defects of TorchRL's wrappers that this package's wrappers do not have.

Each test also asserts upstream's wrong result, so it fails once upstream has fixed the defect.
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

from tests.torchrl_ext.comparison import make_vector_env, seeded_rollout
from tests.torchrl_ext.environments import STAGGERED, Isaac, SamplingEnv, Walk, box
from torchrl_ext import GymWrapper


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=2),
        lambda: make_vector_env(Walk, 2, "NextStep"),  # NEXT_STEP is gymnasium's default
        lambda: gymnasium.vector.VectorWrapper(make_vector_env(Walk, 2, "SameStep")),
        lambda: Isaac(3, foreign=True),
    ],
)
def test_environments_that_upstream_rejects_are_wrapped(make: Any) -> None:
    with pytest.raises((AttributeError, RuntimeError, ImportError)):
        upstream.GymWrapper(make())
    check_env_specs(GymWrapper(make()))


class DoublePrecisionEnv(gymnasium.Env[Any, Any]):
    """Differentiable environment with float64 observations."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = box(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.state = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        return self.state, {}

    def step(self, action: torch.Tensor) -> Any:
        self.state = self.state * 0.9 + action
        return self.state, self.state.sum(), False, False, {}


def test_upstream_keeps_autograd_graphs_and_float64_and_ours_drops_both() -> None:
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


def test_upstream_passes_one_hot_actions_to_torch_environments() -> None:
    for cls, expected in ((upstream.GymWrapper, [0, 0, 1]), (GymWrapper, 2)):
        env = SamplingEnv(box(2), spaces.Discrete(3))
        wrapped = cls(env, convert_actions_to_numpy=False)
        wrapped.step(wrapped.reset().set("action", torch.tensor([0, 0, 1])))
        assert env.received[0].tolist() == expected


def test_upstream_returns_a_stale_observation_after_a_finished_rollout() -> None:
    for cls, right in ((upstream.GymWrapper, False), (GymWrapper, True)):
        env = cls(make_vector_env(STAGGERED, 3, "SameStep"))
        seeded_rollout(env, 50, break_when_any_done=True)
        inner = env.base_env._env if hasattr(env, "base_env") else env._env
        data = env.reset()["observation"]  # upstream returns the observation of the last step
        assert torch.equal(data, torch.from_numpy(np.stack(inner._env_obs))) == right
