"""Tests of spare environments, which are reset while the others are stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv
from rl_ext_core.vector.spare_pool import SparePool
from sb3_ext import ResumeCallback, SharedMemoryVecEnv, make_vec_env
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.vec_checks import assert_equal, raise_interrupt_in

FAST = "fork"


class Walk(gymnasium.Env[Any, Any]):
    """Random walk that ends at a random time, with an info at each third step."""

    action_space = spaces.Discrete(3)

    def __init__(self, name: int = 0, *, nested: bool = False) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = spaces.Dict({"walk": box, "time": box}) if nested else box
        self.name, self.nested, self.bonus = name, nested, 0.0

    def _observation(self) -> Any:
        walk = np.array([self.position, self.name])
        return {"walk": walk, "time": np.full(2, float(self.time))} if self.nested else walk

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self.bonus < 0:
            raise ValueError("a negative bonus")
        self.time, self.position = 0, self.np_random.normal()
        return self._observation(), {"options": options, "name": self.name}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.position += float(action) + self.np_random.normal()
        truncated = self.time == 6
        info = {"time": self.time} if self.time % 3 == 0 else {}
        return self._observation(), self.position + self.bonus, self.np_random.random() < 0.2, truncated, info

    def add_bonus(self, value: float) -> float:
        self.bonus += value
        return self.bonus


def expected_steps(n_envs: int, n_spares: int, nested: bool, actions: Any, seed: int) -> list[Any]:
    """Return what a VecEnv with spares returns, from environments in this process."""
    envs = [Walk(number % n_envs, nested=nested) for number in range(n_envs + n_spares)]
    resets = [
        env.reset(seed=seed + number, options={"a": 1} if number < n_envs else None) for number, env in enumerate(envs)
    ]
    rows, waiting = list(range(n_envs)), list(range(n_envs, len(envs)))
    found = [[resets[number] for number in rows]]
    for each in actions:
        results = [list(envs[number].step(action)) for number, action in zip(rows, each, strict=True)]
        ended = [row for row, (_, _, terminated, truncated, _) in enumerate(results) if terminated or truncated]
        for row in ended:
            info = results[row][4]
            info["terminal_observation"] = results[row][0]
            waiting.append(rows[row])
            resets[rows[row]] = envs[rows[row]].reset()
        for row in ended:
            rows[row] = waiting.pop(0)
            results[row][0] = resets[rows[row]][0]
        for _, _, terminated, truncated, info in results:
            info["TimeLimit.truncated"] = truncated and not terminated
        found.append([*results, [resets[number][1] for number in rows]])
    return found


@pytest.mark.parametrize(
    ("n_envs", "n_spares", "nested"),
    [
        (3, 2, False),
        (1, 1, True),
        pytest.param(2, 5, False, marks=pytest.mark.slow),
        pytest.param(4, 1, True, marks=pytest.mark.slow),
    ],
)
def test_rows_are_continued_in_order(n_envs: int, n_spares: int, nested: bool) -> None:
    actions = np.random.default_rng(0).integers(3, size=(60, n_envs))
    expected = expected_steps(n_envs, n_spares, nested, actions, seed=7)
    env_fns: list[Callable[[], Any]] = [lambda number=number: Walk(number, nested=nested) for number in range(n_envs)]
    venv = SharedMemoryVecEnv(env_fns, FAST, spares=n_spares)
    venv.seed(7)
    venv.set_options({"a": 1})
    observations = venv.reset()
    for row, (observation, info) in enumerate(expected[0]):
        assert_equal(_row(observations, row), observation)
        assert venv.reset_infos[row] == info
    names = list(range(n_envs))
    for each, (*results, reset_infos) in zip(actions, expected[1:], strict=True):
        observations, rewards, dones, infos = venv.step(each)
        for row, (observation, reward, terminated, truncated, info) in enumerate(results):
            assert_equal(_row(observations, row), observation)
            assert (rewards[row], dones[row]) == (reward, terminated or truncated)
            assert_equal(infos[row], info)
            if dones[row]:
                names[row] = reset_infos[row]["name"]
                assert venv.reset_infos[row] == {"options": None, "name": names[row]}
    assert venv.get_attr("name") == names
    venv.close()


def _row(observations: Any, row: int) -> Any:
    """Return one row of observations."""
    if isinstance(observations, dict):
        return {key: values[row] for key, values in observations.items()}
    return observations[row]


@pytest.mark.parametrize("nested", [False, True])
def test_vector_env_continues_rows_in_the_same_order(nested: bool) -> None:
    n_envs = 2
    actions = np.random.default_rng(0).integers(3, size=(60, n_envs))
    expected = expected_steps(n_envs, 2, nested, actions, seed=7)
    env_fns: list[Callable[[], Any]] = [lambda number=number: Walk(number, nested=nested) for number in range(n_envs)]
    envs = SharedMemoryVectorEnv(env_fns, context=FAST, autoreset_mode="SameStep", spares=2)
    assert envs.num_envs == n_envs
    observations, infos = envs.reset(seed=7, options={"a": 1})
    for row, (observation, info) in enumerate(expected[0]):
        assert_equal(_row(observations, row), observation)
        assert infos["name"][row] == info["name"]
    for each, (*results, reset_infos) in zip(actions, expected[1:], strict=True):
        observations, rewards, terminated, truncated, infos = envs.step(each)
        for row, (observation, reward, *flags, info) in enumerate(results):
            assert_equal(_row(observations, row), observation)
            assert (rewards[row], terminated[row], truncated[row]) == (reward, *flags)
            own = infos
            if any(flags):
                assert_equal(infos["final_obs"][row], info["terminal_observation"])
                assert infos["name"][row] == reset_infos[row]["name"]
                own = infos["final_info"] if "time" in info else {}
            assert ("time" in own and bool(own["_time"][row])) == ("time" in info)
    assert envs.get_attr("name") == tuple(info["name"] for info in expected[-1][-1])
    envs.close()


def test_calls_of_vector_env_reach_all_environments_or_are_refused() -> None:
    envs = SharedMemoryVectorEnv([Walk] * 2, context=FAST, autoreset_mode="SameStep", spares=1)
    envs.reset(seed=0)
    envs.set_attr("bonus", 5.0)
    envs.call_async("add_bonus", 2.0)
    assert envs.call_wait() == (7.0, 7.0)
    for _ in range(30):
        envs.step(np.ones(2, int))
        assert envs.get_attr("bonus") == (7.0, 7.0)
    with pytest.raises(InvalidArgumentError, match=r"bonus with a value for each row.*set_attr\('bonus', value\)"):
        envs.set_attr("bonus", [1.0, 2.0])
    with pytest.raises(InvalidArgumentError, match=r"indices=\[1\].*Leave indices out"):
        envs.call_some([1], "add_bonus", 1.0)
    with pytest.raises(InvalidArgumentError, match="Leave reset_mask out"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.step_async(np.ones(2, int))
    with pytest.raises(InvalidArgumentError, match=r"step_timeout=3.0"):
        envs.step_wait(timeout=3.0)
    envs.step_wait()
    assert envs.get_attr("bonus") == (7.0, 7.0)
    envs.close()


def test_other_autoreset_modes_with_spares_are_refused() -> None:
    for mode in ("NextStep", "Disabled"):
        with pytest.raises(InvalidArgumentError, match=f'autoreset_mode=.*{mode}.* with spares=1.*"SameStep"'):
            SharedMemoryVectorEnv([Walk] * 2, autoreset_mode=mode, spares=1)


def test_calls_reach_all_environments_or_are_refused() -> None:
    venv = SharedMemoryVecEnv([Walk] * 2, FAST, spares=1)
    venv.reset()
    venv.set_attr("bonus", 5.0)
    assert venv.env_method("add_bonus", 2.0) == [7.0, 7.0]
    for _ in range(30):  # so that each environment has continued a row
        venv.step([1, 1])
        assert venv.get_attr("bonus") == [7.0, 7.0]
    assert venv.get_attr("bonus", 1) == [7.0]
    with pytest.raises(InvalidArgumentError, match=r"indices=\[1\].*Leave indices out"):
        venv.env_method("add_bonus", 1.0, indices=[1])
    with pytest.raises(InvalidArgumentError, match="Leave indices out"):
        venv.set_attr("bonus", 1.0, 0)
    assert venv.get_attr("bonus") == [7.0, 7.0]
    venv.close()


def test_failed_reset_of_a_spare_is_raised() -> None:
    venv = SharedMemoryVecEnv([Walk], FAST, spares=1)
    venv.reset()
    venv.set_attr("bonus", -1.0)
    with pytest.raises(WorkerError, match="a negative bonus"):  # noqa: PT012
        for _ in range(30):
            venv.step([0])
    with pytest.raises(WorkerError, match="a negative bonus"):
        venv.step([0])
    venv.close()


@pytest.mark.parametrize("method", ["_receive_reset", "_continue_row", "_read_rows"])
def test_step_goes_on_after_an_interrupt(method: str) -> None:
    def play(interrupted: range) -> list[Any]:
        venv = SharedMemoryVecEnv([Walk] * 2, FAST, spares=2)
        venv.seed(0)
        found: list[Any] = [venv.reset()]
        for number in range(20):
            venv.step_async(np.ones(2, int))
            if number in interrupted:
                with raise_interrupt_in(SparePool, method), contextlib.suppress(KeyboardInterrupt):
                    found.append(venv.step_wait())
            if len(found) < number + 2:
                found.append(venv.step_wait())
        venv.close()
        return found

    assert_equal(play(range(20)), play(range(0)))


def test_training_depends_on_seeds_only() -> None:
    def train() -> Any:
        venv = VecNormalize(SharedMemoryVecEnv([Walk] * 2, FAST, spares=1))
        model = without_logger(PPO("MlpPolicy", venv, seed=1, n_steps=32, batch_size=32, n_epochs=1, device="cpu"))
        model.learn(128)
        venv.close()
        return {name: value.numpy() for name, value in model.policy.state_dict().items()}

    assert_equal(train(), train())


@pytest.mark.parametrize("options", [{"n_workers": 2}, {"restart": "truncate"}])
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spares=1 .* Leave n_workers and restart out"):
        SharedMemoryVecEnv([Walk] * 2, spares=1, **options)


def test_recorder_with_spares_is_refused(tmp_path: Path) -> None:
    for recorder in (True, str(tmp_path)):
        with pytest.raises(InvalidArgumentError, match=r"recorder=.* with spares=1.*Leave recorder out"):
            SharedMemoryVecEnv([Walk] * 2, recorder=recorder, spares=1)
    with pytest.raises(InvalidArgumentError, match=r"recorder=True with spares=1"):
        make_vec_env(Walk, 2, recorder=True, vec_env_kwargs={"spares": 1})


def test_numbers_of_spares_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="spares=-1"):
        SharedMemoryVecEnv([Walk], spares=-1)
    with pytest.raises(InvalidTypeError, match="spares=True must be a whole number, for example spares=1"):
        SharedMemoryVecEnv([Walk], spares=True)


def test_no_environments_with_spares_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="env_fns is empty"):
        SharedMemoryVecEnv([], spares=1)


def test_make_vec_env_with_spares_starts_processes() -> None:
    venv = make_vec_env(Walk, 1, vec_env_kwargs={"spares": 1, "start_method": FAST})
    assert isinstance(venv, SharedMemoryVecEnv)
    assert len(venv._pool.workers) == 2
    venv.close()


def test_resume_callback_needs_an_environment_without_spares(tmp_path: Path) -> None:
    venv = SharedMemoryVecEnv([Walk] * 2, FAST, spares=1)
    model = without_logger(PPO("MlpPolicy", venv, n_steps=16, batch_size=16, device="cpu"))
    with pytest.raises(InvalidArgumentError, match="recorder=True and spares=0"):
        model.learn(16, callback=ResumeCallback(tmp_path))
    venv.close()


def test_monitor_files_with_spares_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="does not combine with spares=1"):
        make_vec_env(Walk, 2, monitor_dir=str(tmp_path), vec_env_kwargs={"spares": 1})


def test_resets_and_steps_by_env_method_are_refused() -> None:
    env = SharedMemoryVecEnv([Walk] * 2, spares=1, start_method=FAST)
    env.seed(3)
    env.reset()
    for name in ("reset", "step"):
        with pytest.raises(InvalidArgumentError, match=rf"env_method\('{name}'\) with spares.*Write env.{name}\("):
            env.env_method(name)
    assert env.env_method("add_bonus", 0.0) == [0.0, 0.0]
    env.close()
