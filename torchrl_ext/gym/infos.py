"""Infos: merging rows, and conversion to arrays that TorchRL's reader accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_ext_core._values import copy_output
from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector.array_frameworks import to_torch
from rl_ext_core.vector.stepper import infos_to_dict, object_array

__all__ = ["copy_info", "merge_infos", "numbers_for_reader"]

_NUMBERS = "biufc"  # kinds of NumPy's dtypes


def copy_info(info: Any) -> Any:
    """Copy the arrays and tensors of an info, because environments reuse them. Other objects are not copied.

    JAX arrays become tensors.
    """
    if isinstance(info, dict):
        return {key: copy_info(value) for key, value in info.items()}
    if isinstance(info, list):
        return [copy_info(part) for part in info]
    if isinstance(info, np.ndarray) and info.dtype == object and info.ndim == 1:
        return object_array([copy_info(part) for part in info])
    info = to_torch(info)
    return copy_output(info) if isinstance(info, (np.ndarray, torch.Tensor)) else info


# -- rows of infos


def merge_infos(info: Any, other: Any, rows: list[int], count: int) -> Any:
    """Replace rows of an info by those of another one.

    If the other info lacks a key, these rows become zero (None in arrays of objects), as in gymnasium. Values without
    one row per sub-environment are not replaced.

    :param info: a dict of batches, or a list with one info per sub-environment
    :param other: the other info, in the same form
    :param rows: indices of the sub-environments to replace
    :param count: number of sub-environments
    """
    if isinstance(info, list) and isinstance(other, list):
        return [other[row] or {} if row in rows else part for row, part in enumerate(info)]
    info, other = ({} if part is None else infos_to_dict(part) for part in (info, other))
    if not isinstance(info, dict) or not isinstance(other, dict):
        return other
    merged: dict[str, Any] = {}
    for key in dict.fromkeys((*info, *other)):
        old, new = info.get(key), other.get(key)
        if isinstance(old, dict) or isinstance(new, dict):
            old, new = (part if isinstance(part, dict) else {} for part in (old, new))
            merged[key] = merge_infos(old, new, rows, count)
        else:
            merged[key] = _replace_rows(old, new, rows, count) if key in info else new
    return merged


def _has_rows(value: Any, count: int) -> bool:
    """Return whether a value is an array or tensor with ``count`` rows."""
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.shape[:1] == (count,)


def _replace_rows(old: Any, new: Any, rows: list[int], count: int) -> Any:
    """Return a copy of a batch with some rows of another one; None stands for a missing value."""
    old, new = to_torch(old), to_torch(new)
    if not _has_rows(old, count):
        return new if _has_rows(new, count) else old
    if new is None:
        is_array = isinstance(old, np.ndarray)
        new = (
            np.full_like(old, None) if is_array and old.dtype == object else (np if is_array else torch).zeros_like(old)
        )
    values = _copy_in_common_dtype(old, new)
    if values is None:  # their dtypes or shapes differ too much
        values, new = (object_array(list(part) if _has_rows(part, count) else [part] * count) for part in (old, new))
    values[rows] = new[rows]
    return values


def _copy_in_common_dtype(old: Any, new: Any) -> Any:
    """Copy a batch in a dtype that holds both; None if dtypes or shapes conflict."""
    if type(old) is not type(new) or old.shape != new.shape:
        return None
    if isinstance(old, torch.Tensor):
        return old.to(torch.promote_types(old.dtype, new.dtype), copy=True)
    kinds = {old.dtype.kind, new.dtype.kind}
    return old.astype(np.result_type(old, new)) if len(kinds) == 1 or kinds <= set(_NUMBERS) else None


# -- values of infos


def numbers_for_reader(info: Any, reader: Any, batch_size: torch.Size) -> Any:
    """Convert the values that ``default_info_dict_reader`` reads to arrays or tensors.

    None counts as a missing value. Nested dicts are skipped, unless the reader names their keys.

    :param info: info of an environment, or a list of one per sub-environment
    :param reader: the reader; if its ``keys`` are None, it reads all keys
    :param batch_size: batch size of the environment
    :raises EnvironmentOutputError: If a value to read is not numeric, or not one per sub-environment.
    """
    info = infos_to_dict(info)
    if not isinstance(info, dict):
        return info
    keys, found = reader.keys, dict(info)
    if keys is None:  # TorchRL's reader cannot read nested infos, such as EnvPool's and Brax's
        found = {key: value for key, value in info.items() if not isinstance(value, dict)}
        keys = [key for key in found if not (reader.ignore_private and key.startswith("_"))]
    for key in keys:
        value = _as_numeric_array(info.get(key))
        if value is None:
            found.pop(key, None)
        elif not _is_readable(value, text=reader.keys is not None):
            text = " ".join(repr(info[key]).split())[:60]
            raise EnvironmentOutputError(
                f"info {key!r} is {text} of type {type(info[key]).__name__}; expected a number or an "
                f"array of numbers. {_registration_advice(info, batch_size)}"
            )
        elif tuple(value.shape[: len(batch_size)]) != tuple(batch_size):
            raise EnvironmentOutputError(
                f"info {key!r} has the shape {tuple(value.shape)}; expected {tuple(batch_size)} and more axes, one row "
                f"per sub-environment. {_registration_advice(info, batch_size)}"
            )
        else:
            found[key] = value if value is info[key] else _cast_to_spec(value, reader.info_spec, key)
    return found


def _is_readable(value: Any, *, text: bool) -> bool:
    """Return whether TorchRL's reader accepts a value.

    :param text: whether NumPy's texts and dates count too; the reader accepts them, but makes no spec for them
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "f" if hasattr(value, "dtype") else "O")
    return kind in _NUMBERS or (text and kind != "O")


def _cast_to_spec(value: np.ndarray[Any, Any], specs: Any, key: str) -> Any:
    """Cast to the dtype of a spec, because dtypes may differ between steps."""
    tensor = torch.from_numpy(value)
    spec = None if specs is None else specs.get(key, None)
    return tensor.to(spec.dtype) if spec is not None and torch.can_cast(tensor.dtype, spec.dtype) else tensor


def _as_numeric_array(value: Any) -> Any:
    """Convert numbers, lists and object arrays to arrays of numbers; None if all are None.

    Rows without a value become zero. Other values, including NumPy's numbers, are returned unchanged.
    """
    if isinstance(value, (bool, int, float, complex, list, tuple)) and not isinstance(value, np.generic):
        found = _try_numeric_array(value)
        return value if found is None else found
    if not isinstance(value, np.ndarray) or value.dtype != object:
        return value
    parts = value.tolist() if value.ndim else [value.item()]
    places = [place for place, part in enumerate(parts) if part is not None]
    present = _try_numeric_array([parts[place] for place in places])
    if not places or present is None:
        return value if places else None
    filled = np.zeros((len(parts), *present.shape[1:]), present.dtype)
    filled[places] = present
    return filled if value.ndim else np.array(filled[0])


def _try_numeric_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a value to an array of numbers; return None if that is not possible."""
    try:
        array = np.array(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.dtype.kind in _NUMBERS else None


def _registration_advice(info: dict[str, Any], batch_size: torch.Size) -> str:
    """Return a sentence that shows how to register the readable values, for an error."""
    specs: dict[str, str] = {}
    for key, value in info.items():
        array = _as_numeric_array(value)
        is_number = _is_readable(array, text=False)
        if is_number and array.shape[: len(batch_size)] == batch_size and not key.startswith("_") and len(specs) < 3:
            tensor = torch.as_tensor(array)
            specs[key] = f"{key!r}: Unbounded({tuple(tensor.shape[len(batch_size) :])}, dtype={tensor.dtype})"
    if not specs:
        return "Use env.set_info_dict_reader(reader) with a function reader(info, tensordict) that converts it"
    reader = f"default_info_dict_reader({[*specs]}, spec={{{', '.join(specs.values())}}})"
    return f"Name the keys to read: env.auto_register_info_dict(info_dict_reader={reader})"
