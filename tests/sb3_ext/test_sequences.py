from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from sb3_ext import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer, SequenceSamples
from tests.sb3_ext.buffer_envs import (
    REPLAY,
    TransitionSource,
    collect_transitions,
    make_buffers,
    make_buffers_for,
    repeating_in_thread,
)
from tests.sb3_ext.vec_checks import assert_equal

IMAGE = spaces.Box(0, 255, (3, 7, 6), np.uint8)
PLACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def pick(observations: Any, key: Any, row: int, env: int) -> Any:
    """Return one observation of SB3's buffer, or one of its parts."""
    return (observations if key is None else observations[key])[row, env]


def expected_sequence(
    theirs: Any, held: int, row: int, env: int, *, length: int, burn_in: int
) -> tuple[list[int], int, bool]:
    """Return the rows of a sequence, how many are burn-in, and whether the first is known to start an episode."""
    n_rows = theirs.buffer_size
    oldest = (theirs.pos - held) % n_rows
    keys = [None] if isinstance(theirs.observations, np.ndarray) else [*theirs.observations]

    def is_joined(row: int) -> bool:
        """Return whether the transition in a row continues the one in the row before."""
        before = (row - 1) % n_rows
        return not theirs.dones[before, env] and all(
            (pick(theirs.next_observations, key, before, env) == pick(theirs.observations, key, row, env)).all()
            for key in keys
        )

    rows = [row]
    while len(rows) <= burn_in and rows[0] != oldest and is_joined(rows[0]):
        rows.insert(0, (rows[0] - 1) % n_rows)
    n_burn_in = len(rows) - 1
    while len(rows) < n_burn_in + length:
        following = (rows[-1] + 1) % n_rows
        if following == theirs.pos or not is_joined(following):
            break
        rows.append(following)
    starts = not is_joined(rows[0]) if rows[0] != oldest else (oldest == 0 and not theirs.full)
    return rows, n_burn_in, starts


def expected_samples(
    theirs: Any, held: int, seed: int, batch_size: int, *, length: int, burn_in: int, period: int = 1
) -> Any:
    """Return what ``sample_sequences`` returns, from SB3's arrays, and leave NumPy's generator in the same state."""
    np.random.seed(seed)
    drawn = np.random.randint(0, held, size=batch_size)
    if held < theirs.size():
        drawn = (theirs.pos - held + drawn) % theirs.buffer_size
    kept = [(theirs.pos - held + age) % theirs.buffer_size for age in range(held)]
    drawn = np.array([row - row % period if row - row % period in kept else kept[0] for row in drawn])
    envs = np.random.randint(0, theirs.n_envs, size=batch_size)
    n_steps, shape = burn_in + length, (batch_size, burn_in + length)
    keys = [None] if isinstance(theirs.observations, np.ndarray) else [*theirs.observations]
    obs: dict[Any, Any] = {}
    next_obs: dict[Any, Any] = {}
    for key in keys:
        array = theirs.observations if key is None else theirs.observations[key]
        obs[key], next_obs[key] = (np.zeros((*shape, *array.shape[2:]), array.dtype) for _ in range(2))
    actions = np.zeros((*shape, theirs.action_dim), theirs.actions.dtype)
    dones, rewards = np.zeros((2, *shape, 1), np.float32)
    episode_starts, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    first, counts = np.zeros((2, batch_size), np.int64)
    for i, (row, env) in enumerate(zip(drawn, envs, strict=True)):
        rows, n_burn_in, starts = expected_sequence(theirs, held, row, env, length=length, burn_in=burn_in)
        assert len(rows) <= n_steps
        first[i], counts[i], episode_starts[i, 0] = rows[0], n_burn_in, starts
        mask[i, n_burn_in : len(rows)] = True
        for j, place in enumerate(rows):
            actions[i, j], rewards[i, j] = theirs.actions[place, env], theirs.rewards[place, env]
            dones[i, j] = theirs.dones[place, env] * (1 - theirs.timeouts[place, env])
            for key in keys:
                obs[key][i, j] = pick(theirs.observations, key, place, env)
                next_obs[key][i, j] = pick(theirs.next_observations, key, place, env)

    def tensors(arrays: Any) -> Any:
        found = {key: th.from_numpy(array) for key, array in arrays.items()}
        return found.get(None, found)

    parts = (th.from_numpy(array) for array in (dones, rewards, episode_starts, mask, counts))
    return SequenceSamples(
        tensors(obs), th.from_numpy(actions), tensors(next_obs), *parts, first, envs.astype(np.int64)
    )


def assert_same_sequences(
    ours: Any, theirs: Any, batch_size: int = 9, *, length: int, burn_in: int, period: int = 1
) -> None:
    """Check that the sequences of a compressed buffer equal those of a loop over SB3's arrays."""
    for seed in range(2):
        expected = expected_samples(
            theirs, ours.size(), seed, batch_size, length=length, burn_in=burn_in, period=period
        )
        state = np.random.get_state()
        np.random.seed(seed)
        found = ours.sample_sequences(batch_size, length, burn_in, period=period)
        assert str(np.random.get_state()) == str(state)
        assert_equal(SequenceSamples(*found[:-2], None, None), SequenceSamples(*expected[:-2], None, None))
        for left, right in zip(found[-2:], expected[-2:], strict=True):
            np.testing.assert_array_equal(left, right, strict=True)


@pytest.mark.parametrize("kind", ["plain", "rewards"])
def test_sequences_are_normalized_and_padded_with_zeros(kind: str) -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0), norm_obs=kind == "plain")
    ours, _ = make_buffers_for("plain", 60, env.venv)
    for transition in collect_transitions(env.venv, 50):
        ours.add(*transition)
    env.reset()
    for _ in range(20):
        env.step(np.array([env.action_space.sample() for _ in range(2)]))
    np.random.seed(0)
    plain = ours.sample_sequences(20, 40)
    np.random.seed(0)
    normalized = ours.sample_sequences(20, 40, env=env)
    assert 0 < plain.mask.sum() < plain.mask.numel()
    for name in ("observations", "next_observations"):
        expected = env.normalize_obs(getattr(plain, name).numpy())
        assert getattr(normalized, name).dtype == th.float32
        np.testing.assert_array_equal(getattr(normalized, name)[plain.mask], expected[plain.mask])
        assert not getattr(normalized, name)[~plain.mask].any()
    np.testing.assert_array_equal(normalized.rewards, env.normalize_reward(plain.rewards.numpy()))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 5), InvalidArgumentError, "batch_size=0 must be at least 1"),
        ((4, 5, -1), InvalidArgumentError, "burn_in=-1 must be at least 0"),
        ((4, 5.0), InvalidTypeError, "length=5.0 must be a whole number"),
        ((4, 5), InvalidArgumentError, r"the buffer is empty, expected transitions. Call add\(\)"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    ours, _ = make_buffers("plain", 10, IMAGE, ACTIONS)
    with pytest.raises(error, match=text):
        ours.sample_sequences(*arguments)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("n-step", r"CompressedNStepReplayBuffer.* Use .*=CompressedReplayBuffer"),
        ("hindsight", r"CompressedHerReplayBuffer.* Use .*=CompressedDictReplayBuffer"),
        ("prioritized", r"drawn by priority. Use replay_buffer_class=CompressedReplayBuffer"),
    ],
)
def test_buffers_of_other_samples_refuse_sequences(kind: str, text: str) -> None:
    goals = spaces.Dict(observation=IMAGE, achieved_goal=PLACE, desired_goal=PLACE)
    cls = CompressedPrioritizedReplayBuffer if kind == "prioritized" else REPLAY[kind][0]
    ours = cls(10, goals, ACTIONS, env=None) if kind == "hindsight" else cls(10, IMAGE, ACTIONS)
    with pytest.raises(InvalidArgumentError, match=text):
        ours.sample_sequences(2, 3)


def test_sequences_are_consistent_while_other_threads_add() -> None:
    ours, _ = make_buffers("plain", 40, IMAGE, ACTIONS, 2, n_stack=3)
    source = TransitionSource(IMAGE, ACTIONS, 2, end_probability=0.05)
    ours.add(*source.step())
    turn = threading.Lock()

    def add() -> None:
        with turn:
            ours.add(*source.step())

    with repeating_in_thread(add), repeating_in_thread(add):
        for _ in range(200):
            found = ours.sample_sequences(4, 6, 3)
            steps = found.rewards[..., 0] - found.rewards[:, :1, 0]  # rewards count the steps of an environment
            present = found.rewards[..., 0] > 0
            assert th.equal(steps[present], th.arange(9.0).repeat(4, 1)[present])
            following = present[:, 1:]
            assert th.equal(found.observations[:, 1:][following], found.next_observations[:, :-1][following])


def test_sequences_of_bounded_errors_do_not_end_with_a_segment() -> None:
    """A picture that is stored again in another segment has other errors."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, 36, 36)).astype(np.uint8)
    space = spaces.Box(0, 255, image.shape, np.uint8)
    buffer = CompressedReplayBuffer(300, space, spaces.Discrete(2), "cpu", max_error=4, n_stack=1)
    obs = image
    for step in range(300):
        nexts = np.clip(np.roll(image, step, 1) + rng.integers(-3, 4, image.shape), 0, 255).astype(np.uint8)
        buffer.add(obs[None], nexts[None], np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        obs = nexts
    assert buffer.sample_sequences(8, length=1, burn_in=300).n_burn_in.max() > 200
