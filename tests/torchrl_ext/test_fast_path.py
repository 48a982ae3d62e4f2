from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from gymnasium.wrappers import TransformReward
from tensordict import LazyStackedTensorDict
from torch import nn
from torchrl import envs as upstream
from torchrl._utils import implement_for
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from rl_ext_core.errors import InvalidTypeError
from tests.torchrl_ext.comparison import INNER, assert_same, seeded_rollout
from tests.torchrl_ext.environments import Isaac, Walk
from torchrl_ext import GymEnv, GymWrapper

KINDS = ("single", "nested", "Disabled", "SameStep")


@contextmanager
def record_upstream_calls() -> Iterator[list[str]]:
    """Record calls of upstream's methods by profiling, which does not disable the fast path."""
    codes = {getattr(EnvBase, name).__code__: name for name in ("step", "step_and_maybe_reset", "maybe_reset")}
    calls: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in codes and isinstance(frame.f_locals.get("self"), GymWrapper):
            calls.append(codes[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("make", [*(INNER[kind] for kind in KINDS), partial(Isaac, 4)], ids=[*KINDS, "torch"])
def test_rollouts_transforms_and_collectors_use_the_fast_path(make: Any) -> None:
    with record_upstream_calls() as calls:
        seeded_rollout(GymWrapper(make()), 30)
        seeded_rollout(GymWrapper(make()), 30, break_when_any_done=True)
        seeded_rollout(GymWrapper(make()).append_transform(StepCounter()), 20)  # TransformedEnv calls _step itself
        collector = Collector(GymWrapper(make()), None, frames_per_batch=20, total_frames=40)
        assert len(list(collector)) == 2
        collector.shutdown()
    assert calls == []


UNUSUAL_DATA: dict[str, Callable[[Any, Any], Any]] = {
    "locked": lambda env, data: data.lock_(),
    "some steps": lambda env, data: data.set("_step", torch.zeros(*env.batch_size, 1, dtype=torch.bool)),
    "text": lambda env, data: data.set_non_tensor("note", "a sentence"),
    "parameter": lambda env, data: data.set("weight", nn.Parameter(torch.ones(*env.batch_size, 2))),
    "on a device": lambda env, data: data.to("cpu"),
    "lazy": lambda env, data: LazyStackedTensorDict(*data.unbind(0), stack_dim=0),
    "named": lambda env, data: setattr(data, "names", ["env"]) or data,
}


@pytest.mark.sample(quick=8, ci=30)
@pytest.mark.parametrize(
    ("name", "unusual"),
    [
        (name, unusual)
        for name in KINDS
        for unusual in UNUSUAL_DATA
        if name in ("Disabled", "SameStep") or unusual not in ("lazy", "named")
    ],
)
@pytest.mark.parametrize("method", ["step", "step_and_maybe_reset"])
def test_unusual_data_uses_upstream_methods(name: str, unusual: str, method: str) -> None:
    def play(cls: Any) -> Any:
        env = cls(INNER[name]())
        env.set_seed(0)
        torch.manual_seed(0)
        data, results = env.reset(), []
        for _ in range(4):
            data = UNUSUAL_DATA[unusual](env, env.rand_action(data))
            try:
                result = getattr(env, method)(data)
            except Exception as error:  # if upstream rejects the data, so must ours
                return [*results, type(error)]
            results += list(result) if isinstance(result, tuple) else [result]
            data = result[1].copy() if isinstance(result, tuple) else env.step_mdp(result)
            data = data.clone().unlock_() if unusual != "on a device" else env.reset()
            if isinstance(data, LazyStackedTensorDict):
                data = data.contiguous()
            data.pop("note", None)
            if method == "step" and bool(data["done"].any()):
                break
        return results

    with record_upstream_calls() as calls:
        ours = play(GymWrapper)
    if not (unusual in ("text", "parameter") and method == "step"):  # a single step carries nothing over
        assert method in calls
    for one, other in zip(ours, play(upstream.GymWrapper), strict=True):
        if isinstance(other, type):
            assert one is other
        else:
            assert_same(one, other)


def test_type_checks_and_hooks_use_upstream_methods() -> None:
    env = GymWrapper(Walk(9, 9))
    env.run_type_checks = True
    with record_upstream_calls() as calls:
        env.rollout(3)
    assert calls.count("step") == 3
    env = GymWrapper(Walk(9, 9))
    env.__dict__["_post_step_mdp_hooks"] = lambda before, after: (before, after.set("observation", torch.ones(4)))
    assert (env.rollout(4)["observation"][1:] == 1).all()


# -- methods that are replaced


def test_subclass_without_step_overrides_uses_the_fast_path() -> None:
    behind = type("Behind", (), {"read_obs": lambda self, observation: 1 / 0})
    for bases in ((GymWrapper,), (GymWrapper, behind)):
        with record_upstream_calls() as calls:
            found = seeded_rollout(type("Own", bases, {"hello": lambda self: "hello"})(Walk()), 20)
            assert_same(found, seeded_rollout(GymWrapper(Walk()), 20))
        assert calls == []


def count_calls(calls: list[str], method: Any) -> Any:
    def count_call(*args: Any, **kwargs: Any) -> Any:
        calls.append("called")
        return method(*args, **kwargs)

    return count_call


METHODS = ("_step", "step", "step_and_maybe_reset", "_reset", "_step_proc_data", "rand_action", "maybe_reset")


@pytest.mark.parametrize("owner", ["instance", "TorchRL's class", "subclass", "subclass of a subclass"])
@pytest.mark.parametrize("name", METHODS)
def test_replaced_methods_are_called(name: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    replaced = {name: count_calls(calls, getattr(GymWrapper, name))}
    own = type("Own", (GymWrapper,), replaced if "subclass" in owner else {})
    env = (type("Deeper", (own,), {}) if owner == "subclass of a subclass" else own)(Walk())
    env.rollout(3)
    calls.clear()
    if owner == "instance":
        monkeypatch.setattr(env, name, count_calls(calls, getattr(env, name)))
    elif owner == "TorchRL's class":
        if next(base for base in GymWrapper.__mro__ if name in vars(base)) is not EnvBase:
            return  # Python does not call it either
        monkeypatch.setattr(EnvBase, name, count_calls(calls, getattr(EnvBase, name)))
    found = seeded_rollout(env, 30)
    assert len(calls) > 2
    monkeypatch.undo()
    assert_same(found, seeded_rollout(GymWrapper(Walk()), 30))


READERS = ["read_action", "read_obs", "read_reward", "read_done"]


@pytest.mark.parametrize("name", [*READERS, "_output_transform", "_reset_output_transform"])
def test_overrides_of_methods_that_are_never_called_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixin = type("Reads", (), {name: lambda self, value: value})
    with pytest.raises(InvalidTypeError, match=f"Mixed overrides {name}, which .* does not call. Override _step"):
        type("Mixed", (mixin, GymEnv), {})
    if name not in READERS:
        return
    refused = pytest.raises(InvalidTypeError, match=f"overrides {name}, which .* does not call")
    for wrap in (lambda env: env, lambda env: TransformedEnv(env, StepCounter())):
        env = GymWrapper(Walk())
        env.rollout(3)
        setattr(env, name, lambda value: value)
        with refused:
            wrap(env).rollout(3)
    env = GymWrapper(Walk())
    env.rollout(3)
    owner = next(base for base in GymWrapper.__mro__ if name in vars(base))
    monkeypatch.setattr(owner, name, print)
    with refused:
        env.rollout(3)


# -- environments, options and specs that are set


def set_observation_spec(**entries: Any) -> Callable[[Any], None]:
    return lambda env: setattr(env, "observation_spec", Composite(**entries))


CHANGES: dict[str, Callable[[Any], None]] = {
    "environment": lambda env: setattr(env, "_env", TransformReward(env._env, lambda reward: float(reward) / 2)),
    "frame skip": lambda env: setattr(env, "wrapper_frame_skip", 3),
    "observation": set_observation_spec(observation=Unbounded((4,), dtype=torch.float64)),
    "another key": set_observation_spec(state=Unbounded((4,), dtype=torch.float32)),
    "reward": lambda env: setattr(env, "reward_spec", Unbounded((1,), dtype=torch.float64)),
    "action": lambda env: setattr(env, "action_spec", Categorical(3)),
    "full action": lambda env: setattr(env, "full_action_spec", Composite(action=Categorical(2))),
}


@pytest.mark.parametrize("played", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_environment_option_or_spec_takes_effect(name: str, played: bool) -> None:
    def rollout(cls: Any) -> Any:
        env = cls(Walk())
        if played:
            env.rollout(4)
        CHANGES[name](env)
        return seeded_rollout(env, 30)

    assert_same(rollout(GymWrapper), rollout(upstream.GymWrapper))


def test_wrappers_work_in_place_of_torchrls_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRL sets version-dependent methods on the class it finds by name, here ours."""
    GymEnv("CartPole-v1"), GymWrapper(Walk())  # TorchRL sets attributes of a class with its first instance
    before = {cls: dict(vars(cls)) for cls in (GymEnv, GymWrapper)}
    for module in (upstream, upstream.libs.gym):
        monkeypatch.setattr(module, "GymEnv", GymEnv)
        monkeypatch.setattr(module, "GymWrapper", GymWrapper)
    assert upstream.GymEnv("CartPole-v1").rollout(3).shape == (3,)
    chosen = [one for key, one in implement_for._implementations.items() if ".gym.Gym" in key or "GymWrapper" in key]
    assert chosen
    for one in chosen:
        one.module_set()
    for cls, names in before.items():
        assert {name: value for name, value in vars(cls).items() if names.get(name) is not value} == {}
    monkeypatch.undo()
    assert_same(seeded_rollout(GymWrapper(Walk()), 9), seeded_rollout(upstream.GymWrapper(Walk()), 9))
