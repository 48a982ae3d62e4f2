from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrl.collectors import MultiSyncCollector

from tests.environments import Counting, count_events
from tests.ray_scripts import run_ray_script
from tests.torchrl_ext import collector_script as script
from torchrl_ext import ParallelEnv, as_factory

pytestmark = pytest.mark.usefixtures("no_workers_left")


LIMIT_S = 800  # Only a hang takes so long.


def draws_of_env(collected: dict[str, Any]) -> Any:
    """Return the collected data, with observations only of the environment's own generator.

    Environments in one process share the other generators.
    """
    return {key: np.array(part)[..., :1].tolist() if "observation" in key else part for key, part in collected.items()}


@pytest.mark.slow
def test_collectors_in_this_process_use_seeded_copies_of_an_instance() -> None:
    env = script.make_transformed()
    collected, other = (draws_of_env(script.collect("here", env, seed=seed)) for seed in (0, 1))
    assert collected == draws_of_env(script.collect("here", env, seed=0))
    drawn = np.array([collected["observation"], other["observation"]])
    assert np.unique(drawn).size == drawn.size
    assert np.max(collected["step_count"]) == script.MAX_STEPS - 1
    assert np.max(collected[str(("next", "episode_reward"))]) == script.MAX_STEPS
    assert np.max(script.collect("here", script.make_changed(), seed=0)["observation"]) > 1
    assert env.rollout(2).shape == (2,)


# Each kind takes half a minute, and Ray takes minutes on a busy machine.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sync", "ray"])
def test_copies_in_other_processes_collect_the_same_data(kind: str) -> None:
    """Also of an id that only the script registers, which the workers do not import."""
    if kind == "ray" and find_spec("ray") is None and "CI" not in os.environ:
        pytest.skip("ray is not installed: pip install './rl-ext[ray]'")
    # In /tmp, since paths of sockets are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        command = [script.__file__, str(Path(root, "ray")), kind]
        found = json.loads(run_ray_script(command, Path(root), limit_s=LIMIT_S).splitlines()[-1])
    for name in ("changed", "transformed"):
        assert draws_of_env(found[name]) == draws_of_env(script.collect("here", script.SOURCES[name](), 0)), name
    assert found["id"] == found["again"]
    drawn = np.array([found["id"]["observation"], found["other seed"]["observation"]])
    assert np.unique(drawn).size == drawn.size


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize(
    "make", [lambda factory: partial(ParallelEnv, 2, factory), partial(ParallelEnv, 2)], ids=["made there", "pickled"]
)
def test_collector_processes_start_and_close_their_own_parallel_envs(make: Any, event_log: Any) -> None:
    source = make(as_factory(Counting(4.0)))
    before = count_events("built", in_this_process=True)
    collector = MultiSyncCollector([source] * 2, frames_per_batch=40, total_frames=80, cat_results="stack")
    try:
        first, _ = [batch.clone() for batch in collector]
    finally:
        collector.shutdown()
    assert first["observation"][..., 2].unique().tolist() == [4.0]
    drawn = first["observation"][..., 0, 1].flatten().tolist()
    assert len(set(drawn)) == 4
    assert count_events("built", in_this_process=True) == before
