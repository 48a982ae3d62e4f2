"""What was seen when a renderer was tried, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices.checks import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

_SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software")


@dataclass(frozen=True)
class Verified:
    """One renderer, tried in a process of its own.

    :param name: one of the renderers' names
    :param decided: where the decision wanted it: ``"gpu"``, ``"cpu"``, or empty where it was refused
    :param uuid: the GPU that was decided on
    :param predicted: the EGL index that was decided on; None for OSMesa
    :param egl: the EGL index of the display that was made; None where EGL was not used or did not tell
    :param gl_renderer: OpenGL's ``GL_RENDERER``; empty where there was no context
    :param gl_vendor: OpenGL's ``GL_VENDOR``
    :param nvml: UUIDs of the GPUs on which NVML lists the process; None where it lists it nowhere
    :param failure: how it failed; None if it rendered
    :param missing: whether that was for want of a package
    :param seconds: how long it took
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
        """What differs from the decision, one sentence; None if nothing does."""
        if self.failure is not None:
            return self.failure
        if self.decided == "gpu" and any(word in self.gl_renderer.lower() for word in _SOFTWARE):
            return f"a GPU was decided on, and the CPU rendered ({self.gl_renderer})"
        if self.egl is not None and self.egl != self.predicted:
            return f"EGL device {self.predicted} was decided on, and EGL device {self.egl} rendered"
        if self.uuid is not None and self.nvml is not None and self.uuid not in self.nvml:
            return f"{self.uuid} was decided on, and NVML lists the process on {', '.join(self.nvml)}"
        return None


def findings(verified: Sequence[Verified]) -> tuple[Finding, ...]:
    """Give an error for each renderer that did not do what was decided."""
    return tuple(_finding(entry, entry.problem) for entry in verified if entry.problem is not None)


def _finding(entry: Verified, problem: str) -> Finding:
    return Finding(entry.name, None, f"when it was tried, {problem}", _line(entry))


def _line(entry: Verified) -> str:
    if entry.missing:
        # gymnasium's own extra brings what its viewers import.
        package = "gymnasium[mujoco]" if entry.name == "gymnasium" else f"rl-ext[{entry.name}]"
        return f'pip install "{package}"'
    if not entry.decided:
        return f"rl-ext doctor --renderer {entry.name}"
    if entry.decided == "gpu":
        line = f'resolve("auto", render="cpu", renderer="{entry.name}").apply()'
        return f"from rl_ext_core.devices import resolve\n{line}"
    return "apt-get install libosmesa6" if entry.predicted is None else "apt-get install libegl1 libegl-mesa0"
