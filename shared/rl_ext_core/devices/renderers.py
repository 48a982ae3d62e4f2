"""Rules by which each renderer selects its device: one row of :data:`TABLE` for each renderer and version.

A rule is a function that repeats what one version of a renderer does with its variables. The tests compare it to the
renderer's own function, over all orders and masks of four GPUs. Values to set are found by trying the rule, so the rule
always confirms them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rl_ext_core._system import IMPORT_TIME_VARIABLES
from rl_ext_core.devices.cuda import INDEX, MASK, Machine, add_hidden_index, strip_hidden_index
from rl_ext_core.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    MissingDependencyError,
    _missing_dependency_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_ext_core.devices.inventory import EglDevice

BACKEND, PLATFORM = IMPORT_TIME_VARIABLES
MUJOCO_NAMES = ("mujoco", "gymnasium", "dm_control", "robosuite")
NAMES = (*MUJOCO_NAMES, "sapien")
# Suites that render with another renderer's package.
_RENDERS_WITH = {"libero": "robosuite", "mani_skill": "sapien"}

# mujoco, robosuite and dm_control query eglQueryDevicesEXT() for this many devices.
_EGL_LIMIT = 10
_GLFW_VALUES = ("enable", "enabled", "on", "true", "1", "glfw", "")
_OFF_VALUES = ("disable", "disabled", "off", "false", "0")


class RendererFailsError(Exception):
    """Raised by a rule if ``variable`` makes the renderer fail. ``text`` says how, as the end of a sentence."""

    def __init__(self, variable: str, text: str) -> None:
        super().__init__(text)
        self.variable = variable
        self.text = text


@dataclass(frozen=True)
class Renderer:
    """One renderer from one version on, with its rules: a row of :data:`TABLE`.

    :param name: one of ``NAMES``
    :param package: the package whose version selects the row
    :param since: first major version of that package that has the rules
    :param backend: function of the variables that returns ``"egl"``, ``"osmesa"``, ``"glfw"``, ``"vulkan"`` or
        ``"none"``, and raises :class:`RendererFailsError` for other values
    :param select_egl_device: function of a machine that returns the selected EGL index, or raises
        :class:`RendererFailsError`. None for a renderer that does not use EGL
    :param reads_at_import: attribute of a module, by module, that stores the backend when the module is imported
    :param display: module whose ``EGL_DISPLAY`` is the display of the whole process
    :param checks_mask: whether its import asserts that the index is a substring of the mask
    :param version: installed version, for texts
    """

    name: str
    package: str
    since: int
    backend: Callable[[Mapping[str, str]], str]
    select_egl_device: Callable[[Machine], int] | None
    reads_at_import: tuple[tuple[str, str], ...] = ()
    display: str = ""
    checks_mask: bool = False
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def variables(self, backend: str, index: str | None, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables to set (text) and to unset (None) for the backend ``"egl"`` or ``"osmesa"``.

        The mask in ``environ`` is changed only if the import check rejects it.
        """
        variables: dict[str, str | None] = {BACKEND: backend, PLATFORM: backend, INDEX: index}
        mask = environ.get(MASK, "")
        shown = strip_hidden_index(mask, environ)
        checked = add_hidden_index(shown, index) if self.checks_mask and shown and index is not None else shown
        return variables if checked == mask else {**variables, MASK: checked}


def _select_by_egl_index(machine: Machine) -> int:
    """Select as mujoco 3 and dm_control do: by EGL's own index, else the first device."""
    return _check_index(INDEX, _parse_integer(INDEX, machine.environ.get(INDEX, "0")), machine)


def _select_robosuite(machine: Machine) -> int:
    """Select as robosuite 1.5 does: by ``MUJOCO_EGL_DEVICE_ID``, else by the mask's first entry, as EGL's own index."""
    name = INDEX if INDEX in machine.environ else MASK
    value = machine.environ.get(name)
    if value is None:
        return _check_index(INDEX, 0, machine)
    # All entries must be numbers, although only the first one is used.
    numbers = [_parse_integer(name, entry) for entry in ([value] if value.isdigit() else value.split(","))]
    return _check_index(name, numbers[0], machine)


def _select_mujoco_4(machine: Machine) -> int:
    """Select as mujoco 4 does: through ``EGL_CUDA_DEVICE_NV``, where a number is a visible device or a CUDA ordinal."""
    egl_index_by_ordinal = _egl_index_by_ordinal(machine)
    mask = _parse_mujoco_4_mask(machine.environ.get(MASK))
    shown = _mujoco_4_visible_indices(egl_index_by_ordinal, mask)
    front = shown or [egl_index_by_ordinal[ordinal] for ordinal in sorted(egl_index_by_ordinal)]
    ordered = front + [device.index for device in _reachable(machine) if device.index not in front]
    value = machine.environ.get(INDEX)
    if value is None:
        if not ordered:
            raise RendererFailsError(INDEX, "EGL lists no device")
        return ordered[0]
    number = _parse_integer(INDEX, value)
    if 0 <= number < len(shown):
        return shown[number]
    if shown and mask and number in mask:
        return shown[mask.index(number)]
    if number in egl_index_by_ordinal:
        return egl_index_by_ordinal[number]
    if not 0 <= number < len(ordered):
        raise _out_of_range_error(INDEX, number, machine)
    return ordered[number]


def _reachable(machine: Machine) -> tuple[EglDevice, ...]:
    """Return the first ten EGL devices, which are all that a renderer queries."""
    return (machine.inventory.egl or ())[:_EGL_LIMIT]


def _egl_index_by_ordinal(machine: Machine) -> dict[int, int]:
    """Map CUDA ordinals of visible GPUs to EGL indices, as ``EGL_CUDA_DEVICE_NV`` reports them."""
    if machine.shown is None:
        raise RendererFailsError(INDEX, "the GPUs differ, and the order in which CUDA counts them is unknown")
    uuids = {device.uuid: device.index for device in _reachable(machine) if device.cuda and device.uuid}
    return {ordinal: uuids[uuid] for ordinal, uuid in enumerate(machine.shown.uuids) if uuid in uuids}


def _parse_mujoco_4_mask(value: str | None) -> list[int] | None:
    """Parse CUDA_VISIBLE_DEVICES as mujoco 4 does; None if it is not a list of numbers."""
    entries = [entry.strip() for entry in (value or "").split(",") if entry.strip()]
    try:
        numbers = [int(entry) for entry in entries]
    except ValueError:
        return None
    return None if any(number < 0 for number in numbers) else numbers or None


def _mujoco_4_visible_indices(egl_index_by_ordinal: Mapping[int, int], mask: Sequence[int] | None) -> list[int]:
    """Return the EGL indices of the GPUs in the mask; empty if mujoco 4 ignores the mask."""
    if not mask or not egl_index_by_ordinal:
        return []
    for wanted in (mask, range(len(mask))):
        if all(number in egl_index_by_ordinal for number in wanted):
            return [egl_index_by_ordinal[number] for number in wanted]
    return []


def _parse_integer(name: str, value: str) -> int:
    """Convert a variable's value to an int; raise RendererFailsError if that fails."""
    try:
        return int(value)
    except ValueError:
        text = f'rendering ends in "ValueError: invalid literal for int() with base 10: {value!r}"'
        raise RendererFailsError(name, text) from None


def _check_index(name: str, number: int, machine: Machine) -> int:
    """Return an EGL index if EGL lists it; raise RendererFailsError otherwise."""
    count = len(_reachable(machine))
    if not count:
        raise RendererFailsError(name, "EGL lists no device")
    if not 0 <= number < count:
        raise _out_of_range_error(name, number, machine)
    return number


def _out_of_range_error(name: str, number: int, machine: Machine) -> RendererFailsError:
    count, total = len(_reachable(machine)), len(machine.inventory.egl or ())
    error = f'"RuntimeError: ... must be an integer between 0 and {count - 1} (inclusive), got {number}"'
    asked = f" (it asks EGL for {count} devices of {total})" if count < total else ""
    return RendererFailsError(name, f"rendering ends in {error}{asked}")


def _mujoco_backend(environ: Mapping[str, str]) -> str:
    """Return mujoco's backend. All renderers of MuJoCo import mujoco, which rejects unknown values."""
    return _normalize_backend(environ.get(BACKEND, "").lower().strip())


def _gymnasium_backend(environ: Mapping[str, str]) -> str:
    """Return gymnasium's backend. It accepts exact names only. Its default is glfw, which aborts without a display."""
    _mujoco_backend(environ)
    value = environ.get(BACKEND, "glfw")
    if value not in ("glfw", "egl", "osmesa"):
        error = f'"RuntimeError: Environment variable MUJOCO_GL must be one of ...: got {value!r}"'
        raise RendererFailsError(BACKEND, f"rendering ends in {error}")
    return value


def _dm_control_backend(environ: Mapping[str, str]) -> str:
    """Return dm_control's backend. It rejects ``"glx"``."""
    _mujoco_backend(environ)
    value = environ.get(BACKEND, "glfw")
    if value == "glx":
        raise RendererFailsError(BACKEND, _invalid_backend_text(value))
    return _normalize_backend(value)


def _robosuite_backend(environ: Mapping[str, str]) -> str:
    """Return robosuite's backend. It overwrites most values."""
    _mujoco_backend(environ)
    return {"osmesa": "osmesa", "glx": "glfw"}.get(environ.get(BACKEND, ""), "egl")


def _normalize_backend(value: str) -> str:
    """Convert MUJOCO_GL to ``"glfw"``, ``"egl"``, ``"osmesa"`` or ``"none"``, or raise."""
    if value in _GLFW_VALUES or value == "glx":
        return "glfw"
    if value in _OFF_VALUES:
        return "none"
    if value in ("egl", "osmesa"):
        return value
    raise RendererFailsError(BACKEND, _invalid_backend_text(value))


def _invalid_backend_text(value: str) -> str:
    return f'import ends in "RuntimeError: invalid value for environment variable MUJOCO_GL: {value}"'


_MUJOCO_READS = (("mujoco.rendering.classic.gl_context", "_MUJOCO_GL"), ("mujoco.gl_context", "_MUJOCO_GL"))

# Of the rows of a name, the last one whose version is not above the installed one applies. google-deepmind/mujoco#3246,
# which is open, would change the rule of mujoco: it gets a row of its own when a release has it.
# fmt: off
TABLE = (
    Renderer("mujoco", "mujoco", 0, _mujoco_backend, _select_by_egl_index,
             reads_at_import=_MUJOCO_READS, display="mujoco.egl"),
    Renderer("mujoco", "mujoco", 4, _mujoco_backend, _select_mujoco_4,
             reads_at_import=_MUJOCO_READS, display="mujoco.egl"),
    Renderer("gymnasium", "mujoco", 0, _gymnasium_backend, _select_by_egl_index, display="mujoco.egl"),
    Renderer("gymnasium", "mujoco", 4, _gymnasium_backend, _select_mujoco_4, display="mujoco.egl"),
    Renderer("dm_control", "dm_control", 0, _dm_control_backend, _select_by_egl_index,
             reads_at_import=(("dm_control._render", "BACKEND"),), display="dm_control._render.pyopengl.egl_renderer"),
    Renderer("robosuite", "robosuite", 0, _robosuite_backend, _select_robosuite,
             reads_at_import=(("robosuite.utils.binding_utils", "_MUJOCO_GL"),),
             display="robosuite.renderers.context.egl_context", checks_mask=True),
    Renderer("sapien", "sapien", 0, lambda environ: "vulkan", None),
)
# fmt: on


def check_renderer(name: str) -> None:
    """Raise if the name of a renderer is unknown."""
    if name not in (*NAMES, *_RENDERS_WITH):
        raise InvalidArgumentError(
            f"renderer={name!r} is not known: expected one of {', '.join(map(repr, (*NAMES, *_RENDERS_WITH)))}. "
            'Use renderer="mujoco" for other environments that render with the package mujoco'
        )


def find_renderer(name: str, versions: Mapping[str, str]) -> Renderer:
    """Return the row of a renderer's installed version; raise if the renderer is unknown or not installed."""
    check_renderer(name)
    found = _RENDERS_WITH.get(name, name)
    missing = next((package for package in _required_packages(found) if package not in versions), None)
    if missing is not None:
        if found in MUJOCO_NAMES:
            raise _missing_dependency_error(missing, "mujoco" if found == "gymnasium" else found, f"renderer={name!r}")
        raise MissingDependencyError(
            f"renderer={name!r} needs the package {missing!r}, which is not installed. Install it with:\n"
            f"    pip install {missing}",
            name=missing,
        )
    majors = {name: int(re.match(r"\d*", text)[0] or 0) for name, text in versions.items()}  # type: ignore[index]
    rows = [row for row in TABLE if row.name == found and row.since <= majors[row.package]]
    version = versions[found]
    if rows[-1].package != found:
        version = f"{version} ({rows[-1].package} {versions[rows[-1].package]})"
    return dataclasses.replace(rows[-1], version=version)


def installed_renderers(versions: Mapping[str, str]) -> tuple[Renderer, ...]:
    """Return all installed renderers. gymnasium counts only if mujoco is installed too."""
    return tuple(
        find_renderer(name, versions)
        for name in NAMES
        if all(package in versions for package in _required_packages(name))
    )


def _required_packages(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((name, "mujoco"))) if name in MUJOCO_NAMES else (name,)


def find_index_value(renderer: Renderer, target: EglDevice, machine: Machine) -> str:
    """Find the value of the renderer's index variable with which it selects ``target``; raise if there is none."""
    environ = machine.environ
    # EGL's own index is tried first, because it is the answer for all rules except mujoco 4's.
    numbers = [target.index, *(n for n in range(len(machine.inventory.egl or ())) if n != target.index)]
    for number in numbers:
        candidate = {**environ, **cast("dict[str, str]", renderer.variables("egl", str(number), environ))}
        try:
            assert renderer.select_egl_device is not None
            if renderer.select_egl_device(Machine(machine.inventory, candidate)) == target.index:
                return str(number)
        except RendererFailsError:
            continue
    if target.index >= _EGL_LIMIT:
        raise DeviceUnavailableError(
            f"{renderer} asks EGL for {_EGL_LIMIT} devices, but this one has EGL index {target.index}, counted from 0. "
            "Hide other devices from EGL (in a container, by NVIDIA_VISIBLE_DEVICES), or use another GPU"
        )
    raise DeviceUnavailableError(
        f"{renderer} cannot select EGL device {target.index} by any value of {INDEX} under "
        f"{MASK}={environ.get(MASK)!r}. Set {MASK} to that GPU only"
    )


def has_display(environ: Mapping[str, str]) -> bool:
    """Return whether the variables name an X or Wayland display, which GLFW needs."""
    return bool(re.match(r".*:\d", environ.get("DISPLAY", "")) or environ.get("WAYLAND_DISPLAY"))
