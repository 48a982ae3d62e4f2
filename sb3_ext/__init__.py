"""Extensions of Stable Baselines3. They bear the names of what they extend and take the same arguments."""

from __future__ import annotations

from rl_ext_core.devices import resolve_device
from rl_ext_core.factory import EnvFactory, as_factory
from sb3_ext.auto_vec_env import AutoVecEnv
from sb3_ext.make_vec_env import make_vec_env
from sb3_ext.ray_vec_env import RayVecEnv
from sb3_ext.replay_buffer import CompressedReplayBuffer
from sb3_ext.shared_memory_vec_env import SharedMemoryVecEnv
from sb3_ext.timings import VecEnvTimings

__all__ = [
    "AutoVecEnv",
    "CompressedReplayBuffer",
    "EnvFactory",
    "RayVecEnv",
    "SharedMemoryVecEnv",
    "VecEnvTimings",
    "as_factory",
    "make_vec_env",
    "resolve_device",
]
