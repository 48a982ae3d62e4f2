"""Copies all environments of one family, and prints a line for each: what benchmarks.factories runs.

python -m benchmarks._factories_once FAMILY
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.mutations import try_changes
from rl_ext_core.devices import resolve
from rl_ext_core.factory import _graft, streams
from rl_ext_core.factory.drivers import driver_for
from rl_ext_core.factory._fingerprint import fingerprint

Worlds = Iterator[tuple[str, Callable[[], Any]]]
STEPS = 15
CHANGES = 400


def gymnasium_worlds() -> Worlds:
    """Environments of gymnasium itself: classic control, toy text, Box2D, MuJoCo."""
    import gymnasium as gym

    newest = {
        spec.name: name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("gymnasium.envs")
    }
    yield from ((name, lambda name=name: gym.make(name)) for name in newest.values() if "functional" not in name)


def atari_worlds() -> Worlds:
    """The games of the Arcade Learning Environment."""
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    names = sorted(name for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5"))
    yield from ((name, lambda name=name: gym.make(name)) for name in names)


def suite_worlds() -> Worlds:
    """The tasks of dm_control's suite."""
    resolve("cpu", render="cpu", renderer="dm_control").apply()
    from dm_control import suite

    for pair in suite.ALL_TASKS:
        yield "-".join(pair), lambda pair=pair: suite.load(*pair, task_kwargs={"random": 0})


def composer_worlds() -> Worlds:
    """dm_control's manipulation, from features, and locomotion."""
    resolve("cpu", render="cpu", renderer="dm_control").apply()
    from dm_control import manipulation
    from dm_control.locomotion import soccer
    from dm_control.locomotion.examples import basic_cmu_2019, basic_rodent_2020

    for name in manipulation.ALL:
        if name.endswith("_features"):
            yield name, lambda name=name: manipulation.load(name, seed=0)
    for module in (basic_cmu_2019, basic_rodent_2020):
        for name in sorted(vars(module)):
            if name.startswith(("cmu_humanoid_", "rodent_")):
                yield name, lambda module=module, name=name: getattr(module, name)(np.random.RandomState(0))
    yield "soccer", lambda: soccer.load(2, random_state=0, walker_type=soccer.WalkerType.BOXHEAD)


def robosuite_worlds() -> Worlds:
    """All of robosuite, with Pandas, without cameras."""
    from rl_ext_core.devices import import_robosuite

    robosuite = import_robosuite(resolve("cpu"))
    options = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "horizon": 20}
    for name in sorted(robosuite.environments.base.REGISTERED_ENVS):
        robots = ["Panda", "Panda"] if name.startswith("TwoArm") else "Panda"
        yield name, lambda name=name, robots=robots: robosuite.make(name, robots=robots, **options)


def pettingzoo_worlds() -> Worlds:
    """PettingZoo's environments, agents in turns and all at once."""
    from pettingzoo.env_registry import registration

    for kind, registry in (("aec", registration.aec_registry), ("parallel", registration.parallel_registry)):
        for name in sorted(registry):
            if not name.startswith("atari/"):  # its emulator, and the games for it, are downloaded
                yield f"{name} {kind}", lambda kind=kind, name=name: registration.make(kind, name)


def vmas_worlds() -> Worlds:
    """VMAS's scenarios."""
    from vmas import make_env

    sys.path.insert(0, "scripts")
    names = importlib.import_module("check_vmas_grafts").scenarios()
    yield from ((name, lambda name=name: make_env(name, 3, device="cpu", seed=0)) for name in sorted(set(names)))


def meltingpot_worlds() -> Worlds:
    """Melting Pot's substrates."""
    from meltingpot import substrate

    for name in sorted(substrate.SUBSTRATES):
        roles = substrate.get_config(name).default_player_roles
        yield name, lambda name=name, roles=roles: substrate.build(name, roles=roles)


FAMILIES: dict[str, Callable[[], Worlds]] = {
    "gymnasium": gymnasium_worlds,
    "atari": atari_worlds,
    "dm_control suite": suite_worlds,
    "dm_control composer": composer_worlds,
    "robosuite": robosuite_worlds,
    "pettingzoo": pettingzoo_worlds,
    "vmas": vmas_worlds,
    "meltingpot": meltingpot_worlds,
}
# Two simulators with one seed do not do the same there: only what a copy consists of is compared.
NOT_STEPPED = ("meltingpot",)


def judged(make: Callable[[], Any], *, stepped: bool) -> dict[str, Any]:
    """Copy an environment in the middle of an episode, compare it, step both, and change its settings.

    :return: what came of it, as data for JSON
    """
    try:
        environment = make()
        _life(environment, 5, 0)
    except Exception as error:  # not installed, or broken here
        return {"verdict": "not made", "why": f"{type(error).__name__}: {error}"}
    begin = time.perf_counter()
    try:
        packed = _graft.dumps(environment)
    except _graft.Refused as refused:
        return {"verdict": "refused", "why": str(refused)}
    dumped = time.perf_counter() - begin
    original = fingerprint(environment)
    # The original goes first: some share random streams, or a renderer, with whatever else is in the process.
    lives = [_life(environment, STEPS, seed) for seed in (None, 3)] if stepped else []
    gc.collect()
    begin = time.perf_counter()
    with streams.keeping():
        copy = _graft.loads(packed)
    loaded = time.perf_counter() - begin
    different = [*original.opaque, *original.differences(fingerprint(copy))]
    alike = [life == _life(copy, STEPS, seed) for life, seed in zip(lives, (None, 3), strict=False)]
    verdict = "refused" if different else "exact" if all(alike) else "drift" if not alike[1] else "exact after reset"
    del copy
    # Where steps are not compared, the simulator is made anew by every reset, with all that was changed in it.
    reset = None if stepped else functools.partial(_life, environment, 0, 3)
    outcome = try_changes(environment, CHANGES, reset) if verdict.startswith("exact") else None
    return {
        "verdict": verdict,
        "why": ", ".join(different[:2]),
        "bytes": len(packed),
        "seconds": [dumped, loaded],
        "carried": 0 if outcome is None else outcome.carried,
        "refused": [] if outcome is None else outcome.refused,
        "silent": [] if outcome is None else outcome.silent,
    }


def _life(environment: Any, steps: int, seed: int | None) -> Any:
    random.seed(1)
    np.random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
    driver = driver_for(environment, seed=1)
    if driver is None:
        raise TypeError("how to step it is not known")
    returned = [] if seed is None else [driver.reset(seed)]
    return fingerprint([*returned, *(driver.step() for _ in range(steps))]).tokens


def main() -> None:
    """Go through one family."""
    family = sys.argv[1]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    for name, make in FAMILIES[family]():
        result = judged(make, stepped=family not in NOT_STEPPED)
        print("\n" + json.dumps({"name": name, **result}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
