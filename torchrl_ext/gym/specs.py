"""Conversion of spaces of any library to TorchRL specs, whose random values are finite."""

from __future__ import annotations

import operator
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
    "find_starts",
    "is_ragged",
    "make_batched_specs",
    "to_gymnasium",
    "with_finite_samples",
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


def with_finite_samples(spec: TensorSpec) -> TensorSpec:
    """Replace specs with infinite bounds by :class:`HalfBounded`, nested ones included."""
    if isinstance(spec, Composite):
        return Composite(
            {key: with_finite_samples(part) for key, part in spec.items()}, device=spec.device, shape=spec.shape
        )
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return spec
    return spec if all(bound.isfinite().all() for bound in spec.space) else _half_bounded(spec)


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


def _map_parts(space: Any, convert: Any) -> Any:
    """Convert the parts of a Dict or Tuple; return the same space if no part changes."""
    old = [*space.values()] if isinstance(space, spaces.Dict) else space.spaces
    new = [convert(part) for part in old]
    if all(map(operator.is_, new, old)):
        return space
    return spaces.Dict([*zip(space, new, strict=True)]) if isinstance(space, spaces.Dict) else spaces.Tuple(new)


def _merge_tuples(space: Any) -> Any:
    """Replace Tuples of discrete spaces of one shape by MultiDiscretes."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return space
    space = _map_parts(space, _merge_tuples)
    kinds = {(type(part), part.shape) for part in space.spaces} if isinstance(space, spaces.Tuple) else {}
    if len(kinds) != 1 or not issubclass(next(iter(kinds))[0], (spaces.Discrete, spaces.MultiDiscrete)):
        return space
    counts = [part.n if isinstance(part, spaces.Discrete) else part.nvec for part in space.spaces]
    return spaces.MultiDiscrete(counts, start=[part.start for part in space.spaces])


def _clip_space(space: Any, bound: float) -> Any:
    """Narrow continuous spaces to ``[-bound, bound]``; return others unchanged."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _map_parts(space, partial(_clip_space, bound=bound))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    low, high = np.clip(space.low, -bound, bound), np.clip(space.high, -bound, bound)
    return spaces.Box(low, high, space.shape, space.dtype.type)


class SingleSpaces:
    """Spaces of one sub-environment, for TorchRL's functions that make specs.

    :param env: the environment
    :param batch: its batch size
    :param clip: bound on the magnitude of continuous actions; None: unbounded
    :ivar is_batched: whether the spaces are those of the batch, because the environment has no others
    :raises InvalidArgumentError: If a space cannot be converted, or ``clip`` has no effect on the action space.
    """

    def __init__(self, env: Any, batch: torch.Size, clip: float | None) -> None:
        self.unwrapped = self
        names = ("observation_space", "action_space")
        self.observation_space, action_space = (to_gymnasium(find_attribute(env, f"single_{n}", n)) for n in names)
        has_single = any(find_attribute(env, f"single_{name}") is not None for name in names)
        self.is_batched = (
            bool(batch) and not has_single and _is_batched_space((self.observation_space, action_space), batch)
        )
        if not batch:  # gymnasium's batch of a Tuple is a tuple of batches
            self.observation_space, action_space = _merge_tuples(self.observation_space), _merge_tuples(action_space)
        self.action_space = action_space if clip is None else _clip_space(action_space, clip)
        if clip is not None and self.action_space is action_space:
            raise InvalidArgumentError(
                f"clip_actions={clip} has no effect, because the action space {action_space} has nothing continuous to "
                "clip. Leave it out"
            )
        reward_space = find_attribute(env, "reward_space")
        if reward_space is not None:
            self.reward_space = to_gymnasium(reward_space)


def _is_batched_space(space: Any, batch: torch.Size) -> bool:
    """Return whether the shapes of all parts of a space begin with the batch size."""
    if isinstance(space, (spaces.Dict, tuple)):
        return all(
            _is_batched_space(part, batch) for part in (space.values() if isinstance(space, spaces.Dict) else space)
        )
    return tuple(space.shape or ())[: len(batch)] == tuple(batch)


def find_starts(space: Any, *, of_batch: bool) -> Any:
    """Return a space's ``start``: a number, an array, or a dict of them; None if zero.

    :param of_batch: whether the space will be batched. A batched MultiDiscrete is a Box, which has no ``start``
    """
    if isinstance(space, spaces.Dict):
        parts = {key: find_starts(part, of_batch=of_batch) for key, part in space.spaces.items()}
        return parts if any(part is not None for part in parts.values()) else None
    kinds = (spaces.Discrete,) if of_batch else (spaces.Discrete, spaces.MultiDiscrete)
    start = space.start if isinstance(space, kinds) else 0
    return (np.array(start) if np.ndim(start) else int(start)) if np.any(start) else None
