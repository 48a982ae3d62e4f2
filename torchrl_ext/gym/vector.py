"""Vectorized environments: rows of observations, and the last ones of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, OneHot

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext._compat import built
from torchrl_ext.gym.io import compile_one_hot, compile_value

__all__ = [
    "assigned",
    "has_finite_horizon",
    "is_batch",
    "keep_when_freed",
    "leaves_of",
    "of_all_rows",
    "overwritten",
    "rows_of",
    "same_rows",
]

Entries = dict[str, Any]
Leaves = dict[str, Any]  # specs, in dicts that are nested as the observations are

_MAPPED_FROM, _MAPPED_TO = 128 << 10, 31 << 20


def has_finite_horizon(env: Any, asked: bool | None) -> bool:
    """Return whether time-outs are terminations: as asked for, else as Isaac Lab's configuration says.

    Source: ``is_finite_horizon`` of isaaclab.envs.ManagerBasedRLEnvCfg, https://github.com/isaac-sim/IsaacLab/pull/7502
    """
    if asked is not None:
        return asked
    return getattr(getattr(getattr(env, "unwrapped", env), "cfg", None), "is_finite_horizon", None) is True


def keep_when_freed(nbytes: int) -> None:
    """Let the C library keep blocks of this size when they are freed, rather than give them back at every step.

    glibc maps pages for a block above a threshold, and the page faults of 3 MB take longer than to fill them. The
    threshold rises to the largest such block that was freed, up to 32 MB: one that nobody touches will do.
    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, _MAPPED_TO)
    if size > _MAPPED_FROM:
        torch.empty(size, dtype=torch.uint8)


# -- rows of observations


def rows_of(final: Any, rows: list[int], count: int) -> Any:
    """Return the last observations of some rows in whatever form they come: a batch, an array a row, those rows alone.

    :param final: what the info holds
    :param rows: which sub-environments are done
    :param count: of all sub-environments
    :return: as a single observation is nested, with the rows stacked along the first axis
    :raises EnvironmentOutputError: a row that is done has none
    """
    if isinstance(final, dict):
        # gymnasium puts a mask "_key" beside each "key".
        masks = {f"_{key}" for key in final if _is_mask(final.get(f"_{key}"), count)}
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


def of_all_rows(result: tuple[Any, ...], mask: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return what a reset of some rows gave with all rows, if it gave those alone, as EnvPool does; others are zero.

    :param result: observations and infos, as arrays
    :param mask: (n,) booleans: the rows that were reset
    """
    observation, info = result
    leaf = observation
    while isinstance(leaf, dict) and leaf:
        leaf = next(iter(leaf.values()))
    count = int(mask.sum())
    if count == len(mask) or not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (count,):
        return result

    def scattered(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: scattered(value) for key, value in part.items()}
        if not isinstance(part, np.ndarray) or part.shape[:1] != (count,):
            return part
        full = np.zeros((len(mask), *part.shape[1:]), part.dtype)
        full[mask] = part
        return full

    return scattered(observation), scattered(info)


def _is_mask(part: Any, count: int) -> bool:
    return getattr(part, "dtype", None) in (np.bool_, torch.bool) and part.shape == (count,)


def _stacked(singles: list[Any]) -> Any:
    if isinstance(singles[0], dict):
        return {key: _stacked([single[key] for single in singles]) for key in singles[0]}
    if isinstance(singles[0], torch.Tensor):
        return torch.stack([single.detach() for single in singles])
    try:
        return np.array(singles)
    except ValueError as error:
        raise EnvironmentOutputError(f"final_obs holds observations of several shapes ({error})") from None


def is_batch(final: Any, count: int) -> bool:
    """Return whether last observations are tensors with a row for every sub-environment."""
    if isinstance(final, dict):
        return all(is_batch(part, count) for part in final.values())
    return isinstance(final, torch.Tensor) and final.shape[:1] == (count,)


def leaves_of(spec: Composite) -> Leaves:
    """Return the specs of a Composite in plain dicts, which are much faster to walk through."""
    return {key: leaves_of(part) if isinstance(part, Composite) else part for key, part in spec.items()}


def overwritten(
    leaves: Leaves, target: Any, mask: torch.Tensor, rows: torch.Tensor | None, values: Any, path: tuple[str, ...] = ()
) -> Entries:
    """Copy observations, and write others into some rows of the copies.

    :param leaves: of the specs of the observations
    :param target: the observations
    :param mask: (n,) booleans: which rows
    :param rows: the same as indices; None: not looked at, so that a GPU need not answer
    :param values: observations of all rows, or of those ``rows`` alone; None: lost, which makes them NaN, or zero
        where there is no NaN
    :raises EnvironmentOutputError: the values do not fit
    """
    result: Entries = {}
    for key, part in leaves.items():
        old, new, here = target[key], None if values is None else _entry(values, key, path), (*path, key)
        if isinstance(part, dict):
            result[key] = built(overwritten(part, old, mask, rows, new, here), old.batch_size, old.device)
            continue
        if new is None:
            new = torch.full((), float("nan") if old.is_floating_point() else 0, dtype=old.dtype, device=old.device)
            new = new.expand_as(old)
        if rows is None:
            wide = mask.view(-1, *([1] * (old.ndim - 1)))
            result[key] = torch.where(wide, _fitted(part, old, new, len(mask), here), old)
        else:
            if type(new) is torch.Tensor and new.shape == old.shape:
                new = new.index_select(0, rows)
            result[key] = old.index_copy(0, rows, _fitted(part, old, new, len(rows), here))
    return result


def _entry(values: Any, key: str, path: tuple[str, ...]) -> Any:
    if not isinstance(values, (dict, TensorDictBase)):
        raise EnvironmentOutputError(
            f"final_obs{' ' if path else ''}{'.'.join(path)} is of type {type(values).__name__}; expected a dict with "
            f"the key {key!r}"
        )
    keys = values.keys()
    if key not in keys and key == "observation" and "state" in keys:
        return values["state"]
    if key not in keys:
        raise EnvironmentOutputError(
            f"final_obs has no {'.'.join((*path, key))!r}, which the observations have; it holds {sorted(keys)}"
        )
    return values[key]


def _fitted(spec: Any, old: torch.Tensor, new: Any, count: int, path: tuple[str, ...]) -> torch.Tensor:
    shape = (count, *old.shape[1:])
    if type(new) is torch.Tensor and new.shape == shape and new.dtype is old.dtype and new.device == old.device:
        return new.detach()
    name = f"final_obs {'.'.join(path)}"
    # One-hot entries come as indices from environments, as they are from those that were read already.
    if isinstance(spec, OneHot) and tuple(getattr(new, "shape", ())) != shape:
        return compile_one_hot(spec, shape[:-1], name=name, device=old.device)(new)
    return compile_value(shape, old.dtype, name=name, device=old.device, copy=False)(new)


def assigned(target: torch.Tensor, rows: list[int], final: Any) -> torch.Tensor | None:
    """Do what :func:`overwritten` does with one leaf, and last observations one by one, in a third of the time.

    :return: None where it cannot
    """
    result = target.clone()
    view = result.numpy()
    for row in rows:
        single = final[row]
        if type(single) is not np.ndarray or single.shape != view.shape[1:] or single.dtype is not view.dtype:
            return None
        view[row] = single
    return result


def same_rows(leaves: Leaves, one: Any, other: Any, rows: torch.Tensor) -> bool:
    """Return whether rows of observations are the same; NaN equals NaN."""
    return all(
        same_rows(part, one[key], other[key], rows)
        if isinstance(part, dict)
        else torch.equal(*(data[key].index_select(0, rows).nan_to_num() for data in (one, other)))
        for key, part in leaves.items()
    )
