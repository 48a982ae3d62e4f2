"""Turns the action of a TensorDict into what the environment takes, compiled once from the action spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchrl.data import Categorical, Composite, MultiOneHot, OneHot, TensorSpec

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext._conversion import counted, index_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    Decode = Callable[[Any], Any]

__all__ = ["compile_action"]


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
