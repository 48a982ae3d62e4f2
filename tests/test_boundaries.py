"""Tests of the boundaries between packages: imports and device variables.

ruff rejects imports of other frameworks and calls of ``torch.cuda`` in source files. See TID251 in pyproject.toml and
in the ``ruff.toml`` of the adapters. import-linter checks imports between rooms and adapters.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEVICE_VARIABLE = re.compile(r"\b(CUDA_VISIBLE_DEVICES|MUJOCO_(GL|EGL)|EGL_[A-Z])")
TORCHRL = {"torchrl", "tensordict", "torchrl_ext"}
SB3 = {"stable_baselines3", "sb3_contrib", "sb3_ext"}
HEAVY = {"torch", "torchrl", "tensordict", "stable_baselines3", "gymnasium", "numba"}
HEAVY |= {"mujoco", "robosuite", "dm_control", "OpenGL", "pynvml", "cloudpickle", "rich"}
LIGHT = "rl_ext_core, rl_ext_core.cli, rl_ext_core.devices, rl_ext_core.errors, rl_ext_core.frames"
DECIDE = "import rl_ext_core.devices as d; d.resolve('auto', render='same', renderer='robosuite').apply()"
DOCTOR = "from rl_ext_core.cli import main; main(['doctor'])"


@pytest.mark.parametrize(
    ("statement", "watched", "expected"),
    [
        (f"import {LIGHT}, rl_ext_core.processes, rl_ext_core.resources", HEAVY, set()),
        (DECIDE, HEAVY, {"pynvml"}),
        ("import rl_ext_core.factory", HEAVY, {"cloudpickle"}),  # factories need cloudpickle
        ("import rl_ext_core.cli", {"rl_ext_core.devices", "rich", "numpy", "torch"}, set()),
        (DOCTOR, {"torch", "mujoco", "numpy"}, set()),
        pytest.param("import sb3_ext", TORCHRL, set(), marks=pytest.mark.slow),
        pytest.param("import torchrl_ext", SB3, set(), marks=pytest.mark.slow),
    ],
)
def test_statement_loads_only_expected_packages(statement: str, watched: set[str], expected: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sorted({watched!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) == expected


def device_variables(path: Path) -> list[str]:
    """List the texts outside docstrings that name environment variables for device selection."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [text for text in texts if isinstance(text, str) and DEVICE_VARIABLE.search(text)]


def test_only_the_devices_package_names_device_variables() -> None:
    folders = ("shared/rl_ext_core", "torchrl_ext", "sb3_ext")
    named = {
        str(path.relative_to(ROOT)): device_variables(path) for name in folders for path in (ROOT / name).rglob("*.py")
    }
    assert len(named) > 100
    devices = "shared/rl_ext_core/devices/"
    elsewhere = {path: len(found) for path, found in named.items() if found and not path.startswith(devices)}
    # The fork server of processes, which devices do not know, needs the names of variables that are read at import.
    assert elsewhere == {"shared/rl_ext_core/_system.py": 1}
    # The check finds variables where they are allowed.
    assert any("CUDA_VISIBLE_DEVICES" in text for text in named[f"{devices}cuda.py"])
