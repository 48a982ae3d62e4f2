"""Conversion of spaces of any library to TorchRL specs, whose random values are finite."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Composite, Stacked, TensorSpec, Unbounded
from torchrl.data.tensor_specs import BoundedContinuous
from torchrl.envs.libs import gym as upstream

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.spaces import convert_space, find_attribute

__all__ = [
    "HalfBounded",
    "SingleSpaces",
    "is_continuous",
    "is_ragged",
    "limit_actions",
    "make_batched_specs",
    "to_gymnasium",
]


class HalfBounded(BoundedContinuous):
    """Bounded spec with infinite bounds, whose random values are finite.

    Values are uniform between two finite bounds, exponential beyond one, and normal without any.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__class__":  # TorchRL's metaclass would set it to one of its own classes
            super().__setattr__(name, value)

    def rand(self, shape: Any = None) -> torch.Tensor:
        """Draw finite values within the bounds.

        :param shape: leading dimensions
        :return: (*shape, *self.shape) of the spec's dtype
        """
        low, high = self.space.low, self.space.high
        above, below = low.isfinite(), high.isfinite()
        empty = torch.empty((*(shape or ()), *self.shape), device=self.device, dtype=self.dtype)
        beyond = torch.empty_like(empty).exponential_()
        one_sided = torch.where(above, low + beyond, torch.where(below, high - beyond, torch.randn_like(empty)))
        return torch.where(above & below, low + torch.rand_like(empty) * (high - low), one_sided)

    def to(self, dest: Any) -> HalfBounded:
        """Return a copy on another device, or in another dtype."""
        return _half_bounded(super().to(dest))


def _half_bounded(spec: Bounded) -> HalfBounded:
    """Convert a Bounded spec with infinite bounds to :class:`HalfBounded`."""
    return HalfBounded(spec.space.low, spec.space.high, spec.shape, device=spec.device, dtype=spec.dtype)


def limit_actions(spec: TensorSpec, clip: float | None) -> TensorSpec:
    """Clip the bounds of continuous actions, and let random actions be finite, nested ones included.

    :param clip: bound on the magnitude; None: unbounded
    """
    if isinstance(spec, Composite):
        parts = {key: limit_actions(part, clip) for key, part in spec.items()}
        return Composite(parts, device=spec.device, shape=spec.shape)
    if not is_continuous(spec):
        return spec
    if clip is not None:
        low, high = (bound.clamp(-clip, clip) for bound in spec.space)
        return Bounded(low, high, spec.shape, device=spec.device, dtype=spec.dtype)
    is_finite = isinstance(spec, Unbounded) or all(bound.isfinite().all() for bound in spec.space)
    return spec if is_finite else _half_bounded(spec)


def is_continuous(spec: TensorSpec) -> bool:
    """Return whether an entry of a spec contains fractions."""
    return isinstance(spec, (Bounded, Unbounded)) and bool(spec.dtype.is_floating_point)


def is_ragged(spec: TensorSpec, batch: torch.Size) -> bool:
    """Return whether an entry of a spec is not a single tensor, such as some Tuples."""
    if isinstance(spec, Composite):
        return spec.shape != batch or any(is_ragged(part, batch) for part in spec.values())
    return isinstance(spec, Stacked)


def make_batched_specs(
    single: SingleSpaces, batch: torch.Size, key: str, device: torch.device | None, categorical: bool
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Make the specs of a vectorized environment from the spaces of its sub-environments.

    :param single: spaces of one sub-environment
    :param batch: batch size
    :param key: key of the observation, if it is not a dict
    :param device: device of the specs
    :param categorical: whether discrete actions are indices instead of one-hot vectors
    :return: specs of the observation, the action and the reward
    :raises ValueError: If a batch of a space's values is not one tensor.
    """
    convert = partial(upstream._gym_to_torchrl_spec_transform, device=device, categorical_action_encoding=categorical)
    specs = []
    for space in (single.observation_space, single.action_space):
        _check_batchable(space)
        spec = convert(space if single.is_batched else gymnasium.vector.utils.batch_space(space, *batch))
        if isinstance(spec, Composite):
            spec.shape = batch
        specs.append(spec)
    observation, action = specs
    if not isinstance(observation, Composite):
        observation = Composite({key: observation}, shape=batch, device=device)
    reward_space = getattr(single, "reward_space", None)
    if reward_space is None:
        return observation, action, Unbounded((*batch, 1), device=device)
    reward = convert(reward_space)
    # Environments have the space of one reward, or of a batch of rewards.
    return observation, action, reward if reward.shape[:1] == batch else reward.expand(*batch, *reward.shape)


def _check_batchable(space: Any) -> None:
    """Raise an error if a space contains a Tuple, Text or Sequence."""
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            _check_batchable(part)
    elif isinstance(space, (spaces.Tuple, spaces.Text, spaces.Sequence)):
        raise ValueError("vectorized environments cannot have Tuple, Text or Sequence spaces")


# -- spaces


def to_gymnasium(space: Any) -> Any:
    """Convert a space of any library to gymnasium's, by the attributes of the space.

    The attributes are ``spaces``, ``nvec``, ``n``, ``low`` and ``high``. Spaces that TorchRL converts
    (``register_gym_spec_conversion``) are returned unchanged.

    :raises InvalidArgumentError: If the space has none of these attributes.
    """
    if isinstance(space, spaces.MultiBinary) and not isinstance(space.n, (int, np.integer)):
        return spaces.Box(0, 1, space.shape, space.dtype.type)  # TorchRL's conversion needs a number
    is_nested = isinstance(space, (dict, spaces.Dict, spaces.Tuple))
    with suppress(KeyError):
        if not is_nested and upstream._conversion_registry[type(space)] is not None:
            return space
    if is_nested or not isinstance(space, spaces.Space):
        converted = convert_space(space, to_gymnasium)
        if converted is not None:
            return converted
    raise InvalidArgumentError(
        f"the space {space!r} of type {type(space).__name__} is not supported; expected a space of gymnasium, or one "
        "with the attributes low and high, n, nvec, or spaces. Use env.observation_space = "
        "gymnasium.spaces.Box(...), or register a conversion with "
        "torchrl.envs.libs.gym.register_gym_spec_conversion"
    )


def _merge_tuples(space: Any) -> Any:
    """Replace Tuples of discrete spaces of one shape by MultiDiscretes."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, _merge_tuples(part)) for key, part in space.items()])
    if not isinstance(space, spaces.Tuple):
        return space
    parts = [_merge_tuples(part) for part in space]
    kinds = {(type(part), part.shape) for part in parts}
    if len(kinds) != 1 or not isinstance(parts[0], (spaces.Discrete, spaces.MultiDiscrete)):
        return spaces.Tuple(parts)
    counts = [part.n if isinstance(part, spaces.Discrete) else part.nvec for part in parts]
    return spaces.MultiDiscrete(counts, start=[part.start for part in parts])


class SingleSpaces:
    """Spaces of one sub-environment, for TorchRL's functions that make specs.

    :param env: the environment
    :param batch: its batch size
    :ivar is_batched: whether the spaces are those of the batch, because the environment has no others
    :ivar starts: ``start`` of both spaces: a number, an array, or a dict of them; None: zero
    :raises InvalidArgumentError: If a space cannot be converted.
    """

    def __init__(self, env: Any, batch: torch.Size) -> None:
        self.unwrapped = self
        names = ("observation_space", "action_space")
        self.observation_space, self.action_space = (to_gymnasium(find_attribute(env, f"single_{n}", n)) for n in names)
        known = (self.observation_space, self.action_space)
        has_single = any(find_attribute(env, f"single_{name}") is not None for name in names)
        self.is_batched = bool(batch) and not has_single and all(_is_batched_space(space, batch) for space in known)
        if not batch:  # gymnasium's batch of a Tuple is a tuple of batches
            self.observation_space, self.action_space = map(_merge_tuples, known)
        of_batch = bool(batch) and not self.is_batched
        self.starts = [_find_starts(space, of_batch=of_batch) for space in (self.observation_space, self.action_space)]
        reward_space = find_attribute(env, "reward_space")
        if reward_space is not None:
            self.reward_space = to_gymnasium(reward_space)


def _is_batched_space(space: Any, batch: torch.Size) -> bool:
    """Return whether the shapes of all parts of a space begin with the batch size."""
    if isinstance(space, spaces.Dict):
        return all(_is_batched_space(part, batch) for part in space.values())
    return tuple(space.shape or ())[: len(batch)] == tuple(batch)


def _find_starts(space: Any, *, of_batch: bool) -> Any:
    """Return a space's ``start``: a number, an array, or a dict of them; None if zero.

    :param of_batch: whether the space will be batched. A batched MultiDiscrete is a Box, which has no ``start``
    """
    if isinstance(space, spaces.Dict):
        parts = {key: _find_starts(part, of_batch=of_batch) for key, part in space.spaces.items()}
        return parts if any(part is not None for part in parts.values()) else None
    kinds = (spaces.Discrete,) if of_batch else (spaces.Discrete, spaces.MultiDiscrete)
    start = space.start if isinstance(space, kinds) else 0
    return (np.array(start) if np.ndim(start) else int(start)) if np.any(start) else None
