"""``GymWrapper`` and ``GymEnv``: faster, exact replacements of TorchRL's classes."""

from __future__ import annotations

from torchrl_ext.gym.wrapper import GymEnv, GymWrapper

__all__ = ["GymEnv", "GymWrapper"]
