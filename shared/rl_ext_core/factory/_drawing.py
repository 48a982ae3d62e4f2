"""What drivers share: actions that they draw, and the plain data that they return."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["OfSpaces", "Spaces", "plain", "within"]


class Spaces:
    """Actions of gymnasium's spaces, and of those like them: drawn by copies, with generators of their own.

    :param rng: seeds them
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._copies: dict[str, Any] = {}

    def draw(self, name: str, space: Any, mask: Any = None) -> Any:
        """Draw from a space.

        :param name: of the space, the same whenever it is drawn from
        :param mask: of the actions that are allowed; None: all
        """
        if name not in self._copies:
            self._copies[name] = copy.deepcopy(space)
            self._copies[name].seed(int(self._rng.integers(2**31)))
        return self._copies[name].sample() if mask is None else self._copies[name].sample(np.asarray(mask, np.int8))


class OfSpaces:
    """What drivers have in common whose environments have such spaces, and take seeds.

    :param env: an environment
    :param rng: of the actions
    """

    seeded = True

    def __init__(self, env: Any, rng: np.random.Generator) -> None:
        self._env, self._spaces = env, Spaces(rng)


def within(rng: np.random.Generator, low: Any, high: Any, shape: Any, dtype: Any) -> Any:
    """Draw numbers between limits: evenly, or where one limit is infinite from a normal distribution, cut off.

    :param low: least numbers, of a shape that can be broadcast
    :param high: greatest ones, which may be drawn too
    """
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    if np.issubdtype(dtype, np.integer):
        return np.asarray(rng.integers(low, high, size=shape, endpoint=True), dtype)
    finite = np.isfinite(low) & np.isfinite(high)
    even = rng.uniform(np.where(finite, low, 0), np.where(finite, high, 1))
    return np.clip(np.where(finite, even, rng.standard_normal(shape)), low, high).astype(dtype)


def plain(value: Any) -> Any:
    """Copy into plain nested data: dicts, lists, tuples, arrays and tensors, which later steps do not write to."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping) or hasattr(value, "batch_size"):  # a TensorDict
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return np.array(value)
    return value
