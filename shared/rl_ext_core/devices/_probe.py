"""Query EGL and CUDA for their devices in a subprocess.

A subprocess is used because both keep state, and a process that has started CUDA cannot fork any more. The subprocess
runs this file as a program. It imports only the standard library, so it starts within milliseconds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import subprocess
import sys
from typing import Any

_TIMEOUT_S = 20.0
_ANSWER_PREFIX = "rl-ext: "

# From the EGL registry: EXT_device_query, EXT_device_drm(_render_node), NV_device_cuda, EXT_device_persistent_id.
_EGL_EXTENSIONS = 0x3055
_EGL_DRM_DEVICE_FILE = 0x3233
_EGL_DRM_RENDER_NODE_FILE = 0x3377
_EGL_CUDA_DEVICE_NV = 0x323A
_EGL_DEVICE_UUID = 0x335C


def query_egl() -> dict[str, Any]:
    """List EGL's devices without a mask, and whether OSMesa is installed.

    :return: ``error`` (text or None), ``osmesa`` (bool) and ``devices``: dicts with the keys index, software, uuid,
        drm, pci and cuda (the ordinal in PCI order)
    """
    result = _run_probe("egl")
    return {"osmesa": False, "devices": [], "error": None, **result}


def query_cuda_order() -> tuple[str, ...] | None:
    """Query CUDA for the UUIDs of all GPUs in its default order.

    :return: the UUIDs, or None if CUDA does not report them
    """
    found = _run_probe("cuda").get("uuids")
    return tuple(found) if found else None


def _run_probe(question: str) -> dict[str, Any]:
    """Answer ``"egl"`` or ``"cuda"`` in a new process, which a driver may kill."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    if question == "egl":
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    command = [sys.executable, "-I", "-S", __file__, question]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the driver did not answer within {_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"error": f"{sys.executable} could not be started: {error}"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"error": f"the driver ended the process that queried it (exit status {done.returncode}): {last}"}
    # Drivers print to the same stream, before and after the answer.
    answers = [
        line.removeprefix(_ANSWER_PREFIX) for line in done.stdout.splitlines() if line.startswith(_ANSWER_PREFIX)
    ]
    if not answers:
        return {"error": "the driver ended the process that queried it before it answered"}
    answer: dict[str, Any] = json.loads(answers[0])
    return answer


def _answer_egl() -> dict[str, Any]:
    """Return EGL's devices or an error, and whether OSMesa is installed; for the new process."""
    answer: dict[str, Any] = {"osmesa": ctypes.util.find_library("OSMesa") is not None}
    try:
        library = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return {**answer, "error": "libEGL.so.1 is not installed (on Debian: apt-get install libegl1)"}
    try:
        return {**answer, "devices": _egl_devices(library)}
    except _MissingFunctionError as error:
        return {**answer, "error": f"libEGL.so.1 has no {error}"}


class _MissingFunctionError(Exception):
    """Raised for a function that the installed EGL lacks."""


def load_egl_function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Load a function of EGL and declare its types; None if the installed EGL lacks it."""
    get = library.eglGetProcAddress
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = get(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _egl_devices(library: ctypes.CDLL) -> list[dict[str, Any]]:
    """Return a dict for each EGL device."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    query = load_egl_function(
        library, "eglQueryDevicesEXT", ctypes.c_uint, integer, ctypes.POINTER(pointer), ctypes.POINTER(integer)
    )
    text = load_egl_function(library, "eglQueryDeviceStringEXT", ctypes.c_char_p, pointer, integer)
    if query is None or text is None:
        raise _MissingFunctionError("eglQueryDevicesEXT" if query is None else "eglQueryDeviceStringEXT")
    count = integer()
    if not query(0, None, ctypes.byref(count)) or count.value < 1:
        return []
    devices = (pointer * count.value)()
    query(count.value, devices, ctypes.byref(count))
    return [_query_egl_device(library, text, index, devices[index]) for index in range(count.value)]


def _query_egl_device(library: ctypes.CDLL, text: Any, index: int, device: int | None) -> dict[str, Any]:
    """Return index, kind, device file, PCI address, UUID and CUDA ordinal of an EGL device."""
    extensions = (text(device, _EGL_EXTENSIONS) or b"").decode().split()
    drm = None
    for extension, name in (
        ("EGL_EXT_device_drm_render_node", _EGL_DRM_RENDER_NODE_FILE),
        ("EGL_EXT_device_drm", _EGL_DRM_DEVICE_FILE),
    ):
        if drm is None and extension in extensions:
            drm = (text(device, name) or b"").decode() or None
    return {
        "index": index,
        "software": "EGL_MESA_device_software" in extensions,
        "drm": drm,
        "pci": _find_pci_address(drm),
        "uuid": _query_uuid(library, device) if "EGL_EXT_device_persistent_id" in extensions else None,
        "cuda": _query_cuda_ordinal(library, device) if "EGL_NV_device_cuda" in extensions else None,
    }


def _find_pci_address(node: str | None) -> str | None:
    """Return the PCI address of the GPU behind a node in /dev/dri, or None."""
    if node is None:
        return None
    target = os.path.realpath(f"/sys/class/drm/{os.path.basename(node)}/device")
    name = os.path.basename(target)
    return name if name.count(":") == 2 else None


def _query_uuid(library: ctypes.CDLL, device: int | None) -> str | None:
    """Return the UUID of an EGL device; None if EGL does not report it."""
    integer = ctypes.c_int
    types = (ctypes.c_void_p, integer, integer, ctypes.c_void_p, ctypes.POINTER(integer))
    query = load_egl_function(library, "eglQueryDeviceBinaryEXT", ctypes.c_uint, *types)
    raw, size = (ctypes.c_ubyte * 16)(), integer()
    if query is None or not query(device, _EGL_DEVICE_UUID, 16, raw, ctypes.byref(size)):
        return None
    return format_uuid(bytes(raw))


def _query_cuda_ordinal(library: ctypes.CDLL, device: int | None) -> int | None:
    """Return the CUDA ordinal of an EGL device; None if EGL does not report it."""
    types = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
    query = load_egl_function(library, "eglQueryDeviceAttribEXT", ctypes.c_uint, *types)
    value = ctypes.c_ssize_t(-1)
    if query is None or not query(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(value)):
        return None
    return value.value


def format_uuid(raw: bytes) -> str:
    """Format 16 bytes as a UUID in NVML's notation."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _answer_cuda() -> dict[str, Any]:
    """Return the UUIDs of CUDA's devices, or an error; for the new process."""
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return {"error": "CUDA cannot be started"}
    uuids = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDeviceGetUuid(raw, device):
            return {"error": f"CUDA does not report the UUID of device {ordinal}"}
        uuids.append(format_uuid(bytes(raw)))
    return {"uuids": uuids}


if __name__ == "__main__":
    print("\n" + _ANSWER_PREFIX + json.dumps(_answer_egl() if sys.argv[1] == "egl" else _answer_cuda()), flush=True)  # noqa: T201
