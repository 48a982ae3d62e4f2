from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.array_frameworks import map_arrays
from sb3_ext.tensor import TensorReplayBuffer
from tests.interrupts import interrupt_everywhere
from tests.sb3_ext.buffer_envs import assert_same_draws

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
DEPTH = spaces.Box(0, 999, (2,), np.uint16)  # torch does not index uint16
DICT = spaces.Dict({"a": BOX, "b": spaces.Box(0, 255, (3, 2), np.uint8), "c": DEPTH})
ACTIONS = spaces.Box(-1, 1, (1,), np.float32)


def draw(space: spaces.Space[Any], generator: Any, n_envs: int) -> Any:
    """Return observations of few values, so that equal ones, NaN and both zeros occur."""
    if isinstance(space, spaces.Dict):
        return {key: draw(part, generator, n_envs) for key, part in space.spaces.items()}
    values = np.array([0, -0.0, 1, np.nan] if space.dtype == np.float32 else [0, 1, 2, 255]).astype(space.dtype)
    return generator.choice(values, (n_envs, *space.shape))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(BOX, 1), (DICT, 1), (BOX, 3), (BOX, 5)]),
    st.integers(1, 3),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.9]), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_samples_are_those_of_stable_baselines3(
    kind: tuple[Any, int], n_envs: int, size: int, parts: list[tuple[int, float, bool]], seed: int
) -> None:
    """Episodes end, observations are not continued, as after a reset by the user, and buffers are saved and loaded."""
    space, n_steps = kind
    generator, options = np.random.default_rng(seed), {"n_steps": n_steps, "gamma": 0.97} if n_steps > 1 else {}
    upstream = DictReplayBuffer if space is DICT else NStepReplayBuffer if n_steps > 1 else ReplayBuffer
    sizes = (size * n_envs, space, ACTIONS, "cpu", n_envs)
    expected, found = upstream(*sizes, **options), TensorReplayBuffer(*sizes, **options)
    observation = draw(space, generator, n_envs)
    for steps, rate, is_saved in parts:
        for _ in range(steps):
            following, fresh = draw(space, generator, n_envs), draw(space, generator, n_envs)
            ends = generator.random(n_envs) < rate
            row = (generator.random((n_envs, 1)), generator.random(n_envs), ends & (generator.random(n_envs) < 0.7))
            infos = [{"TimeLimit.truncated": bool(flag)} for flag in ends & (generator.random(n_envs) < 0.5)]
            for buffer in (found, expected):
                buffer.add(*(map_arrays(np.copy, part) for part in (observation, following)), *row, infos)
            observation = following
            map_arrays(lambda part, new, ends=ends: operator.setitem(part, ends, new[ends]), following, fresh)
        if is_saved:
            found = TensorReplayBuffer.from_arrays(found.to_arrays(), torch.device("cpu"))
            assert type(found.to_arrays()) is upstream
        assert_same_draws(lambda drawn: drawn.sample(40), found, expected, 0)
        assert_same_draws(lambda drawn: drawn.sample(40), found.to_arrays(), expected, 0)


def test_observations_are_stored_once() -> None:
    """As many numbers as episodes need are kept besides, also after the ring has wrapped around."""
    size, n_envs, length = 640, 4, 20
    buffer = TensorReplayBuffer(size * n_envs, BOX, ACTIONS, "cpu", n_envs)
    row = torch.zeros(n_envs, 1), torch.zeros(n_envs), torch.zeros(n_envs), [{}] * n_envs
    for step in range(5 * size):
        last = step % length == length - 1
        buffer.add(torch.full((n_envs, 2), float(step)), torch.full((n_envs, 2), float(-1 if last else step + 1)), *row)
    kept = buffer._last._table.shape[0]
    assert size * n_envs / length <= kept <= 3 * size * n_envs / length + size * n_envs / 16
    following = buffer.next_observations
    assert set(following[buffer.observations % length == length - 1].tolist()) == {-1.0}


def test_refused_transitions_change_nothing() -> None:
    buffer, expected = (kind(4, BOX, ACTIONS, "cpu", 2) for kind in (TensorReplayBuffer, ReplayBuffer))
    generator = np.random.default_rng(0)
    for _ in range(3):
        row = (draw(BOX, generator, 2), draw(BOX, generator, 2), np.ones((2, 1)), np.ones(2), np.ones(2), [{}] * 2)
        buffer.add(*row)
        expected.add(*row)
    for position in (1, 3):
        bad = [*row[:position], np.ones((3, 2)), *row[position + 1 :]]
        with pytest.raises(InvalidArgumentError, match="one row per environment"):
            buffer.add(*bad)
    assert_same_draws(lambda drawn: drawn.sample(40), buffer, expected, 0)


def test_an_interrupted_add_leaves_other_transitions_as_they_were() -> None:
    buffer, row = TensorReplayBuffer(1, BOX, ACTIONS), (np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}] * 2)

    def prepare() -> Any:
        nonlocal buffer
        buffer = TensorReplayBuffer(10, BOX, ACTIONS, "cpu", 2)
        buffer.add(np.full((2, 2), 1), np.full((2, 2), 2), *row)
        return lambda: buffer.add(np.full((2, 2), 3), np.full((2, 2), 4), *row)

    for where in interrupt_everywhere(prepare, code_paths=("_tensor_buffers.py", "_interrupts.py")):
        if buffer.pos == 1:
            buffer.add(np.full((2, 2), 5), np.full((2, 2), 6), *row)
        assert buffer.next_observations[:2, 0, 0].tolist() in ([2, 4], [2, 6]), where


@pytest.mark.parametrize("count", range(1, 20))
def test_steps_after_loading_keep_last_observations_of_loaded_steps(count: int) -> None:
    expected, row = ReplayBuffer(100, BOX, ACTIONS, "cpu"), (np.zeros((1, 1)), np.zeros(1), np.ones(1), [{}])
    for step in range(count):
        expected.add(np.full((1, 2), step), np.full((1, 2), -step - 1), *row)
    buffer = TensorReplayBuffer.from_arrays(expected, torch.device("cpu"))
    for step in range(count, count + 6):
        for each in (buffer, expected):
            each.add(np.full((1, 2), step), np.full((1, 2), -step - 1), *row)
    np.testing.assert_array_equal(buffer.next_observations[: count + 6], expected.next_observations[: count + 6])
