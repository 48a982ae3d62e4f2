"""When vectorised environments reset themselves, and what was last before they did.

Source: gymnasium's ``AutoresetMode`` (https://farama.org/Vector-Autoreset-Mode). Environments in Isaac Lab's style
reset within the step as well, and say so nowhere.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError

__all__ = [
    "Autoreset",
    "final_observation",
    "find_mode",
    "has_finite_horizon",
    "is_maniskill",
    "is_one_each",
    "last_info",
    "layers",
    "merged_info",
    "rows_of",
    "without_final",
]

_FINAL = ("final_obs", "final_observation", "final_info")


class Autoreset(Enum):
    """When a sub-environment that is done resets itself; the values are gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


def find_mode(env: Any, asked: object, *, speaks_torch: bool) -> Autoreset:
    """Find the mode of a vectorised environment: as asked for, its attribute, its metadata.

    :raises InvalidArgumentError: no such mode
    """
    metadata = getattr(env, "metadata", None) or {}
    base = getattr(env, "unwrapped", env)
    attributes = (getattr(owner, "autoreset_mode", None) for owner in (env, base))
    for found in (asked, *attributes, metadata.get("autoreset_mode")):
        if found is not None:
            return _mode(found)
    # ManiSkill's wrapper, and mjlab's setting.
    said = [*(getattr(layer, "__dict__", {}).get("auto_reset") for layer in layers(env)), _setting(base, "auto_reset")]
    resets = next((value for value in said if isinstance(value, bool)), not is_maniskill(base))
    # Isaac Lab and those after its fashion; without one of gymnasium's modes no other convention is left.
    return Autoreset.SAME_STEP if speaks_torch and resets else Autoreset.DISABLED


def layers(env: Any) -> list[Any]:
    """Give an environment and the wrappers around it, the outermost first."""
    found = [env]
    while len(found) < 100 and getattr(found[-1], "__dict__", {}).get("env") is not None:
        found.append(found[-1].env)
    base = getattr(env, "unwrapped", env)
    return found if found[-1] is base else [*found, base]


def is_maniskill(base: Any) -> bool:
    """Tell whether an environment is ManiSkill's: reset by the option ``env_idx``, and never by itself."""
    return any(kind.__module__.startswith("mani_skill") for kind in type(base).__mro__)


def has_finite_horizon(env: Any, asked: bool | None) -> bool:
    """Tell whether time-outs are terminations: as asked for, else as Isaac Lab's configuration says.

    Source: ``is_finite_horizon`` of isaaclab.envs.ManagerBasedRLEnvCfg, https://github.com/isaac-sim/IsaacLab/pull/7502
    """
    return _setting(getattr(env, "unwrapped", env), "is_finite_horizon") is True if asked is None else asked


def _setting(base: Any, name: str) -> Any:
    return getattr(getattr(base, "cfg", None), name, None)


def _mode(found: object) -> Autoreset:
    text = str(getattr(found, "value", found))
    for mode in Autoreset:
        if text in (mode.value, mode.name):
            return mode
    raise InvalidArgumentError(
        f"autoreset_mode={found!r} is none of {', '.join(repr(mode.value) for mode in Autoreset)}. "
        'Write autoreset_mode="SameStep"'
    )


def final_observation(info: Any) -> Any:
    """Take the last observations out of a step's info. None where it holds none."""
    if isinstance(info, list):  # one info a sub-environment
        each = [final_observation(part) for part in info]
        return each if any(part is not None for part in each) else None
    if not isinstance(info, dict):
        return None
    found = info.get("final_obs")
    return info.get("final_observation") if found is None else found


def last_info(info: Any, rows: list[int], count: int) -> Any:
    """Give the info that belongs to the last observations: that of ``final_info`` where sub-environments were reset.

    :param info: of the step
    :param rows: which were reset
    :param count: of all sub-environments
    """
    final = info.get("final_info") if isinstance(info, dict) else None
    rest = without_final(info)
    return merged_info(rest, final, rows, count) if isinstance(final, dict) else rest


def without_final(info: Any) -> Any:
    """Leave out of an info what belongs to the last observations."""
    if not isinstance(info, dict):
        return info
    return {key: value for key, value in info.items() if key.removeprefix("_") not in _FINAL}


def merged_info(info: Any, other: Any, rows: list[int], count: int) -> Any:
    """Take some rows of an info from another one; the masks that gymnasium puts beside its entries are left out."""
    if not isinstance(info, dict) or not isinstance(other, dict):
        return other
    result = dict(info)
    for key, new in other.items():
        if key.startswith("_"):
            continue
        old = info.get(key)
        if isinstance(new, dict):
            result[key] = merged_info(old if isinstance(old, dict) else {}, new, rows, count)
        elif isinstance(new, (np.ndarray, torch.Tensor)) and new.shape[:1] == (count,):
            values = _copied(old, new)
            values[rows] = new[rows]
            result[key] = values
    return result


def _copied(old: Any, new: Any) -> Any:
    """Copy an array or tensor; where there is none that is like the new one, make one of zeros."""
    fits = type(old) is type(new) and old.shape == new.shape and old.dtype == new.dtype
    if isinstance(new, torch.Tensor):
        return old.clone() if fits else torch.zeros_like(new)
    return old.copy() if fits else np.zeros_like(new)


def is_one_each(final: Any) -> bool:
    """Tell whether last observations came one by one: an array of objects, or a list, with None between them."""
    return isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)


def rows_of(final: Any, rows: list[int], count: int) -> Any:
    """Give the last observations of some rows, whatever form they have: a batch, one array a row, or those rows alone.

    :param final: what the info holds
    :param rows: which sub-environments are done
    :param count: of all sub-environments
    :return: as a single observation is nested, with the rows stacked along the first axis
    :raises EnvironmentOutputError: a row that is done has none
    """
    if isinstance(final, dict):
        # gymnasium puts a mask "_key" beside each "key".
        masks = {f"_{key}" for key in final}
        return {key: rows_of(part, rows, count) for key, part in final.items() if key not in masks}
    length = len(final) if hasattr(final, "__len__") else None
    if length not in (count, len(rows)):
        raise EnvironmentOutputError(
            f"final_obs is of type {type(final).__name__} and holds {length} rows; expected {count}, or {len(rows)}, "
            "those that are done"
        )
    if isinstance(final, torch.Tensor) or (isinstance(final, np.ndarray) and final.dtype != object):
        return final if length != count else final[rows]
    singles = [final[row] for row in rows] if length == count else list(final)
    absent = [row for row, single in zip(rows, singles, strict=True) if single is None]
    if absent:
        raise EnvironmentOutputError(f"final_obs holds nothing for the sub-environments {absent}, which are done")
    return _stacked(singles)


def _stacked(singles: list[Any]) -> Any:
    if isinstance(singles[0], dict):
        return {key: _stacked([single[key] for single in singles]) for key in singles[0]}
    if isinstance(singles[0], torch.Tensor):
        return torch.stack([single.detach() for single in singles])
    try:
        return np.array(singles)
    except ValueError as error:
        raise EnvironmentOutputError(f"final_obs holds observations of several shapes ({error})") from None
