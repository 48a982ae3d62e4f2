"""Compressed storage for stacks of frames, used by all replay buffers of this project.

``FrameStore`` stores each frame once and returns transitions bit for bit. ``FrameStore.adaptive`` also detects the
frame stack and a suitable codec. This package does not import a framework.
"""

from rl_ext_core.frames.codecs import Codec, codec_names, get_codec, register_codec
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.planning import Plan, plan
from rl_ext_core.frames.store import FrameStore, RecoveryReport, SalvageReport, salvage

__all__ = [
    "Codec",
    "FrameStore",
    "JpegCodec",
    "Plan",
    "RecoveryReport",
    "SalvageReport",
    "StackLayout",
    "codec_names",
    "get_codec",
    "plan",
    "register_codec",
    "salvage",
]
