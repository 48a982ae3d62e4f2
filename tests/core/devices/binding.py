"""Decisions for three workers on a machine with four GPUs, for tests of vectorized environments."""

from __future__ import annotations

from functools import partial
from typing import Any

from rl_ext_core.devices import resolve
from rl_ext_core.factory import EnvFactory, as_factory
from tests.core.devices.machines import machine
from tests.core.devices.reporting_env import Reporter

MACHINE = machine(4, order=(2, 0, 3, 1))
# The variables of GPUs 0, 1 and 2, which workers can only have from the decision.
EXPECTED = [["egl", "1", "egl"], ["egl", "3", "egl"], ["egl", "0", "egl"]]
UNSET = [None, None, None]


def bound(folder: str, *, renderer: str = "robosuite", wrap: Any = None) -> list[EnvFactory[Any]]:
    """Return a factory for each of three workers, each for another GPU."""
    factories = []
    for number in range(3):
        decision = resolve("auto", render="same", renderer=renderer, worker=number, inventory=MACHINE, environ={})
        reporter = Reporter(folder, number)
        factory = as_factory(reporter if wrap is None else partial(wrap, reporter))
        factories.append(factory.for_workers(3, devices=decision)[number])
    return factories


def bind_to_mesa(folder: str, *, wrap: Any = None) -> list[EnvFactory[Any]]:
    """Return two factories of environments with a camera, for this machine's software device."""
    decision = resolve("cpu", render="same", renderer="gymnasium")
    reporters = [Reporter(folder, number, camera=True) for number in range(2)]
    return [
        as_factory(reporter if wrap is None else partial(wrap, reporter)).for_workers(2, devices=decision)[number]
        for number, reporter in enumerate(reporters)
    ]


def wrap_for_torchrl(reporter: Reporter, *, from_pixels: bool = False) -> Any:
    """Create the environment of a factory and wrap it for TorchRL."""
    from torchrl.envs import GymWrapper

    return GymWrapper(reporter(), device="cpu", from_pixels=from_pixels, pixels_only=from_pixels)
