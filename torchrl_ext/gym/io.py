"""Conversions, each compiled once from its spec: actions for the environment; observations, rewards and flags from it.

Environments write into their arrays again, and edit the actions that they get: what comes out never shares their
memory, unless that is asked for. A value that is as its spec says takes a short way; any other is converted where
nothing is lost, and what is wrong with the rest is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData
from torchrl.data import Categorical, Composite, MultiCategorical, MultiOneHot, NonTensor, OneHot, TensorSpec
from torchrl.data.utils import torch_to_numpy_dtype_dict

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from torchrl_ext._compat import built

if TYPE_CHECKING:
    from collections.abc import Callable

    Convert = Callable[[Any], Any]
    Flags = tuple[torch.Tensor, ...]

__all__ = [
    "compile_action",
    "compile_flags",
    "compile_observation",
    "compile_one_hot",
    "compile_reward",
    "compile_value",
    "counted_from_zero",
    "is_torch",
    "unset_flags",
]


def is_torch(observation: Any) -> bool:
    """Return whether an environment speaks torch, by one of its observations."""
    if isinstance(observation, (dict, tuple, list)):
        return any(map(is_torch, observation.values() if isinstance(observation, dict) else observation))
    return isinstance(observation, torch.Tensor)


# -- one value


def compile_value(
    shape: tuple[int, ...], dtype: torch.dtype, *, name: str, device: torch.device | None, copy: bool = True
) -> Convert:
    """Compile the way from an array, a tensor, a number or a list to a tensor.

    :param shape: which it must have, but for axes of one; -1 stands for any length
    :param dtype: which it must fit
    :param name: of the entry, for messages
    :param device: of the tensor; None: where the value is
    :param copy: whether it may not share the value's memory
    :return: a function that raises :class:`EnvironmentOutputError` for what does not fit
    """
    array, tensor, from_numpy, wanted = np.ndarray, torch.Tensor, torch.from_numpy, torch_to_numpy_dtype_dict.get(dtype)
    moves = device is not None and device.type != "cpu"
    castable = "fiub" if dtype.is_floating_point and wanted is not None else ""

    def convert(value: Any) -> torch.Tensor:
        if type(value) is array and value.dtype is wanted and value.shape == shape:
            # torch takes neither read-only arrays nor negative strides.
            if copy or not value.flags.writeable or min(value.strides, default=0) < 0:
                value = value.copy()
            return from_numpy(value).to(device) if moves else from_numpy(value)
        if type(value) is tensor and value.dtype is dtype and value.shape == shape:
            if device is not None and value.device != device:
                return value.detach().to(device)
            return value.detach().clone() if copy else value.detach()
        if type(value) is array and value.shape == shape and value.dtype.kind in castable:
            found = from_numpy(value.astype(wanted, order="C"))
            return found.to(device) if moves else found
        found = _tensor(value, shape, dtype, name)
        if _may_lose(found.dtype, dtype) and _loses(found, dtype):
            raise EnvironmentOutputError(
                f"{name!r} has the dtype {found.dtype}, which loses information as {dtype}, the dtype of its space. "
                "Write the space with the dtype that the environment returns"
            )
        if found.shape != shape:
            found = _reshaped(found, shape, name)
        return found.to(device=device, dtype=dtype, copy=copy and isinstance(value, tensor))

    return convert


def _tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None:
        instead = "0.0" if name == "reward" else f"np.zeros({tuple(shape)})"
        raise EnvironmentOutputError(
            f"{name!r} is None; its space has the shape {tuple(shape)} of {dtype}. Return {instead} where there is none"
        )
    if isinstance(value, Mapping):
        raise EnvironmentOutputError(
            f"{name!r} is a dict with the keys {list(value)}; its space has the shape {tuple(shape)} of {dtype}. "
            "Return what is in it, or write the space as gymnasium.spaces.Dict with these keys"
        )
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return torch.stack([torch.as_tensor(part).detach() for part in value])
        array = np.array(value, order="C")
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentOutputError(
            f"{name!r} is of type {type(value).__name__}, which makes no tensor ({error}); its space has the shape "
            f"{tuple(shape)} of {dtype}"
        ) from None


def _reshaped(found: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    if len(found.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, found.shape, strict=True)):
        return found
    # A trailing axis of one comes and goes between libraries; nothing else does without a mistake.
    if [n for n in found.shape if n != 1] == [n for n in shape if n != 1]:
        return found.reshape(shape)
    hint = " (the batch axis is lost)" if tuple(found.shape) == shape[1:] else ""
    raise EnvironmentOutputError(f"{name!r} has the shape {tuple(found.shape)}{hint}; its space has {tuple(shape)}")


def _may_lose(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast may lose more than precision: fractions, signs, or the upper digits of integers."""
    kind = _kind(wanted)
    if _kind(found) != kind:
        return _kind(found) > kind
    return kind == 1 and (
        torch.iinfo(found).min < torch.iinfo(wanted).min or torch.iinfo(found).max > torch.iinfo(wanted).max
    )


def _kind(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _loses(found: torch.Tensor, wanted: torch.dtype) -> bool:
    """Return whether it does. On a GPU, where looking would make the step wait, it is taken to; so are complex."""
    if found.device.type != "cpu" or found.is_complex():
        return True
    cast = found.to(wanted)
    if not torch.equal(cast.to(found.dtype), found):
        return True
    if _kind(found.dtype) != 1 or _kind(wanted) != 1:
        return False
    # Between a sign and none, of one width, all values come back as they were.
    signed = found if found.dtype.is_signed else cast
    return found.dtype.is_signed != wanted.is_signed and bool((signed < 0).any())


def compile_one_hot(spec: OneHot, shape: tuple[int, ...], *, name: str, device: torch.device | None) -> Convert:
    """Compile the way from indices to one-hot vectors.

    :param spec: tells how many classes there are
    :param shape: of the indices
    :param name: of the entry, for messages
    :param device: of the tensor
    :return: a function that raises :class:`EnvironmentOutputError` for what does not fit
    """
    read, encode = compile_value(shape, torch.int64, name=name, device=device), torch.nn.functional.one_hot
    several = [int(n) for n in spec.nvec] if isinstance(spec, MultiOneHot) else None

    def convert(value: Any) -> torch.Tensor:
        index = read(value)
        try:
            if several is not None:
                return torch.cat([encode(index[..., place], n) for place, n in enumerate(several)], -1).to(spec.dtype)
            return encode(index, spec.space.n).to(spec.dtype)
        except RuntimeError:
            raise EnvironmentOutputError(
                f"{name!r} is {index.tolist()}, which is not below the number of classes of its space, "
                f"{spec.space.n if several is None else several}, or negative"
            ) from None

    return convert


def _index_shape(spec: OneHot) -> tuple[int, ...]:
    """Return the shape of the indices that a one-hot spec encodes."""
    lead = tuple(spec.shape[:-1])
    return (*lead, len(spec.nvec)) if isinstance(spec, MultiOneHot) else lead


def _counted(values: Any, start: Any) -> Any:
    """Count integers from where a space does, which TorchRL's specs do from zero."""
    if isinstance(values, torch.Tensor):
        return values + torch.as_tensor(start, dtype=values.dtype, device=values.device)
    return values + start


def counted_from_zero(values: Any, start: Any) -> Any:
    """Undo that in what an environment returned; what are no integers stays as it is.

    :param values: a value, or a dict of them
    :param start: a number or an array, or a dict of them; None: they count from zero
    """
    if start is None:
        return values
    if isinstance(values, dict) and isinstance(start, dict):
        return {key: counted_from_zero(part, start.get(key)) for key, part in values.items()}
    if not isinstance(values, torch.Tensor):
        array = np.asarray(values)
        return array.astype(np.int64) - start if array.dtype.kind in "iu" else values
    return values if values.is_floating_point() else _counted(values, -np.asarray(start))


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
    """Compile the way from an action tensor (or TensorDict) to the environment's action.

    :param spec: of the action, with the batch
    :param space: gymnasium's space of an action of one sub-environment
    :param env_type: ``"numpy"`` or ``"torch"``
    :param batch_size: of the environment
    :param clip: bound on the magnitude of continuous actions
    :param device: where a torch environment takes its actions
    :param start: what its integers count from, where that is not zero: a number, an array, or a dict of them
    :param path: keys of the Dicts that it is an entry of, where TorchRL gives arrays for integers
    :return: a function that raises :class:`InvalidArgumentError` for an action of another shape
    :raises InvalidArgumentError: If the spec does not fit the space.
    """
    again = partial(compile_action, env_type=env_type, batch_size=batch_size, clip=clip, device=device)
    if isinstance(spec, Composite):
        spaces = getattr(space, "spaces", {})
        parts = {
            key: again(part, space=spaces.get(key), start=(start or {}).get(key), path=(*path, key))
            for key, part in spec.items()
        }
        return lambda action: {key: decode(action[key]) for key, decode in parts.items()}
    if not isinstance(spec.zero(), torch.Tensor):
        return lambda action: getattr(action, "data", action)  # text, which nobody edits in place
    nvec = _parts_of_choice(spec, space, batch_size)
    if nvec is not None:
        plain = again(spec, space=None, path=path)
        return _compile_parts(plain, nvec, space, in_torch=env_type == "torch")
    if start is not None:
        shape = _index_shape(spec) if isinstance(spec, OneHot) else tuple(spec.shape)
        if np.broadcast_shapes(shape, np.shape(start)) != shape:
            raise InvalidArgumentError(
                f"the action space counts from {start}, and TorchRL makes one {type(spec).__name__} of the shape "
                f"{tuple(spec.shape)} of it. Write it with start=0"
            )
        plain = again(spec, space=space, path=path)
        return lambda action: _counted(plain(action), start)
    return _with_shape(_compile_plain(spec, env_type, bool(batch_size) or bool(path), clip, device), spec, path)


def _compile_plain(
    spec: TensorSpec, env_type: str, is_array: bool, clip: float | None, device: torch.device | None
) -> Convert:
    """Compile the way of an action of the spec's shape, whose integers count from zero.

    :param is_array: whether an index is an array, and not an integer
    """
    decode = _decoder(spec, clip if spec.dtype.is_floating_point else None)
    if env_type == "torch":
        return decode if device is None else lambda action: decode(action).to(device)
    is_choice = isinstance(spec, (OneHot, Categorical)) and not isinstance(spec, MultiOneHot)
    to_numpy = (
        _places_of_ones if isinstance(spec, OneHot) and is_choice else lambda action: decode(action).cpu().numpy()
    )
    if is_choice and not is_array and spec.zero().numel() in (1, spec.shape[-1:].numel()):
        if isinstance(spec, OneHot) and spec.ndim == 1 and not spec.dtype.is_floating_point:
            return _place_of_one
        return lambda action: _integer(to_numpy(action))
    return to_numpy


def _with_shape(convert: Convert, spec: TensorSpec, path: tuple[str, ...]) -> Convert:
    """Refuse actions of another shape than the spec's, except for axes of one."""
    shape = spec.shape
    if -1 in shape:
        return convert

    def checked(action: Any) -> Any:
        return convert(action if action.shape == shape else _reshaped_action(action, spec, path))

    return checked


def _reshaped_action(action: torch.Tensor, spec: TensorSpec, path: tuple[str, ...]) -> torch.Tensor:
    if [n for n in action.shape if n != 1] == [n for n in spec.shape if n != 1]:
        return action.reshape(spec.shape)
    advice = "Write an action of env.action_spec"
    if isinstance(spec, OneHot):
        advice = "Write categorical_action_encoding=True for the environment"
        if not isinstance(spec, MultiOneHot):
            advice += f", or torch.nn.functional.one_hot(action, {spec.shape[-1]})"
    raise InvalidArgumentError(
        f"the action{_at(path)} has the shape {tuple(action.shape)}; expected {tuple(spec.shape)}, the shape of its "
        f"{type(spec).__name__} spec. {advice}"
    )


def _parts_of_choice(spec: TensorSpec, space: Any, batch_size: torch.Size) -> Any:
    """Return the numbers of classes of a MultiDiscrete space whose spec is one choice of all combinations, else None.

    TorchRL makes such a spec beside an ``action_mask`` with one entry per combination
    (https://github.com/pytorch/rl/pull/3342).

    :raises InvalidArgumentError: If there are more or fewer choices than combinations.
    """
    nvec = getattr(space, "nvec", None)
    one_choice = isinstance(spec, (OneHot, Categorical)) and not isinstance(spec, (MultiOneHot, MultiCategorical))
    if nvec is None or nvec.ndim != 1 or not one_choice:
        return None
    if tuple(spec.shape[:-1] if isinstance(spec, OneHot) else spec.shape) != tuple(batch_size):
        return None
    count = int(np.prod(nvec))
    if spec.space.n != count:
        raise InvalidArgumentError(
            f"the action spec has {spec.space.n} choices; expected one for every combination of {space}, which are "
            f"{count}. Write env.action_spec = Categorical({count}, shape=env.batch_size)"
        )
    return nvec


def _compile_parts(plain: Convert, nvec: Any, space: Any, *, in_torch: bool) -> Convert:
    """Compile the way from one choice of all combinations to an action of a MultiDiscrete space.

    :param plain: from the action to its index
    :param nvec: number of classes of each part
    """
    start, shape = getattr(space, "start", None), tuple(map(int, nvec))
    start = start if start is not None and np.any(start) else None

    def decode(action: Any) -> Any:
        index = plain(action)
        if in_torch:
            parts = torch.stack(torch.unravel_index(index, shape), -1)
        else:
            parts = np.stack(np.unravel_index(index, shape), -1).astype(space.dtype)  # type: ignore[assignment]
        return parts if start is None else _counted(parts, start)

    return decode


def _place_of_one(action: torch.Tensor) -> int:
    """Return the index of one one-hot vector, in a third of NumPy's time."""
    values = action.tolist()
    return values.index(1) if 1 in values else int(_places_of_ones(action))  # what is none: as upstream


def _places_of_ones(action: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the indices of one-hot vectors, in a third of torch's time."""
    values = action.detach().cpu().numpy()
    # TorchRL's argmax is that of integers.
    return np.asarray((values.astype(np.int64) if values.dtype.kind == "f" else values).argmax(-1))


def _integer(decoded: Any) -> Any:
    """Return a plain integer where there is one: environments index with it."""
    return int(decoded.item()) if decoded.size == 1 else decoded


def _decoder(spec: TensorSpec, clip: float | None) -> Convert:
    """Compile the way to a tensor that is new: an index for one-hot actions, the same values for others."""
    if isinstance(spec, MultiOneHot):
        return lambda action: spec.to_categorical(action.detach(), safe=False)
    if isinstance(spec, OneHot):
        # argmax knows no booleans
        return lambda action: action.long().argmax(-1)
    if clip is not None:
        return lambda action: action.detach().clamp(-clip, clip)
    return lambda action: action.detach().clone()


# -- observations


def compile_observation(
    spec: Composite, *, key: str | None, device: torch.device | None, copy: bool, starts: Any = None
) -> Convert:
    """Compile the way from an observation to a dict of tensors, nested as the spec is.

    :param spec: of the observation alone, with the batch
    :param key: of the one entry, where observations are no dicts; None where they are
    :param device: of the tensors
    :param copy: whether tensors may never share the environment's memory
    :param starts: what integers count from, where that is not zero: a number, an array, or a dict of them
    """
    if starts is not None:
        plain = compile_observation(spec, key=key, device=device, copy=copy)
        return lambda observation: plain(counted_from_zero(observation, starts))
    if key is None:
        return _mapping(spec, (), device, copy)
    read = _leaf(spec[key], key, device, copy)
    return lambda observation: {key: read(observation)}


def _mapping(spec: Composite, path: tuple[str, ...], device: torch.device | None, copy: bool) -> Convert:
    readers = []
    for name, part in spec.items():
        if isinstance(part, Composite):
            readers.append((name, _nested(part, (*path, name), device, copy)))
        else:
            readers.append((name, _leaf(part, ".".join((*path, name)), device, copy)))

    def read_all(observation: Any) -> dict[str, Any]:
        if not isinstance(observation, dict):
            raise EnvironmentOutputError(
                f"observation{_at(path)} is of type {type(observation).__name__}; its space is a Dict of "
                f"{sorted(spec.keys())}"
            )
        try:
            return {name: read(observation[name]) for name, read in readers}
        except KeyError:
            missing = next((name for name, _ in readers if name not in observation), None)
            if missing is None:
                raise
            if missing == "observation" and "state" in observation:  # as TorchRL calls a lone "state"
                return read_all({**observation, "observation": observation["state"]})
            raise EnvironmentOutputError(
                f"observation{_at((*path, missing))} is missing: the environment returned "
                f"{sorted(map(str, observation))}"
            ) from None

    return read_all


def _nested(spec: Composite, path: tuple[str, ...], device: torch.device | None, copy: bool) -> Convert:
    read, batch_size = _mapping(spec, path, device, copy), spec.batch_size
    return lambda observation: built(read(observation), batch_size, device)


def _at(path: tuple[str, ...]) -> str:
    return f" {'.'.join(path)!r}" if path else ""


def _leaf(spec: TensorSpec, name: str, device: torch.device | None, copy: bool) -> Convert:
    if isinstance(spec, NonTensor):
        return partial(NonTensorData, device=device)
    if isinstance(spec, OneHot):
        return compile_one_hot(spec, _index_shape(spec), name=name, device=device)
    return compile_value(tuple(spec.shape), spec.dtype, name=name, device=device, copy=copy)


# -- rewards and flags


def compile_reward(spec: TensorSpec, *, device: torch.device | None) -> Convert:
    """Compile the way from a reward to a tensor of the spec: from a number, or from one per sub-environment."""
    read = _compile_column(tuple(spec.shape), spec.dtype, "reward", device)
    if spec.shape != (1,) or not spec.dtype.is_floating_point:  # of which a number may lose its fraction
        return read
    moves, scalars = device is not None and device.type != "cpu", (float, int, np.floating)
    array, from_numpy, wanted = np.array, torch.from_numpy, torch_to_numpy_dtype_dict[spec.dtype]

    def read_scalar(value: Any) -> Any:
        if not isinstance(value, scalars):
            return read(value)
        # By way of NumPy, which makes small arrays in half of torch's time.
        tensor = from_numpy(array((value,), wanted))
        return tensor.to(device) if moves else tensor

    return read_scalar


def _compile_column(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device | None) -> Convert:
    """Compile the way from what lacks a trailing axis of one, or has it."""
    convert, flat = compile_value(shape, dtype, name=name, device=device), shape[:-1]
    if shape[-1:] != (1,):
        return convert
    return lambda value: convert(value.reshape(shape) if getattr(value, "shape", None) == flat else value)


def unset_flags(shape: tuple[int, ...], device: torch.device | None) -> Flags:
    """Make flags of which none is set: done, terminated, truncated.

    :param shape: of each, with its trailing axis
    """
    zeros, from_numpy = np.zeros, torch.from_numpy
    if device is None or device.type == "cpu":  # in less than half of the time of torch's own zeros
        return from_numpy(zeros(shape, "?")), from_numpy(zeros(shape, "?")), from_numpy(zeros(shape, "?"))
    return torch.zeros((3, *shape), dtype=torch.bool, device=device).unbind(0)


def compile_flags(
    batch_size: torch.Size, *, device: torch.device | None, finite_horizon: bool
) -> Callable[[Any, Any], tuple[Flags, bool | None]]:
    """Compile the way from ``terminated`` and ``truncated`` to new tensors: done, terminated, truncated.

    It says as well whether an environment is done; of a batch nobody has looked, and it says None.

    :param finite_horizon: whether time-outs are terminations
    """
    shape = (*batch_size, 1)
    read_end, read_cut = (_compile_column(shape, torch.bool, name, device) for name in ("terminated", "truncated"))

    def read(terminated: Any, truncated: Any) -> tuple[Flags, bool]:
        try:
            end, cut = bool(terminated), bool(truncated)
        except (ValueError, RuntimeError):  # of arrays
            raise _no_flags(terminated, truncated) from None
        if terminated is None or truncated is None:
            raise _no_flags(terminated, truncated)
        if not (end or cut):
            return unset_flags(shape, device), False
        flags = ((True,), (end or finite_horizon,), (cut and not finite_horizon,))
        return torch.tensor(flags, device=device).unbind(0), True

    def read_batch(terminated: Any, truncated: Any) -> tuple[Flags, None]:
        end, cut = read_end(terminated), read_cut(truncated)
        done = end | cut
        return (done, done.clone(), torch.zeros_like(done)) if finite_horizon else (done, end, cut), None

    return read_batch if batch_size else read


def _no_flags(terminated: Any, truncated: Any) -> EnvironmentOutputError:
    found = " and ".join(
        f"{value!r}" if getattr(value, "shape", None) is None else f"of the shape {tuple(value.shape)}"
        for value in (terminated, truncated)
    )
    return EnvironmentOutputError(f"'terminated' and 'truncated' are {found}; expected one boolean each")
