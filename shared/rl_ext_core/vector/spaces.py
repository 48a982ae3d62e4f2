"""Spaces, devices and other attributes of environments from any library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_ext_core.vector.array_frameworks import to_numpy


def find_attribute(env: Any, *names: str) -> Any:
    """Return the first attribute of an environment, or of ``env.unwrapped``, that is not None."""
    owners = (env, getattr(env, "unwrapped", env))
    values = (getattr(owner, name, None) for name in names for owner in owners)
    return next((value for value in values if value is not None), None)


def device_of(env: Any) -> Any:
    """Return the ``torch.device`` of a torch environment; None for other environments."""
    base, torch = getattr(env, "unwrapped", env), sys.modules.get("torch")
    device = getattr(base, "device", None)
    if torch is not None and isinstance(device, str) and hasattr(base, "num_envs"):
        try:
            return torch.device(device)
        except RuntimeError:
            return None
    return device if torch is not None and isinstance(device, torch.device) else None


def convert_space(space: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a space of another library to gymnasium's, by its attributes.

    :param space: space with the attributes ``spaces``, ``nvec``, ``low`` and ``high``, or ``n``; or a dict of spaces
    :param convert: function that converts the parts of a Dict or Tuple
    :return: gymnasium space; None if ``space`` has none of these attributes
    """
    parts = space if isinstance(space, dict) else getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return spaces.Dict([(key, convert(part)) for key, part in parts.items()])
    if isinstance(parts, list | tuple):
        return spaces.Tuple([convert(part) for part in parts])
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(to_numpy(space.nvec))
    if hasattr(space, "low") and hasattr(space, "high"):
        low, high = (np.asarray(to_numpy(bound)) for bound in (space.low, space.high))
        shape = low.shape if getattr(space, "shape", None) is None else tuple(space.shape)
        dtype = getattr(space, "dtype", None) or "float32"
        if not isinstance(dtype, type | np.dtype):  # a dtype of torch, or a name
            dtype = str(dtype).removeprefix("torch.").replace("bfloat16", "float32")
        with np.errstate(over="ignore"):  # bounds may overflow to infinity
            low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
        return spaces.Box(low, high, shape, np.dtype(dtype).type)
    if hasattr(space, "n"):
        return spaces.MultiBinary(space.n) if getattr(space, "shape", ()) else spaces.Discrete(int(space.n))
    return None
