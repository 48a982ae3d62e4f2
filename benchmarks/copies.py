"""Copies made by ``as_factory`` against their originals, for all installed environments.

    python -m benchmarks.copies [made settings] [--library gymnasium ...] [--out results.json] [--list]

``made`` copies each environment with its default options, after 10 to 60 steps. The copy is built in another process.
It must have the same classes and spaces. After ``reset(seed=...)`` it must return the same observations, rewards and
flags for 20 steps, bit for bit.

``settings`` changes one setting at a time. The copy must have the new setting, or be refused with the setting's name.
A setting that is missing silently is *lost*.

Environments whose instances differ by themselves are compared by their classes and spaces only. Results are stored in
``--out``, from which a second run continues.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import pkgutil
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import machine
from rl_ext_core.devices import resolve
from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from rl_ext_core.factory.drivers import driver_for

NamedMakers = Iterator[tuple[str, Callable[[], Any]]]
ROOT = Path(__file__).resolve().parent.parent
# Interpreters of libraries that conflict with the project's own virtual environment.
OTHER_PYTHONS = {"vmas": ROOT / ".venv-vmas/bin/python", "meltingpot": ROOT / ".venv-meltingpot/bin/python"}
STEPS, SEED = 20, 3
EXPECTED_VERDICTS = ("copied", "not repeatable")
# Attributes in which layers of environments store the next layer.
INNER_NAMES = ("env", "_env", "aec_env", "par_env", "base_env", "_environment")


def gymnasium_envs() -> NamedMakers:
    """Yield gymnasium's own environments; the newest versions also with a renderer."""
    import gymnasium as gym

    resolve("cpu", render="cpu", renderer="gymnasium").apply()
    own = {name: spec for name, spec in gym.registry.items() if str(spec.entry_point).startswith("gymnasium.envs")}
    newest = {spec.name: name for name, spec in own.items()}
    for name in own:
        yield name, functools.partial(gym.make, name)
        if name in newest.values() and "phys2d" not in name and "tabular" not in name:
            yield f"{name} rgb_array", functools.partial(gym.make, name, render_mode="rgb_array")


def ale_envs() -> NamedMakers:
    """Yield the games of the Arcade Learning Environment, and some with the usual wrappers."""
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    names = sorted(name for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5"))
    for number, name in enumerate(names):
        yield name, functools.partial(gym.make, name)
        if number % 20 == 0:
            yield f"{name} rgb_array", functools.partial(gym.make, name, render_mode="rgb_array")
            yield f"{name} preprocessed", functools.partial(preprocessed, name)


def preprocessed(name: str) -> Any:
    """Make a game with the usual wrappers."""
    import gymnasium as gym

    wrapped = gym.wrappers.AtariPreprocessing(gym.make(name, frameskip=1))
    return gym.wrappers.FrameStackObservation(gym.wrappers.RecordEpisodeStatistics(wrapped), 4)


def dm_control_envs() -> NamedMakers:
    """Yield the tasks of dm_control's suite, and its manipulation tasks with features."""
    resolve("cpu", render="cpu", renderer="dm_control").apply()
    from dm_control import manipulation, suite

    for domain, task in suite.ALL_TASKS:
        yield f"{domain}-{task}", functools.partial(suite.load, domain, task, task_kwargs={"random": 0})
    for name in manipulation.ALL:
        if name.endswith("_features"):
            yield name, functools.partial(manipulation.load, name, seed=0)


def robosuite_envs() -> NamedMakers:
    """Yield robosuite's environments with Panda robots, and two with cameras."""
    resolve("cpu", render="cpu", renderer="robosuite").apply()
    robosuite = importlib.import_module("robosuite")
    options: dict[str, Any] = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False}
    for name in sorted(robosuite.environments.base.REGISTERED_ENVS):
        robots = ["Panda", "Panda"] if name.startswith("TwoArm") else "Panda"
        yield name, functools.partial(robosuite.make, name, robots=robots, **options)
    cameras = {"has_renderer": False, "has_offscreen_renderer": True, "use_camera_obs": True}
    for name in ("Lift", "Door"):
        sizes = {"camera_heights": 32, "camera_widths": 32}
        yield f"{name} cameras", functools.partial(robosuite.make, name, robots="Panda", **cameras, **sizes)


def pettingzoo_envs() -> NamedMakers:
    """Yield PettingZoo's AEC and parallel environments."""
    from pettingzoo.env_registry import registration

    for kind, registry in (("aec", registration.aec_registry), ("parallel", registration.parallel_registry)):
        for name in sorted(registry):
            if not name.startswith("atari/"):  # its emulator, and the games for it, are downloaded
                yield f"{name} {kind}", functools.partial(registration.make, kind, name)


def vmas_envs() -> NamedMakers:
    """Yield VMAS's scenarios."""
    from vmas import make_env

    folders = importlib.import_module("vmas.scenarios").__path__  # the attribute vmas.scenarios is a list
    for folder in ("", "/mpe", "/debug"):
        for module in pkgutil.iter_modules([f"{path}{folder}" for path in folders]):
            if not module.ispkg:
                yield module.name, functools.partial(make_env, module.name, 3, device="cpu", seed=0)


def meltingpot_envs() -> NamedMakers:
    """Yield Melting Pot's substrates."""
    from meltingpot import substrate

    for name in sorted(substrate.SUBSTRATES):
        roles = substrate.get_config(name).default_player_roles
        yield name, functools.partial(substrate.build, name, roles=roles)


def torchrl_envs() -> NamedMakers:
    """Yield nothing, since TorchRL wraps the other libraries' environments."""
    importlib.import_module("torchrl_ext")
    yield from ()


LIBRARIES: dict[str, Callable[[], NamedMakers]] = {
    "gymnasium": gymnasium_envs,
    "ale_py": ale_envs,
    "dm_control": dm_control_envs,
    "robosuite": robosuite_envs,
    "pettingzoo": pettingzoo_envs,
    "torchrl": torchrl_envs,
    "vmas": vmas_envs,
    "meltingpot": meltingpot_envs,
}


def curriculum(env: Any) -> Any:
    """Wrap an environment in a class that only this script defines."""
    import gymnasium as gym

    class Curriculum(gym.Wrapper[Any, Any, Any, Any]):
        """Wrapper whose level rises at each reset, and multiplies all rewards."""

        level = 1

        def reset(self, **options: Any) -> Any:
            self.level += 1
            return self.env.reset(**options)

        def step(self, action: Any) -> Any:
            observation, reward, *rest = self.env.step(action)
            return observation, float(reward) * self.level, *rest

    return Curriculum(env)


def lift(**options: Any) -> Any:
    """Make robosuite's Lift task without rendering."""
    import robosuite

    settings = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "horizon": 40}
    return robosuite.make("Lift", **{"robots": "Panda", **settings, **options})


WALKER = "suite.load('walker', 'walk', task_kwargs={'random': 0})"
SPREAD = "registration.make('parallel', 'sisl/multiwalker-v9')"
PISTON = "registration.make('parallel', 'butterfly/pistonball-v6')"
KNIGHTS = "registration.make('parallel', 'butterfly/knights_archers_zombies-v11')"
# For each library: an expression that makes the environment, a statement that changes it, and an expression that reads
# the setting. "use" stands for a setting that changes through resets and steps alone.
SETTINGS: dict[str, list[tuple[str, str, str]]] = {
    "gymnasium": [
        ("gym.make('CartPole-v1')", "env.unwrapped.gravity = 5.0", "env.unwrapped.gravity"),
        ("gym.make('Pendulum-v1')", "env.unwrapped.max_torque = 9.0", "env.unwrapped.max_torque"),
        ("gym.make('Pendulum-v1')", "env.unwrapped.note = {'mine': [1, 2.5]}", "vars(env.unwrapped).get('note')"),
        ("gym.make('Acrobot-v1')", "env.unwrapped.book_or_nips = 'nips'", "env.unwrapped.book_or_nips"),
        ("gym.make('Taxi-v4')", "env.unwrapped.initial_state_distrib[:] = np.eye(500)[7]",
         "env.unwrapped.initial_state_distrib"),
        ("gym.make('FrozenLake-v1')", "env.unwrapped.P[0][1] = [(1.0, 1, 5.0, False)]", "env.unwrapped.P[0][1]"),
        ("gym.make('Ant-v5')", "env.unwrapped.model.body_mass[1] *= 2", "env.unwrapped.model.body_mass"),
        ("gym.make('Hopper-v5')", "env.unwrapped.model.opt.timestep = 0.004", "env.unwrapped.model.opt.timestep"),
        ("gym.make('Hopper-v5')", "env.unwrapped.model.opt.gravity[2] = -3", "env.unwrapped.model.opt.gravity"),
        ("gym.make('Walker2d-v5')", "env.unwrapped.model.geom_friction[:] = 0.3", "env.unwrapped.model.geom_friction"),
        ("gym.make('HalfCheetah-v5')", "env.unwrapped._ctrl_cost_weight = 9.0", "env.unwrapped._ctrl_cost_weight"),
        ("gym.make('HalfCheetah-v5')", "env.unwrapped.init_qpos[2] += 0.1", "env.unwrapped.init_qpos"),
        ("gym.make('Swimmer-v5')", "env.unwrapped.frame_skip = 2", "env.unwrapped.frame_skip"),
        ("gym.make('CartPole-v1')", "env._max_episode_steps = 7", "env._max_episode_steps"),
        ("gym.wrappers.ClipAction(gym.make('Pendulum-v1'))", "env.action_space = gym.spaces.Box(-1, 1, (1,))",
         "repr(env.action_space)"),
        ("gym.wrappers.TransformReward(gym.make('CartPole-v1'), lambda r: r * 2)", "env.func = lambda r: r * 3",
         "env.func(1.0)"),
        ("gym.wrappers.TransformObservation(gym.make('CartPole-v1'), np.sin, None)", "env.func = np.abs",
         "env.func(-2.0)"),
        ("gym.wrappers.TimeAwareObservation(gym.make('CartPole-v1'))", "env.env = gym.wrappers.DelayObservation("
         "gym.make('CartPole-v1'), 2)", "type(env.env).__name__"),
        ("gym.make('LunarLander-v3')", "env.unwrapped.wind_power = 3.0; env.unwrapped.enable_wind = True",
         "env.unwrapped.wind_power"),
        ("gym.make('LunarLander-v3')", "env.unwrapped.gravity = -3.0", "env.unwrapped.gravity"),
        ("gym.make('BipedalWalker-v3')", "env.unwrapped.world.gravity = (0, -3)", "tuple(env.unwrapped.world.gravity)"),
        ("gym.make('BipedalWalker-v3')", "env.unwrapped.fd_edge.friction = 0.1", "env.unwrapped.fd_edge.friction"),
        ("gym.wrappers.NormalizeObservation(gym.make('CartPole-v1'))", "use", "env.obs_rms.mean"),
        ("gym.wrappers.NormalizeReward(gym.make('CartPole-v1'))", "env.return_rms.var = np.float64(7)",
         "env.return_rms.var"),
        ("gym.wrappers.RecordEpisodeStatistics(gym.make('CartPole-v1'))", "use", "env.episode_count"),
        ("gym.wrappers.RecordEpisodeStatistics(gym.make('CartPole-v1'))", "use", "list(env.length_queue)"),
        ("curriculum(gym.make('CartPole-v1'))", "env.level = 50", "env.level > 40"),
        ("curriculum(gym.make('CartPole-v1'))", "use", "env.level"),
    ],
    "ale_py": [
        ("gym.make('ALE/Pong-v5', frameskip=2, repeat_action_probability=0.5)", "",
         "env.unwrapped._frameskip, env.unwrapped.ale.getFloat('repeat_action_probability')"),
        ("gym.make('ALE/Pong-v5', mode=1, difficulty=1)", "", "env.unwrapped._game_mode"),
        ("gym.make('ALE/Pong-v5')", "env.unwrapped.ale.setFloat('repeat_action_probability', 0.9)",
         "env.unwrapped.ale.getFloat('repeat_action_probability')"),
        ("gym.make('ALE/Pong-v5')", "env.unwrapped.ale.setInt('max_num_frames_per_episode', 40)",
         "env.unwrapped.ale.getInt('max_num_frames_per_episode')"),
        ("gym.make('ALE/Breakout-v5')", "env.unwrapped._frameskip = 7", "env.unwrapped._frameskip"),
        ("preprocessed('ALE/Breakout-v5')", "env.env.env.noop_max = 3", "env.env.env.noop_max"),
        ("preprocessed('ALE/Breakout-v5')", "use", "env.env.episode_count"),
    ],
    "dm_control": [
        (WALKER, "env.physics.model.opt.timestep = 0.001", "env.physics.model.opt.timestep"),
        (WALKER, "env.task._move_speed = 5.0", "env.task._move_speed"),
        (WALKER, "env.physics.model.body_mass[1] *= 2", "env.physics.model.body_mass"),
        (WALKER, "env.physics.named.model.geom_friction['floor'] = 0.1", "env.physics.model.geom_friction"),
        (WALKER, "env._step_limit = 7", "env._step_limit"),
        (WALKER, "env._n_sub_steps = 3", "env._n_sub_steps"),
        ("suite.load('reacher', 'easy', task_kwargs={'random': 0})", "env.task._target_size = 0.11",
         "env.task._target_size"),
        ("suite.load('cheetah', 'run', task_kwargs={'random': 0})", "env.task.mine = [1, 2]",
         "vars(env.task).get('mine')"),
        ("suite.load('hopper', 'hop', task_kwargs={'random': 0})", "env.task._visualize_reward = True",
         "env.task._visualize_reward"),
    ],
    "robosuite": [
        ("lift()", "env.control_freq = 10; env.control_timestep = 0.1", "env.control_freq"),
        ("lift()", "env.horizon = 7", "env.horizon"),
        ("lift()", "env.reward_scale = 3.0", "env.reward_scale"),
        ("lift()", "env.reward_shaping = True", "env.reward_shaping"),
        ("lift()", "env.table_friction = (0.2, 0.005, 0.0001)", "env.table_friction"),
        ("lift()", "env.robots[0].init_qpos[0] += 0.1", "env.robots[0].init_qpos"),
        ("lift()", "env.sim.model.body_mass[-1] *= 2", "env.sim.model.body_mass"),
        ("lift(hard_reset=False)", "env.sim.model.body_mass[-1] *= 2", "env.sim.model.body_mass"),
        ("lift(hard_reset=False)", "env.sim.model.opt.gravity[2] = -3", "env.sim.model.opt.gravity"),
        ("lift(control_freq=10, horizon=9, reward_scale=2.0)", "", "env.control_freq, env.horizon, env.reward_scale"),
        ("GymWrapper(lift())", "env.keys = ['object-state']", "env.keys"),
    ],
    "pettingzoo": [
        ("registration.make('parallel', 'butterfly/pistonball-v6', n_pistons=5, max_cycles=9)", "",
         "env.unwrapped.n_pistons, env.unwrapped.max_cycles"),
        (PISTON, "env.unwrapped.max_cycles = 9", "env.unwrapped.max_cycles"),
        (PISTON, "env.unwrapped.time_penalty = -0.7", "env.unwrapped.time_penalty"),
        (KNIGHTS, "env.unwrapped.max_zombies = 2", "env.unwrapped.max_zombies"),
        (KNIGHTS, "env.unwrapped.max_arrows = 3", "env.unwrapped.max_arrows"),
        (SPREAD, "env.unwrapped.env.forward_reward = 9.0", "env.unwrapped.env.forward_reward"),
        (SPREAD, "env.unwrapped.env.max_cycles = 9", "env.unwrapped.env.max_cycles"),
        ("registration.make('aec', 'sisl/pursuit-v5')", "env.unwrapped.env.urgency_reward = -0.9",
         "env.unwrapped.env.urgency_reward"),
        ("registration.make('aec', 'classic/connect_four-v3')", "env.unwrapped.mine = np.arange(3)",
         "vars(env.unwrapped).get('mine')"),
    ],
    "torchrl": [
        ("GymEnv('Pendulum-v1', frame_skip=2)", "", "env.frame_skip"),
        ("GymEnv('Pendulum-v1', frame_skip=2)", "env.frame_skip = 3", "env.frame_skip"),
        ("GymEnv('Pendulum-v1')", "env._env.unwrapped.max_torque = 9.0", "env._env.unwrapped.max_torque"),
        ("GymEnv('Ant-v5')", "env._env.unwrapped.model.body_mass[1] *= 2", "env._env.unwrapped.model.body_mass"),
        ("TransformedEnv(GymEnv('Pendulum-v1'), RewardScaling(0.0, 2.0))", "env.transform.scale.fill_(7.0)",
         "env.transform.scale"),
        ("TransformedEnv(GymEnv('Pendulum-v1'), StepCounter(50))", "env.transform.max_steps = 7",
         "env.transform.max_steps"),
        ("TransformedEnv(GymEnv('Pendulum-v1'))", "env.append_transform(StepCounter(3))", "str(env.transform)"),
        ("TransformedEnv(GymEnv('Pendulum-v1'), ObservationNorm(0.0, 1.0, in_keys=['observation']))",
         "env.transform.loc = torch.tensor(3.0)", "env.transform.loc"),
        ("TransformedEnv(GymEnv('Pendulum-v1'), VecNorm(in_keys=['observation']))", "use",
         "env.transform._td.get('observation_sum')"),
        ("TransformedEnv(GymEnv('Pendulum-v1'), CatFrames(3, -1, in_keys=['observation']))", "env.transform.N = 2",
         "env.transform.N"),
        ("TransformedEnv(GymEnv('CartPole-v1'), RewardSum())", "env.mine = {'a': torch.ones(2)}",
         "vars(env).get('mine')"),
    ],
    "vmas": [
        ("make_env('transport', 3, device='cpu', seed=0)", f"env.{change}", f"env.{read}")
        for change, read in (
            ("world._drag = 0.5", "world._drag"), ("max_steps = 7", "max_steps"), ("agents[1]._mass = 3.0",
            "agents[1]._mass"), ("scenario.shaping_factor = 11", "scenario.shaping_factor"),
        )
    ],
}  # fmt: skip


def names_for_eval(library: str) -> dict[str, Any]:
    """Return the names that the expressions in ``SETTINGS`` use."""
    names: dict[str, Any] = {"np": np, "curriculum": curriculum, "lift": lift, "preprocessed": preprocessed}
    wanted = {
        "gymnasium": ["gymnasium"], "ale_py": ["gymnasium"], "dm_control": ["dm_control.suite"],
        "robosuite": ["robosuite.wrappers"], "pettingzoo": ["pettingzoo.env_registry.registration"],
        "torchrl": ["torch", "torchrl.envs"], "vmas": ["vmas"],
    }  # fmt: skip
    for name in wanted.get(library, ()):
        module = importlib.import_module(name)
        names |= {**vars(module), name.rpartition(".")[2]: module}
    return {**names, "gym": names.get("gymnasium")}


def digest(value: Any) -> str:
    """Return a hash of nested plain data, equal only for equal bits, shapes and dtypes."""
    if isinstance(value, Mapping):
        parts = [f"{key}={digest(part)}" for key, part in sorted(value.items(), key=str)]
    elif isinstance(value, (list, tuple)):
        parts = [digest(part) for part in value]
    elif hasattr(value, "detach"):
        parts = [str(value.dtype), digest(value.detach().cpu().numpy())]
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        parts = [value.dtype.str, str(value.shape), hashlib.sha1(np.ascontiguousarray(value).tobytes()).hexdigest()]
    else:
        parts = [type(value).__name__, repr(value)]
    return hashlib.sha1("|".join(parts).encode()).hexdigest()[:12]


def use(env: Any, steps: int, seed: int | None) -> list[str]:
    """Reset an environment with a seed, step it, and return a hash of each result."""
    random.seed(1)
    np.random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
    driver = driver_for(env, seed=1)
    if driver is None:
        raise TypeError("no driver for this interface")
    seen = [digest(driver.reset(seed)), *(digest(driver.step()) for _ in range(steps))]
    if "rgb_array" in (getattr(env, "render_mode", None), getattr(env, "rgb_array", None)):
        seen.append(digest(env.render()))
    return seen


def describe_layers(env: Any) -> list[str]:
    """Return the classes of an environment's layers, and its spaces, as texts."""
    found, layer, seen = [], env, set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        found.append(f"{type(layer).__module__}.{type(layer).__qualname__}".replace("__mp_main__", "__main__"))
        layer = next((vars(layer)[name] for name in INNER_NAMES if name in getattr(layer, "__dict__", {})), None)
    for name in ("observation_space", "action_space", "observation_spec", "action_spec"):
        space = getattr(env, name, None)
        if callable(space) and hasattr(env, "possible_agents"):
            found += [f"{agent}: {space(agent)}" for agent in env.possible_agents]
        else:
            space = space() if callable(space) and not hasattr(space, "rand") else space
            if "robosuite" in type(env).__module__ and isinstance(space, Mapping):  # an example observation
                space = {key: (np.shape(part), np.asarray(part).dtype) for key, part in space.items()}
            found.append(sorted_repr(space))
    return [re.sub(r"0x[0-9a-f]+", "0x", text) for text in found]


def sorted_repr(space: Any) -> str:
    """Return a space as text with sorted keys, since the order of sets varies by process."""
    if isinstance(space, Mapping):
        return str(sorted((str(key), sorted_repr(part)) for key, part in space.items()))
    return str([sorted_repr(part) for part in space]) if isinstance(space, (list, tuple)) else repr(space)


def run_copy(packed: bytes, library: str, read: str) -> dict[str, Any]:
    """Build and use a copy in this process, and return its results for comparison."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = names_for_eval(library) if read else {}
    begin = time.perf_counter()
    copy = pickle.loads(packed)()
    built = time.perf_counter() - begin
    values = []
    if read:
        values.append(digest(eval(read, names, {"env": copy})))
    steps = use(copy, STEPS, SEED)
    if read:
        values.append(digest(eval(read, names, {"env": copy})))
    shape = describe_layers(copy)
    close(copy)
    return {"shape": shape, "values": values, "steps": steps, "seconds": built}


def close(env: Any) -> None:
    """Close an environment to free its simulator's memory, and ignore errors."""
    with contextlib.suppress(Exception):
        env.close()


class Copier:
    """Process that builds copies, and is restarted if a copy kills it."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in that process.

        :raises Exception: If the function raises there.
        """
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(function, *arguments).result()
        except concurrent.futures.process.BrokenProcessPool:
            self._pool = None
            raise


class WarningCollector(logging.Handler):
    """Log handler that collects the package's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("rl_ext_core").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record's text."""
        self.texts.append(record.getMessage())


def make_used_env(make: Callable[[], Any], name: str, change: str, names: Mapping[str, Any]) -> Any:
    """Make an environment, step it, and change the setting."""
    env = make()
    use(env, 60 if change == "use" else 10 + zlib.crc32(name.encode()) % 51, 0)
    exec("" if change == "use" else change, dict(names), {"env": env})
    return env


def steps_of_fresh_env(*arguments: Any) -> list[str]:
    """Make and change a new environment, and return hashes of its steps after a seeded reset."""
    env = make_used_env(*arguments)
    steps = use(env, STEPS, SEED)
    close(env)
    return steps


def check_copy(
    library: str,
    make: Callable[[], Any],
    copier: Copier,
    collector: WarningCollector,
    *,
    name: str,
    change: str = "",
    read: str = "",
) -> dict[str, Any]:
    """Use, change and copy an environment, and compare both after a seeded reset."""
    names = names_for_eval(library) if read else {}

    def digest_setting(env: Any) -> list[str]:
        """Return the digest of the setting in a list; an empty list if none is read."""
        return [digest(eval(read, names, {"env": env}))] if read else []

    try:
        env = make_used_env(make, name, change, names)
        if change and change != "use" and digest_setting(env) == digest_setting(make()):
            raise ValueError(f"{change} does not change {read}")
    except Exception as error:  # not installed, or not usable on this machine
        return {"verdict": "not made", "why": f"{type(error).__name__}: {error}"[:300]}
    collector.texts.clear()
    begin = time.perf_counter()
    try:
        packed = pickle.dumps(as_factory(env))
    except NotCopyableError as error:
        return judge_refusal(str(error), read)
    except Exception as error:
        return {"verdict": "wrong", "why": f"as_factory raises {type(error).__name__}: {error}"[:600]}
    result: dict[str, Any] = {
        "seconds": [time.perf_counter() - begin],
        "warned": [text[:300] for text in collector.texts],
    }
    values = digest_setting(env)
    steps = use(env, STEPS, SEED)
    values, shape = [*values, *digest_setting(env)], describe_layers(env)
    close(env)
    try:
        copy = copier(run_copy, packed, library, read)
    except Exception as error:
        return {**result, "verdict": "wrong", "why": f"the copy raises {type(error).__name__}: {error}"[:600]}
    result["seconds"].append(copy["seconds"])
    if read and copy["values"][1] != values[1]:
        named = any(last_attribute(read) in text for text in collector.texts)
        return {**result, "verdict": "warned" if named else "lost", "why": f"{read} differs after a reset"}
    if copy["shape"] != shape:
        pair = next(
            (pair for pair in zip(shape, copy["shape"], strict=False) if pair[0] != pair[1]), ("layers", "layers")
        )
        return {**result, "verdict": "wrong", "why": f"{pair[1]} instead of {pair[0]}"[:600]}
    if copy["steps"] != steps:
        at = next(i for i, pair in enumerate(zip(copy["steps"], steps, strict=True)) if pair[0] != pair[1])
        lives = [steps_of_fresh_env(make, name, change, names) for _ in range(2)]
        if not read:  # sets of strings are ordered differently in another process
            lives.append(copier(steps_of_fresh_env, make, name, change, names))
        if not change and copy["steps"] == use(make(), STEPS, SEED):
            # A camera's center may depend on when the camera was first used.
            return {**result, "verdict": "copied", "why": f"as one just made, from step {at} on"}
        if all(other == steps for other in lives):
            return {**result, "verdict": "wrong", "why": f"other steps from step {at} on"}
        return {**result, "verdict": "not repeatable", "why": f"from step {at} on"}
    if read and copy["values"][0] != values[0]:
        return {**result, "verdict": "copied", "why": "after a reset"}
    return {**result, "verdict": "copied", "why": ""}


def judge_refusal(message: str, read: str) -> dict[str, Any]:
    """Check that an error about copying suggests a line of code and names the setting."""
    line = "lambda" in message or "as_factory(" in message
    named = not read or last_attribute(read) in message
    missing = [text for text, found in (("no line to write", line), ("setting not named", named)) if not found]
    return {"verdict": "refused", "why": "; ".join([*missing, message[:900]]), "complete": not missing}


def last_attribute(read: str) -> str:
    """Return the name of the last attribute or key that an expression reads."""
    quoted = re.search(r"'(\w+)'", read)
    return quoted[1] if quoted else re.findall(r"\.(\w+)", re.sub(r"\.__name__| .*|,.*|\(-?\d.*", "", read))[-1]


def check_library(kind: str, library: str, done: set[str]) -> None:
    """Check one library in this process, printing JSON before and after each environment."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.chdir(tempfile.mkdtemp(prefix="copies-"))
    logging.getLogger().addHandler(logging.NullHandler())
    copier, collector = Copier(), WarningCollector()
    named_makers: Any = LIBRARIES[library]()
    if kind == "settings":
        next(iter(named_makers), None)  # imports the library after its renderer is selected
        names, cases = names_for_eval(library), collections.Counter[str]()
        named_makers = []
        for make, change, read in SETTINGS.get(library, ()):
            name = f"{make}: {change or 'as constructed'}: {read}"
            named_makers.append((name, functools.partial(eval, make, names), {"change": change, "read": read}))
            cases[name] += 1
    for name, make, *settings in named_makers:
        if name not in done:
            print(json.dumps({"name": name}), flush=True)
            result = check_copy(library, make, copier, collector, name=name, **(settings[0] if settings else {}))
            print("\n" + json.dumps({"name": name, **result}), flush=True)
    print(json.dumps({"name": ""}), flush=True)
    os._exit(0)  # skips the slow teardown of many renderers and emulators


def run(kind: str, library: str, found: dict[str, Any], keep: Callable[[], None], limit: float) -> None:
    """Check one library in child processes; start a new one if an environment ends it."""
    python = str(OTHER_PYTHONS.get(library, Path(sys.executable)))
    while True:
        command = [python, "-m", "benchmarks.copies", "--child", kind, library]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(list(found)).encode())
        process.stdin.close()
        current, why = _follow(process, found, keep, limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if current == "":
            return
        name = current if current is not None else "the process"
        found[name] = {"verdict": "wrong", "why": why}
        keep()
        if current is None:
            return


def _follow(
    process: subprocess.Popen[bytes], found: dict[str, Any], keep: Callable[[], None], limit: float
) -> tuple[str | None, str]:
    """Read a child's output, and return the environment at which it stopped, and why.

    The name is ``""`` if the child finished, and None if it ended before the first environment.
    """
    assert process.stdout is not None
    current: str | None = None
    rest = b""
    while True:
        if not select.select([process.stdout], [], [], limit)[0]:
            return current, f"no result in {limit:g} s"
        read = os.read(process.stdout.fileno(), 1 << 16)
        if not read:
            return current, f"the process ended with {process.wait()}"
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            if line.startswith(b'{"name"'):
                entry = json.loads(line)
                current = entry.pop("name")
                if entry:
                    found[str(current)] = entry
                    keep()
                elif current == "":
                    return current, ""


def print_counts(kind: str, results: Mapping[str, Mapping[str, Any]], *, listed: bool) -> int:
    """Print each library's counts and unexpected verdicts; return how many are bad."""
    verdicts = ("copied", "not repeatable", "refused", "warned", "lost", "wrong", "not made")
    print(
        f"\n{kind}\n{'library':14}"
        + "".join(f"{verdict:>15}" for verdict in verdicts)
        + f"{'as_factory':>12}{'build':>8}"
    )
    bad = 0
    for library, found in results.items():
        counts = collections.Counter(result["verdict"] for result in found.values())
        taken = [result["seconds"] for result in found.values() if len(result.get("seconds", ())) == 2]
        shown = "".join(
            f"{median(pair[part] for pair in taken):>{width}.2f}" for part, width in ((0, 10), (1, 6)) if taken
        )
        print(f"{library:14}" + "".join(f"{counts[verdict] or '':>15}" for verdict in verdicts) + f"  {shown} s")
        incomplete = sum(not result.get("complete", True) for result in found.values())
        bad += counts["wrong"] + counts["lost"] + incomplete
        for name, result in found.items():
            usual = result["verdict"] in EXPECTED_VERDICTS or (kind == "settings" and result["verdict"] == "refused")
            if listed and (not usual or not result.get("complete", True)):
                print(f"    {name}: {result['verdict']}: {result['why'][:400]}")
    return bad


def main() -> None:
    """Check the chosen libraries, and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=main.__doc__)
    parser.add_argument("kinds", nargs="*", metavar="made|settings", help="kinds of check; both by default")
    parser.add_argument("--library", action="append", choices=list(LIBRARIES), help="all by default")
    parser.add_argument("--out", type=Path, help="JSON file of results, from which a later run continues")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each environment")
    parser.add_argument("--list", action="store_true", help="list environments that are refused, lost or wrong")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return check_library(*chosen.child, set(json.load(sys.stdin)))
    results: dict[str, dict[str, dict[str, Any]]] = {}
    if chosen.out and chosen.out.exists():
        results = json.loads(chosen.out.read_text())
    print(machine())

    def save_results() -> None:
        """Write the results atomically to the chosen file, if one was chosen."""
        if chosen.out:
            partial = chosen.out.with_suffix(".partial")
            partial.write_text(json.dumps(results, indent=1))
            partial.replace(chosen.out)

    bad = 0
    for kind in chosen.kinds or ("made", "settings"):
        for library in chosen.library or LIBRARIES:
            if not OTHER_PYTHONS.get(library, Path(sys.executable)).exists():
                print(f"{library}: skipped, because {OTHER_PYTHONS[library].parent.parent.name} is not installed here")
                continue
            run(kind, library, results.setdefault(kind, {}).setdefault(library, {}), save_results, chosen.limit)
        bad += print_counts(kind, results.get(kind, {}), listed=chosen.list)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
