"""TorchRL's environments, transforms and ours are grafted as they are: rollouts of both are the same bit for bit."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
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
from torchrl.envs.libs.dm_control import DMControlEnv, DMControlWrapper
from torchrl.envs.libs.pettingzoo import PettingZooWrapper

import torchrl_ext
from rl_ext_core.factory import _graft, streams
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import assert_copied, copied, different, life


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
# An emulator's next action may stick; solvers remember contacts that cannot be read.
NOT_AT_ONCE = ("ours, Atari", "pistonball, no masks")


def _zoo(name: str, kind: str = "parallel_env", **options: Any) -> Any:
    pytest.importorskip("pettingzoo")
    environment = getattr(importlib.import_module(f"pettingzoo.{name}"), kind)()
    return PettingZooWrapper(environment, **options)


def _suite(domain: str, task: str) -> Any:
    return pytest.importorskip("dm_control.suite").load(domain, task, task_kwargs={"random": 0})


def _lift() -> Any:
    pytest.importorskip("robosuite")
    from rl_ext_core.devices import import_robosuite, resolve

    robosuite = import_robosuite(resolve("cpu"))
    options = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "horizon": 12}
    from robosuite.wrappers import GymWrapper as AsGymnasium

    return AsGymnasium(robosuite.make("Lift", robots="Panda", **options))


FAMILIES: dict[str, Callable[[], Any]] = {
    "pursuit": lambda: _zoo("sisl.pursuit_v5"),
    "knights": lambda: _zoo("butterfly.knights_archers_zombies_v11"),
    "pistonball, no masks": lambda: _zoo("butterfly.pistonball_v6"),
    "connect four, with masks": lambda: _zoo("classic.connect_four_v3", "env", use_mask=True),
    "tictactoe, done anyhow": lambda: _zoo("classic.tictactoe_v3", "env", use_mask=True, done_on_any=True),
    "dm_control": lambda: DMControlWrapper(_suite("cheetah", "run")),
    "dm_control by name": lambda: DMControlEnv("humanoid", "stand", frame_skip=2),
    "dm_control, transformed": lambda: TransformedEnv(DMControlWrapper(_suite("reacher", "easy")), RewardSum()),
    "robosuite": lambda: GymWrapper(_lift()),
    "robosuite, ours": lambda: TransformedEnv(torchrl_ext.GymWrapper(_lift()), StepCounter()),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.sample(quick=5, ci=18)
@pytest.mark.parametrize("name", [*MADE, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_a_copy_is_the_original_and_does_the_same(name: str) -> None:
    environment = {**MADE, **FAMILIES}[name]()
    copy = assert_copied(environment, steps=15, at_once=name not in NOT_AT_ONCE)
    assert type(copy) is type(environment)
    assert copy.full_action_spec == environment.full_action_spec


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


@pytest.mark.parametrize("name", ["pursuit", "dm_control"])
def test_copies_for_workers_draw_from_streams_of_their_own(name: str) -> None:
    packed = _graft.dumps(FAMILIES[name]())
    frames = []
    for worker in (0, 1, 1):
        streams.seed_process(streams.sequence(0, worker))
        frames.append(_graft.loads(packed).reset())
    assert (frames[1] == frames[2]).all()
    assert not (frames[0] == frames[1]).all()


def test_what_was_changed_below_the_wrapper_is_in_the_copy() -> None:
    environment = TransformedEnv(DMControlWrapper(_suite("cheetah", "run")), RewardSum())
    environment.reset()
    environment.base_env._env.physics.model.opt.timestep = 0.004
    environment.base_env._env.physics.model.body_mass[3] = 2.5
    environment.transform.note = torch.arange(3)
    copy = _graft.loads(_graft.dumps(environment))
    physics = copy.base_env._env.physics
    assert (physics.model.opt.timestep, physics.model.body_mass[3]) == (0.004, 2.5)
    assert copy.transform.note.tolist() == [0, 1, 2]
    assert copy.rollout(5)["next", "reward"].shape == (5, 1)


class Lazy(t.Transform):
    """Holds a layer whose weights get their shape at the first call, and its hooks until then."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.layer = torch.nn.LazyLinear(3, dtype=torch.float64)

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(observation.double()).float()

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)


@pytest.mark.parametrize(
    "transforms",
    [
        [CatFrames(3, dim=-1, in_keys=["observation"])],
        [t.TimeMaxPool(in_keys=["observation"], T=3), StepCounter()],
        [CatFrames(2, dim=-1, in_keys=["observation"]), CatFrames(2, dim=-1, in_keys=["observation"])],
        [Lazy()],
    ],
    ids=lambda transforms: "+".join(type(one).__name__ for one in transforms),
)
def test_copies_of_unused_transforms_with_uninitialized_tensors(transforms: list[Any]) -> None:
    environment = _pendulum(DoubleToFloat(), *transforms)
    original, packed = fingerprint(environment), _graft.dumps(environment)
    with streams.keeping():
        copy = _graft.loads(packed)
    assert original.differences(fingerprint(copy)) == []
    assert life(copy, 5, 3) == life(environment, 5, 3)


def test_uninitialized_tensors_keep_type_and_identity() -> None:
    parameter = UninitializedParameter(requires_grad=False, device="meta")
    buffer = UninitializedBuffer(dtype=torch.float64, persistent=False)
    copy = copied({"parameter": parameter, "again": parameter, "buffer": buffer})
    assert copy["again"] is copy["parameter"]
    assert (copy["parameter"].requires_grad, copy["parameter"].data.device.type) == (False, "meta")
    assert (copy["buffer"].data.dtype, copy["buffer"].persistent) == (torch.float64, False)
    for changed in (UninitializedBuffer(persistent=False), UninitializedBuffer(dtype=torch.float64)):
        assert different(buffer, changed)


def test_uninitialized_statistics_keep_the_error_of_torchrl() -> None:
    copy = copied(ObservationNorm(in_keys=["observation"]))
    with pytest.raises(RuntimeError, match="init_stats"):
        copy(TensorDict({"observation": torch.zeros(3)}))


def test_what_torchrl_notes_on_classes_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    GymEnv("CartPole-v1")  # whose class is a base of ours
    torchrl_ext.as_factory(torchrl_ext.GymEnv("CartPole-v1"))
    assert not caplog.records
