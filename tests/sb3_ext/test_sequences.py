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
    assert_same_draws,
    collect_transitions,
    make_buffers,
    make_buffers_for,
    repeating_in_thread,
)

IMAGE = spaces.Box(0, 255, (3, 7, 6), np.uint8)
PLACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def expected_sequence(
    theirs: Any, held: int, row: int, env: int, *, length: int, burn_in: int
) -> tuple[list[int], int, bool]:
    """Return the rows of a sequence, how many are burn-in, and whether the first is known to start an episode."""
    n_rows = theirs.buffer_size
    oldest = (theirs.pos - held) % n_rows

    def is_joined(row: int) -> bool:
        """Return whether the transition in a row continues the one in the row before."""
        before, stacks, nexts = (row - 1) % n_rows, theirs.observations, theirs.next_observations
        pairs = [(nexts[key], stacks[key]) for key in stacks] if isinstance(stacks, dict) else [(nexts, stacks)]
        return not theirs.dones[before, env] and all(
            (left[before, env] == right[row, env]).all() for left, right in pairs
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


def expected_samples(theirs: Any, held: int, batch_size: int, *, length: int, burn_in: int, period: int) -> Any:
    """Return what ``sample_sequences`` returns, from SB3's arrays."""
    drawn = np.random.randint(0, held, size=batch_size)
    if held < theirs.size():
        drawn = (theirs.pos - held + drawn) % theirs.buffer_size
    kept = [(theirs.pos - held + age) % theirs.buffer_size for age in range(held)]
    drawn = np.array([row - row % period if row - row % period in kept else kept[0] for row in drawn])
    envs = np.random.randint(0, theirs.n_envs, size=batch_size)
    found = [
        expected_sequence(theirs, held, row, env, length=length, burn_in=burn_in)
        for row, env in zip(drawn, envs, strict=True)
    ]
    shape = batch_size, burn_in + length
    episode_starts, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for i, (rows, n_burn_in, starts) in enumerate(found):
        episode_starts[i, 0], mask[i, n_burn_in : len(rows)] = starts, True

    def collect(part: Any) -> Any:
        """Return values of the steps of all sequences, padded with zeros."""
        if isinstance(part, dict):
            return {key: collect(array) for key, array in part.items()}
        padded = np.zeros((*shape, *part.shape[2:]), part.dtype)
        for i, (rows, *_) in enumerate(found):
            padded[i, : len(rows)] = part[rows, envs[i]]
        return th.from_numpy(padded)

    return SequenceSamples(
        observations=collect(theirs.observations),
        actions=collect(theirs.actions),
        next_observations=collect(theirs.next_observations),
        dones=collect(theirs.dones * (1 - theirs.timeouts))[..., None],
        rewards=collect(theirs.rewards)[..., None],
        episode_starts=th.from_numpy(episode_starts),
        mask=th.from_numpy(mask),
        n_burn_in=th.tensor([n_burn_in for _, n_burn_in, _ in found]),
        rows=np.array([rows[0] for rows, *_ in found]),
        envs=envs.astype(np.int64),
    )


def assert_same_sequences(ours: Any, theirs: Any, batch_size: int, **options: int) -> None:
    """Check that the sequences of a compressed buffer equal those of a loop over SB3's arrays."""

    def draw(buffer: Any) -> Any:
        if buffer is ours:
            return ours.sample_sequences(batch_size, **options)
        return expected_samples(theirs, ours.size(), batch_size, **options)

    for seed in range(2):
        assert_same_draws(draw, ours, theirs, seed)


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
