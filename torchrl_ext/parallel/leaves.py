"""Tensors of TensorDicts in the memory that workers share with the parent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.data import Composite, NonTensor, TensorSpec

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext._compat import find_getter

__all__ = ["Key", "Leaves"]

Key = str | tuple[str, ...]
_NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
_DTYPES = {getattr(torch, name): np.dtype(name) for name in _NAMES.split()}
_ADVICE = "Use torchrl.envs.ParallelEnv(num_workers, create_env_fn, use_buffers=False)"


class Record:
    """Tensors of an environment in one block of bytes, after a flag for each of them that is present.

    :param specs: spec of each tensor
    :ivar keys: keys of the tensors
    :ivar size: number of bytes
    """

    def __init__(self, specs: Mapping[Key, TensorSpec]) -> None:
        self.keys = list(specs)
        # Names of fields are places, because keys may be tuples.
        # There is one more flag, because a block of no bytes cannot be shared.
        fields = [(str(place), _DTYPES[spec.dtype], tuple(spec.shape)) for place, spec in enumerate(specs.values())]
        self._dtype = np.dtype([("present", bool, (len(fields) + 1,)), *fields], align=True)
        self.size = self._dtype.itemsize

    def map(self, memory: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], dict[Key, np.ndarray[Any, Any]]]:
        """Return the flags and the arrays in a block of memory, or in several of shape ``(..., size)``."""
        records: Any = np.ndarray(memory.shape[:-1], self._dtype, memory)
        return records["present"], {key: records[str(place)] for place, key in enumerate(self.keys)}

    def read(self, memory: np.ndarray[Any, Any]) -> dict[Any, torch.Tensor]:
        """Return the tensors that are present in a block of memory."""
        record: Any = np.ndarray((), self._dtype, memory)
        present = record["present"].tolist()
        return {key: torch.from_numpy(record[str(place)]) for place, key in enumerate(self.keys) if present[place]}


class RecordSpace(gymnasium.Space[Any]):
    """Space of the bytes of a record; spaces are compared by the specs of the environment."""

    is_encoded = True

    def __init__(self, record: Record, specs: Composite) -> None:
        super().__init__((record.size,), np.uint8)
        self._specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordSpace) and bool(self._specs == other._specs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " ".join(repr(self._specs).split())


class Leaves:
    """Inputs and outputs of an environment of TorchRL.

    A policy may also write observations of the next step, which transforms in the worker keep. So these are inputs too.

    :param specs: specs of the environment, in a Composite with ``input_spec`` and ``output_spec``
    :param name: name of the environment, for errors
    :raises InvalidArgumentError: If a spec has no fixed shape, or a dtype that NumPy lacks.

    :ivar inputs: record of actions, states and next observations, which steps read
    :ivar outputs: record of observations, rewards and flags, which steps and resets write
    :ivar non_tensor_outputs: keys of outputs that are not tensors
    :ivar reset_keys: keys of the tensors that a reset returns
    :ivar keys: keys of all inputs and outputs, without those of the next step
    :ivar are_flat: whether all keys are strings, and all entries tensors
    :ivar spaces: spaces of an environment whose observation is the output record, and whose action is the input record
    """

    def __init__(self, specs: Composite, name: str) -> None:
        specs = specs.clone().to("cpu")
        read, written = specs["input_spec"], specs["output_spec"]
        inputs, not_tensors = _split(name, read["full_action_spec"], read["full_state_spec"])
        if not_tensors:
            raise InvalidArgumentError(
                f"the input {not_tensors[0]!r} of {name} is not a tensor: expected tensors. {_ADVICE}"
            )
        observed, others = _split(name, written["full_observation_spec"])
        rewards, more = _split(name, written["full_reward_spec"])
        flags, _ = _split(name, written["full_done_spec"])
        self.non_tensor_outputs = [*others, *more]
        for spec in specs.values(True, True):
            if isinstance(spec, NonTensor):
                spec.example_data = None  # it may be a text that differs between the environments
        following: dict[Key, TensorSpec] = {unravel_key(("next", key)): spec for key, spec in observed.items()}
        self.inputs, self.outputs = Record({**inputs, **following}), Record({**observed, **rewards, **flags})
        self.reset_keys = {*observed, *flags}
        self.keys = {*inputs, *self.outputs.keys, *self.non_tensor_outputs}
        self.are_flat = not self.non_tensor_outputs and all(isinstance(key, str) for key in self.keys)
        # Entries that are not carried over to the next step. A reward may also be an input.
        self._of_one_step = {"next", *rewards.keys() - inputs.keys()}
        self.spaces = RecordSpace(self.outputs, specs), RecordSpace(self.inputs, specs)

    def next_root(self, root: Mapping[Any, Any], out: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the entries from which the next step starts, as TorchRL's ``step_mdp`` does if keys are flat.

        :param root: entries from which the step started
        :param out: outputs of the step
        """
        # A reset changes nested TensorDicts in place, such as those of collectors.
        return {
            name: value if isinstance(value, torch.Tensor) else value.copy()
            for name, value in {**root, **out}.items()
            if name not in self._of_one_step
        }

    def allocate_inputs(self, count: int) -> None:
        """Make the memory for the inputs of several environments."""
        self._bytes = np.zeros((count, self.inputs.size), np.uint8)
        self._present, arrays = self.inputs.map(self._bytes)
        self._last_present: list[bool] = []
        self._places = {key: torch.from_numpy(array) for key, array in arrays.items()}

    def write_inputs(self, tensordict: TensorDictBase) -> np.ndarray[Any, Any]:
        """Return the bytes of the inputs of several environments, in memory that the next call overwrites."""
        get, present = find_getter(tensordict), list[bool]()
        if not self.are_flat or get("next", None) is not None:
            get = tensordict.get
        for key, place in self._places.items():
            value = get(key, None)
            present.append(value is not None)
            if value is not None:
                value = value.detach()  # otherwise autograd would record all steps
                place.copy_(value if value.shape == place.shape else _reshape(value, place.shape, key))
        if present != self._last_present:  # writing them takes longer than all the rest
            self._present[:, :-1] = self._last_present = present
        return self._bytes


def _split(name: str, *parts: Composite | None) -> tuple[dict[Key, TensorSpec], list[Key]]:
    """Return the specs of tensors, and the keys of what is not a tensor."""
    found = {key: spec for part in parts if part is not None for key, spec in part.items(True, True)}
    tensors = {
        key: spec
        for key, spec in sorted(found.items(), key=lambda item: str(item[0]))
        if not isinstance(spec, NonTensor)
    }
    for key, spec in tensors.items():
        shape = spec.shape
        if not isinstance(shape, torch.Size) or any(size < 0 for size in shape) or spec.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"the spec {key!r} of {name} has the dtype {spec.dtype} and the shape {shape}: expected a fixed "
                f"shape, and a dtype of NumPy. {_ADVICE}"
            )
    return tensors, sorted(found.keys() - tensors.keys(), key=str)


def _reshape(value: torch.Tensor, shape: torch.Size, key: Key) -> torch.Tensor:
    """Return an input with other axes in the shape of its spec, because ``copy_`` would broadcast it."""
    if value.numel() == shape.numel() and value.shape[:1] == shape[:1]:
        return value.reshape(shape)
    raise InvalidArgumentError(
        f"the entry {key!r} has the shape {list(value.shape)}: expected {list(shape)}, as in the specs. Use "
        "env.rand_action(tensordict) for an example"
    )
