"""Fake driver libraries of a machine with GPUs, compiled from the sources here and configured by variables.

Programs that use them run in a new process, because the loader reads ``LD_LIBRARY_PATH`` only once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_ext_core.devices import Inventory
from tests.programs import ROOT
from tests.requirements import compile_library, skip_or_fail

SOURCES = Path(__file__).parent
LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "egl.c": "libEGL.so.1", "cuda.c": "libcuda.so.1"}
_INVENTORY = "import pickle; from rl_ext_core.devices import Inventory; print(pickle.dumps(Inventory.current()).hex())"
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG")


def require_osmesa() -> None:
    """Skip a test if OSMesa's library is not installed, or fail it if ``CI`` is set."""
    for name in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return
    skip_or_fail("OSMesa is not installed; scripts/install_system_packages.sh installs it")


def compile_drivers(folder: Path) -> None:
    for source, library in LIBRARIES.items():
        compile_library(SOURCES / source, folder / library, "-fPIC", "-D_DEFAULT_SOURCE", f"-Wl,-soname,{library}")
    # PyOpenGL tries this name first, which may exist on the machine.
    (folder / "libEGL.so").symlink_to("libEGL.so.1")


def join_numbers(values: Sequence[Any] | None) -> str | None:
    return None if values is None else ",".join(map(str, values))


def configuration(gpus: int = 4, **settings: Any) -> dict[str, str]:
    """Return the variables of a fake machine: ``egl_order`` sets ``FAKE_EGL_ORDER``, as the C sources explain."""
    given = {"gpus": gpus, **settings}
    texts = {
        name: value if isinstance(value, (str, int, Path)) else join_numbers(value) for name, value in given.items()
    }
    return {f"FAKE_{name.upper()}": str(text) for name, text in texts.items() if text is not None}


@dataclass(frozen=True)
class Drivers:
    """The folder of the compiled libraries, and functions that run programs with them."""

    folder: Path

    def run(self, command: Sequence[str | Path], settings: Mapping[str, str], *, without: Sequence[str] = ()) -> str:
        """Run a program on the fake machine, without this process's own variables, and return its output.

        :param without: source files of the libraries that cannot be loaded on the machine
        """
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environ["LD_LIBRARY_PATH"] = str(self._folder_without(without))
        environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "shared")))  # this tree's code
        done = subprocess.run(
            [str(word) for word in command], env={**environ, **settings}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"exit {done.returncode}:\n{done.stderr}"
        return done.stdout

    def inventory(self, settings: Mapping[str, str], *, setup: str = "", without: Sequence[str] = ()) -> Inventory:
        """Return the inventory that a new process reads on the fake machine, after it has run the code ``setup``."""
        printed = self.run([sys.executable, "-W", "error", "-c", setup + _INVENTORY], settings, without=without)
        inventory: Inventory = pickle.loads(bytes.fromhex(printed.split()[-1]))
        return inventory

    def _folder_without(self, sources: Sequence[str]) -> Path:
        """Create a folder in which some libraries are empty files, so that the machine's own are not found instead."""
        if not sources:
            return self.folder
        folder = self.folder / ("without " + " ".join(sources))
        if not folder.exists():
            folder.mkdir()
            for source, library in LIBRARIES.items():
                if source in sources:
                    (folder / library).touch()
                else:
                    (folder / library).symlink_to(self.folder / library)
        return folder
