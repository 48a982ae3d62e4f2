"""Values that are stored with the observations of a transition, checked and converted."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError

_TIMEOUT = "TimeLimit.truncated"


class TransitionRow:
    """
    One row of a store, for all environments: actions, rewards, dones and timeouts.

    :param dtype: Dtype of a row, with these fields
    :ivar data: The row, an array with one element
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.data = np.zeros(1, dtype)
        names = ("actions", "rewards", "dones", "timeouts")
        self._actions, self._rewards, self._dones, self._timeouts = (self.data[name][0] for name in names)
        self._no_timeouts = [False] * len(self._timeouts)

    def set_values(self, action: Any, reward: Any, done: Any) -> None:
        """Set actions, rewards and dones."""
        _assign("action", action, self._actions)
        _assign("reward", reward, self._rewards)
        _assign("done", done, self._dones)

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
            _assign(_TIMEOUT, truncated, self._timeouts)


def _assign(name: str, value: Any, field: np.ndarray) -> None:
    """Assign a value to a field, whatever axes it has. Errors contain its name."""
    try:
        array = value
        if type(value) is not np.ndarray or value.shape != field.shape:
            array = np.asarray(value)
            if array.size != field.size:
                raise InvalidArgumentError(
                    f"{name} has shape {array.shape}, expected {field.shape}: one row per environment; nothing was "
                    "stored"
                )
            array = array.reshape(field.shape)
        field[...] = array
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error
