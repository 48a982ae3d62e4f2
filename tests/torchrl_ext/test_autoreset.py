from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import OrderEnforcing, TransformReward
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import StepCounter, TransformedEnv

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from tests.environments import change_results
from tests.torchrl_ext.comparison import make_vector_env
from tests.torchrl_ext.environments import Isaac, IsaacByIds, ManiSkill, SameStep, Walk
from torchrl_ext import GymWrapper

modes = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])


@pytest.mark.sample
@modes
@settings(max_examples=30 if "CI" in os.environ else 10)
@given(data=st.data())
def test_random_reset_masks_match_single_environments(mode: str, data: st.DataObject) -> None:
    """Reset rows that are done, rows that are not, and all rows, between steps."""
    count = 3
    env = GymWrapper(make_vector_env(Walk, count, mode))
    env.set_seed(7)
    singles = [Walk() for _ in range(count)]
    for row, single in enumerate(singles):
        single.reset(seed=7 + row)
    truth = np.stack([single.reset()[0] for single in singles])
    now = env.reset()
    for _ in range(12):
        assert np.array_equal(now["observation"].numpy(), truth)
        after = env.step(env.rand_action(now))
        done = []
        for row, single in enumerate(singles):
            truth[row], _, terminated, truncated, _ = single.step(int(after["action"][row].argmax()))
            done.append(terminated or truncated)
        assert np.array_equal(after["next", "observation"].numpy(), truth)
        assert after["next", "done"].flatten().tolist() == done
        more = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        mask = [one or other for one, other in zip(done, more, strict=True)]
        now = env.step_mdp(after)
        if data.draw(st.booleans()):
            now, mask = env.reset(), more
            for row, single in enumerate(singles):
                if done[row] and mode == "SameStep":
                    single.reset()  # as the batch did in its step
                truth[row] = single.reset()[0]
        if data.draw(st.booleans()) and not any(mask):
            continue  # without a reset
        now = env.reset(now.set("_reset", torch.tensor(mask).unsqueeze(-1)))
        for row in range(count):
            if mask[row]:
                truth[row] = singles[row].reset()[0]
        assert not now["done"].any()


@modes
def test_arguments_of_resets_reach_environments_that_have_just_reset_themselves(mode: str) -> None:
    seen: list[Any] = []

    class RecordsOptions(Walk):
        def reset(self, **kwargs: Any) -> Any:
            seen.append(kwargs.get("options"))
            return super().reset(**kwargs)

    env = GymWrapper(make_vector_env([partial(RecordsOptions, 2, 2), partial(RecordsOptions, 9, 9)], 2, mode))
    data = env.rollout(2)[:, -1]
    seen.clear()
    env.reset(env.step_mdp(data).set("_reset", torch.tensor([[True], [False]])), options={"low": 1})
    assert seen == [{"low": 1}]
    data = env.step_mdp(env.rollout(2)[:, -1]).set("_reset", torch.ones(2, 1, dtype=torch.bool))
    again = env.reset(data, seed=11)["observation"]
    assert torch.equal(again, env.reset(seed=11)["observation"])


def test_rows_are_not_reset_again_after_a_change_of_the_specs() -> None:
    inner = make_vector_env([partial(Walk, 2, 2), partial(Walk, 9, 9)], 2, "SameStep")
    env = GymWrapper(inner)
    data = env.step_mdp(env.rollout(2)[:, -1])
    begun = inner.envs[0].episode
    env.reward_spec = env.reward_spec.clone()
    assert env.reset(data.set("_reset", data["done"].clone()))["observation"][0, :2].tolist() == [begun, 0]


# -- which mode


def is_consecutive(rollout: Any, key: str) -> bool:
    return torch.equal(rollout["next"][key][..., 2], rollout[key][..., 2] + 1)


def test_autoreset_mode_is_read_from_argument_config_or_attribute() -> None:
    for mode in (None, "Disabled", "DISABLED", gymnasium.vector.AutoresetMode.DISABLED):
        env = IsaacByIds(3, lengths=[2, 3, 4])
        env.cfg.auto_reset = False
        assert is_consecutive(GymWrapper(env, autoreset_mode=mode).rollout(8, break_when_any_done=False), "policy")
    batch: Any = SameStep([2, 3], "batch")
    batch.metadata, batch.autoreset_mode = {}, "SameStep"
    assert is_consecutive(GymWrapper(batch).rollout(9, break_when_any_done=False), "observation")
    with pytest.raises(InvalidArgumentError, match="autoreset_mode='never': expected one of"):
        GymWrapper(IsaacByIds(3), autoreset_mode="never").reset()


# -- partial resets of environments of other libraries


def test_maniskill_without_its_vector_wrapper_is_reset_by_row() -> None:
    env = GymWrapper(ManiSkill(auto_reset=None)).append_transform(StepCounter(4))
    rollout = env.rollout(15, break_when_any_done=False)
    assert torch.equal(rollout["observation"][..., 2], rollout["step_count"].squeeze(-1))
    assert is_consecutive(rollout, "observation")


def test_environments_without_partial_resets_are_detected() -> None:
    for env in (Isaac(4), Isaac(4, foreign=True)):
        wrapped = GymWrapper(env).append_transform(StepCounter(4))  # one row has ended by itself before
        for _ in range(2):  # the error is raised again after it was caught
            with pytest.raises(EnvironmentOutputError, match=r"also changed sub-environments.*env_ids"):
                wrapped.rollout(9, break_when_any_done=False)
        now = wrapped.step_mdp(wrapped.step(wrapped.rand_action(wrapped.reset())))
        for _ in range(2):
            with pytest.raises(EnvironmentOutputError, match="also changed sub-environments"):
                wrapped.reset(now.clone().set("_reset", torch.tensor([[True], [False], [False], [False]])))
    all_at_once = GymWrapper(Isaac(3, lengths=[9] * 3)).append_transform(StepCounter(4))  # never needs a partial reset
    assert all_at_once.rollout(12, break_when_any_done=False)["policy"][..., 2].max() == 3


@pytest.mark.parametrize("to_list", [list, np.ndarray.tolist])
def test_partial_resets_of_batches_that_return_lists(to_list: Any) -> None:
    inner: Any = SameStep([9, 9], None)
    inner.metadata = {"autoreset_mode": "Disabled"}
    for method in ("reset", "step"):
        change_results(inner, lambda observation, *rest: (to_list(observation), *rest), method)
    env = GymWrapper(inner)
    data = env.reset()
    for count in (1, 2):
        data = env.step_mdp(env.rand_step(data)).set("_reset", torch.tensor([[True], [False]]))
        data = env.reset(data)
        assert data["observation"][:, 1:].tolist() == [[count, 0], [0, count]]


def make_sim(**options: Any) -> Any:
    """Make a SAME_STEP batch with resets by ``env_ids``, which observes row, episode, step."""
    return IsaacByIds(3, lengths=[2, 99, 99], final_obs=True, **options)


class TenfoldObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that scales observations, with a reset that passes on all arguments."""

    _observation_space = _action_space = None  # gymnasium's constructor would set these

    def __init__(self, env: Any) -> None:
        self.env = env  # gymnasium's constructor would require its own class

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return {"policy": observation["policy"] * 10}, info

    def step(self, action: Any) -> Any:
        observation, *rest, info = self.env.step(action)
        final = info.get("final_obs", observation)
        return {"policy": observation["policy"] * 10}, *rest, {"final_obs": {"policy": final["policy"] * 10}}


class ForeignTenfold:
    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    reset, step = TenfoldObservations.reset, TenfoldObservations.step


class TenfoldWithoutKwargs(TenfoldObservations):
    """``TenfoldObservations`` whose reset has gymnasium's signature."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options=options)


CHAINS = {
    "the environment alone": (lambda env: env, 1),
    "a wrapper": (TenfoldObservations, 10),
    "two": (lambda env: TenfoldObservations(TenfoldObservations(env)), 100),
    "one of no library": (ForeignTenfold, 10),
    "under one without a reset": (lambda env: TransformReward(TenfoldObservations(env), lambda reward: reward * 2), 10),
    "under gymnasium's own": (lambda env: OrderEnforcing(TenfoldObservations(env)), 10),
}


@pytest.mark.parametrize("name", CHAINS)
def test_partial_resets_pass_through_every_wrapper(name: str) -> None:
    wrap, factor = CHAINS[name]
    inner = make_sim()
    env = TransformedEnv(GymWrapper(wrap(inner)), StepCounter(max_steps=5))
    rollout = env.rollout(24, break_when_any_done=False)
    assert [1, 2] in inner.requested_rows
    for data in (rollout, rollout["next"]):
        assert torch.equal(data["policy"][..., 0], torch.arange(3.0)[:, None].expand(3, 24) * factor)
    assert torch.equal(rollout["next", "policy"][..., 2], (rollout["step_count"].squeeze(-1) + 1.0) * factor)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (TenfoldWithoutKwargs, r"TenfoldWithoutKwargs\.reset takes no env_ids.*Use def reset\(self, \*\*kwargs"),
        (
            lambda env: TenfoldObservations(OrderEnforcing(TenfoldObservations(env))),
            r"OrderEnforcing\.reset takes no env_ids",
        ),
    ],
)
def test_error_names_the_wrapper_that_drops_env_ids(wrap: Any, text: str) -> None:
    env = GymWrapper(wrap(make_sim()))
    env.rollout(9, break_when_any_done=False)  # without partial resets, nothing is passed on
    with pytest.raises(InvalidArgumentError, match=text):
        TransformedEnv(env, StepCounter(max_steps=5)).rollout(24, break_when_any_done=False)
