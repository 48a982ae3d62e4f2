"""Sequences of consecutive steps from compressed replay buffers, for recurrent networks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ext.observations import HandlesByKey, IndexArray, Observations

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
    buffer: ReplayBuffer,
    observations: Observations,
    rows: IndexArray,
    envs: IndexArray,
    *,
    length: int,
    burn_in: int,
    env: VecNormalize | None,
) -> SequenceSamples:
    """
    Return the sequences whose first steps to learn from are given. The caller must hold the buffer's lock.

    :param buffer: Buffer
    :param observations: Its observations
    :param rows: Rows of these steps, ``(batch,)``
    :param envs: Environments of these steps, ``(batch,)``
    :param length: Number of steps to learn from
    :param burn_in: Number of steps before these
    :param env: Environment to normalize observations and rewards with
    :return: Sequences
    """
    steps = _find_steps(buffer, observations, rows, envs, length=length, burn_in=burn_in)
    places, is_padded = (steps.rows, steps.envs), not steps.present.all()
    obs, next_obs = observations.decode_handles(steps.handles)
    rewards = buffer.rewards[places]
    if env is not None:
        obs, next_obs = buffer._normalize_obs(obs, env), buffer._normalize_obs(next_obs, env)
        rewards = buffer._normalize_reward(rewards, env)

    def tensor(array: npt.NDArray[Any], *shape: int) -> th.Tensor:
        """Return values of all steps as a tensor of shape ``(batch, steps, *shape)``, zero in the padding."""
        array = array.reshape(*steps.present.shape, *shape)
        if is_padded:
            array[~steps.present] = 0
        return th.as_tensor(array, device=buffer.device)

    def obs_tensors(part: Any) -> Any:
        """Return observations of all steps as a tensor, or a dict of tensors for a ``Dict``."""
        if isinstance(part, dict):
            return {key: tensor(array, *array.shape[1:]) for key, array in part.items()}
        return tensor(part, *part.shape[1:])

    return SequenceSamples(
        observations=obs_tensors(obs),
        actions=tensor(buffer.actions[places], buffer.action_dim),
        next_observations=obs_tensors(next_obs),
        dones=tensor(buffer.dones[places] * (1 - buffer.timeouts[places]), 1),
        rewards=tensor(rewards, 1),
        episode_starts=tensor(steps.episode_starts),
        mask=tensor(np.arange(burn_in + length) >= steps.n_burn_in[:, None]),
        n_burn_in=th.as_tensor(steps.n_burn_in, device=buffer.device),
        rows=steps.rows[:, 0].copy(),
        envs=steps.envs[:, 0].copy(),
    )


class _Steps(NamedTuple):
    """Steps of sequences. All arrays but the last two have shape ``(batch, steps)``."""

    rows: IndexArray  # of any step in the padding
    envs: IndexArray
    present: Mask  # False in the padding
    episode_starts: npt.NDArray[np.float32]
    n_burn_in: IndexArray  # ``(batch,)``
    handles: HandlesByKey  # ``(batch * steps,)``, 0 in the padding


def _find_steps(
    buffer: ReplayBuffer,
    observations: Observations,
    rows: IndexArray,
    envs: IndexArray,
    *,
    length: int,
    burn_in: int,
) -> _Steps:
    """Find the steps around the given ones that belong to the same episode."""
    rows, envs = rows.astype(np.int64), envs.astype(np.int64)  # on Windows, NumPy draws 32-bit integers
    held, n_rows = buffer.size(), buffer.buffer_size
    oldest = (buffer.pos - held) % n_rows
    # Columns are the steps around the given ones, and one more in front: the step before the longest burn-in.
    ages = ((rows - oldest) % n_rows)[:, None] + np.arange(-burn_in - 1, length)
    is_held = (ages >= 0) & (ages < held)
    grid = (oldest + np.where(is_held, ages, 0)) % n_rows
    columns = np.broadcast_to(envs[:, None], grid.shape)
    found = observations.handles(grid.ravel(), columns.ravel())
    handles = {key: [part.reshape(grid.shape) for part in pair] for key, pair in found.items()}

    # Whether a step continues the one before.
    joined = is_held[:, :-1] & is_held[:, 1:] & (buffer.dones[grid, columns][:, :-1] == 0)
    # SB3's learn() may reset the environment without a done. Only the next step's observation shows that.
    joined[joined] = observations.are_equal(
        {key: nexts[:, :-1][joined] for key, (_, nexts) in handles.items()},
        {key: stacks[:, 1:][joined] for key, (stacks, _) in handles.items()},
    )
    n_burn_in = _count_leading(joined[:, burn_in:0:-1])
    n_steps = n_burn_in + 1 + _count_leading(joined[:, burn_in + 1 :])

    # Move the sequences to the left, so that each starts with its burn-in.
    steps, start = np.arange(burn_in + length), burn_in + 1 - n_burn_in
    present, sequence = steps < n_steps[:, None], np.arange(len(rows))
    moved = sequence[:, None], start[:, None] + np.where(present, steps, 0)
    grid = grid[moved]
    # If older steps were overwritten or dropped, nothing tells whether the oldest one starts an episode.
    is_known = is_held[sequence, start - 1] | ((grid[:, 0] == 0) & (not buffer.full))
    starts = np.zeros(grid.shape, dtype=np.float32)
    starts[:, 0] = is_known & ~joined[sequence, start - 1]
    chosen = {
        key: ((stacks[moved] * present).ravel(), (nexts[moved] * present).ravel())
        for key, (stacks, nexts) in handles.items()
    }
    return _Steps(grid, columns[:, 1:], present, starts, n_burn_in, chosen)


def _count_leading(flags: Mask) -> IndexArray:
    """Count the True values before the first False of each row."""
    counts: IndexArray = np.logical_and.accumulate(flags, axis=1).sum(axis=1, dtype=np.int64)
    return counts
