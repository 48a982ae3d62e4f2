"""Choose the device that computes and the device that renders, and explain the choice.

``CUDA_VISIBLE_DEVICES`` affects CUDA only. EGL renderers read other variables and number GPUs differently, so they may
render on a GPU that the mask hides. :func:`resolve` decides for both.

Upstream libraries fall back to the CPU silently: without CUDA, Stable Baselines3 turns ``"cuda"`` and even
``"cuda:99"`` into the CPU. Here only ``"auto"`` may fall back. If a device that you name is not available, that is an
error.
"""

from __future__ import annotations

from rl_ext_core.devices._check import Finding, check_environment
from rl_ext_core.devices._resolve import resolve, resolve_device
from rl_ext_core.devices._robosuite import import_robosuite
from rl_ext_core.devices.decision import Decision, Step
from rl_ext_core.devices.inventory import EglDevice, Gpu, Inventory
from rl_ext_core.devices.workers import BoundFactory

__all__ = [
    "BoundFactory",
    "Decision",
    "EglDevice",
    "Finding",
    "Gpu",
    "Inventory",
    "Step",
    "check_environment",
    "import_robosuite",
    "resolve",
    "resolve_device",
]
