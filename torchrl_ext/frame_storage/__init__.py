"""A TorchRL storage that keeps images compressed, and each frame once."""

from __future__ import annotations

from torchrl_ext.frame_storage.storage import FrameStorage

__all__ = ["FrameStorage"]
