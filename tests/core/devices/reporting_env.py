"""Environment factory that records its variables when it is imported, unpickled and called in a worker."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NAMES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")
HEAVY = ("torch", "stable_baselines3", "torchrl", "tensordict", "mujoco", "robosuite")


def variables() -> list[str | None]:
    """Return the current values of the environment variables in ``NAMES``."""
    return [os.environ.get(name) for name in NAMES]


# Environments' modules may read the variables at import, too.
AT_IMPORT = variables()


class Reporter:
    """Factory that creates CartPole, or HalfCheetah with a camera, and writes a report to ``folder``.

    :param number: index of the worker
    :param camera: whether to create HalfCheetah with images of 64 × 64
    """

    def __init__(self, folder: str, number: int, *, camera: bool = False) -> None:
        self.folder = folder
        self.number = number
        self.camera = camera
        self.parent = os.getpid()
        self.unpickled: list[str | None] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.unpickled = variables()

    def __call__(self) -> Any:
        report = {
            "number": self.number,
            "in_parent": os.getpid() == self.parent,
            "imported": AT_IMPORT,
            "unpickled": self.unpickled,
            "called": variables(),
            "loaded": [name for name in HEAVY if name in sys.modules],
        }
        import gymnasium

        Path(self.folder, f"{self.number}-{os.getpid()}.json").write_text(json.dumps(report))
        if self.camera:
            return gymnasium.make("HalfCheetah-v5", render_mode="rgb_array", width=64, height=64)
        return gymnasium.make("CartPole-v1")


def reports(folder: str) -> list[dict[str, Any]]:
    """Read and delete the reports in ``folder``: first the parent's, then the workers'."""
    found = [(json.loads(path.read_text()), path.unlink())[0] for path in Path(folder).iterdir()]
    return sorted(found, key=lambda report: (not report["in_parent"], report["number"]))
