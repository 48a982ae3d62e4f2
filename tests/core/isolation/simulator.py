"""Environments of the toy simulator, and others that share state, fail or hang."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Simulator(gymnasium.Env[np.ndarray, np.ndarray]):
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

    def reset(self, **options: Any) -> Reset:
        super().reset(**options)
        self._library.sim_reset(self._handle, options.get("seed") or 0)
        self._observation[:] = 0
        return self._observation.copy(), {}

    def step(self, action: np.ndarray) -> Step:
        self._library.sim_step(self._handle, float(action[0]), self._observation.ctypes.data)
        return self._observation.copy(), float(self._observation[0]), False, False, {"time": time.time()}

    def close(self) -> None:
        if self._handle:
            self._library.sim_free(self._handle)
            self._handle = None


class Plain(gymnasium.Env[np.ndarray, int]):
    """Environment without shared state, which adds up actions and random numbers."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self) -> None:
        self._sum = 0.0

    def reset(self, **options: Any) -> Reset:
        super().reset(**options)
        self._sum = float(self.np_random.random())
        return np.array([self._sum]), {}

    def step(self, action: int) -> Step:
        self._sum += int(action) + self.noise()
        return np.array([self._sum]), 1.0, False, False, {}

    def noise(self) -> float:
        """Return the number that a step adds to the sum. Subclasses replace it."""
        return float(self.np_random.random())


class DrawsFromNumPy(Plain):
    def noise(self) -> float:
        return float(np.random.random())


class DrawsWhenBuilt(Plain):
    def __init__(self) -> None:
        import torch

        super().__init__()
        self._offset = np.random.random() + float(torch.rand(()))

    def noise(self) -> float:
        return self._offset


class ClassAttribute(Plain):
    total: ClassVar[list[float]] = []

    def noise(self) -> float:
        self.total.append(1.0)
        return float(len(self.total))


class IgnoresSeeds(Plain):
    def reset(self, **options: Any) -> Reset:
        return super().reset(seed=0)


class ActsOnAll(IgnoresSeeds):
    """Environment in which an action affects the next step of another instance."""

    last: ClassVar[list[int]] = [0]

    def step(self, action: int) -> Step:
        before, self.last[0] = self.last[0], int(action)
        return super().step(before)


class SharedOutput(Plain):
    _output: ClassVar[np.ndarray] = np.zeros(1)

    def step(self, action: int) -> Step:
        self._output[:] = super().step(action)[0]
        return self._output, 1.0, False, False, {}


class OwnOutput(SharedOutput):
    def __init__(self) -> None:
        super().__init__()
        self._output = np.zeros(1)  # type: ignore[misc]


class Masked(Plain):
    """Environment whose instances share only their buffer of legal actions, and a count in the infos."""

    _mask, _count = np.zeros(5, bool), [0]

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def step(self, action: int) -> Step:
        observation, reward, *_ = super().step(action)
        self._mask[:] = observation * np.arange(5) % 2 > 1
        self._count[0] += 1
        return observation, reward, False, False, {"count": self._count[0]} if self._key else {}


class MaskedByMethod(Masked):
    def action_masks(self) -> np.ndarray:
        return self._mask


class Slow(Plain):
    def __init__(self, reset: float = 0.0, step: float = 0.0) -> None:
        super().__init__()
        self._seconds = reset, step

    def reset(self, **options: Any) -> Reset:
        time.sleep(self._seconds[0])
        return super().reset(**options)

    def noise(self) -> float:
        time.sleep(self._seconds[1])
        return super().noise()


class FailsAtReset(Plain):
    def reset(self, **options: Any) -> Reset:
        raise RuntimeError("no world")


class ReadsAFile(Plain):
    def reset(self, **options: Any) -> Reset:
        Path("world.txt").read_text()
        return super().reset(**options)


class Messy(Plain):
    """Environment that prints, writes files, leaves a thread and a process, and may hang."""

    def __init__(self, notes: str, hangs: bool = False) -> None:
        super().__init__()
        os.write(1, b"built\n" * 50_000)
        sys.stderr.write("to a stream")
        Path("left.txt").write_text("in the working directory")
        Path(tempfile.gettempdir(), "left.txt").write_text("in the folder for temporary files")
        threading.Thread(target=time.sleep, args=(1000,)).start()
        child = subprocess.Popen(["sleep", "1000"], start_new_session=not hangs)
        with Path(notes).open("a") as file:
            file.write(f"{child.pid} {os.getpid()} {Path.cwd()}\n")
        if hangs:
            time.sleep(1000)


class LeavesALock(Plain):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)
        self._path.touch(exist_ok=False)

    def close(self) -> None:
        self._path.unlink()


class SaysSingle(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": "single-instance"}


class SaysIndependent(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": "INDEPENDENT"}


class SaysNonsense(Plain):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "isolation": True}


def make_declared_single() -> SaysSingle:
    return SaysSingle()


class HoldsFmu(Plain):
    """Environment that stores FMPy's description of an FMU."""

    def __init__(self, flag: str) -> None:
        import fmpy

        super().__init__()
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(FMU_DESCRIPTION.format(flag=flag))
            file.flush()
            self._description = fmpy.read_model_description(file.name)


FMU_DESCRIPTION = """<fmiModelDescription fmiVersion="2.0" modelName="decay" guid="decay">
  <CoSimulation modelIdentifier="decay" canBeInstantiatedOnlyOncePerProcess="{flag}"/>
  <ModelVariables>
    <ScalarVariable name="state" valueReference="0" causality="output"><Real/></ScalarVariable>
  </ModelVariables>
  <ModelStructure><Outputs><Unknown index="1"/></Outputs></ModelStructure>
</fmiModelDescription>
"""


class BadClose(Plain):
    alive: ClassVar[int] = 0

    def __init__(self, others: int) -> None:
        super().__init__()
        type(self).alive += 1
        self._others = others

    def close(self) -> None:
        if self.alive > self._others:
            raise RuntimeError("another one is there")


class NotAnEnvironment:
    def reset(self) -> int:
        return 0


def exit_while_building() -> None:
    sys.exit("no license")
