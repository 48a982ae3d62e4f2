"""Makes an environment of any kind one of TorchRL's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchrl.envs import EnvBase

from rl_ext_core.errors import InvalidTypeError

__all__ = ["adapt"]


def adapt(environment: Any) -> EnvBase:
    """Wrap an environment for TorchRL, unless it is one of TorchRL's already.

    :param environment: of gymnasium, single or vectorised, PettingZoo, dm_control, Melting Pot or VMAS
    :raises InvalidTypeError: of none of these
    """
    if isinstance(environment, EnvBase):
        return environment
    for kind, wrap in _wrappers():
        if isinstance(environment, kind):
            return wrap(environment)
    cls = type(environment)
    raise InvalidTypeError(
        f"an environment of {cls.__module__}.{cls.__qualname__} is none that TorchRL has a wrapper for; expected one "
        "of torchrl.envs, or of gymnasium, PettingZoo, dm_control, Melting Pot or VMAS. Hand over one that is wrapped: "
        f"ParallelEnv(2, lambda: MyWrapper({cls.__name__}(...)))"
    )


def _wrappers() -> Iterator[tuple[type, Callable[[Any], EnvBase]]]:
    """Give the classes of environments whose packages are loaded, and what wraps them."""
    for module, name, wrap in (
        ("gymnasium", "Env", _gymnasium),
        ("gymnasium.vector", "VectorEnv", _gymnasium),
        ("pettingzoo.utils.env", "ParallelEnv", _pettingzoo),
        ("pettingzoo.utils.env", "AECEnv", _pettingzoo),
        ("meltingpot.utils.substrates.substrate", "Substrate", _meltingpot),
        ("dm_control.rl.control", "Environment", _dm_control),
        ("dm_control.composer.environment", "Environment", _dm_control),
        ("vmas.simulator.environment.environment", "Environment", _vmas),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            yield kind, wrap


def _gymnasium(environment: Any) -> EnvBase:
    from torchrl_ext import GymWrapper

    return GymWrapper(environment)


def _pettingzoo(environment: Any) -> EnvBase:
    from torchrl.envs import PettingZooWrapper

    return PettingZooWrapper(environment)


def _meltingpot(environment: Any) -> EnvBase:
    from torchrl.envs import MeltingpotWrapper

    return MeltingpotWrapper(environment)


def _dm_control(environment: Any) -> EnvBase:
    from torchrl.envs import DMControlWrapper

    return DMControlWrapper(environment)


def _vmas(environment: Any) -> EnvBase:
    from torchrl.envs import VmasWrapper

    return VmasWrapper(environment)
