"""Replay buffers with prioritized experience replay, for SB3's off-policy algorithms without changes to ``train()``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.environments import check_count
from sb3_ext._compat import progress_remaining
from sb3_ext.caller_frames import find_training_algorithm
from sb3_ext.compressed_buffer import atomic
from sb3_ext.critic_hooks import HINT, CriticHook, find_critic, owner_of
from sb3_ext.her_replay_buffer import CompressedHerReplayBuffer
from sb3_ext.replay_buffers import CompressedDictReplayBuffer, CompressedReplayBuffer

_MAX_UNUSED = 10  # consecutive batches without gradients, which are an error; an interrupted train() leaves one


class CompressedPrioritizedReplayBuffer(CompressedReplayBuffer):
    """
    Compressed replay buffer with prioritized experience replay.

    It works with DQN, SAC, TD3 and DDPG, and with sb3-contrib's QR-DQN, TQC and CrossQ, which need no changes. For
    other algorithms, see :func:`register_critic`.

    Transitions are drawn in proportion to ``priority ** alpha``, one from each of ``batch_size`` equal parts of the
    sum. The loss is weighted by ``(size * probability) ** -beta``, divided by the largest such weight in the batch.
    New transitions get the largest priority so far. After training, the priority is the absolute TD error, plus
    ``epsilon``:

    - DQN: the TD error. Its loss clips the gradient, so the error is computed from outputs and targets.
    - SAC, TD3, DDPG, CrossQ: the gradient of the loss, which is proportional to the mean TD error of the critics.
    - QR-DQN, TQC: the absolute gradients of all quantiles, which their loss clips.

    :param args, kwargs: As in :class:`CompressedReplayBuffer`
    :param alpha: Exponent of the priorities; 0 is uniform sampling
    :param beta: Exponent of the importance weights at the start of ``learn()``. It increases linearly to 1 until the
        end. Or a schedule, a function of the remaining progress from 1 to 0, as for Stable Baselines3's learning rate
    :param epsilon: Smallest priority
    :ivar importance_weights: Weights of the last batch, float32, shape ``(n,)``
    :ivar priorities: Priorities, float32, shape ``(buffer_size, n_envs)``. Do not change them
    :raises InvalidArgumentError: If ``alpha``, ``beta`` or ``epsilon`` is out of range, or as in
        :class:`CompressedReplayBuffer`.

    Sources: Schaul et al., "Prioritized Experience Replay", https://arxiv.org/abs/1511.05952

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import CompressedPrioritizedReplayBuffer
    >>> model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_class=CompressedPrioritizedReplayBuffer)
    >>> model.learn(200).replay_buffer.size()
    200
    """

    _OTHER_CLASS_HINT = "Use replay_buffer_class=CompressedPrioritizedDictReplayBuffer"
    _NO_SEQUENCES = "its transitions are drawn by priority. Use replay_buffer_class=CompressedReplayBuffer"
    _hook: CriticHook | None = None
    _batch: tuple[np.ndarray, int] | None = None  # drawn transitions, and count of additions at that time
    _n_unused = 0

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: float | Schedule = 0.4, epsilon: float = 1e-6, **kwargs: Any
    ) -> None:
        self.alpha = _check_number("alpha", alpha, least=0.0, most=np.inf)
        self.beta: Any = beta if callable(beta) else _check_number("beta", beta, least=0.0, most=1.0)
        self.epsilon = _check_number("epsilon", epsilon, least=float(np.finfo(np.float32).tiny), most=np.inf)
        self.max_priority, self._progress_remaining = 1.0, 1.0
        self.importance_weights = np.zeros(0, dtype=np.float32)
        super().__init__(*args, **kwargs)

    def _allocate_arrays(self) -> None:
        """Set the arrays of transitions, and their priorities."""
        saved = self.__dict__.get("priorities", np.zeros((0, self.n_envs)))  # of a loaded buffer
        super()._allocate_arrays()
        self.priorities = self._observations.store.array("priorities", (self.n_envs,), np.float32)
        self.priorities[: len(saved)] = saved
        self._arrays["priorities"] = self.priorities
        self._build_tree()

    def _build_tree(self) -> None:
        """Build the tree from the priorities. Transitions with an invalid one get the largest."""
        from rl_ext_core.frames.sum_tree import SumTree  # imported here, because it loads numba

        rows = self._stored_rows()
        found = self.priorities[rows]
        is_valid = np.isfinite(found) & (found > 0)
        self.max_priority = max(self.max_priority, float(found[is_valid].max(initial=0.0)))
        self.priorities[rows] = np.where(self._can_be_drawn(rows), np.where(is_valid, found, self.max_priority), 0)
        weights = np.zeros(self.priorities.shape)
        weights[rows] = self._weights_of(self.priorities[rows])
        self._tree = SumTree(weights.reshape(-1))

    def _can_be_drawn(self, rows: Any) -> Any:
        """Return whether the stored transitions in these rows can be sampled."""
        return True

    def _set_priorities(self, items: np.ndarray, priorities: Any) -> None:
        """
        Set priorities.

        :param items: Numbers of transitions, ``row * n_envs + env``, int64, shape ``(n,)``
        :param priorities: Priorities, shape ``(n,)``, or one for all; 0 for transitions that must not be sampled
        """
        # Weights are computed from arrays of the stored numbers, so that they can be restored. Powers of single numbers
        # may differ from those of arrays in the last bit.
        priorities = np.full(items.shape, priorities, np.float32)
        self._tree.set(items, self._weights_of(priorities))
        self.priorities.reshape(-1)[items] = priorities

    def _weights_of(self, priorities: Any) -> Any:
        """Return ``priority ** alpha``, or 0 for priorities of 0; a float64 array."""
        return np.float64(priorities) ** self.alpha * (priorities > 0)

    @atomic
    def add(self, *args: Any, **kwargs: Any) -> None:
        """
        Add one transition of each environment, with the largest priority so far.

        :param args, kwargs: As for :meth:`CompressedReplayBuffer.add`
        """
        row, before = self.pos, self.size()
        super().add(*args, **kwargs)
        items = np.arange(row * self.n_envs, (row + 1) * self.n_envs)
        self._set_priorities(items, self.max_priority * self._can_be_drawn(row))
        lost = self._lost_rows(before)
        dropped = lost[lost != row]
        if len(dropped):
            items = dropped[:, None] * self.n_envs + np.arange(self.n_envs)
            self._set_priorities(items.reshape(-1), 0.0)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """
        Sample transitions in proportion to their priorities.

        Within ``train()`` of a supported algorithm, the loss is weighted, and the priorities are updated. Elsewhere,
        use :attr:`importance_weights` and :meth:`update_priorities`.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        :raises InvalidArgumentError: If the critic of the algorithm cannot be found, or its loss cannot be weighted.
        """
        batch_size = check_count("batch_size", batch_size)
        training = find_training_algorithm()
        with self._observations.lock:
            if self._tree.total <= 0:
                return super().sample(batch_size, env)  # raises the error of SB3's class
            items = self._draw(batch_size)
            samples = self._samples_at(*np.divmod(items, self.n_envs), env)
            self._batch = items, self._observations.store.seen
            if training is not None:
                self._progress_remaining = progress_remaining(training[0])
            drawn = self._tree.weights[items]
            self.importance_weights = ((drawn / drawn.min()) ** -self._current_beta()).astype(np.float32)
        if self._hook is not None:
            self._end_hook(self._hook)
        if training is not None:
            algorithm, train_code = training
            owner = owner_of(type(algorithm), train_code)
            critic = find_critic(algorithm, owner)
            if critic is not None:
                batch = samples if owner is DQN else None
                self._hook = CriticHook(self, algorithm, critic, owner.__name__, self.importance_weights, batch)
        return samples

    def _draw(self, batch_size: int) -> np.ndarray:
        """Draw transitions, one from each of ``batch_size`` equal parts of the sum of all weights."""
        positions = np.arange(batch_size) + np.random.random_sample(batch_size)
        return self._tree.find(positions * (self._tree.total / batch_size))

    def _current_beta(self) -> float:
        """Return the exponent of the importance weights at the present progress of training."""
        if callable(self.beta):
            return _check_number("beta(progress)", self.beta(self._progress_remaining), least=0.0, most=1.0)
        beta: float = self.beta
        return beta + (1.0 - beta) * (1.0 - self._progress_remaining)

    def _end_hook(self, hook: CriticHook) -> None:
        """Remove the hook of the previous batch; raise an error if batches get no gradients."""
        self._hook = None
        hook.remove()
        self._n_unused = 0 if hook.done else self._n_unused + 1
        if self._n_unused >= _MAX_UNUSED:
            self._n_unused = 0
            raise InvalidArgumentError(
                f"train() has sampled {_MAX_UNUSED} batches, but the outputs of its critic got no gradients, so the "
                f"importance weights and the priorities have no effect. {HINT}"
            )

    @atomic
    def update_priorities(self, td_errors: np.ndarray | th.Tensor) -> None:
        """
        Set the priorities of the last batch. For supported algorithms, ``train()`` does this.

        Transitions that were overwritten after :meth:`sample` are skipped.

        :param td_errors: TD errors of any sign, shape ``(n,)``. The priority is ``abs(td_error) + epsilon``
        :raises InvalidArgumentError: If the shape does not match the last batch, or an error is not finite.
        """
        if isinstance(td_errors, th.Tensor):
            td_errors = td_errors.detach().cpu().numpy()
        if self._batch is None:
            raise InvalidArgumentError("there is no batch to update. Call sample() before update_priorities()")
        try:
            td_errors = np.abs(np.asarray(td_errors, dtype=np.float32)).reshape(-1)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"td_errors={td_errors!r}: expected numbers ({error})") from error
        items, n_seen = self._batch
        if len(td_errors) != len(items):
            raise InvalidArgumentError(
                f"td_errors has {len(td_errors)} values, expected {len(items)}: one per sampled transition"
            )
        if not np.isfinite(td_errors).all():
            raise InvalidArgumentError(
                f"td_errors has {np.count_nonzero(~np.isfinite(td_errors))} values that are not finite: training has "
                "diverged. No priority was changed. Use a smaller learning_rate"
            )
        n_added = self._observations.store.seen - n_seen
        age = (items // self.n_envs - self.pos + n_added) % self.buffer_size  # rows are overwritten in this order
        is_current = (self._tree.weights[items] > 0) & (age >= n_added)
        priorities = (td_errors[is_current] + self.epsilon).astype(np.float32)
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        self._set_priorities(items[is_current], priorities)

    @atomic
    def reset(self) -> None:
        """Remove all transitions and free their memory."""
        super().reset()
        self._batch = None
        self._build_tree()

    @property
    def nbytes(self) -> int:
        """Size in bytes of all stored transitions, the tree, and the arrays that batches are decoded into."""
        return super().nbytes + self._tree.nbytes

    def _saved_attributes(self) -> dict[str, Any]:
        attributes = super()._saved_attributes()
        for name in ("_tree", "_hook", "_batch"):
            attributes.pop(name, None)
        if self._observations.storage_dir is None:  # else the priorities are in it
            attributes["priorities"] = self.priorities[: self._rows_written]
        return attributes


def _check_number(name: str, value: Any, *, least: float, most: float) -> float:
    """Return a float within limits, or raise an error."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name}={value!r}: expected a number") from None
    if not least <= number <= most or np.isinf(number):
        raise InvalidArgumentError(f"{name}={value!r}: expected a number from {least:g} to {most:g}")
    return number


class CompressedPrioritizedDictReplayBuffer(CompressedPrioritizedReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[override]
    """
    :class:`CompressedPrioritizedReplayBuffer` for ``Dict`` observations.

    :param args, kwargs: As in :class:`CompressedPrioritizedReplayBuffer` and :class:`CompressedDictReplayBuffer`
    :raises InvalidTypeError: If the observation space is not a ``Dict``.

    >>> model = SAC(  # doctest: +SKIP
    ...     "MultiInputPolicy", env, replay_buffer_class=CompressedPrioritizedDictReplayBuffer
    ... )
    """

    _OTHER_CLASS_HINT = "Use replay_buffer_class=CompressedPrioritizedReplayBuffer"


class CompressedPrioritizedHerReplayBuffer(CompressedPrioritizedReplayBuffer, CompressedHerReplayBuffer):  # type: ignore[override]
    """
    Compressed replay buffer for hindsight experience replay with priorities.

    Transitions of complete episodes are drawn by priority. Goals are drawn as in
    :class:`stable_baselines3.her.her_replay_buffer.HerReplayBuffer`. A transition has one priority for all goals.

    :param args, kwargs: As in :class:`CompressedPrioritizedReplayBuffer` and :class:`CompressedHerReplayBuffer`

    >>> model = SAC(  # doctest: +SKIP
    ...     "MultiInputPolicy", env, replay_buffer_class=CompressedPrioritizedHerReplayBuffer
    ... )
    """

    _OTHER_CLASS_HINT = CompressedHerReplayBuffer._OTHER_CLASS_HINT

    def _can_be_drawn(self, rows: Any) -> Any:
        return self.ep_length[rows] > 0

    def _set_episode_length(self, rows: np.ndarray, env_idx: int, length: int) -> None:
        super()._set_episode_length(rows, env_idx, length)
        self._set_priorities(rows * self.n_envs + env_idx, self.max_priority if length else 0.0)

    def _draw(self, batch_size: int) -> np.ndarray:
        # The last transitions of a batch get new goals. In the order of the tree, these would be the newest rows.
        return np.random.permutation(super()._draw(batch_size))
