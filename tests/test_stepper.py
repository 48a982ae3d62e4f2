"""Tests of GymVecEnv and GymWrapper with vectorized environments of many libraries.

Both wrappers must return the same results as one single environment per row, with the same seeds and actions.
:data:`TABLE` lists the environments, their modes, and their single environments.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
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
from torch.utils._pytree import tree_map
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, default_info_dict_reader

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import GymVecEnv
from tests.environments import add_info, change_results
from tests.requirements import ROOT
from tests.torchrl_ext.environments import (
    BoxInfoWalk,
    InfoWalk,
    InPlaceInfoWalk,
    IsaacByIds,
    ManiSkill,
    SameStep,
    WalkWithoutInfos,
)
from torchrl_ext import GymWrapper

F32 = np.float32
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ALL = (NEXT_STEP, SAME_STEP, DISABLED)
SEED, ROWS = 7, 5


# -- environments whose infos contain the episode and the step, so that wrong infos are detected


class DictInfoWalk(InfoWalk):
    observation_space = spaces.Dict(
        place=spaces.Box(-np.inf, np.inf, (4,), F32),
        kind=spaces.Discrete(5),
        image=spaces.Box(0, 255, (2, 3), np.uint8),
    )

    def observation(self) -> Any:
        place = super().observation()
        return {"place": place, "kind": int(place[1]) % 5, "image": np.full((2, 3), int(place[:2].sum()), np.uint8)}


class ArrayReusing(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        place = self.__dict__.setdefault("place", np.empty((ROWS, 4), F32))
        place[...], *others = super().step(actions)
        return place, *others


def replace_step(env: Any) -> Any:
    """Replace an environment's ``step`` by a function that returns the same array each time."""
    place = np.empty((ROWS, 4), F32)
    return change_results(env, lambda values, *rest: (np.add(values, 0, out=place), *rest))


def wrap_and_add_info(env: Any) -> Any:
    """Add a number to all infos of steps in a wrapper, without gymnasium's mask."""
    return add_info(gymnasium.vector.VectorWrapper(env), "added", lambda: np.arange(1.0, ROWS + 1))


class IsaacLabEnv(IsaacByIds):
    """Imitation of Isaac Lab: reused buffers, resets by ``env_ids``, no ``final_info``."""

    KEYS = ("age", "number")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(ROWS, lengths=list(LAB), overwrites_actions=True, **kwargs)
        self.buffers = {name: torch.zeros(ROWS, dtype=torch.long) for name in self.KEYS}

    def _report(self, info: dict[str, Any]) -> dict[str, Any]:
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
    """Imitation of mjlab: its own classes of spaces, no resets of its own, and rewards in a column."""

    def __init__(self) -> None:
        super().__init__(foreign=True)
        self.cfg.auto_reset = False

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward[:, None], *rest


class Pool(SameStep, VectorEnv[Any, Any, Any]):
    """Imitation of EnvPool: it resets rows one step late. Its ``reset`` takes indices, and returns only these rows.

    It rejects None for its other arguments, as before version 1.2.
    """

    metadata = {}  # noqa: RUF012

    def __init__(self, **config: Any) -> None:
        super().__init__(list(LAB), None)
        self.late = np.zeros(ROWS, bool)
        self.spec: Any = SimpleNamespace(
            id="Count-v0", config=SimpleNamespace(num_envs=ROWS, **{"batch_size": ROWS, **config})
        )

    def _info(self, rows: Any) -> dict[str, Any]:
        return {"elapsed_step": self.steps[rows].copy(), "env_id": np.arange(ROWS)[rows]}

    def reset(self, env_id: Any = None, **given: Any) -> Any:
        assert None not in given.values()
        rows = slice(None) if env_id is None else env_id
        self.episodes[rows] += 1
        self.steps[rows], self.late[rows] = 0, False
        return self.observation(rows), self._info(rows)

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.reset(self.late.nonzero()[0])
        self.late = done = self.steps >= self.lengths
        return self.observation(slice(None)), np.ones(ROWS), done, np.zeros(ROWS, bool), self._info(slice(None))


Pool.__module__ = "envpool.imitation"


def without_mode(form: str | None) -> SameStep:
    env: Any = SameStep(list(LAB), form)
    env.metadata = {}
    return env


# -- single environments for one row, with gymnasium's reset and step


class LabRow:
    """Single environment equal to one row of IsaacLabEnv, MjlabEnv or ManiSkill."""

    def __init__(self, lengths: Sequence[int], env: Any, row: int, *, key: str | None = "policy") -> None:
        self.length, self.row, self.key, self.episode = lengths[row], row, key, 0

    def _observe(self) -> Any:
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
    """Single environment with the same results as one row of SameStep or Pool; it counts steps."""

    def __init__(self, env: Any, row: int) -> None:
        self.length, self.row, self.nested, self.episode = LAB[row], row, env.nested, -1

    def _observe(self) -> Any:
        place = np.array([self.row, self.episode, self.age], F32)
        nested = {"inner": {"place": place, "_private": place[:1] * 2}, "kind": self.row + self.age}
        return nested if self.nested else place, {"elapsed_step": self.age, "env_id": self.row}

    def reset(self, *, seed: int | None = None) -> Any:
        self.episode, self.age = self.episode + 1, 0
        observation, info = self._observe()
        return observation, {**info, "fresh": 1}

    def step(self, action: Any) -> Any:
        self.age += 1
        observation, info = self._observe()
        return observation, 1.0, self.age >= self.length, False, info


class SingleRowEnv:
    """Single environment that equals a row. It is a vectorized one with one row, in the mode NextStep.

    :param seeds: whether its reset takes a seed
    """

    def __init__(self, env: Any, row: int, *, seeds: bool) -> None:
        self.env, self.row, self.seeds, self.ended = env, row, seeds, False

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info of a vectorized environment without the dimension of rows."""
        return tree_map(lambda value: value[0], info) | ({"env_id": self.row} if "env_id" in info else {})

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


class CartPoleRow(SingleRowEnv):
    """CartPole with one row, whose first states are copied from a row of the batch.

    All rows of the batch share a random number generator.
    """

    def __init__(self, env: Any, row: int) -> None:
        super().__init__(CartPoleVectorEnv(1, env.unwrapped.max_episode_steps), row, seeds=False)
        self.batch_env = env.unwrapped
        self.env.reset()

    def reset(self, *, seed: int | None = None) -> Any:
        self.env.state = self.batch_env.state[:, [self.row]].copy()
        self.env.steps[:], self.env.prev_done[:] = 0, False
        assert np.abs(self.env.state).max() <= 0.05
        assert self.batch_env.steps[self.row] == 0
        return self.env.state[:, 0].astype(F32), {}


@cache
def functional_env() -> Any:
    import jax
    from gymnasium.envs import phys2d

    env = phys2d.CartPoleFunctional()
    env.transform(jax.jit)
    return env


class FunctionalRow:
    """Single functional CartPole of gymnasium, whose first states are read from the batch."""

    def __init__(self, env: Any, row: int) -> None:
        self.batch_env, self.row, self.env = env.unwrapped, row, functional_env()

    def reset(self, *, seed: int | None = None) -> Any:
        self.age, self.state = 0, np.asarray(self.batch_env.state)[self.row]
        assert np.abs(self.state).max() <= 0.05
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
    import jax

    return jax.jit(env.env.step)


# -- functions that make environments


def make_atari(count: int, mode: AutoresetMode) -> Any:
    # Episodes end after 15 steps, or with the first life, which each row loses at a different time.
    options = {"max_num_frames_per_episode": 60, "episodic_life": True, "noop_max": 5, "num_threads": 1}
    return AtariVectorEnv("breakout", count, autoreset_mode=mode, img_height=24, img_width=24, stack_num=2, **options)


def make_atari_row(env: Any, row: int) -> Any:
    return SingleRowEnv(make_atari(1, NEXT_STEP), row, seeds=True)


def brax(mode: AutoresetMode) -> Any:
    """Return a Brax environment of the guide's class, with episodes of 8 steps."""
    guide = (ROOT / "docs/guides/vectorized_gpu.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "class Brax" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax warns that it is no longer developed
        from brax.envs import create

        return names["BraxVectorEnv"](create("fast", episode_length=8, auto_reset=False), ROWS)


fork = partial(AsyncVectorEnv, context="fork")
shared_memory_env = partial(SharedMemoryVectorEnv, context="fork", n_workers=2)
double_rewards = partial(wrappers.TransformReward, func=lambda rewards: rewards * 2)
LAB = (1, 4, 3, 7, 6)


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


def walks(
    kind: Any, make: Any = InfoWalk, modes: Sequence[AutoresetMode] = ALL, *, single: Any = None, **options: Any
) -> TableRow:
    """Return the row of vectorized walks, which equal one of them, or environments that ``single`` makes."""
    return TableRow(
        lambda mode: kind([make] * ROWS, autoreset_mode=mode, **options), modes, lambda env, row: (single or make)()
    )


def wrapped(wrap: Any, row: TableRow, wrap_single: Any = lambda env: env, **columns: Any) -> TableRow:
    columns["oracle"] = lambda env, index: wrap_single(row.oracle(env, index))
    return row._replace(make=lambda mode: wrap(row.make(mode)), **columns)


def statistics(row: TableRow, **columns: Any) -> TableRow:
    columns = {"infos": (*row.infos, "episode.r", "episode.l"), **columns}
    return wrapped(wrappers.RecordEpisodeStatistics, row, gymnasium.wrappers.RecordEpisodeStatistics, **columns)


def lab(make: Callable[[], Any], mode: AutoresetMode, **columns: Any) -> TableRow:
    """Return the row of an imitated simulator on tensors."""
    row = TableRow(lambda mode: make(), (mode,), partial(LabRow, LAB), IsaacLabEnv.KEYS, {"clip_actions": 1.0})
    return row._replace(**columns)


def pool(task: str, **columns: Any) -> TableRow:

    def make(count: int, seed: int) -> Any:
        import envpool

        return envpool.make(task, env_type="gymnasium", num_envs=count, seed=seed, max_episode_steps=13)

    def make_row(env: Any, row: int) -> Any:
        return SingleRowEnv(make(1, SEED + row), row, seeds=False)

    row = TableRow(lambda mode: make(ROWS, SEED), (NEXT_STEP,), make_row, POOL, needs="envpool")
    return row._replace(**columns)


ALE = ("env_id", "lives", "frame_number", "episode_frame_number")
POOL = ("env_id", "elapsed_step")
NO_SAME_STEP = (NEXT_STEP, DISABLED)

TABLE: dict[str, TableRow] = {
    # vectorized environments of gymnasium and rl-ext
    "SyncVectorEnv": walks(SyncVectorEnv),
    "SyncVectorEnv, Dict": walks(SyncVectorEnv, DictInfoWalk),
    "SyncVectorEnv, copy=False": walks(SyncVectorEnv, copy=False),
    "SyncVectorEnv, all rows end together": walks(SyncVectorEnv, partial(InfoWalk, 4, 4)),
    "SyncVectorEnv, episodes of one step": walks(SyncVectorEnv, partial(InfoWalk, 1, 2)),
    # In the mode SameStep, gymnasium resets environments before it copies their last observations.
    "SyncVectorEnv, in place": walks(SyncVectorEnv, InPlaceInfoWalk, NO_SAME_STEP, single=BoxInfoWalk),
    "SharedMemoryVectorEnv, in place": walks(shared_memory_env, InPlaceInfoWalk, single=BoxInfoWalk),
    "a subclass that returns one array": walks(ArrayReusing),
    "a replaced step that returns one array": wrapped(replace_step, walks(SyncVectorEnv)),
    "AsyncVectorEnv": walks(fork),
    "AsyncVectorEnv, Dict": walks(fork, DictInfoWalk),
    "AsyncVectorEnv, shared_memory=False": walks(fork, InfoWalk, (SAME_STEP, DISABLED), shared_memory=False),
    "SharedMemoryVectorEnv": walks(shared_memory_env),
    "vector_entry_point": TableRow(lambda mode: CartPoleVectorEnv(ROWS, 20), (NEXT_STEP,), CartPoleRow, ()),
    # in gymnasium's wrappers of vectorized environments
    "RecordEpisodeStatistics": statistics(walks(SyncVectorEnv)),
    "RecordEpisodeStatistics of one array": statistics(walks(ArrayReusing)),
    "RecordEpisodeStatistics of SharedMemoryVectorEnv": statistics(walks(shared_memory_env)),
    "RecordEpisodeStatistics, no other infos": statistics(walks(SyncVectorEnv, WalkWithoutInfos)._replace(infos=())),
    "a wrapper that adds infos": wrapped(
        wrap_and_add_info, walks(SyncVectorEnv), infos=(*InfoWalk.KEYS, "added")
    )._replace(oracle=lambda env, row: add_info(InfoWalk(), "added", lambda: row + 1.0)),
    "DictInfoToList(RecordEpisodeStatistics)": wrapped(wrappers.DictInfoToList, statistics(walks(SyncVectorEnv))),
    "TransformObservation": wrapped(
        partial(wrappers.TransformObservation, func=lambda observations: observations / 2),
        walks(SyncVectorEnv),
        lambda env: gymnasium.wrappers.TransformObservation(env, lambda observation: observation / 2, None),
        modes=NO_SAME_STEP,  # gymnasium rejects SameStep
    ),
    # NumpyToTorch does not convert final_obs.
    "NumpyToTorch(RecordEpisodeStatistics)": wrapped(
        wrappers.NumpyToTorch, statistics(walks(SyncVectorEnv)), modes=NO_SAME_STEP
    ),
    # written in C++; ALE returns no infos of last steps in the mode SameStep
    "ALE": TableRow(partial(make_atari, ROWS), (NEXT_STEP,), make_atari_row, ALE, steps=45),
    "ALE, SameStep": TableRow(
        partial(make_atari, ROWS), (SAME_STEP,), make_atari_row, ALE, steps=45, missing_infos="last"
    ),
    "EnvPool, imitation": TableRow(lambda mode: Pool(), (NEXT_STEP,), CountRow, POOL),
    "EnvPool CartPole": pool("CartPole-v1"),
    "EnvPool HalfCheetah": pool("HalfCheetah-v5"),
    "EnvPool Pong": pool("Pong-v5", infos=(*POOL, "lives"), steps=45),
    "EnvPool CartPole, DictInfoToList": wrapped(wrappers.DictInfoToList, pool("CartPole-v1")),
    # on tensors; if Isaac Lab resets rows itself, it returns no infos of resets
    "Isaac Lab": lab(lambda: IsaacLabEnv(final_obs=True), SAME_STEP, missing_infos="resets"),
    "Isaac Lab, no final_obs": lab(
        IsaacLabEnv,
        SAME_STEP,
        oracle=lambda env, row: PreviousAsLast(LabRow(LAB, env, row)),
        options={"clip_actions": 1.0, "missing_final_obs": "previous"},
        missing_infos="resets",
    ),
    "mjlab, auto_reset=False": lab(MjlabEnv, DISABLED),
    "ManiSkill": lab(partial(ManiSkill, auto_reset=True), SAME_STEP, oracle=partial(LabRow, (2, 3, 5), key=None)),
    "ManiSkill, auto_reset=False": lab(
        partial(ManiSkill, auto_reset=False), DISABLED, oracle=partial(LabRow, (2, 3, 5), key=None)
    ),
}
# last observations in other forms than gymnasium's
for _form in SameStep.FORMS:
    for _kind in ("NumPy", "torch", "nested torch"):
        _torch = _kind != "NumPy"
        _name = "final_obs" if _torch else "final_observation"
        _options = {"nested": "nested" in _kind, "name": _name, "torch_tensors": _torch}
        TABLE[f"final_obs as {_form}, {_kind}"] = TableRow(
            lambda mode, form=_form, options=_options: SameStep(list(LAB), form, **options),
            (SAME_STEP,),
            CountRow,
            ("elapsed_step", "fresh"),
            {"env_type": "torch"} if _torch else {},
        )
TABLE["final_obs, no mode"] = TableRow(lambda mode: without_mode("batch"), (SAME_STEP,), CountRow, ())
# in JAX
TABLE["Brax"] = TableRow(brax, (SAME_STEP,), BraxRow, (), needs="brax", tolerance=1e-4, steps=40)
_jax = TableRow(
    lambda mode: gymnasium.make_vec("phys2d/CartPole-v1", num_envs=ROWS, max_episode_steps=13),
    (NEXT_STEP,),
    FunctionalRow,
    (),
    needs="jax",
    tolerance=1e-5,
    steps=40,
)
TABLE["JAX CartPole"] = _jax
for _name in ("JaxToTorch", "JaxToNumpy"):  # importing them imports JAX
    TABLE[f"JAX CartPole, {_name}"] = wrapped(lambda env, name=_name: getattr(wrappers, name)(env), _jax)

CASES = [(name, mode) for name, row in TABLE.items() for mode in row.modes]


# -- results of the two wrappers, row by row


class Turn(NamedTuple):
    """Results of one step of all rows.

    For rows that ended, ``observations`` are the last ones of the episode, and ``following`` the first of the next.

    Infos are dicts with what the table names.
    """

    observations: list[Any]
    rewards: Any
    flags: list[tuple[bool, bool]]
    infos: list[dict[str, Any]]
    following: list[Any]
    reset_infos: list[dict[str, Any]]


def split_rows(batch: Any) -> list[Any]:
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

    :param infos: option of GymVecEnv; with ``"finished"``, only rows that end have infos
    """

    limit = None

    def __init__(self, env: Any, row: TableRow, infos: str) -> None:
        self.venv = GymVecEnv(env, infos=infos, **row.options)
        self.keys, self.all = row.infos, infos == "all"
        self.count, self.actions = self.venv.num_envs, self.venv.action_space

    def expected_observation(self, observation: Any) -> Any:
        """Return the part of an observation that SB3 gets, which is the one for the policy."""
        return observation["policy"] if isinstance(observation, dict) and "policy" in observation else observation

    def expected_flags(self, terminated: bool, truncated: bool) -> tuple[bool, bool]:
        """Return the done flag and the ``TimeLimit.truncated`` flag that SB3 gets."""
        return bool(terminated or truncated), bool(truncated and not terminated)

    def expected_info(self, info: dict[str, Any], ended: bool, starts: bool) -> Any:
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
            rewards,
            [(bool(done), info["TimeLimit.truncated"]) for done, info in pairs],
            [select_numbers(info, self.keys) if done or self.all else {} for done, info in pairs],
            following,
            [select_numbers(info, self.keys) for info in self.venv.reset_infos],
        )

    def end_episodes(self) -> None:
        self.reset(SEED + 99)
        while not any(
            done for done, _ in self.step(draw_actions(np.random.default_rng(0), self.venv.env, self.count)).flags
        ):
            pass

    def close(self) -> None:
        self.venv.close()


class TorchRLDriver:
    """Driver of an environment in GymWrapper, with results in the form of a Turn.

    :param variant: ``"rollout"`` calls ``step_and_maybe_reset``, as rollouts and collectors do. ``"masks"`` calls
        ``step`` and resets rows that are done. ``"no infos"`` sets no readers of infos. ``"GPU"`` takes the
        code path of GPUs, which does not read which rows are done
    :param limit: number of steps after which a transform truncates episodes; default: no transform
    """

    def __init__(self, env: Any, row: TableRow, variant: str, limit: int | None = None) -> None:
        wrapped = GymWrapper(env, categorical_action_encoding=True, **row.options)
        self.count, self.actions = wrapped.batch_size[0], wrapped._env
        self.keys, self.variant = row.infos if variant != "no infos" else (), variant
        if self.keys:
            spec: Any = {
                key: Unbounded((2,) if key == "marks" else (), dtype=torch.float64)
                for key in self.keys
                if "." not in key
            }
            if variant == "masks":  # as users write it for a batch
                expanded = {key: part.expand(self.count, *part.shape) for key, part in spec.items()}
                spec = Composite(expanded, shape=(self.count,))
            wrapped.set_info_dict_reader(default_info_dict_reader(list(spec), spec=spec))
            wrapped.set_info_dict_reader(self._read_nested)
        self.wrapped, self.limit = wrapped, limit
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
        return bool(terminated), bool(truncated)

    def expected_info(self, info: dict[str, Any], ended: bool, starts: bool) -> Any:
        """Return the numbers of an info, with zeros for missing ones, as TorchRL does."""
        found = select_numbers(info, self.keys)
        return {key: found.get(key, np.zeros(2) if key == "marks" else 0) for key in self.keys}

    def _observations_and_infos(self, data: Any) -> tuple[list[Any], list[Any]]:
        names = set(self.env.observation_spec.keys()) - {*self.keys, "step_count"}
        infos = {key: data[key].numpy() for key in self.keys}
        return (
            split_rows({key: data[key].numpy() for key in names}),
            split_rows(infos) if infos else [{} for _ in range(self.count)],
        )

    def reset(self, seed: int) -> tuple[list[Any], list[Any]]:
        self.now = self.env.reset(seed=seed)
        if self.variant == "GPU":
            self.wrapped.__dict__["_engine"]._finds_done_rows = False
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
            observations, after["reward"].flatten().numpy(), list(map(tuple, flags)), infos, following, reset_infos
        )

    def end_episodes(self) -> None:
        """Step until an episode has ended, without resetting it."""
        data = self.env.reset(seed=SEED + 99)
        while not data["done"].any():
            actions = torch.as_tensor(draw_actions(np.random.default_rng(0), self.actions, self.count))
            data = self.env.step_mdp(self.env.step(data.set("action", actions.to(self.env.action_spec.dtype))))

    def close(self) -> None:
        self.env.close(raise_if_closed=False)


DRIVERS: dict[str, Callable[..., Any]] = {
    "SB3": partial(SB3Driver, infos="all"),
    "SB3, infos of finished rows": partial(SB3Driver, infos="finished"),
    "TorchRL": partial(TorchRLDriver, variant="rollout"),
    "TorchRL, resets by masks": partial(TorchRLDriver, variant="masks"),
    "TorchRL, no infos": partial(TorchRLDriver, variant="no infos"),
    "TorchRL, code of GPUs": partial(TorchRLDriver, variant="GPU"),
    "TorchRL, limit": partial(TorchRLDriver, variant="rollout", limit=4),
    "TorchRL, limit, resets by masks": partial(TorchRLDriver, variant="masks", limit=4),
    "TorchRL, limit, no infos": partial(TorchRLDriver, variant="no infos", limit=4),
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


def draw_actions(random: Any, env: Any, count: int) -> Any:
    space = getattr(env, "single_action_space", env.action_space)
    if hasattr(space, "n"):
        return random.integers(0, int(space.n), count)
    return random.uniform(-1, 1, (count, *space.shape)).astype(F32)


def skip_without(module: str) -> None:
    """Skip a test if a module is not installed, and name the file that runs it instead."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here; test_venvs.py runs these rows")


pytestmark = [
    # The pool was made with the seed that the drivers set.
    pytest.mark.filterwarnings("ignore:EnvPool seeds are fixed"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting"),  # gymnasium warns about EnvPool's spaces
]
IDS = [f"{name}-{mode.value}" for name, mode in CASES]


@pytest.mark.sample(quick=26, ci=112)
@pytest.mark.parametrize("library", DRIVERS)
@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_rows_equal_single_environments(name: str, mode: AutoresetMode, library: str) -> None:
    if "nested" in name and "SB3" in library:
        pytest.skip("Stable Baselines3 does not support nested Dicts")
    row = TABLE[name]
    skip_without(row.needs)
    env = row.make(mode)
    with contextlib.closing(DRIVERS[library](env, row)) as stepper:
        if not name.startswith(("EnvPool", "final_obs")):  # their resets take no seed
            stepper.end_episodes()

        def check(found: Any, expected: Any, info: Any, expected_info: Any, *where: Any) -> None:
            assert_same(found, stepper.expected_observation(expected), row.tolerance, where)
            assert_same(info, expected_info, row.tolerance, (*where, "info"))

        random = np.random.default_rng(SEED)
        first_results = stepper.reset(SEED)
        singles = [row.oracle(env, index) for index in range(stepper.count)]
        kept, copies = [first_results], [copy.deepcopy(first_results)]
        for index, (single, observation, info) in enumerate(zip(singles, *first_results, strict=True)):
            expected, reset_info = single.reset(seed=SEED + index)
            check(observation, expected, info, stepper.expected_info(reset_info, False, True), "reset", index)
        ages, together = np.zeros(len(singles), int), []
        for step in range(row.steps):
            actions = draw_actions(random, env, len(singles))
            given = actions.copy()
            turn = stepper.step(given)
            assert np.array_equal(given, actions), "environments must not write into the caller's actions"
            kept.append(turn)
            copies.append(copy.deepcopy(turn))
            ages += 1
            for index, single in enumerate(singles):
                last, reward, terminated, truncated, info = single.step(actions[index])
                missing_infos = row.missing_infos if terminated or truncated else ""
                info = {} if missing_infos == "last" else info
                truncated = truncated or ages[index] == stepper.limit
                ended = bool(terminated or truncated)
                assert turn.flags[index] == stepper.expected_flags(terminated, truncated), (step, index)
                assert_same(turn.rewards[index], F32(reward), row.tolerance, (step, index, "reward"))
                expected_info = stepper.expected_info(info, ended, False)
                check(turn.observations[index], last, turn.infos[index], expected_info, step, index, ended)
                if ended:
                    ages[index] = 0
                    last, reset_info = single.reset()
                    reset_info = {} if missing_infos == "resets" else reset_info
                    expected_info = stepper.expected_info(reset_info, False, True)
                    assert_same(turn.reset_infos[index], expected_info, row.tolerance, (step, index, "reset"))
                found = turn.following[index]
                assert_same(found, stepper.expected_observation(last), row.tolerance, (step, index, "following"))
            together.append(int((ages == 0).sum()))
        assert sum(together) > row.steps / 20
        for now, then in zip(kept, copies, strict=True):
            for part, other in zip(now, then, strict=True):
                for one, another in zip(part, other, strict=True):
                    assert_same(one, another, 0.0, "results must not change later")


# -- errors of both wrappers

BOTH_WRAPPERS = pytest.mark.parametrize("wrapper", [GymVecEnv, GymWrapper])


def run_episodes(wrapper: Any, env: Any, **options: Any) -> None:
    stepper = wrapper(env, **options)
    if wrapper is GymWrapper:
        stepper.rollout(60, break_when_any_done=False)
        return
    stepper.reset()
    for _ in range(15):  # CartPole falls after 8 to 10 equal actions
        stepper.step(np.zeros((ROWS, *stepper.action_space.shape), int))


class DropsResetOptions(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed)


DROPPED = r"\(DropsResetOptions\) does not pass options\['reset_mask'\] on"


@BOTH_WRAPPERS
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: without_mode(None), InvalidArgumentError, r'SameStep .*autoreset_mode="SameStep"'),
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


def make_envpool() -> Any:
    skip_without("envpool")
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, batch_size=2)


ASYNCHRONOUS = r"`batch_size=2` with num_envs=[45] .* Use batch_size=[45]"
POOLS: dict[str, tuple[Any, str]] = {
    "EnvPool": (partial(Pool, batch_size=2), ASYNCHRONOUS),
    "ALE": (partial(AtariVectorEnv, "breakout", 4, batch_size=2), ASYNCHRONOUS),
    "real EnvPool": (make_envpool, ASYNCHRONOUS),
    "several players": (partial(Pool, max_num_players=2), r"Pool has 2 players .* for one player"),
}


@BOTH_WRAPPERS
@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.vector.VectorWrapper], ids=["bare", "wrapped"])
@pytest.mark.parametrize("name", POOLS)
def test_unsupported_pools_are_rejected_at_construction(name: str, wrap: Any, wrapper: Any) -> None:
    make, text = POOLS[name]
    with pytest.raises(InvalidArgumentError, match=text):
        wrapper(wrap(make()))


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
