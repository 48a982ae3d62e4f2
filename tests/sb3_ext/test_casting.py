"""Every buffer casts observations of another dtype than the space's as SB3 does, with one warning."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import REPLAY, ROLLOUT, make_buffers
from tests.sb3_ext.test_rollout_buffers import fill_rollouts, make_rollout_buffers

ROWS, N_ENVS = 12, 2
ACTIONS = spaces.Discrete(3)
VECTOR, IMAGE = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(0, 255, (1, 36, 36), np.uint8)
GOALS = spaces.Dict(observation=IMAGE, achieved_goal=VECTOR, desired_goal=VECTOR)
WRONG = {np.dtype(np.float32): np.float64, np.dtype(np.uint8): np.int64}
REST = np.zeros((N_ENVS, 1)), np.zeros(N_ENVS), np.zeros(N_ENVS), [{} for _ in range(N_ENVS)]


def make_miscast_batch(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """Return a batch of observations that do not have the dtype of their space."""
    if isinstance(space, spaces.Dict):
        return {key: make_miscast_batch(part, rng) for key, part in space.items()}
    return rng.uniform(0, 9, (N_ENVS, *space.shape)).astype(WRONG[space.dtype])


@pytest.mark.parametrize("kind", [*REPLAY, *(f"{kind} rollout" for kind in ROLLOUT)])
def test_observations_of_other_dtypes_are_cast_as_in_sb3_with_one_warning(kind: str) -> None:
    space = GOALS if "dict" in kind or kind == "hindsight" else VECTOR if "maskable" in kind else IMAGE
    if kind in REPLAY:
        ours, theirs = make_buffers(
            kind, ROWS * N_ENVS, space, ACTIONS, **({"env": None} if kind == "hindsight" else {})
        )
    else:
        ours, theirs = make_rollout_buffers(kind.removesuffix(" rollout"), ROWS, space)
    rng = np.random.default_rng(0)
    observations = [make_miscast_batch(space, rng) for _ in range(ROWS + 1)]

    def add_observations(buffer: Any) -> None:
        if kind not in REPLAY:
            fill_rollouts((buffer,), observations[:-1])
            return
        for obs, next_obs in itertools.pairwise(observations):
            buffer.add(dict(obs) if isinstance(obs, dict) else obs, next_obs, *REST)

    add_observations(theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        add_observations(ours)
    for name in ("observations", "next_observations"):
        left, right = (getattr(buffer, name, {}) for buffer in (ours, theirs))
        for key in right if isinstance(space, spaces.Dict) else [...]:
            pair = (left, right) if key is ... else (left[key], right[key])
            np.testing.assert_array_equal(np.asarray(pair[0]), pair[1], strict=True)
    keys = list(space) if isinstance(space, spaces.Dict) else [""]
    for key, warning in zip(keys, caught, strict=True):  # one warning per key
        text = str(warning.message)
        assert text.startswith(f"obs[{key!r}] has dtype " if key else "obs has dtype ")
        assert "float64, but the observation space has float32" in text or "int64, but the observation space" in text


def test_buffer_is_unchanged_if_cast_warning_is_raised() -> None:
    ours, _ = make_buffers("dict", ROWS * N_ENVS, GOALS, ACTIONS)
    rng = np.random.default_rng(0)
    with pytest.raises(UserWarning, match="Observations are cast"):
        ours.add(make_miscast_batch(GOALS, rng), make_miscast_batch(GOALS, rng), *REST)
    assert (ours.size(), ours.pos) == (0, 0)


def test_images_with_channels_last_are_refused_with_the_order_of_wrappers() -> None:
    """See https://github.com/DLR-RM/stable-baselines3/issues/819."""
    buffer = CompressedReplayBuffer(10, spaces.Box(0, 255, (3, 36, 40), np.uint8), ACTIONS, "cpu", n_envs=N_ENVS)
    images = np.zeros((N_ENVS, 36, 40, 3), np.uint8)
    with pytest.raises(InvalidArgumentError, match=r"obs has shape .*channels last.*VecNormalize\(VecTransposeImage"):
        buffer.add(images, images, *REST)
    assert buffer.size() == 0
