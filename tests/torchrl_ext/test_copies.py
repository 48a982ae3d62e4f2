from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl import envs as upstream
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, check_env_specs

from rl_ext_core.vector.array_frameworks import leaves
from tests.torchrl_ext.comparison import assert_same, make_vector_env, seeded_rollout, storage_pointers
from tests.torchrl_ext.environments import DictWalk, IsaacByIds, SamplingEnv, Walk, box
from torchrl_ext import GymEnv, GymWrapper

AGE = [Unbounded((), dtype=torch.int64)]
ENVIRONMENTS: dict[str, Any] = {
    "by its id": lambda: GymEnv("CartPole-v1"),
    "nested": lambda: GymWrapper(DictWalk()),
    "batch": lambda: GymWrapper(make_vector_env(Walk, 3, "SameStep")),
    "torch batch": lambda: GymWrapper(IsaacByIds(3, final_obs=True)),
    "with infos": lambda: GymWrapper(Walk()).set_info_dict_reader(upstream.default_info_dict_reader(["age"], spec=AGE)),
    "under a transform": lambda: GymWrapper(make_vector_env(Walk, 3, "NextStep")).append_transform(StepCounter(4)),
}
COPIES: dict[str, Any] = {
    "pickle": lambda env: pickle.loads(pickle.dumps(env)),
    "deepcopy": copy.deepcopy,
    "to": lambda env: pickle.loads(cloudpickle.dumps(env)).to("cpu"),
}


@pytest.mark.sample(quick=4, ci=8)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_copies_continue_with_the_same_data(name: str, way: str) -> None:
    env = ENVIRONMENTS[name]()
    env.set_seed(0)
    data = env.reset()
    for _ in range(10):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
    other, state = COPIES[way](env), data.to("cpu") if way == "to" else data.clone()

    def continue_rollout(env: Any, data: Any) -> Any:
        torch.manual_seed(1)
        return env.rollout(20, break_when_any_done=False, auto_reset=False, tensordict=data)

    for found, expected in (
        (continue_rollout(other, state), continue_rollout(env, data)),
        (seeded_rollout(other), seeded_rollout(env)),
    ):
        assert found.device == other.device
        assert_same(found, expected if way != "to" else expected.to("cpu"))
    check_env_specs(other)


class ReusesBuffer(Walk):
    def __init__(self, buffer: Any) -> None:
        super().__init__()
        self.buffer = buffer

    def observation(self) -> Any:
        self.buffer[...] = torch.from_numpy(super().observation())
        return self.buffer


BUFFERS: list[Callable[[], Any]] = [lambda: np.zeros(4, np.float32), lambda: torch.zeros(9, 4)[3]]


@pytest.mark.parametrize("make", BUFFERS, ids=["NumPy", "torch"])
def test_copy_false_shares_memory(make: Any) -> None:
    buffer = make()
    env = GymWrapper(ReusesBuffer(buffer), copy=False)
    first = env.rand_step(env.reset())
    assert storage_pointers(first["next", "observation"]) == storage_pointers([torch.as_tensor(buffer)])
    env.rand_step(env.step_mdp(first))
    assert first["next", "observation"][1] == 2
    shared = storage_pointers([torch.as_tensor(buffer)])
    assert not storage_pointers([first["next", key] for key in ("reward", "done")]) & shared


ACTIONS = [box(3), spaces.Discrete(4), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]
ACTIONS += [spaces.Dict(a=box(2), b=spaces.MultiBinary(2)), spaces.Tuple([box(2), box(2)])]


@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
@pytest.mark.parametrize("torch_tensors", [False, True], ids=["NumPy", "torch"])
@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_environment_may_overwrite_its_actions(space: Any, torch_tensors: bool, categorical: bool) -> None:
    inner = SamplingEnv(box(2), space)
    options = {"convert_actions_to_numpy": not torch_tensors, "categorical_action_encoding": categorical}
    for clip in (None, 0.5) if "Box" in str(space) else (None,):
        env = GymWrapper(inner, env_type="auto", clip_actions=clip, **options)
        data = env.rand_action(env.reset())
        given = data.select(*env.action_keys).clone()
        env.step(data)
        for leaf in leaves(inner.received[-1]):
            if isinstance(leaf, (np.ndarray, torch.Tensor)):
                leaf[...] = 1 - leaf
        assert_same(data.select(*env.action_keys), given)


def test_arrays_that_torch_cannot_wrap_are_copied() -> None:
    class Odd(Walk):
        """Read-only and reversed arrays, and arrays of the other byte order."""

        observation_space = spaces.Dict({name: box(4) for name in "abc"})  # type: ignore[assignment]

        def observation(self) -> Any:
            array = super().observation()
            locked = array.copy()
            locked.flags.writeable = False
            return {"a": locked, "b": array[::-1].copy()[::-1], "c": array.astype(">f4")}

    rollout = GymWrapper(Odd(), copy=False).rollout(12, break_when_any_done=False)
    for data in (rollout, rollout["next"]):
        assert data["a"].tolist() == data["b"].tolist() == data["c"].tolist()
