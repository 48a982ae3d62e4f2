"""The options that the wrappers have and TorchRL's have not."""

from __future__ import annotations

from typing import Any

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["DEFAULTS", "checked"]

_VALUES = {
    "env_type": ("auto", "numpy", "torch"),
    "copy": (True, False, "auto"),
    "missing_final_obs": ("nan", "previous", "error"),
    "finite_horizon": (None, True, False),
}
DEFAULTS = {
    "env_type": "auto",
    "copy": True,
    "missing_final_obs": "nan",
    "clip_actions": None,
    "autoreset_mode": None,
    "finite_horizon": None,
}


def checked(options: dict[str, Any], convert_actions_to_numpy: bool | None) -> dict[str, Any]:
    """Check the options.

    :param options: as given
    :param convert_actions_to_numpy: TorchRL's switch: False hands over tensors
    :return: the options to go by
    :raises InvalidArgumentError: one has a value that it cannot have
    """
    for name, values in _VALUES.items():
        found = options[name]
        if not any(found is value or (isinstance(value, str) and found == value) for value in values):
            expected = ", ".join(map(repr, values))
            raise InvalidArgumentError(f"{name}={found!r} is none of {expected}. Write {name}={values[0]!r}")
    clip = options["clip_actions"]
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise InvalidArgumentError(f"clip_actions={clip!r} is not a positive number. Write clip_actions=1.0")
    if convert_actions_to_numpy is not None and options["env_type"] == "auto":
        # It tells what the environment takes, and nothing about what it returns.
        return {**options, "env_type": "numpy" if convert_actions_to_numpy else "torch", "returns_it": False}
    return {**options, "returns_it": True}
