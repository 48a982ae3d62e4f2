"""A TorchRL storage that stores each image frame once and compressed: ``FrameStorage``."""

from __future__ import annotations

from torchrl_ext.frame_storage.storage import FrameStorage

__all__ = ["FrameStorage"]
