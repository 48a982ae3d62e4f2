"""Call a renderer's own function that selects a device, under the fake EGL, for many cases in one process.

    python upstream.py <renderer> <cases> <choices>

``cases`` is a JSON file with a list of variables by name. Each entry is set for one call, and the other ``VARIABLES``
are unset. The selected GPUs are written to ``choices``, a list of their numbers: -1 is the software device, null a
failure. The script runs in any virtual environment that has the renderer.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

VARIABLES = (
    "FAKE_GPUS",
    "FAKE_FASTEST_FIRST",
    "FAKE_EGL_ORDER",
    "FAKE_EGL_LACKS",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "MUJOCO_EGL_DEVICE_ID",
)


def selection_of(renderer: str) -> tuple[Callable[[], Any], Any]:
    """Import a renderer, and return the function that creates its display and that function's result on failure."""
    if renderer == "mujoco":
        from mujoco import egl

        return egl.create_initialized_egl_device_display, egl.EGL.EGL_NO_DISPLAY
    if renderer == "dm_control":
        from dm_control._render.pyopengl import egl_renderer

        return egl_renderer.create_initialized_headless_egl_display, egl_renderer.EGL.EGL_NO_DISPLAY
    assert renderer in ("robosuite", "robosuite_import")
    from robosuite.renderers.context import egl_context

    check = import_check() if renderer == "robosuite_import" else None

    def create_display() -> Any:
        """Repeat the check that robosuite makes at its import, and then create the display."""
        if check is not None:
            exec(check, {"os": os})
        # robosuite's environments pass -1 by default.
        return egl_context.create_initialized_egl_device_display(device_id=-1)

    return create_display, egl_context.EGL.EGL_NO_DISPLAY


def import_check() -> CodeType:
    """Return the statements of robosuite's module that read and check the mask when the module is imported."""
    from robosuite.utils import binding_utils

    source = Path(binding_utils.__file__).read_text(encoding="utf-8")
    found = [
        node
        for node in ast.parse(source).body
        if "CUDA_VISIBLE_DEVICES" in (ast.get_source_segment(source, node) or "")
    ]
    assert [type(node) for node in found] == [ast.Assign, ast.If], "robosuite checks the mask in another way"
    return compile(ast.Module(found, []), binding_utils.__file__, "exec")


def main(renderer: str, cases: Path, choices: Path) -> None:
    """Write the GPU that a renderer selects for each case of a JSON file."""
    os.environ.update(MUJOCO_GL="egl", PYOPENGL_PLATFORM="egl")
    select, no_display = selection_of(renderer)
    gpu_of = ctypes.CDLL("libEGL.so.1").fake_gpu_of
    gpu_of.argtypes = [ctypes.c_void_p]

    def select_gpu(variables: dict[str, str]) -> int | None:
        """Return the GPU that the renderer selects with these variables, or None if it fails."""
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        try:
            display = select()
        except (RuntimeError, ValueError, AssertionError):
            return None
        return None if display == no_display else int(gpu_of(ctypes.cast(display, ctypes.c_void_p)))

    choices.write_text(json.dumps([select_gpu(variables) for variables in json.loads(cases.read_text())]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
