"""EGL displays that libraries in this process have made, and the devices they are on."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from rl_ext_core._system import after_fork

# Where each renderer keeps its display, for the whole process.
_HOLDERS = {
    "mujoco": "mujoco.egl",
    "gymnasium": "mujoco.egl",
    "dm_control": "dm_control._render.pyopengl.egl_renderer",
    "robosuite": "robosuite.renderers.context.egl_context",
}
_EGL_DEVICE_EXT = 0x322C
_MOST_DEVICES = 64

_inherited: set[str] = set()


def _note_inherited() -> None:
    _inherited.update(name for name in set(_HOLDERS.values()) if _held(name))


# What a parent's display has started (Mesa: threads) is not there in a forked child, where every use of it hangs.
after_fork(_note_inherited)


def _held(module: str) -> Any:
    return getattr(sys.modules.get(module), "EGL_DISPLAY", None)


def of(renderer: str) -> Any:
    """Give the display that a renderer has made in this process, None if it has not."""
    return _held(_HOLDERS[renderer]) or None


def forget_failed(renderer: str) -> None:
    """Let a renderer try again that could not make its display: it would keep the null that it got."""
    module = sys.modules.get(_HOLDERS[renderer])
    if _held(_HOLDERS[renderer]) is not None and of(renderer) is None:
        module.EGL_DISPLAY = None  # type: ignore[union-attr]


def holder(renderer: str) -> str:
    """Name the module that keeps a renderer's display."""
    return _HOLDERS[renderer]


def inherited() -> str | None:
    """Say why EGL hangs in this process: its parent had made a display before it forked it. None if it does not.

    Which library made that display does not matter: those of other libraries on the same device are the same one.
    """
    if not _inherited:
        return None
    return (
        f"{min(_inherited)} had made its display before this process was forked, so that rendering would hang here: "
        'start workers with start_method="forkserver" or "spawn" (gymnasium: context=, TorchRL: mp_start_method=), or '
        "render in workers only"
    )


def index_of(display: Any) -> int | None:
    """Find the EGL index of the device that a display is on.

    :param display: PyOpenGL's or ctypes' pointer
    :return: its place in EGL's order; None where EGL does not tell
    """
    try:
        library = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return None
    get = library.eglGetProcAddress
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    addresses = get(b"eglQueryDisplayAttribEXT"), get(b"eglQueryDevicesEXT")
    if not all(addresses):
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    query = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, integer, ctypes.POINTER(pointer))(addresses[0])
    devices_of = ctypes.CFUNCTYPE(ctypes.c_uint, integer, ctypes.POINTER(pointer), ctypes.POINTER(integer))(
        addresses[1]
    )
    device, devices, count = pointer(), (pointer * _MOST_DEVICES)(), integer()
    if not query(ctypes.cast(display, pointer), _EGL_DEVICE_EXT, ctypes.byref(device)):
        return None
    if not devices_of(_MOST_DEVICES, devices, ctypes.byref(count)):
        return None
    found = [devices[index] for index in range(count.value)]
    return found.index(device.value) if device.value in found else None
