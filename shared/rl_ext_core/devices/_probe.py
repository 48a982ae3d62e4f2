"""Questions that another process answers: EGL's devices, CUDA's order, installed versions, and a rendered frame.

EGL and CUDA keep state, and a process that has started CUDA cannot fork any more. So a subprocess runs this file as a
program. It imports only the standard library, so that it starts within milliseconds, in any interpreter.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

PACKAGES = ("torch", "mujoco", "robosuite", "dm_control", "gymnasium", "sapien")
ANSWER_PREFIX = "rl-ext: "
_TIMEOUT_S = 20.0

# From the EGL registry: EXT_device_query, EXT_device_drm(_render_node), NV_device_cuda, EXT_device_persistent_id.
_EGL_EXTENSIONS = 0x3055
_EGL_DRM_DEVICE_FILE = 0x3233
_EGL_DRM_RENDER_NODE_FILE = 0x3377
_EGL_CUDA_DEVICE_NV = 0x323A
_EGL_DEVICE_UUID = 0x335C
_EGL_DEVICE_EXT = 0x322C
_MAX_EGL_DEVICES = 64

_MODEL = "<mujoco><worldbody><geom size='1'/></worldbody></mujoco>"
_IMAGE_SIZE = 64


def query_versions(python: str) -> dict[str, str] | None:
    """Query another interpreter for the versions that :func:`read_versions` reads; None if it does not answer."""
    answer = run_program([python, __file__, "versions"], os.environ, _TIMEOUT_S)
    return None if "failure" in answer else answer


def query_driver(question: str) -> dict[str, Any]:
    """Query a driver in a new process, which it may kill. An answer with a ``failure`` is a failure.

    The answer to ``"egl"`` has EGL's ``devices`` without a mask, and whether ``osmesa`` is installed. That to
    ``"cuda"`` has the ``uuids`` of all GPUs in CUDA's default order.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    if question == "egl":
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return run_program([sys.executable, "-I", "-S", __file__, question], environ, _TIMEOUT_S)


def run_program(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    observe: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
    """Run this file with a question, and return its answer, or a ``failure``.

    ``observe`` is called with the ID of the process when it has started, and again while it waits with its answer.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        return {"failure": f"{command[0]} could not be started: {error}"}
    timer = threading.Timer(timeout_s, process.kill)
    timer.daemon = True
    timer.start()
    answer, last = None, "it printed no error"
    with process:  # at its end, the pipes are closed, so that the process ends
        observe(process.pid)
        for line in process.stdout or ():
            if line.startswith(ANSWER_PREFIX):
                answer = json.loads(line.removeprefix(ANSWER_PREFIX))
                observe(process.pid)
                break
            last = line.strip() or last  # drivers and libraries print to the same stream
    timed_out = not timer.is_alive()
    timer.cancel()
    if answer is not None:
        return answer  # type: ignore[no-any-return]
    if timed_out:
        return {"failure": f"the driver did not answer within {timeout_s:.0f} s"}
    status = process.returncode
    how = f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.strsignal(-status)})"
    return {"failure": f"the process that queried the driver ended {how}: {last}"}


def _answer_egl() -> dict[str, Any]:
    answer: dict[str, Any] = {"osmesa": ctypes.util.find_library("OSMesa") is not None}
    try:
        library = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return {**answer, "failure": "libEGL.so.1 is not installed (on Debian: apt-get install libegl1)"}
    handles = _egl_handles(library)
    text = load_egl_function(library, "eglQueryDeviceStringEXT", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
    if handles is None or text is None:
        return {**answer, "failure": "libEGL.so.1 has no eglQueryDevicesEXT"}
    devices = [_query_egl_device(library, text, index, handle) for index, handle in enumerate(handles)]
    return {**answer, "devices": devices}


def load_egl_function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Load a function of EGL and declare its types; None if the installed EGL lacks it."""
    get = library.eglGetProcAddress
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = get(name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _egl_handles(library: ctypes.CDLL) -> list[int | None] | None:
    """Return the handles of EGL's devices; None if the installed EGL cannot list them."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    types = (integer, ctypes.POINTER(pointer), ctypes.POINTER(integer))
    query = load_egl_function(library, "eglQueryDevicesEXT", ctypes.c_uint, *types)
    handles, count = (pointer * _MAX_EGL_DEVICES)(), integer()
    if query is None:
        return None
    return handles[: count.value] if query(_MAX_EGL_DEVICES, handles, ctypes.byref(count)) else []


def _query_egl_device(library: ctypes.CDLL, text: Any, index: int, device: int | None) -> dict[str, Any]:
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
        "uuid": _query_uuid(library, device) if "EGL_EXT_device_persistent_id" in extensions else None,
        "cuda": _query_cuda_ordinal(library, device) if "EGL_NV_device_cuda" in extensions else None,
    }


def _query_uuid(library: ctypes.CDLL, device: int | None) -> str | None:
    integer = ctypes.c_int
    types = (ctypes.c_void_p, integer, integer, ctypes.c_void_p, ctypes.POINTER(integer))
    query = load_egl_function(library, "eglQueryDeviceBinaryEXT", ctypes.c_uint, *types)
    raw, size = (ctypes.c_ubyte * 16)(), integer()
    if query is None or not query(device, _EGL_DEVICE_UUID, 16, raw, ctypes.byref(size)):
        return None
    return format_uuid(bytes(raw))


def _query_cuda_ordinal(library: ctypes.CDLL, device: int | None) -> int | None:
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
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return {"failure": "CUDA cannot be started"}
    uuids = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDeviceGetUuid(raw, device):
            return {"failure": f"CUDA does not report the UUID of device {ordinal}"}
        uuids.append(format_uuid(bytes(raw)))
    return {"uuids": uuids}


# Versions


def read_versions() -> dict[str, str]:
    """Return the versions of torch and the renderers, without importing them.

    ``"torch.cuda"`` is the CUDA version of torch: ``""`` for a build without CUDA, ``"rocm <version>"`` for AMD.
    """
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        found["torch.cuda"] = _read_torch_cuda_version()
    return found


def _read_torch_cuda_version() -> str:
    """Read torch's CUDA or ROCm version from its files, without importing it."""
    spec = util.find_spec("torch")
    source = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else ""
    values: dict[str, Any] = {}
    if os.path.isfile(source):
        with open(source, encoding="utf-8") as file:
            exec(file.read(), values)
    return f"rocm {values['hip']}" if values.get("hip") else values.get("cuda") or ""


# A rendered frame


def egl_index_of(display: Any) -> int | None:
    """Return the EGL index of the device that a display of PyOpenGL or ctypes is on; None if EGL does not report it."""
    try:
        library = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    types = (pointer, ctypes.c_int, ctypes.POINTER(pointer))
    query = load_egl_function(library, "eglQueryDisplayAttribEXT", ctypes.c_uint, *types)
    handles, device = _egl_handles(library), pointer()
    if query is None or not query(ctypes.cast(display, pointer), _EGL_DEVICE_EXT, ctypes.byref(device)):
        return None
    return handles.index(device.value) if handles and device.value in handles else None


def draw(name: str, display_module: str) -> dict[str, Any]:
    """Create a renderer's context with this process's variables, and return what renders, or the failure.

    The renderer's display is the ``EGL_DISPLAY`` of the module ``display_module``.
    """
    try:
        names = _create_context(name)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        missing = isinstance(error, ModuleNotFoundError)
        return {"failure": f"{type(error).__name__}: {first}", "missing": missing}
    display = getattr(sys.modules.get(display_module), "EGL_DISPLAY", None)
    index = egl_index_of(display) if display else None
    return {"gl_renderer": names[0], "gl_vendor": names[1], "egl": index}


_contexts: list[object] = []


def _create_context(name: str) -> list[str]:
    """Create a renderer's context, which stays until the process ends; return OpenGL's names."""
    if name == "robosuite":
        importlib.import_module("robosuite")  # it checks the variables before it imports mujoco
    mujoco: Any = importlib.import_module("mujoco")
    model = mujoco.MjModel.from_xml_string(_MODEL)

    def draw_and_read_names() -> list[str]:
        """Create a MuJoCo context, which fails without OpenGL, and read OpenGL's names."""
        mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        gl: Any = importlib.import_module("OpenGL.GL")
        return [(gl.glGetString(name) or b"").decode() for name in (gl.GL_RENDERER, gl.GL_VENDOR)]

    if name == "dm_control":
        context: Any = importlib.import_module("dm_control._render").Renderer(_IMAGE_SIZE, _IMAGE_SIZE)
        _contexts.append(context)
        with context.make_current() as thread:  # dm_control renders in its own thread
            return thread.call(draw_and_read_names)  # type: ignore[no-any-return]
    if name == "robosuite":
        binding: Any = importlib.import_module("robosuite.utils.binding_utils")
        context = binding.MjRenderContextOffscreen(binding.MjSim.from_xml_string(_MODEL), -1, _IMAGE_SIZE, _IMAGE_SIZE)
    elif name == "gymnasium":
        viewer: Any = importlib.import_module("gymnasium.envs.mujoco.mujoco_rendering").OffScreenViewer
        sized = "width" in inspect.signature(viewer).parameters  # releases before 1.0 read the size from the model
        context = viewer(model, mujoco.MjData(model), *([_IMAGE_SIZE] * 2 if sized else []))
    else:
        context = mujoco.GLContext(_IMAGE_SIZE, _IMAGE_SIZE)
        context.make_current()
    _contexts.append(context)
    return draw_and_read_names()


def main() -> None:
    """Answer the question on the command line, and wait until standard input is closed."""
    question, *arguments = sys.argv[1:]
    answers: dict[str, Any] = {"egl": _answer_egl, "cuda": _answer_cuda, "versions": read_versions, "draw": draw}
    if question in ("versions", "draw"):
        folder = os.path.dirname(os.path.abspath(__file__))  # its modules are not the program's
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    print(f"\n{ANSWER_PREFIX}{json.dumps(answers[question](*arguments))}", flush=True)  # noqa: T201
    sys.stdin.read()
    os._exit(0)  # skip the exit handlers of drivers and libraries, whose failures are not part of the answer


if __name__ == "__main__":
    main()
