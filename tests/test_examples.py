from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_util import make_vec_env

from scripts.run_notebooks import KERNEL, code_digest, write_kernel
from tests.core.devices.run_code import environment
from tests.requirements import find_python, skip_or_fail
from tests.sb3_ext.buffer_envs import without_logger

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
IN_EXAMPLES = ("ppo_torch_env", "sb3_torch_env", "prioritized_replay")
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(notebook: Path) -> Any:
    return nbformat.read(notebook, as_version=4)


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


# Texts of each notebook's output. Parts that begin with ^ are regular expressions.
OUTPUTS = {
    "robosuite_devices": [
        *("compute  cpu", "render   the CPU (Mesa, EGL device 0) through robosuite", "total_timesteps | 16"),
        *("torch.Size([4, 84, 84, 3]) mean brightness", r"^brightness \d\d"),
    ],
    "ppo_torch_env": ["mean reward", "Partial resets are not handled"],
    "sb3_torch_env": ["cut by the time limit:         True", "steps a second, learning included"],
    "crash_and_resume": ["exit code -9", "starts at 1", "reproduced at step", "exit code -11"],
    "prioritized_replay": ["uniform      learning rate 0.001", "median steps: prioritized 1,000"],
    "image_replay_plan": [
        "measured: MountainCar-v0, 150 steps of a random policy",
        "trained to the same weights, bit for bit: True",
    ],
    "meltingpot_parallel": [
        "cannot pickle 'dmlab2d.dmlab2d_pybind.Lab2d' object",
        *("the environment goes on: torch.Size([3])", "apples per episode"),
    ],
    "ppo_retro": [
        *("Cannot create multiple emulator instances per process", "So each of the 4 has its own process."),
        *(r"^env_step +\| 0\.\d+", r"^total_timesteps +\| 256", "0 restarts"),
    ],
}
QUICKEST = ("ppo_torch_env", "sb3_torch_env")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICKEST else pytest.mark.exhaustive) for name in OUTPUTS]
)
def test_notebook_runs(name: str, tmp_path: Path, variables: dict[str, str]) -> None:
    options: dict[str, Any] = {}
    if name == "meltingpot_parallel":
        write_kernel(tmp_path / "JUPYTER_DATA_DIR", find_python("meltingpot"))
        options["kernel_name"] = KERNEL
    if name == "ppo_retro" and find_spec("stable_retro") is None:
        skip_or_fail("stable-retro is not installed: pip install stable-retro")
    variables |= dict.fromkeys(("XDG_CACHE_HOME", "TMPDIR"), str(tmp_path))
    # Some notebooks import the environment from a file in their folder.
    folder, notebook = EXAMPLES if name in IN_EXAMPLES else tmp_path, read(EXAMPLES / f"{name}.ipynb")
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}, **options)
    client.execute(env=variables)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    found = [re.search(part[1:], text) if part[0] == "^" else part in text for part in OUTPUTS[name]]
    assert all(found), text
    if name == "image_replay_plan":
        lines = [line for line in text.splitlines() if line.endswith("bytes a transition")]
        sizes = [int(line.split()[-4].replace(",", "")) for line in lines]
        assert 179_000 < sizes[0] <= 180_000
        assert 20 * max(sizes[1:]) < sizes[0]
        assert (tmp_path / "plan.png").exists()


@pytest.fixture
def recurrent_dqn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("recurrent_dqn")


def test_recurrent_dqn_computes_the_same_q_values_from_stored_states_as_while_acting(recurrent_dqn: Any) -> None:
    env = make_vec_env(recurrent_dqn.TMaze, n_envs=3, seed=0)
    features = {"features_extractor_class": recurrent_dqn.SmallCNN, "features_extractor_kwargs": {"features_dim": 16}}
    options = {"sequence_length": 8, "burn_in": 5, "buffer_size": 90, "train_freq": 1, "learning_starts": 1000}
    policy = recurrent_dqn.RecurrentDQNPolicy
    model = without_logger(
        recurrent_dqn.RecurrentDQN(policy, env, policy_kwargs=features, device="cpu", seed=0, **options)
    )
    network, acting = model.q_net, []
    hook = network.register_forward_hook(lambda module, args, outputs: acting.append(outputs[0][:, 0]))
    model.learn(240)
    model.learn(90, reset_num_timesteps=False)  # resets the environments within their episodes
    hook.remove()
    replay = model.replay_buffer
    assert len(acting) == 110
    n_rows = replay.buffer_size
    newest = 109 - (109 - np.arange(n_rows)) % n_rows  # the newest step in each row
    batch = replay.sample_sequences(100, 8, burn_in=5)
    states = th.from_numpy(replay.lstm_states[batch.rows, batch.envs].swapaxes(0, 1))
    steps = newest[(batch.rows[:, None] + np.arange(13)) % n_rows]
    expected = th.stack(acting)[steps, batch.envs[:, None]]
    n_burn_in = batch.mask.int().argmax(dim=1)
    assert set(n_burn_in.tolist()) == set(range(6))
    with th.no_grad():
        q_values, _ = network(batch.observations, states)
    burned_in = network.burn_in(batch.observations, states, n_burn_in)
    assert not burned_in.requires_grad
    for i, (n_steps, mask) in enumerate(zip(n_burn_in.tolist(), batch.mask, strict=True)):
        end = n_steps + int(mask.sum())
        assert th.allclose(q_values[i, :end], expected[i, :end], atol=1e-5)
        with th.no_grad():
            learned, _ = network(batch.observations[i : i + 1, n_steps:end], burned_in[:, i : i + 1])
        assert th.allclose(learned[0], expected[i, n_steps:end], atol=1e-5)
    starts = batch.episode_starts[:, 0] == 1
    assert starts.any()
    assert not states[:, starts].any()
    oldest = th.from_numpy(batch.rows == replay.pos)  # whether it starts an episode is unknown
    assert states[:, ~starts & ~oldest].any(dim=2).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_recurrent_dqn_example_prints_success_rates(
    recurrent_dqn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RL_EXT_SHORT", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # Stable Baselines3's log
    recurrent_dqn.main([])
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+): success rate [01]\.\d\d after 1,000 steps", text, re.M) == ["DQN", "RecurrentDQN"]
