from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import CatFrames, Compose, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs import GymEnv as UpstreamGymEnv

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from tests import programs
from tests.environments import Counting
from tests.torchrl_ext import resume_script
from tests.torchrl_ext.parallel_environments import NativeEnv
from torchrl_ext import EnvironmentState, GymEnv, GymWrapper, ParallelEnv

pytestmark = pytest.mark.usefixtures("no_workers_left")


@pytest.mark.sample(quick=1, ci=2)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_killed_runs_continue_with_the_same_weights(num_workers: int, tmp_path: Path) -> None:
    killed, other = tmp_path / "killed", tmp_path / "other"
    for folder in (killed, other):
        folder.mkdir()
    file = Path(resume_script.__file__)
    done = programs.run(file.read_text(), "torchrl", str(killed), str(num_workers), "9", file=file, cwd=programs.ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    weights = []
    for folder in (killed, other):  # this process continues the first one, and does all of the other
        resume_script.train(folder, num_workers, 0)
        weights.append(torch.load(folder / "weights.pt", weights_only=False))
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(weights[1][name])), name


def make_recorded(env: Any = None, count: int = 1) -> ParallelEnv:
    return ParallelEnv(count, Counting() if env is None else env, verify=False)


class Noise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with random numbers that no generator of the environment explains."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation + torch.rand(()).numpy(), *rest


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: UpstreamGymEnv("CartPole-v1"),
        lambda: GymWrapper(gymnasium.make_vec("CartPole-v1", 2, "sync")),
        NativeEnv,
        lambda: TransformedEnv(GymEnv("CartPole-v1")),
        lambda: ParallelEnv(2, NativeEnv, recorder=False),
        lambda: SerialEnv(2, make_recorded),
        lambda: GymWrapper(EpisodeRecorder(Counting())),
        object,
    ],
)
def test_environments_that_are_not_recorded_are_refused(make: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"expected .* Use "):
        EnvironmentState(make())


def test_environments_in_workers_that_are_not_recorded_are_refused() -> None:
    env = ParallelEnv(1, NativeEnv)
    env.reset()
    with pytest.raises(InvalidTypeError, match="the episodes of NativeEnv are not recorded"):
        EnvironmentState(env).state_dict()
    env.reset()  # the workers continue


def test_environments_that_are_not_deterministic_are_refused() -> None:
    env = make_recorded(Noise(Counting()))
    env.rollout(3)
    state = EnvironmentState(env).state_dict()
    with pytest.raises(InvalidArgumentError, match=r"environment 0 is not deterministic: .* step 1 .*load_state_dict"):
        EnvironmentState(make_recorded(Noise(Counting()))).load_state_dict(state)


def test_environments_without_a_record_are_refused() -> None:
    env = make_recorded()
    env.start()
    state = EnvironmentState(env).state_dict()
    with pytest.raises(InvalidArgumentError, match="environment 0 has no complete record of its episode"):
        EnvironmentState(make_recorded()).load_state_dict(state)


def test_other_states_are_refused() -> None:
    state = EnvironmentState(make_recorded())
    for other in ({"state": torch.zeros(7, dtype=torch.uint8)}, {}):
        with pytest.raises(CorruptFileError, match="not that of an EnvironmentState"):
            state.load_state_dict(other)


def make_transformed(*transforms: Any) -> TransformedEnv:
    return TransformedEnv(make_recorded(), Compose(*transforms))


def count_steps() -> TransformedEnv:
    return make_transformed(StepCounter())


@pytest.mark.parametrize(
    ("make", "make_other", "match"),
    [
        (make_recorded, lambda: make_recorded(count=2), r"Env\(2, .*: expected ParallelEnv\(1, "),
        (make_recorded, count_steps, r"transforms is Compose\(StepCounter\): expected empty"),
        (
            lambda: make_transformed(StepCounter(), RewardSum()),
            count_steps,
            r"expected Compose\(StepCounter, RewardSum\)",
        ),
        (lambda: make_recorded(Noise(Counting())), make_recorded, "of Counting: expected GymWrapper of Noise of "),
    ],
)
def test_states_of_environments_that_were_built_otherwise_are_refused(make: Any, make_other: Any, match: str) -> None:
    env, other = make(), make_other()
    env.rollout(3, break_when_any_done=False)
    before = other.rollout(3, break_when_any_done=False)[..., -1]
    with pytest.raises(InvalidArgumentError, match=match):
        EnvironmentState(other).load_state_dict(EnvironmentState(env).state_dict())
    assert other.step(before["next"].set("action", before["action"]))["next", "observation"][..., 0].eq(4).all()


def test_buffers_of_transforms_that_the_first_reset_creates() -> None:
    def make(n_frames: int) -> TransformedEnv:
        return make_transformed(CatFrames(n_frames, -1, in_keys=["observation"]))

    env, other = make(3), make(3)
    last = env.rollout(3)[:, -1]
    state = EnvironmentState(env).state_dict()
    EnvironmentState(other).load_state_dict(state)
    found, expected = (each.step(last.clone())["next"] for each in (other, env))
    assert (found == expected).all()
    with pytest.raises(InvalidArgumentError, match=r"cannot be loaded .*size mismatch for .*_cat_buffers_observation"):
        EnvironmentState(make(2)).load_state_dict(state)


def test_state_of_a_collector_is_refused_by_other_sources() -> None:
    collector = Collector(make_recorded(), frames_per_batch=6, auto_register_policy_transforms=False)
    state = EnvironmentState(collector).state_dict()
    with pytest.raises(InvalidArgumentError, match="the source is an environment: expected Collector"):
        EnvironmentState(make_recorded()).load_state_dict(state)
    collector.shutdown()


def test_environments_in_workers_that_were_not_reset() -> None:
    envs = [make_recorded() for _ in range(2)]
    with pytest.raises(InvalidArgumentError, match=r"ParallelEnv are closed, or were not reset: .* Call env.reset\(\)"):
        EnvironmentState(envs[0]).state_dict()
    last = envs[0].rollout(3)[:, -1]
    EnvironmentState(envs[1]).load_state_dict(EnvironmentState(envs[0]).state_dict())  # which starts the workers
    found, expected = (env.step(last.clone())["next"] for env in envs)
    assert (found == expected).all()
