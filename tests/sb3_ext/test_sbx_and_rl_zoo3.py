from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.requirements import run_in_jax_venv as run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_sbx_learns_same_weights_as_with_sb3s_classes(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, str(ROOT / "tests" / "sb3_ext" / "sbx_checks.py")).splitlines()[-1])
    assert found == {"DQN": True, "PPO": True, "SAC": True}


def test_rl_zoo3_takes_buffer_class_from_yaml_resumes_and_optimizes(tmp_path: Path) -> None:
    hyperparams = str(ROOT / "examples" / "rl_zoo3_hyperparams.yml")
    command = ["-m", "rl_zoo3.train", "--algo", "dqn", "--env", "PongNoFrameskip-v4", "--conf-file", hyperparams]
    short = ["--hyperparams", "learning_starts:50", "buffer_size:500"]
    once = [*short, "--save-replay-buffer", "--eval-freq", "-1"]
    told = run(tmp_path, *command, *once, "-n", "120")
    assert """'__import__("sb3_ext").CompressedReplayBuffer'""" in told
    saved = (tmp_path / "logs/dqn/PongNoFrameskip-v4_1/replay_buffer.pkl").read_bytes()
    assert b"CompressedReplayBuffer" in saved
    assert len(saved) < 1_000_000
    told = run(tmp_path, *command, *once, "-n", "40", "-i", "logs/dqn/PongNoFrameskip-v4_1/PongNoFrameskip-v4.zip")
    assert "Loading replay buffer" in told
    search = ["-optimize", "--n-trials", "2", "--sampler", "random", "--pruner", "none", "--n-evaluations", "1"]
    told = run(tmp_path, *command, *short, *search, "-n", "60", "--eval-episodes", "1")
    assert "Number of finished trials:  2" in told


def test_rl_zoo3_trains_and_evaluates_on_shared_memory_vec_env(tmp_path: Path) -> None:
    short = ["--hyperparams", "n_envs:2", "n_steps:32", "batch_size:32", "--eval-freq", "64", "-n", "128"]
    script = str(ROOT / "examples" / "rl_zoo3_train.py")
    told = run(tmp_path, script, "--algo", "ppo", "--env", "CartPole-v1", "--eval-episodes", "1", *short)
    assert "total_timesteps | 128" in told
    assert (tmp_path / "logs/ppo/CartPole-v1_1/best_model.zip").exists()
