"""Environments that reuse their arrays do not overwrite infos, rewards and observations of GymVecEnv."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics, TransformObservation
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import GymVecEnv, SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import assert_equal

MODES = list(AutoresetMode)
LENGTHS = (3, 5)


class Reporting(gym.Env[Any, Any]):
    """Environment whose info contains a cost in odd steps, from which episode and step can be read.

    :param reuses: whether it reuses one observation, reward and info, and writes into its actions
    """

    observation_space = spaces.Box(-1e4, 1e4, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, length: int, reuses: bool = False) -> None:
        self._length, self._reuses = length, reuses
        self._episode = -1
        self._observation, self._cost, self._reward = np.zeros(2, np.float32), np.zeros(2), np.zeros(())
        self._info: dict[str, Any] = {}

    def _output(self) -> Any:
        """Return observation and info of the present step, as new objects unless it reuses them."""
        self._observation[:] = self._cost[:] = number = 100 * self._episode + self._step + 0.5
        self._info.clear()
        if self._step % 2:
            self._info.update(cost=np.float64(number), vector=self._cost, inner={"vector": self._cost, "name": "a"})
        found = self._observation, self._info
        return found if self._reuses else copy.deepcopy(found)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._step = self._episode + 1, 0
        self._reward[...] = -7
        return self._output()

    def step(self, action: Any) -> Any:
        self._step += 1
        if self._reuses:
            action[...] = 9
        self._reward[...] = self._step
        observation, info = self._output()
        reward = self._reward if self._reuses else float(self._reward)
        return observation, reward, self._step == self._length, False, info


class PassThrough(VectorWrapper[Any, Any, Any, Any, Any]):
    """Empty wrapper, because of which GymVecEnv steps batches instead of sub-environments."""


def roll_out(venv: Any, steps: int = 11) -> list[Any]:
    """Roll out, and return copies of all results except episode statistics."""
    found: list[Any] = [(venv.reset(), list(venv.reset_infos))]
    copies = copy.deepcopy(found)
    for _ in range(steps):
        actions = np.full((len(LENGTHS), 2), 0.5, np.float32)
        *arrays, infos = venv.step(actions)
        assert (actions == 0.5).all()
        infos = [{key: value for key, value in info.items() if key != "episode"} for info in infos]
        found.append((*arrays, infos, list(venv.reset_infos)))
        copies.append(copy.deepcopy(found[-1]))
    assert_equal(found, copies, "what was returned before")
    venv.close()
    return copies


def make_env_fns(*, reuses: bool = False) -> list[Callable[[], Any]]:
    """Return a function per episode length that makes a ``Reporting`` environment."""
    return [functools.partial(Reporting, length, reuses) for length in LENGTHS]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_reused_outputs_in_workers_are_copied(n_workers: int) -> None:
    expected = roll_out(DummyVecEnv(make_env_fns()))
    ours = SharedMemoryVecEnv(make_env_fns(reuses=True), "fork", n_workers=n_workers)
    found = roll_out(ours)
    assert_equal([(*step[:1], *step[2:]) for step in found[1:]], [(*step[:1], *step[2:]) for step in expected[1:]])
    for mode in MODES:
        env = SharedMemoryVectorEnv(make_env_fns(reuses=True), autoreset_mode=mode, context="fork", n_workers=n_workers)
        assert_equal(roll_out(GymVecEnv(env, infos="all")), expected)


# -- observations


class BufferReusing(SyncVectorEnv):
    """Vectorized environment that returns the same array in every step."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self._output = np.array(observation)
        return self._output, info

    def step(self, actions: Any) -> Any:
        observation, *others = super().step(actions)
        self._output[...] = observation
        return self._output, *others


def reuse_buffer_in_wrapper(env: Any) -> Any:
    """Wrap an environment so that all its observations share one array."""
    buffer = np.empty((2, 2), np.float32)
    return TransformObservation(env, lambda observation: np.multiply(observation, 1, out=buffer))


def reuse_buffer_in_method(env: Any) -> Any:
    """Replace an environment's ``step`` so that all its observations share one array."""
    buffer, step = np.empty((2, 2), np.float32), env.step

    def step_in_buffer(actions: Any) -> Any:
        buffer[...], *others = step(actions)
        return buffer, *others

    env.step = step_in_buffer
    return env


@pytest.mark.parametrize(
    "build",
    [
        lambda envs: reuse_buffer_in_wrapper(SyncVectorEnv(envs)),
        lambda envs: RecordEpisodeStatistics(reuse_buffer_in_wrapper(SyncVectorEnv(envs))),
        lambda envs: PassThrough(reuse_buffer_in_method(SyncVectorEnv(envs))),
        lambda envs: RecordEpisodeStatistics(reuse_buffer_in_method(SyncVectorEnv(envs))),
        BufferReusing,
    ],
    ids=["function", "function inside", "method", "method inside", "subclass"],
)
def test_observations_in_a_reused_buffer_are_copied(build: Any) -> None:
    ours = GymVecEnv(build(make_env_fns()), infos="all")
    assert_equal(roll_out(ours), roll_out(DummyVecEnv(make_env_fns())))


# -- infos that are not built


@pytest.mark.parametrize("wrap", [lambda env: env, PassThrough, DictInfoToList], ids=["plain", "arrays", "lists"])
def test_reading_omitted_infos_of_running_envs_raises(wrap: Any) -> None:
    venv = GymVecEnv(wrap(SyncVectorEnv(make_env_fns())))
    venv.reset()
    info = venv.step(np.zeros((2, 2), np.float32))[3][0]
    for ask in (lambda: info.get("cost"), lambda: info.get("cost", 0.0), lambda: "cost" in info, lambda: info["cost"]):
        with pytest.raises(KeyError, match='infos="all"'):
            ask()
    # SB3 reads some keys in every step. Keys that no environment returns are absent, not omitted.
    assert [info.get(key) for key in ("is_success", "episode", "terminal_observation", "missing")] == [None] * 4
    assert "missing" not in info
    assert "TimeLimit.truncated" in info


class InfoReturning(VectorEnv[Any, Any, Any]):
    """Vectorized environment that returns a given info."""

    num_envs = 2
    single_observation_space, single_action_space = Reporting.observation_space, Reporting.action_space
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, info: Any) -> None:
        self._info = info

    def reset(self, **_: Any) -> Any:
        return np.zeros((2, 2), np.float32), self._info


@pytest.mark.parametrize("info", [[{}], [], "text", None])
def test_infos_of_invalid_type_are_refused(info: Any) -> None:
    with pytest.raises(EnvironmentOutputError, match="expected a dict of arrays, or a list with a dict for each"):
        GymVecEnv(InfoReturning(info)).reset()


# -- rewards


class BoxedReward(Reporting):
    """Environment with rewards of the shape (1,)."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward], np.float32), *rest


@pytest.mark.parametrize(
    "build",
    [lambda envs: GymVecEnv(SyncVectorEnv(envs)), lambda envs: SharedMemoryVectorEnv(envs, context="fork")],
    ids=["GymVecEnv", "SharedMemoryVectorEnv"],
)
def test_rewards_with_axes_are_refused(build: Any) -> None:
    """Gymnasium accepts such rewards in some modes: https://github.com/Farama-Foundation/Gymnasium/pull/1657."""
    envs = build([functools.partial(BoxedReward, 3)] * 2)
    try:
        envs.reset()
        with pytest.raises(EnvironmentOutputError, match=r"a reward of the shape \(1,\)"):
            envs.step(np.zeros((2, 2), np.float32))
    finally:
        envs.close()
