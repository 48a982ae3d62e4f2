from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from sb3_ext import CompressedReplayBuffer, MultiAgentVecEnv, make_vec_env
from tests.environments import change_result
from tests.sb3_ext.buffer_envs import without_logger

pytest.importorskip("pettingzoo")
from pettingzoo import ParallelEnv


class Race(ParallelEnv):
    """Environment in which agent ``i`` dies after ``deaths[i]`` steps; it ends after ``length`` steps at most."""

    metadata = {"name": "race", "render_modes": ["rgb_array"]}  # noqa: RUF012 PettingZoo's own way
    render_mode = "rgb_array"

    def __init__(self, deaths: tuple[int, ...] = (2, 9, 4), length: int = 6) -> None:
        self.possible_agents = [f"runner_{index}" for index in range(len(deaths))]
        self.agents: list[str] = []
        self._deaths, self._length = dict(zip(self.possible_agents, deaths, strict=True)), length

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def _observe(self, agent: str, action: float = -1.0) -> np.ndarray:
        """Return the observation of an agent, which contains its action."""
        return np.array([self._steps + 1, self._level, action], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._steps, self._level = 0, float(self._rng.integers(1, 99))
        self.agents = list(self.possible_agents)
        return {agent: self._observe(agent) for agent in self.agents}, {
            agent: {"level": self._level} for agent in self.agents
        }

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        self._steps += 1
        acting = list(self.agents)
        observations = {agent: self._observe(agent, float(actions[agent])) for agent in acting}
        rewards = dict.fromkeys(acting, 1.0)
        terminated = {agent: self._steps == self._deaths[agent] for agent in acting}
        truncated = dict.fromkeys(acting, self._steps >= self._length)
        self.agents = [agent for agent in acting if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, {agent: {"steps": self._steps} for agent in acting}

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self._steps, np.uint8)


def take_step(env: MultiAgentVecEnv, actions: Any = np.zeros(3, int)) -> None:  # noqa: B008
    env.seed(0)
    env.reset()
    env.step(actions)


def test_rows_of_dead_agents_are_zeros() -> None:
    env = MultiAgentVecEnv([Race] * 2)
    env.seed(5)
    first = env.reset()
    assert first.shape == (6, 3)
    assert first[:3, 1].tolist() == [float(np.random.default_rng(5).integers(1, 99))] * 3
    assert first[3:, 1].tolist() == [float(np.random.default_rng(6).integers(1, 99))] * 3
    done_at: list[list[int]] = [[] for _ in range(6)]
    for step in range(1, 7):
        observations, rewards, dones, infos = env.step(np.arange(6) % 3)
        for row, death in enumerate((2, 9, 4) * 2):
            dead = step > death
            assert rewards[row] == (0.0 if dead else 1.0)
            assert infos[row].get("agent_is_dead", False) is dead
            if dones[row]:
                done_at[row].append(step)
            elif dead:
                assert not observations[row].any()
            else:
                assert observations[row].tolist() == [step + 1, first[row, 1], row % 3]
            if step == min(death, 6):
                assert infos[row]["TimeLimit.truncated"] is (death == 9)
                assert infos[row]["terminal_observation"].tolist() == [step + 1, first[row, 1], row % 3]
                assert (infos[row]["episode"]["r"], infos[row]["episode"]["l"]) == (step, step)
    assert done_at == [[2, 6], [6], [4, 6]] * 2
    assert observations[:, 0].tolist() == [1.0] * 6  # all environments are reset
    assert not infos[0]["terminal_observation"].any()  # the observation of a dead agent
    assert env.reset_infos[0] == {"level": observations[0, 1]}
    env.close()


class Rejoining(Race):
    """Race in which ``runner_1`` dies in step 2 and rejoins in step 4; infos share one array."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, _ = super().reset(seed, options)
        self._buffer = np.zeros(1)
        return observations, {agent: {"buffer": self._buffer} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        if self._steps == 3:
            self.agents.append("runner_1")
            actions = {**actions, "runner_1": 0}
        observations, rewards, terminated, truncated, infos = super().step(actions)
        self._buffer[:] = self._steps
        return observations, rewards, terminated, truncated, {agent: {"buffer": self._buffer} for agent in infos}


def test_agent_that_rejoins_starts_an_episode() -> None:
    env = MultiAgentVecEnv([functools.partial(Rejoining, (9, 2), length=6)])
    env.seed(0)
    env.reset()
    steps = [env.step(np.zeros(2, int)) for _ in range(6)]
    infos = [step[3][1] for step in steps]
    assert [step[2][1] for step in steps] == [False, True, False, True, False, True]
    assert [bool(step[0][1].any()) for step in steps] == [True, False, False, True, True, True]
    assert [info.get("agent_is_dead", False) for info in infos] == [False, False, True, True, False, False]
    episodes = [(info["episode"]["r"], info["episode"]["l"]) for info in infos if "episode" in info]
    assert episodes == [(2.0, 2), (2.0, 2)]
    assert [step[3][0]["buffer"].item() for step in steps] == [1, 2, 3, 4, 5, 6]
    assert not infos[3]["terminal_observation"].any()
    assert infos[5]["TimeLimit.truncated"]
    env.close()


class Relay(Race):
    """Race in which ``runner_1`` joins when ``runner_0`` ends. Steps return no flags of agents that continue."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        self.agents = ["runner_0"]
        return {"runner_0": observations["runner_0"]}, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, _, infos = super().step(actions)
        if terminated.get("runner_0"):
            self.agents.append("runner_1")
            observations["runner_1"] = self._observe("runner_1")
        return observations, rewards, {agent: True for agent, flag in terminated.items() if flag}, {}, infos


def test_agents_without_flags_continue() -> None:
    env = MultiAgentVecEnv([functools.partial(Relay, (2, 4))])
    env.seed(0)
    env.reset()
    steps = [env.step(np.zeros(2, int)) for _ in range(4)]
    assert [step[2].tolist() for step in steps] == [[False, False], [True, True], [False, False], [True, True]]
    assert [step[0].any(1).tolist() for step in steps] == [[True, False], [False, True], [False, True], [True, False]]
    assert [step[1].tolist() for step in steps] == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_environments_cannot_change_actions_of_caller() -> None:
    race = change_result(Race(), "action_space", lambda _: spaces.Box(-1, 1, (1,), np.float32))
    step, actions = race.step, np.zeros((3, 1), np.float32)

    def step_and_write(given: Any) -> Any:
        for action in given.values():
            action[:] = 9
        return step(dict.fromkeys(given, 0))

    race.step = step_and_write
    take_step(MultiAgentVecEnv([lambda: race]), actions)
    assert not actions.any()


@pytest.mark.slow
def test_rollouts_equal_those_of_pettingzoo() -> None:
    options = {"max_cycles": 400, "spawn_delay": 1, "max_zombies": 40}
    make = functools.partial(
        pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11").parallel_env, **options
    )
    env, other = make_vec_env(make(), 1, seed=3), make()
    found, seen = env.reset(), other.reset(seed=3)[0]
    agents = other.possible_agents
    env.action_space.seed(0)
    died = 0
    while other.agents:
        for row, agent in enumerate(agents):
            assert np.array_equal(found[row], seen[agent] if agent in other.agents else np.zeros_like(found[row]))
        actions = {agent: env.action_space.sample() for agent in agents}
        found, rewards, dones, _ = env.step(np.stack(list(actions.values())))
        acting = {agent: actions[agent] for agent in other.agents}
        seen, their_rewards, terminated, truncated, _ = other.step(acting)
        for agent, reward in their_rewards.items():
            row = agents.index(agent)
            assert rewards[row] == np.float32(reward)
            assert dones[row] == (terminated[agent] or truncated[agent] or not other.agents)
            died += bool(dones[row] and other.agents)
    assert dones.all()
    assert died > 0
    env.close()
    other.close()


@pytest.mark.slow
def test_algorithms_train_on_multi_agent_vec_env() -> None:
    env = make_vec_env(Race(), 4, seed=0)
    assert "one policy" in env.isolation_report  # type: ignore[attr-defined]
    model = without_logger(PPO("MlpPolicy", env, n_steps=16, batch_size=64, device="cpu"))
    model.learn(400)
    assert model.ep_info_buffer
    buffer = {"replay_buffer_class": CompressedReplayBuffer, "buffer_size": 600}
    without_logger(DQN("MlpPolicy", env, learning_starts=24, device="cpu", **buffer)).learn(240)
    assert [image.shape for image in env.get_images()] == [(4, 4, 3)] * 4
    assert env.get_attr("render_mode", [0, 11]) == ["rgb_array"] * 2
    env.close()


def without_runner_1(result: Any) -> Any:
    return {agent: part for agent, part in result[0].items() if agent != "runner_1"}, *result[1:]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        # PettingZoo's API before version 1.23
        (lambda: change_result(Race((9, 9)), "reset", itemgetter(0)), r"reset\(\) returned"),
        (lambda: change_result(Race(), "step", itemgetter(0, 1, 2, 4)), r"step\(\) returned"),
        (lambda: change_result(Race(), "step", without_runner_1), "nothing for the agent 'runner_1'"),
    ],
)
def test_invalid_results_are_refused(build: Any, said: str) -> None:
    env = MultiAgentVecEnv([build])
    with pytest.raises(EnvironmentOutputError, match=said):
        take_step(env)


def test_invalid_environments_and_options_are_refused() -> None:
    spaces_of_agents = iter([spaces.Discrete(3), spaces.Discrete(2)])
    with pytest.raises(InvalidArgumentError, match="'runner_1' has the spaces"):
        MultiAgentVecEnv([lambda: change_result(Race(), "action_space", lambda _: next(spaces_of_agents))])
    with pytest.raises(InvalidArgumentError, match="environment 1 has the agents"):
        MultiAgentVecEnv([Race, functools.partial(Race, (1, 2))])
    with pytest.raises(InvalidTypeError, match="None is not a parallel environment of PettingZoo"):
        MultiAgentVecEnv([lambda: None])
    with pytest.raises(InvalidTypeError, match="act in turns"):
        make_vec_env(pytest.importorskip("pettingzoo.classic.connect_four_v3").env())
    for options in ({"wrapper_class": Race}, {"isolation": "process"}, {"monitor_dir": "logs"}):
        with pytest.raises(InvalidArgumentError, match="is for single environments"):
            make_vec_env(Race(), 2, **options)
