"""Places of the leaves of TensorDicts in the memory that workers share with the parent process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext._compat import new_tensordict

__all__ = ["Leaf", "Leaves", "Tree", "build_tree", "fit", "make_tree"]

Key = str | tuple[str, ...]
# Batch size, and nested keys of specs, with the key of the leaf or another tree in each place.
Tree = tuple[torch.Size, dict[str, Any]]
_NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
_DTYPES = {getattr(torch, name): np.dtype(name) for name in _NAMES.split()}


class _LeafSpace(gymnasium.Space[Any]):
    """Space of arrays of fixed shape and dtype.

    :param spec: description, by which spaces are compared
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> None:
        super().__init__(shape, dtype)
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LeafSpace) and bool(self.spec == other.spec)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " ".join(repr(self.spec).split())


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Tensor of a TensorDict, of a single environment."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @cached_property
    def name(self) -> str:
        """Name in the observation space."""
        return self.key if isinstance(self.key, str) else ".".join(self.key)


class Leaves:
    """Inputs and outputs of an environment of TorchRL.

    A step sends one record: a flag per input, whether it is present, and then the inputs. A policy may also write
    observations of the next step, which transforms in the worker keep.

    :param specs: specs of the environment, in a Composite with ``input_spec`` and ``output_spec``
    :param name: name of the environment, for errors
    :ivar inputs: leaves of actions and states, which steps read
    :ivar outputs: leaves of observations, rewards and flags, which steps and resets write
    :ivar non_tensor_outputs: keys of outputs that are not tensors
    """

    def __init__(self, specs: Composite, name: str) -> None:
        self._specs = specs = specs.clone().to("cpu")
        read, written = specs["input_spec"], specs["output_spec"]
        observed = written["full_observation_spec"]
        inputs, others = _split([read["full_action_spec"], read["full_state_spec"]], name)
        if others:
            raise InvalidArgumentError(
                f"the input {others[0]!r} of {name} is not a tensor: expected tensors. Use "
                "torchrl.envs.ParallelEnv(num_workers, create_env_fn, use_buffers=False)"
            )
        parts = [observed, written["full_reward_spec"], written["full_done_spec"]]
        self.outputs, self.non_tensor_outputs = _split(parts, name)
        for spec in specs.values(True, True):
            if isinstance(spec, NonTensor):
                spec.example_data = None  # it may be a text that differs between the environments
        rewards = {leaf.key for leaf in _split([written["full_reward_spec"]], name)[0]}
        # Entries that are not carried over to the next step. A reward may also be an input.
        self._of_one_step = {"next", *rewards.difference(leaf.key for leaf in inputs)}
        following = [dataclasses.replace(leaf, key=_next_key(leaf.key)) for leaf in _split([observed], name)[0]]
        self.inputs, self._n_inputs = [*inputs, *following], len(inputs)
        fields: list[Any] = [(leaf.name, leaf.dtype, leaf.shape) for leaf in self.inputs]
        self._record = np.dtype([("present", bool, (len(fields) + 1,)), *fields], align=True)
        offsets: Any = self._record.fields
        self._parts = [(leaf.key, leaf.shape, leaf.dtype, offsets[leaf.name][1]) for leaf in self.inputs]

    @classmethod
    def from_metadata(cls, metadata: Any) -> Leaves:
        """Return the leaves of an environment from TorchRL's metadata."""
        return cls(metadata.specs, metadata.env_str.partition("(")[0])

    @property
    def keys(self) -> set[Key]:
        """Keys of all inputs and outputs, without those of the next step."""
        return {leaf.key for leaf in (*self.inputs[: self._n_inputs], *self.outputs)} | {*self.non_tensor_outputs}

    @property
    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Spaces of an environment whose observations are the outputs, and whose action is the inputs' bytes."""
        places: dict[str, gymnasium.Space[Any]] = {
            leaf.name: _LeafSpace(leaf.shape, leaf.dtype, f"{leaf.dtype}{leaf.shape}") for leaf in self.outputs
        }
        return gymnasium.spaces.Dict(places), _LeafSpace((self._record.itemsize,), np.uint8, self._specs)

    @cached_property
    def are_flat(self) -> bool:
        """Whether all keys are strings, and all entries tensors."""
        return not self.non_tensor_outputs and all(isinstance(key, str) for key in self.keys)

    def next_root(self, root: Mapping[str, Any], out: Mapping[str, Any]) -> dict[str, Any]:
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

    def allocate(self, count: int) -> None:
        """Make the memory for the inputs of several environments."""
        memory = np.zeros(count, self._record)
        self._present, self._bytes = memory["present"], memory.view(np.uint8).reshape(count, -1)
        self._places = [torch.from_numpy(memory[leaf.name]) for leaf in self.inputs]

    def write_inputs(self, tensordict: TensorDictBase) -> np.ndarray[Any, Any]:
        """Return the bytes of the inputs of several environments, in memory that the next call overwrites."""
        count = self._n_inputs if tensordict.get("next", None) is None else len(self.inputs)
        self._present[:, count:] = False
        for number, (leaf, place) in enumerate(zip(self.inputs[:count], self._places, strict=False)):
            value = tensordict.get(leaf.key, None)
            self._present[:, number] = value is not None
            if value is not None:
                place.copy_(fit(value, place.shape, leaf.key))
        return self._bytes

    def read_inputs(self, action: np.ndarray[Any, Any]) -> dict[Key, torch.Tensor]:
        """Return the inputs that are present in the bytes of an action."""
        present = action[: len(self._parts)].tolist()
        return {
            key: torch.from_numpy(np.ndarray(shape, dtype, action, offset))
            for is_present, (key, shape, dtype, offset) in zip(present, self._parts, strict=True)
            if is_present
        }


def _next_key(key: Key) -> Key:
    """Return the key of an observation of the next step."""
    return ("next", key) if isinstance(key, str) else ("next", *key)


def _split(parts: Sequence[Composite | None], name: str) -> tuple[list[Leaf], list[Key]]:
    """Return the tensors of specs, and the keys of what is not a tensor.

    :raises InvalidArgumentError: If a spec has no fixed shape, or a dtype that NumPy lacks.
    """
    leaves, others = dict[Key, Leaf](), list[Key]()
    for part in parts:
        for key, spec in () if part is None else part.items(True, True):
            if isinstance(spec, NonTensor):
                others.append(key)
                continue
            shape = spec.shape
            if not isinstance(shape, torch.Size) or any(size < 0 for size in shape) or spec.dtype not in _DTYPES:
                raise InvalidArgumentError(
                    f"the spec {key!r} of {name} has the dtype {spec.dtype} and the shape {shape}: expected a fixed "
                    "shape, and a dtype of NumPy. Use torchrl.envs.ParallelEnv(num_workers, create_env_fn, "
                    "use_buffers=False)"
                )
            leaves[key] = Leaf(key, tuple(shape), _DTYPES[spec.dtype])
    return sorted(leaves.values(), key=lambda leaf: leaf.name), sorted({*others}, key=str)


def fit(value: torch.Tensor, shape: torch.Size, key: Any) -> torch.Tensor:
    """Return a tensor with other axes in the shape of its spec, because ``copy_`` would broadcast it."""
    if value.shape == shape:
        return value
    if value.numel() == shape.numel() and value.shape[:1] == shape[:1]:
        return value.reshape(shape)
    raise InvalidArgumentError(
        f"the entry {key!r} has the shape {list(value.shape)}: expected {list(shape)}, as in the specs. Use "
        "env.rand_action(tensordict) for an example"
    )


def make_tree(parts: Sequence[Composite], prefix: tuple[str, ...] = ()) -> Tree:
    """Return the nested keys of specs."""
    names: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part.keys()):  # noqa: SIM118
        found = [part[name] for part in parts if name in part.keys()]  # noqa: SIM118
        key = (*prefix, name)
        is_nested = isinstance(found[0], Composite)
        names[name] = make_tree(found, key) if is_nested else key if prefix else name
    return parts[0].shape, names


def build_tree(tree: Tree, tensors: dict[Any, torch.Tensor], device: torch.device | None) -> TensorDict:
    """Return a TensorDict with the tensors in the places of a tree."""
    shape, names = tree
    entries: dict[str, Any] = {}
    for name, place in names.items():
        if type(place) is tuple and type(place[1]) is dict:
            entries[name] = build_tree(place, tensors, device)
        elif place in tensors:  # others are not tensors
            entries[name] = tensors[place]
    return new_tensordict(entries, shape, device)
