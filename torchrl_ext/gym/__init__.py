"""``GymWrapper`` and ``GymEnv``: TorchRL's, for environments that speak NumPy or torch, exact and light."""

from __future__ import annotations

from torchrl_ext.gym.wrapper import GymEnv, GymWrapper

__all__ = ["GymEnv", "GymWrapper"]
