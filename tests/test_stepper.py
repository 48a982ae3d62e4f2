"""Tests of GymVecEnv and GymWrapper with vectorized environments of many libraries.

Both wrappers must return the same results as one single environment per row, with the same seeds and actions. The
results are observations, rewards, flags, last observations, and infos of steps and resets. :data:`TABLE` lists the
environments, their modes, and their single environments.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, default_info_dict_reader

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import GymVecEnv
from tests.jax_venv import ROOT, run_in_jax_venv
from tests.torchrl_ext.environments import IsaacByIds, ManiSkill, SameStep, Walk, WalkWithoutInfos
from torchrl_ext import GymWrapper

F32 = np.float32
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ALL = (NEXT_STEP, SAME_STEP, DISABLED)
SEED, ROWS = 7, 5


# -- environments whose infos contain the episode and the step, so that wrong infos are detected


class InfoWalk(Walk):
    """Walk with infos in all steps, some steps, last steps, resets and nested dicts."""

    KEYS = ("age", "number", "odd", "score", "fresh", "late", "early", "inner.age", "inner.score", "marks")

    def _info(self, ended: bool) -> dict[str, Any]:
        """Return an info whose keys depend on the step and on the end of the episode."""
        number, step = self.episode + 1, self.step_count
        mark = 100.0 * number + step
        info: dict[str, Any] = {"age": step, "number": number, "marks": np.array([mark, -mark])}
        info["inner"] = {"age": -step, **({"score": mark} if ended else {})}
        info |= ({"odd": mark} if step % 2 else {}) | ({"score": mark} if ended else {"early": mark})
        return info | ({"late": mark} if step else {})

    def reset(self, **kwargs: Any) -> Any:
        observation, _ = super().reset(**kwargs)
        return observation, {**self._info(False), "fresh": self.episode + 0.5}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, self._info(terminated or truncated)


class DictInfoWalk(InfoWalk):
    """InfoWalk with a Dict observation space."""

    observation_space = spaces.Dict(
        place=spaces.Box(-np.inf, np.inf, (4,), F32),
        kind=spaces.Discrete(5),
        image=spaces.Box(0, 255, (2, 3), np.uint8),
    )

    def observation(self) -> Any:
        place = super().observation()
        return {"place": place, "kind": int(place[1]) % 5, "image": np.full((2, 3), int(place[:2].sum()), np.uint8)}


class InPlaceInfoWalk(InfoWalk):
    """InfoWalk that reuses one object for all observations, and one for all infos."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.report = np.zeros(4, F32), dict[str, Any]()

    def _info(self, ended: bool) -> dict[str, Any]:
        self.report.clear()
        self.report.update(super()._info(ended))
        return self.report

    def observation(self) -> Any:
        """Write the observation into the array that every call returns."""
        self.place[...] = super().observation()
        return self.place

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.report.update(info)
        return observation, self.report


class AddInfo(gymnasium.vector.VectorWrapper):
    """Wrapper that adds a number to all infos of steps, without gymnasium's mask."""

    KEYS = (*InfoWalk.KEYS, "added")

    def step(self, actions: Any) -> Any:
        *result, info = self.env.step(actions)
        return (*result, {**info, "added": np.arange(1.0, ROWS + 1)})


class AddInfoRow(InfoWalk):
    """Single environment with the same results as one row of AddInfo."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return (*result, {**info, "added": self.row + 1.0})


class IsaacLabEnv(IsaacByIds):
    """Imitation of Isaac Lab: reused buffers, resets by ``env_ids``, no ``final_info``."""

    KEYS = ("age", "number")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(ROWS, lengths=list(LAB), **kwargs)
        self.buffers = {name: torch.zeros(ROWS, dtype=torch.long) for name in self.KEYS}

    def _report(self, info: dict[str, Any]) -> dict[str, Any]:
        """Add the reused buffers and a log to an info."""
        return info | {**self.buffers, "log": {"mean": torch.tensor(2.5)}}

    def reset(self, seed: Any = None, env_ids: Any = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed, env_ids, options)
        self.buffers["age"].copy_(self.steps)
        self.buffers["number"].copy_(self.episodes)
        return observation, self._report({})

    def step(self, action: Any) -> Any:
        self.buffers["age"].copy_(self.steps + 1)
        self.buffers["number"].copy_(self.episodes)
        self.extras = {}
        *result, info = super().step(action)
        return (*result, self._report(info))


class MjlabEnv(IsaacLabEnv):
    """Imitation of mjlab: its own classes of spaces, and no resets of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(foreign=True, **kwargs)
        self.cfg.auto_reset = False


class ManiSkillEnv(ManiSkill):
    """Imitation of ManiSkill: resets by ``env_idx``, last infos as ``final_info``."""

    KEYS = ("age", "number")

    def __init__(self, *, auto_reset: bool) -> None:
        super().__init__(auto_reset=auto_reset)
        self.cfg.auto_reset = auto_reset
        self.single_observation_space = self.single_observation_space["policy"]
        self.observation_space = self.observation_space["policy"]

    def _report(self) -> dict[str, Any]:
        """Return the infos of all rows."""
        return {"age": self.steps.clone(), "number": self.episodes.clone()}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed, options)
        return observation["policy"], self._report()

    def step(self, action: Any) -> Any:
        self.extras = {}
        last = {"age": self.steps + 1, "number": self.episodes.clone()}
        observation, *rest, info = super().step(action)
        info, done = info | self._report(), rest[1] | rest[2]
        if self.cfg.auto_reset and done.any():
            info["final_observation"] = info.pop("final_obs")["policy"]
            info |= {"final_info": last, "_final_info": done, "_final_observation": done}
        return observation["policy"], *rest, info


class NoMode(SameStep):
    """Environment without an autoreset mode in its metadata."""

    metadata = {}  # noqa: RUF012

    def __init__(self, form: str | None) -> None:
        super().__init__(list(LAB), form)


# -- single environments for one row, with gymnasium's reset and step


class LabRow:
    """Single environment equal to one row of IsaacLabEnv, MjlabEnv, VmasEnv or ManiSkillEnv."""

    def __init__(self, lengths: Sequence[int], row: int, *, key: str | None = "policy") -> None:
        self.length, self.row, self.key, self.episode = lengths[row], row, key, 0

    def _observe(self) -> Any:
        """Return the observation and the info of a reset or a step."""
        state = np.array([self.row, self.episode, self.age, *self.total, 0], F32)
        return (state if self.key is None else {self.key: state}), {"age": self.age, "number": self.episode}

    def reset(self, *, seed: int | None = None) -> Any:
        self.episode = 1 if seed is not None else self.episode + 1
        self.age, self.total = 0, np.zeros(2, F32)
        return self._observe()

    def step(self, action: Any) -> Any:
        self.age += 1
        self.total += action
        ended, is_even = self.age >= self.length, self.episode % 2 == 0
        observation, info = self._observe()
        return observation, self.age * 10 + self.row, ended and is_even, ended and not is_even, info


class PreviousAsLast:
    """Wrapper of a row that returns the preceding observation instead of the last one."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def reset(self, **kwargs: Any) -> Any:
        self.before, info = self.row.reset(**kwargs)
        return self.before, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.row.step(action)
        last = self.before if terminated or truncated else observation
        self.before = observation
        return last, reward, terminated, truncated, info


class CountRow:
    """Single environment with the same results as one row of SameStep; it counts steps."""

    def __init__(self, lengths: Sequence[int], row: int) -> None:
        self.length, self.row, self.episode = lengths[row], row, -1

    def reset(self, *, seed: int | None = None) -> Any:
        self.episode, self.age = self.episode + 1, 0
        return np.array([self.row, self.episode, 0], F32), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return np.array([self.row, self.episode, self.age], F32), 1.0, self.age >= self.length, False, {}


class SingleRowEnv:
    """Single environment made of a vectorized one with one row, in the mode NextStep.

    :param env: the vectorized environment
    :param row: number of the row that it imitates
    :param seeds: whether its reset takes a seed
    """

    def __init__(self, env: Any, row: int, *, seeds: bool) -> None:
        self.env, self.row, self.seeds, self.ended = env, row, seeds, False

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info of a vectorized environment without the dimension of rows."""
        found = {}
        for key, value in info.items():
            found[key] = self._info(value) if isinstance(value, dict) else value[0]
        return found | ({"env_id": self.row} if "env_id" in info else {})

    def reset(self, *, seed: int | None = None) -> Any:
        if self.ended and seed is None:
            observation, *_, info = self.env.step(self.action)
        else:
            observation, info = self.env.reset(**({"seed": seed} if self.seeds else {}))
        self.ended = False
        return observation[0].copy(), self._info(info)

    def step(self, action: Any) -> Any:
        self.action = np.asarray(action)[None]
        observation, reward, terminated, truncated, info = self.env.step(self.action)
        self.ended = bool(terminated[0] or truncated[0])
        return observation[0].copy(), reward[0], terminated[0], truncated[0], self._info(info)


class CartPoleRow:
    """CartPole with one row, whose first states are copied from a row of the batch.

    All rows of the batch share a random number generator.
    """

    def __init__(self, env: Any, row: int) -> None:
        self.batch_env, self.row, self.env = env.unwrapped, row, CartPoleVectorEnv(1, env.unwrapped.max_episode_steps)
        self.env.reset()

    def reset(self, *, seed: int | None = None) -> Any:
        self.env.state = self.batch_env.state[:, [self.row]].copy()
        self.env.steps[:], self.env.prev_done[:] = 0, False
        assert np.abs(self.env.state).max() <= 0.05
        assert self.batch_env.steps[self.row] == 0
        return self.env.state[:, 0].astype(F32), {}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(np.array([action]))
        return observation[0], reward[0], terminated[0], truncated[0], info


@cache
def functional_env(functional: str) -> Any:
    """Return a functional environment of gymnasium, which is compiled once for all rows."""
    import jax
    from gymnasium.envs import phys2d

    env = getattr(phys2d, functional)()
    env.transform(jax.jit)
    return env


class FunctionalRow:
    """Single functional environment of gymnasium, whose first states are read from the batch."""

    def __init__(self, functional: str, bound: Any, env: Any, row: int) -> None:
        self.batch_env, self.row, self.bound = env.unwrapped, row, np.array(bound)
        self.env = functional_env(functional)

    def reset(self, *, seed: int | None = None) -> Any:
        self.age, self.state = 0, np.asarray(self.batch_env.state)[self.row]
        assert (np.abs(self.state) <= self.bound).all()
        assert self.batch_env.steps[self.row] == 0
        return np.asarray(self.env.observation(self.state, None)), {}

    def step(self, action: Any) -> Any:
        before, self.state = self.state, np.asarray(self.env.transition(self.state, action, None))
        self.age += 1
        reward = self.env.reward(before, action, self.state, None)
        terminated, truncated = self.env.terminal(self.state, None), self.age >= self.batch_env.time_limit
        return np.asarray(self.env.observation(self.state, None)), float(reward), bool(terminated), truncated, {}


class BraxRow:
    """Single environment equal to one row of a Brax one, with the batch's states and keys."""

    def __init__(self, env: Any, row: int) -> None:
        self.batch_env, self.row, self.advance = env.unwrapped, row, compiled_brax_step(env.unwrapped)

    def reset(self, *, seed: int | None = None) -> Any:
        import jax

        self.state = jax.tree.map(lambda leaf: leaf[self.row], self.batch_env.state)
        assert self.state.info["steps"] == 0
        return self.state.obs, {}

    def step(self, action: Any) -> Any:
        self.state = self.advance(self.state, action)
        done, truncated = bool(self.state.done), bool(self.state.info["truncation"])
        return self.state.obs, self.state.reward, done and not truncated, done and truncated, {}


@cache
def compiled_brax_step(env: Any) -> Any:
    """Compile the step of a single Brax environment, once for all rows."""
    import jax

    return jax.jit(env.env.step)


# -- functions that make environments


def make_vectorized(kind: Any, make: Any = InfoWalk, **options: Any) -> Callable[[AutoresetMode], Any]:
    """Return a function that makes a vectorized environment with a given autoreset mode."""
    return lambda mode: kind([make] * ROWS, autoreset_mode=mode, **options)


def make_wrapped(wrap: Any, make: Callable[[AutoresetMode], Any]) -> Callable[[AutoresetMode], Any]:
    """Return a function that makes an environment with a given mode and wraps it."""
    return lambda mode: wrap(make(mode))


def make_atari(count: int, mode: AutoresetMode) -> Any:
    """Make vectorized Breakout with short episodes."""
    # Episodes end after 15 steps, or with the first life, which each row loses at a different time.
    options = {"max_num_frames_per_episode": 60, "episodic_life": True, "noop_max": 5, "num_threads": 1}
    return AtariVectorEnv("breakout", count, autoreset_mode=mode, img_height=24, img_width=24, stack_num=2, **options)


def make_atari_row(env: Any, row: int) -> Any:
    """Make the single environment that equals one row of ``make_atari``."""
    return SingleRowEnv(make_atari(1, NEXT_STEP), row, seeds=True)


def pool(task: str, wrap: Any = lambda env: env) -> tuple[Any, Any, Any]:
    """Return the columns ``make``, ``modes`` and ``oracle`` of the table for an EnvPool task."""

    def make(count: int, seed: int) -> Any:
        """Make EnvPool's environments of the task."""
        import envpool

        return wrap(envpool.make(task, env_type="gymnasium", num_envs=count, seed=seed, max_episode_steps=13))

    return (
        lambda mode: make(ROWS, SEED),
        (NEXT_STEP,),
        lambda env, row: SingleRowEnv(make(1, SEED + row), row, seeds=False),
    )


def make_phys2d(task: str, mode: AutoresetMode) -> Any:
    """Make one of gymnasium's vectorized environments in JAX."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*missing AutoresetMode metadata")  # it is missing in Pendulum
        return gymnasium.make_vec(f"phys2d/{task}", num_envs=ROWS, max_episode_steps=13)


@cache
def brax_recipe() -> Any:
    """Return the class of the guide's recipe for Brax."""
    guide = (ROOT / "docs/guides/vectorized_gpu.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "class Brax" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["BraxVectorEnv"]


def brax(mode: AutoresetMode) -> Any:
    """Return a Brax environment with episodes of 8 steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax warns that it is no longer developed
        from brax.envs import create

        return brax_recipe()(create("fast", episode_length=8, auto_reset=False), ROWS)


fork = partial(AsyncVectorEnv, context="fork")
shared_memory_env = partial(SharedMemoryVectorEnv, context="fork", n_workers=2)
sync = make_vectorized(SyncVectorEnv)
double_rewards = partial(wrappers.TransformReward, func=lambda rewards: rewards * 2)
halve_observations = partial(wrappers.TransformObservation, func=lambda observations: observations / 2)
to_torch = wrappers.NumpyToTorch
single_wrappers = gymnasium.wrappers
LAB = (1, 4, 3, 7, 6)
WALK_OF_3 = (2, 3, 5)


class TableRow(NamedTuple):
    """Kind of environment, with its modes, single environments and tolerance.

    :ivar make: function that makes the environment in a mode
    :ivar modes: modes that the environment supports
    :ivar oracle: function that makes the single environment from the vectorized one and the index of a row
    :ivar infos: keys of numbers in infos; ``"a.b"`` is a key in a nested dict
    :ivar options: options of GymVecEnv and GymWrapper
    :ivar needs: module that is only in .venv-jax
    :ivar tolerance: tolerance of floating-point numbers, if the batch and the single environment compute differently
    :ivar steps: number of steps to compare
    :ivar missing_infos: infos that the environment does not return if it resets a row: ``"last"`` or ``"resets"``
    """

    make: Callable[[AutoresetMode], Any]
    modes: Sequence[AutoresetMode]
    oracle: Callable[[Any, int], Any]
    infos: Sequence[str] = InfoWalk.KEYS
    options: dict[str, Any] = {}  # noqa: RUF012
    needs: str = "gymnasium"
    tolerance: float = 0.0
    steps: int = 120
    missing_infos: str = ""


def make_walk_row(env: Any, row: int) -> Any:
    """Make the single environment that equals one row of InfoWalks."""
    return InfoWalk()


def make_statistics_row(env: Any, row: int) -> Any:
    """Make an InfoWalk with episode statistics, which equals a row of the batch."""
    return single_wrappers.RecordEpisodeStatistics(InfoWalk())


def make_lab_row(env: Any, row: int) -> Any:
    """Make the single environment that equals one row of an imitated simulator."""
    return LabRow(LAB, row)


STATISTICS = (*InfoWalk.KEYS, "episode.r", "episode.l")
ALE = ("env_id", "lives", "frame_number", "episode_frame_number")
POOL = ("env_id", "elapsed_step")
CLIP = {"clip_actions": 1.0}
PREVIOUS = {**CLIP, "missing_final_obs": "previous"}

TABLE: dict[str, TableRow] = {
    # vectorized environments of gymnasium and rl-ext
    "SyncVectorEnv": TableRow(sync, ALL, make_walk_row),
    "SyncVectorEnv, Dict": TableRow(make_vectorized(SyncVectorEnv, DictInfoWalk), ALL, lambda env, row: DictInfoWalk()),
    "SyncVectorEnv, copy=False": TableRow(make_vectorized(SyncVectorEnv, copy=False), ALL, make_walk_row),
    "SyncVectorEnv, all rows end together": TableRow(
        make_vectorized(SyncVectorEnv, partial(InfoWalk, 4, 4)), ALL, lambda env, row: InfoWalk(4, 4)
    ),
    "SyncVectorEnv, episodes of one step": TableRow(
        make_vectorized(SyncVectorEnv, partial(InfoWalk, 1, 2)), ALL, lambda env, row: InfoWalk(1, 2)
    ),
    # In the mode SameStep, gymnasium resets environments before it copies their last observations.
    "SyncVectorEnv, environments that write to one place": TableRow(
        make_vectorized(SyncVectorEnv, InPlaceInfoWalk), (NEXT_STEP, DISABLED), make_walk_row
    ),
    "SharedMemoryVectorEnv, environments that write to one place": TableRow(
        make_vectorized(shared_memory_env, InPlaceInfoWalk), ALL, make_walk_row
    ),
    "AsyncVectorEnv": TableRow(make_vectorized(fork), ALL, make_walk_row),
    "AsyncVectorEnv, Dict": TableRow(make_vectorized(fork, DictInfoWalk), ALL, lambda env, row: DictInfoWalk()),
    "AsyncVectorEnv, shared_memory=False": TableRow(
        make_vectorized(fork, shared_memory=False), (SAME_STEP, DISABLED), make_walk_row
    ),
    "SharedMemoryVectorEnv": TableRow(make_vectorized(shared_memory_env), ALL, make_walk_row),
    "vector_entry_point": TableRow(lambda mode: CartPoleVectorEnv(ROWS, 20), (NEXT_STEP,), CartPoleRow, ()),
    # in gymnasium's wrappers of vectorized environments
    "RecordEpisodeStatistics": TableRow(
        make_wrapped(wrappers.RecordEpisodeStatistics, sync), ALL, make_statistics_row, STATISTICS
    ),
    "RecordEpisodeStatistics of SharedMemoryVectorEnv": TableRow(
        make_wrapped(wrappers.RecordEpisodeStatistics, make_vectorized(shared_memory_env)),
        ALL,
        make_statistics_row,
        STATISTICS,
    ),
    "RecordEpisodeStatistics, no other infos": TableRow(
        make_wrapped(wrappers.RecordEpisodeStatistics, make_vectorized(SyncVectorEnv, WalkWithoutInfos)),
        ALL,
        lambda env, row: single_wrappers.RecordEpisodeStatistics(WalkWithoutInfos()),
        ("episode.r", "episode.l"),
    ),
    "a wrapper that adds infos": TableRow(
        make_wrapped(AddInfo, sync), ALL, lambda env, row: AddInfoRow(row), AddInfo.KEYS
    ),
    "DictInfoToList(RecordEpisodeStatistics)": TableRow(
        make_wrapped(wrappers.DictInfoToList, make_wrapped(wrappers.RecordEpisodeStatistics, sync)),
        ALL,
        make_statistics_row,
        STATISTICS,
    ),
    "TransformObservation": TableRow(  # gymnasium rejects SameStep
        make_wrapped(halve_observations, sync),
        (NEXT_STEP, DISABLED),
        lambda env, row: single_wrappers.TransformObservation(InfoWalk(), lambda observation: observation / 2, None),
    ),
    # NumpyToTorch does not convert final_obs.
    "NumpyToTorch(RecordEpisodeStatistics)": TableRow(
        make_wrapped(to_torch, make_wrapped(wrappers.RecordEpisodeStatistics, sync)),
        (NEXT_STEP, DISABLED),
        make_statistics_row,
        STATISTICS,
    ),
    # written in C++; ALE returns no infos of last steps in the mode SameStep
    "ALE": TableRow(partial(make_atari, ROWS), (NEXT_STEP,), make_atari_row, ALE, steps=45),
    "ALE, SameStep": TableRow(
        partial(make_atari, ROWS), (SAME_STEP,), make_atari_row, ALE, steps=45, missing_infos="last"
    ),
    "EnvPool CartPole": TableRow(*pool("CartPole-v1"), POOL, needs="envpool"),
    "EnvPool HalfCheetah": TableRow(*pool("HalfCheetah-v5"), POOL, needs="envpool"),
    "EnvPool Pong": TableRow(*pool("Pong-v5"), (*POOL, "lives"), needs="envpool", steps=45),
    "EnvPool CartPole, DictInfoToList": TableRow(
        make_wrapped(wrappers.DictInfoToList, pool("CartPole-v1")[0]), *pool("CartPole-v1")[1:], POOL, needs="envpool"
    ),
    # on tensors; if Isaac Lab resets rows itself, it returns no infos of resets
    "Isaac Lab": TableRow(
        lambda mode: IsaacLabEnv(final_obs=True),
        (SAME_STEP,),
        make_lab_row,
        IsaacLabEnv.KEYS,
        CLIP,
        missing_infos="resets",
    ),
    "Isaac Lab, no final_obs": TableRow(
        lambda mode: IsaacLabEnv(),
        (SAME_STEP,),
        lambda env, row: PreviousAsLast(make_lab_row(env, row)),
        IsaacLabEnv.KEYS,
        PREVIOUS,
        missing_infos="resets",
    ),
    "mjlab, auto_reset=False": TableRow(lambda mode: MjlabEnv(), (DISABLED,), make_lab_row, IsaacLabEnv.KEYS, CLIP),
    "ManiSkill": TableRow(
        lambda mode: ManiSkillEnv(auto_reset=mode is SAME_STEP),
        (SAME_STEP, DISABLED),
        lambda env, row: LabRow(WALK_OF_3, row, key=None),
        ManiSkillEnv.KEYS,
        CLIP,
    ),
}
# last observations in other forms than gymnasium's
for _form in SameStep.FORMS:
    for _torch in (False, True):
        TABLE[f"final_obs as {_form}{', torch' if _torch else ''}"] = TableRow(
            lambda mode, form=_form, torch=_torch: SameStep(list(LAB), form, torch_tensors=torch),
            (SAME_STEP,),
            lambda env, row: CountRow(LAB, row),
            (),
            {"env_type": "torch"} if _torch else {},
        )
TABLE["final_obs, no mode"] = TableRow(
    lambda mode: NoMode("batch"), (SAME_STEP,), lambda env, row: CountRow(LAB, row), ()
)
# in JAX
TABLE["Brax"] = TableRow(brax, (SAME_STEP,), BraxRow, (), needs="brax", tolerance=1e-4, steps=40)
for _wrap in ("", "JaxToTorch", "JaxToNumpy"):
    TABLE[f"JAX CartPole, {_wrap}" if _wrap else "JAX CartPole"] = TableRow(
        lambda mode, wrap=_wrap: getattr(wrappers, wrap or "", lambda env: env)(make_phys2d("CartPole-v1", mode)),
        (NEXT_STEP,),
        partial(FunctionalRow, "CartPoleFunctional", [0.05] * 4),
        (),
        needs="jax",
        tolerance=1e-5,
        steps=40,
    )

CASES = [(name, mode) for name, row in TABLE.items() for mode in row.modes]


# -- results of the two wrappers, row by row


class Turn(NamedTuple):
    """Results of one step of all rows.

    For rows that ended, ``observations`` are the last ones of the episode, and ``following`` the first of the next.

    Infos are dicts with what the table names.
    """

    observations: list[Any]
    rewards: list[Any]
    flags: list[tuple[bool, bool]]
    infos: list[dict[str, Any]]
    following: list[Any]
    reset_infos: list[dict[str, Any]]


def split_rows(batch: Any) -> list[Any]:
    """Split a batch of arrays or nested dicts into a list with an entry per row."""
    if isinstance(batch, dict):
        parts = {key: split_rows(part) for key, part in batch.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    return list(batch)


def select_numbers(info: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Return the entries of an info that the keys name, with "." between nested keys."""
    found = {}
    for key in keys:
        value = info
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[key] = value
    return found


class SB3Driver:
    """Driver of an environment in GymVecEnv, with results in the form of a Turn.

    :param env: the environment
    :param row: its row of the table
    :param infos: option of GymVecEnv; with ``"finished"``, only rows that end have infos
    :param limit: unused
    """

    def __init__(self, env: Any, row: TableRow, infos: str, limit: int | None = None) -> None:
        self.venv = GymVecEnv(env, infos=infos, **row.options)  # type: ignore[arg-type]
        self.keys, self.all = row.infos, infos == "all"
        self.count, self.actions = self.venv.num_envs, self.venv.action_space

    def expected_observation(self, observation: Any) -> Any:
        """Return the part of an observation that SB3 gets, which is the one for the policy."""
        return observation["policy"] if isinstance(observation, dict) and "policy" in observation else observation

    def expected_flags(self, terminated: bool, truncated: bool) -> tuple[bool, bool]:
        """Return the done flag and the ``TimeLimit.truncated`` flag that SB3 gets."""
        return bool(terminated or truncated), bool(truncated and not terminated)

    def expected_info(self, info: dict[str, Any], ended: bool, starts: bool) -> Any:
        """Return the numbers of an info that GymVecEnv is expected to return."""
        return select_numbers(info, self.keys) if ended or starts or self.all else {}

    def reset(self, seed: int) -> tuple[list[Any], list[Any]]:
        self.venv.seed(seed)
        return split_rows(self.venv.reset()), [select_numbers(info, self.keys) for info in self.venv.reset_infos]

    def step(self, actions: Any) -> Turn:
        observations, rewards, dones, infos = self.venv.step(actions)
        following = split_rows(observations)
        pairs = list(zip(dones, infos, strict=True))
        assert all(type(info) is dict for done, info in pairs if done)
        assert all(("terminal_observation" in info) == done for done, info in pairs)
        return Turn(
            [info["terminal_observation"] if done else now for (done, info), now in zip(pairs, following, strict=True)],
            list(rewards),
            [(bool(done), info["TimeLimit.truncated"]) for done, info in pairs],
            [select_numbers(info, self.keys) if done or self.all else {} for done, info in pairs],
            following,
            [select_numbers(info, self.keys) for info in self.venv.reset_infos],
        )

    def end_episodes(self) -> None:
        """Step until an episode has ended."""
        self.reset(SEED + 99)
        while not any(
            done for done, _ in self.step(draw_actions(np.random.default_rng(0), self.venv.env, self.count)).flags
        ):
            pass

    def close(self) -> None:
        self.venv.close()


class TorchRLDriver:
    """Driver of an environment in GymWrapper, with results in the form of a Turn.

    :param env: the environment
    :param row: its row of the table
    :param variant: ``"rollout"`` calls ``step_and_maybe_reset``, as rollouts and collectors do. ``"masks"`` calls
        ``step`` and resets rows that are done. ``"no infos"`` sets no readers of infos. ``"registered"`` calls
        ``auto_register_info_dict``
    :param limit: number of steps after which a transform truncates episodes; default: no transform
    """

    def __init__(self, env: Any, row: TableRow, variant: str, limit: int | None = None) -> None:
        wrapped = GymWrapper(env, categorical_action_encoding=True, **row.options)
        self.count, self.actions = wrapped.batch_size[0], wrapped._env
        self.keys, self.variant = row.infos if variant != "no infos" else (), variant
        if variant == "registered":
            wrapped.auto_register_info_dict()
        elif self.keys:
            spec = {key: Unbounded((2,) if key == "marks" else (), dtype=torch.float64) for key in self.keys}
            spec = {key: part for key, part in spec.items() if "." not in key}
            wrapped.set_info_dict_reader(default_info_dict_reader(list(spec), spec=spec))
            wrapped.set_info_dict_reader(self._read_nested)
        self.env = wrapped if limit is None else wrapped.append_transform(StepCounter(limit))

    def _read_nested(self, info: Any, data: Any) -> Any:
        """Read numbers in nested dicts, which TorchRL's reader ignores. Missing numbers are zero."""
        parts = info if isinstance(info, list) else [info]
        assert "reward" in data or not any("episode" in part for part in parts)  # only ends of episodes have this key
        for key in self.keys:
            if "." in key:
                if isinstance(info, list):
                    values = [select_numbers(part, [key]).get(key, 0) for part in info]
                else:
                    values = select_numbers(info, [key]).get(key, np.zeros(self.count))
                    values = [0 if value is None else value for value in values]
                data.set(key, torch.as_tensor([float(value) for value in values]))
        return data

    def expected_observation(self, observation: Any) -> Any:
        """Return an observation as a dict, with the keys that TorchRL uses."""
        return observation if isinstance(observation, dict) else {"observation": observation}

    def expected_flags(self, terminated: bool, truncated: bool) -> tuple[bool, bool]:
        """Return the terminated and truncated flags that TorchRL gets."""
        return bool(terminated), bool(truncated)

    def expected_info(self, info: dict[str, Any], ended: bool, starts: bool) -> Any:
        """Return the numbers of an info, with zeros for missing ones, as TorchRL does."""
        found = select_numbers(info, self.keys)
        return {key: found.get(key, np.zeros(2) if key == "marks" else 0) for key in self.keys}

    def _observations_and_infos(self, data: Any) -> tuple[list[Any], list[Any]]:
        """Return the observation and the info of each row."""
        names = set(self.env.observation_spec.keys()) - {*self.keys, "step_count"}
        infos = {key: data[key].numpy() for key in self.keys}
        return (
            split_rows({key: data[key].numpy() for key in names}),
            split_rows(infos) if infos else [{} for _ in range(self.count)],
        )

    def reset(self, seed: int) -> tuple[list[Any], list[Any]]:
        self.now = self.env.reset(seed=seed)
        return self._observations_and_infos(self.now)

    def step(self, actions: Any) -> Turn:
        spec = self.env.action_spec
        given = self.now.set("action", torch.as_tensor(actions).to(spec.dtype))
        if self.variant == "masks":
            data = self.env.step(given)
            self.now = self.env.step_mdp(data)
            if data["next", "done"].any():
                self.now = self.env.reset(self.now.set("_reset", data["next", "done"].clone()))
        else:
            data, self.now = self.env.step_and_maybe_reset(given)
        after = data["next"]
        observations, infos = self._observations_and_infos(after)
        following, reset_infos = self._observations_and_infos(self.now)
        assert not self.now["done"].any()
        assert torch.equal(after["done"], after["terminated"] | after["truncated"])
        flags = torch.cat([after["terminated"], after["truncated"]], 1).tolist()
        return Turn(
            observations, after["reward"].flatten().tolist(), list(map(tuple, flags)), infos, following, reset_infos
        )  # type: ignore[arg-type]

    def end_episodes(self) -> None:
        """Step until an episode has ended, without resetting it."""
        data = self.env.reset(seed=SEED + 99)
        while not data["done"].any():
            actions = torch.as_tensor(draw_actions(np.random.default_rng(0), self.actions, self.count))
            data = self.env.step_mdp(self.env.step(data.set("action", actions.to(self.env.action_spec.dtype))))

    def close(self) -> None:
        self.env.close(raise_if_closed=False)


TORCHRL_DRIVER = partial(TorchRLDriver, variant="rollout")
DRIVERS: dict[str, Callable[..., Any]] = {
    "SB3": partial(SB3Driver, infos="all"),
    "SB3, infos of finished rows": partial(SB3Driver, infos="finished"),
    "TorchRL": TORCHRL_DRIVER,
    "TorchRL, resets by masks": partial(TorchRLDriver, variant="masks"),
    "TorchRL, no infos": partial(TorchRLDriver, variant="no infos"),
}


def assert_same(found: Any, expected: Any, tolerance: float, where: Any) -> None:
    """Assert that two results are equal within a tolerance, including nested dicts."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert found.keys() == expected.keys(), where
        for key, part in expected.items():
            assert_same(found[key], part, tolerance, (*where, key))
    else:
        left, right = np.asarray(found), np.asarray(expected)
        assert left.shape == right.shape, where
        if tolerance:
            np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=str(where))
        else:
            assert np.array_equal(left, right.astype(left.dtype)), (where, left, right)


def compare_with_oracle(
    row: TableRow,
    mode: AutoresetMode,
    library: Callable[..., Any],
    *,
    limit: int | None = None,
    after_ends: bool = False,
) -> None:
    """Step an environment and its single environments equally, and compare the results.

    :param row: row of the table
    :param mode: autoreset mode
    :param library: makes a driver
    :param limit: number of steps after which a transform truncates episodes; default: no transform
    :param after_ends: whether episodes end before the first reset, default False
    """
    env = row.make(mode)
    stepper = library(env, row, limit=limit)
    try:
        if after_ends:
            stepper.end_episodes()
        _compare_steps(row, env, stepper, limit)
    finally:
        stepper.close()


def _compare_steps(row: TableRow, env: Any, stepper: Any, limit: int | None) -> None:
    """Step a batch and its single environments, and assert equal results in each step."""
    random = np.random.default_rng(SEED)
    first_results = stepper.reset(SEED)
    singles = [row.oracle(env, index) for index in range(stepper.count)]
    kept, copies = [first_results], [copy.deepcopy(first_results)]
    for index, (single, observation, info) in enumerate(zip(singles, *first_results, strict=True)):
        expected, reset_info = single.reset(seed=SEED + index)
        assert_same(observation, stepper.expected_observation(expected), row.tolerance, ("reset", index))
        assert_same(info, stepper.expected_info(reset_info, False, True), row.tolerance, ("reset", index, "info"))
    ages, together = np.zeros(len(singles), int), []
    for step in range(row.steps):
        actions = draw_actions(random, env, len(singles))
        turn = stepper.step(actions.copy())
        kept.append(turn)
        copies.append(copy.deepcopy(turn))
        ages += 1
        for index, single in enumerate(singles):
            where: Any = (step, index)
            last, reward, terminated, truncated, info = single.step(actions[index])
            missing_infos = row.missing_infos if terminated or truncated else ""
            info = {} if missing_infos == "last" else info
            truncated = truncated or ages[index] == limit
            ended = bool(terminated or truncated)
            assert turn.flags[index] == stepper.expected_flags(terminated, truncated), where
            assert_same(turn.rewards[index], F32(reward), row.tolerance, (*where, "reward"))
            assert_same(
                turn.observations[index], stepper.expected_observation(last), row.tolerance, (*where, "observation")
            )
            assert_same(
                turn.infos[index], stepper.expected_info(info, ended, False), row.tolerance, (*where, "info", ended)
            )
            if ended:
                ages[index] = 0
                first, reset_info = single.reset()
                reset_info = {} if missing_infos == "resets" else reset_info
                where = (*where, "reset")
                assert_same(turn.following[index], stepper.expected_observation(first), row.tolerance, where)
                assert_same(
                    turn.reset_infos[index],
                    stepper.expected_info(reset_info, False, True),
                    row.tolerance,
                    (*where, "info"),
                )
            else:
                assert_same(
                    turn.following[index], stepper.expected_observation(last), row.tolerance, (*where, "following")
                )
        together.append(int((ages == 0).sum()))
    assert sum(together) > row.steps / 20
    for now, then in zip(kept, copies, strict=True):  # results must not change later
        for part, other in zip(now, then, strict=True):
            for one, another in zip(part, other, strict=True):
                assert_same(one, another, 0.0, "results must not change later")


def draw_actions(random: Any, env: Any, count: int) -> Any:
    """Draw a random action for each row."""
    space = getattr(env, "single_action_space", env.action_space)
    if hasattr(space, "n"):
        return random.integers(0, int(space.n), count)
    return random.uniform(-1, 1, (count, *space.shape)).astype(F32)


def skip_without(module: str) -> None:
    """Skip a test if a module is not installed, and name the test that runs it instead."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here; test_rows_that_need_another_virtual_environment runs these rows")


warnings_of_envpool = [
    # The pool was made with the seed that the drivers set.
    pytest.mark.filterwarnings("ignore:EnvPool seeds are fixed"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting"),  # gymnasium warns about EnvPool's spaces
]
pytestmark = warnings_of_envpool
IDS = [f"{name}-{mode.value}" for name, mode in CASES]


@pytest.mark.sample(quick=10, ci=48)
@pytest.mark.parametrize("library", DRIVERS)
@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_rows_equal_single_environments(name: str, mode: AutoresetMode, library: str) -> None:
    skip_without(TABLE[name].needs)
    compare_with_oracle(TABLE[name], mode, DRIVERS[library])


@pytest.mark.sample(quick=2, ci=16)
@pytest.mark.parametrize("variant", ["rollout", "masks", "no infos"])
@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_rows_truncated_by_a_transform_equal_single_environments(name: str, mode: AutoresetMode, variant: str) -> None:
    skip_without(TABLE[name].needs)
    compare_with_oracle(TABLE[name], mode, partial(TorchRLDriver, variant=variant), limit=4)


SEEDED = [case for case in CASES if not case[0].startswith(("EnvPool", "final_obs"))]  # a reset does not seed these


@pytest.mark.sample(quick=2, ci=16)
@pytest.mark.parametrize("library", [name for name in DRIVERS if "," not in name])
@pytest.mark.parametrize(("name", "mode"), SEEDED, ids=[f"{name}-{mode.value}" for name, mode in SEEDED])
def test_full_reset_after_ended_episodes_equals_single_environments(
    name: str, mode: AutoresetMode, library: str
) -> None:
    row = TABLE[name]
    skip_without(row.needs)
    compare_with_oracle(row._replace(steps=30), mode, DRIVERS[library], after_ends=True)


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("kind", [SyncVectorEnv, fork, shared_memory_env], ids=["sync", "async", "shared_memory_env"])
def test_infos_read_by_auto_register_info_dict_equal_single_environments(kind: Any, mode: AutoresetMode) -> None:
    row = TableRow(make_vectorized(kind, Walk), ALL, lambda env, index: Walk(), ("age", "length"), steps=60)
    compare_with_oracle(row, mode, partial(TorchRLDriver, variant="registered"))


# -- errors of both wrappers

BOTH_WRAPPERS = pytest.mark.parametrize("wrapper", [GymVecEnv, GymWrapper])


def run_episodes(wrapper: Any, env: Any, **options: Any) -> None:
    """Step an environment in a wrapper until episodes have ended."""
    stepper = wrapper(env, **options)
    if wrapper is GymWrapper:
        stepper.rollout(60, break_when_any_done=False)
        return
    stepper.reset()
    for _ in range(15):  # CartPole falls after 8 to 10 equal actions
        stepper.step(np.zeros(ROWS, int))


class DropsResetOptions(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Wrapper that drops the options of a reset, so that all rows are reset."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)


DROPPED = r"\(DropsResetOptions\) does not pass options\['reset_mask'\] on"


@BOTH_WRAPPERS
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: NoMode(None), InvalidArgumentError, r'NoMode .*autoreset_mode="SameStep"'),
        (lambda: SameStep(list(LAB), None), EnvironmentOutputError, r'missing_final_obs="'),
        (
            lambda: double_rewards(SyncVectorEnv([InPlaceInfoWalk] * ROWS, autoreset_mode=SAME_STEP)),
            EnvironmentOutputError,
            "loses last observations",
        ),
        (lambda: DropsResetOptions(SyncVectorEnv([InfoWalk] * ROWS)), InvalidArgumentError, DROPPED),
        (lambda: DropsResetOptions(CartPoleVectorEnv(ROWS)), InvalidArgumentError, DROPPED),
    ],
    ids=["unknown mode", "no last observations", "overwritten ones", "dropped mask", "dropped mask, CartPole"],
)
def test_errors_when_an_episode_ends(make: Any, error: type[Exception], text: str, wrapper: Any) -> None:
    with pytest.raises(error, match=text):
        run_episodes(wrapper, make(), missing_final_obs="error")


class FakeEnvPool(VectorEnv[Any, Any, Any]):
    """Imitation of an asynchronous EnvPool, whose steps return some of the rows."""

    num_envs = 4
    single_observation_space, single_action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    spec: Any = SimpleNamespace(id="Count-v0", config=SimpleNamespace(num_envs=4, batch_size=2))


FakeEnvPool.__module__ = "envpool.imitation"


def make_envpool() -> Any:
    """Make an asynchronous EnvPool, or skip the test."""
    skip_without("envpool")
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, batch_size=2)


@BOTH_WRAPPERS
@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.vector.VectorWrapper], ids=["bare", "wrapped"])
@pytest.mark.parametrize(
    "make",
    [FakeEnvPool, partial(AtariVectorEnv, "breakout", 4, batch_size=2), make_envpool],
    ids=["EnvPool", "ALE", "real EnvPool"],
)
def test_asynchronous_pools_are_rejected_at_construction(make: Any, wrap: Any, wrapper: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`batch_size=2` with num_envs=4 .* Use batch_size=4"):
        wrapper(wrap(make()))


@BOTH_WRAPPERS
def test_pools_of_several_players_are_rejected(wrapper: Any) -> None:
    pool = FakeEnvPool()
    pool.spec = SimpleNamespace(id="Duel-v0", config=SimpleNamespace(num_envs=4, batch_size=4, max_num_players=2))
    with pytest.raises(InvalidArgumentError, match=r"Pool has 2 players .* for one player"):
        wrapper(pool)


class GymnasiumIsaacLab(IsaacLabEnv, gymnasium.Env[Any, Any]):
    """Imitation of Isaac Lab that inherits from gymnasium's class, as Isaac Lab's environments do."""

    unwrapped = property(lambda self: self)


@BOTH_WRAPPERS
def test_time_limits_for_all_rows_together_are_rejected(wrapper: Any) -> None:
    spec = EnvSpec("IsaacLab-v0", lambda **_: GymnasiumIsaacLab(final_obs=True), disable_env_checker=True)
    env = gymnasium.make(spec, max_episode_steps=2)
    with pytest.raises(InvalidArgumentError, match=r"around GymnasiumIsaacLab .* max_episode_steps=-1"):
        wrapper(env, clip_actions=1.0).reset()


@BOTH_WRAPPERS
@pytest.mark.parametrize("env_type", ["numpy", "torch"])
def test_wrong_env_type_of_a_jax_environment_is_rejected(env_type: str, wrapper: Any) -> None:
    """The error names the option, which JAX's own error does not."""
    skip_without("jax")
    env = gymnasium.make_vec("phys2d/CartPole-v1", num_envs=ROWS, vectorization_mode="vector_entry_point")
    with pytest.raises(InvalidArgumentError, match=rf"env_type='{env_type}'.* jax. Use env_type='jax'"):
        run_episodes(wrapper, env, env_type=env_type)


# -- the rows that need .venv-jax


@pytest.mark.slow
@pytest.mark.parametrize(
    "some",
    [
        "not masks and not finished and not infos and (rows_equal or rejected)",
        pytest.param("not registered", marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_rows_that_need_another_virtual_environment(some: str, tmp_path: Path) -> None:
    """Run the rows for EnvPool, JAX and Brax in .venv-jax."""
    if importlib.util.find_spec("envpool") is not None:
        pytest.skip("these rows run here")
    options = ("-q", "-p", "no:cacheprovider", "-m", "", "-k", f"(EnvPool or JAX or Brax) and {some}", __file__)
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", f"--rootdir={ROOT}", *options).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
