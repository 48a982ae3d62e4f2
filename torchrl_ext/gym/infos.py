"""Conversion of infos to arrays that TorchRL's reader accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector.array_frameworks import to_torch
from rl_ext_core.vector.stepper import infos_to_dict

__all__ = ["numbers_for_reader"]

_NUMBERS = "biuf"  # kinds of NumPy dtypes; TorchRL has no specs of complex numbers


def numbers_for_reader(info: Any, reader: Any, batch_size: torch.Size) -> Any:
    """Convert the values that ``default_info_dict_reader`` reads to arrays or tensors.

    None counts as a missing value. If the reader names no keys, other values are skipped: TorchRL's reader cannot read
    nested infos, such as EnvPool's and Brax's.

    :param info: info of an environment, or a list of one per sub-environment
    :param reader: the reader; if its ``keys`` are None, it reads all keys
    :param batch_size: batch size of the environment
    :raises EnvironmentOutputError: If a value that the reader names is not numeric, or not one per sub-environment.
    """
    info = infos_to_dict(info)
    if not isinstance(info, dict):
        return info
    found = {}
    for key in info if reader.keys is None else info.keys() & set(reader.keys):
        given = to_torch(info[key])
        value = _as_numeric_array(given)
        if value is None:
            continue
        is_numeric = isinstance(value, torch.Tensor) or getattr(getattr(value, "dtype", None), "kind", "O") in _NUMBERS
        if is_numeric and value.shape[: len(batch_size)] == batch_size:
            found[key] = value if value is given else _cast_to_spec(value, reader.info_spec, key)
        elif reader.keys is not None:
            text, kind = " ".join(repr(given).split())[:60], type(given).__name__
            problem = f"has the shape {tuple(value.shape)}" if is_numeric else f"is {text} of type {kind}"
            raise EnvironmentOutputError(
                f"info {key!r} {problem}; expected numbers of the shape {tuple(batch_size)}, which may have more axes. "
                "Use env.set_info_dict_reader(reader) with a function reader(info, tensordict) that converts it"
            )
    return found


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
    if not isinstance(value, np.ndarray) or value.dtype != object or not value.ndim:
        return value
    parts = value.tolist()
    places = [place for place, part in enumerate(parts) if part is not None]
    present = _try_numeric_array([parts[place] for place in places])
    if not places or present is None:
        return value if places else None
    filled = np.zeros((len(parts), *present.shape[1:]), present.dtype)
    filled[places] = present
    return filled


def _try_numeric_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a value to an array of numbers; return None if that is not possible."""
    try:
        array = np.array(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.dtype.kind in _NUMBERS else None
