"""``MultiAgentVecEnv``: PettingZoo's parallel environments with one policy for all agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rl_ext_core._values import copy_output
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.environments import check_env_fns, make_factories
from rl_ext_core.vector.memory_layout import MemoryLayout
from rl_ext_core.vector.stepper import RESET_RESULT, STEP_RESULT, check_result_length
from sb3_ext.vec_env import CheckedVecEnv, Indices

__all__ = ["MultiAgentVecEnv", "is_parallel_env"]


def is_parallel_env(env: Any) -> bool:
    """Return whether this is a parallel environment of PettingZoo.

    :raises InvalidTypeError: If its agents act in turns (AEC).
    """
    if isinstance(env, type) or not hasattr(env, "possible_agents"):
        return False
    if hasattr(env, "agent_iter"):
        raise InvalidTypeError(
            f"the agents of {env} act in turns, expected a parallel environment. Use "
            "pettingzoo.utils.aec_to_parallel(env), if its rules allow that"
        )
    return hasattr(env, "step")


class MultiAgentVecEnv(CheckedVecEnv):
    """PettingZoo's parallel environments, with one policy for all agents.

    It replaces SuperSuit's ``pettingzoo_env_to_vec_env_v1`` and ``concat_vec_envs_v1``. Each agent of each environment
    has a row, in order. With two environments of three agents, row 4 is the second agent of the second.

    If an agent ends before its environment, its episode ends: ``dones`` is True, and the info has its last observation.
    From then on its row is zeros with reward 0. ``info["agent_is_dead"]`` is True in every step that began with zeros.
    The zeros end with ``dones`` True once more: when the agent joins again, or when the environment ends and is reset.
    The observation returned with that ``dones`` is the first of a new episode. A policy learns that zeros are worth
    nothing, as with SuperSuit's ``black_death``.

    :param env_fns: functions that build the environments, or anything that :func:`as_factory` takes; all environments
        are in this process
    :raises InvalidTypeError: If an environment is not a parallel environment.
    :raises InvalidArgumentError: If agents have different spaces, or observations that are not arrays of fixed shape.

    ``reset`` and ``step`` return observations, (n_envs · agents, ...); rewards, (n_envs · agents,) float32; dones,
    (n_envs · agents,) bool; and a list of infos. Infos of ended episodes contain ``terminal_observation``,
    ``TimeLimit.truncated`` and ``episode``. ``seed(s)`` sets the seed ``s + i`` for environment ``i``. Attributes and
    methods are those of the row's environment.

    :ivar agents: names of the possible agents of one environment

    Source: https://github.com/DLR-RM/stable-baselines3/issues/69

    >>> from pettingzoo.butterfly import knights_archers_zombies_v11
    >>> from sb3_ext import MultiAgentVecEnv
    >>> env = MultiAgentVecEnv([knights_archers_zombies_v11.parallel_env] * 2)
    >>> env.num_envs, len(env.agents)
    (8, 4)
    >>> env.close()
    """

    row_noun = "agent"

    def __init__(self, env_fns: Sequence[Callable[[], Any]]) -> None:
        check_env_fns(env_fns)
        self.envs: list[Any] = []
        try:
            for factory in make_factories(env_fns):
                env = factory()
                if not is_parallel_env(env):
                    getattr(env, "close", lambda: None)()
                    raise InvalidTypeError(
                        f"{env} is not a parallel environment of PettingZoo: it has no possible_agents. "
                        "Use make_vec_env(env) for single environments"
                    )
                self.envs.append(env)
            self.agents: list[Any] = list(self.envs[0].possible_agents)
            spaces = self._common_spaces()
            super().__init__(len(self.envs) * len(self.agents), *spaces)
            layout = self._layout = MemoryLayout.from_spaces(self.num_envs, *spaces)
        except BaseException:
            self._close_envs()
            raise
        arrays = layout.arrays(bytearray(layout.size))
        self._observations = [arrays[f"observation {index}"] for index in range(len(layout.paths))]
        self._slots = [layout.slots(arrays, row) for row in range(self.num_envs)]
        self._alive = np.zeros(self.num_envs, bool)
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        self._start_time = time.time()
        self.metadata = {**(getattr(self.envs[0], "metadata", None) or {}), **self.metadata}

    def _common_spaces(self) -> tuple[Any, Any]:
        """Return the spaces of observations and actions, which must be equal for all agents."""
        first: Any = None
        for env_index, env in enumerate(self.envs):
            if list(env.possible_agents) != self.agents or not self.agents:
                raise InvalidArgumentError(
                    f"environment {env_index} has the agents {list(env.possible_agents)}, expected those of "
                    f"environment 0, at least one: {self.agents}. Build all environments with the same arguments"
                )
            for agent in self.agents:
                found = env.observation_space(agent), env.action_space(agent)
                first = first or found
                if found != first:
                    raise InvalidArgumentError(
                        f"the agent {agent!r} has the spaces {found}, expected those of {self.agents[0]!r}, {first}, "
                        "because one policy plays all agents. Pad them: supersuit.pad_observations_v0(env)"
                    )
        return first  # type: ignore[no-any-return]

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seeds of the next reset: ``seed + i`` for environment ``i``. If None, draw one."""
        if seed is None:
            seed = int(np.random.randint(0, np.iinfo(np.uint32).max, dtype=np.uint32))
        self._seeds = [seed + row // len(self.agents) for row in range(self.num_envs)]
        return self._seeds

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n_envs · agents, ...) each
        """
        self._require_open()
        self._actions = None
        self.reset_infos = [{} for _ in range(self.num_envs)]
        for env_index in range(len(self.envs)):
            first = env_index * len(self.agents)
            self._reset_env(env_index, self._seeds[first], self._options[first])
        self._reset_seeds()
        self._reset_options()
        return self._copy_observations()

    def _reset_env(self, env_index: int, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Reset one environment, and write the rows of its agents."""
        result = self.envs[env_index].reset(seed=seed, **({"options": options} if options else {}))
        observations, infos = check_result_length(result, RESET_RESULT)
        for row, agent in self._agent_rows(env_index):
            self._alive[row] = agent in observations
            self._write_observation(row, observations.get(agent))
            self.reset_infos[row] = copy_output(dict(infos.get(agent, {})))
            self._returns[row] = self._lengths[row] = 0

    def _agent_rows(self, env_index: int) -> Iterable[tuple[int, Any]]:
        """Return row and name of each agent of an environment."""
        return enumerate(self.agents, env_index * len(self.agents))

    def _write_observation(self, row: int, observation: Any) -> None:
        """Write an agent's observation, or zeros if it is None."""
        for part in self._slots[row]:
            if observation is None:
                part.place[...] = 0
            else:
                part.write(observation)

    def _copy_observations(self, rows: Any = slice(None)) -> Any:
        """Return copies of the observations of some rows, by default all."""
        return self._layout.build_observation([array[rows].copy() for array in self._observations])

    def step_async(self, actions: Any) -> None:
        """Store the actions of the next step, (n_envs · agents, ...), ignored for dead agents."""
        # Environments that clip their action in place must not change what SB3 stores.
        self._store_actions(copy_output(actions))

    def step_wait(self) -> Any:
        """Take the step.

        :return: observations, rewards, dones and infos, see the class
        :raises EnvironmentOutputError: If an environment returns nothing for an agent that is alive, or has an old API.
        """
        actions = self._take_actions()
        rewards, dones = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        self.reset_infos = list(self.reset_infos)  # the caller may keep the previous list
        for env_index, env in enumerate(self.envs):
            acting = {agent: actions[row] for row, agent in self._agent_rows(env_index) if self._alive[row]}
            self._process_step(env_index, env.step(acting), rewards, dones, infos)
        return self._copy_observations(), rewards, dones, infos

    def _process_step(self, env_index: int, result: Any, rewards: Any, dones: Any, infos: list[dict[str, Any]]) -> None:
        """Process the result of one environment's step, and reset the environment if it has ended."""
        observations, all_rewards, terminated, truncated, all_infos = check_result_length(result, STEP_RESULT)
        ended = {agent for flags in (terminated, truncated) for agent, flag in flags.items() if flag}
        continuing = [agent for agent in self.envs[env_index].agents if agent in observations and agent not in ended]
        env_ended = not continuing
        for row, agent in self._agent_rows(env_index):
            if not self._alive[row]:
                infos[row]["agent_is_dead"] = True
                if env_ended or agent in continuing:
                    dones[row], infos[row]["terminal_observation"] = True, self._copy_observations(row)
                if agent in continuing:
                    self._write_observation(row, observations[agent])
                    self.reset_infos[row] = copy_output(dict(all_infos.get(agent, {})))
                    self._alive[row], self._returns[row], self._lengths[row] = True, 0, 0
                continue
            if agent not in observations or agent not in all_rewards:
                raise EnvironmentOutputError(
                    f"environment {env_index}, in step: it returned nothing for the agent {agent!r}, expected an "
                    "observation and a reward for each agent that was in env.agents before the step"
                )
            info = infos[row]
            info.update(copy_output(dict(all_infos.get(agent, {}))))
            rewards[row] = all_rewards[agent]
            self._returns[row] += float(all_rewards[agent])
            self._lengths[row] += 1
            self._write_observation(row, observations[agent])
            if agent in ended or env_ended:
                info["terminal_observation"] = copy_output(observations[agent])
                info["TimeLimit.truncated"] = not terminated.get(agent, False)
                total, seconds = round(float(self._returns[row]), 6), round(time.time() - self._start_time, 6)
                info["episode"] = {"r": total, "l": int(self._lengths[row]), "t": seconds}
                dones[row], self._alive[row] = True, False
                self._write_observation(row, None)
        if env_ended:
            self._reset_env(env_index)

    def close(self) -> None:
        """Close the environments. If they are closed, do nothing."""
        if not self.closed:
            self.closed = True
            self._close_envs()

    def _close_envs(self) -> None:
        while self.envs:
            self.envs.pop().close()

    def _render(self) -> Sequence[Any]:
        # One picture per environment, not one per agent.
        return [env.render() for env in self.envs]

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of each row's environment."""
        return [getattr(env, attr_name) for env in self._envs_of(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the rows' environments."""
        for env in self._envs_of(indices):
            setattr(env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each row's environment, once per row."""
        return [getattr(env, method_name)(*method_args, **method_kwargs) for env in self._envs_of(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return False for each row: gymnasium's wrappers do not fit PettingZoo's environments."""
        return [False for _ in self._envs_of(indices)]

    def _envs_of(self, indices: Indices) -> list[Any]:
        """Return the environment of each selected row."""
        self._require_open()
        chosen = self._resolve_indices(indices, len(self.envs) * len(self.agents))
        return [self.envs[row // len(self.agents)] for row in chosen]
