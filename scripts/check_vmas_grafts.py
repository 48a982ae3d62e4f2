"""The part of check_vmas.py about grafts: scenarios copied in the middle of an episode, as workers get them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vmas import make_env

from rl_ext_core.factory import _graft, streams
from rl_ext_core.factory.drivers import driver_for
from rl_ext_core.factory._fingerprint import fingerprint

STEPS = 30
ENVS = 3


def scenarios() -> Iterator[str]:
    """Find all scenarios that come with VMAS."""
    folders = importlib.import_module("vmas.scenarios").__path__  # in vmas, the name is that of a list
    for folder in ("", "/mpe", "/debug"):
        names = [module.name for module in pkgutil.iter_modules([f"{path}{folder}" for path in folders])]
        yield from (name for name in names if name not in ("mpe", "debug"))


def check_grafts(check: Callable[[bool, str], None]) -> None:
    """Check that copies of all scenarios are faithful."""
    names = sorted(set(scenarios()))
    print(f"grafts of {len(names)} scenarios: the same state, and the same steps then and after a reset")
    for name in names:
        for settings in ({}, {"continuous_actions": False}) if name == "balance" else ({},):
            different = compare(name, **settings)
            check(not different, f"{name} {settings or ''}{f': {different[:2]}' if different else ''}")
    check_streams(check)
    check_changes(check)


def compare(name: str, **settings: Any) -> list[str]:
    """Copy a scenario in the middle of an episode, and list how the copy differs."""
    env = make_env(name, num_envs=ENVS, device="cpu", seed=0, max_steps=20, **settings)
    _life(env, 5, 0)
    original, packed = fingerprint(env), _graft.dumps(env)
    # The original goes first: the random streams belong to the class.
    lives = [_life(env, STEPS, seed) for seed in (None, 3)]
    with streams.keeping():
        copy = _graft.loads(packed)
    different = [*original.opaque, *original.differences(fingerprint(copy))]
    for seed, life in zip((None, 3), lives, strict=True):
        different += life.differences(_life(copy, STEPS, seed))
    return different


def _life(env: Any, steps: int, seed: int | None) -> Any:
    driver = driver_for(env, seed=1)
    assert driver is not None
    return fingerprint([*([] if seed is None else [driver.reset(seed)]), *(driver.step() for _ in range(steps))])


def check_streams(check: Callable[[bool, str], None]) -> None:
    """Check that workers get random streams of their own, and the same ones again."""
    packed = _graft.dumps(make_env("navigation", num_envs=ENVS, device="cpu", seed=0))
    first = []
    for worker in (0, 1, 1):
        streams.seed_process(streams.sequence(0, worker))
        first.append(torch.cat(_graft.loads(packed).reset()))
    check(not torch.equal(first[0], first[1]), "copies for two workers begin in different ways")
    check(torch.equal(first[1], first[2]), "and those for the same worker alike")


def check_changes(check: Callable[[bool, str], None]) -> None:
    """Check that what was changed since the environment was made is in the copy."""
    env = make_env("transport", num_envs=ENVS, device="cpu", seed=0)
    env.world._drag, env.max_steps, env.scenario.shaping_factor = 0.5, 7, 11
    env.agents[0].state.pos[1] += 0.25
    env.agents[1]._mass = 3.0
    env.note = {"mine": [1, 2]}
    mine = _graft.loads(_graft.dumps(env))
    check(
        (mine.world._drag, mine.max_steps, mine.scenario.shaping_factor) == (0.5, 7, 11), "settings that were changed"
    )
    check(torch.equal(mine.agents[0].state.pos, env.agents[0].state.pos), "positions that were changed")
    check(mine.agents[1]._mass == 3.0 and mine.note == {"mine": [1, 2]}, "attributes that were changed, or added")
    check(mine.agents[0] is mine.world.agents[0], "agents are those of the world")
