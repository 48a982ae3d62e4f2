"""Extensions of TorchRL. They bear the names of what they replace and take the same arguments."""

from __future__ import annotations

from rl_ext_core.devices import resolve_device
from torchrl_ext.gym import GymEnv, GymWrapper

__all__ = ["GymEnv", "GymWrapper", "resolve_device"]
