"""What people replace in the wrapper is heard, wherever it sits; what nothing would call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl import envs as upstream
from torchrl._utils import implement_for
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from tests.torchrl_ext.comparing import assert_same, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Sampled, Walk
from torchrl_ext import GymEnv, GymWrapper


class TenfoldStep:
    def _step(self, tensordict: Any) -> Any:
        out = super()._step(tensordict)  # type: ignore[misc]
        return out.set("reward", out["reward"] * 10)


class TenfoldPublicStep:
    def step(self, tensordict: Any) -> Any:
        out = super().step(tensordict)  # type: ignore[misc]
        out["next", "reward"] *= 10
        return out


class TenfoldProcessed:
    def _step_proc_data(self, data: Any) -> Any:
        data = super()._step_proc_data(data)  # type: ignore[misc]
        return data.set("reward", data["reward"] * 10)


MIXINS = [TenfoldStep, TenfoldPublicStep, TenfoldProcessed]


def mixed(mixin: Any, base: Any) -> Any:
    return type("Mixed", (mixin, base), {})


@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.parametrize("deeper", [False, True])
def test_mixins(mixin: Any, deeper: bool) -> None:
    ours, theirs = mixed(mixin, GymWrapper), mixed(mixin, upstream.GymWrapper)
    if deeper:
        ours = type("Deeper", (ours,), {})
    found = seeded_rollout(ours(Walk()), 30)
    assert_same(found, seeded_rollout(theirs(Walk()), 30))
    assert torch.equal(found["next", "reward"], seeded_rollout(GymWrapper(Walk()), 30)["next", "reward"] * 10)


def test_a_mixin_behind_the_wrapper_changes_nothing() -> None:
    class Behind:
        def read_obs(self, observation: Any) -> Any:
            raise AssertionError

    env = type("Mixed", (GymWrapper, Behind), {})(Walk())
    assert_same(seeded_rollout(env, 20), seeded_rollout(GymWrapper(Walk()), 20))


@pytest.mark.parametrize("by", ["setattr", "dict"])
@pytest.mark.parametrize("name", ["_step", "step", "step_and_maybe_reset", "_reset"])
def test_methods_on_the_instance(name: str, by: str) -> None:
    env = GymWrapper(Walk())
    env.rollout(3)
    calls, method = [], getattr(env, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    if by == "dict":
        env.__dict__[name] = noting
    else:
        setattr(env, name, noting)
    found = seeded_rollout(env, 30)
    assert len(calls) > 2
    assert_same(found, seeded_rollout(GymWrapper(Walk()), 30))


@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset", "_step_proc_data", "rand_action", "maybe_reset"])
def test_methods_that_were_replaced_in_torchrls_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = GymWrapper(Walk())
    env.rollout(3)
    calls, method = [], getattr(EnvBase, name)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(EnvBase, name, noting)
    found = seeded_rollout(env, 30)
    assert len(calls) >= 29
    monkeypatch.undo()
    assert_same(found, seeded_rollout(GymWrapper(Walk()), 30))


READERS = ["read_action", "read_obs", "read_reward", "read_done"]


@pytest.mark.parametrize("name", [*READERS, "_output_transform", "_reset_output_transform"])
def test_readers_in_a_mixin_are_refused(name: str) -> None:
    mixin = type("Reads", (), {name: lambda self, value: value})
    with pytest.raises(InvalidTypeError, match=f"Mixed overrides {name}, which is not called here. Override _step"):
        mixed(mixin, GymEnv)


@pytest.mark.parametrize("name", READERS)
def test_readers_on_the_instance_are_refused(name: str) -> None:
    for wrap in (lambda env: env, lambda env: TransformedEnv(env, StepCounter())):
        env = GymWrapper(Walk())
        env.rollout(3)
        setattr(env, name, lambda value: value)
        with pytest.raises(InvalidTypeError, match=f"overrides {name}, which is not called"):
            wrap(env).rollout(3)


def test_readers_that_were_replaced_in_torchrls_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = GymWrapper(Walk())
    env.rollout(3)
    monkeypatch.setattr(upstream.GymLikeEnv, "read_obs", print)
    with pytest.raises(InvalidTypeError, match="overrides read_obs"):
        env.rollout(3)


class Half(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, float(reward) / 2, *rest


def test_an_environment_that_replaces_the_wrapped_one() -> None:
    def rewards(cls: Any) -> Any:
        env = cls(Walk(9, 9))
        env.rollout(2)
        env._env = Half(env._env)
        return seeded_rollout(env, 30)

    assert_same(rewards(GymWrapper), rewards(upstream.GymWrapper))


def test_an_environment_that_replaces_a_vectorised_one_after_a_step() -> None:
    env = GymWrapper(vector([lambda: Walk(2, 2), lambda: Walk(4, 4)], 2, "SameStep"))
    data = env.reset(seed=0)
    for _ in range(2):
        data = env.step_mdp(env.rand_step(data))  # the first of them is done
    env._env = vector(lambda: Walk(7, 7), 2, "SameStep")
    env._env.reset(seed=1)
    data = env.maybe_reset(data)
    rollout = env.rollout(5, break_when_any_done=False, auto_reset=False, tensordict=data)
    assert rollout["next", "observation"][:, :, 1].tolist()[0] == [1, 2, 3, 4, 5]


def test_frames_that_are_skipped_from_now_on() -> None:
    def rewards(cls: Any) -> Any:
        env = cls(Walk(9, 9))
        env.rollout(2)
        env.wrapper_frame_skip = 3
        return seeded_rollout(env, 30)

    assert_same(rewards(GymWrapper), rewards(upstream.GymWrapper))


def observation64(env: Any) -> None:
    env.observation_spec = Composite(observation=Unbounded((4,), dtype=torch.float64))


def another_key(env: Any) -> None:
    env.observation_spec = Composite(state=Unbounded((4,), dtype=torch.float32))


def reward64(env: Any) -> None:
    env.reward_spec = Unbounded((1,), dtype=torch.float64)


def indices(env: Any) -> None:
    env.action_spec = Categorical(3)


def narrower(env: Any) -> None:
    env.full_action_spec = Composite(action=Categorical(2))


@pytest.mark.parametrize("change", [observation64, another_key, reward64, indices, narrower])
@pytest.mark.parametrize("when", ["before", "after a rollout"])
def test_specs_that_are_set(change: Callable[[Any], None], when: str) -> None:
    def rollout(cls: Any) -> Any:
        env = cls(Walk())
        if when != "before":
            env.rollout(4)
        change(env)
        return seeded_rollout(env, 30)

    assert_same(rollout(GymWrapper), rollout(upstream.GymWrapper))


def test_a_part_of_a_nested_spec_that_is_set() -> None:
    def rollout(cls: Any) -> Any:
        env = cls(DictWalk())
        env.rollout(2)
        spec = env.observation_spec.clone()
        spec["inner", "place"] = Unbounded((4,), dtype=torch.float64)
        env.observation_spec = spec
        return seeded_rollout(env, 20)

    assert rollout(GymWrapper)["next", "inner", "place"].dtype is torch.float64


def test_specs_that_are_never_locked() -> None:
    env = GymWrapper(Walk(), spec_locked=False)
    env.rollout(3)
    env.observation_spec["observation"] = Unbounded((4,), dtype=torch.float64)
    assert env.rollout(3)["observation"].dtype is torch.float64


def test_specs_of_a_vectorised_environment_between_a_step_and_its_reset() -> None:
    def played(change: bool) -> Any:
        env = GymWrapper(vector(lambda: Walk(3, 3), 2, "SameStep"))
        data, seen = env.reset(seed=0), []
        torch.manual_seed(0)
        for _ in range(9):
            data = env.rand_step(data)
            if change:
                env.reward_spec = Unbounded((2, 1))
            data = env.maybe_reset(env.step_mdp(data))
            seen.append(data["observation"].clone())
        return torch.stack(seen)

    assert torch.equal(played(True), played(False))


def test_specs_under_which_nothing_can_be_written_are_refused() -> None:
    env = GymWrapper(Walk())
    env.reward_spec = Composite(gain=Unbounded((1,)))
    with pytest.raises(InvalidArgumentError, match=r"the rewards \['gain'\].*expected 'reward'"):
        env.rollout(2)


def test_a_bounded_action_of_the_users_own() -> None:
    inner = Sampled(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,)))
    env = GymWrapper(inner)
    env.rollout(2)
    env.action_spec = Bounded(0.5, 0.75, (2,))
    inner.received.clear()
    env.rollout(20)
    assert (np.array(inner.received) >= 0.5).all()


def test_the_wrappers_in_the_places_of_torchrls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts do that replace a class everywhere; nothing calls itself for that."""
    for module in (upstream, upstream.libs.gym):
        monkeypatch.setattr(module, "GymEnv", GymEnv)
        monkeypatch.setattr(module, "GymWrapper", GymWrapper)
    assert upstream.GymEnv("CartPole-v1").rollout(3).shape == (3,)
    assert_same(seeded_rollout(upstream.GymWrapper(Walk()), 9), seeded_rollout(GymWrapper(Walk()), 9))


def test_what_torchrl_chooses_for_the_installed_gym_goes_into_its_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so once, by the name that its class has in its module, whatever stands there then."""
    names = {cls: dict(vars(cls)) for cls in (GymEnv, GymWrapper)}
    for module in (upstream, upstream.libs.gym):
        monkeypatch.setattr(module, "GymEnv", GymEnv)
        monkeypatch.setattr(module, "GymWrapper", GymWrapper)
    chosen = [one for key, one in implement_for._implementations.items() if ".gym.Gym" in key or "GymWrapper" in key]
    assert chosen
    for one in chosen:
        one.module_set()
    for cls, before in names.items():
        assert {name: value for name, value in vars(cls).items() if before.get(name) is not value} == {}
    assert_same(seeded_rollout(GymWrapper(Walk()), 9), seeded_rollout(upstream.GymWrapper(Walk()), 9))
