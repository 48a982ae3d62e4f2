"""What the machine lacks: a torch with CUDA, NVIDIA's EGL, the GPUs themselves in a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ext_core.devices.checks._base import Finding, Mistake, mistake, named
from rl_ext_core.devices.checks._fixes import backend_of, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices.checks._base import Severity, Situation
    from rl_ext_core.devices.inventory import Gpu

_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_CONTAINER = "NVIDIA_VISIBLE_DEVICES"
_VENDOR_FILES = ("__EGL_VENDOR_LIBRARY_FILENAMES", "__EGL_VENDOR_LIBRARY_DIRS")
_VENDOR_FILE = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"


def find(situation: Situation) -> Iterator[Mistake]:
    """Find what is missing."""
    yield from _torch(situation)
    yield from _container(situation)
    yield from _egl(situation)


def _torch(situation: Situation) -> Iterator[Mistake]:
    visible = situation.visible
    if not situation.machine.torch_without_cuda or visible is None or not visible.uuids:
        return
    version = situation.inventory.versions["torch"]
    effect = (
        f"torch {version} is built without CUDA, so that networks run on the CPU though {len(visible.uuids)} of this "
        f'machine\'s GPUs are visible, and "cuda" ends in "AssertionError: Torch not compiled with CUDA enabled"'
    )
    release = version.partition("+")[0]
    yield Mistake(Finding("torch", version, effect, f"pip install --force-reinstall torch=={release}"))


def _container(situation: Situation) -> Iterator[Mistake]:
    value = situation.environ.get(_CONTAINER)
    if value is None or situation.inventory.gpus:
        return
    if value.strip() in ("", "void", "none"):
        effect = "it keeps NVIDIA's container runtime from giving this container a GPU, so that the CPU computes"
    else:
        effect = (
            "the container's image asks for GPUs, but none is here, so that the CPU computes: the container was "
            "started without them"
        )
    yield mistake(
        situation, _CONTAINER, effect, "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ...", "warning"
    )


def _egl(situation: Situation) -> Iterator[Mistake]:
    """Find a GPU that computes and that EGL does not list, or an EGL that lists nothing at all."""
    inventory = situation.inventory
    renderers = installed(situation)
    if not renderers or inventory.egl is None:
        return
    using = [renderer for renderer in renderers if backend_of(renderer, situation.environ) == "egl"]
    severity: Severity = "error" if using else "warning"
    computing = situation.computing
    gpu = computing.gpu if computing else None
    if gpu is not None and not gpu.mig and inventory.egl_of(gpu.uuid) is None:
        yield _unlisted(gpu, situation, severity)
    elif not inventory.egl and using:
        why = inventory.egl_error or "it has no driver"
        effect = f"EGL lists no device ({why}), so that rendering fails with {', '.join(map(str, using))}"
        yield mistake(situation, "EGL", effect, "apt-get install libegl1 libegl-mesa0")


def _unlisted(gpu: Gpu, situation: Situation, severity: Severity) -> Mistake:
    inventory, environ = situation.inventory, situation.environ
    where = "lands on Mesa's CPU device" if any(device.software for device in inventory.egl or ()) else "fails"
    others = any(device.uuid for device in inventory.egl or ())
    where = "lands on another GPU" if others else where
    effect = f"EGL does not list {named(gpu)}, which computes, so that rendering {where}"
    if inventory.egl_error:
        return mistake(situation, "EGL", f"{effect}: {inventory.egl_error}", "apt-get install libegl1", severity)
    overridden = next((name for name in _VENDOR_FILES if environ.get(name)), None)
    if overridden:
        effect = f"it replaces the drivers that EGL would find: {effect}"
        return mistake(situation, overridden, effect, {overridden: None}, severity)
    capabilities = environ.get(_CAPABILITIES)
    if capabilities is not None and not {"all", "graphics"} & {part.strip() for part in capabilities.split(",")}:
        effect = f"the container has no graphics driver: {effect}"
        line = f"docker run --gpus all -e {_CAPABILITIES}=all ..."
        return mistake(situation, _CAPABILITIES, effect, line, severity)
    if others:
        line = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ..."
        return mistake(situation, "EGL", f"{effect} (/dev/dri is shared in part)", line, severity)
    effect = f"{effect}; NVIDIA's part of EGL is not installed ({_VENDOR_FILE})"
    if _CONTAINER in environ:
        line = f"docker run --gpus all -e {_CAPABILITIES}=all ..."
        return mistake(situation, _CAPABILITIES, effect, line, severity)
    line = "apt-get install nvidia-egl-icd  # Ubuntu: libnvidia-gl-<version of the driver>"
    return mistake(situation, "EGL", effect, line, severity)
