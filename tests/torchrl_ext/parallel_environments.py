"""Environments for the tests of ``ParallelEnv``, which log events or fail in many ways."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from tests.sb3_ext import vec_test_envs

# Environment variable with the path of the log.
EVENT_LOG = "RL_EXT_TEST_EVENT_LOG"


def log_event(event: str) -> None:
    if EVENT_LOG in os.environ:
        with Path(os.environ[EVENT_LOG]).open("a") as file:
            file.write(f"{os.getpid()} {event}\n")


def count_events(event: str, *, in_this_process: bool) -> int:
    """Count how often this process, or all others together, logged an event."""
    entries = [line.split() for line in Path(os.environ[EVENT_LOG]).read_text().splitlines()]
    return sum(1 for pid, entry in entries if entry == event and (int(pid) == os.getpid()) == in_this_process)


class Well(gymnasium.Env[Any, Any]):
    """Environment that logs its calls, and observes its fixed depth, the step and a random number."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, depth: float = 10.0) -> None:
        log_event("built")
        self.depth = depth

    def _observation(self) -> np.ndarray[Any, Any]:
        """Return the depth, the step and a random number."""
        return np.array([self.depth, self.count, self.np_random.normal()], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        log_event("reset")
        self.count = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        log_event("stepped")
        self.count += 1
        return self._observation(), float(action), self.count == 7, False, {}

    def close(self) -> None:
        log_event("closed")


DEVICE_VARIABLES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")


def variables() -> list[str | None]:
    """Return the current values of the variables that select a renderer's device."""
    return [os.environ.get(name) for name in DEVICE_VARIABLES]


class DeviceReporting(Well):
    """Environment that reports the variables that select its devices."""

    def __init__(self, device: str = "none") -> None:
        super().__init__()
        self.device_given = device
        self.at_construction = variables()

    def device_settings(self) -> list[Any]:
        """Return variables at construction and now, the backend that mujoco read, and the device."""
        context = sys.modules.get("mujoco.rendering.classic.gl_context")
        return [self.at_construction, variables(), getattr(context, "_MUJOCO_GL", "not imported"), self.device_given]


class Failing(Well):
    """Environment that fails on a given occasion in a given way."""

    def __init__(self, when: str = "", how: str = "raise") -> None:
        self.when, self.how = when, how
        super().__init__()
        self._fail_if_due("constructor")

    def _fail_if_due(self, occasion: str) -> None:
        if occasion == self.when and self.how:
            vec_test_envs.fail(self.how)

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        self._fail_if_due("reset")
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.count == 3:
            self._fail_if_due("step")
        return result

    def fetch(self, litres: int = 1, **_: Any) -> int:
        """Return twice the number, or fail if methods are to fail."""
        self._fail_if_due("method")
        return 2 * litres

    def make_lock(self) -> Any:
        """Return a lock, which cannot be pickled."""
        return threading.Lock()

    def return_unreadable(self) -> Any:
        """Return an error that cannot be unpickled, if methods are to fail."""
        return vec_test_envs.NeedsArgumentsError("one", "two") if self.when == "method" else None

    def close(self) -> None:
        super().close()
        self._fail_if_due("close")


class NativeEnv(EnvBase):
    """TorchRL environment that draws from torch's global generator, and observes its seed."""

    def __init__(self, size: int = 2, note: Any = None, pause: float = 0.0, **kwargs: Any) -> None:
        log_event("built")
        super().__init__(**kwargs)
        self.pause = pause
        self.size, self.note, self.extra = size, note, torch.zeros(())
        self.observation_spec = Composite(observation=Unbounded((size,)), seed=Unbounded((1,), dtype=torch.int64))
        if note is not None:
            self.observation_spec["note"] = NonTensor(())
        self.action_spec = Bounded(-1, 1, (1,))
        self.reward_spec = Unbounded((1,))
        self.register_buffer("total", torch.zeros(()))
        self.seed = -1

    def _make_entries(self) -> dict[str, Any]:
        """Return a random observation, the seed, and the note if there is one."""
        out: dict[str, Any] = {"observation": torch.rand(self.size), "seed": torch.tensor([self.seed])}
        if self.note is not None:
            out["note"] = NonTensorData(threading.Lock() if self.note == "lock" else self.note)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        time.sleep(self.pause)
        return TensorDict(self._make_entries())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.total += 1
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {**self._make_entries(), "reward": tensordict["action"], "done": done, "terminated": done.clone()}
        )

    def add(self, a: int, *, b: int) -> int:
        """Return a sum: a method to call in workers."""
        return a + b

    def _set_seed(self, seed: int | None) -> None:
        self.seed = -1 if seed is None else seed
        torch.manual_seed(self.seed)
