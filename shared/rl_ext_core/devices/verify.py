"""Test a decision with a rendered frame in a new process, because a process keeps its first display."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rl_ext_core.devices import _probe
from rl_ext_core.devices.decide import resolve
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import NvmlUnavailableError, nvml_session
from rl_ext_core.devices.renderers import TABLE
from rl_ext_core.errors import MissingDependencyError, RlExtError, install_line

TIMEOUT_S = 60.0
_SOFTWARE_NAMES = ("llvmpipe", "softpipe", "swrast", "software")
# The inode of Linux's first namespace of process IDs, which NVML's IDs belong to (include/linux/proc_ns.h).
_HOST_PIDS = "pid:[4026531836]"


@dataclass(frozen=True)
class Verification:
    """Result of testing one renderer in its own process.

    :param decided: where the decision renders: ``"gpu"``, ``"cpu"``, or empty if there was no decision
    :param uuid: UUID of the GPU in the decision, or None
    :param predicted: EGL index in the decision; None for OSMesa
    :param egl: EGL index of the created display; None if EGL was not used or did not report it
    :param nvml: UUIDs of the GPUs on which NVML lists the process; None if it lists it on none
    :param missing: whether it failed because a package is missing
    """

    name: str
    decided: str = ""
    uuid: str | None = None
    predicted: int | None = None
    egl: int | None = None
    gl_renderer: str = ""
    gl_vendor: str = ""
    nvml: tuple[str, ...] | None = None
    failure: str | None = None
    missing: bool = False
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        """The failure, or the difference from the decision, as one sentence; None if there is none."""
        if self.failure is not None:
            return self.failure
        if self.decided == "gpu" and any(word in self.gl_renderer.lower() for word in _SOFTWARE_NAMES):
            return f"expected a GPU to render, but the CPU rendered ({self.gl_renderer})"
        if self.egl is not None and self.egl != self.predicted:
            return f"expected EGL device {self.predicted} to render, but EGL device {self.egl} rendered"
        if self.uuid is not None and self.nvml is not None and self.uuid not in self.nvml:
            return f"expected {self.uuid} to render, but NVML lists the process on {', '.join(self.nvml)}"
        return None

    @property
    def line(self) -> str:
        """The line to type to fix the problem."""
        if self.missing:
            # gymnasium's own extra installs the packages that its viewers import.
            return 'pip install "gymnasium[mujoco]"' if self.name == "gymnasium" else install_line(self.name)
        return f"rl-ext doctor --renderer {self.name}"

    @property
    def place(self) -> str:
        """Index of the EGL device that rendered, ``"OSMesa"`` or ``"-"``, for a table."""
        if self.egl is not None:
            return str(self.egl)
        return "OSMesa" if self.predicted is None and self.gl_renderer else "-"

    @property
    def result(self) -> str:
        """Outcome of the test, for a table."""
        if self.problem is not None:
            return f"FAILS: {self.problem}" if self.failure else f"DIFFERS: {self.problem}"
        seen = "" if self.nvml is None or self.uuid is None else ", NVML lists the process there"
        return f"as predicted{seen} ({self.seconds:.1f} s)"


def verify(name: str, device: str = "auto", render: str = "same") -> Verification:
    """Create a context of a renderer under ``resolve(device, render=render, renderer=name)``, in a new process."""
    try:
        decision = resolve(device, render=render, renderer=name)
    except RlExtError as error:
        first = str(error).partition("\n")[0]
        return Verification(name, failure=first, missing=isinstance(error, MissingDependencyError))
    return verify_decision(decision)


def verify_decision(
    decision: Decision, environ: Mapping[str, str] | None = None, *, python: str = sys.executable
) -> Verification:
    """Create a context of a decision's renderer in a new process, with its variables added to ``environ``."""
    began = time.monotonic()
    name = (decision.renderer or "").split(" ")[0]
    variables = {**(os.environ if environ is None else environ), **decision.variables}
    display = next((row.display for row in TABLE if row.name == name), "")
    kept = {key: value for key, value in variables.items() if value is not None}
    uses: list[tuple[GpuUse, ...] | None] = []
    command = [python, _probe.__file__, "draw", name, display]
    seen = _probe.run_program(command, kept, TIMEOUT_S, lambda pid: uses.append(list_gpu_uses([pid])))
    # A process of another container may have the same ID. NVML then lists it before the context is created, too.
    before, after = (*uses, None, None)[:2]
    return Verification(
        name=name,
        decided=decision.render,
        uuid=decision.render_gpu.uuid if decision.render_gpu else None,
        predicted=decision.egl.index if decision.egl else None,
        nvml=tuple(dict.fromkeys(use.uuid for use in after)) if after and not before else None,
        **seen,
        seconds=round(time.monotonic() - began, 2),
    )


# Processes on GPUs


@dataclass(frozen=True)
class GpuUse:
    """Use of a GPU by a process: ``"compute"`` (CUDA) or ``"graphics"`` (OpenGL, EGL, Vulkan), and its bytes there."""

    pid: int
    uuid: str
    kind: str
    memory: int | None


def list_gpu_uses(pids: Collection[int]) -> tuple[GpuUse, ...] | None:
    """Return the uses of GPUs by processes with these IDs, as NVML lists them.

    None means unknown: NVML cannot be queried, or its IDs are another namespace's, as in a container.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != _HOST_PIDS:
            return None
    except OSError:
        pass  # not Linux
    uses: list[GpuUse] = []
    try:
        with nvml_session() as nvml:
            queries = {
                "compute": nvml.nvmlDeviceGetComputeRunningProcesses,
                "graphics": nvml.nvmlDeviceGetGraphicsRunningProcesses,
            }
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                for kind, query in queries.items():
                    with contextlib.suppress(nvml.NVMLError):  # a GPU without graphics, or without permission
                        found = [entry for entry in query(handle) if entry.pid in pids]
                        uses += [GpuUse(entry.pid, uuid, kind, entry.usedGpuMemory) for entry in found]
    except NvmlUnavailableError:
        return None
    return tuple(uses)
