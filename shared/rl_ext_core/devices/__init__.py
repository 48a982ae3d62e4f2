"""Which device computes and which one renders, decided in one place and explained.

``CUDA_VISIBLE_DEVICES`` steers CUDA alone. Renderers over EGL choose by other variables and other numberings, each by
its own rule, so that memory shows up on GPUs that nobody named. :func:`resolve` makes one decision for both.

Upstream libraries fall back to the CPU in silence: Stable Baselines3 turns ``"cuda"`` and even ``"cuda:99"`` into the
CPU where there is no CUDA. Here only ``"auto"`` may choose; a device that was named is that device or an error.
"""

from __future__ import annotations

from rl_ext_core.devices._check import Finding, check_environment
from rl_ext_core.devices._renderers import IMPORT_TIME_VARIABLES
from rl_ext_core.devices._resolve import resolve, resolve_device
from rl_ext_core.devices._robosuite import import_robosuite
from rl_ext_core.devices.decision import Decision, Step
from rl_ext_core.devices.inventory import EglDevice, Gpu, Inventory
from rl_ext_core.devices.workers import BoundFactory

__all__ = [
    "IMPORT_TIME_VARIABLES",
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
