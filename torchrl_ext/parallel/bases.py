"""Environment of a ``ParallelEnv`` whose workers are stepped by TorchRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext._compat import new_tensordict
from torchrl_ext.parallel.leaves import Leaves
from torchrl_ext.parallel.plan import WorkerPlan
from torchrl_ext.parallel.worker_env import NON_TENSOR, TENSORDICT
from torchrl_ext.parallel.worker_pool import EACH, WorkerPool

__all__ = ["LeavesBase"]


class LeavesBase(EnvBase):
    """Environment over a pool of :class:`~torchrl_ext.parallel.worker_env.TensorDictEnv`."""

    def __init__(self, pool: WorkerPool, plan: WorkerPlan, device: torch.device | None) -> None:
        first, count = plan.source[0], len(plan.factories)
        device = first.device if device is None else device
        super().__init__(device=device, batch_size=torch.Size([count, *first.batch_size]))
        if plan.is_single_source:
            specs = first.specs.expand(count, *first.batch_size)
        else:
            specs = torch.stack([entry.specs for entry in plan.source], 0)
        read, written = specs["input_spec"].to(device), specs["output_spec"].to(device)
        self.action_spec, self.state_spec = read["full_action_spec"], read["full_state_spec"]
        self.observation_spec, self.reward_spec = written["full_observation_spec"], written["full_reward_spec"]
        self.done_spec = written["full_done_spec"]
        leaves = Leaves.from_metadata(first)
        memory = torch.zeros(count, leaves.nbytes, dtype=torch.uint8)
        parts = [self.full_observation_spec, self.full_done_spec]
        self.__dict__.update(
            _pool=pool,
            _leaves=leaves,
            _memory=memory.numpy(),
            _places=[*zip(leaves.inputs, leaves.views(memory), strict=True)],
            _outputs={leaf.key: leaf for leaf in leaves.outputs},
            _observed={*self.observation_spec.keys(True, True)},
            _reset_tree=_make_tree(parts),
            _step_tree=_make_tree([*parts, self.full_reward_spec]),
            _others=[None] * count,  # last entries of each environment that are not tensors
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        own = self.__dict__
        memory, leaves = own["_memory"], own["_leaves"]
        for number, (leaf, place) in enumerate(own["_places"]):
            value = tensordict.get(leaf.key, None)
            memory[:, number] = value is not None
            if value is not None:
                if value.shape != place.shape:  # copy_ would broadcast it
                    value = _reshape(value, place.shape, leaf.key)
                place.copy_(value)
        actions: Any = memory
        others = [*leaves.non_tensor_inputs]
        if (given := tensordict.get("next", None)) is not None:  # transforms in workers keep a policy's next state
            known = [key for key in given.keys(True, True) if key in own["_observed"]]
            for key in known:
                _reshape(given.get(key), self.observation_spec[key].shape, _next(key))
            others += map(_next, known)
        if others:
            actions = [*zip(memory.copy(), tensordict.select(*others, strict=False).unbind(0), strict=True)]
        observations, *_, infos = own["_pool"].step(actions)
        return self._build(own["_step_tree"], observations, infos)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        own, count = self.__dict__, len(self.__dict__["_memory"])
        each = kwargs.pop("options", {}).get(EACH) or [dict(kwargs) for _ in range(count)]
        options: dict[str, Any] = {EACH: each}
        if tensordict is not None:
            rows = self._rows_to_reset(tensordict)
            options["reset_mask"] = rows.cpu().numpy()
            known = {*self._outputs, *(leaf.key for leaf in own["_leaves"].inputs), *self.reset_keys}
            known |= {*own["_leaves"].non_tensor_inputs, *own["_leaves"].non_tensor_outputs}
            given = tensordict.select(*known, strict=False).to("cpu")
            for number in rows.nonzero().view(-1).tolist() if not given.is_empty() else ():
                each[number] = {**each[number], TENSORDICT: _entries(given[number])}
        observations, infos = own["_pool"].reset(options=options)
        return self._build(own["_reset_tree"], observations, infos)

    def _rows_to_reset(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return a boolean for each environment, whether one of its reset keys is true."""
        count, found = len(self.__dict__["_memory"]), None
        for key in self.reset_keys:
            if (mask := tensordict.get(key, None)) is not None:
                mask = mask.reshape(count, -1).any(-1)
                found = mask if found is None else found | mask
        return torch.ones(count, dtype=torch.bool) if found is None else found

    def _build(self, tree: Any, observations: dict[str, Any], infos: dict[str, Any]) -> TensorDictBase:
        """Return a TensorDict of new tensors."""
        own, device = self.__dict__, self.device
        tensors = {key: leaf.from_array(observations[leaf.name]) for key, leaf in own["_outputs"].items()}
        if device is not None and device.type != "cpu":
            tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
        out = _build_tree(tree, tensors, device)
        if NON_TENSOR in infos:
            pairs = zip(own["_others"], infos[NON_TENSOR], strict=True)
            own["_others"] = [before if new is None else new for before, new in pairs]
            out.update(LazyStackedTensorDict(*own["_others"]))
        return out

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError("ParallelEnv seeds its workers")


def _next(key: Any) -> tuple[str, ...]:
    return ("next", key) if isinstance(key, str) else ("next", *key)


def _reshape(value: Any, shape: torch.Size, key: Any) -> Any:
    """Return an input with other axes in the shape of its spec."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == shape.numel() and value.shape[:1] == shape[:1]:
        return value.reshape(shape)
    raise InvalidArgumentError(
        f"the entry {key!r} has the shape {list(value.shape)}: expected {list(shape)}, as in the specs. Use "
        "env.rand_action(tensordict) for an example"
    )


def _entries(tensordict: TensorDictBase) -> list[tuple[Any, Any]]:
    """Return keys and values of a TensorDict, which take less time to pickle."""
    items = tensordict.items(True, True)
    return [(key, value.contiguous() if isinstance(value, torch.Tensor) else value) for key, value in items]


def _make_tree(parts: Sequence[Composite]) -> tuple[dict[str, Any], torch.Size]:
    """Return the nested keys of specs, with the key of the leaf or another tree in each place, and the batch size."""
    entries: dict[str, Any] = {}

    def add(spec: Composite, into: dict[str, Any], prefix: tuple[str, ...]) -> None:
        for name, part in spec.items():
            if isinstance(part, Composite):
                into.setdefault(name, ({}, part.shape))
                add(part, into[name][0], (*prefix, name))
            else:
                into[name] = (*prefix, name) if prefix else name

    for part in parts:
        add(part, entries, ())
    return entries, parts[0].shape


def _build_tree(tree: tuple[dict[str, Any], torch.Size], tensors: dict[Any, torch.Tensor], device: Any) -> TensorDict:
    """Return a TensorDict with the tensors in the places of a tree."""
    names, batch_size = tree
    found: dict[str, Any] = {}
    for name, place in names.items():
        if type(place) is tuple and type(place[0]) is dict:
            found[name] = _build_tree(place, tensors, device)
        elif place in tensors:
            found[name] = tensors[place]
    return new_tensordict(found, batch_size, device)
