"""Extensions of Stable Baselines3, with its names and arguments.

Buffers for sb3-contrib's algorithms are in :mod:`sb3_ext.contrib`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_ext_core.devices import resolve_device
from rl_ext_core.factory import EnvFactory, as_factory
from sb3_ext.auto_vec_env import AutoVecEnv, make_vec_env
from sb3_ext.critic_hooks import register_critic
from sb3_ext.gym_vec_env import GymVecEnv
from sb3_ext.her_replay_buffer import CompressedHerReplayBuffer
from sb3_ext.multi_agent_vec_env import MultiAgentVecEnv
from sb3_ext.prioritized import (
    CompressedPrioritizedDictReplayBuffer,
    CompressedPrioritizedHerReplayBuffer,
    CompressedPrioritizedReplayBuffer,
)
from sb3_ext.replay_buffers import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_ext.resume_callback import ResumeCallback, resume
from sb3_ext.rollout_buffers import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_ext.sequences import SequenceSamples
from sb3_ext.timing_callback import VecEnvTimingCallback
from sb3_ext.vec_env import RayVecEnv, SharedMemoryVecEnv

__all__ = [
    "AutoVecEnv",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedPrioritizedDictReplayBuffer",
    "CompressedPrioritizedHerReplayBuffer",
    "CompressedPrioritizedNStepReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "EnvFactory",
    "GymVecEnv",
    "MultiAgentVecEnv",
    "RayVecEnv",
    "ResumeCallback",
    "SequenceSamples",
    "SharedMemoryVecEnv",
    "VecEnvTimingCallback",
    "as_factory",
    "make_vec_env",
    "register_critic",
    "resolve_device",
    "resume",
]

if TYPE_CHECKING:
    from sb3_ext.n_step_buffers import CompressedNStepReplayBuffer, CompressedPrioritizedNStepReplayBuffer


def __getattr__(name: str) -> Any:
    """Import n-step buffers, which need Stable Baselines3 2.7. Earlier versions have all other buffers."""
    if name not in ("CompressedNStepReplayBuffer", "CompressedPrioritizedNStepReplayBuffer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import stable_baselines3.common.buffers

    if not hasattr(stable_baselines3.common.buffers, "NStepReplayBuffer"):
        from rl_ext_core.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs Stable Baselines3 2.7 or later, but {stable_baselines3.__version__} is installed. "
            'Install it with:\n    pip install "stable-baselines3>=2.7"'
        )
    from sb3_ext import n_step_buffers

    return getattr(n_step_buffers, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
