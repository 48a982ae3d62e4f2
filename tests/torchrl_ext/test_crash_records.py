from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchrl.envs import Compose, RewardSum, Transform, TransformedEnv

from rl_ext_core.cli import main
from rl_ext_core.errors import WorkerError
from rl_ext_core.recording.capsule import read_capsule
from tests.environments import Counting, Failing
from torchrl_ext import GymWrapper, ParallelEnv

pytestmark = pytest.mark.usefixtures("no_workers_left")


def make_failing(when: str = "", how: str = "raise") -> Any:
    return TransformedEnv(GymWrapper(Failing(when, how), categorical_action_encoding=True), RewardSum())


class FailingTransform(Transform):
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        if next_tensordict["observation"][0] == 3:
            raise ValueError("the transform fails")
        return next_tensordict


def crash(env: ParallelEnv) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        env.rollout(400, break_when_any_done=False)
    env.close()
    return caught.value


def test_failures_are_recorded_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/core/test_replay.py repeats failures of other kinds."""
    env = ParallelEnv(2, make_failing, seed=3, overrides=[{}, {"when": "step", "how": "SIGSEGV"}], recorder=tmp_path)
    error = crash(env)
    (path,) = tmp_path.glob("crash-*-1.rlx")
    assert str(error).endswith(f"The episode is recorded. To repeat the failure, run: rl-ext replay {path}")
    capsule = read_capsule(path)
    assert (capsule.environment, capsule.step, capsule.failure.phase) == (1, 3, "step")
    assert main(["replay", str(path), "--yes"]) == 0
    assert "reproduced at step 3: SIGSEGV in string_at" in capsys.readouterr().out


@pytest.mark.slow
def test_arguments_for_the_environment_are_part_of_the_record(tmp_path: Path) -> None:
    arguments = [{"when": "reset"}, {}]
    env = ParallelEnv(2, make_failing, create_env_kwargs=arguments, recorder=tmp_path, verify=False)
    crash(env)
    (path,) = tmp_path.glob("crash-*-0.rlx")
    assert read_capsule(path).failure.phase == "reset"
    assert main(["replay", str(path), "--yes"]) == 0


def test_failures_of_transforms_are_recorded_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = ParallelEnv(1, lambda: TransformedEnv(GymWrapper(Counting()), Compose(FailingTransform())), recorder=tmp_path)
    error = crash(env)
    assert "the transform fails" in str(error)
    (path,) = tmp_path.iterdir()
    assert main(["replay", str(path), "--yes"]) == 0
    assert "reproduced at step 3: ValueError in _step" in capsys.readouterr().out
    assert main(["replay", str(path), "--yes", "--actions", str(tmp_path / "episode.npz")]) == 2
    assert "the actions are bytes of TensorDicts" in capsys.readouterr().err
