"""``as_factory`` for TorchRL: what it builds is an environment of TorchRL's."""

from __future__ import annotations

from typing import Any

from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.convert import convert
from torchrl_ext._adapt import adapt
from torchrl_ext._metadata import metadata_of

__all__ = ["as_factory", "factory_of"]


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
    return factory_of(source, verify=verify, start_method=start_method)


def factory_of(source: Any, *, verify: bool, start_method: str | None, timeout: float | None = None) -> EnvFactory[Any]:
    """Do what :func:`as_factory` does, within a number of seconds."""
    return convert(
        source,
        verify=verify,
        start_method=start_method,
        adapt=adapt,
        preload=("torchrl_ext",),
        read=metadata_of,
        timeout=timeout,
    )
