"""Extensions of TorchRL, with the names and arguments of the classes that they replace."""

from __future__ import annotations

from rl_ext_core.devices import resolve_device
from torchrl_ext import _compat
from torchrl_ext.factories import as_factory
from torchrl_ext.frame_storage import FrameStorage

if _compat.HAS_WRAPPER:
    from torchrl_ext.gym import GymEnv, GymWrapper
else:
    from torchrl.envs import GymEnv, GymWrapper  # type: ignore[no-redef]
from torchrl_ext.environment_state import EnvironmentState
from torchrl_ext.parallel import ParallelEnv

if _compat.HAS_SLICE_SAMPLER:
    from torchrl_ext.slice_sampler import SliceSampler
else:
    from torchrl.data import SliceSampler  # type: ignore[no-redef]

__all__ = [
    "EnvironmentState",
    "FrameStorage",
    "GymEnv",
    "GymWrapper",
    "ParallelEnv",
    "SliceSampler",
    "as_factory",
    "resolve_device",
]
