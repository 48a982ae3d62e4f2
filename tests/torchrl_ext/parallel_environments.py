"""Environments for the tests of ``ParallelEnv``: of TorchRL, and one that reports its devices."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from tests.environments import Counting, log_event

DEVICE_VARIABLES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")


def variables() -> list[str | None]:
    return [os.environ.get(name) for name in DEVICE_VARIABLES]


class DeviceReporting(Counting):
    def __init__(self, device: str = "none") -> None:
        super().__init__()
        self.device_given = device
        self.at_construction = variables()

    def device_settings(self) -> list[Any]:
        """Return variables at construction and now, the backend that mujoco read, and the device."""
        context = sys.modules.get("mujoco.rendering.classic.gl_context")
        return [self.at_construction, variables(), getattr(context, "_MUJOCO_GL", "not imported"), self.device_given]


class NativeEnv(EnvBase):
    """TorchRL environment that draws from torch's global generator, and observes its seed."""

    def __init__(self, size: int = 2, note: Any = None, high: float = 1.0, **kwargs: Any) -> None:
        log_event("built")
        super().__init__(**kwargs)
        self.size, self.note, self.extra = size, note, torch.zeros(())
        self.observation_spec = Composite(observation=Unbounded((size,)), seed=Unbounded((1,), dtype=torch.int64))
        if note is not None:
            self.observation_spec["note"] = NonTensor(())
        self.action_spec = Bounded(-1, high, (1,))
        self.reward_spec = Unbounded((1,))
        self.register_buffer("total", torch.zeros(()))
        self.seed = -1

    def _make_entries(self) -> dict[str, Any]:
        out: dict[str, Any] = {"observation": torch.rand(self.size), "seed": torch.tensor([self.seed])}
        if self.note is not None:
            out["note"] = NonTensorData(threading.Lock() if self.note == "lock" else self.note)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return TensorDict(self._make_entries())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.total += 1
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {**self._make_entries(), "reward": tensordict["action"], "done": done, "terminated": done.clone()}
        )

    def add(self, a: int, *, b: int) -> int:
        return a + b

    def _set_seed(self, seed: int | None) -> None:
        self.seed = -1 if seed is None else seed
        torch.manual_seed(self.seed)
