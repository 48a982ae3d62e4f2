"""Tests of infos in the data. tests/test_stepper.py compares them with those of single environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrl import envs as upstream
from torchrl.data import Composite, Unbounded
from torchrl.envs import check_env_specs, default_info_dict_reader

from rl_ext_core.errors import EnvironmentOutputError
from tests.torchrl_ext.comparison import assert_same_rollouts, make_vector_env, seeded_rollout
from tests.torchrl_ext.environments import IsaacByIds, SameStep, Walk
from torchrl_ext import GymWrapper

LONG = {"age": Unbounded((), dtype=torch.int64), "length": Unbounded((), dtype=torch.int64)}


def make_reader() -> Any:
    """Make TorchRL's info reader for a single environment."""
    return default_info_dict_reader(list(LONG), spec=LONG)


def check_infos(rollout: Any) -> None:
    """Assert that infos equal the observed step and the episode's length."""
    for data in (rollout, rollout["next"]):
        assert torch.equal(data["age"], data["observation"][..., 1].long())
    assert torch.equal(rollout["length"], rollout["next", "length"])
    # The reset reports "length", at which each episode terminates.
    terminated = rollout["next", "terminated"].squeeze(-1)
    assert torch.equal(rollout["next", "age"][terminated], rollout["length"][terminated])
    assert rollout["length"].unique().numel() > 3


def make_batch_reader(count: int) -> Any:
    """Make TorchRL's info reader for a batch of ``count`` rows."""
    spec = Composite({key: part.expand(count) for key, part in LONG.items()}, shape=(count,))
    return default_info_dict_reader(list(LONG), spec=spec)


@pytest.mark.parametrize("is_registered", [True, False])
def test_infos_of_a_batch_follow_their_spec(is_registered: bool) -> None:
    env = GymWrapper(make_vector_env(Walk, 4, "SameStep"))
    env = env.auto_register_info_dict() if is_registered else env.set_info_dict_reader(make_batch_reader(4))
    check_infos(seeded_rollout(env, 60))
    assert env.observation_spec["age"].shape == (4,)
    check_env_specs(env)


class ResetInfos(Walk):
    """``Walk`` with other infos at resets."""

    def __init__(self, reset_info: Any) -> None:
        super().__init__(5, 5)
        self.reset_info = reset_info

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.reset_info


def test_one_reader_serves_several_environments() -> None:
    one = make_reader()
    single, batch, other = (
        GymWrapper(env) for env in (Walk(), make_vector_env(Walk, 3, "SameStep"), make_vector_env(Walk, 5, "SameStep"))
    )
    for env in (batch, single, other):
        env.set_info_dict_reader(one)
        check_env_specs(env)
    assert one.info_spec == Composite(LONG)


def test_custom_info_reader_gets_infos_without_final_entries() -> None:
    seen: list[Any] = []

    def read_half_age(info: Any, data: Any) -> Any:
        seen.append(info)
        return data.set("half", torch.as_tensor(info["age"]) / 2)

    ours, theirs = (cls(Walk()).set_info_dict_reader(read_half_age) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs, 20)
    assert torch.equal(rollout["next", "half"] * 2, rollout["next", "observation"][:, 1])
    env = GymWrapper(make_vector_env(Walk, 2, "SameStep")).set_info_dict_reader(read_half_age)
    seen.clear()
    env.rollout(20, break_when_any_done=False)
    assert not any("final_obs" in info or "final_info" in info for info in seen)


@pytest.mark.parametrize("reset_info", [None, {}])
def test_infos_missing_at_single_resets_are_zero(reset_info: Any) -> None:
    ours, theirs = (
        cls(ResetInfos(reset_info)).set_info_dict_reader(make_reader()) for cls in (GymWrapper, upstream.GymWrapper)
    )
    rollout = assert_same_rollouts(ours, theirs, 30)
    assert (rollout["age"][rollout["observation"][:, 1] == 0] == 0).all()


def report_info(inner: Any, name: str, value: Any) -> Any:
    """Add a value to the infos of steps, and return the environment."""
    step = inner.step

    def step_and_report(action: Any) -> Any:
        *result, info = step(action)
        return (*result, {**info, name: value()})

    inner.step = step_and_report
    return inner


def test_info_arrays_are_copied() -> None:
    count = np.zeros(2)
    inner = report_info(Walk(9, 9), "count", lambda: np.add(count, 1, out=count))
    env = GymWrapper(inner).set_info_dict_reader(
        default_info_dict_reader(["count"], spec=[Unbounded((2,), dtype=torch.float64)])
    )
    assert env.rollout(6)["next", "count"].tolist() == [[step, step] for step in range(1, 7)]


def as_object_array(parts: list[Any]) -> Any:
    """Return infos as an object array, as gymnasium did before 1.0."""
    objects = np.full(len(parts), None, object)
    for row, part in enumerate(parts):
        objects[row] = part
    return objects


FINAL_INFOS: dict[str, Any] = {
    "tensors": lambda steps, done: {"age": torch.as_tensor(steps), "late": torch.as_tensor(steps > 2)},
    "arrays": lambda steps, done: {"age": steps, "late": steps > 2},
    "objects": lambda steps, done: as_object_array(
        [{"age": step} if end else None for step, end in zip(steps, done, strict=True)]
    ),
    "list": lambda steps, done: [{"age": step} if end else None for step, end in zip(steps, done, strict=True)],
}


@pytest.mark.parametrize("form", FINAL_INFOS)
def test_final_infos_replace_those_of_the_reset(form: str) -> None:
    inner = SameStep([3, 4, 5], "batch", torch_tensors=form == "tensors")
    step = inner.step

    def step_and_report(action: Any) -> Any:
        """Step, and report infos of new episodes with the final infos of ended ones."""
        steps = inner.steps + 1
        done = steps >= inner.lengths
        observation, *rest, info = step(action)
        info["age"], info["fresh"] = (inner.array(inner.steps.copy()), inner.array(done * 1))  # of the new episodes
        if done.any():
            info["final_info"] = FINAL_INFOS[form](steps, done)
        return (observation, *rest, info)

    inner.step = step_and_report  # type: ignore[method-assign]
    spec = {name: Unbounded((), dtype=torch.int64) for name in ("age", "fresh")}
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(list(spec), spec=spec))
    after = env.rollout(9, break_when_any_done=False)["next"]
    assert torch.equal(after["age"], after["observation"][..., 2].long())
    assert not after["fresh"].any()  # steps that end episodes do not have it


# -- values that are not arrays

VALUES: dict[str, Any] = {
    "a float": (1.5, torch.float64),
    "a boolean": (True, torch.bool),
    "an array of objects": (np.array([1, 2], object), torch.int64),
    "a tensor": (torch.ones(2), torch.float32),
}


@pytest.mark.parametrize("mode", [None, "SameStep"])
@pytest.mark.parametrize("name", VALUES)
def test_auto_register_info_dict_registers_numbers_of_all_dtypes(name: str, mode: str | None) -> None:
    value, dtype = VALUES[name]

    def make_env() -> Any:
        return report_info(Walk(3, 5), "value", lambda: value)

    env = GymWrapper(make_vector_env(make_env, 2, mode) if mode else make_env()).auto_register_info_dict()
    check_env_specs(env)
    after = env.rollout(12, break_when_any_done=False)["next"]
    assert after["value"].dtype is dtype
    expected = torch.as_tensor(np.asarray(value).astype(float)).to(dtype)
    assert torch.equal(after["value"], expected.expand(*after.batch_size, *expected.shape))


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("value", ["left", object(), [1, [2, 3]]], ids=lambda value: type(value).__name__)
def test_infos_that_are_not_numbers_are_rejected(value: Any, count: int | None) -> None:
    def make_env() -> Any:
        return report_info(Walk(3, 3), "value", lambda: value)

    def wrap_env() -> Any:
        return GymWrapper(make_vector_env(make_env, count, "SameStep") if count else make_env())

    with pytest.raises(EnvironmentOutputError, match=r"info 'value' .*Name the keys to read: ") as caught:
        wrap_env().auto_register_info_dict()
    env = wrap_env()
    eval(str(caught.value).rpartition("read: ")[2], {**globals(), "env": env})
    after = env.rollout(5, break_when_any_done=False)["next"]
    assert after["age"].any()
    assert "value" not in after


def test_scalar_info_of_a_batch_is_rejected() -> None:
    inner = report_info(IsaacByIds(3, final_obs=True), "mean", lambda: 2.5)
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(["mean"]))
    with pytest.raises(EnvironmentOutputError, match=r"info 'mean' has the shape \(\).*\(3,\)"):
        env.rollout(2)


def test_none_in_infos_counts_as_absent() -> None:
    inner = Walk(3, 3)
    report_info(inner, "goal", lambda: None if inner.step_count % 2 else 2.5)
    spec = {"goal": Unbounded((), dtype=torch.float64)}
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(list(spec), spec=spec))
    assert env.rollout(6, break_when_any_done=False)["next", "goal"].tolist() == [0, 2.5, 0, 0, 2.5, 0]
