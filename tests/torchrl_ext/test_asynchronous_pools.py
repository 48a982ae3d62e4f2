"""Vectorized environments whose steps return some of their environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext import GymWrapper


class Pool(VectorEnv[Any, Any, Any]):
    """Has the settings of an EnvPool."""

    num_envs = 4
    single_observation_space, single_action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    spec: Any = SimpleNamespace(id="Count-v0", config=SimpleNamespace(num_envs=4, batch_size=2))


Pool.__module__ = "envpool.imitation"


def test_an_asynchronous_pool_is_refused_at_construction() -> None:
    with pytest.raises(InvalidArgumentError, match=r"`batch_size=2` with num_envs=4 .* Use batch_size=4"):
        GymWrapper(Pool())
