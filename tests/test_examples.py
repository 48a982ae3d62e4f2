"""Tests that the notebooks run, and that their stored outputs belong to their code."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from scripts.run_notebooks import KERNEL, code_digest, write_kernel
from tests.core.devices.fakes.build import skip_or_fail
from tests.core.devices.run_code import environment
from tests.torchrl_ext.in_meltingpot.venv import python

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(notebook: Path) -> Any:
    """Read a notebook."""
    return nbformat.read(notebook, as_version=4)


def run_notebook(name: str, folder: Path, variables: dict[str, str], **options: Any) -> str:
    """Run a notebook in a folder, and return its printed output."""
    notebook = read(EXAMPLES / name)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}, **options)
    client.execute(env=variables)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_outputs_match_the_code(path: Path) -> None:
    notebook = read(path)
    advice = f"run scripts/run_notebooks.py {path.stem}"
    assert notebook.metadata.get("rl_ext", {}).get("code_digest") == code_digest(notebook), advice
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert str(EXAMPLES.parent) not in path.read_text()


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return environment variables for a short run of a notebook without GPUs."""
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))
    # Hide GPUs on every machine. robosuite without rl-ext fails with this mask.
    return environment(RL_EXT_SHORT="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param(
            "robosuite_devices",
            [
                *("compute  cpu", "render   the CPU (Mesa, EGL device 0) through robosuite", "total_timesteps | 16"),
                "torch.Size([4, 84, 84, 3]) mean brightness",
            ],
            marks=pytest.mark.exhaustive,
        ),
        ("ppo_torch_env", ["mean reward", "Partial resets are not handled"]),
        ("sb3_torch_env", ["cut by the time limit:         True", "steps a second, learning included"]),
        ("prioritized_replay", ["uniform      learning rate 0.001", "median steps: prioritized 1,000"]),
    ],
)
def test_notebook_runs(name: str, parts: list[str], tmp_path: Path, variables: dict[str, str]) -> None:
    variables["TMPDIR"] = str(tmp_path)  # Stable Baselines3's log
    # Three notebooks import the environment from a file in their folder.
    text = run_notebook(f"{name}.ipynb", tmp_path if name == "robosuite_devices" else EXAMPLES, variables)
    assert [part for part in parts if part not in text] == []
    assert name != "robosuite_devices" or float(text.split("brightness")[1].split()[0]) > 10


@pytest.mark.exhaustive
def test_image_replay_notebook_plans_and_trains(tmp_path: Path, variables: dict[str, str]) -> None:
    text = run_notebook("image_replay_plan.ipynb", tmp_path, variables)
    assert "measured: MountainCar-v0, 150 steps of a random policy" in text
    assert "trained to the same weights, bit for bit: True" in text
    bytes_per_transition = [
        int(line.split()[-4].replace(",", "")) for line in text.splitlines() if line.endswith("bytes a transition")
    ]
    assert 179_000 < bytes_per_transition[0] <= 180_000
    assert 20 * max(bytes_per_transition[1:]) < bytes_per_transition[0]
    assert (tmp_path / "plan.png").exists()


@pytest.mark.exhaustive
def test_melting_pot_notebook_trains(tmp_path: Path, variables: dict[str, str]) -> None:
    write_kernel(tmp_path / "JUPYTER_DATA_DIR", python())
    text = run_notebook("meltingpot_parallel.ipynb", tmp_path, variables, kernel_name=KERNEL)
    assert "cannot pickle 'dmlab2d.dmlab2d_pybind.Lab2d' object" in text
    assert "the environment goes on: torch.Size([3])" in text
    assert "apples per episode" in text


@pytest.mark.exhaustive
def test_retro_notebook_trains(tmp_path: Path, variables: dict[str, str]) -> None:
    if find_spec("stable_retro") is None:
        skip_or_fail("stable-retro is not installed: pip install stable-retro")
    variables |= dict.fromkeys(("XDG_CACHE_HOME", "TMPDIR"), str(tmp_path))
    text = run_notebook("ppo_retro.ipynb", tmp_path, variables)
    assert "Cannot create multiple emulator instances per process" in text
    assert "So each of the 4 has its own process." in text
    assert re.search(r"env_step +\| 0\.\d+", text)
    assert re.search(r"total_timesteps +\| 256", text)
    assert "0 restarts" in text
