"""Infos in the data: those of the step they stand beside, of single environments and of batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torchrl import envs as upstream
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, check_env_specs, default_info_dict_reader

from tests.torchrl_ext.comparing import assert_same_rollouts, seeded_rollout, vector
from tests.torchrl_ext.environments import IsaacByIds, Walk
from torchrl_ext import GymWrapper

LONG = {"age": Unbounded((), dtype=torch.int64), "length": Unbounded((), dtype=torch.int64)}
modes = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])


def reader() -> Any:
    return default_info_dict_reader(list(LONG), spec=LONG)


def check_infos(rollout: Any) -> None:
    for data in (rollout, rollout["next"]):
        assert torch.equal(data["age"], data["observation"][..., 1].long())
    assert torch.equal(rollout["length"], rollout["next", "length"])
    # "length" is told by the reset, and is when an episode ends that nothing else has ended.
    terminated = rollout["next", "terminated"].squeeze(-1)
    assert torch.equal(rollout["next", "age"][terminated], rollout["length"][terminated])
    assert rollout["length"].unique().numel() > 3


def batch_reader(count: int) -> Any:
    spec = Composite({key: part.expand(count) for key, part in LONG.items()}, shape=(count,))
    return default_info_dict_reader(list(LONG), spec=spec)


WAYS: dict[str, Any] = {
    "cut from outside": lambda env: env.set_info_dict_reader(reader()).append_transform(StepCounter(4)),
    "registered": lambda env: env.auto_register_info_dict(),
    "read of the batch": lambda env: env.set_info_dict_reader(batch_reader(*env.batch_size)),
}


@modes
@pytest.mark.parametrize("way", WAYS)
def test_of_batches(mode: str, way: str) -> None:
    env = WAYS[way](GymWrapper(vector(Walk, 4, mode)))
    check_infos(seeded_rollout(env, 60))
    assert env.observation_spec["age"].shape == (4,)
    check_env_specs(env)


class Silent(Walk):
    """Tells nothing at a reset."""

    def __init__(self, told: Any) -> None:
        super().__init__(5, 5)
        self.told = told

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.told


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_that_resets_do_not_tell(mode: str) -> None:
    env = GymWrapper(vector(partial(Silent, {}), 2, mode)).set_info_dict_reader(reader())
    rollout = seeded_rollout(env, 12)
    assert rollout["next", "done"].sum() == 4
    assert torch.equal(rollout["next", "age"], rollout["next", "observation"][..., 1].long())  # at an end too
    assert (rollout["age"][:, 5] == 0).all()  # and filled in where the reset tells none


def test_a_reader_serves_several_environments() -> None:
    one = reader()
    single, batch, other = (
        GymWrapper(env) for env in (Walk(), vector(Walk, 3, "SameStep"), vector(Walk, 5, "SameStep"))
    )
    for env in (batch, single, other):
        env.set_info_dict_reader(one)
        check_env_specs(env)
    assert one.info_spec == Composite(LONG)


def test_a_reader_of_ones_own() -> None:
    seen: list[Any] = []

    def read(info: Any, data: Any) -> Any:
        seen.append(info)
        return data.set("half", torch.as_tensor(info["age"]) / 2)

    ours, theirs = (cls(Walk()).set_info_dict_reader(read) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs, 20)
    assert torch.equal(rollout["next", "half"] * 2, rollout["next", "observation"][:, 1])
    env = GymWrapper(vector(Walk, 2, "SameStep")).set_info_dict_reader(read)
    seen.clear()
    env.rollout(20, break_when_any_done=False)
    assert not any("final_obs" in info or "final_info" in info for info in seen)


@pytest.mark.parametrize("told", [None, {}])
def test_that_a_single_reset_does_not_tell(told: Any) -> None:
    ours, theirs = (cls(Silent(told)).set_info_dict_reader(reader()) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs, 30)
    assert (rollout["age"][rollout["observation"][:, 1] == 0] == 0).all()


def test_that_come_as_a_list() -> None:
    def read(info: Any, data: Any) -> Any:
        return data.set("age", torch.tensor([int(part["age"]) for part in info]))

    inner = gymnasium.wrappers.vector.DictInfoToList(vector(Walk, 3, "Disabled"))
    rollout = GymWrapper(inner).set_info_dict_reader(read).rollout(4)
    assert torch.equal(rollout["next", "age"].float(), rollout["next", "observation"][..., 1])


def reporting(inner: Any, name: str, value: Any) -> Any:
    """Tell a part of its state, which it goes on to write into, in the infos of steps."""
    step = inner.step

    def told(action: Any) -> Any:
        *result, info = step(action)
        return (*result, {**info, name: value()})

    inner.step = told
    return inner


def test_are_copied() -> None:
    count = np.zeros(2)
    inner = reporting(Walk(9, 9), "count", lambda: np.add(count, 1, out=count))
    env = GymWrapper(inner).set_info_dict_reader(
        default_info_dict_reader(["count"], spec=[Unbounded((2,), dtype=torch.float64)])
    )
    assert env.rollout(6)["next", "count"].tolist() == [[step, step] for step in range(1, 7)]


def test_of_torch_environments() -> None:
    inner = IsaacByIds(3, final_obs=True)
    reporting(inner, "rate", lambda: inner.state[:, 2])
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(["rate"]))
    rollout = env.rollout(12, break_when_any_done=False)
    done = rollout["next", "done"].squeeze(-1)
    assert torch.equal(rollout["next", "rate"][~done], rollout["next", "policy"][..., 2][~done])
    check_env_specs(env)
