"""Rollouts of random spaces contain what environments return, and environments receive what policies choose."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torchrl import envs as upstream
from torchrl.envs import check_env_specs

from tests.torchrl_ext.comparison import assert_same_rollouts, make_vector_env
from tests.torchrl_ext.environments import SamplingEnv
from torchrl_ext import GymWrapper


def make_box(shape: tuple[int, ...], dtype: Any, bounds: tuple[float, float]) -> spaces.Box:
    low, high = {"u": (0, 255), "b": (0, 1), "i": (-5, 5), "f": bounds}[np.dtype(dtype).kind]
    return spaces.Box(low, high, shape, dtype)


counts, starts = st.integers(2, 4), st.integers(-2, 2)
boxes = st.builds(
    make_box,
    st.sampled_from([(), (1,), (2,), (4, 4, 3)]),
    st.sampled_from([np.float32, np.float64, np.uint8, np.int8, np.int64, bool]),
    st.sampled_from([(-1, 1), (-1, 1), (-np.inf, np.inf), (0, np.inf), (-np.inf, 2)]),
)
discretes = st.builds(lambda n, start: spaces.Discrete(n, start=start), counts, starts)
choices = st.one_of(
    discretes,
    st.lists(st.tuples(counts, starts), min_size=1, max_size=3).map(
        lambda parts: spaces.MultiDiscrete([n for n, _ in parts], start=[start for _, start in parts])
    ),
    st.just(spaces.MultiDiscrete([[3, 3], [3, 3]])),
)
leaves = st.one_of(boxes, choices, st.sampled_from([3, (2, 3)]).map(spaces.MultiBinary))


def make_strategy(*keys: str) -> st.SearchStrategy[Any]:
    """Return the strategy of all spaces, with these keys of Dicts."""
    dicts = st.recursive(
        leaves, lambda parts: st.dictionaries(st.sampled_from(keys), parts, min_size=1).map(spaces.Dict), max_leaves=5
    )
    return st.one_of(dicts, st.lists(discretes, min_size=2, max_size=3).map(spaces.Tuple))


def is_supported_upstream(space: Any, *, batched: bool, is_action: bool) -> bool:
    """Return whether TorchRL converts values of a space without an error or a wrong value."""
    if isinstance(space, spaces.Dict):
        # TorchRL passes Dicts of one part as arrays, "state" under another key, and no batches of Dicts.
        is_unsupported = is_action and (batched or len(space.spaces) == 1 or "state" in space.spaces)
        parts = space.spaces.values()
        return not is_unsupported and all(
            is_supported_upstream(part, batched=batched, is_action=is_action) for part in parts
        )
    if isinstance(space, spaces.Tuple):
        return not any(part.start for part in space.spaces) and len({part.n for part in space.spaces}) == 1
    if isinstance(space, spaces.Box):
        # Actions of half-bounded boxes are infinite in TorchRL.
        return not is_action or bool(np.isfinite([space.low, space.high]).all() or not np.isfinite(space.low).any())
    return not np.any(getattr(space, "start", 0)) and space.shape not in ((2, 3), (1,))


def encode(space: Any, value: Any, *, categorical: bool, batched: bool) -> Any:
    """Return the numbers in the data for a value of a space, without dimensions."""
    encode_part = partial(encode, categorical=categorical, batched=batched)
    if isinstance(space, spaces.Dict):
        return {key: encode_part(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return np.concatenate([encode_part(part, one) for part, one in zip(space, value, strict=True)])
    numbers = np.ravel(value)
    # gymnasium's batch of MultiDiscretes is a Box.
    if not isinstance(space, spaces.Discrete if batched else (spaces.Discrete, spaces.MultiDiscrete)):
        return numbers
    numbers = numbers - np.ravel(space.start)
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    return numbers if categorical else np.concatenate([np.eye(n)[i] for n, i in zip(sizes, numbers, strict=True)])


def read(data: Any, space: Any, name: str = "") -> Any:
    """Return the numbers in the data in the form of :func:`encode`."""
    if not isinstance(space, spaces.Dict):
        return (data[name] if name else data).numpy().ravel()
    # TorchRL renames "state".
    return {key: read(data["observation" if key == "state" else key], part) for key, part in space.spaces.items()}


def contains(space: Any, action: Any) -> bool:
    """Return whether an environment may receive an action of a space."""
    if isinstance(space, spaces.Dict):
        return all(contains(part, action[key]) for key, part in space.spaces.items())
    if isinstance(space, spaces.Box) and space.shape == ():  # as TorchRL's wrapper, which passes an array of shape (1,)
        return np.size(action) == 1
    return bool(space.contains(tuple(action) if isinstance(space, spaces.Tuple) else action))


@settings(max_examples=100 if "CI" in os.environ else 20, phases=(Phase.generate,))
@given(
    observed=make_strategy("a", "_a", "state"),
    taken=make_strategy("x", "state"),
    categorical=st.booleans(),
    mode=st.sampled_from([None, None, "torch", "SameStep", "NextStep", "Disabled"]),
)
def test_values_of_random_spaces_are_exact(observed: Any, taken: Any, categorical: bool, mode: str | None) -> None:
    """Rollouts equal TorchRL's, too, if it supports the spaces."""
    batched = mode not in (None, "torch")
    if mode:  # batches of Tuples are rejected, and gymnasium does not convert Tuples to torch
        observed, taken = (space[0] if isinstance(space, spaces.Tuple) else space for space in (observed, taken))
    if isinstance(taken, spaces.Dict) and "state" in taken.spaces:
        taken = spaces.Dict(x=taken)  # TorchRL's key for it would be that of the observation
    makers = [partial(SamplingEnv, observed, taken, length) for length in (3, 4)]

    def make_env(cls: Any) -> Any:
        inner = make_vector_env(makers, 2, str(mode)) if batched else makers[0]()
        inner = gymnasium.wrappers.NumpyToTorch(inner) if mode == "torch" else inner
        return cls(inner, categorical_action_encoding=categorical)

    env = make_env(GymWrapper)
    check_env_specs(env)
    singles = env._env.envs if batched else [env._env.unwrapped]
    for single in singles:
        single.returned.clear()
        single.received.clear()
    rollout = env.rollout(7, break_when_any_done=False)
    encode_value = partial(encode, categorical=categorical, batched=batched)
    for single, row in zip(singles, rollout.unbind(0) if batched else [rollout], strict=True):
        found = [row[0]]
        for step in range(7):
            found += [row["next"][step], *([row[step + 1]] if row["next", "done"][step] and step < 6 else [])]
        for data, value in zip(found, single.returned, strict=False):
            np.testing.assert_equal(read(data, observed, "observation"), encode_value(observed, value))
        for data, value in zip(row, single.received, strict=True):
            assert contains(taken, value)
            np.testing.assert_equal(read(data, taken, "action"), encode_value(taken, value))
    if mode in (None, "Disabled") and all(
        is_supported_upstream(space, batched=batched, is_action=space is taken) for space in (observed, taken)
    ):
        assert_same_rollouts(make_env(GymWrapper), make_env(upstream.GymWrapper), 9)
