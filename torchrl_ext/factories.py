"""``as_factory`` for TorchRL: what it builds is an environment of TorchRL's."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.convert import convert

__all__ = ["adapt", "as_factory", "make_factory", "read_metadata"]

# tensordict imports the other two, where they are installed, when it first makes a TensorDict of plain data.
_PRELOAD = ("h5py", "pandas", "torchrl_ext")
# Classes of environments, looked for where their package is loaded, and what wraps them.
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
    """Turn an environment into a picklable factory of environments of TorchRL like it.

    As :func:`rl_ext_core.factory.as_factory`; environments of gymnasium, PettingZoo, dm_control, Melting Pot and VMAS
    are wrapped. For TorchRL's collectors, also the distributed ones, and ``SerialEnv``:

    .. code-block:: python

        collector = RayCollector([as_factory(env)] * 2, policy, ...)

    :param source: an environment, a function or class that builds one, gymnasium's id or specification of one
    :param verify: compare a copy of an instance with it, in a process that is thrown away
    :param start_method: of that process
    :return: the factory
    :raises NotCopyableError: no copy would be the instance's equal; the text names the attribute, and the line to write
    :raises WorkerError: building or stepping a copy has failed
    :raises InvalidTypeError: nothing that builds an environment
    """
    return make_factory(source, verify=verify, start_method=start_method)


def make_factory(
    source: Any, *, verify: bool, start_method: str | None, timeout: float | None = None
) -> EnvFactory[Any]:
    """Do what :func:`as_factory` does, within a number of seconds."""
    return convert(
        source,
        verify=verify,
        start_method=start_method,
        adapt=adapt,
        preload=_PRELOAD,
        read=read_metadata,
        timeout=timeout,
    )


def read_metadata(environment: EnvBase) -> EnvMetaData:
    """Read it of an environment, which caches what it is made from.

    :raises RuntimeError: TorchRL's, for transforms that may not be in a worker
    """
    if hasattr(BatchedEnvBase, "_validate_worker_env"):  # else the worker finds out
        BatchedEnvBase._validate_worker_env(environment)
    return EnvMetaData.metadata_from_env(environment)


def adapt(environment: Any) -> EnvBase:
    """Wrap an environment for TorchRL, unless it is one of TorchRL's already.

    :param environment: of gymnasium, single or vectorised, PettingZoo, dm_control, Melting Pot or VMAS
    :raises InvalidTypeError: of none of these
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
        f"an environment of {kind.__module__}.{kind.__qualname__} is none that TorchRL has a wrapper for; expected one "
        "of torchrl.envs, or of gymnasium, PettingZoo, dm_control, Melting Pot or VMAS. Hand over one that is wrapped: "
        f"ParallelEnv(2, lambda: MyWrapper({kind.__name__}(...)))"
    )
