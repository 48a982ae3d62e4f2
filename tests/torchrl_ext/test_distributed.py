"""TorchRL's collectors take factories, in this process and in others, as they would on other machines."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from tests.ray_scripts import output_of
from tests.torchrl_ext import collecting

SCRIPT = Path(__file__).with_name("collecting.py")
LIMIT_S = 800  # which only a hang reaches

# What one script collects, by the kind of collector: sources and seeds. Starting workers takes seconds, so each kind
# is run once. A second RPCCollector in a process hangs, whatever its environments.
RUNS = {
    "sync": ("changed:0", "transformed:0"),
    "async": ("changed:0",),
    "distributed": ("changed:0",),
    "rpc": ("changed:0",),
    "ray": ("changed:0", "transformed:0", "id:0", "id:0", "id:1"),
}

Collected = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[str, list[Collected]]:
    """Run the script for a kind of collector, see that it leaves nothing behind, and give what it prints, by run."""
    kind: str = request.param
    if kind == "ray" and find_spec("ray") is None and "CI" not in os.environ:
        pytest.skip("ray is not installed: pip install 'rl-ext[ray]'")
    # In /tmp, since the paths of sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        lines = output_of_script(kind, Path(root))
    found: dict[str, list[Collected]] = {}
    for run, result in zip(RUNS[kind], json.loads(lines[-1]), strict=True):
        found.setdefault(run, []).append(arrays(result))
    return found


def output_of_script(kind: str, root: Path) -> list[str]:
    return output_of([str(SCRIPT), str(root / "ray"), kind, *RUNS[kind]], root, limit_s=LIMIT_S).splitlines()


def arrays(result: dict[str, Any]) -> Collected:
    """Make arrays of lists, the workers in an order that does not depend on which one was the first."""
    found = {name: np.array(lists) for name, lists in result.items()}
    order = np.argsort(found["observation"][:, 0, 0])
    return {name: array[order] for name, array in found.items()}


def here(source: Any, *, seed: int) -> Collected:
    return arrays(collecting.shown(collecting.collected("single", source, seed)))


def assert_same(one: Collected, other: Collected) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def next_observations(collected: Collected, gravity: float) -> np.ndarray:
    """What CartPole answers to the observations and actions."""
    env = CartPoleEnv()
    env.gravity = gravity
    env.reset()
    answers = np.empty_like(collected["observation"])
    for index in np.ndindex(answers.shape[:2]):
        env.state = collected["observation"][index]
        answers[index] = env.step(int(collected["action"][index].argmax()))[0]
    return answers


def everywhere(*kinds: str) -> pytest.MarkDecorator:
    later = {"async": pytest.mark.exhaustive, "rpc": pytest.mark.exhaustive}
    params = [pytest.param(kind, marks=later.get(kind, pytest.mark.slow)) for kind in kinds]
    return pytest.mark.parametrize("ran", params, indirect=True)


@pytest.mark.slow
def test_collectors_in_this_process_take_copies_of_an_instance() -> None:
    env = collecting.transformed()
    collected = here(env, seed=0)
    assert_same(collected, here(env, seed=0))
    assert (collected["observation"] != here(env, seed=1)["observation"]).any(axis=-1).all()
    assert (collected["observation"][0] != collected["observation"][1]).any(axis=-1).all()
    assert collected["step_count"].max() == collecting.MAX_STEPS - 1
    assert env.rollout(2).shape == (2,)
    env.close()


def test_what_was_changed_on_the_instance_is_changed_on_the_copies() -> None:
    collected = here(collecting.changed(), seed=0)
    found = collected["next.observation"]
    np.testing.assert_allclose(found, next_observations(collected, collecting.GRAVITY), atol=1e-6)
    assert np.abs(found - next_observations(collected, 9.8)).max() > 1e-3


@everywhere(*RUNS)
def test_copies_elsewhere_collect_what_copies_here_do(ran: dict[str, list[Collected]]) -> None:
    assert_same(ran["changed:0"][0], here(collecting.changed(), seed=0))


@everywhere("sync", "ray")
def test_transforms_come_along(ran: dict[str, list[Collected]]) -> None:
    (collected,) = ran["transformed:0"]
    assert_same(collected, here(collecting.transformed(), seed=0))
    np.testing.assert_array_equal(collected["next.episode_reward"].max(axis=(1, 2)), collecting.MAX_STEPS)


@everywhere("ray")
def test_copies_of_what_only_the_script_registers_draw_differently_and_by_the_seed(
    ran: dict[str, list[Collected]],
) -> None:
    one, again = ran["id:0"]
    assert_same(one, again)
    drawn = np.concatenate([one["observation"], ran["id:1"][0]["observation"]]).reshape(-1, 4)
    assert np.unique(drawn).size == drawn.size


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("kind", ["ray", "rpc", "distributed"])
def test_a_buffer_in_a_process_of_its_own_is_filled_by_two_others(kind: str) -> None:
    """By RayReplayBuffer, with both transports, and by RemoteTensorDictReplayBuffer."""
    if kind != "rpc" and find_spec("ray") is None and "CI" not in os.environ:
        pytest.skip("ray is not installed: pip install 'rl-ext[ray]'")
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        script = str(SCRIPT.with_name("remote_buffers.py"))
        output = output_of([script, str(Path(root, "ray")), kind], Path(root), limit_s=LIMIT_S)
    assert json.loads(output.splitlines()[-1]) == 120
