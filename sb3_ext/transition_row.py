"""Values that are stored with the observations of a transition, checked and converted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError

_TIMEOUT = "TimeLimit.truncated"


class TransitionRow:
    """
    One row of a store, for all environments: actions, rewards, dones and timeouts.

    Arguments are checked once per combination of shapes and dtypes, and compared with it afterwards.

    :param dtype: Dtype of a row, with these fields
    :ivar data: The row, an array with one element
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.data = np.zeros(1, dtype)
        self._fields = [self.data[name][0] for name in ("actions", "rewards", "dones")]
        self._timeouts: np.ndarray = self.data["timeouts"][0]
        self._no_timeouts = [False] * len(self._timeouts)
        self._form: Any = None  # shapes and dtypes that were checked
        self._targets = self._fields  # views of the fields with these shapes

    def set_values(self, action: Any, reward: Any, done: Any) -> None:
        """Set actions, rewards and dones."""
        try:
            form = action.shape, action.dtype, reward.shape, reward.dtype, done.shape, done.dtype
        except AttributeError:  # a list, for example
            form = None
        if form is None or form != self._form:
            action, reward, done = self._check(form, action, reward, done)
        actions, rewards, dones = self._targets
        actions[...] = action
        rewards[...] = reward
        dones[...] = done

    def set_timeouts(self, infos: list[dict[str, Any]]) -> None:
        """Set the timeouts that infos report."""
        if len(infos) != len(self._timeouts):
            raise InvalidArgumentError(
                f"infos has length {len(infos)}, expected {len(self._timeouts)}: one per environment; nothing was "
                "stored"
            )
        truncated = [info.get(_TIMEOUT, False) for info in infos]
        if truncated == self._no_timeouts:
            self._timeouts[...] = 0
        else:
            self._timeouts[...] = _as_numbers(_TIMEOUT, truncated, self._timeouts).reshape(self._timeouts.shape)

    def _check(self, form: Any, *values: Any) -> list[np.ndarray]:
        """Return actions, rewards and dones as arrays of numbers; use views of their shapes from now on."""
        pairs = zip(("action", "reward", "done"), values, self._fields, strict=True)
        arrays = [_as_numbers(*pair) for pair in pairs]
        self._targets = [field.reshape(array.shape) for field, array in zip(self._fields, arrays, strict=True)]
        is_numeric = all(
            array.dtype == getattr(value, "dtype", None) for array, value in zip(arrays, values, strict=True)
        )
        self._form = form if is_numeric else None
        return arrays


def _as_numbers(name: str, value: Any, field: np.ndarray) -> np.ndarray:
    """Return a value as an array of numbers that fills a field. Errors contain its name."""
    try:
        array = np.asarray(value)
        array = array if array.dtype.kind in "biuf" else array.astype(field.dtype)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error
    if array.size != math.prod(field.shape):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, expected {field.shape}: one row per environment; nothing was stored"
        )
    return array
