"""Compressed storage for stacks of frames, used by all replay buffers of this project.

``FrameStore`` stores each frame once and returns transitions bit for bit. It detects the frame stack, if
``Observation`` does not say it. This package does not import a framework.
"""

from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.planning import Plan, plan
from rl_ext_core.frames.store import FrameStore, Observation, RecoveryReport

__all__ = [
    "FrameStore",
    "Observation",
    "Plan",
    "RecoveryReport",
    "StackLayout",
    "plan",
]
