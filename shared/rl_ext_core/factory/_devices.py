"""The device decision of each worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory._overrides import layers

__all__ = ["decisions"]

_RENDERERS = {"robosuite": "robosuite", "dm_control": "dm_control"}


def decisions(devices: Any, num_workers: int, environment: Any) -> list[Decision | None]:
    """Give a decision for each worker.

    :param devices: as for :meth:`EnvFactory.for_workers`
    :param environment: an instance whose renderer decides the rule; None: nothing is known about it
    :raises InvalidArgumentError: another value
    """
    if devices is None:
        return [None] * num_workers
    if isinstance(devices, Decision):
        return [devices] * num_workers
    if devices == "round-robin":
        renderer = None if environment is None else _renderer_of(environment)
        render = {} if renderer is None else {"render": "same", "renderer": renderer}
        return [resolve("auto", worker=worker, **render) for worker in range(num_workers)]  # type: ignore[arg-type]
    if isinstance(devices, Sequence) and not isinstance(devices, str) and all(isinstance(d, Decision) for d in devices):
        return list(devices)
    raise InvalidArgumentError(
        f'devices={devices!r} is no decision; expected "round-robin", a decision or one for each worker. Write '
        'devices=[resolve("cuda", render="same", worker=worker) for worker in range(num_workers)]'
    )


def _renderer_of(environment: Any) -> str | None:
    """Tell by which renderer's rule an environment picks a GPU; None: it does not render on one."""
    for layer in layers(environment):
        for base in type(layer).__mro__:
            if base.__module__.partition(".")[0] in _RENDERERS:
                return _RENDERERS[base.__module__.partition(".")[0]]
    gymnasium = sys.modules.get("gymnasium.envs.mujoco")
    if gymnasium is not None and any(isinstance(layer, gymnasium.MujocoEnv) for layer in layers(environment)):
        return "gymnasium"
    return None
