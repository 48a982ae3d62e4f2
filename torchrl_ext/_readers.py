"""Reads observations into tensors of their specs, compiled once per leaf.

A leaf that comes as it did before (same type, dtype and shape) takes the short way; any other takes the long one,
which converts what can be converted without loss and says what is wrong with the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData
from torchrl.data import Composite, NonTensor, OneHot, TensorSpec
from torchrl.data.utils import torch_to_numpy_dtype_dict

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext._compat import built
from torchrl_ext._conversion import coerced, counted_from_zero, index_shape, one_hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Read = Callable[[Any], Any]

__all__ = ["compile_observation", "is_torch", "owned"]


def is_torch(observation: Any) -> bool:
    """Tell whether an environment speaks torch, by one of its observations."""
    if isinstance(observation, dict):
        return any(is_torch(part) for part in observation.values())
    if isinstance(observation, (tuple, list)):
        return any(is_torch(part) for part in observation)
    return isinstance(observation, torch.Tensor)


def owned(info: Any) -> Any:
    """Copy the arrays and tensors of an info, which environments write into again."""
    if isinstance(info, dict):
        return {key: owned(value) for key, value in info.items()}
    if isinstance(info, np.ndarray):
        return info.copy()
    return info.detach().clone() if isinstance(info, torch.Tensor) else info


def compile_observation(
    spec: Composite, sample: Any, *, key: str | None, device: torch.device | None, copy: bool, starts: Any = None
) -> Read:
    """Compile the way from an observation to a dict of tensors, nested as the spec is.

    :param spec: of the observation alone, with the batch
    :param sample: an observation: tells which library it speaks; None: the first one that is read
    :param key: of the one entry, where observations are no dicts; None where they are
    :param device: of the tensors
    :param copy: whether tensors may never share the environment's memory
    :param starts: what integers count from, where that is not zero: a dict, nested as the environment's observations
    """
    if starts is not None:
        plain = compile_observation(spec, sample, key=key, device=device, copy=copy)
        starts = starts if key is None else starts[key]
        return lambda observation: plain(counted_from_zero(observation, starts))
    if sample is None:
        return _later(spec, key, device, copy)
    if key is not None:
        read = _leaf(spec[key], sample, key, device, copy)
        return lambda observation: {key: read(observation)}
    return _mapping(spec, sample, (), device, copy)


def _later(spec: Composite, key: str | None, device: torch.device | None, copy: bool) -> Read:
    found: list[Read] = []

    def read(observation: Any) -> Any:
        if observation is None:
            raise EnvironmentOutputError(f"the observation is None; its space has {sorted(spec.keys())}")
        if not found:
            found.append(compile_observation(spec, observation, key=key, device=device, copy=copy))
        return found[0](observation)

    return read


def _mapping(spec: Composite, sample: Any, path: tuple[str, ...], device: torch.device | None, copy: bool) -> Read:
    if not isinstance(sample, dict):
        raise _no_dict(sample, spec, path)
    # TorchRL calls a lone "state" what others call it.
    names = {"observation": "state"} if "state" in sample and "observation" not in sample else {}
    pairs = []
    for name, part in spec.items():
        source = names.get(name, name)
        if source not in sample:
            raise _missing(source, path, sample)
        here = (*path, name)
        read = (
            _nested(part, sample[source], here, device, copy)
            if isinstance(part, Composite)
            else _leaf(part, sample[source], ".".join(here), device, copy)
        )
        pairs.append((name, source, read))

    def read_all(observation: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {name: read(observation[source]) for name, source, read in pairs}
        except (KeyError, IndexError, TypeError):
            if not isinstance(observation, dict):
                raise _no_dict(observation, spec, path) from None
            for _, source, _ in pairs:
                if source not in observation:
                    raise _missing(source, path, observation) from None
            raise

    return read_all


def _nested(spec: Composite, sample: Any, path: tuple[str, ...], device: torch.device | None, copy: bool) -> Read:
    read, batch_size = _mapping(spec, sample, path, device, copy), spec.batch_size
    return lambda observation: built(read(observation), batch_size, device)


def _no_dict(found: Any, spec: Composite, path: tuple[str, ...]) -> EnvironmentOutputError:
    return EnvironmentOutputError(
        f"observation{_at(path)} is of type {type(found).__name__}; its space is a Dict of {sorted(spec.keys())}"
    )


def _missing(key: str, path: tuple[str, ...], found: Mapping[str, Any]) -> EnvironmentOutputError:
    return EnvironmentOutputError(
        f"observation{_at((*path, key))} is missing: the environment returned {sorted(map(str, found))}"
    )


def _at(path: tuple[str, ...]) -> str:
    return f" {'.'.join(path)!r}" if path else ""


def _leaf(spec: TensorSpec, sample: Any, name: str, device: torch.device | None, copy: bool) -> Read:
    if isinstance(spec, NonTensor):
        return partial(NonTensorData, device=device)
    if isinstance(spec, OneHot):
        indices = index_shape(spec)
        return lambda value: one_hot(value, spec, indices, name=name, device=device)
    shape, dtype = tuple(spec.shape), spec.dtype

    def coerce(value: Any) -> torch.Tensor:
        return coerced(value, shape, dtype, name=name, device=device)

    if isinstance(sample, torch.Tensor):
        return _torch_leaf(torch.Size(shape), dtype, device, copy, coerce)
    return _numpy_leaf(shape, dtype, device, copy, coerce)


def _numpy_leaf(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, copy: bool, coerce: Read
) -> Read:
    wanted, from_numpy, array = torch_to_numpy_dtype_dict.get(dtype), torch.from_numpy, np.ndarray
    moves = device is not None and device.type != "cpu"

    def read(value: Any) -> torch.Tensor:
        if type(value) is not array or value.dtype is not wanted or value.shape != shape:
            return coerce(value)
        if copy:
            value = value.copy()
        elif not value.flags.writeable or min(value.strides, default=0) < 0:
            return coerce(value)  # torch takes neither
        tensor = from_numpy(value)
        return tensor.to(device) if moves else tensor

    return read


def _torch_leaf(shape: torch.Size, dtype: torch.dtype, device: torch.device | None, copy: bool, coerce: Read) -> Read:
    def read(value: Any) -> torch.Tensor:
        if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
            return coerce(value)
        if device is not None and value.device != device:
            return value.detach().to(device)
        return value.detach().clone() if copy else value.detach()

    return read
