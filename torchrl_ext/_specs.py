"""Specs of environments: from spaces, whoever's classes those are, with finite samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.data.tensor_specs import BoundedContinuous
from torchrl.data.utils import torch_to_numpy_dtype_dict
from torchrl.envs.libs import gym as upstream

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["HalfBounded", "SingleSpaces", "batched_specs", "device_of", "finite", "to_gymnasium"]


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

    def to(self, dest: Any) -> HalfBounded:
        """Move to a device, or take another dtype.

        :param dest: device or dtype
        """
        moved = super().to(dest)
        if isinstance(moved, HalfBounded):
            return moved
        return HalfBounded(moved.space.low, moved.space.high, moved.shape, device=moved.device, dtype=moved.dtype)


def to_gymnasium(space: Any) -> Any:
    """Take a space of any library for gymnasium's, by its attributes: ``spaces``, ``nvec``, ``n``, ``low``, ``high``.

    Spaces that TorchRL converts (``register_gym_spec_conversion``) stay as they are.

    :raises InvalidArgumentError: it has none of them
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            to_gymnasium(part)
        return space
    converted = space if _is_convertible(space) else _by_attributes(space)
    if converted is not None:
        return converted
    raise InvalidArgumentError(
        f"the space {space!r} of type {type(space).__name__} is none that is known here; expected one of gymnasium's, "
        "or one with the attributes low and high, n, nvec, or spaces. "
        "Write env.observation_space = gymnasium.spaces.Box(...)"
    )


def _is_convertible(space: Any) -> bool:
    try:
        return not isinstance(space, dict) and upstream._conversion_registry[type(space)] is not None
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
    observation = _batched(single.observation_space, batch, device, categorical)
    if not isinstance(observation, Composite):
        observation = Composite({key: observation}, shape=batch, device=device)
    action = _batched(single.action_space, batch, device, categorical)
    reward_space = getattr(single, "reward_space", None)
    if reward_space is None:
        return observation, action, Unbounded((*batch, 1), device=device)
    reward = upstream._gym_to_torchrl_spec_transform(reward_space, device=device)
    # Environments give the space of one reward, or of a batch of them.
    return observation, action, reward if reward.shape[:1] == batch else reward.expand(*batch, *reward.shape)


def _batched(space: Any, batch: torch.Size, device: torch.device | None, categorical: bool) -> TensorSpec:
    if isinstance(space, spaces.Dict):
        parts = space.spaces
        names = {"state": "observation"} if "state" in parts and "observation" not in parts else {}
        specs = {names.get(key, key): _batched(part, batch, device, categorical) for key, part in parts.items()}
        return Composite(specs, shape=batch, device=device)
    if isinstance(space, (spaces.Tuple, spaces.Text, spaces.Sequence)):
        raise InvalidArgumentError(
            f"vectorised environments with a space like {space} are not supported; expected Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict of them. Write torchrl.envs.ParallelEnv, or a Dict for a Tuple"
        )
    convert = partial(upstream._gym_to_torchrl_spec_transform, device=device, categorical_action_encoding=categorical)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return convert(gymnasium.vector.utils.batch_space(space, *batch))
    single = convert(space)
    return single.expand(*batch, *single.shape)


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
    """Narrow continuous actions to ``[-bound, bound]``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _clipped(part, bound) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_clipped(part, bound) for part in space.spaces])
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    low, high = np.clip(space.low, -bound, bound), np.clip(space.high, -bound, bound)
    return spaces.Box(low, high, space.shape, space.dtype.type)


class SingleSpaces:
    """The spaces of one environment or sub-environment; stands for it where TorchRL makes specs."""

    def __init__(self, env: Any, clip: float | None) -> None:
        self.unwrapped = self
        self.observation_space = to_gymnasium(_single(env, "observation_space"))
        action_space = to_gymnasium(_single(env, "action_space"))
        self.action_space = action_space if clip is None else _clipped(action_space, clip)
        reward_space = getattr(env, "reward_space", None)
        if reward_space is None:
            reward_space = getattr(getattr(env, "unwrapped", None), "reward_space", None)
        if reward_space is not None:
            self.reward_space = to_gymnasium(reward_space)


def _single(env: Any, name: str) -> Any:
    for owner in (env, getattr(env, "unwrapped", env)):
        space = getattr(owner, f"single_{name}", None)
        if space is not None:
            return space
    return getattr(env, name)


def device_of(env: Any) -> torch.device | None:
    """Find out where a torch environment lives. None for others: a NumPy environment has no device."""
    device = getattr(getattr(env, "unwrapped", env), "device", None)
    if isinstance(device, str) and hasattr(getattr(env, "unwrapped", env), "num_envs"):
        try:
            return torch.device(device)
        except RuntimeError:
            return None
    return device if isinstance(device, torch.device) else None
