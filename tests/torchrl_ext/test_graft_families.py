"""Environments of other libraries in TorchRL's wrappers, copied by a graft."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrl.envs import GymWrapper as Upstream
from torchrl.envs import RewardSum, StepCounter, TransformedEnv
from torchrl.envs.libs.dm_control import DMControlEnv, DMControlWrapper
from torchrl.envs.libs.pettingzoo import PettingZooWrapper

from rl_ext_core.factory import _graft, _streams
from tests.core.factory.driving import assert_copied
from torchrl_ext import GymWrapper


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def _zoo(name: str, kind: str = "parallel_env", **options: Any) -> Any:
    pytest.importorskip("pettingzoo")
    environment = getattr(importlib.import_module(f"pettingzoo.{name}"), kind)()
    return PettingZooWrapper(environment, **options)


def _suite(domain: str, task: str) -> Any:
    return pytest.importorskip("dm_control.suite").load(domain, task, task_kwargs={"random": 0})


def _lift() -> Any:
    pytest.importorskip("robosuite")
    from rl_ext_core.devices import import_robosuite, resolve

    robosuite = import_robosuite(resolve("cpu"))
    options = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "horizon": 12}
    from robosuite.wrappers import GymWrapper as AsGymnasium

    return AsGymnasium(robosuite.make("Lift", robots="Panda", **options))


FAMILIES: dict[str, Callable[[], Any]] = {
    "pursuit": lambda: _zoo("sisl.pursuit_v5"),
    "knights": lambda: _zoo("butterfly.knights_archers_zombies_v11"),
    "pistonball, no masks": lambda: _zoo("butterfly.pistonball_v6"),
    "connect four, with masks": lambda: _zoo("classic.connect_four_v3", "env", use_mask=True),
    "tictactoe, done anyhow": lambda: _zoo("classic.tictactoe_v3", "env", use_mask=True, done_on_any=True),
    "dm_control": lambda: DMControlWrapper(_suite("cheetah", "run")),
    "dm_control by name": lambda: DMControlEnv("humanoid", "stand", frame_skip=2),
    "dm_control, transformed": lambda: TransformedEnv(DMControlWrapper(_suite("reacher", "easy")), RewardSum()),
}
ROBOSUITE: dict[str, Callable[[], Any]] = {
    "upstream": lambda: Upstream(_lift()),
    "ours": lambda: TransformedEnv(GymWrapper(_lift()), StepCounter()),
}


@pytest.mark.sample(quick=0, ci=4)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_is_the_original_and_does_the_same(name: str) -> None:
    environment = FAMILIES[name]()
    copy = assert_copied(environment, steps=25)
    assert copy.full_action_spec == environment.full_action_spec


@pytest.mark.slow
@pytest.mark.parametrize("name", ROBOSUITE)
def test_so_is_that_of_robosuite(name: str) -> None:
    assert_copied(ROBOSUITE[name](), steps=15)


@pytest.mark.parametrize("name", ["pursuit", "dm_control"])
def test_copies_for_workers_draw_from_streams_of_their_own(name: str) -> None:
    packed = _graft.dumps(FAMILIES[name]())
    frames = []
    for worker in (0, 1, 1):
        _streams.seed_process(_streams.sequence(0, worker))
        frames.append(_graft.loads(packed).reset())
    assert (frames[1] == frames[2]).all()
    assert not (frames[0] == frames[1]).all()


def test_what_was_changed_below_the_wrapper_is_in_the_copy() -> None:
    environment = TransformedEnv(DMControlWrapper(_suite("cheetah", "run")), RewardSum())
    environment.reset()
    environment.base_env._env.physics.model.opt.timestep = 0.004
    environment.base_env._env.physics.model.body_mass[3] = 2.5
    environment.transform.note = torch.arange(3)
    copy = _graft.loads(_graft.dumps(environment))
    physics = copy.base_env._env.physics
    assert (physics.model.opt.timestep, physics.model.body_mass[3]) == (0.004, 2.5)
    assert copy.transform.note.tolist() == [0, 1, 2]
    assert copy.rollout(5)["next", "reward"].shape == (5, 1)
