"""``ParallelEnv``: TorchRL's, for environments in whatever form users have them; its workers say why they died."""

from __future__ import annotations

from torchrl_ext.parallel.env import ParallelEnv

__all__ = ["ParallelEnv"]
