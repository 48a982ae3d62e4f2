"""Run lines of Python in a new process, in which no renderer is imported and no variable is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests import programs
from tests.programs import ROOT

# Only Mesa's EGL, so that EGL device 0 renders on the CPU, on machines with GPUs too.
_MESA = Path("/usr/share/glvnd/egl_vendor.d/50_mesa.json")
_TRACEBACK = "Traceback (most recent call last):"
# Variables that select devices, which must not affect the process.
_DEVICE_VARIABLE_PREFIXES = (
    *("CUDA_", "MUJOCO_", "PYOPENGL_", "EGL_", "DISPLAY", "WAYLAND_", "XDG_SESSION_TYPE", "LOCAL_RANK", "SLURM_"),
    *("OMPI_", "MV2_", "MPI_", "PMI_"),
)
_PREAMBLE = """
import logging, os
from rl_ext_core.devices import resolve
from tests.core.devices.machines import machine
answer = None
NAMES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")
def variables(): return [os.environ.get(name) for name in NAMES]
"""


@dataclass(frozen=True)
class RunResult:
    answer: Any  # the value that the lines assigned to ``answer``; None if they failed
    error: str  # last line of the traceback; empty if the lines did not fail
    stderr: str


def run(*parts: str, timeout_s: float = 120, python: Path = Path(sys.executable), **variables: str) -> RunResult:
    """Run lines of Python in a new process, with only these variables that select devices.

    :param python: interpreter of another virtual environment, in which this project may be missing
    """
    code = "\n".join((_PREAMBLE, *map(dedent, parts), "import json; print(); print(json.dumps(answer))"))
    environ = {**environment(**variables), "PYTHONPATH": str(ROOT / "shared")}
    if python == Path(sys.executable):
        done = programs.run(code, "renderers", cwd=ROOT, environ=environ, timeout_s=timeout_s)
    else:
        command, pipe = [str(python), "-c", code], subprocess.PIPE
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, timeout=timeout_s, check=False
        )
    if done.returncode:
        return RunResult(
            None, _find_error_line(done.stderr.splitlines()) or f"exit {done.returncode}: {done.stderr}", done.stderr
        )
    return RunResult(json.loads(done.stdout.splitlines()[-1]), "", done.stderr)


def environment(**variables: str) -> dict[str, str]:
    """Return this process's variables without those that select devices, plus ``variables``."""
    # COLUMNS, which some shells set, changes the width of tables.
    left_out = (*_DEVICE_VARIABLE_PREFIXES, "COLUMNS")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    if _MESA.exists():
        environ["__EGL_VENDOR_LIBRARY_FILENAMES"] = str(_MESA)
    return {**environ, **variables}


def _find_error_line(lines: list[str]) -> str:
    """Return the line of the error that ended the program, without its causes and later errors of destructors."""
    pairs = enumerate(zip(["", *lines], lines, strict=False))
    # Python has printed the others for exceptions that it ignored.
    starts = [at for at, (before, line) in pairs if line == _TRACEBACK and not before.startswith("Exception ignored")]
    return next((line for line in lines[starts[-1] + 1 :] if line and line[0] != " "), "") if starts else ""
