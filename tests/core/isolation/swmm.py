"""An environment of pyswmm: rain flows into a tank, and out through a gate that the action opens."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

MODEL = """
[OPTIONS]
FLOW_UNITS CMS
INFILTRATION HORTON
FLOW_ROUTING DYNWAVE
START_DATE 01/01/2020
START_TIME 00:00:00
REPORT_START_DATE 01/01/2020
REPORT_START_TIME 00:00:00
END_DATE 01/02/2020
END_TIME 00:00:00
REPORT_STEP 00:05:00
WET_STEP 00:01:00
DRY_STEP 01:00:00
ROUTING_STEP 00:00:30

[RAINGAGES]
rain INTENSITY 1:00 1.0 TIMESERIES storm

[SUBCATCHMENTS]
land rain tank 10 50 500 0.5 0

[SUBAREAS]
land 0.01 0.1 0.05 0.05 25 OUTLET

[INFILTRATION]
land 3.0 0.5 4 7 0

[OUTFALLS]
river 0 FREE NO

[STORAGE]
tank 1 5 0.5 FUNCTIONAL 1000 0 0 0 0

[ORIFICES]
gate tank river SIDE 0 0.65 NO 0

[XSECTIONS]
gate RECT_CLOSED 0.5 0.5 0 0

[TIMESERIES]
storm 0:00 40
storm 1:00 80
storm 2:00 20
storm 3:00 0
"""


class Tank(gymnasium.Env[np.ndarray, np.ndarray]):
    """Environment of a water tank simulated by pyswmm, which allows one simulation."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._model = Path(self._folder.name, "tank.inp")
        self._model.write_text(MODEL)
        self._simulation: Any = None
        self._start()

    def _start(self) -> None:
        """End the running simulation, and start a new one."""
        import pyswmm

        self._end()
        # pyswmm warns if a simulation is not used in a with statement.
        self._simulation = pyswmm.Simulation(str(self._model)).__enter__()
        self._tank = pyswmm.Nodes(self._simulation)["tank"]
        self._gate = pyswmm.Links(self._simulation)["gate"]
        self._simulation.step_advance(300)
        self._simulation.start()
        self._steps = iter(self._simulation)

    def _end(self) -> None:
        """Close the simulation if one is running."""
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._start()
        return self._observation(), {}

    def _observation(self) -> np.ndarray:
        return np.array([self._tank.depth, self._gate.flow])

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._gate.target_setting = float(action[0])
        ended = next(self._steps, None) is None
        observation = self._observation()
        return observation, -float(observation[0]), ended, False, {}

    def close(self) -> None:
        self._end()
        self._folder.cleanup()
