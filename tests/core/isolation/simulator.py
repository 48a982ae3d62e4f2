"""Environments around the toy simulator, and others without it, in every way good and bad."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np


class Simulator(gymnasium.Env[np.ndarray, np.ndarray]):
    """The toy simulator.

    :param library: its compiled variant
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.sim_new.restype = ctypes.c_void_p
        self._library.sim_step.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
        self._library.sim_reset.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        self._library.sim_free.argtypes = [ctypes.c_void_p]
        self._handle = self._library.sim_new()
        if not self._handle:
            raise RuntimeError("the toy simulator gives no handle")
        self._observation = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._library.sim_reset(self._handle, seed or 0)
        self._observation[:] = 0
        return self._observation.copy(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._library.sim_step(self._handle, float(action[0]), self._observation.ctypes.data)
        return self._observation.copy(), float(self._observation[0]), False, False, {"time": time.time()}

    def close(self) -> None:
        if self._handle:
            self._library.sim_free(self._handle)
            self._handle = None


def from_the_environment() -> Simulator:
    return Simulator(os.environ["TOY_LIBRARY"])


def unpacks_its_library(library: str) -> Simulator:
    folder = tempfile.mkdtemp()
    return Simulator(shutil.copy(library, folder))


class Plain(gymnasium.Env[np.ndarray, int]):
    """Counts what it is told, without a simulator."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self) -> None:
        self._sum = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._sum = float(self.np_random.random())
        return np.array([self._sum]), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._sum += int(action) + self.noise()
        return np.array([self._sum]), 1.0, False, False, {}

    def noise(self) -> float:
        return float(self.np_random.random())


class DrawsFromNumPy(Plain):
    def noise(self) -> float:
        return float(np.random.random())


class DrawsFromPython(Plain):
    def noise(self) -> float:
        return random.random()


class BuiltFromTorch(Plain):
    """A world drawn by torch, which nothing has imported before."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._offset = float(torch.rand(()))

    def noise(self) -> float:
        return self._offset


class DrawsWhenBuilt(Plain):
    """Every instance is a world of its own, drawn from NumPy's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self._offset = np.random.random()

    def noise(self) -> float:
        return self._offset


class ClassAttribute(Plain):
    total: ClassVar[list[float]] = []

    def noise(self) -> float:
        self.total.append(1.0)
        return float(len(self.total))


class ActsOnAll(Plain):
    """An action moves the others by their next step, and nothing else differs between them."""

    last: ClassVar[list[int]] = [0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=0)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before, self.last[0] = self.last[0], int(action)
        return super().step(before)


class IgnoresSeeds(Plain):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=0)


class WritesDown(Plain):
    """Writes down what is done with it."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self._notes = notes
        self._write("build")

    def _write(self, what: str) -> None:
        with Path(self._notes).open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._write(f"reset({seed})")
        return super().reset(seed=seed)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._write("step")
        time.sleep(random.random() / 500)  # whoever does not wait for its turn is soon ahead of it
        return super().step(action)

    def close(self) -> None:
        self._write("close")


class Slow(Plain):
    def noise(self) -> float:
        time.sleep(0.15)
        return 0.0


class Messy(Plain):
    """Prints, writes files, and leaves a thread and a process that leaves its group."""

    def __init__(self, notes: str, hangs: str = "") -> None:
        super().__init__()
        os.write(1, b"built\n" * 50_000)
        sys.stderr.write("to a stream")
        Path("left.txt").write_text("in the working directory")
        Path(os.environ["TMPDIR"], "left.txt").write_text("in the folder for temporary files")
        threading.Thread(target=time.sleep, args=(1000,)).start()
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with Path(notes).open("a") as file:
            file.write(f"{child.pid} {os.getpid()} {Path.cwd()}\n")
        if hangs:
            time.sleep(1000)


class DiesWithALivingChild(Plain):
    """The second one in a folder ends its process, and a child of it holds on to whatever was open."""

    def __init__(self) -> None:
        super().__init__()
        if Path("first.txt").exists():
            if os.fork() == 0:
                os.setsid()
                time.sleep(1000)
            time.sleep(0.5)
            os._exit(5)
        Path("first.txt").touch()


class SaysSingle(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": "single-instance"}


class SaysIndependent(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": "INDEPENDENT"}


class SaysNonsense(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": True}


def builds_what_says_single() -> SaysSingle:
    return SaysSingle()


class BadClose(Plain):
    def close(self) -> None:
        raise RuntimeError("this never closes well")


class BadCloseOfSecond(Plain):
    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).alive += 1

    def close(self) -> None:
        if self.alive > 1:
            raise RuntimeError("another one is there")


class NotAnEnvironment:
    """Has neither spaces nor a known base."""

    def reset(self) -> int:
        return 0

    def step(self) -> int:
        return 0


def exits() -> None:
    sys.exit("no license")


def hangs() -> None:
    time.sleep(1000)


class SharedOutput(Plain):
    """Writes what it returns to the same place as all others."""

    output: ClassVar[np.ndarray] = np.zeros(1)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.output[:] = super().step(action)[0]
        return self.output, 1.0, False, False, {}


class OwnOutput(Plain):
    """Writes what it returns to the same place every time."""

    def __init__(self) -> None:
        super().__init__()
        self._output = np.zeros(1)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._output[:] = super().step(action)[0]
        return self._output, 1.0, False, False, {}
