"""How each renderer picks its device, by name and version, and the variables that make it pick a given one.

Each rule is a function that repeats what the renderer does with its variables; the tests run it beside the renderer's
own function over all orders and masks of four GPUs. What to set is found by asking the rule, so that no setting
leaves here that the rule itself would not follow to the wanted device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._versions import major
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, missing_dependency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_ext_core.devices.inventory import EglDevice

BACKEND = "MUJOCO_GL"
INDEX = "MUJOCO_EGL_DEVICE_ID"
PLATFORM = "PYOPENGL_PLATFORM"
# What libraries read once, when they are imported: a process that has imported them is bound to it.
READ_AT_IMPORT = (BACKEND, PLATFORM)
NAMES = ("mujoco", "gymnasium", "dm_control", "robosuite")

# mujoco's, robosuite's and dm_control's eglQueryDevicesEXT() ask for no more.
_EGL_LIMIT = 10
_SYNONYMS_OF_GLFW = ("enable", "enabled", "on", "true", "1", "glfw", "")
_OFF = ("disable", "disabled", "off", "false", "0")


class RefusedError(Exception):
    """The renderer would fail on these variables; the text says how, and names variable and value."""


@dataclass(frozen=True)
class EglWorld:
    """What a renderer finds when it asks EGL.

    :param devices: in EGL's order
    :param visible: UUIDs by CUDA ordinal under the mask that is in force; None where nobody knows CUDA's order
    """

    devices: tuple[EglDevice, ...]
    visible: tuple[str, ...] | None

    @property
    def reachable(self) -> tuple[EglDevice, ...]:
        """The devices that a renderer gets to see: it asks for ten."""
        return self.devices[:_EGL_LIMIT]

    def by_ordinal(self) -> dict[int, int]:
        """Map CUDA ordinals to EGL indices, as EGL_CUDA_DEVICE_NV tells them: of visible GPUs, under the mask.

        :raises RefusedError: CUDA's order is unknown
        """
        if self.visible is None:
            raise RefusedError("the GPUs differ, and in which order CUDA counts them could not be found out")
        uuids = {device.uuid: device.index for device in self.reachable if device.cuda and device.uuid}
        return {ordinal: uuids[uuid] for ordinal, uuid in enumerate(self.visible) if uuid in uuids}


@dataclass(frozen=True)
class Renderer:
    """A renderer of one version.

    :param name: one of ``NAMES``
    :param version: of the package whose rule counts
    :param selects: gives the EGL index that these variables lead to; raises RefusedError where they lead to a failure
    :param backend: gives ``"egl"``, ``"osmesa"``, ``"glfw"`` or ``"none"``; raises RefusedError for other values
    """

    name: str
    version: str
    selects: Callable[[Mapping[str, str], EglWorld], int]
    backend: Callable[[Mapping[str, str]], str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find(name: str, versions: Mapping[str, str]) -> Renderer:
    """Look up the rule of a renderer in the version that is installed.

    :raises InvalidArgumentError: no such renderer is known
    :raises MissingDependencyError: it is not installed
    """
    if name not in NAMES:
        raise InvalidArgumentError(
            f"renderer={name!r} is not known here; expected one of {', '.join(map(repr, NAMES))}. Environments that "
            'are built on MuJoCo\'s Python package follow its rule: write renderer="mujoco"'
        )
    if name not in versions or "mujoco" not in versions:
        missing = name if name not in versions else "mujoco"
        extra = "mujoco" if name == "gymnasium" else name
        raise missing_dependency(missing, extra, f"renderer={name!r}")
    mujoco = _mujoco_4 if major(versions["mujoco"]) >= 4 else _raw
    if name == "robosuite":
        return Renderer(name, versions[name], _robosuite, _robosuite_backend)
    if name == "dm_control":
        return Renderer(name, versions[name], _raw, _dm_control_backend)
    backend = _gymnasium_backend if name == "gymnasium" else _mujoco_backend
    return Renderer(name, f"{versions[name]}{_on_mujoco(name, versions)}", mujoco, backend)


def _on_mujoco(name: str, versions: Mapping[str, str]) -> str:
    return "" if name == "mujoco" else f" (mujoco {versions['mujoco']})"


def index_for(renderer: Renderer, target: EglDevice, world: EglWorld, environ: Mapping[str, str]) -> str:
    """Find the value of MUJOCO_EGL_DEVICE_ID that leads this renderer to ``target``.

    :raises DeviceUnavailableError: none does
    """
    # Its own index first: for all rules but one that is the answer.
    numbers = [target.index, *(n for n in range(len(world.devices)) if n != target.index)]
    for number in numbers:
        candidate = {**environ, BACKEND: "egl", INDEX: str(number)}
        try:
            if renderer.selects(candidate, world) == target.index:
                return str(number)
        except RefusedError:
            continue
    if target.index >= _EGL_LIMIT:
        raise DeviceUnavailableError(
            f"{renderer} asks EGL for {_EGL_LIMIT} devices, and this one is number {target.index}, counted from 0. "
            "Hide others from EGL (in a container: NVIDIA_VISIBLE_DEVICES), or choose another GPU"
        )
    raise DeviceUnavailableError(
        f"{renderer} reaches EGL device {target.index} by no value of {INDEX} under {MASK}={environ.get(MASK)!r}. "
        f"Let {MASK} name that GPU, and only it"
    )


def variables(backend: str, index: str | None) -> dict[str, str | None]:
    """Give what to set (text) and what to unset (None) for a backend: ``"egl"`` or ``"osmesa"``."""
    return {BACKEND: backend, PLATFORM: backend, INDEX: index}


def _raw(environ: Mapping[str, str], world: EglWorld) -> int:
    """Follow mujoco up to 3 and dm_control: EGL's own index, else the first device that starts."""
    value = environ.get(INDEX)
    if value is None:
        return _index(0, "the first EGL device", world)
    return _index(_integer(INDEX, value), f"{INDEX}={value!r}", world)


def _robosuite(environ: Mapping[str, str], world: EglWorld) -> int:
    """Follow robosuite 1.5: MUJOCO_EGL_DEVICE_ID, else the mask's first entry, taken for EGL's own index."""
    name = INDEX if environ.get(INDEX) is not None else MASK
    value = environ.get(name)
    if value is None:
        return _index(0, "the first EGL device", world)
    first = value if value.isdigit() else value.split(",")[0]
    # The whole list must be numbers, though one of them is used.
    numbers = [_integer(name, entry) for entry in ([value] if value.isdigit() else value.split(","))]
    return _index(numbers[0], f"{name}={value!r}" if first == value else f"{first!r} of {name}={value!r}", world)


def _mujoco_4(environ: Mapping[str, str], world: EglWorld) -> int:
    """Follow mujoco 4: through EGL_CUDA_DEVICE_NV, where a number means a visible device or a CUDA id."""
    by_ordinal = world.by_ordinal()
    mask = _mujoco_4_mask(environ.get(MASK))
    shown = _mujoco_4_shown(by_ordinal, mask)
    front = shown or [by_ordinal[ordinal] for ordinal in sorted(by_ordinal)]
    ordered = front + [device.index for device in world.reachable if device.index not in front]
    value = environ.get(INDEX)
    if value is None:
        if not ordered:
            raise RefusedError("EGL lists no device")
        return ordered[0]
    number = _integer(INDEX, value)
    if 0 <= number < len(shown):
        return shown[number]
    if shown and mask and number in mask:
        return shown[mask.index(number)]
    if number in by_ordinal:
        return by_ordinal[number]
    if not 0 <= number < len(ordered):
        raise RefusedError(f"{INDEX}={value!r} is beyond EGL's devices, 0 to {len(ordered) - 1}")
    return ordered[number]


def _mujoco_4_mask(value: str | None) -> list[int] | None:
    entries = [entry.strip() for entry in (value or "").split(",") if entry.strip()]
    try:
        numbers = [int(entry) for entry in entries]
    except ValueError:
        return None
    return None if any(number < 0 for number in numbers) else numbers or None


def _mujoco_4_shown(by_ordinal: Mapping[int, int], mask: Sequence[int] | None) -> list[int]:
    if not mask or not by_ordinal:
        return []
    for wanted in (mask, range(len(mask))):
        if all(number in by_ordinal for number in wanted):
            return [by_ordinal[number] for number in wanted]
    return []


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RefusedError(f"{name} holds {value!r}, which is not a number") from None


def _index(number: int, source: str, world: EglWorld) -> int:
    count = len(world.reachable)
    if not count:
        raise RefusedError("EGL lists no device")
    if not 0 <= number < count:
        raise RefusedError(f"{source} is beyond EGL's devices, 0 to {count - 1}")
    return number


def _mujoco_backend(environ: Mapping[str, str]) -> str:
    return _canonical(environ.get(BACKEND, "").lower().strip())


def _gymnasium_backend(environ: Mapping[str, str]) -> str:
    """Follow gymnasium: exact names; without one glfw comes first, and takes the process down without a display."""
    value = environ.get(BACKEND, "glfw")
    if value not in ("glfw", "egl", "osmesa"):
        raise RefusedError(f"{BACKEND}={value!r} is none of 'glfw', 'egl', 'osmesa'")
    return value


def _dm_control_backend(environ: Mapping[str, str]) -> str:
    value = environ.get(BACKEND, "glfw")
    if value == "glx":
        raise RefusedError(f"{BACKEND}={value!r} is none of 'egl', 'osmesa', 'glfw', 'off'")
    return _canonical(value)


def _robosuite_backend(environ: Mapping[str, str]) -> str:
    """Follow robosuite: it imports mujoco, which refuses unknown values, and then overwrites every value but two."""
    _mujoco_backend(environ)
    return {"osmesa": "osmesa", "glx": "glfw"}.get(environ.get(BACKEND, ""), "egl")


def _canonical(value: str) -> str:
    if value in _SYNONYMS_OF_GLFW or value == "glx":
        return "glfw"
    if value in _OFF:
        return "none"
    if value in ("egl", "osmesa"):
        return value
    raise RefusedError(f"{BACKEND}={value!r} is none of 'egl', 'osmesa', 'glfw', 'off'")


def has_display(environ: Mapping[str, str]) -> bool:
    """Tell whether the variables name an X or Wayland display, which GLFW needs."""
    return bool(re.match(r".*:\d", environ.get("DISPLAY", "")) or environ.get("WAYLAND_DISPLAY"))
