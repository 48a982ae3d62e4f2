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

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext._compat import HAS_FAST_PATH, find_getter, new_tensordict
from torchrl_ext.parallel.leaves import Key, Leaves

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
    """Environment whose actions and observations are records of an environment of TorchRL, see :class:`Leaves`.

    As a wrapper, it contains the gymnasium environment inside, whose generators and attributes are recorded.

    :param environment: environment of TorchRL
    """

    is_adapter = True  # its attributes are not part of the environment's state

    def __init__(self, environment: EnvBase) -> None:
        inner = find_gymnasium_env(environment)
        super().__init__(gymnasium.Env() if inner is None else inner)
        self.environment, self.records_episodes = environment, inner is not None
        leaves = self._leaves = Leaves(environment.specs, type(environment).__name__)
        self.observation_space, self.action_space = leaves.spaces
        self._record = np.zeros(leaves.outputs.size, np.uint8)
        self._places = leaves.outputs.map(self._record)[1]
        self._root: TensorDictBase = self._new()
        device = environment.device
        self._steps_plainly = (
            HAS_FAST_PATH
            and leaves.are_flat
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
        self._record[:] = 0  # without the last reward
        self._write(self._select(self._root))
        return self._record, self._others(self._root)

    def step(self, action: np.ndarray[Any, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment.

        :param action: bytes of the inputs
        """
        inputs = self._leaves.inputs.read(action)
        root: Any = self._root  # of this object, which replaces it below
        if self._steps_plainly and type(root) is TensorDict and all(type(key) is str for key in inputs):
            # The results of EnvBase.step and step_mdp, which take twice as long.
            root = new_tensordict({**root._tensordict, **inputs}, root.batch_size, root.device)
            following = self.environment._step(root)
            values = self._select(following)
            if any(key not in values or values[key].shape != place.shape for key, place in self._places.items()):
                values = self._select(self.environment._step_proc_data(following))
            entries = self._leaves.next_root(root._tensordict, values)
            self._root = new_tensordict(entries, root.batch_size, root.device)
        else:
            for key, value in inputs.items():
                root.set(key, value)
            out = self.environment.step(root)
            following = out.get("next")
            values = self._select(following)
            self._root = self.environment._step_mdp(out)
        self._write(values)
        return self._record, 0.0, False, False, self._others(following)

    def _select(self, tensordict: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Return the tensors of an output."""
        get = find_getter(tensordict) if self._leaves.are_flat else tensordict.get
        return {key: value for key in self._places if (value := get(key, None)) is not None}

    def _write(self, values: dict[Key, torch.Tensor]) -> None:
        """Write outputs to the record, where missing ones keep the last value."""
        for key, value in values.items():
            place = self._places[key]
            if value.shape != place.shape:  # it would be broadcast
                raise EnvironmentOutputError(
                    f"the output {key!r} has the shape {list(value.shape)}: expected {list(place.shape)}, as in the "
                    "specs. Give the spec the shape that reset and step return"
                )
            place[...] = value.numpy(force=True)  # takes less time than torch's copy_

    def _others(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """Return entries that are not tensors, as an info."""
        keys = self._leaves.non_tensor_outputs
        return {NON_TENSOR: tensordict.select(*keys, strict=False)} if keys else {}

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self.environment, name)

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


def seed_environment(adapter: Any, seed: int | None, static: bool) -> int | None:
    """Seed torch and an environment in a worker, and return the next seed, as TorchRL's workers do."""
    if seed is not None:
        torch.manual_seed(seed)
    found: int | None = adapter.environment.set_seed(seed, static_seed=static)
    return found


def seed_if_possible(adapter: Any, seed: int, static: bool) -> None:
    """Seed torch and an environment, unless the environment has no seed, as Melting Pot's."""
    with contextlib.suppress(NotImplementedError):
        seed_environment(adapter, seed, static)
