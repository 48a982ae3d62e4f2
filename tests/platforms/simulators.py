"""Environments for ``workers.py`` that behave like common libraries.

The module imports quickly, because probes import it often.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np


class Single(gymnasium.Env[Any, Any]):
    """Environment that allows one instance per process, as many libraries do."""

    observation_space = gymnasium.spaces.Box(-9, 99, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    instances: ClassVar[list[int]] = []

    def __init__(self, ends: str = "") -> None:
        if self.instances:
            raise RuntimeError("Cannot create multiple instances per process")
        if ends == "in its constructor":
            raise OSError("no license")
        self.instances.append(os.getpid())
        self.ends, self.count = ends, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(3, np.float32), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 3 and self.ends == "in a step":
            os._exit(7)
        return self.np_random.random(3, np.float32), float(action), self.count == 5, False, {"pid": os.getpid()}


class Aborts(Single):
    """Environment that aborts the process when a second instance is built."""

    def __init__(self) -> None:
        if self.instances:
            os.abort()
        super().__init__()


class Hangs(Single):
    """Environment that hangs when it is built, after it has started a child process."""

    def __init__(self, note: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(note).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)


class Shares(Single):
    """Environment whose observations depend on the steps of all instances."""

    count_of_all: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.ends, self.count = "", 0

    def step(self, action: Any) -> Any:
        self.count_of_all.append(1)
        return super().step(action)[0] + len(self.count_of_all), 0.0, False, False, {}


class Locks(Shares):
    """Environment that allows one instance per working directory, otherwise independent."""

    count_of_all: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.lock = os.open("lock", os.O_CREAT | os.O_EXCL)

    def step(self, action: Any) -> Any:
        return Single.step(self, action)

    def close(self) -> None:
        os.close(self.lock)
        os.unlink("lock")


class Unrepeatable(Shares):
    """Environment whose steps are random, also with a seed."""

    def step(self, action: Any) -> Any:
        return np.random.default_rng().random(3, np.float32), 0.0, False, False, {}


class Declared(Single):
    """Environment whose metadata declares that instances can share a process."""

    metadata: ClassVar[dict[str, Any]] = {"isolation": "in-process", "render_modes": []}

    def __init__(self) -> None:
        self.ends, self.count = "", 0
