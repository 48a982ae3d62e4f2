"""Conversions: actions for the environment, and observations, rewards and flags from it.

Each way is compiled once from its spec. What is converted never shares memory by accident.
"""

from __future__ import annotations

from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData
from torchrl.data import Categorical, Composite, MultiOneHot, NonTensor, OneHot, TensorSpec
from torchrl.data.utils import torch_to_numpy_dtype_dict

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from torchrl_ext._compat import built

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Decode = Callable[[Any], Any]
    Read = Callable[[Any], Any]

__all__ = [
    "coerced",
    "compile_action",
    "compile_flags",
    "compile_observation",
    "compile_reward",
    "counted",
    "counted_from_zero",
    "index_shape",
    "is_torch",
    "keep_when_freed",
    "no_end",
    "no_flags",
    "one_hot",
    "owned",
    "without_need",
]


def coerced(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype, *, name: str, device: torch.device | None, copy: bool = True
) -> torch.Tensor:
    """Make a tensor of a value.

    :param value: what an environment returned
    :param shape: which it must have, but for axes of one; -1 stands for any length
    :param dtype: which it must fit
    :param name: of the entry, for messages
    :param device: of the tensor; None: where the value is
    :param copy: whether it may not share the value's memory
    :raises EnvironmentOutputError: it does not fit
    """
    found = _tensor(value, shape, dtype, name)
    if _may_lose(found.dtype, dtype) and _loses(found, dtype):
        raise EnvironmentOutputError(
            f"{name!r} has the dtype {found.dtype}, which loses information as {dtype}, the dtype of its space. "
            "Write the space with the dtype that the environment returns"
        )
    if found.shape != shape:
        found = _reshaped(found, shape, name)
    return found.to(device=device, dtype=dtype, copy=copy and isinstance(value, torch.Tensor))


def _tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None:
        raise EnvironmentOutputError(f"{name!r} is None; its space has the shape {tuple(shape)} of {dtype}")
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return torch.stack([torch.as_tensor(part).detach() for part in value])
        # A copy: torch takes neither read-only arrays nor negative strides.
        array = np.array(value, order="C")
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentOutputError(
            f"{name!r} is of type {type(value).__name__}, which makes no tensor ({error}); its space has the shape "
            f"{tuple(shape)} of {dtype}"
        ) from None


def _reshaped(found: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    wanted = tuple(shape)
    if len(found.shape) == len(wanted) and all(n in (-1, m) for n, m in zip(wanted, found.shape, strict=True)):
        return found
    # A trailing axis of one comes and goes between libraries; nothing else does without a mistake.
    if tuple(n for n in found.shape if n != 1) == tuple(n for n in wanted if n != 1):
        return found.reshape(wanted)
    hint = " (the batch axis is lost)" if tuple(found.shape) == wanted[1:] else ""
    raise EnvironmentOutputError(f"{name!r} has the shape {tuple(found.shape)}{hint}; its space has {wanted}")


def _may_lose(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether a cast may lose more than precision: fractions, signs, or the upper digits of integers."""
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
    """Tell whether it does. On a GPU, where looking would make the step wait for it, it is taken to; so are complex."""
    if found.device.type != "cpu" or found.is_complex():
        return True
    return not torch.equal(found.to(wanted).to(found.dtype), found)


def index_shape(spec: OneHot) -> tuple[int, ...]:
    """Give the shape of the indices that a one-hot spec encodes."""
    lead = tuple(spec.shape[:-1])
    return (*lead, len(spec.nvec)) if isinstance(spec, MultiOneHot) else lead


def one_hot(
    value: Any, spec: OneHot, shape: tuple[int, ...], *, name: str, device: torch.device | None
) -> torch.Tensor:
    """Encode indices.

    :param value: what an environment returned
    :param spec: tells how many classes there are
    :param shape: of the indices
    :param name: of the entry, for messages
    :param device: of the tensor
    :raises EnvironmentOutputError: they do not fit
    """
    index = coerced(value, shape, torch.int64, name=name, device=device)
    encode = torch.nn.functional.one_hot
    try:
        if isinstance(spec, MultiOneHot):
            parts = [encode(index[..., place], int(n)) for place, n in enumerate(spec.nvec)]
            return torch.cat(parts, -1).to(spec.dtype)
        return encode(index, spec.space.n).to(spec.dtype)
    except RuntimeError:
        raise EnvironmentOutputError(
            f"{name!r} is {index.tolist()}, which is not below the number of classes of its space, "
            f"{list(spec.nvec) if isinstance(spec, MultiOneHot) else spec.space.n}, or negative"
        ) from None


def counted(values: Any, start: Any) -> Any:
    """Count integers from where a space does, which TorchRL's specs do from zero.

    :param values: a number, an array or a tensor
    :param start: a number or an array
    """
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
    return values if values.is_floating_point() else counted(values, -np.asarray(start))


def compile_action(
    spec: TensorSpec,
    *,
    env_type: str,
    batched: bool,
    clip: float | None,
    device: torch.device | None,
    start: Any = None,
    in_dict: bool = False,
) -> Decode:
    """Compile the way from an action tensor (or TensorDict) to the environment's action.

    What comes out never shares memory with the TensorDict: environments edit their actions in place.

    :param spec: of the action, with the batch
    :param env_type: ``"numpy"`` or ``"torch"``
    :param batched: whether the environment takes a batch
    :param clip: bound on the magnitude of continuous actions
    :param device: where a torch environment takes its actions
    :param start: what its integers count from, where that is not zero: a number, an array, or a dict of them
    :param in_dict: whether it is an entry of a Dict, where TorchRL gives arrays for integers
    :raises InvalidArgumentError: they do not fit the spec
    """
    if isinstance(spec, Composite):
        parts = {
            key: compile_action(
                part,
                env_type=env_type,
                batched=batched,
                clip=clip,
                device=device,
                start=(start or {}).get(key),
                in_dict=True,
            )
            for key, part in spec.items()
        }
        return lambda action: {key: decode(action[key]) for key, decode in parts.items()}
    if not isinstance(spec.zero(), torch.Tensor):
        return lambda action: getattr(action, "data", action)  # text, which nobody edits in place
    if start is not None:
        shape = index_shape(spec) if isinstance(spec, OneHot) else tuple(spec.shape)
        if np.broadcast_shapes(shape, np.shape(start)) != shape:
            raise InvalidArgumentError(
                f"the action space counts from {start}, and TorchRL makes one {type(spec).__name__} of the shape "
                f"{tuple(spec.shape)} of it. Write it with start=0"
            )
        plain = compile_action(spec, env_type=env_type, batched=batched, clip=clip, device=device, in_dict=in_dict)
        return lambda action: counted(plain(action), start)
    clip = clip if spec.dtype.is_floating_point else None
    decode = _decoder(spec, clip)
    if env_type == "torch":
        return decode if device is None else lambda action: decode(action).to(device)
    if not (batched or in_dict) and isinstance(spec, (OneHot, Categorical)) and not isinstance(spec, MultiOneHot):
        if isinstance(spec, OneHot) and spec.ndim == 1 and not spec.dtype.is_floating_point:
            return _place_of_one
        if spec.zero().numel() in (1, spec.shape[-1:].numel()):
            return _single_integer(decode)
    if isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot):
        return _places_of_ones
    return lambda action: decode(action).cpu().numpy()


def _places_of_ones(action: torch.Tensor) -> np.ndarray[Any, Any]:
    """Give the indices of a batch of one-hot vectors, in a third of torch's time."""
    values = action.detach().cpu().numpy()
    # TorchRL's argmax is that of integers.
    return np.asarray((values.astype(np.int64) if values.dtype.kind == "f" else values).argmax(-1))


def _decoder(spec: TensorSpec, clip: float | None) -> Decode:
    """Compile the way to a tensor that is new: an index for one-hot actions, the same values for others."""
    if isinstance(spec, MultiOneHot):
        return lambda action: spec.to_categorical(action.detach(), safe=False)
    if isinstance(spec, OneHot):
        # argmax knows no booleans
        return lambda action: action.long().argmax(-1)
    if clip is not None:
        return lambda action: action.detach().clamp(-clip, clip)
    return lambda action: action.detach().clone()


def _place_of_one(action: torch.Tensor) -> int:
    values = action.tolist()
    try:
        return values.index(1)
    except ValueError:  # no one-hot vector: what argmax makes of it, as upstream
        return int(action.long().argmax(-1))


def _single_integer(decode: Decode) -> Decode:
    """Give a plain integer where there is one: environments index with it."""

    def read(action: torch.Tensor) -> Any:
        decoded = decode(action)
        return int(decoded) if decoded.numel() == 1 else decoded.cpu().numpy()

    return read


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


def compile_reward(spec: TensorSpec, *, batched: bool, device: torch.device | None) -> Read:
    """Compile the way from a reward to a new tensor of the spec."""
    shape, dtype = tuple(spec.shape), spec.dtype

    def coerce(value: Any) -> torch.Tensor:
        return coerced(value, shape, dtype, name="reward", device=device)

    if not batched:
        if shape != (1,):
            return coerce
        # By way of NumPy, which makes small arrays in half of torch's time.
        scalars, array, from_numpy = (float, int, np.floating), np.array, torch.from_numpy
        wanted = torch_to_numpy_dtype_dict[dtype]
        moves = device is not None and device.type != "cpu"

        def read_scalar(value: Any) -> torch.Tensor:
            if isinstance(value, scalars):
                tensor = from_numpy(array((value,), wanted))
                return tensor.to(device) if moves else tensor
            return coerce(value)

        return read_scalar
    if shape[-1:] != (1,):
        return coerce
    return _batch_reader(shape[:-1], dtype, device, coerce)


def no_end(shape: tuple[int, ...], device: torch.device | None) -> tuple[torch.Tensor, ...]:
    """Make flags of which none is set: done, terminated, truncated.

    :param shape: of each, with its trailing axis
    """
    tensor = torch.from_numpy(np.zeros((3, *shape), np.bool_))
    return (tensor if device is None or device.type == "cpu" else tensor.to(device)).unbind(0)


def _batch_reader(flat: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, coerce: Read) -> Read:
    array, from_numpy = np.ndarray, torch.from_numpy
    wanted = torch_to_numpy_dtype_dict[dtype]
    moves = device is not None and device.type != "cpu"

    def read(value: Any) -> torch.Tensor:
        if type(value) is array and value.shape == flat and value.dtype.kind in "fiub":
            tensor = from_numpy(value.astype(wanted)).unsqueeze(-1)
            return tensor.to(device) if moves else tensor
        if type(value) is torch.Tensor and value.shape == flat:
            return value.detach().to(device=device, dtype=dtype, copy=True).unsqueeze(-1)
        return coerce(value)

    return read


def no_flags(terminated: Any, truncated: Any) -> EnvironmentOutputError:
    """Say that two values are not flags of one environment."""
    found = " and ".join(_described(value) for value in (terminated, truncated))
    return EnvironmentOutputError(f"'terminated' and 'truncated' are {found}; expected one boolean each")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{value!r}" if shape is None else f"of the shape {tuple(shape)}"


def compile_flags(shape: torch.Size, *, device: torch.device | None) -> Callable[[Any, Any], tuple[torch.Tensor, ...]]:
    """Compile the way from two batches of flags to new tensors of booleans: done, terminated, truncated.

    :param shape: of each with its trailing axis, (n, 1)
    """
    flat, array, boolean = tuple(shape[:-1]), np.ndarray, np.dtype(bool)
    moves = device is not None and device.type != "cpu"

    three, column, size = (3, *shape), tuple(shape), shape[:-1]
    from_numpy = torch.from_numpy

    def read(terminated: Any, truncated: Any) -> tuple[torch.Tensor, ...]:
        if (
            type(terminated) is type(truncated) is array
            and terminated.dtype is truncated.dtype is boolean
            and terminated.shape == truncated.shape == flat
        ):
            if moves:
                flags = np.stack((terminated | truncated, terminated, truncated)).reshape(three)
                return from_numpy(flags).to(device).unbind(0)
            done = from_numpy((terminated | truncated).reshape(column))
            return done, from_numpy(terminated.copy().reshape(column)), from_numpy(truncated.copy().reshape(column))
        if (
            type(terminated) is type(truncated) is torch.Tensor
            and terminated.dtype is truncated.dtype is torch.bool
            and terminated.shape == truncated.shape == size
            and (device is None or terminated.device == truncated.device == device)
        ):
            return torch.stack((terminated | truncated, terminated, truncated)).unsqueeze(-1).unbind(0)
        one, other = (
            coerced(value, shape, torch.bool, name=name, device=device)
            for name, value in (("terminated", terminated), ("truncated", truncated))
        )
        return one | other, one, other

    return read


_MAPPED_FROM, _MAPPED_TO = 128 << 10, 31 << 20


def keep_when_freed(nbytes: int) -> None:
    """Let the C library keep blocks of this size when they are freed, rather than give them back at every step.

    glibc maps pages for a block above a threshold, and the page faults of 3 MB take longer than to fill them. The
    threshold rises to the largest such block that was freed, up to 32 MB: one that nobody touches will do.
    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, _MAPPED_TO)
    if size > _MAPPED_FROM:
        torch.empty(size, dtype=torch.uint8)


def without_need(copied: Read, shared: Read) -> Read:
    """Compile a reader that copies an array unless nobody else can write into it: it owns its memory and is held here
    alone.

    :param copied: a reader that copies
    :param shared: one that does not
    """

    def read(observation: Any) -> dict[str, Any]:
        alone = type(observation) is np.ndarray and observation.base is None and getrefcount(observation) <= held
        return shared(observation) if alone else copied(observation)

    held = _references()
    return read


def _references() -> int:
    """Count the references that a step and a reader hold themselves; interpreters differ."""

    def read(observation: Any) -> int:
        return getrefcount(observation)

    observation, _ = _returned()
    return read(observation)


def _returned() -> tuple[Any, None]:
    return np.empty(1), None
