"""
Weights for the loss of an algorithm whose ``train()`` does not know prioritized replay, and its TD errors.

Prioritized replay needs two things from an algorithm: a loss that is weighted per transition, and TD errors as new
priorities. Both go through the gradient of the loss with respect to the critic's outputs. In ``train()``, the first
forward pass of the critic with gradients after ``sample()`` computes those outputs. In the backward pass, a hook reads
their gradient and multiplies it by the weights, see :class:`CriticHook`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from types import CodeType
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from sb3_ext.caller_frames import find_training_algorithm

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
HINT = (
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


@functools.lru_cache(maxsize=16)
def owner_of(algorithm_class: type[OffPolicyAlgorithm], train_code: CodeType) -> type[OffPolicyAlgorithm]:
    """Return the class in an algorithm's hierarchy that defines this ``train()``."""
    for cls in algorithm_class.__mro__:
        if getattr(inspect.unwrap(vars(cls).get("train", _full_name)), "__code__", None) is train_code:
            return cls
    return algorithm_class


def find_critic(algorithm: OffPolicyAlgorithm, owner: type[OffPolicyAlgorithm]) -> th.nn.Module | None:
    """
    Return the critic whose loss ``train()`` computes; None if ``train()`` weights the loss itself.

    :param owner: Class that defines the ``train()``
    :raises InvalidArgumentError: If the critic is unknown, or its loss cannot be weighted.
    """
    if _full_name(owner) not in _CRITICS:
        raise InvalidArgumentError(
            f"prioritized replay weights the critic's loss, but does not know {owner.__name__}.train(). If that loss "
            "is a mean over the batch, and the critic is called once for it, use "
            f"sb3_ext.register_critic({owner.__name__}, 'name of the critic'). {HINT}"
        )
    attribute = _CRITICS[_full_name(owner)]
    if attribute is None:
        return None
    critic = getattr(algorithm, attribute, None)
    if not isinstance(critic, th.nn.Module):
        raise InvalidArgumentError(
            f"{attribute}={critic!r} of {owner.__name__}, expected a critic, a torch.nn.Module. {HINT}"
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

    The loss of DQN is smooth L1, so its gradient is the TD error clipped to 1. Larger errors are computed from the
    batch and from the outputs of the target network.

    :param buffer: Buffer of the batch
    :param algorithm: Algorithm that trains
    :param critic: Its critic
    :param name: Name of the class that defines its ``train()``, for error texts
    :param weights: Importance weights, float32, shape ``(n,)``
    :param batch: Batch of DQN; None if errors are read from the gradient alone
    :ivar done: Whether the gradients of all outputs have arrived
    """

    def __init__(
        self, buffer: Any, algorithm: Any, critic: th.nn.Module, name: str, weights: np.ndarray, batch: Any
    ) -> None:
        self._buffer, self._algorithm = weakref.ref(buffer), weakref.ref(algorithm)
        self._name, self._batch = name, batch
        self._weights = th.from_numpy(weights)
        self._outputs: list[th.Tensor] = []  # those of the critic
        self._errors: list[th.Tensor] = []
        self._next_q: th.Tensor | None = None  # output of DQN's target network
        self.done = False
        modules = [critic] if batch is None else [critic, algorithm.q_net_target]
        self._handles = [module.register_forward_hook(self) for module in modules]

    def __reduce__(self) -> Any:
        return functools.partial, (_ignore_call,)  # for copies of a critic while it trains

    def remove(self) -> None:
        """Remove the hooks from the networks, and release all tensors."""
        for handle in self._handles:
            handle.remove()
        self._outputs, self._batch, self._next_q = [], None, None

    def __call__(self, module: th.nn.Module, args: Any, output: Any) -> None:
        """Register hooks for the gradients of the critic's outputs."""
        algorithm, buffer = self._algorithm(), self._buffer()
        if self._batch is not None and module is getattr(algorithm, "q_net_target", None):
            self._next_q = output.detach()
            return
        parts = output if isinstance(output, (tuple, list)) else (output,)
        outputs = [part for part in parts if isinstance(part, th.Tensor) and part.requires_grad]
        if not outputs or buffer is None:
            return
        training = find_training_algorithm()
        if training is None or training[0] is not algorithm:
            self.remove()  # train() was interrupted, and the caller uses the critic
            return
        if self._outputs:
            raise InvalidArgumentError(
                f"{self._name}.train() calls the critic more than once for one loss, which prioritized replay cannot "
                f"weight. {HINT}"
            )
        n = len(self._weights)
        if wrong := [tuple(part.shape) for part in outputs if len(part) not in (n, 2 * n)]:
            raise InvalidArgumentError(
                f"the critic of {self._name} returned shape {wrong[0]} for {n} transitions, expected one row for each. "
                f"{HINT}"
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
                f"have no weights. {HINT}"
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
        if self._next_q is not None and len(self._next_q) == len(errors) and errors.max() >= 1:
            errors = self._unclip(errors, self._next_q)
        self.done = True
        self.remove()
        buffer = self._buffer()
        if buffer is not None:
            buffer.update_priorities(errors.cpu().numpy())

    def _unclip(self, clipped: th.Tensor, next_q: th.Tensor) -> th.Tensor:
        """Return absolute TD errors of DQN, or the clipped ones if the algorithm has computed other targets."""
        batch, algorithm = self._batch, self._algorithm()
        discounts = getattr(batch, "discounts", None)
        discounts = algorithm.gamma if discounts is None else discounts  # type: ignore[union-attr]
        targets = batch.rewards + (1 - batch.dones) * discounts * next_q.max(dim=1, keepdim=True).values
        errors = (targets - self._outputs[0].gather(1, batch.actions.long())).abs().flatten()
        matches = th.allclose(errors.clamp(max=1), clipped, rtol=1e-3, atol=1e-4)
        return errors if matches else clipped


def _ignore_call(module: th.nn.Module, args: Any, output: Any) -> None:
    """Do nothing. Copies of networks have this hook in place of those of the original."""
