"""An environment of an FMU, and a function that compiles the FMU."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

SOURCE = Path(__file__).parent / "fmu.c"
DESCRIPTION = """<?xml version="1.0" encoding="UTF-8"?>
<fmiModelDescription fmiVersion="2.0" modelName="decay" guid="{{decay}}">
  <CoSimulation modelIdentifier="decay" canHandleVariableCommunicationStepSize="true"{flag}/>
  <ModelVariables>
    <ScalarVariable name="state" valueReference="0" causality="output"><Real/></ScalarVariable>
    <ScalarVariable name="input" valueReference="1" causality="input"><Real start="0"/></ScalarVariable>
  </ModelVariables>
  <ModelStructure><Outputs><Unknown index="1"/></Outputs></ModelStructure>
</fmiModelDescription>
"""
FLAG = ' canBeInstantiatedOnlyOncePerProcess="true"'


def make_fmu(path: Path, compiler: str, *, flag: str = FLAG) -> Path:
    """Compile a simulator, and pack it into an FMU file.

    :param path: File to write.
    :param compiler: Path of the C compiler.
    :param flag: Attributes to add to the element ``CoSimulation`` of the model description.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "decay.so")
        command = [compiler, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        done = subprocess.run([*command, "-o", str(library), str(SOURCE)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("modelDescription.xml", DESCRIPTION.format(flag=flag))
            bits = "linux64" if sys.maxsize > 2**32 and platform.machine() == "x86_64" else platform.machine()
            archive.write(library, f"binaries/{bits}/decay.so")
    return path


class Decay(gymnasium.Env[np.ndarray, np.ndarray]):
    """Environment that stores FMPy's slave and the model description."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)

    def __init__(self, path: str) -> None:
        import fmpy
        from fmpy.fmi2 import FMU2Slave

        self._folder = tempfile.TemporaryDirectory()
        fmpy.extract(path, self._folder.name)
        self._description = fmpy.read_model_description(path)
        self._slave = FMU2Slave(
            guid=self._description.guid,
            unzipDirectory=self._folder.name,
            modelIdentifier=self._description.coSimulation.modelIdentifier,
            instanceName="decay",
        )
        self._slave.instantiate()
        self._time = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._slave.reset()
        self._slave.setupExperiment(startTime=0.0)
        self._slave.enterInitializationMode()
        self._slave.setReal([0], [float(self.np_random.random())])
        self._slave.exitInitializationMode()
        self._time = 0.0
        return np.array(self._slave.getReal([0])), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._slave.setReal([1], [float(action[0])])
        self._slave.doStep(self._time, 0.1)
        self._time += 0.1
        observation = np.array(self._slave.getReal([0]))
        return observation, -abs(float(observation[0])), False, False, {}

    def close(self) -> None:
        self._slave.terminate()
        self._slave.freeInstance()
        self._folder.cleanup()
