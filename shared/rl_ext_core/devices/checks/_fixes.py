"""Which renderers there are, which backend each one takes, and what leads it to the device that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices import _renderers, _rendering, _requests
from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._picks import LOCAL_RANK, SLURM_RANK, Picker
from rl_ext_core.devices._renderers import BACKEND, INDEX, NAMES, RefusedError
from rl_ext_core.devices.checks._base import changed
from rl_ext_core.errors import RlExtError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ext_core.devices._compute import Computing
    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices.checks._base import Changes, Situation

_INSTALL = "apt-get install libegl1 libegl-mesa0"


def installed(situation: Situation) -> tuple[Renderer, ...]:
    """Give the renderers to judge: those that are installed, and none where an applied decision is in force."""
    versions = situation.inventory.versions
    if situation.settled or "mujoco" not in versions:
        return ()
    return tuple(_renderers.find(name, versions) for name in NAMES if name in versions)


def backend_of(renderer: Renderer, environ: Mapping[str, str]) -> str | None:
    """Tell which backend a renderer takes; None where it refuses the variable.

    Without the variable they try GLFW first, and take it with or without a display: glfw's Python package, which
    mujoco requires, only warns that there is none.
    """
    if renderer.name != "robosuite" and BACKEND not in environ:
        return "glfw"
    try:
        return renderer.backend(environ)
    except RefusedError:
        return None


@dataclass(frozen=True)
class Remedy:
    """What leads a renderer to the device that computes.

    :param render: the ``render=`` of the decision to apply; ``"none"`` where none is possible
    :param settings: the variables of that decision
    :param in_shell: those to change where a line for the shell does it; empty where only Python can
    """

    render: str
    settings: tuple[tuple[str, str | None], ...] = ()
    in_shell: tuple[tuple[str, str | None], ...] = ()

    def fix(self, renderer: str) -> Changes | str:
        """Give what to change, or a line that no change of variables can stand for."""
        if self.render == "none":
            return _INSTALL
        if self.in_shell:
            return dict(self.in_shell)
        return (
            "from rl_ext_core.devices import resolve\n"
            f'resolve("auto", render="{self.render}", renderer="{renderer}").apply()'
        )


def remedy(renderer: Renderer, situation: Situation) -> Remedy:
    """Find what leads a renderer to the device that computes, or to the CPU where that cannot render."""
    if situation.computing is None:
        return Remedy("same")  # which will say what is in the way
    settings = _settings(renderer.name, "same", situation.computing, situation)
    if settings is None:
        on_cpu = _settings(renderer.name, "cpu", situation.computing, situation)
        return Remedy("none") if on_cpu is None else Remedy("cpu", tuple(on_cpu.items()))
    changes = {name: value for name, value in settings.items() if situation.environ.get(name) != value}
    refused = renderer.name == "robosuite" and import_refused(changed(situation.environ, changes))
    if refused or _differs_by_process(situation):
        changes = {}
    return Remedy("same", tuple(settings.items()), tuple(changes.items()))


def import_refused(environ: Mapping[str, str]) -> bool:
    """Tell whether robosuite's assertion at import fails: the index has to be a substring of the mask."""
    mask, index = environ.get(MASK), environ.get(INDEX)
    return bool(mask) and index is not None and not (index.isdigit() and index in (mask or ""))


def _settings(name: str, render: str, computing: Computing, situation: Situation) -> Mapping[str, str | None] | None:
    """Give the variables of a decision, None where it is refused."""
    request = _requests.parse(render, "render")
    try:
        return _rendering.decide(request, name, situation.machine, computing, Picker()).variables
    except RlExtError:
        return None


def _differs_by_process(situation: Situation) -> bool:
    """Tell whether each process that a launcher starts computes on another GPU, though all inherit one shell's."""
    launched = LOCAL_RANK in situation.environ or SLURM_RANK in situation.environ
    return launched and situation.visible is not None and len(situation.visible.uuids) > 1
