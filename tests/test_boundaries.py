"""Tests of the boundaries between packages: imports and device variables.

ruff rejects imports of other frameworks and calls of ``torch.cuda`` in source files. See TID251 in pyproject.toml and
in the ``ruff.toml`` of the adapters. import-linter checks imports between rooms and adapters.
"""

from __future__ import annotations

import pytest

from tests.boundaries import FOLDERS, ROOT, device_variables, modules_loaded_by

TORCHRL = {"torchrl", "tensordict", "torchrl_ext"}
SB3 = {"stable_baselines3", "sb3_contrib", "sb3_ext"}
HEAVY = {"torch", "torchrl", "tensordict", "stable_baselines3", "gymnasium", "numba"}
HEAVY |= {"mujoco", "robosuite", "dm_control", "OpenGL", "pynvml", "cloudpickle", "rich"}
LIGHT = "rl_ext_core, rl_ext_core.cli, rl_ext_core.devices, rl_ext_core.errors, rl_ext_core.frames"
DECIDE = "import rl_ext_core.devices as d; d.resolve('auto', render='same', renderer='robosuite').apply()"


@pytest.mark.parametrize(
    ("statement", "watched", "expected"),
    [
        (f"import {LIGHT}, rl_ext_core.processes, rl_ext_core.resources", HEAVY, set()),
        (DECIDE, HEAVY, {"pynvml"}),
        ("import rl_ext_core.factory", HEAVY, {"cloudpickle"}),  # factories need cloudpickle
        pytest.param("import sb3_ext", TORCHRL, set(), marks=pytest.mark.slow),
        pytest.param("import torchrl_ext", SB3, set(), marks=pytest.mark.slow),
        # These cases show that the check can fail.
        pytest.param(
            "import rl_ext_core.devices as d; d.resolve('cpu').compute", {"torch"}, {"torch"}, marks=pytest.mark.slow
        ),
        pytest.param("import sb3_ext, torchrl_ext", TORCHRL, TORCHRL, marks=pytest.mark.exhaustive),
    ],
)
def test_statement_loads_only_expected_packages(statement: str, watched: set[str], expected: set[str]) -> None:
    assert modules_loaded_by(statement, watched) == expected


def test_failing_import_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        modules_loaded_by("import no_such_module", HEAVY)


def test_only_the_devices_package_names_device_variables() -> None:
    named = {
        path.relative_to(ROOT): device_variables(path.read_text(encoding="utf-8"))
        for folder in FOLDERS
        for path in folder.rglob("*.py")
    }
    assert len(named) > 100
    devices = FOLDERS[0].relative_to(ROOT) / "devices"
    elsewhere = {str(path): len(found) for path, found in named.items() if found and devices not in path.parents}
    # The fork server of processes, which devices do not know, needs the names of variables that are read at import.
    assert elsewhere == {"shared/rl_ext_core/_system.py": 1}
    # The check finds variables where they are allowed.
    assert any("CUDA_VISIBLE_DEVICES" in line for line in named[devices / "cuda.py"])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("os.environ['CUDA_VISIBLE_DEVICES']", 1),
        ("os.environ.get('MUJOCO_GL')", 1),
        ("NAME = 'MUJOCO_EGL_DEVICE_ID'", 1),
        ("raise ValueError(f'bad CUDA_VISIBLE_DEVICES={value}')", 1),
        ('"""Explains CUDA_VISIBLE_DEVICES."""', 0),
        ("name = 'cuda'  # MUJOCO_GL", 0),
    ],
)
def test_device_variables_are_found_in_code_but_not_in_docstrings(source: str, count: int) -> None:
    assert len(device_variables(source)) == count
