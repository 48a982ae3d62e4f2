"""Observations of another dtype than the space says: every buffer casts them, as upstream's do, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import REPLAY, ROLLOUT

ROWS, N_ENVS = 12, 2
ACTIONS = spaces.Discrete(2)
VECTOR, IMAGE = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(0, 255, (1, 36, 36), np.uint8)
GOALS = spaces.Dict(observation=IMAGE, achieved_goal=VECTOR, desired_goal=VECTOR)
KINDS = [*REPLAY, *(f"{kind} rollout" for kind in ROLLOUT)]
WRONG = {np.dtype(np.float32): np.float64, np.dtype(np.uint8): np.int64}


def space_of(kind: str) -> spaces.Space[Any]:
    return GOALS if "dict" in kind or kind == "hindsight" else VECTOR if "maskable" in kind else IMAGE


def made(kind: str) -> list[Any]:
    """Ours and theirs."""
    classes = ROLLOUT[kind.removesuffix(" rollout")] if "rollout" in kind else REPLAY[kind]
    more: dict[str, Any] = {"hidden_state_shape": (ROWS, 1, N_ENVS, 4)} if "recurrent" in kind else {}
    if kind == "hindsight":
        more["env"] = None
    rows = ROWS if "rollout" in kind else ROWS * N_ENVS
    return [cls(rows, space_of(kind), ACTIONS, device="cpu", n_envs=N_ENVS, **more) for cls in classes]


def wrong(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """A batch of observations that do not have the dtype of their space."""
    if isinstance(space, spaces.Dict):
        return {key: wrong(part, rng) for key, part in space.items()}
    return rng.uniform(0, 9, (N_ENVS, *space.shape)).astype(WRONG[space.dtype])


def add(buffer: Any, obs: Any, next_obs: Any) -> None:
    ones = np.ones(N_ENVS)
    if isinstance(buffer, ReplayBuffer):
        buffer.add(obs, next_obs, ones.astype(int), ones, ones, [{} for _ in range(N_ENVS)])
        return
    states = (th.zeros((1, N_ENVS, 4)),) * 2
    rest = {"lstm_states": RNNStates(states, states)} if hasattr(buffer, "hidden_states_pi") else {}
    buffer.add(obs, ones, ones, ones, th.ones(N_ENVS, 1), th.ones(N_ENVS), **rest)


@pytest.mark.parametrize("kind", KINDS)
def test_observations_of_another_dtype_are_cast_as_upstream_casts_them(kind: str) -> None:
    ours, theirs = made(kind)
    rng, space = np.random.default_rng(0), space_of(kind)
    told = []
    for _ in range(ROWS):
        obs, next_obs = wrong(space, rng), wrong(space, rng)
        add(theirs, obs, next_obs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            add(ours, obs, next_obs)
        told += [str(warning.message) for warning in caught]
    for name in ("observations", "next_observations"):
        left, right = (getattr(buffer, name, {}) for buffer in (ours, theirs))
        for key in right if isinstance(space, spaces.Dict) else [...]:
            pair = (left, right) if key is ... else (left[key], right[key])
            np.testing.assert_array_equal(np.asarray(pair[0]), pair[1], strict=True)
    keys = list(space) if isinstance(space, spaces.Dict) else [""]
    assert len(told) == len(keys)  # each is told of once
    for key, text in zip(keys, told, strict=True):
        assert text.startswith(f"obs[{key!r}] comes as " if key else "obs comes as ")
        assert "float64 and the observation space says float32" in text or "int64 and the observation space" in text


def test_a_warning_that_is_an_error_leaves_the_buffer_as_it_was() -> None:
    ours, _ = made("dict")
    rng = np.random.default_rng(0)
    with pytest.raises(UserWarning, match="comes as "):
        add(ours, wrong(GOALS, rng), wrong(GOALS, rng))
    assert (ours.size(), ours.pos) == (0, 0)


def test_stacked_frames_that_are_cast_share_memory_as_others_do() -> None:
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 255, (1, 36, 36)), 204, axis=0)
    frames[:, 0, 0] = np.arange(204) % 256
    sizes = []
    for dtype in (np.uint8, np.float64):
        ours = CompressedReplayBuffer(200, space, ACTIONS, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for t in range(199):
                stacks = frames[t : t + 5].astype(dtype)
                ours.add(stacks[None, :4], stacks[None, 1:], np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        sizes.append(ours.stored_nbytes)
    assert sizes[0] == sizes[1]
