"""Tests of GymVecEnv and GymWrapper with EnvPool, against a second pool stepped by hand.

EnvPool is only in .venv-jax, in which test_jax_venv.py runs this file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.wrappers import vector as wrappers
from tensordict import TensorDict
from torchrl.data import Unbounded
from torchrl.envs import default_info_dict_reader

from sb3_ext import GymVecEnv
from torchrl_ext import GymWrapper

if importlib.util.find_spec("envpool") is None:
    pytest.skip("EnvPool is in .venv-jax alone; make it with scripts/make_jax_venv.sh", allow_module_level=True)

# gymnasium warns of the bounds of EnvPool's spaces, which are float64.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

ENVS, STEPS = 4, 300
# Without a limit, no episode of Pong or HalfCheetah would end in so few steps.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 70},
    "HalfCheetah-v5": {"max_episode_steps": 70},
    "Pong-v5": {"max_episode_steps": 110},
}


class HandStep(NamedTuple):
    """Results of a step of all environments, with observations before and after resets.

    :ivar following: observations after the step; for ended episodes, the first ones of the next episode
    """

    last: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any
    following: Any
    reset_info: Any

    @property
    def ended(self) -> Any:
        """Indices of the environments whose episodes have ended."""
        return np.flatnonzero(self.terminated | self.truncated)


def make_pool(task: str, **options: Any) -> Any:
    """Make EnvPool's environments of a task."""
    import envpool

    return envpool.make_gymnasium(task, seed=5, **{"num_envs": ENVS, **TASKS[task], **options})


def make_actions(space: Any) -> Any:
    """Draw the actions of all steps and environments."""
    space.seed(3)
    return np.stack([[space.sample() for _ in range(ENVS)] for _ in range(STEPS)])


def step_by_hand(pool: Any, actions: Any) -> Iterator[HandStep]:
    """Step a pool, and reset the environments whose episodes have ended.

    The first item is the reset.
    """
    following, info = pool.reset()
    yield HandStep(following, None, np.zeros(ENVS, bool), np.zeros(ENVS, bool), {}, following, info)
    for action in actions:
        last, reward, terminated, truncated, info = pool.step(action)
        record = HandStep(last, reward, terminated, truncated, info, last.copy(), {})
        if record.ended.size:
            fresh, reset_info = pool.reset(record.ended)
            record.following[record.ended] = fresh
            record = record._replace(reset_info=reset_info)
        yield record


def flatten_info(info: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested infos, without the keys that GymVecEnv adds."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, dict) and key != "episode":
            found |= flatten_info(value, f"{prefix}{key}.")
        elif key not in ("TimeLimit.truncated", "terminal_observation", "episode"):
            found[prefix + key] = value
    return found


def assert_is_row(info: dict[str, Any], batch: dict[str, Any], row: int) -> None:
    """Assert that an info equals a row of a batch's infos, with the same dtypes."""
    info, batch = flatten_info(info), flatten_info(batch)
    assert info.keys() == batch.keys()
    for key, values in batch.items():
        assert_same(info[key], values[row])


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two arrays have the same dtype, shape and bytes."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("task", "infos"), [("CartPole-v1", "finished"), *((task, "all") for task in TASKS)])
def test_gym_vec_env_equals_a_pool_stepped_by_hand(task: str, infos: Any) -> None:
    venv = GymVecEnv(make_pool(task), infos=infos)
    actions = make_actions(venv.action_space)
    expected = step_by_hand(make_pool(task), actions)
    first = next(expected)
    assert_same(venv.reset(), first.following)
    for row, info in enumerate(venv.reset_infos):
        assert_is_row(info, first.reset_info, row)
    returns, lengths, ends = np.zeros(ENVS), np.zeros(ENVS, int), 0
    for action, record in zip(actions, expected, strict=True):
        observations, rewards, dones, found = venv.step(action)
        assert_same(observations, record.following)
        assert_same(rewards, record.reward)
        assert_same(dones, record.terminated | record.truncated)
        returns, lengths = returns + record.reward, lengths + 1
        for position, row in enumerate(record.ended):
            assert_same(found[row]["terminal_observation"], record.last[row])
            assert found[row]["TimeLimit.truncated"] == record.truncated[row]
            assert (found[row]["episode"]["r"], found[row]["episode"]["l"]) == (returns[row], lengths[row])
            assert_is_row(found[row], record.info, row)
            assert_is_row(venv.reset_infos[row], record.reset_info, position)
        for row in np.flatnonzero(~dones) if infos == "all" else ():
            assert_is_row(found[row], record.info, row)
        returns[dones], lengths[dones] = 0, 0
        ends += len(record.ended)
    assert ends >= 2 * ENVS
    venv.close()


@pytest.mark.parametrize("task", TASKS)
def test_gym_wrapper_equals_a_pool_stepped_by_hand(task: str) -> None:
    env, pool = GymWrapper(make_pool(task), categorical_action_encoding=True), make_pool(task)
    read = ["elapsed_step", "env_id", *(["lives", "ram"] if task == "Pong-v5" else [])]
    shapes = {"ram": ((128,), torch.uint8)}
    spec = {key: Unbounded(shape, dtype=dtype) for key in read for shape, dtype in [shapes.get(key, ((), torch.int32))]}
    env.set_info_dict_reader(default_info_dict_reader(read, spec=spec))
    actions = make_actions(pool.action_space)
    expected = step_by_hand(pool, actions)
    data, ends = env.reset(), 0
    assert_same(data["observation"], next(expected).following)
    for action, record in zip(actions, expected, strict=True):
        data["action"] = torch.from_numpy(action)
        step, data = env.step_and_maybe_reset(data)
        step = step["next"]
        assert_same(step["observation"], record.last)
        assert_same(step["reward"].squeeze(-1), record.reward)
        assert_same(step["terminated"].squeeze(-1), record.terminated)
        assert_same(step["truncated"].squeeze(-1), record.truncated)
        assert_same(data["observation"], record.following)
        for key in read:
            assert_same(step[key], record.info[key])
            following = record.info[key].copy()
            if record.ended.size:
                following[record.ended] = record.reset_info[key]
            assert_same(data[key], following)
        ends += len(record.ended)
    assert ends >= 2 * ENVS
    env.close()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pong-v5"])
def test_gym_wrapper_resets_running_environments(task: str) -> None:
    env, pool = GymWrapper(make_pool(task), categorical_action_encoding=True), make_pool(task)
    actions = torch.from_numpy(make_actions(pool.action_space)[:30])
    data, _ = env.reset(), pool.reset()
    for turn, action in enumerate(actions):
        data["action"] = action
        _, data = env.step_and_maybe_reset(data)
        last, _, terminated, truncated, _ = pool.step(action.numpy())
        following, rows = last.copy(), np.flatnonzero(terminated | truncated)
        if rows.size:
            following[rows] = pool.reset(rows)[0]
        if turn % 7 == 3:
            mask = torch.arange(ENVS) % 2 == 0
            data = env.reset(TensorDict({**data, "_reset": mask.unsqueeze(-1)}, data.batch_size))
            following[mask] = pool.reset(np.flatnonzero(mask))[0]
        assert_same(data["observation"], following)


@pytest.mark.parametrize(
    "wrap",
    [
        wrappers.FlattenObservation,
        lambda pool: wrappers.DtypeObservation(pool, np.float64),
        lambda pool: wrappers.ReshapeObservation(pool, (2, 2)),
        wrappers.DictInfoToList,
        wrappers.NumpyToTorch,
        wrappers.RecordEpisodeStatistics,
        lambda pool: wrappers.DictInfoToList(wrappers.FlattenObservation(wrappers.RecordEpisodeStatistics(pool))),
    ],
)
def test_wrapped_pools_return_the_same_transitions(wrap: Any) -> None:
    venv, env = (adapter(wrap(make_pool("CartPole-v1"))) for adapter in (GymVecEnv, GymWrapper))
    pool = make_pool("CartPole-v1")
    actions = make_actions(pool.action_space)
    expected = step_by_hand(pool, actions)
    first, data = next(expected).following, env.reset()
    for found in (venv.reset(), data["observation"]):
        np.testing.assert_array_equal(np.asarray(found).reshape(first.shape), first)
    returns = np.zeros(ENVS)
    for action, record in zip(actions, expected, strict=True):
        observations, rewards, dones, infos = venv.step(action)
        data["action"] = torch.nn.functional.one_hot(torch.from_numpy(action), 2)
        step, data = env.step_and_maybe_reset(data)
        returns += record.reward
        for found, right in (
            (observations, record.following),
            (data["observation"], record.following),
            (step["next", "observation"], record.last),
            (rewards, record.reward),
            (step["next", "reward"], record.reward),
            (dones, record.terminated | record.truncated),
            (step["next", "done"], record.terminated | record.truncated),
        ):
            np.testing.assert_array_equal(np.asarray(found).reshape(right.shape), right)
        for row in record.ended:
            np.testing.assert_array_equal(infos[row]["terminal_observation"].reshape(-1), record.last[row])
            assert infos[row]["episode"]["r"] == returns[row]
            assert infos[row]["elapsed_step"] == record.info["elapsed_step"][row]
            assert venv.reset_infos[row]["elapsed_step"] == 0
        returns[record.ended] = 0


def test_gym_vec_env_accepts_a_list_of_actions() -> None:
    venv, pool = GymVecEnv(make_pool("CartPole-v1")), make_pool("CartPole-v1")
    venv.reset(), pool.reset()
    assert_same(venv.step([0, 1, 0, 1])[0], pool.step(np.array([0, 1, 0, 1]))[0])
