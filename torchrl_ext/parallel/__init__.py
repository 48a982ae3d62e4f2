"""``ParallelEnv``: accepts environment instances, and reports why a worker died."""

from __future__ import annotations

from torchrl_ext.parallel.env import ParallelEnv

__all__ = ["ParallelEnv"]
