"""Choose the device that computes and the device that renders, and explain the choice.

``CUDA_VISIBLE_DEVICES`` affects CUDA only. EGL renderers read other variables and number GPUs differently, so they may
render on a GPU that the mask hides. :func:`resolve` decides for both.

Upstream libraries fall back to the CPU silently: without CUDA, Stable Baselines3 turns ``"cuda"`` and even
``"cuda:99"`` into the CPU. Here only ``"auto"`` may fall back. If a device that you name is not available, that is an
error.

Data passes the files in this order. ``inventory`` reads what is there. ``cuda``, ``launchers`` and ``renderers`` have
the rules. ``decide`` makes a ``decision`` from an inventory, variables and a request. Applying it sets its variables.
``findings`` compares variables with the rules, and ``verify`` compares a decision with a rendered frame. The commands
``rl-ext doctor`` and ``rl-ext run`` are in ``rl_ext_core.cli``.
"""

from __future__ import annotations

from rl_ext_core.devices.decide import resolve, resolve_device
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.findings import Finding, check_environment
from rl_ext_core.devices.inventory import EglDevice, Gpu, Inventory

__all__ = [
    "Decision",
    "EglDevice",
    "Finding",
    "Gpu",
    "Inventory",
    "check_environment",
    "resolve",
    "resolve_device",
]
