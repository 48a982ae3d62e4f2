"""MUJOCO_GL and PYOPENGL_PLATFORM: values that a library refuses, overwrites or takes for each other's opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ext_core.devices import _renderers
from rl_ext_core.devices._renderers import BACKEND, INDEX, PLATFORM, RefusedError
from rl_ext_core.devices.checks._base import mistake, unquoted
from rl_ext_core.devices.checks._fixes import backend_of, installed, remedy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices.checks._base import Mistake, Situation

_NO_DISPLAY = "mujoco.FatalError: an OpenGL platform library has not been loaded into this process"


def find(situation: Situation) -> Iterator[Mistake]:
    """Find what is wrong with the choice of a backend."""
    renderers = installed(situation)
    if not renderers:
        return
    for stage in (_refused, _without_display, _overwritten, _contradicted, _without_osmesa, _without_effect):
        mistakes = tuple(stage(renderers, situation))
        yield from mistakes
        situation = situation.after(mistakes)


def _refused(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    value = situation.environ.get(BACKEND)
    if value is None or value in _renderers._OFF:  # who turns rendering off may be refused it
        return
    refusing = [renderer for renderer in renderers if _refuses(renderer, situation)]
    if not refusing:
        return
    fix = {BACKEND: _canonical(value)}
    if any(renderer.name == "mujoco" for renderer in refusing):
        # The package itself refuses to be imported, and all of them import it.
        error = f'"RuntimeError: invalid value for environment variable MUJOCO_GL: {value.lower().strip()}"'
        yield mistake(situation, BACKEND, f"{_joined(renderers)}: import mujoco ends in {error}", fix)
        return
    error = f'"RuntimeError: Environment variable MUJOCO_GL must be one of ...: got {value!r}"'
    yield mistake(situation, BACKEND, f"{_joined(refusing)}: rendering ends in {error}", fix)


def _refuses(renderer: Renderer, situation: Situation) -> bool:
    try:
        renderer.backend(situation.environ)
    except RefusedError:
        return True
    return False


def _canonical(value: str) -> str:
    """Give the backend that was meant; egl where that cannot be told or where nothing renders."""
    text = unquoted(value).lower()
    return text if text in ("egl", "osmesa", "glfw") else "egl"


def _overwritten(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    """Find values that robosuite replaces by egl when it is imported, for the whole process."""
    value = situation.environ.get(BACKEND)
    robosuite = next((renderer for renderer in renderers if renderer.name == "robosuite"), None)
    if robosuite is None or not value:
        return
    text = unquoted(value).lower()
    try:
        meant = _renderers._mujoco_backend({BACKEND: text})
    except RefusedError:
        return
    if meant == backend_of(robosuite, situation.environ):
        return
    effect = f"{robosuite} overwrites {value!r} by 'egl' when it is imported, for all renderers of the process"
    if meant == "osmesa":
        yield mistake(situation, BACKEND, effect, {BACKEND: "osmesa"})
    else:
        # robosuite knows GLFW by another name, which only mujoco knows too.
        glx = meant == "glfw" and {renderer.name for renderer in renderers} <= {"mujoco", "robosuite"}
        yield mistake(situation, BACKEND, effect, {BACKEND: "glx" if glx else "egl"}, "warning")


def _contradicted(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    """Find a platform that is another one than the backend's, which the backend refuses to be imported under."""
    value = situation.environ.get(PLATFORM)
    if not value:
        return
    for backend in ("egl", "osmesa"):
        using = [renderer for renderer in renderers if backend_of(renderer, situation.environ) == backend]
        refusing = [found for found in using if value != backend]
        if refusing and value.lower() == backend:
            effect = (
                f"{_joined(refusing)}: PyOpenGL knows {backend!r} and not {value!r}, and rendering ends in an error"
            )
            yield mistake(situation, PLATFORM, effect, {PLATFORM: backend})
            return
        if refusing:
            error = f'"ImportError: Cannot use {"EGL" if backend == "egl" else "OSMesa"} rendering platform"'
            if any(renderer.name == "mujoco" for renderer in refusing):
                error += " or \"AttributeError: module 'mujoco' has no attribute 'Renderer'\""
            effect = f"{_joined(refusing)}: it contradicts {BACKEND}={backend}, and rendering ends in {error}"
            yield mistake(situation, PLATFORM, effect, {PLATFORM: backend})
            return


def _without_display(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    """Find GLFW, which is also what they take where nothing is set, on a machine without a display."""
    value = situation.environ.get(BACKEND)
    using = [renderer for renderer in renderers if backend_of(renderer, situation.environ) == "glfw"]
    if not using or _renderers.has_display(situation.environ):
        return
    how = "it is not set, so that they take GLFW" if value is None else f"{value!r} means GLFW"
    effect = f'{_joined(using)}: {how}, and without a display that ends in "{_NO_DISPLAY}"'
    fix = remedy(using[-1], situation).fix(using[-1].name)
    # Who sets nothing may render nothing.
    yield mistake(situation, BACKEND, effect, fix, "warning" if value is None else "error")


def _without_osmesa(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    using = [renderer for renderer in renderers if backend_of(renderer, situation.environ) == "osmesa"]
    if not using or situation.inventory.osmesa is not False:
        return
    effect = f"{_joined(using)}: OSMesa's library is not installed here, so that rendering ends in an error of PyOpenGL"
    if situation.inventory.egl:
        backend = {BACKEND: "egl", PLATFORM: "egl"}
        yield mistake(situation, BACKEND, effect, backend)
    else:
        yield mistake(situation, BACKEND, effect, "apt-get install libosmesa6")


def _without_effect(renderers: Sequence[Renderer], situation: Situation) -> Iterator[Mistake]:
    """Find an index that nobody reads, because nothing renders through EGL."""
    backends = {backend_of(renderer, situation.environ) for renderer in renderers}
    if INDEX not in situation.environ or backends & {"egl", None}:
        return
    value = situation.environ.get(BACKEND)
    if value is not None:
        effect = f"it has no effect, because {BACKEND}={value!r} does not use EGL"
        yield mistake(situation, INDEX, effect, {INDEX: None}, "warning")
    elif _renderers.has_display(situation.environ):
        effect = f"it has no effect, because {BACKEND} is not set, which means GLFW"
        yield mistake(situation, INDEX, effect, {BACKEND: "egl"}, "warning")


def _joined(renderers: Sequence[Renderer]) -> str:
    return ", ".join(map(str, renderers))
