"""Comparison of rollouts bit for bit, and of the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from torch.utils._pytree import tree_leaves
from torchrl.envs import EnvBase

from tests.torchrl_ext.environments import DictWalk, WalkWithoutInfos
from torchrl_ext.frame_storage.view import FrameView

Make = Callable[[], Any]


def assert_same(found: TensorDictBase, expected: TensorDictBase) -> None:
    assert found.keys(True) == expected.keys(True) or set(found.keys(True)) == set(expected.keys(True))
    assert (found.batch_size, found.device) == (expected.batch_size, expected.device)
    for key, right in expected.items(include_nested=True):
        left, right = (each.decode() if isinstance(each, FrameView) else each for each in (found.get(key), right))
        assert type(left) is type(right), key
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device), key
            assert torch.equal(left.nan_to_num(-7.25), right.nan_to_num(-7.25)), key
            assert torch.equal(left.isnan(), right.isnan()), key
        elif isinstance(right, TensorDictBase):
            assert (left.batch_size, left.device) == (right.batch_size, right.device), key


def seeded_rollout(env: EnvBase, steps: int = 300, *, seed: int = 3, **kwargs: Any) -> TensorDictBase:
    env.set_seed(seed)
    torch.manual_seed(seed)
    kwargs.setdefault("break_when_any_done", False)
    return env.rollout(steps, **kwargs)


def assert_same_rollouts(ours: EnvBase, theirs: EnvBase, steps: int = 300, **kwargs: Any) -> TensorDictBase:
    """Assert that two environments return equal rollouts, twice; return our second one."""
    for seed in (3, 4):
        found = seeded_rollout(ours, steps, seed=seed, **kwargs)
        assert_same(found, seeded_rollout(theirs, steps, seed=seed, **kwargs))
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_pointers(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(value)}


def make_vector_env(
    make: Make | list[Make], count: int, mode: str, *, asynchronous: bool = False, **kwargs: Any
) -> Any:
    """Make a gymnasium vector environment from one constructor, or several in turn."""
    makers = make if isinstance(make, list) else [make]
    kind: Any = gymnasium.vector.SyncVectorEnv
    if asynchronous:
        # TorchRL sets the start method to spawn, with which each worker spends seconds on imports.
        kind = partial(gymnasium.vector.AsyncVectorEnv, context="fork")
    return kind([makers[row % len(makers)] for row in range(count)], autoreset_mode=mode, **kwargs)


STAGGERED_PAIR: list[Make] = [partial(WalkWithoutInfos, length, length) for length in (3, 5)]
# Small environments and batches, by kind. Upstream does not support NextStep.
INNER: dict[str, Callable[[], Any]] = {
    "single": partial(WalkWithoutInfos, 3, 3),
    "nested": partial(DictWalk, 3, 3),
    "Disabled": partial(make_vector_env, STAGGERED_PAIR, 2, "Disabled"),
    "SameStep": partial(make_vector_env, STAGGERED_PAIR, 2, "SameStep"),
    "nested, Disabled": partial(make_vector_env, DictWalk, 2, "Disabled"),
    "NextStep": partial(make_vector_env, STAGGERED_PAIR, 2, "NextStep"),
}
