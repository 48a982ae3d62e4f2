"""Picklable factories of TorchRL environments: ``as_factory``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.factory import convert

__all__ = ["PRELOAD", "adapt", "as_factory", "read_metadata"]

# tensordict imports h5py and pandas, if installed, when it first makes a TensorDict from plain data.
PRELOAD = ("h5py", "pandas", "torchrl_ext")
# Module, class and TorchRL wrapper of environments. Only modules that are loaded are searched.
_WRAPPERS = (
    ("gymnasium", "Env", "torchrl_ext.GymWrapper"),
    ("gymnasium.vector", "VectorEnv", "torchrl_ext.GymWrapper"),
    ("pettingzoo.utils.env", "ParallelEnv", "torchrl.envs.PettingZooWrapper"),
    ("pettingzoo.utils.env", "AECEnv", "torchrl.envs.PettingZooWrapper"),
    ("meltingpot.utils.substrates.substrate", "Substrate", "torchrl.envs.MeltingpotWrapper"),
    ("dm_control.rl.control", "Environment", "torchrl.envs.DMControlWrapper"),
    ("dm_control.composer.environment", "Environment", "torchrl.envs.DMControlWrapper"),
    ("vmas.simulator.environment.environment", "Environment", "torchrl.envs.VmasWrapper"),
)


def as_factory(source: Any, *, verify: bool = True, start_method: str | None = None) -> EnvFactory[Any]:
    """Turn an environment into a picklable function that builds equal TorchRL environments.

    Environments of gymnasium, PettingZoo, dm_control, Melting Pot and VMAS are wrapped for TorchRL. Pass the result to
    ``SerialEnv`` or to TorchRL's collectors, including the distributed ones:

    .. code-block:: python

        collector = RayCollector([as_factory(env)] * 2, policy, ...)

    :param source: an environment, a function or class that builds one, or its gymnasium id or ``EnvSpec``
    :param verify: whether to compare a copy of an instance with the instance, in a temporary process
    :param start_method: start method of the temporary process; ``"forkserver"`` (the default if
        available), ``"spawn"`` or ``"fork"``
    :return: the factory
    :raises NotCopyableError: If a copy would differ from the instance. The text names the attribute and a fix.
    :raises WorkerError: If building or stepping a copy fails.
    :raises InvalidTypeError: If ``source`` does not build an environment.
    """
    return convert(source, verify=verify, start_method=start_method, adapt=adapt, preload=PRELOAD, read=read_metadata)


def read_metadata(environment: EnvBase) -> EnvMetaData:
    """Read an environment's metadata, which contains its specs and batch size.

    :raises RuntimeError: If the environment has transforms that TorchRL does not allow in a worker.
    """
    if hasattr(BatchedEnvBase, "_validate_worker_env"):  # in other versions, the worker raises the error
        BatchedEnvBase._validate_worker_env(environment)
    return EnvMetaData.metadata_from_env(environment)


def adapt(environment: Any) -> EnvBase:
    """Wrap an environment for TorchRL, and return TorchRL's own environments unchanged.

    :param environment: environment of TorchRL, gymnasium (single or vectorized), PettingZoo, dm_control, Melting Pot
        or VMAS
    :raises InvalidTypeError: If it is an environment of another library.
    """
    if isinstance(environment, EnvBase):
        return environment
    for package, name, wrapper in _WRAPPERS:
        kind = getattr(sys.modules.get(package), name, None)
        if kind is not None and isinstance(environment, kind):
            module, _, cls = wrapper.rpartition(".")
            return getattr(importlib.import_module(module), cls)(environment)
    kind = type(environment)
    raise InvalidTypeError(
        f"TorchRL has no wrapper for an environment of type {kind.__module__}.{kind.__qualname__}; expected an "
        "environment of torchrl.envs, gymnasium, PettingZoo, dm_control, Melting Pot or VMAS. Wrap it yourself: "
        f"ParallelEnv(2, lambda: MyWrapper({kind.__name__}(...)))"
    )
