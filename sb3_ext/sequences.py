"""Sequences of consecutive steps from compressed replay buffers, for recurrent networks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ext.observations import IndexArray

Mask = npt.NDArray[np.bool_]


class SequenceSamples(NamedTuple):
    """
    Batch of sequences, of ``burn_in + length`` steps each.

    A sequence starts with its burn-in. Steps after its end are padding, in which all tensors are zero.

    :ivar observations: Observations, ``(batch, steps, *obs_shape)``; a dict of these for a ``Dict``
    :ivar actions: Actions, ``(batch, steps, action_dim)``
    :ivar next_observations: Next observations, with the same shapes as ``observations``
    :ivar dones: 1 for terminal steps, 0 for others and for time-outs, ``(batch, steps, 1)``, float32
    :ivar rewards: Rewards, ``(batch, steps, 1)``, float32
    :ivar episode_starts: 1 for the first step of an episode, ``(batch, steps)``, float32. It is 0 for the oldest step
        of a full buffer, because the step before it is unknown
    :ivar mask: Whether to learn from a step, ``(batch, steps)``, bool. False in the burn-in and in padding
    :ivar n_burn_in: Steps of burn-in, ``(batch,)``, int64; fewer than ``burn_in`` near the start of an episode
    :ivar rows: Row of the first step of each sequence in the buffer, int64 array ``(batch,)``
    :ivar envs: Environment of each sequence, int64 array ``(batch,)``

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import CompressedReplayBuffer
    >>> model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_class=CompressedReplayBuffer)
    >>> model.learn(200).replay_buffer.sample_sequences(8, length=20, burn_in=5).observations.shape
    torch.Size([8, 25, 4])
    """

    observations: Any
    actions: th.Tensor
    next_observations: Any
    dones: th.Tensor
    rewards: th.Tensor
    episode_starts: th.Tensor
    mask: th.Tensor
    n_burn_in: th.Tensor
    rows: IndexArray
    envs: IndexArray


def sequences_around(
    buffer: Any, rows: IndexArray, envs: IndexArray, *, length: int, burn_in: int, env: VecNormalize | None
) -> SequenceSamples:
    """
    Return the sequences whose first steps to learn from are given. The caller must hold the buffer's lock.

    :param buffer: :class:`CompressedReplayBuffer`
    :param rows: Rows of these steps, ``(batch,)``
    :param envs: Environments of these steps, ``(batch,)``
    :param length: Number of steps to learn from
    :param burn_in: Number of steps before these
    :param env: Environment to normalize observations and rewards with
    :return: Sequences
    """
    rows, envs, present, starts, n_burn_in = _find_steps(buffer, rows, envs, length=length, burn_in=burn_in)
    samples = buffer._samples_at(rows.ravel(), envs.ravel(), env)
    n_steps, mask = present.sum(axis=1), present & (np.arange(burn_in + length) >= n_burn_in[:, None])

    def by_sequence(part: Any) -> Any:
        """Return tensors of all steps with shape ``(batch, steps, …)``, zero in the padding."""
        if isinstance(part, dict):
            return {key: by_sequence(tensor) for key, tensor in part.items()}
        part = part.view(*present.shape, *part.shape[1:])
        for i in np.flatnonzero(n_steps < present.shape[1]):
            part[i, n_steps[i] :] = 0
        return part

    return SequenceSamples(
        observations=by_sequence(samples.observations),
        actions=by_sequence(samples.actions),
        next_observations=by_sequence(samples.next_observations),
        dones=by_sequence(samples.dones),
        rewards=by_sequence(samples.rewards),
        episode_starts=th.as_tensor(starts, device=buffer.device),
        mask=th.as_tensor(mask, device=buffer.device),
        n_burn_in=th.as_tensor(n_burn_in, device=buffer.device),
        rows=rows[:, 0].copy(),
        envs=envs[:, 0].copy(),
    )


def _find_steps(
    buffer: Any, rows: IndexArray, envs: IndexArray, *, length: int, burn_in: int
) -> tuple[IndexArray, IndexArray, Mask, npt.NDArray[np.float32], IndexArray]:
    """
    Find the steps around the given ones that belong to the same episode.

    :return: Rows, environments, whether a step is present, and whether it starts an episode, each ``(batch, steps)``.
        Padding has the row of the first step. Last, the steps of burn-in, ``(batch,)``
    """
    rows, envs = rows.astype(np.int64), envs.astype(np.int64)  # on Windows, NumPy draws 32-bit integers
    held, n_rows = buffer.size(), buffer.buffer_size
    oldest = buffer._observations.store.first
    # Columns are the steps around the given ones, and one more in front: the step before the longest burn-in.
    ages = ((rows - oldest) % n_rows)[:, None] + np.arange(-burn_in - 1, length)
    is_held = (ages >= 0) & (ages < held)
    grid = (oldest + np.where(is_held, ages, 0)) % n_rows
    columns = np.repeat(envs[:, None], grid.shape[1], axis=1)

    # Whether a step continues the one before. SB3's learn() may reset the environment without a done, which only the
    # next step's observation shows.
    joined = is_held[:, :-1] & is_held[:, 1:] & (buffer.dones[grid, columns][:, :-1] == 0)
    joined = buffer._observations.are_continued(grid, columns, joined)
    n_burn_in = _count_leading(joined[:, burn_in:0:-1])
    n_steps = n_burn_in + 1 + _count_leading(joined[:, burn_in + 1 :])

    # Move the sequences to the left, so that each starts with its burn-in.
    steps, start = np.arange(burn_in + length), burn_in + 1 - n_burn_in
    present, sequence = steps < n_steps[:, None], np.arange(len(rows))
    grid = grid[sequence[:, None], start[:, None] + np.where(present, steps, 0)]
    # If older steps were overwritten or dropped, nothing tells whether the oldest one starts an episode.
    is_known = is_held[sequence, start - 1] | ((grid[:, 0] == 0) & (not buffer.full))
    starts = np.zeros(grid.shape, dtype=np.float32)
    starts[:, 0] = is_known & ~joined[sequence, start - 1]
    return grid, columns[:, 1:], present, starts, n_burn_in


def _count_leading(flags: Mask) -> IndexArray:
    """Count the True values before the first False of each row."""
    counts: IndexArray = np.logical_and.accumulate(flags, axis=1).sum(axis=1, dtype=np.int64)
    return counts
