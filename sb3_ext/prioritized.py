"""
Prioritized experience replay for SB3's off-policy algorithms, without changes to their ``train()``.

Prioritized replay needs two things from an algorithm: a loss that is weighted per transition, and TD errors as new
priorities. Both go through the gradient of the loss with respect to the critic's outputs. In ``train()``, the first
forward pass of the critic with gradients after ``sample()`` computes those outputs. In the backward pass, a hook reads
their gradient and multiplies it by the weights, see :class:`CriticHook`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from types import CodeType
from typing import Any

import cloudpickle
import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common import buffers
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.environments import check_count
from sb3_ext._compat import progress_remaining
from sb3_ext.buffers import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedReplayBuffer,
    atomic,
)

# Attribute of the critic, by the class that defines train(). The loss of each is a mean over the batch. The classes are
# named, because sb3-contrib may not be installed.
_CRITICS: dict[str, str | None] = {
    "stable_baselines3.dqn.dqn.DQN": "q_net",
    "stable_baselines3.sac.sac.SAC": "critic",
    "stable_baselines3.td3.td3.TD3": "critic",
    "sb3_contrib.qrdqn.qrdqn.QRDQN": "quantile_net",
    "sb3_contrib.tqc.tqc.TQC": "critic",
    "sb3_contrib.crossq.crossq.CrossQ": "critic",
}
_MAX_UNUSED = 10  # consecutive batches without gradients, which are an error; an interrupted train() leaves one
_HINT = (
    "Use replay_buffer_class=CompressedReplayBuffer. Or register the class with register_critic(..., None), weight the "
    "loss in train() by replay_buffer.importance_weights, and call replay_buffer.update_priorities(td_errors)"
)


def register_critic(algorithm_class: type[OffPolicyAlgorithm], attribute: str | None) -> None:
    """
    Allow prioritized replay for an algorithm that has its own ``train()``.

    The critic's loss has to be a mean over the batch, computed from one call of the critic per batch. Otherwise, the
    importance weights would be wrong. Priorities are the absolute gradients of the loss. For a Huber loss, these are TD
    errors clipped to 1. For a squared loss, they are twice the TD errors.

    :param algorithm_class: Class that defines ``train()``
    :param attribute: Name of the algorithm's attribute that contains the critic, a :class:`torch.nn.Module`; or None if
        ``train()`` weights the loss itself, by ``importance_weights``, and calls ``update_priorities()``
    :raises InvalidTypeError: If the class is not an off-policy algorithm that defines ``train()``.

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import register_critic
    >>> class DoubleDQN(DQN):
    ...     def train(self, gradient_steps, batch_size=100): ...
    >>> register_critic(DoubleDQN, "q_net")
    """
    given: Any = algorithm_class
    if not (isinstance(given, type) and issubclass(given, OffPolicyAlgorithm) and "train" in vars(given)):
        raise InvalidTypeError(
            f"algorithm_class={algorithm_class!r}: expected a subclass of OffPolicyAlgorithm that defines train()"
        )
    _CRITICS[_full_name(algorithm_class)] = attribute


def _full_name(cls: type) -> str:
    """Return the module and the name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _find_training_algorithm() -> tuple[OffPolicyAlgorithm, CodeType] | None:
    """Return the algorithm whose ``train()`` is running, and the code of that method; None if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "train" and isinstance(found := frame.f_locals.get("self"), OffPolicyAlgorithm):
            return found, frame.f_code
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=16)
def _owner_of(algorithm_class: type[OffPolicyAlgorithm], train_code: CodeType) -> type[OffPolicyAlgorithm]:
    """Return the class in an algorithm's hierarchy that defines this ``train()``."""
    for cls in algorithm_class.__mro__:
        if getattr(inspect.unwrap(vars(cls).get("train", _full_name)), "__code__", None) is train_code:
            return cls
    return algorithm_class


def _find_critic(algorithm: OffPolicyAlgorithm, owner: type[OffPolicyAlgorithm]) -> th.nn.Module | None:
    """
    Return the critic whose loss ``train()`` computes; None if ``train()`` weights the loss itself.

    :param owner: Class that defines the ``train()``
    :raises InvalidArgumentError: If the critic is unknown, or its loss cannot be weighted.
    """
    if _full_name(owner) not in _CRITICS:
        raise InvalidArgumentError(
            f"prioritized replay weights the critic's loss, but does not know {owner.__name__}.train(). If that loss "
            "is a mean over the batch, and the critic is called once for it, use "
            f"sb3_ext.register_critic({owner.__name__}, 'name of the critic'). {_HINT}"
        )
    attribute = _CRITICS[_full_name(owner)]
    if attribute is None:
        return None
    critic = getattr(algorithm, attribute, None)
    if not isinstance(critic, th.nn.Module):
        raise InvalidArgumentError(
            f"{attribute}={critic!r} of {owner.__name__}, expected a critic, a torch.nn.Module. {_HINT}"
        )
    if getattr(critic, "_compiled_call_impl", None) is not None:
        raise InvalidArgumentError(
            f"{attribute} of {owner.__name__} was compiled in place, and compiled modules ignore new hooks. Replace "
            f"{attribute}.compile() by model.{attribute} = torch.compile(model.{attribute})"
        )
    return critic


class CriticHook:
    """
    Forward hook that weights the loss of one batch and reads its TD errors.

    It ignores forward passes without gradients: those of target networks, ``predict()`` and evaluation. After the
    backward pass of the batch, it is removed.

    :param buffer: Buffer of the batch
    :param algorithm: Algorithm that trains
    :param critic: Its critic
    :param name: Name of the class that defines its ``train()``, for error texts
    :param weights: Importance weights, float32, shape ``(n,)``
    :param target: Target values of the batch; None if errors are read from the gradient alone
    :ivar done: Whether the gradients of all outputs have arrived
    """

    def __init__(
        self,
        buffer: CompressedPrioritizedReplayBuffer,
        algorithm: OffPolicyAlgorithm,
        critic: th.nn.Module,
        name: str,
        weights: np.ndarray,
        target: DqnTarget | None,
    ) -> None:
        self._buffer, self._algorithm = weakref.ref(buffer), weakref.ref(algorithm)
        self._name, self._target = name, target
        self._weights = th.from_numpy(weights)
        self._outputs: list[th.Tensor] = []  # those of the critic
        self._errors: list[th.Tensor] = []
        self.done = False
        self._handle = critic.register_forward_hook(self)

    def __reduce__(self) -> Any:
        return functools.partial, (_ignore_call,)  # for copies of a critic while it trains

    def remove(self) -> None:
        """Remove the hooks from the networks, and release all tensors."""
        self._handle.remove()
        if self._target is not None:
            self._target.remove()
        self._outputs, self._target = [], None

    def __call__(self, module: th.nn.Module, args: Any, output: Any) -> None:
        """Register hooks for the gradients of the critic's outputs."""
        parts = output if isinstance(output, (tuple, list)) else (output,)
        outputs = [part for part in parts if isinstance(part, th.Tensor) and part.requires_grad]
        buffer = self._buffer()
        if not outputs or buffer is None:
            return
        training = _find_training_algorithm()
        if training is None or training[0] is not self._algorithm():
            self.remove()  # train() was interrupted, and the caller uses the critic
            return
        if self._outputs:
            raise InvalidArgumentError(
                f"{self._name}.train() calls the critic more than once for one loss, which prioritized replay cannot "
                f"weight. {_HINT}"
            )
        n = len(self._weights)
        if wrong := [tuple(part.shape) for part in outputs if len(part) not in (n, 2 * n)]:
            raise InvalidArgumentError(
                f"the critic of {self._name} returned shape {wrong[0]} for {n} transitions, expected one row for each. "
                f"{_HINT}"
            )
        self._outputs = [part.detach() for part in outputs]
        for part in outputs:
            part.register_hook(self._weight_gradient)  # type: ignore[no-untyped-call]

    def _weight_gradient(self, gradient: th.Tensor) -> th.Tensor:
        """Return the weighted gradient of an output. After the last output, update the priorities."""
        n = len(self._weights)
        # CrossQ passes next observations as the second half of a batch. They have no gradient.
        halves = gradient.reshape(len(gradient) // n, n, -1)
        if len(halves) > 1 and halves[1].any():
            raise InvalidArgumentError(
                f"{self._name}.train() computes a loss of {2 * n} transitions, but {n} were sampled, so the others "
                f"have no weights. {_HINT}"
            )
        if not self.done:
            self._errors.append(halves.detach().abs().sum(dim=(0, 2)) * n)
            if len(self._errors) == len(self._outputs):
                self._finish()
        weights = self._weights.to(gradient.device, gradient.dtype).reshape(1, n, 1)
        return (halves * weights).reshape(gradient.shape)

    def _finish(self) -> None:
        """Pass the TD errors to the buffer."""
        errors = th.stack([error.float() for error in self._errors]).mean(dim=0)
        if self._target is not None:
            errors = self._target.exact_errors(self._outputs[0], errors)
        self.done = True
        self.remove()
        buffer = self._buffer()
        if buffer is not None:
            buffer.update_priorities(errors.cpu().numpy())


def _ignore_call(module: th.nn.Module, args: Any, output: Any) -> None:
    """Do nothing. Copies of networks have this hook in place of those of the original."""


class DqnTarget:
    """
    Target values of DQN, to compute TD errors above 1.

    DQN's loss is smooth L1. Its gradient is the TD error, clipped to 1.

    :param algorithm: DQN
    :param samples: Batch
    """

    def __init__(self, algorithm: DQN, samples: Any) -> None:
        discounts = getattr(samples, "discounts", None)
        self._samples, self._discounts = samples, algorithm.gamma if discounts is None else discounts
        self._next_q: th.Tensor | None = None
        self._handle = algorithm.q_net_target.register_forward_hook(self)

    def __reduce__(self) -> Any:
        return functools.partial, (_ignore_call,)

    def remove(self) -> None:
        """Remove the hook from the target network."""
        self._handle.remove()

    def __call__(self, module: th.nn.Module, args: Any, output: Any) -> None:
        """Record the target network's outputs."""
        self._next_q = output.detach()

    def exact_errors(self, q_values: th.Tensor, clipped: th.Tensor) -> th.Tensor:
        """Return absolute TD errors, or the clipped ones if the algorithm has computed other targets."""
        batch, next_q = self._samples, self._next_q
        if next_q is None or len(next_q) != len(clipped) or clipped.max() < 1:
            return clipped
        targets = batch.rewards + (1 - batch.dones) * self._discounts * next_q.max(dim=1, keepdim=True).values
        errors = (targets - q_values.gather(1, batch.actions.long())).abs().flatten()
        matches = th.allclose(errors.clamp(max=1), clipped, rtol=1e-3, atol=1e-4)
        return errors if matches else clipped


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
    _UNSAVED_ATTRIBUTES: tuple[str, ...] = ("_tree", "_hook", "_batch")
    _NO_SEQUENCES = "its transitions are drawn by priority. Use replay_buffer_class=CompressedReplayBuffer"
    _hook: CriticHook | None = None
    _batch: tuple[np.ndarray, int, int] | None = None  # drawn transitions, next row and count of additions at that time
    _n_unused = 0

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: float | Schedule = 0.4, epsilon: float = 1e-6, **kwargs: Any
    ) -> None:
        self.alpha = _check_number("alpha", alpha, least=0.0, most=np.inf)
        self.beta: Any = beta if callable(beta) else _check_number("beta", beta, least=0.0, most=1.0)
        self.epsilon = _check_number("epsilon", epsilon, least=float(np.finfo(np.float32).tiny), most=np.inf)
        self.max_priority, self._n_added, self._progress_remaining = 1.0, 0, 1.0
        self.importance_weights = np.zeros(0, dtype=np.float32)
        super().__init__(*args, **kwargs)
        self._build_tree()

    def _allocate_arrays(self) -> None:
        """Set the arrays of transitions, and their priorities."""
        super()._allocate_arrays()
        self.priorities = self._observations.store.array("priorities", (self.n_envs,), np.float32)
        self._arrays["priorities"] = self.priorities

    def _saved_arrays(self) -> dict[str, np.ndarray]:
        return {"priorities": self.priorities[: self._rows_written]}

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

    def _can_be_drawn(self, rows: np.ndarray) -> Any:
        """Return whether the stored transitions in these rows can be sampled."""
        return True

    def _set_priorities(self, items: np.ndarray, priorities: Any) -> None:
        """
        Set priorities.

        :param items: Numbers of transitions, ``row * n_envs + env``, int64, shape ``(n,)``
        :param priorities: Priorities, shape ``(n,)``, or one for all; 0 for transitions that must not be sampled
        """
        # Weights are computed from the stored numbers, so that they can be restored.
        priorities = np.float32(priorities)
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
        self._n_added += 1
        self._prioritize_new(np.arange(row * self.n_envs, (row + 1) * self.n_envs))
        dropped = self._dropped_rows(before)
        if len(dropped):
            items = dropped[:, None] * self.n_envs + np.arange(self.n_envs)
            self._set_priorities(items.reshape(-1), 0.0)

    def _prioritize_new(self, items: np.ndarray) -> None:
        """Set the priorities of transitions that were added."""
        self._set_priorities(items, self.max_priority)

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
        training = _find_training_algorithm()
        with self._observations.lock:
            if self._tree.total <= 0:
                return super().sample(batch_size, env)  # raises the error of SB3's class
            items = self._draw(batch_size)
            samples = self._samples_at(*np.divmod(items, self.n_envs), env)
            self._batch = items, self.pos, self._n_added
            if training is not None:
                self._progress_remaining = progress_remaining(training[0])
            drawn = self._tree.weights[items]
            self.importance_weights = ((drawn / drawn.min()) ** -self._current_beta()).astype(np.float32)
        if self._hook is not None:
            self._end_hook(self._hook)
        if training is not None:
            self._register_hook(*training, samples)
        return samples

    def _register_hook(self, algorithm: OffPolicyAlgorithm, train_code: CodeType, samples: Any) -> None:
        """Register a hook for a batch that was sampled by ``train()``."""
        owner = _owner_of(type(algorithm), train_code)
        critic = _find_critic(algorithm, owner)
        if critic is not None:
            target = DqnTarget(algorithm, samples) if owner is DQN else None  # type: ignore[arg-type]
            self._hook = CriticHook(self, algorithm, critic, owner.__name__, self.importance_weights, target)

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
                f"importance weights and the priorities have no effect. {_HINT}"
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
        n = len(self._batch[0])
        if len(td_errors) != n:
            raise InvalidArgumentError(
                f"td_errors has {len(td_errors)} values, expected {n}: one per sampled transition"
            )
        if not np.isfinite(td_errors).all():
            raise InvalidArgumentError(
                f"td_errors has {np.count_nonzero(~np.isfinite(td_errors))} values that are not finite: training has "
                "diverged. No priority was changed. Use a smaller learning_rate"
            )
        items, next_row, n_added = self._batch
        age = (items // self.n_envs - next_row) % self.buffer_size  # rows are overwritten in this order
        is_current = (self._tree.weights[items] > 0) & (age >= self._n_added - n_added)
        priorities = (td_errors[is_current] + self.epsilon).astype(np.float32)
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        self._set_priorities(items[is_current], priorities)

    @atomic
    def reset(self) -> None:
        """Remove all transitions and free their memory."""
        super().reset()
        self._batch = None
        self.priorities[:] = 0
        self._build_tree()

    @property
    def nbytes(self) -> int:
        """Size in bytes of all stored transitions, the tree, and the arrays that batches are decoded into."""
        return super().nbytes + self._tree.nbytes

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Schedules are often lambdas and inner functions, which pickle refuses. SB3 saves its own by cloudpickle, too.
        return {**state, "beta": cloudpickle.dumps(self.beta)} if callable(self.beta) else state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if isinstance(self.beta, bytes):
            self.beta = cloudpickle.loads(self.beta)
        self._build_tree()


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


if hasattr(buffers, "NStepReplayBuffer"):
    from sb3_ext.buffers import CompressedNStepReplayBuffer

    class CompressedPrioritizedNStepReplayBuffer(CompressedPrioritizedReplayBuffer, CompressedNStepReplayBuffer):
        """
        :class:`CompressedPrioritizedReplayBuffer` with n-step returns.

        :param args, kwargs: As in :class:`CompressedPrioritizedReplayBuffer` and :class:`CompressedNStepReplayBuffer`

        >>> model = DQN(  # doctest: +SKIP
        ...     "CnnPolicy",
        ...     env,
        ...     replay_buffer_class=CompressedPrioritizedNStepReplayBuffer,
        ...     replay_buffer_kwargs={"n_steps": 3},
        ... )
        """

        _OTHER_CLASS_HINT = CompressedNStepReplayBuffer._OTHER_CLASS_HINT


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
    _UNSAVED_ATTRIBUTES = (
        *CompressedPrioritizedReplayBuffer._UNSAVED_ATTRIBUTES,
        *CompressedHerReplayBuffer._UNSAVED_ATTRIBUTES,
    )

    def _can_be_drawn(self, rows: np.ndarray) -> Any:
        return self.ep_length[rows] > 0

    def _prioritize_new(self, items: np.ndarray) -> None:
        """Do nothing. A transition gets its priority when its episode ends."""

    def _set_episode_length(self, rows: np.ndarray, env_idx: int, length: int) -> None:
        super()._set_episode_length(rows, env_idx, length)
        self._set_priorities(rows * self.n_envs + env_idx, self.max_priority if length else 0.0)

    def _draw(self, batch_size: int) -> np.ndarray:
        # The last transitions of a batch get new goals. In the order of the tree, these would be the newest rows.
        return np.random.permutation(super()._draw(batch_size))
