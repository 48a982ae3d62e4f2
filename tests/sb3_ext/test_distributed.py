from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.logger import Logger

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import tensor
from tests import programs
from tests.sb3_ext import ranks

ROOT = Path(__file__).parents[2]


def run_ranks(task: str, folder: Path) -> tuple[list[Any], list[str]]:
    """Run a task on two ranks; return what they saved, and their last lines of errors."""
    code = Path(ranks.__file__).read_text()
    started = [programs.start(code, "sb3", task, str(folder), str(rank), cwd=ROOT) for rank in range(2)]
    errors = [program.wait(180).stderr for program in started]
    files = [folder / f"{task}-{rank}.pt" for rank in range(2)]
    found = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
    return found, [error.strip().splitlines()[-1] if error.strip() else "" for error in errors]


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_all_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, errors = run_ranks("equal", tmp_path)
    assert all(found), errors
    for module, name in ((torch.distributions.normal, "_standard_normal"), (np.random, "permutation")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    ranks.share_random_numbers(0)
    for key in ("plain", "kl"):
        options = {"target_kl": 1e-3 if key == "kl" else None, "batch_size": 2 * ranks.B}
        model = ranks.model_of("PPO", 0, 2 * ranks.N, **options).learn(6 * 2 * ranks.N * ranks.T)
        for weights, updates in (part[key] for part in found):
            assert updates == model._n_updates
            for name, value in model.policy.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
            assert all(torch.equal(weights[name], value) for name, value in found[0][key][0].items())


@pytest.mark.slow
def test_all_algorithms_share_weights_steps_statistics_and_logs(tmp_path: Path) -> None:
    found, errors = run_ranks("all", tmp_path)
    assert all(found), errors
    for name in ("PPO", "A2C", "SAC", "TD3", "DQN"):
        (weights, steps, seen, statistics, infos, episodes), other = (part[name] for part in found)
        assert all(torch.equal(value, other[0][key]) for key, value in weights.items())
        assert seen[:3] == [16, 32, 48]
        assert seen[-1] == steps == (560 if name == "A2C" else 512)  # a rollout of A2C has 80 steps
        assert all(np.array_equal(*pair) for pair in zip(statistics, other[3], strict=True))
        assert statistics[2] == pytest.approx(steps + 16 + 1e-4)  # steps and the reset of all environments
        assert infos == other[4]
        assert episodes == other[5] == (0 if name in ("PPO", "A2C") else len(infos))
        # Rank 0 saves, and one process of either package continues.
        assert not (tmp_path / f"{name}-1.zip").exists()
        getattr(sb3, name).load(tmp_path / f"{name}-0.zip")
        env = ranks.model_of(name, 0, 2).get_env()
        model = getattr(tensor, name).load(tmp_path / f"{name}-0.zip", env=env)
        model.set_logger(Logger(None, []))
        assert model.learn(32, reset_num_timesteps=False).num_timesteps >= steps + 32
    assert not (tmp_path / "normalize-1.pkl").exists()
    assert found[0]["stop"] == found[1]["stop"] == 5 * ranks.N + ranks.T * ranks.N  # rank 0 stopped at its step 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("raise", ["rank 1 raised ValueError: the simulator of this rank is broken", "ValueError: the simulator"]),
        ("hang", ["rank 1 was killed, or did not finish rollout 2 before the timeout", ""]),
        ("differ", ["ranks 1 and 0 have gamma=0.5 and 0.9, learning_rate=0.002 and 0.001: expected equal values"] * 2),
    ],
)
def test_errors_name_the_rank(task: str, expected: list[str], tmp_path: Path) -> None:
    _, errors = run_ranks(task, tmp_path)
    for error, text in zip(errors, expected, strict=True):
        assert text in error


PROGRAM = """
import sys
import torch.distributed as dist
from stable_baselines3.common.callbacks import EvalCallback
from tests.sb3_ext import ranks

model = ranks.model_of("PPO", 0, 8)
rank = dist.get_rank() if dist.is_initialized() else 0
evaluation = EvalCallback(ranks.model_of("PPO", 0, 1).get_env(), eval_freq=16, verbose=0) if rank == 0 else None
model.learn(256, callback=evaluation).save(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_trains_a_script(count: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "model.zip")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=180,
    )
    model = tensor.PPO.load(tmp_path / "model.zip")
    assert model.num_timesteps == 256
    if count == 1:
        weights = model.policy.state_dict()
        expected = ranks.model_of("PPO", 0, 8).learn(256).policy.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_buffer_with_its_own_minibatches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ordered(tensor.TensorRolloutBuffer):
        def get(self, batch_size: int | None = None) -> Any:
            yield from super().get(batch_size)

    model = ranks.model_of("PPO", 0, 8, rollout_buffer_class=Ordered)
    monkeypatch.setattr(model, "_world", 2)
    with pytest.raises(InvalidArgumentError, match=r"Ordered\.get makes minibatches"):
        model._check_model()
