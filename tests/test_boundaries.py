"""Who may import whom, who decides on devices, and a proof beside each check that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.boundaries import FOLDERS, FORBIDDEN, SB3, TORCHRL, device_decisions, forbidden_imports, loaded_by

HEAVY = {"torch", "torchrl", "tensordict", "stable_baselines3", "gymnasium", "numba"}
LIGHT_MODULES = [
    "rl_ext_core",
    "rl_ext_core.cli",
    "rl_ext_core.devices",
    "rl_ext_core.errors",
    "rl_ext_core.frames",
    "rl_ext_core.processes",
    "rl_ext_core.resources",
]
RENDERERS = {"mujoco", "robosuite", "dm_control", "OpenGL", "pynvml", "cloudpickle", "rich"}
SOURCES = [
    pytest.param(package, path, id=f"{package}/{path.relative_to(folder)}")
    for package, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
]


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_the_core_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}", HEAVY | RENDERERS) == set()


def test_importing_the_factories_loads_cloudpickle_which_they_are_made_by() -> None:
    assert loaded_by("import rl_ext_core.factory", HEAVY | RENDERERS) == {"cloudpickle"}


def test_a_decision_loads_neither_torch_nor_a_renderer() -> None:
    statement = "import rl_ext_core.devices as d; d.resolve('auto', render='same', renderer='robosuite').apply()"
    assert loaded_by(statement, HEAVY | RENDERERS) == {"pynvml"}


@pytest.mark.slow
def test_sb3_ext_loads_no_torchrl() -> None:
    assert loaded_by("import sb3_ext", TORCHRL) == set()


@pytest.mark.slow
def test_torchrl_ext_loads_no_sb3() -> None:
    assert loaded_by("import torchrl_ext", SB3) == set()


@pytest.mark.sample
@pytest.mark.parametrize(
    ("statement", "watched", "expected"),
    [
        ("import numba", HEAVY, {"numba"}),
        ("import torch", HEAVY, {"torch"}),
        ("import rl_ext_core.devices as d; d.resolve('cpu').compute", HEAVY, {"torch"}),
        pytest.param("import sb3_ext, torchrl_ext", TORCHRL, {"torchrl_ext"}, marks=pytest.mark.slow),
        ("import torchrl_ext, stable_baselines3", SB3, {"stable_baselines3"}),
    ],
)
def test_the_check_of_loaded_packages_can_fail(statement: str, watched: set[str], expected: set[str]) -> None:
    assert loaded_by(statement, watched) >= expected


def test_a_module_that_does_not_import_is_not_taken_for_a_light_one() -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        loaded_by("import no_such_module", HEAVY)


def test_each_package_has_sources() -> None:
    assert {param.values[0] for param in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize(("package", "path"), SOURCES)
def test_no_source_imports_across_the_boundaries(package: str, path: Path) -> None:
    assert forbidden_imports(path.read_text(encoding="utf-8"), FORBIDDEN[package]) == []


@pytest.mark.parametrize(
    "offender",
    [
        "import torchrl",
        "import numpy, torchrl.envs as envs",
        "from torchrl.envs import GymEnv",
        "def later():\n    from tensordict import TensorDict",
        "import importlib\nimportlib.import_module('torchrl.data')",
        "__import__('torchrl_ext')",
        "try:\n    import torchrl\nexcept ImportError:\n    pass",
    ],
)
def test_the_check_of_imports_can_fail(offender: str) -> None:
    assert len(forbidden_imports(offender, TORCHRL)) == 1


@pytest.mark.parametrize("innocent", ["import torch", "from .torchrl import x", "text = 'import torchrl'"])
def test_the_check_of_imports_lets_others_pass(innocent: str) -> None:
    assert forbidden_imports(innocent, TORCHRL) == []


@pytest.mark.parametrize(("package", "path"), SOURCES)
def test_only_the_devices_package_decides_on_devices(package: str, path: Path) -> None:
    if FOLDERS["rl_ext_core"] / "devices" in path.parents:
        pytest.skip("this is where devices are decided on")
    assert device_decisions(path.read_text(encoding="utf-8")) == []


def test_the_devices_package_itself_would_be_found() -> None:
    source = (FOLDERS["rl_ext_core"] / "devices" / "_cuda.py").read_text(encoding="utf-8")
    assert any("CUDA_VISIBLE_DEVICES" in line for line in device_decisions(source))


@pytest.mark.parametrize(
    "offender",
    [
        "torch.cuda.is_available()",
        "from torch import cuda\nok = cuda.is_available()",
        "check = torch.cuda.is_available",
        "from torch.cuda import is_available",
        "os.environ['CUDA_VISIBLE_DEVICES']",
        "os.environ.get('MUJOCO_GL')",
        "NAME = 'MUJOCO_EGL_DEVICE_ID'",
        "os.environ['EGL_PLATFORM'] = 'device'",
        "raise ValueError(f'bad CUDA_VISIBLE_DEVICES={value}')",
    ],
)
def test_the_check_of_device_decisions_can_fail(offender: str) -> None:
    assert len(device_decisions(offender)) == 1


@pytest.mark.parametrize(
    "innocent",
    ['"""Explains CUDA_VISIBLE_DEVICES."""', "codec.is_available()", "name = 'cuda'", "# MUJOCO_GL"],
)
def test_the_check_of_device_decisions_lets_others_pass(innocent: str) -> None:
    assert device_decisions(innocent) == []
