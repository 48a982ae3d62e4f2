"""What data shares its memory with: nothing, unless asked for."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torchrl_ext.comparing import assert_same, storages, tensors, vector
from tests.torchrl_ext.environments import Buffered, DictWalk, Isaac, IsaacByIds, SameStep, Sampled, Walk, box
from torchrl_ext import GymWrapper

styles = pytest.mark.parametrize("style", Buffered.STYLES)
libraries = pytest.mark.parametrize("torch_tensors", [False, True], ids=["NumPy", "torch"])


def memory_of(env: Any) -> set[int]:
    buffers = [torch.as_tensor(buffer) for buffer in env.own_memory]
    return storages(buffers)


def played(env: Any, steps: int) -> list[Any]:
    seen, data = [], env.reset()
    seen.append(data.copy())
    for _ in range(steps):
        before, data = env.step_and_maybe_reset(env.rand_action(data))
        seen += [before, data.copy()]
    return seen


@styles
@libraries
def test_nothing_is_shared_and_nothing_changes_later(style: str, torch_tensors: bool) -> None:
    inner = Buffered(style, length=7, torch_tensors=torch_tensors)
    env = GymWrapper(inner)
    seen, kept = [], []
    data = env.reset()
    for _ in range(100):
        before, data = env.step_and_maybe_reset(env.rand_action(data))
        assert not storages(before.to_dict()) & memory_of(inner)
        seen.append(before)
        kept.append(before.clone())
    for one, other in zip(seen, kept, strict=True):
        assert_same(one, other)
    counts = [int(data["next", "observation"][0]) for data in seen]
    assert counts == [step % 7 + 1 for step in range(100)]
    assert all((data["action"].abs() <= 1).all() for data in seen)


@libraries
def test_sharing_is_what_false_means(torch_tensors: bool) -> None:
    inner = Buffered("one buffer", torch_tensors=torch_tensors)
    env = GymWrapper(inner, copy=False)
    first = env.rand_step(env.reset())
    assert storages(first["next", "observation"]) <= memory_of(inner)
    env.rand_step(env.step_mdp(first))
    assert first["next", "observation"].tolist() == [2, 2, 2]
    assert not storages([first["next", key] for key in ("reward", "done")]) & memory_of(inner)


class Keeps(Walk):
    """Returns new arrays and writes into them later; ``where`` says in which calls."""

    def __init__(self, where: str) -> None:
        super().__init__(40, 40)
        self.where, self.kept = where, []  # type: ignore[var-annotated]

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return self.handed(observation, "reset"), info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return self.handed(observation, "step"), *rest

    def handed(self, observation: Any, where: str) -> Any:
        for array in self.kept:
            array[...] = -1
        self.kept = [observation[:]] if self.where == "step, a view" else [observation] * (where == self.where)
        return observation


@pytest.mark.parametrize("where", ["reset", "step", "step, a view"])
def test_what_is_written_into_later_is_copied_however_late_that_is(where: str) -> None:
    seen = played(GymWrapper(Keeps(where)), 200)
    for data in seen:
        for part in (data, data.get("next", data)):
            assert part["observation"][0] != -1


def test_a_dict_with_one_array_twice() -> None:
    class Twice(Walk):
        observation_space = spaces.Dict(a=box(4), b=box(4))  # type: ignore[assignment]

        def observation(self) -> Any:
            array = super().observation()
            return {"a": array, "b": array}

    data = played(GymWrapper(Twice()), 50)[-2]["next"]
    assert len(storages([data["a"], data["b"]])) == 2


@libraries
def test_tuples(torch_tensors: bool) -> None:
    array: Any = torch.zeros if torch_tensors else np.zeros

    class Pairs(Walk):
        observation_space = spaces.Tuple([spaces.Box(-9, 9, (2,))] * 2)  # type: ignore[assignment]

        def observation(self) -> Any:
            return array(2), array(2) + self.step_count

    for data in played(GymWrapper(Pairs()), 50)[1::2]:
        assert (data["next", "observation"][1] > 0).all()


def test_arrays_that_torch_takes_in_no_way_are_copied() -> None:
    class Odd(Walk):
        """Read-only, backwards, of the other byte order."""

        observation_space = spaces.Dict({name: box(4) for name in "abc"})  # type: ignore[assignment]

        def observation(self) -> Any:
            array = super().observation()
            locked = array.copy()
            locked.flags.writeable = False
            return {"a": locked, "b": array[::-1].copy()[::-1], "c": array.astype(">f4")}

    for data in played(GymWrapper(Odd(), copy=False), 50):
        for part in (data, data["next"]) if "next" in data.keys() else (data,):  # noqa: SIM118
            assert part["a"].tolist() == part["b"].tolist() == part["c"].tolist()


BATCHES: dict[str, Any] = {
    "Isaac": lambda: Isaac(4, final_obs=True),
    "Isaac, lost": lambda: Isaac(4),
    "Isaac by ids": lambda: IsaacByIds(4, final_obs=True, spoils_actions=True),
    "batch of torch": lambda: SameStep([2, 3], "batch", torch_tensors=True),
    "Sync": lambda: vector(Walk, 3, "SameStep", copy=False),
    "Sync of Dicts": lambda: vector(DictWalk, 3, "NextStep", copy=False),
}


@pytest.mark.parametrize("missing", ["nan", "previous"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_share_nothing_and_are_left_alone(name: str, missing: Any) -> None:
    inner = BATCHES[name]()
    written: list[tuple[Any, Any]] = []
    step, reset = inner.step, inner.reset

    def stepping(action: Any) -> Any:
        """Keep what was handed out, as it was."""
        for leaf, kept in written:
            assert torch.equal(torch.as_tensor(leaf), kept)  # nobody has written into it since
        result = step(action)
        written[:] = [(leaf, torch.as_tensor(leaf).clone()) for leaf in leaves(result)]
        return result

    def resetting(*args: Any, **kwargs: Any) -> Any:
        result = reset(*args, **kwargs)
        written[:] = [(leaf, torch.as_tensor(leaf).clone()) for leaf, _ in written]
        return result

    inner.step = stepping
    inner.reset = functools.wraps(reset)(resetting)
    env = GymWrapper(inner, missing_final_obs=missing)
    seen = played(env, 15)
    kept = [data.clone() for data in seen]
    handed = storages([torch.as_tensor(leaf) for leaf, _ in written])
    for data in seen:
        assert not storages(data.to_dict()) & handed
        assert not any(tensor.requires_grad for tensor in tensors(data.to_dict()))
    played(env, 5)
    for one, other in zip(seen, kept, strict=True):
        assert_same(one, other)
    env.close()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    is_array = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)
    return [value] if is_array else []


@settings(max_examples=60)
@given(
    space=st.sampled_from(
        [
            box(3),
            spaces.Discrete(4),
            spaces.MultiBinary(3),
            spaces.MultiDiscrete([2, 3]),
            spaces.Dict(a=box(2), b=spaces.MultiBinary(2)),
            spaces.Tuple([box(2), box(2)]),
        ]
    ),
    torch_tensors=st.booleans(),
    categorical=st.booleans(),
    clip=st.booleans(),
)
def test_actions_are_the_environments_own(space: Any, torch_tensors: bool, categorical: bool, clip: bool) -> None:
    inner = Sampled(box(2), space)
    env = GymWrapper(
        inner,
        env_type="auto",
        convert_actions_to_numpy=not torch_tensors,
        categorical_action_encoding=categorical,
        clip_actions=0.5 if clip and "Box" in str(space) else None,
    )
    data = env.rand_action(env.reset())
    given = data.select(*env.action_keys).clone()
    env.step(data)
    for leaf in leaves(inner.received[-1]):
        leaf[...] = 1 - leaf
    assert_same(data.select(*env.action_keys), given)


def test_no_graph_reaches_the_data() -> None:
    env = GymWrapper(Buffered("fresh", torch_tensors=True))
    action = torch.tensor([0.5, 0.25], requires_grad=True)
    data = env.step(env.reset().set("action", action * 2))
    assert data["action"].requires_grad  # the policy's
    assert not any(tensor.requires_grad for tensor in tensors(data["next"].to_dict()))
