"""Conversions between an environment's values and tensors, compiled from its specs.

Environments reuse their arrays, and edit the actions that they receive. Therefore, results do not share memory with
them unless the caller requests it. Values of the spec's type, dtype and shape are converted by a short path. Other
values are converted if nothing is lost, and are refused otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData
from torchrl.data import Categorical, Composite, MultiCategorical, MultiOneHot, NonTensor, OneHot, TensorSpec
from torchrl.data.utils import torch_to_numpy_dtype_dict

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector.array_frameworks import to_torch
from torchrl_ext._compat import new_tensordict

__all__ = [
    "compile_action",
    "compile_flags",
    "compile_observation",
    "compile_reward",
    "compile_value",
    "zero_flags",
]

Convert = Callable[[Any], Any]
Flags = tuple[torch.Tensor, ...]

# -- one value


def compile_value(
    shape: tuple[int, ...], dtype: torch.dtype, *, name: str, device: torch.device | None, copy: bool = True
) -> Convert:
    """Compile the conversion of arrays, numbers and lists to tensors of a shape and dtype.

    :param shape: shape of the tensor; values may have more or fewer axes of length one, and -1 is any length
    :param name: name of the entry in messages
    :param device: device of the tensor; None: device of the value
    :param copy: whether the tensor must not share memory with the value
    :return: function that raises :class:`EnvironmentOutputError` if the value does not fit
    """
    array, tensor, from_numpy, wanted = np.ndarray, torch.Tensor, torch.from_numpy, torch_to_numpy_dtype_dict.get(dtype)
    moves = device is not None and device.type != "cpu"
    castable = "fiub" if dtype.is_floating_point and wanted is not None else ""
    tail = shape[1:] if shape[:1] == (-1,) else None

    def convert(value: Any) -> torch.Tensor:
        """Convert a value to a tensor; raise an error if it does not fit."""
        fits = type(value) is array and (value.shape == shape or value.shape[1:] == tail)
        if fits and (value.dtype is wanted or value.dtype.kind in castable):
            if value.dtype is not wanted:
                value = value.astype(wanted, order="C")
            # torch accepts neither read-only arrays nor negative strides.
            elif copy or not value.flags.writeable or min(value.strides, default=0) < 0:
                value = value.copy()
            return from_numpy(value).to(device) if moves else from_numpy(value)
        if type(value) is tensor and value.dtype is dtype and (value.shape == shape or value.shape[1:] == tail):
            if device is not None and value.device != device:
                return value.detach().to(device)
            return value.detach().clone() if copy else value.detach()
        found = _tensor(value, shape, dtype, name)
        if found.dtype is not dtype and _loses_information(found, dtype):
            raise EnvironmentOutputError(
                f"{name!r} has the dtype {found.dtype}, which loses information as {dtype}, the dtype of its space. "
                "Use a space with the dtype that the environment returns"
            )
        fitting = _adjust_singleton_axes(found, shape)
        if fitting is None:
            hint = " (the batch axis is lost)" if tuple(found.shape) == shape[1:] else ""
            advice = ""
            if tuple(found.shape[1:]) == shape:
                advice = f". If these are {len(found)} environments, write env.num_envs = {len(found)} first"
            expected = shape if tail is None else (*found.shape[:1], *tail)
            raise EnvironmentOutputError(
                f"{name!r} has the shape {(*found.shape,)}{hint}; its space has {expected}{advice}"
            )
        shares = hasattr(value, "__dlpack__") and not isinstance(value, array)
        return fitting.to(device=device, dtype=dtype, copy=copy and shares)

    return convert


def _tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert a value to a tensor of any dtype and shape.

    Only tensors and arrays on devices share its memory.
    """
    value = to_torch(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return torch.stack([torch.as_tensor(part).detach() for part in value])
        array = np.array(value, order="C")
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"a dict with the keys {[*value]}" if isinstance(value, Mapping) else f"of type {type(value).__name__}"
        raise EnvironmentOutputError(
            f"{name!r} is {found}, which makes no tensor ({error}); its space has the shape {tuple(shape)} of {dtype}. "
            "Return an array of this shape, or write the space that the environment has"
        ) from None


def _adjust_singleton_axes(found: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Add or remove axes of length one to match a shape; return None if that fails."""
    if len(found.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, found.shape, strict=True)):
        return found
    return found.reshape(shape) if [n for n in found.shape if n != 1] == [n for n in shape if n != 1] else None


def _loses_information(found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast loses fractions, signs, or the upper digits of integers.

    Precision does not count.

    Values on a GPU are not read, because the step would wait for them. Every cast that may lose something counts.
    """
    is_legal = torch.can_cast(found.dtype, dtype)
    if is_legal and (dtype.is_floating_point or dtype.is_complex or found.dtype is torch.bool):
        return False
    if is_legal:
        ours, theirs = torch.iinfo(dtype), torch.iinfo(found.dtype)
        if ours.min <= theirs.min and theirs.max <= ours.max:
            return False
    return found.is_complex() or found.device.type != "cpu" or not torch.equal(found.to(dtype).double(), found.double())


def _compile_one_hot(spec: OneHot, shape: tuple[int, ...], *, name: str, device: torch.device | None) -> Convert:
    """Compile the conversion of indices to one-hot vectors.

    :param spec: spec of the vectors
    :param shape: shape of the indices
    :param name: name of the entry in messages
    :param device: device of the vectors
    :return: function that raises :class:`EnvironmentOutputError` if an index is out of range
    """
    read, encode = compile_value(shape, torch.int64, name=name, device=device), torch.nn.functional.one_hot
    counts = [int(n) for n in spec.nvec] if isinstance(spec, MultiOneHot) else spec.space.n

    def convert(value: Any) -> torch.Tensor:
        """Convert indices to one-hot vectors; raise an error if one is too large."""
        index = read(value)
        try:
            if isinstance(counts, list):
                return torch.cat([encode(index[..., place], n) for place, n in enumerate(counts)], -1).to(spec.dtype)
            return encode(index, counts).to(spec.dtype)
        except RuntimeError:
            raise EnvironmentOutputError(
                f"{name!r} is {index.tolist()}, which is not below the number of classes of its space, {counts}, or "
                "negative"
            ) from None

    return convert


def _index_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a spec, or of the indices that a one-hot spec encodes."""
    if not isinstance(spec, OneHot):
        return tuple(spec.shape)
    return (*spec.shape[:-1], len(spec.nvec)) if isinstance(spec, MultiOneHot) else tuple(spec.shape[:-1])


def _add_start(values: Any, start: Any) -> Any:
    """Add a space's ``start`` to integers, because TorchRL's specs count from zero."""
    if isinstance(values, torch.Tensor):
        return values + torch.as_tensor(start, dtype=values.dtype, device=values.device)
    return values + start


def _subtract_start(values: Any, start: Any) -> Any:
    """Subtract a space's ``start``, a number or an array, from an environment's integers."""
    if isinstance(values, torch.Tensor):
        return values if values.is_floating_point() else _add_start(values, -np.asarray(start))
    array = np.asarray(values)
    return array.astype(np.int64) - start if array.dtype.kind in "iu" else values


# -- actions


def compile_action(
    spec: TensorSpec,
    *,
    space: Any,
    env_type: str,
    batch_size: torch.Size,
    clip: float | None,
    device: torch.device | None,
    start: Any = None,
    path: tuple[str, ...] = (),
) -> Convert:
    """Compile the conversion of an action tensor, or TensorDict, to the environment's action.

    :param spec: spec of the action
    :param space: gymnasium space of one sub-environment's action
    :param env_type: ``"numpy"``, ``"torch"`` or ``"jax"``
    :param batch_size: batch size of the environment
    :param clip: bound on the magnitude of continuous actions; None: unbounded
    :param device: device of a torch environment's actions; None: device of the action
    :param start: ``start`` of the space's integers: a number, an array, or a dict of them; None: zero
    :param path: keys of the Dicts that contain the action; in Dicts, single integers become arrays, as in TorchRL
    :return: function that raises :class:`InvalidArgumentError` if an action has another shape
    :raises InvalidArgumentError: If the spec has another number of choices than the space.
    """
    if isinstance(spec, Composite):
        compile_part = partial(compile_action, env_type=env_type, batch_size=batch_size, clip=clip, device=device)
        spaces, starts = getattr(space, "spaces", {}), start or {}
        parts: dict[str, tuple[str, Convert]] = {}
        for key, part in spec.items():
            name = _key_in_env(key, spaces)
            parts[name] = key, compile_part(part, space=spaces.get(name), start=starts.get(name), path=(*path, key))
        return lambda action: {name: convert(action[key]) for name, (key, convert) in parts.items()}
    if not isinstance(spec.zero(), torch.Tensor):
        return lambda action: getattr(action, "data", action)  # text, which cannot be edited in place
    shape, nvec = spec.shape, _nvec_of_choice(spec, space, batch_size)
    if nvec is not None:
        start = space.start if np.any(getattr(space, "start", 0)) else None
    is_array = bool(batch_size) or bool(path) or hasattr(space, "nvec")
    decode = _compile_decoder(spec, env_type, is_array, clip)
    library: Any = np if env_type == "numpy" else torch

    def convert(action: Any) -> Any:
        """Convert an action tensor to the environment's action."""
        if action.shape != shape:
            action = _reshape_action(action, spec, path)
        value = decode(action)
        if nvec is not None:
            value = library.stack(library.unravel_index(value, nvec), -1)
            value = value.astype(space.dtype) if library is np else value
        if start is not None:
            value = _add_start(value, start)
        return value if device is None or library is np else value.to(device)

    return convert if env_type != "jax" else lambda action: _jax_array(convert(action), spec.dtype)


def _reshape_action(action: torch.Tensor, spec: TensorSpec, path: tuple[str, ...]) -> torch.Tensor:
    """Fit an action to its spec by axes of length one; raise an error if that fails."""
    fitting = _adjust_singleton_axes(action, spec.shape)
    if fitting is not None:
        return fitting
    advice = "categorical_action_encoding=True for indices" if isinstance(spec, OneHot) else "an action of this shape"
    raise InvalidArgumentError(
        f"the action{_quoted_path(path)} has the shape {tuple(action.shape)}; expected {tuple(spec.shape)}, the shape "
        f"of its {type(spec).__name__} spec. Use {advice}"
    )


def _is_one_choice(spec: TensorSpec) -> bool:
    """Return whether an action is one choice, not several at once."""
    return isinstance(spec, (OneHot, Categorical)) and not isinstance(spec, (MultiOneHot, MultiCategorical))


def _nvec_of_choice(spec: TensorSpec, space: Any, batch_size: torch.Size) -> tuple[int, ...] | None:
    """Return ``nvec`` of a MultiDiscrete space whose spec is one choice, else None.

    TorchRL makes such a spec if there is an ``action_mask`` with one entry per combination
    (https://github.com/pytorch/rl/pull/3342).

    :raises InvalidArgumentError: If there are more or fewer choices than combinations.
    """
    nvec = getattr(space, "nvec", None)
    if nvec is None or nvec.ndim != 1 or not _is_one_choice(spec) or _index_shape(spec) != tuple(batch_size):
        return None
    count = int(np.prod(nvec))
    if spec.space.n != count:
        raise InvalidArgumentError(
            f"the action spec has {spec.space.n} choices; expected {count}, one for every combination of {space}. "
            f"Use env.action_spec = Categorical({count}, shape=env.batch_size)"
        )
    return tuple(map(int, nvec))


def _compile_decoder(spec: TensorSpec, env_type: str, is_array: bool, clip: float | None) -> Convert:
    """Compile the conversion of one-hot vectors to indices, and of other actions to copies.

    :param is_array: whether a single index becomes an array, and not an integer
    """
    decode: Convert
    if isinstance(spec, MultiOneHot):
        decode = partial(spec.to_categorical, safe=False)
    elif isinstance(spec, OneHot):
        decode = _one_hot_indices if env_type == "numpy" else lambda action: action.long().argmax(-1)
    elif clip is not None and spec.dtype.is_floating_point:
        decode = partial(torch.clamp, min=-clip, max=clip)
    else:
        decode = torch.clone
    if env_type != "numpy":
        return lambda action: decode(action.detach())
    if not _is_one_choice(spec) or is_array or np.prod(_index_shape(spec)) != 1:
        return lambda action: np.asarray(decode(action.detach().cpu()))
    if isinstance(spec, OneHot) and spec.ndim == 1 and not spec.dtype.is_floating_point:
        return _one_hot_index
    return lambda action: int(decode(action.detach().cpu()).item())  # environments use it as an index


def _one_hot_indices(action: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the indices of one-hot vectors, three times as fast as torch."""
    values = action.numpy()
    # TorchRL's argmax casts to integers first.
    return (values.astype(np.int64) if values.dtype.kind == "f" else values).argmax(-1)


def _one_hot_index(action: torch.Tensor) -> int:
    """Return the index of one one-hot vector, three times as fast as NumPy."""
    values = action.tolist()
    return values.index(1) if 1 in values else int(_one_hot_indices(action.cpu()))  # as TorchRL for other vectors


def _jax_array(action: torch.Tensor, dtype: torch.dtype) -> Any:
    """Convert a tensor that no one else uses to a JAX array on JAX's default device.

    :param dtype: dtype of the array if the action contains floats
    """
    jax: Any = sys.modules["jax"]  # the environment has imported it
    wanted = dtype if action.is_floating_point() else action.dtype
    if not jax.config.jax_enable_x64:
        wanted = {torch.int64: torch.int32, torch.float64: torch.float32}.get(wanted, wanted)
    array = jax.dlpack.from_dlpack(action.to(wanted).contiguous())
    moves = action.device.type == "cpu" and jax.default_backend() != "cpu"
    return jax.device_put(array, jax.devices()[0]) if moves else array


# -- observations


def compile_observation(
    spec: Composite,
    *,
    key: str | None,
    device: torch.device | None,
    copy: bool,
    starts: Any = None,
    is_final: bool = False,
) -> Convert:
    """Compile the conversion of an observation to a dict of tensors, nested like the spec.

    :param spec: spec of the observations
    :param key: key of the observation, if it is not a dict; else None
    :param device: device of the tensors; None: device of the observation
    :param copy: whether tensors must not share the environment's memory
    :param starts: ``start`` of the spaces' integers: a number, an array, or a dict of them; None: zero
    :param is_final: whether these are final observations, which may have any number of rows
    """
    options: dict[str, Any] = {"device": device, "copy": copy, "is_final": is_final}
    if key is None:
        return _compile_part(spec, (), starts, **options)
    read = _compile_part(spec[key], (key,), starts, **options)
    return lambda observation: {key: read(observation)}


def _compile_part(
    spec: TensorSpec, path: tuple[str, ...], start: Any, *, device: torch.device | None, copy: bool, is_final: bool
) -> Convert:
    """Compile the conversion of an entry to a tensor or TensorDict (a dict at the top)."""
    if isinstance(spec, NonTensor):
        return partial(NonTensorData, device=device)
    if not isinstance(spec, Composite):
        shape, name = _index_shape(spec), ".".join(path)
        if is_final:
            shape, name = (-1, *shape[1:]), f"final_obs {name}"
        if isinstance(spec, OneHot):
            read = _compile_one_hot(spec, shape, name=name, device=device)
        else:
            read = compile_value(shape, spec.dtype, name=name, device=device, copy=copy)
        return read if start is None else lambda value: read(_subtract_start(value, start))
    compile_part, starts = partial(_compile_part, device=device, copy=copy, is_final=is_final), start or {}
    readers = [
        (name, compile_part(part, (*path, name), starts.get(_key_in_env(name, starts)))) for name, part in spec.items()
    ]
    batch_size, kind = spec.batch_size, "final_obs" if is_final else "observation"

    def read_all(observation: Any) -> Any:
        """Convert all entries of a Dict observation."""
        if not isinstance(observation, dict):
            raise EnvironmentOutputError(
                f"{kind}{_quoted_path(path)} is of type {type(observation).__name__}; its space is a Dict of "
                f"{sorted(spec.keys())}"
            )
        try:
            found = {name: read(observation[name]) for name, read in readers}
        except KeyError:
            missing = next(name for name, _ in readers if name not in observation)
            if (key := _key_in_env(missing, observation)) != missing:
                return read_all({**observation, missing: observation[key]})
            raise EnvironmentOutputError(
                f"{kind}{_quoted_path((*path, missing))} is missing: the environment returned "
                f"{sorted(map(str, observation))}"
            ) from None
        return new_tensordict(found, batch_size, device) if path and not is_final else found

    return read_all


def _key_in_env(key: str, keys: Container[Any]) -> str:
    """Return the environment's key for the key of a spec, because TorchRL renames a lone "state" to "observation"."""
    return "state" if key == "observation" and key not in keys and "state" in keys else key


def _quoted_path(path: tuple[str, ...]) -> str:
    """Return a path as quoted text for an error, empty at the top."""
    return f" {'.'.join(path)!r}" if path else ""


# -- rewards and flags


def compile_reward(spec: TensorSpec, *, device: torch.device | None) -> Convert:
    """Compile the conversion of one reward, or one per sub-environment, to a tensor."""
    read = _compile_column(tuple(spec.shape), spec.dtype, "reward", device)
    if spec.shape != (1,) or not spec.dtype.is_floating_point:  # a number may lose its fraction
        return read
    moves, scalars = device is not None and device.type != "cpu", (float, int, np.floating)
    array, from_numpy, wanted = np.array, torch.from_numpy, torch_to_numpy_dtype_dict[spec.dtype]

    def read_scalar(value: Any) -> Any:
        """Convert a single number without the checks that arrays need."""
        if not isinstance(value, scalars):
            return read(value)
        # NumPy makes small arrays twice as fast as torch.
        tensor = from_numpy(array((value,), wanted))
        return tensor.to(device) if moves else tensor

    return read_scalar


def _compile_column(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device | None) -> Convert:
    """Compile the conversion of a value with or without a trailing axis of length one."""
    convert, flat = compile_value(shape, dtype, name=name, device=device), shape[:-1]
    if shape[-1:] != (1,):
        return convert
    return lambda value: convert(value.reshape(shape) if getattr(value, "shape", None) == flat else value)


def zero_flags(shape: tuple[int, ...], device: torch.device | None) -> Flags:
    """Make the flags done, terminated and truncated, all False.

    :param shape: shape of each flag, with its trailing axis
    """
    zeros, from_numpy = np.zeros, torch.from_numpy
    if device is None or device.type == "cpu":  # twice as fast as torch.zeros
        return from_numpy(zeros(shape, "?")), from_numpy(zeros(shape, "?")), from_numpy(zeros(shape, "?"))
    return torch.zeros((3, *shape), dtype=torch.bool, device=device).unbind(0)


def compile_flags(
    batch_size: torch.Size, *, device: torch.device | None, finite_horizon: bool
) -> Callable[[Any, Any], tuple[Flags, bool | None]]:
    """Compile the conversion of ``terminated`` and ``truncated`` to TorchRL's three flags.

    :param batch_size: batch size of the environment
    :param device: device of the tensors
    :param finite_horizon: whether time-outs are terminations
    :return: function that returns the flags, and whether a single environment is done (None for a batch)
    """
    shape = (*batch_size, 1)
    read_end, read_cut = (_compile_column(shape, torch.bool, name, device) for name in ("terminated", "truncated"))

    def read(terminated: Any, truncated: Any) -> tuple[Flags, bool]:
        """Convert two booleans to flags; return also whether the episode has ended."""
        try:
            end, cut = bool(terminated), bool(truncated)
            if terminated is None or truncated is None:
                raise TypeError
        except (TypeError, ValueError, RuntimeError):
            raise EnvironmentOutputError(
                f"'terminated' and 'truncated' are {terminated!r} and {truncated!r}; expected one boolean each"
            ) from None
        if not (end or cut):
            return zero_flags(shape, device), False
        flags = ((True,), (end or finite_horizon,), (cut and not finite_horizon,))
        return torch.tensor(flags, device=device).unbind(0), True

    def read_batch(terminated: Any, truncated: Any) -> tuple[Flags, None]:
        """Convert two arrays of booleans to flags."""
        end, cut = read_end(terminated), read_cut(truncated)
        done = end | cut
        return (done, done.clone(), torch.zeros_like(done)) if finite_horizon else (done, end, cut), None

    return read_batch if batch_size else read
