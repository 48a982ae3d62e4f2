from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("build_folder")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out


@pytest.mark.slow
def test_wheel_contains_only_the_three_packages(build_folder: Path) -> None:
    (wheel,) = build_folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"rl_ext_core", "torchrl_ext", "sb3_ext"}
    assert {f"{name}/py.typed" for name in ("rl_ext_core", "torchrl_ext", "sb3_ext")} <= set(names)
    assert "rl_ext_core/devices/__init__.py" in names
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    readme = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "https://rl-ext.readthedocs.io/en/latest/guides/buffers.html" in readme
    assert not re.findall(r"\]\((?!https://)", readme)  # a package index cannot follow relative links


@pytest.mark.slow
def test_sdist_contains_files_for_build_and_tests(build_folder: Path) -> None:
    (sdist,) = build_folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "constraints.txt", "tests/conftest.py"} <= names
    assert "shared/rl_ext_core/py.typed" in names
    assert not [name for name in names if name.startswith(".venv") or "__pycache__" in name]
