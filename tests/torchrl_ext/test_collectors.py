"""Tests of TorchRL's collectors with factories, in this process and in other processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from torchrl.collectors import Collector, MultiSyncCollector

from tests.ray_scripts import run_ray_script
from tests.torchrl_ext import collector_script
from tests.torchrl_ext.parallel_checks import event_log, no_workers_left, workers_left
from tests.torchrl_ext.parallel_environments import Well, count_events
from torchrl_ext import ParallelEnv, as_factory

__all__ = ["event_log", "no_workers_left"]


SCRIPT = Path(__file__).with_name("collector_script.py")
LIMIT_S = 800  # Only a hang takes so long.

# Sources and seeds for the script, by kind of collector. Starting workers takes seconds, so each kind runs once.
RUNS = {
    "sync": ("changed:0", "transformed:0"),
    "ray": ("changed:0", "transformed:0", "id:0", "id:0", "id:1"),
}

Collected = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def script_output(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run the script for a kind of collector, and return its output by run."""
    kind: str = request.param
    if kind == "ray" and find_spec("ray") is None and "CI" not in os.environ:
        pytest.skip("ray is not installed: pip install './rl-ext[ray]'")
    # In /tmp, since paths of sockets are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        command = [str(SCRIPT), str(Path(root, "ray")), kind, *RUNS[kind]]
        results = json.loads(run_ray_script(command, Path(root), limit_s=LIMIT_S).splitlines()[-1])
    found: dict[str, Any] = {}
    for run, result in zip(RUNS[kind], results, strict=True):
        found.setdefault(run, []).append(arrays(result))
    return found


def arrays(result: dict[str, Any]) -> Collected:
    """Convert lists to arrays, with the workers in a reproducible order."""
    found = {name: np.array(lists) for name, lists in result.items()}
    order = np.argsort(found["observation"][:, 0, 0])
    return {name: array[order] for name, array in found.items()}


def collect_here(source: Any, *, seed: int) -> Collected:
    """Collect the first batches of two copies in this process."""
    return arrays(collector_script.as_lists(collector_script.collect_first_batches("single", source, seed)))


def assert_same(one: Collected, other: Collected) -> None:
    """Assert that two collections have the same names and equal arrays."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def next_observations(collected: Collected, gravity: float) -> np.ndarray:
    """Return CartPole's next observations for the collected observations and actions."""
    env = CartPoleEnv()
    env.gravity = gravity
    env.reset()
    answers = np.empty_like(collected["observation"])
    for index in np.ndindex(answers.shape[:2]):
        env.state = collected["observation"][index]
        answers[index] = env.step(int(collected["action"][index].argmax()))[0]
    return answers


def for_collectors(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with the script's output for each of these kinds of collectors."""
    # Each kind takes half a minute, and Ray takes minutes on a busy machine.
    cases = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in kinds]
    return pytest.mark.parametrize("script_output", cases, indirect=True)


@pytest.mark.slow
def test_collectors_in_this_process_use_copies_of_an_instance() -> None:
    env = collector_script.make_transformed()
    collected = collect_here(env, seed=0)
    assert_same(collected, collect_here(env, seed=0))
    assert (collected["observation"] != collect_here(env, seed=1)["observation"]).any(axis=-1).all()
    assert (collected["observation"][0] != collected["observation"][1]).any(axis=-1).all()
    assert collected["step_count"].max() == collector_script.MAX_STEPS - 1
    assert env.rollout(2).shape == (2,)
    env.close()


@pytest.mark.slow
def test_copies_keep_changed_attributes() -> None:
    collected = collect_here(collector_script.make_changed(), seed=0)
    found = collected["next.observation"]
    np.testing.assert_allclose(found, next_observations(collected, collector_script.GRAVITY), atol=1e-6)
    assert np.abs(found - next_observations(collected, 9.8)).max() > 1e-3


@for_collectors(*RUNS)
def test_copies_in_other_processes_collect_the_same_data(script_output: dict[str, list[Collected]]) -> None:
    assert_same(script_output["changed:0"][0], collect_here(collector_script.make_changed(), seed=0))


@for_collectors("sync", "ray")
def test_copies_keep_transforms(script_output: dict[str, list[Collected]]) -> None:
    (collected,) = script_output["transformed:0"]
    assert_same(collected, collect_here(collector_script.make_transformed(), seed=0))
    np.testing.assert_array_equal(collected["next.episode_reward"].max(axis=(1, 2)), collector_script.MAX_STEPS)


@for_collectors("ray")
def test_copies_of_an_id_registered_by_the_script_are_seeded_and_differ(
    script_output: dict[str, list[Collected]],
) -> None:
    one, again = script_output["id:0"]
    assert_same(one, again)
    drawn = np.concatenate([one["observation"], script_output["id:1"][0]["observation"]]).reshape(-1, 4)
    assert np.unique(drawn).size == drawn.size


class MakeParallel:
    """Picklable callable that builds a ParallelEnv."""

    def __init__(self, factory: Any) -> None:
        self.factory = factory

    def __call__(self) -> ParallelEnv:
        return ParallelEnv(2, self.factory)


def collect_all(collector: Any) -> Any:
    """Return copies of all batches, and shut the collector down."""
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def test_collector_runs_a_parallel_env_and_closes_its_workers(event_log: Any) -> None:
    first, second = collect_all(Collector(ParallelEnv(2, Well(4.0), seed=0), frames_per_batch=20, total_frames=40))
    assert first.shape == second.shape == (2, 10)
    observations = first["observation"]
    assert observations[..., 0].unique().tolist() == [4.0]
    assert observations[0, :, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert (observations[0, :, 2] != observations[1, :, 2]).all()
    assert count_events("reset", in_this_process=True) == 0
    assert not workers_left()


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("make", [MakeParallel, lambda factory: MakeParallel(factory)()], ids=["made there", "pickled"])
def test_collector_processes_start_and_close_their_own_parallel_envs(
    make: Callable[[Any], Any], event_log: Any
) -> None:
    source = make(as_factory(Well(4.0)))
    before = count_events("built", in_this_process=True)
    collector = MultiSyncCollector([source] * 2, frames_per_batch=40, total_frames=80, cat_results="stack")
    first, _ = collect_all(collector)
    assert first["observation"][..., 0].unique().tolist() == [4.0]
    drawn = first["observation"][..., 0, 2].flatten().tolist()
    assert len(set(drawn)) == 4
    assert count_events("built", in_this_process=True) == before
    assert not workers_left()
