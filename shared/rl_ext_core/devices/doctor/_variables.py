"""Which environment variables go into a report: those that decide on devices, and no others.

Reports end up in public bug trackers. ``NVIDIA_API_KEY`` or a path below somebody's home must not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_ext_core.devices.checks import _names

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of any case, because one who misspelled a name that way should read of it.
_MATTER = re.compile(
    r"""(CUDA|HIP|ROCR|GPU)_\w+ | MUJOCO_\w+ | PYOPENGL_\w+ | (__)?EGL_\w+ | __GLX_\w+ | LIBGL_\w+ | GALLIUM_DRIVER
    | NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_\w+|DISABLE_REQUIRE)
    | (LOCAL_|GROUP_)?RANK | (LOCAL_)?WORLD_SIZE | OMPI_COMM_WORLD_(LOCAL_)?RANK | MPI_LOCALRANKID
    | SLURM_(LOCALID|PROCID|JOB_ID|NTASKS|\w*GPUS?(_\w+)?|TRES_PER_TASK) | RAY_(JOB_ID|\w*VISIBLE_DEVICES)
    | DISPLAY | WAYLAND_DISPLAY""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_PRIVATE = re.compile("KEY|TOKEN|SECRET|PASSW|AUTH|CREDENTIAL|HOME|ROOT|PATH|DIR", re.IGNORECASE)
# Their paths decide on a driver; other paths only tell where somebody has installed something.
_PATHS = ("__EGL_VENDOR_LIBRARY_FILENAMES", "__EGL_VENDOR_LIBRARY_DIRS")


def that_matter(environ: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that decide on devices, misspelled ones included.

    :param environ: all variables
    :return: some of them, by name
    """
    return {name: environ[name] for name in sorted(environ) if _matters(name)}


def _matters(name: str) -> bool:
    if _names._meant(name) is not None or name in _PATHS:
        return True
    return _MATTER.fullmatch(name) is not None and _PRIVATE.search(name) is None
