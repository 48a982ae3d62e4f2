"""Extensions of Stable Baselines3. They bear the names of what they extend and take the same arguments."""

from __future__ import annotations

from rl_ext_core.devices import resolve_device
from rl_ext_core.factory import EnvFactory, as_factory
from sb3_ext.replay_buffer import CompressedReplayBuffer

__all__ = ["CompressedReplayBuffer", "EnvFactory", "as_factory", "resolve_device"]
