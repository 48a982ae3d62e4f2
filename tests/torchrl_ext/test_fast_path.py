"""The fast path of a step is taken where it can be, and elsewhere upstream's, with the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn
from torchrl import envs as upstream
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, StepCounter, default_info_dict_reader

from rl_ext_core.errors import InvalidTypeError
from tests.torchrl_ext.comparing import assert_same, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Isaac, Walk
from tests.torchrl_ext.test_oracle_batched import Bare
from torchrl_ext import GymWrapper

MAKERS: dict[str, Callable[[Any], Any]] = {
    "single": lambda cls: cls(Bare()),
    "nested": lambda cls: cls(DictWalk()),
    "batch": lambda cls: cls(vector([partial(Bare, n, n) for n in (3, 5)], 2, "Disabled")),
    "batch that resets itself": lambda cls: cls(vector([partial(Bare, n, n) for n in (3, 5)], 2, "SameStep")),
}
makers = pytest.mark.parametrize("name", MAKERS)


@contextmanager
def upstreams_way() -> Iterator[list[str]]:
    """Note how often upstream's methods are called, and replace none: that would be an override."""
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


@makers
def test_rollouts_and_collectors_take_it(name: str) -> None:
    with upstreams_way() as calls:
        seeded_rollout(MAKERS[name](GymWrapper), 30)
        seeded_rollout(MAKERS[name](GymWrapper), 30, break_when_any_done=True)
        collector = Collector(MAKERS[name](GymWrapper), None, frames_per_batch=20, total_frames=40)
        assert len(list(collector)) == 2
        collector.shutdown()
    assert calls == []


def test_a_torch_environment_takes_it() -> None:
    with upstreams_way() as calls:
        GymWrapper(Isaac(4)).rollout(20, break_when_any_done=False)
    assert calls == []


class Marked(TensorDict):
    """A TensorDict that may do more than others."""


def locked(env: Any, data: Any) -> Any:
    return data.lock_()


def preset(env: Any, data: Any) -> Any:
    return data.set("next", TensorDict({"extra": torch.ones(*env.batch_size, 1)}, env.batch_size))


def some_steps(env: Any, data: Any) -> Any:
    return data.set("_step", torch.zeros(*env.batch_size, 1, dtype=torch.bool))


def text(env: Any, data: Any) -> Any:
    return data.set_non_tensor("note", "a sentence")


def parameter(env: Any, data: Any) -> Any:
    return data.set("weight", nn.Parameter(torch.ones(*env.batch_size, 2)))


def nested_text(env: Any, data: Any) -> Any:
    return data.set("deep", TensorDict({}, env.batch_size).set_non_tensor("note", "a sentence"))


def lazy(env: Any, data: Any) -> Any:
    return LazyStackedTensorDict(*data.unbind(0), stack_dim=0)


def named(env: Any, data: Any) -> Any:
    data.names = ["env"]
    return data


def subclassed(env: Any, data: Any) -> Any:
    return Marked(data.to_dict(), batch_size=data.batch_size)


def on_a_device(env: Any, data: Any) -> Any:
    return data.to("cpu")


ODD = {
    function.__name__: function
    for function in (
        locked,
        preset,
        some_steps,
        text,
        parameter,
        nested_text,
        lazy,
        named,
        subclassed,
        on_a_device,
    )
}


NEED_A_BATCH = ("lazy", "named")


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "odd"),
    [(name, odd) for name in MAKERS for odd in ODD if name.startswith("batch") or odd not in NEED_A_BATCH],
)
@pytest.mark.parametrize("method", ["step", "step_and_maybe_reset"])
def test_what_is_not_plain_goes_upstreams_way(name: str, odd: str, method: str) -> None:
    def played(cls: Any) -> Any:
        env = MAKERS[name](cls)
        env.set_seed(0)
        torch.manual_seed(0)
        data, results = env.reset(), []
        for _ in range(4):
            data = env.rand_action(data)
            data = ODD[odd](env, data)
            try:
                result = getattr(env, method)(data)
            except Exception as error:  # upstream may refuse it, and then ours does
                results.append(type(error))
                break
            results += list(result) if isinstance(result, tuple) else [result]
            data = result[1].copy() if isinstance(result, tuple) else env.step_mdp(result)
            data = data.clone().unlock_() if odd != "on_a_device" else env.reset()
            if isinstance(data, LazyStackedTensorDict):
                data = data.contiguous()
            data.pop("note", None)
            if method == "step" and bool(data["done"].any()):
                break
        return results

    with upstreams_way() as calls:
        ours = played(GymWrapper)
    if not (odd in ("text", "parameter", "nested_text") and method == "step"):  # which carries nothing on
        assert method in calls
    theirs = played(upstream.GymWrapper)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, type):
            assert one is other
        else:
            assert_same(one, other)


def test_partial_steps_of_a_batch() -> None:
    """Those that are done are left out until all are."""
    ours, theirs = (MAKERS["batch that resets itself"](cls) for cls in (GymWrapper, upstream.GymWrapper))
    found, expected = (seeded_rollout(env, 12, break_when_all_done=True) for env in (ours, theirs))
    assert_same(found, expected)


def test_infos_go_upstreams_way() -> None:
    with upstreams_way() as calls:
        env = GymWrapper(Walk()).set_info_dict_reader(default_info_dict_reader(["age"]))
        env.rollout(5, break_when_any_done=False)
    assert calls.count("step_and_maybe_reset") == 4  # the last one is no more than a step
    assert calls.count("step") == 5


def test_type_checks_go_upstreams_way() -> None:
    env = GymWrapper(Walk(9, 9))
    env.run_type_checks = True
    with upstreams_way() as calls:
        env.rollout(3)
    assert calls.count("step") == 3


def test_hooks_after_a_step_are_called() -> None:
    env = GymWrapper(Walk(9, 9))

    def hook(before: Any, after: Any) -> Any:
        return before, after.set("observation", after["observation"] + 100)

    env.__dict__["_post_step_mdp_hooks"] = hook
    rollout = env.rollout(4, break_when_any_done=False)
    assert torch.equal(rollout["observation"][1:], rollout["next", "observation"][:-1] + 100)


def test_a_subclass_that_overrides_a_part_is_heard() -> None:
    class Doubles(GymWrapper):
        def _step(self, tensordict: Any) -> Any:
            out = super()._step(tensordict)
            return out.set("reward", out["reward"] * 2)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            out = super()._reset(tensordict, **kwargs)
            return out.set("observation", out["observation"] - 1)

    class Further(Doubles):
        """Changes nothing."""

    class Extends(GymWrapper):
        """Changes nothing that a step is made of."""

        def hello(self) -> str:
            return "hello"

    plain = seeded_rollout(GymWrapper(Walk()), 30)
    for cls in (Doubles, Further):
        rollout = seeded_rollout(cls(Walk()), 30)
        assert torch.equal(rollout["next", "reward"], plain["next", "reward"] * 2)
        begun = plain["observation"][:, 1] == 0
        assert torch.equal(rollout["observation"][begun], plain["observation"][begun] - 1)
    for cls, heard in ((Extends, False), (Further, True)):
        with upstreams_way() as calls:
            seeded_rollout(cls(Walk()), 30)
        assert bool(calls) == heard


@pytest.mark.parametrize("name", ["read_action", "read_obs", "read_reward", "read_done", "_output_transform"])
def test_a_subclass_that_would_not_be_heard_is_refused(name: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"Reads overrides {name}.*Override _step"):
        type("Reads", (GymWrapper,), {name: lambda self, value: value, "__module__": "elsewhere"})


def test_transforms_call_the_step_below() -> None:
    env = GymWrapper(Walk()).append_transform(StepCounter())
    with upstreams_way() as calls:
        rollout = env.rollout(20, break_when_any_done=False)
    assert calls == []  # TransformedEnv calls _step itself
    assert torch.equal(rollout["next", "step_count"].squeeze(-1).float(), rollout["next", "observation"][:, 1])
