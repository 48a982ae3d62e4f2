"""Where each renderer would render, beside the GPU that would compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._renderers import INDEX, EglWorld, RefusedError
from rl_ext_core.devices.checks._base import mistake, named
from rl_ext_core.devices.checks._fixes import Remedy, backend_of, import_refused, installed, remedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices.checks._base import Mistake, Severity, Situation
    from rl_ext_core.devices.inventory import EglDevice


@dataclass(frozen=True)
class _Trouble:
    """What goes wrong, and by which variable."""

    variable: str
    sentence: str
    severity: Severity = "error"


def find(situation: Situation) -> Iterator[Mistake]:
    """Find renderers that fail, or render elsewhere than where it is computed; those that fare alike in one finding."""
    alike: dict[tuple[_Trouble, Remedy], list[Renderer]] = {}
    for renderer in installed(situation):
        if backend_of(renderer, situation.environ) != "egl":
            continue
        trouble = _trouble(renderer, situation)
        if trouble is not None:
            alike.setdefault((trouble, remedy(renderer, situation)), []).append(renderer)
    for (trouble, cure), renderers in alike.items():
        effect = f"{', '.join(map(str, renderers))}: {situation.once_mended}{trouble.sentence}"
        # The last one stands for all: a decision for robosuite, which comes last, suits the others.
        fix = cure.fix(renderers[-1].name)
        yield mistake(situation, trouble.variable, effect, fix, trouble.severity)


def _trouble(renderer: Renderer, situation: Situation) -> _Trouble | None:
    environ = situation.environ
    robosuite = renderer.name == "robosuite"
    variable = MASK if robosuite and INDEX not in environ and MASK in environ else INDEX
    if robosuite and import_refused(environ):
        text = "MUJOCO_EGL_DEVICE_ID needs to be set to one of the device id specified in CUDA_VISIBLE_DEVICES"
        return _Trouble(
            variable,
            f'import robosuite ends in "AssertionError: {text}", as {environ[INDEX]!r} is no part of {environ[MASK]!r}',
        )
    visible = situation.visible.uuids if situation.visible else ()
    world = EglWorld(situation.inventory.egl or (), visible)
    try:
        index = renderer.selects(environ, world)
    except RefusedError as refused:
        error = _error(environ.get(variable), robosuite, world)
        return _Trouble(variable, f"rendering ends in {error}, because {refused}") if error else None
    device = next(device for device in world.devices if device.index == index)
    return _elsewhere(device, variable, situation)


def _error(value: str | None, lists: bool, world: EglWorld) -> str:
    """Quote what the renderer raises; empty where EGL lists nothing, which is not the variable's fault."""
    entries = [] if value is None else value.split(",") if lists else [value]
    for entry in entries:
        try:
            int(entry)
        except ValueError:
            return f'"ValueError: invalid literal for int() with base 10: {entry!r}"'
    if not world.devices or not entries:
        return ""
    count = len(world.reachable)
    ten = f" (they ask EGL for {count} devices of {len(world.devices)})" if count < len(world.devices) else ""
    return f'"RuntimeError: ... must be an integer between 0 and {count - 1} (inclusive), got {int(entries[0])}"{ten}'


def _elsewhere(device: EglDevice, variable: str, situation: Situation) -> _Trouble | None:
    """Compare the device that renders with the GPU that computes."""
    owner = next((gpu for gpu in situation.inventory.gpus if gpu.uuid == device.uuid), None)
    where = f"EGL device {device.index}"
    if owner is not None and owner.mig:
        return _Trouble(variable, f"{where} is {named(owner)}, cut into MIG slices, which do not render")
    computing = situation.computing
    if computing is None or computing.gpu is None or device.uuid == computing.gpu.uuid:
        return None
    if situation.inventory.egl_of(computing.gpu.uuid) is None or (computing.gpu.mig and device.software):
        return None  # it cannot render at all, which is another finding or the way of slices
    what = "Mesa's on the CPU" if device.software else named(owner) if owner else "a GPU that NVML does not know"
    severity: Severity = "warning" if device.software and INDEX in situation.environ else "error"
    sentence = f"rendering lands on {where}, {what}, while {computing.device}, {named(computing.gpu)}, computes"
    return _Trouble(variable, sentence, severity)
