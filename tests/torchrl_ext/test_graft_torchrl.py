"""TorchRL's environments, transforms and ours are grafted as they are: rollouts of both are the same bit for bit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    PendulumEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs import transforms as t
from torchrl.envs.custom import TicTacToeEnv

import torchrl_ext
from rl_ext_core.factory import _graft
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import copied, different


class Cars(EnvBase):
    """Keeps its state in one tensor, and views of it beside, as simulators on a GPU do."""

    batch_locked = True

    def __init__(self, count: int = 3) -> None:
        super().__init__(batch_size=torch.Size([count]))
        self.observation_spec = Composite(observation=Unbounded((count, 2)), shape=(count,))
        self.action_spec = Bounded(-1.0, 1.0, (count, 1))
        self.reward_spec = Unbounded((count, 1))
        self.state = torch.zeros(count, 4)
        self.position, self.velocity = self.state[:, :2], self.state[:, 2:]
        self.gain = 0.5

    def _observed(self) -> TensorDict:
        return TensorDict({"observation": self.position.clone()}, self.batch_size)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        self.state.uniform_(-1, 1, generator=self.rng)
        return self._observed()

    def _step(self, tensordict: Any) -> TensorDict:
        self.velocity += self.gain * tensordict["action"]
        self.position += self.velocity
        done = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return self._observed().update({"reward": self.position[:, :1].abs(), "done": done, "terminated": done})

    def _set_seed(self, seed: int | None) -> None:
        self.rng = torch.Generator().manual_seed(seed or 0)


def _pendulum(*transforms: Any) -> Any:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms))


def _pong() -> Any:
    import ale_py

    gym.register_envs(ale_py)
    return torchrl_ext.GymEnv("ALE/Pong-v5")


MADE: dict[str, Callable[[], Any]] = {
    "GymEnv": lambda: GymEnv("CartPole-v1"),
    "GymEnv, MuJoCo": lambda: GymEnv("HalfCheetah-v5"),
    "GymWrapper": lambda: GymWrapper(gym.make("Pendulum-v1")),
    "frame_skip": lambda: GymEnv("CartPole-v1", frame_skip=2),
    "ours": lambda: torchrl_ext.GymWrapper(gym.make("Pendulum-v1")),
    "our GymEnv": lambda: torchrl_ext.GymEnv("CartPole-v1"),
    "ours, MuJoCo": lambda: torchrl_ext.GymEnv("HalfCheetah-v5"),
    "ours, Atari": _pong,
    "ours, vectorised": lambda: torchrl_ext.GymWrapper(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")),
    "transforms": lambda: _pendulum(DoubleToFloat(), StepCounter(10), RewardSum(), RewardScaling(0.0, 2.0)),
    "normalised": lambda: _pendulum(ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"])),
    "ours, transformed": lambda: TransformedEnv(torchrl_ext.GymEnv("Pendulum-v1"), StepCounter(10)),
    "InitTracker": lambda: TransformedEnv(GymEnv("CartPole-v1"), InitTracker()),
    "CatFrames": lambda: TransformedEnv(GymEnv("CartPole-v1"), CatFrames(3, dim=-1, in_keys=["observation"])),
    "NoopResetEnv": lambda: _pendulum(t.NoopResetEnv(3)),
    "FrameSkip": lambda: _pendulum(t.FrameSkipTransform(3)),
    "VecNorm": lambda: _pendulum(t.VecNormV2(in_keys=["observation"], out_keys=["observation"])),
    "PendulumEnv": PendulumEnv,
    "TicTacToe": TicTacToeEnv,
    "views of one tensor": Cars,
}


def _rollout(environment: Any) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    environment.set_seed(5)
    return environment.rollout(30, break_when_any_done=False)


@pytest.mark.sample(quick=6)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_copy_rolls_out_as_its_original(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = MADE[name]()
        environment.set_seed(0)
        environment.rollout(5)
        copy = copied(environment)
        assert type(copy) is type(environment)
        assert different(environment, copy) == []
        assert (_rollout(environment) == _rollout(copy)).all()
    environment.close()
    copy.close()


def test_settings_that_were_changed_are_kept() -> None:
    environment = _pendulum(RewardScaling(0.0, 2.0))
    environment.transform[0].scale.fill_(7.0)
    environment.base_env._env.unwrapped.g = 3.0
    copy = copied(environment)
    assert copy.transform[0].scale.item() == 7.0
    assert copy.base_env._env.unwrapped.g == 3.0
    copy.transform[0].scale.fill_(8.0)
    assert fingerprint(environment).differences(fingerprint(copy)) == [
        "._modules['_transform']._modules['transforms']._modules['0']._buffers['scale']"
    ]
    assert copy.transform[0].parent is not environment.transform[0].parent
    environment.close()


def test_views_in_a_copy_are_views_of_its_state() -> None:
    environment = Cars()
    environment.set_seed(0)
    copy = copied(environment)
    copy.state.fill_(3.0)
    assert copy.position.sum() == 18
    assert environment.position.sum() == 0


def test_what_processes_share_is_refused() -> None:
    environment = _pendulum(t.TrajCounter())
    with pytest.raises(_graft.Refused, match="memory that processes share"):
        _graft.dumps(environment)
    environment.close()
    with pytest.raises(_graft.Refused, match="memory that processes share"):
        _graft.dumps({"tensor": torch.zeros(2).share_memory_()})


@pytest.mark.slow
def test_environments_in_other_processes_are_refused() -> None:
    environment = ParallelEnv(2, functools.partial(GymEnv, "CartPole-v1"), mp_start_method="fork")
    environment.reset()
    try:
        with pytest.raises(_graft.Refused, match=r"processes share|another process"):
            _graft.dumps(environment)
    finally:
        environment.close()


def test_locked_tensordicts_stay_locked() -> None:
    held = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2]).lock_()
    copy = copied({"first": held, "inner": held["b"]})
    assert copy["first"].is_locked
    assert copy["inner"] is copy["first"]["b"]
    with pytest.raises(RuntimeError, match="locked"):
        copy["first"]["d"] = torch.zeros(2)
