"""Tries renderers for real: each in a fresh interpreter of its own, because a process keeps its first display."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from rl_ext_core.devices.doctor._verified import Verified

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S = 60.0
# Libraries print to the same stream.
MARK = "rl-ext saw: "


def verify(name: str, device: str = "auto", render: str = "same", *, limit_s: float = LIMIT_S) -> Verified:
    """Let a renderer draw one image under ``resolve(device, render=render, renderer=name)``.

    :param name: of a renderer that is installed
    :param device: what computes
    :param render: what renders
    :param limit_s: seconds after which the process is ended
    :return: what was seen; whatever fails, fails in there
    """
    began = time.monotonic()
    seen = _run([sys.executable, "-m", "rl_ext_core.devices.doctor._verify_child", name, device, render], limit_s)
    return Verified(name=name, **seen, seconds=round(time.monotonic() - began, 2))


def _run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        told = _told(said if isinstance(said, str) else said.decode(errors="replace"))
        return {**told, "failure": f"it did not end within {limit_s:.0f} s"}
    except OSError as error:
        return {"failure": f"{sys.executable} could not be started: {error}"}
    told = _told(done.stdout)
    if told and not done.returncode:
        return told
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {**told, "failure": f"the process ended {_ending(done.returncode)}: {last}"}


def _told(output: str) -> dict[str, Any]:
    """Read what the process told: first what was decided, then what it saw."""
    told: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            told |= json.loads(line[len(MARK) :])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


def _ending(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
