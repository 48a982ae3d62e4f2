"""Specs of environments: from spaces, whoever's classes those are, with finite samples."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Composite, Stacked, TensorSpec, Unbounded
from torchrl.data.tensor_specs import BoundedContinuous
from torchrl.data.utils import torch_to_numpy_dtype_dict
from torchrl.envs.libs import gym as upstream

from rl_ext_core.errors import InvalidArgumentError

__all__ = [
    "HalfBounded",
    "SingleSpaces",
    "batched_specs",
    "check_parts",
    "count_of",
    "device_of",
    "finite",
    "has_space",
    "starts",
    "to_gymnasium",
]


_conversions = getattr(upstream, "_conversion_registry", None)


class _KeepsItsClass(type(BoundedContinuous)):  # type: ignore[misc]
    """Bounded's metaclass turns every instance into one of its two classes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        instance.__class__ = cls
        return instance


class HalfBounded(BoundedContinuous, metaclass=_KeepsItsClass):
    """A Box of which some bounds are infinite: random values are finite, as ``gymnasium.spaces.Box.sample`` draws them.

    Uniform between two bounds, exponential beyond one, normal where there is none. Source: gymnasium's ``Box``.
    """

    def rand(self, shape: Any = None) -> torch.Tensor:
        """Draw finite values within the bounds.

        :param shape: leading dimensions
        :return: (*shape, *self.shape) of the spec's dtype
        """
        low, high = self.space.low, self.space.high
        size = (*(shape or ()), *self.shape)
        above, below = low.isfinite(), high.isfinite()
        exponential = torch.empty(size, device=self.device, dtype=self.dtype).exponential_()
        values = torch.randn(size, device=self.device, dtype=self.dtype)
        values = torch.where(above & ~below, low + exponential, values)
        values = torch.where(below & ~above, high - exponential, values)
        uniform = torch.rand(size, device=self.device, dtype=self.dtype)
        both = above & below
        span = torch.where(both, high - low, torch.zeros_like(low))
        return torch.where(both, torch.where(both, low, torch.zeros_like(low)) + uniform * span, values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundedContinuous):
            return False
        mine, theirs = (spec.device if spec.device is None else torch.device(spec.device) for spec in (self, other))
        return (mine, self.shape, self.dtype) == (theirs, other.shape, other.dtype) and bool(self.space == other.space)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.stack and all(isinstance(spec, BoundedContinuous) for spec in args[0]):
            # TorchRL stacks specs of one class alone.
            args = ([_half_bounded(spec) for spec in args[0]], *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def to(self, dest: Any) -> HalfBounded:
        """Move to a device, or take another dtype.

        :param dest: device or dtype
        """
        moved = super().to(dest)
        return _half_bounded(moved)


def _half_bounded(spec: BoundedContinuous) -> HalfBounded:
    if isinstance(spec, HalfBounded):
        return spec
    return HalfBounded(spec.space.low, spec.space.high, spec.shape, device=spec.device, dtype=spec.dtype)


def to_gymnasium(space: Any) -> Any:
    """Take a space of any library for gymnasium's, by its attributes: ``spaces``, ``nvec``, ``n``, ``low``, ``high``.

    Spaces that TorchRL converts (``register_gym_spec_conversion``) stay as they are.

    :raises InvalidArgumentError: it has none of them
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _with_parts(space, to_gymnasium)
    if isinstance(space, spaces.MultiBinary) and not isinstance(space.n, (int, np.integer)):
        # TorchRL's conversion knows one axis, whose length is a number.
        shape = space.shape
        return spaces.MultiBinary(shape[0]) if len(shape) == 1 else spaces.Box(0, 1, shape, space.dtype.type)
    converted = space if _is_convertible(space) else _by_attributes(space)
    if converted is not None:
        return converted
    raise InvalidArgumentError(
        f"the space {space!r} of type {type(space).__name__} is none that is known here; expected one of gymnasium's, "
        "or one with the attributes low and high, n, nvec, or spaces. "
        "Write env.observation_space = gymnasium.spaces.Box(...), or teach TorchRL how to convert it by "
        "torchrl.envs.libs.gym.register_gym_spec_conversion"
    )


def _with_parts(space: Any, convert: Any) -> Any:
    """Convert the parts of a Dict or Tuple; the same space if none changes."""
    if isinstance(space, spaces.Dict):
        parts = {key: convert(part) for key, part in space.spaces.items()}
        return space if all(parts[key] is part for key, part in space.spaces.items()) else spaces.Dict([*parts.items()])
    several = [convert(part) for part in space.spaces]
    return space if all(map(operator.is_, several, space.spaces)) else spaces.Tuple(several)


def _merged(space: Any) -> Any:
    """Take Tuples of Discretes with different numbers of classes for MultiDiscretes, which TorchRL makes tensors of."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return space
    space = _with_parts(space, _merged)
    parts = (
        [part for part in space.spaces if isinstance(part, spaces.Discrete)] if isinstance(space, spaces.Tuple) else []
    )
    if len({part.n for part in parts}) < 2 or len(parts) < len(space.spaces):
        return space
    return spaces.MultiDiscrete([part.n for part in parts], start=[part.start for part in parts])


def check_parts(role: str, space: Any, spec: TensorSpec, *, categorical: bool) -> None:
    """Check that each leaf of a spec is one tensor.

    :param role: ``"observation"`` or ``"action"``
    :param categorical: whether choices are indices
    :raises InvalidArgumentError: If the space has parts of different shapes.
    """
    if not _is_ragged(space, spec, role):
        return
    convert = partial(upstream._gym_to_torchrl_spec_transform, categorical_action_encoding=True)
    fits = not categorical and not _is_ragged(space, convert(space), role)
    advice = (
        "categorical_action_encoding=True" if fits else "gymnasium.spaces.Dict in place of it, one key for each part"
    )
    text = " ".join(str(space).split())
    raise InvalidArgumentError(
        f"the {role} space {text} has parts that do not fit into one tensor; expected parts of one kind, shape and "
        f"number of classes. Write {advice}"
    )


def _is_ragged(space: Any, spec: TensorSpec, role: str) -> bool:
    if isinstance(space, spaces.Dict):
        names = {"observation": "state"} if "observation" not in space.spaces else {}
        return any(_is_ragged(space[names.get(key, key)], part, role) for key, part in spec.items())
    if isinstance(space, spaces.Tuple) and any(isinstance(part, spaces.Dict) for part in space.spaces):
        return True  # an observation of it is not a dict
    # Indices of one shape are read, and cannot be drawn.
    return isinstance(spec, Stacked) and (role == "action" or -1 in spec.shape or spec.shape != space.shape)


def _is_convertible(space: Any) -> bool:
    if _conversions is None:
        return isinstance(space, spaces.Space)
    try:
        return not isinstance(space, dict) and _conversions[type(space)] is not None
    except KeyError:
        return False


def _by_attributes(space: Any) -> Any:
    if isinstance(space, spaces.Space):
        return None
    parts = space if isinstance(space, dict) else getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return spaces.Dict({key: to_gymnasium(part) for key, part in parts.items()})
    if isinstance(parts, (list, tuple)):
        return spaces.Tuple([to_gymnasium(part) for part in parts])
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(_array(space.nvec))
    if hasattr(space, "low") and hasattr(space, "high"):
        low, high = _array(space.low), _array(space.high)
        shape = getattr(space, "shape", None)
        shape = low.shape if shape is None else tuple(shape)
        dtype = _numpy_dtype(getattr(space, "dtype", None), low)
        with np.errstate(over="ignore"):  # to infinity
            low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
        return spaces.Box(low, high, shape, dtype.type)
    if hasattr(space, "n"):
        return spaces.MultiBinary(space.n) if getattr(space, "shape", ()) else spaces.Discrete(int(space.n))
    return None


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _numpy_dtype(dtype: Any, low: np.ndarray[Any, Any]) -> Any:
    if isinstance(dtype, torch.dtype):
        return torch_to_numpy_dtype_dict.get(dtype, np.dtype(np.float32))
    if dtype is None:
        return low.dtype if low.dtype.kind in "fiub" and low.dtype != np.float64 else np.dtype(np.float32)
    return np.dtype(dtype)


def batched_specs(
    single: SingleSpaces, batch: torch.Size, key: str, device: torch.device | None, categorical: bool
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Make the specs of many sub-environments as TorchRL makes them from gymnasium's batched spaces.

    :param key: of the observation, where it is no dict
    :return: those of the observation, the action and the reward
    :raises InvalidArgumentError: a batch of what a space holds is no tensor
    """
    lead = () if single.is_batched else tuple(batch)
    observation = _batched(single.observation_space, batch, lead, device, categorical)
    if not isinstance(observation, Composite):
        observation = Composite({key: observation}, shape=batch, device=device)
    action = _batched(single.action_space, batch, lead, device, categorical)
    reward_space = getattr(single, "reward_space", None)
    if reward_space is None:
        return observation, action, Unbounded((*batch, 1), device=device)
    reward = upstream._gym_to_torchrl_spec_transform(reward_space, device=device)
    # Environments give the space of one reward, or of a batch of them.
    return observation, action, reward if reward.shape[:1] == batch else reward.expand(*batch, *reward.shape)


def _batched(
    space: Any, batch: torch.Size, lead: tuple[int, ...], device: torch.device | None, categorical: bool
) -> TensorSpec:
    """Convert a space.

    :param lead: the axes that it lacks
    """
    if isinstance(space, spaces.Dict):
        parts = space.spaces
        names = {"state": "observation"} if "state" in parts and "observation" not in parts else {}
        specs = {names.get(key, key): _batched(part, batch, lead, device, categorical) for key, part in parts.items()}
        return Composite(specs, shape=batch, device=device)
    if isinstance(space, (spaces.Tuple, spaces.Text, spaces.Sequence)):
        raise InvalidArgumentError(
            f"vectorised environments with a space like {space} are not supported; expected Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict of them. Write torchrl.envs.ParallelEnv, or a Dict for a Tuple"
        )
    convert = partial(upstream._gym_to_torchrl_spec_transform, device=device, categorical_action_encoding=categorical)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return convert(gymnasium.vector.utils.batch_space(space, *lead) if lead else space)
    single = convert(space)
    return single.expand(*lead, *single.shape)


def finite(spec: TensorSpec) -> TensorSpec:
    """Replace Boxes with some infinite bounds by such whose random values are finite."""
    if isinstance(spec, Composite):
        return Composite({key: finite(part) for key, part in spec.items()}, device=spec.device, shape=spec.shape)
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return spec
    low, high = spec.space.low, spec.space.high
    if low.isfinite().all() and high.isfinite().all():
        return spec
    return HalfBounded(low, high, spec.shape, device=spec.device, dtype=spec.dtype)


def _clipped(space: Any, bound: float) -> Any:
    """Narrow continuous actions to ``[-bound, bound]``; the same space where there are none."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _with_parts(space, partial(_clipped, bound=bound))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    low, high = np.clip(space.low, -bound, bound), np.clip(space.high, -bound, bound)
    return spaces.Box(low, high, space.shape, space.dtype.type)


class SingleSpaces:
    """The spaces of one environment or sub-environment; stands for it where TorchRL makes specs.

    Where a vectorised environment has spaces of its batch alone, they are those, and ``is_batched`` is set.
    """

    def __init__(self, env: Any, batch: torch.Size, clip: float | None) -> None:
        self.unwrapped = self
        names = ("observation_space", "action_space")
        self.observation_space, action_space = (to_gymnasium(_space(env, f"single_{name}", name)) for name in names)
        spaces_of_all = (self.observation_space, action_space)
        told = any(_space(env, f"single_{name}") is not None for name in names)
        self.is_batched = bool(batch) and not told and all(_leads_with(space, batch) for space in spaces_of_all)
        if not batch:  # gymnasium's batch of a Tuple is a tuple of batches
            self.observation_space, action_space = _merged(self.observation_space), _merged(action_space)
        self.action_space = action_space if clip is None else _clipped(action_space, clip)
        if clip is not None and self.action_space is action_space:
            raise InvalidArgumentError(
                f"clip_actions={clip} was given, and the action space {action_space} has nothing continuous to clip. "
                "Leave it out"
            )
        reward_space = _space(env, "reward_space")
        if reward_space is not None:
            self.reward_space = to_gymnasium(reward_space)


def _space(env: Any, *names: str) -> Any:
    """Return the first space of these names that an environment has, itself or under ``unwrapped``."""
    owners = (env, getattr(env, "unwrapped", env))
    return next(
        (space for name in names for owner in owners if (space := getattr(owner, name, None)) is not None), None
    )


def has_space(env: Any, name: str) -> bool:
    """Return whether an environment has a space, of one or of all sub-environments."""
    return _space(env, f"single_{name}", name) is not None


def _leads_with(space: Any, batch: torch.Size) -> bool:
    """Return whether all parts of a space begin with the axes of a batch."""
    if isinstance(space, spaces.Dict):
        return all(_leads_with(part, batch) for part in space.spaces.values())
    return tuple(getattr(space, "shape", None) or ())[: len(batch)] == tuple(batch)


def starts(space: Any, *, of_batch: bool) -> Any:
    """Return what the integers of a space count from: a number, an array, a dict of them; None where that is zero.

    :param of_batch: whether it is made one of a batch: of many MultiDiscrete, gymnasium makes a Box of the true values
    """
    if isinstance(space, spaces.Dict):
        parts = {key: starts(part, of_batch=of_batch) for key, part in space.spaces.items()}
        return parts if any(part is not None for part in parts.values()) else None
    if isinstance(space, spaces.Tuple):
        several = [starts(part, of_batch=of_batch) for part in space.spaces]
        known = [part for part in several if part is not None and not isinstance(part, dict)]
        return np.array([np.zeros_like(known[0]) if part is None else part for part in several]) if known else None
    kinds = (spaces.Discrete,) if of_batch else (spaces.Discrete, spaces.MultiDiscrete)
    start = getattr(space, "start", None) if isinstance(space, kinds) else None
    if start is None or not np.any(start):
        return None
    return np.array(start) if np.ndim(start) else int(start)


def count_of(env: Any) -> int | None:
    """Return the number of sub-environments of a vectorised environment."""
    count = getattr(env, "num_envs", None)
    return getattr(getattr(env, "unwrapped", None), "num_envs", None) if count is None else count


def device_of(env: Any) -> torch.device | None:
    """Find out where a torch environment lives. None for others: a NumPy environment has no device."""
    device = getattr(getattr(env, "unwrapped", env), "device", None)
    if isinstance(device, str) and hasattr(getattr(env, "unwrapped", env), "num_envs"):
        try:
            return torch.device(device)
        except RuntimeError:
            return None
    return device if isinstance(device, torch.device) else None
