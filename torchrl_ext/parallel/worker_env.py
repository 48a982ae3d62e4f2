"""Environment of TorchRL in a worker, as the gymnasium environment that the pool steps."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper

from torchrl_ext._compat import has_fast_path, new_tensordict
from torchrl_ext.parallel.leaves import Leaves

__all__ = ["TensorDictEnv", "find_gymnasium_env", "seed_environment", "seed_if_possible", "split_transforms"]

# Key of the infos, and of the options of reset.
NON_TENSOR, TENSORDICT = "non-tensor entries", "tensordict"
_STEP_PARTS = ("step", "_step_proc_data", "_step_mdp")


def split_transforms(environment: Any) -> tuple[list[Any], Any]:
    """Return the transforms of an environment, outermost first, and the environment without them."""
    transforms = []
    environment = environment.environment if isinstance(environment, TensorDictEnv) else environment
    while isinstance(environment, TransformedEnv):
        transforms.append(environment.transform)
        environment = environment.base_env
    return transforms, environment


def find_gymnasium_env(environment: Any) -> Any:
    """Return the single gymnasium environment in a ``GymWrapper``, which may be transformed; None if there is none."""
    base = split_transforms(environment)[1]
    found = base._env if isinstance(base, GymWrapper) else None
    return found if isinstance(found, gymnasium.Env) else None


class TensorDictEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment whose observations are the outputs of an environment of TorchRL, see :class:`Leaves`.

    As a wrapper, it contains the gymnasium environment inside, whose generators and attributes are recorded.

    :param environment: environment of TorchRL
    """

    is_adapter = True  # its attributes are not part of the environment's state

    def __init__(self, environment: EnvBase) -> None:
        inner = find_gymnasium_env(environment)
        super().__init__(gymnasium.Env() if inner is None else inner)
        self.environment, self.records_episodes = environment, inner is not None
        self._leaves = Leaves(environment.specs, type(environment).__name__)
        self.observation_space, self.action_space = self._leaves.spaces
        self._zeros = {leaf.name: np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves.outputs}
        self._found: dict[str, Any] = {}
        self._root: TensorDictBase = self._new()
        completed, device = {*environment.reward_keys, *environment.done_keys}, environment.device
        self._completed = {leaf.name: leaf.shape for leaf in self._leaves.outputs if leaf.key in completed}
        self._is_plain = (
            has_fast_path()
            and self._leaves.are_flat
            and (device is None or device.type == "cpu")
            and not environment.run_type_checks
            and "step" not in vars(environment)
            and all(getattr(type(environment), name) is getattr(EnvBase, name) for name in _STEP_PARTS)
        )

    def _new(self) -> TensorDict:
        return TensorDict({}, batch_size=self.environment.batch_size, device=self.environment.device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment.

        :param options: arguments of TorchRL's ``reset``
        """
        options = dict(options or {})
        if seed is not None:
            options["seed"] = seed
        if (entries := options.pop(TENSORDICT, None)) is not None:
            options["tensordict"] = self._new().update({key: torch.from_numpy(value) for key, value in entries})
        self._root = self.environment.reset(**options).copy()
        self._found = dict(self._zeros)  # without the last reward
        return self._read(self._select(self._root)), self._read_others(self._root)

    def step(self, action: np.ndarray[Any, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment.

        :param action: bytes of the inputs
        """
        inputs = self._leaves.read_inputs(action)
        root: Any = self._root  # of this object, which replaces it below
        if self._is_plain and type(root) is TensorDict and not any(type(key) is tuple for key in inputs):
            return self._read(self._step_plainly(root, inputs)), 0.0, False, False, {}
        for key, value in inputs.items():
            root.set(key, value)
        out = self.environment.step(root)
        following = out.get("next")
        self._root = self.environment._step_mdp(out)
        return self._read(self._select(following)), 0.0, False, False, self._read_others(following)

    def _step_plainly(self, root: Any, inputs: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take a step without nested keys, with the results of ``EnvBase.step``, which takes twice as long."""
        root = new_tensordict({**root._tensordict, **inputs}, root.batch_size, root.device)
        out = self.environment._step(root)
        values = self._select(out)
        for name, shape in self._completed.items():
            if name not in values or values[name].shape != shape:
                values = self._select(self.environment._step_proc_data(out))
                break
        self._root = new_tensordict(self._leaves.next_root(root._tensordict, values), root.batch_size, root.device)
        return values

    def _select(self, tensordict: TensorDictBase) -> dict[str, torch.Tensor]:
        """Return the tensors of an output, by the names of their leaves."""
        get = tensordict.get
        return {leaf.name: value for leaf in self._leaves.outputs if (value := get(leaf.key, None)) is not None}

    def _read(self, values: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return tensors as arrays. Those that are missing keep the last value."""
        for name, value in values.items():
            self._found[name] = value.numpy(force=True)
        return self._found

    def _read_others(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """Return entries that are not tensors, as an info."""
        keys = self._leaves.non_tensor_outputs
        return {NON_TENSOR: tensordict.select(*keys, strict=False)} if keys else {}

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self.environment, name)

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


def seed_environment(adapter: Any, seed: int, static: bool) -> int | None:
    """Seed torch and an environment in a worker, and return the next seed, as TorchRL's workers do."""
    torch.manual_seed(seed)
    found: int | None = adapter.environment.set_seed(seed, static_seed=static)
    return found


def seed_if_possible(adapter: Any, seed: int, static: bool) -> None:
    """Seed torch and an environment, unless the environment has no seed, as Melting Pot's."""
    with contextlib.suppress(NotImplementedError):
        seed_environment(adapter, seed, static)
