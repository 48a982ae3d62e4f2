"""Places of the leaves of TensorDicts in the memory that workers share with the parent process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.data import Composite, NonTensor

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["Leaf", "Leaves"]

Key = str | tuple[str, ...]
_ALIGNMENT = 16  # bytes, enough for all dtypes
_BYTES = np.dtype(np.uint8)


class _LeafSpace(gymnasium.Space[Any]):
    """Space of a leaf: an array of fixed shape and dtype."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LeafSpace) and (self.shape, self.dtype) == (other.shape, other.dtype)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape or ())}"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Tensor of a TensorDict.

    :ivar key: its key
    :ivar shape: its shape, of a single environment
    :ivar dtype: its dtype
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def name(self) -> str:
        """Name in the observation space, with the shape and dtype, which differ in different environments."""
        key = self.key if isinstance(self.key, str) else ".".join(self.key)
        return f"{key} {list(self.shape)} {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def is_native(self) -> bool:
        """Whether shared arrays have the dtype. The bytes of other leaves are copied."""
        return self.dtype is not torch.bfloat16 and not self.dtype.is_complex

    @property
    def space(self) -> gymnasium.Space[Any]:
        """Space of the array in shared memory."""
        if not self.is_native:
            return _LeafSpace((self.nbytes,), np.uint8)
        return _LeafSpace(self.shape, torch.empty(0, dtype=self.dtype).numpy().dtype)

    def to_array(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the array of a tensor in the worker. It may share the tensor's memory."""
        if tensor.requires_grad or not tensor.is_cpu:
            tensor = tensor.detach().cpu()
        if self.is_native:
            return tensor.numpy()
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()

    def from_array(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the tensor of the arrays of several environments, which shares their memory."""
        tensor = torch.from_numpy(array)
        return tensor if self.is_native else tensor.view(self.dtype).view(len(array), *self.shape)


class Leaves:
    """Inputs and outputs of an environment of TorchRL.

    :param specs: specs of the environment, in a Composite with ``input_spec`` and ``output_spec``
    :param name: name of the environment, for errors
    :ivar inputs: leaves of actions and states, which steps read
    :ivar outputs: leaves of observations, rewards and flags, which steps and resets write
    :ivar non_tensor_inputs: keys of inputs that are not tensors
    :ivar non_tensor_outputs: keys of outputs that are not tensors

    A step sends one array of bytes: a flag per input, whether it is present, and then the inputs.
    """

    def __init__(self, specs: Composite, name: str) -> None:
        read, written = specs["input_spec"], specs["output_spec"]
        parts = [read["full_action_spec"], read["full_state_spec"]]
        self.inputs, self.non_tensor_inputs = _split(parts, name)
        parts = [written["full_observation_spec"], written["full_reward_spec"], written["full_done_spec"]]
        self.outputs, self.non_tensor_outputs = _split(parts, name)
        self.offsets, offset = [], _align(len(self.inputs))
        for leaf in self.inputs:
            self.offsets.append(offset)
            offset = _align(offset + leaf.nbytes)
        self.nbytes = max(offset, _ALIGNMENT)

    @classmethod
    def from_metadata(cls, metadata: Any) -> Leaves:
        """Return the leaves of an environment from TorchRL's metadata."""
        return cls(metadata.specs, metadata.env_str.partition("(")[0])

    @staticmethod
    def require_equal(metadata: Sequence[Any]) -> None:
        """Raise an error if environments have different leaves."""
        first, *others = (Leaves.from_metadata(entry) for entry in {id(entry): entry for entry in metadata}.values())
        for other in others:
            for name in ("inputs", "outputs", "non_tensor_inputs", "non_tensor_outputs"):
                one, two = getattr(first, name), getattr(other, name)
                if one != two:
                    different = [getattr(leaf, "name", leaf) for leaf in (*one, *two) if (leaf in one) != (leaf in two)]
                    raise InvalidArgumentError(
                        f"the specs of the environments differ in {', '.join(map(str, different))}: expected the same "
                        f"keys, shapes and dtypes in all workers. Use torchrl.envs.ParallelEnv({len(metadata)}, [...])"
                    )

    @property
    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Spaces of an environment whose observations are the outputs, and whose action is the inputs' bytes."""
        observed = gymnasium.spaces.Dict({leaf.name: leaf.space for leaf in self.outputs})
        return observed, _LeafSpace((self.nbytes,), np.uint8)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the inputs in the bytes of several environments.

        :param memory: ``(n, nbytes)`` bytes
        """
        found = []
        flat, count = memory.view(-1), len(memory)
        for leaf, offset in zip(self.inputs, self.offsets, strict=True):
            strides = [1]
            for size in reversed(leaf.shape[1:]):
                strides.insert(0, strides[0] * size)
            typed = flat[offset:].view(leaf.dtype)
            outer = self.nbytes // leaf.dtype.itemsize
            found.append(typed.as_strided((count, *leaf.shape), (outer, *strides[: len(leaf.shape)])))
        return found

    def read_inputs(self, action: np.ndarray[Any, Any]) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield key and value of the inputs that are present in the bytes of an action."""
        memory = torch.from_numpy(action)
        for number, (leaf, offset) in enumerate(zip(self.inputs, self.offsets, strict=True)):
            if action[number]:
                yield leaf.key, memory[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split(parts: Sequence[Composite | None], name: str) -> tuple[list[Leaf], list[Key]]:
    """Return the tensors of specs, and the keys of what is not a tensor.

    :raises InvalidArgumentError: If a spec has no fixed shape.
    """
    leaves, others = dict[Key, Leaf](), list[Key]()
    for part in parts:
        for key, spec in () if part is None else part.items(True, True):
            if isinstance(spec, NonTensor):
                others.append(key)
                continue
            if not isinstance(spec.shape, torch.Size) or any(size < 0 for size in spec.shape) or spec.dtype is None:
                raise InvalidArgumentError(
                    f"the spec {key!r} of {name} has no fixed shape: expected tensors of one shape. Use "
                    "torchrl.envs.ParallelEnv(num_workers, create_env_fn, use_buffers=False)"
                )
            leaves[key] = Leaf(key, tuple(spec.shape), spec.dtype)
    return sorted(leaves.values(), key=lambda leaf: leaf.name), sorted({*others}, key=str)
