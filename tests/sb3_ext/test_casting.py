"""Observations of another dtype than the space says: every buffer casts them, as upstream's do, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.maskable import buffers as maskable
from sb3_contrib.common.recurrent import buffers as recurrent
from stable_baselines3.common import buffers
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

import sb3_ext
from rl_ext_core.errors import InvalidTypeError
from sb3_ext import contrib

ROWS, N_ENVS = 12, 2
ACTIONS = spaces.Discrete(2)
VECTOR, IMAGE = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(0, 255, (1, 36, 36), np.uint8)
GOALS = spaces.Dict(observation=IMAGE, achieved_goal=VECTOR, desired_goal=VECTOR)
LSTM = ((ROWS, 1, N_ENVS, 4),)
PAIRS: dict[str, tuple[Any, Any, spaces.Space[Any], tuple[Any, ...]]] = {
    "vector": (buffers.ReplayBuffer, sb3_ext.CompressedReplayBuffer, VECTOR, ()),
    "image": (buffers.ReplayBuffer, sb3_ext.CompressedReplayBuffer, IMAGE, ()),
    "dict": (buffers.DictReplayBuffer, sb3_ext.CompressedDictReplayBuffer, GOALS, ()),
    "n-step": (buffers.NStepReplayBuffer, sb3_ext.CompressedNStepReplayBuffer, IMAGE, ()),
    "her": (HerReplayBuffer, sb3_ext.CompressedHerReplayBuffer, GOALS, (None,)),
    "rollout": (buffers.RolloutBuffer, sb3_ext.CompressedRolloutBuffer, IMAGE, ()),
    "dict rollout": (buffers.DictRolloutBuffer, sb3_ext.CompressedDictRolloutBuffer, GOALS, ()),
    "maskable": (maskable.MaskableRolloutBuffer, contrib.CompressedMaskableRolloutBuffer, VECTOR, ()),
    "maskable dict": (maskable.MaskableDictRolloutBuffer, contrib.CompressedMaskableDictRolloutBuffer, GOALS, ()),
    "recurrent": (recurrent.RecurrentRolloutBuffer, contrib.CompressedRecurrentRolloutBuffer, IMAGE, LSTM),
    "recurrent dict": (
        recurrent.RecurrentDictRolloutBuffer,
        contrib.CompressedRecurrentDictRolloutBuffer,
        GOALS,
        LSTM,
    ),
}
WRONG = {np.dtype(np.float32): np.float64, np.dtype(np.uint8): np.int64}


def _drawn(space: spaces.Space[Any], rng: np.random.Generator, dtypes: dict[Any, Any]) -> Any:
    """A batch of observations that do not have the dtype of their space."""
    if isinstance(space, spaces.Dict):
        return {key: _drawn(part, rng, dtypes) for key, part in space.items()}
    return rng.uniform(0, 9, (N_ENVS, *space.shape)).astype(dtypes.get(space.dtype, space.dtype))


def _add(buffer: Any, obs: Any, next_obs: Any) -> None:
    ones = np.ones(N_ENVS)
    if isinstance(buffer, buffers.ReplayBuffer):
        buffer.add(obs, next_obs, ones.astype(int), ones, ones, [{} for _ in range(N_ENVS)])
        return
    rest: dict[str, Any] = {}
    if isinstance(buffer, (recurrent.RecurrentRolloutBuffer, recurrent.RecurrentDictRolloutBuffer)):
        states = (th.zeros(LSTM[0][1:]),) * 2
        rest = {"lstm_states": recurrent.RNNStates(states, states)}
    buffer.add(obs, ones, ones, ones, th.ones(N_ENVS, 1), th.ones(N_ENVS), **rest)


def _made(name: str) -> tuple[Any, Any]:
    theirs, ours, space, more = PAIRS[name]
    size = ROWS * N_ENVS if issubclass(theirs, buffers.ReplayBuffer) else ROWS
    return tuple(kind(size, space, ACTIONS, *more, device="cpu", n_envs=N_ENVS) for kind in (theirs, ours))  # type: ignore[return-value]


def _assert_same(ours: Any, theirs: Any) -> None:
    for name in ("observations", "next_observations"):
        parts = [getattr(buffer, name, {}) for buffer in (ours, theirs)]
        parts = [part if isinstance(part, dict) else {"": part} for part in parts]
        assert parts[0].keys() == parts[1].keys()
        for key, kept in parts[1].items():
            read = np.asarray(parts[0][key])
            assert read.dtype == kept.dtype
            assert np.array_equal(read, kept)


@pytest.mark.parametrize("name", PAIRS)
def test_observations_of_another_dtype_are_cast_as_upstream_casts_them(name: str) -> None:
    theirs, ours = _made(name)
    rng = np.random.default_rng(0)
    told = []
    for _ in range(ROWS):
        obs, next_obs = (_drawn(PAIRS[name][2], rng, WRONG) for _ in range(2))
        _add(theirs, obs, next_obs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _add(ours, obs, next_obs)
        told += [str(warning.message) for warning in caught]
    _assert_same(ours, theirs)
    keys = list(PAIRS[name][2]) if isinstance(PAIRS[name][2], spaces.Dict) else [""]
    assert len(told) == len(keys)  # each is told of once
    for key, text in zip(keys, told, strict=True):
        assert text.startswith(f"obs[{key!r}] comes as " if key else "obs comes as ")
        assert "float64 and the observation space says float32" in text or "int64 and the observation space" in text


@pytest.mark.parametrize("place", ["obs", "next_obs"])
def test_what_cannot_be_cast_is_refused_and_nothing_is_stored(place: str) -> None:
    theirs, ours = _made("image")
    good = np.zeros((N_ENVS, *IMAGE.shape), np.uint8)
    bad = np.full(good.shape, "black")
    with pytest.raises(ValueError, match="invalid literal"):
        _add(theirs, *((bad, good) if place == "obs" else (good, bad)))
    with pytest.raises(InvalidTypeError, match=f"^{place} has dtype <U5, expected uint8"):
        _add(ours, *((bad, good) if place == "obs" else (good, bad)))
    assert ours.size() == 0


def test_a_warning_that_is_an_error_leaves_the_buffer_as_it_was() -> None:
    _, ours = _made("dict")
    rng = np.random.default_rng(0)
    drawn = _drawn(GOALS, rng, WRONG), _drawn(GOALS, rng, WRONG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="comes as "):
            _add(ours, *drawn)
    assert ours.size() == 0
    assert ours.pos == 0


def test_stacked_frames_that_are_cast_share_memory_as_others_do() -> None:
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 255, (1, 36, 36)), 204, axis=0)
    frames[:, 0, 0] = np.arange(204) % 256
    sizes = []
    for dtype in (np.uint8, np.float64):
        ours = sb3_ext.CompressedReplayBuffer(200, space, ACTIONS, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for t in range(199):
                stacks = frames[t : t + 5].astype(dtype)
                ours.add(stacks[None, :4], stacks[None, 1:], np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        sizes.append(ours.stored_nbytes)
    assert sizes[0] == sizes[1]
