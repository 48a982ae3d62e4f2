"""What to know about a machine beside its variables, and what to install on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices._renderers import BACKEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_ext_core.devices.doctor._predict import Prediction
    from rl_ext_core.devices.inventory import Inventory


@dataclass(frozen=True)
class Advice:
    """What else to know.

    :param text: one sentence
    :param line: what to type; None where there is nothing to type
    """

    text: str
    line: str | None = None


def advice(inventory: Inventory, device: str | None, renderers: Sequence[Prediction]) -> tuple[Advice, ...]:
    """Say which packages are missing, and how a machine without a GPU renders."""
    if not renderers:
        return (Advice("no renderer that is known here is installed", 'pip install "rl-ext[mujoco]"'),)
    if device != "cpu" or inventory.gpus or inventory.egl is None:
        return ()
    software = next((found for found in inventory.egl if found.software), None)
    mesa = f"Mesa's EGL ({BACKEND}=egl, EGL device {software.index})" if software else ""
    osmesa = f"OSMesa ({BACKEND}=osmesa)" if inventory.osmesa else ""
    if mesa or osmesa:
        return (Advice(f"the CPU renders through {' or '.join(filter(None, (mesa, osmesa)))}"),)
    return (Advice("nothing renders on this CPU: Mesa is not installed", "apt-get install libegl1 libegl-mesa0"),)
