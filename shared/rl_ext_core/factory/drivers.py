"""Reset and step environments of many libraries with random actions.

The libraries are not imported. An environment's interface follows from the names of its base classes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core._values import copy_output

if TYPE_CHECKING:
    from collections.abc import Callable


def driver_for(env: Any, *, seed: int) -> Driver | None:
    """Return a driver for an environment or wrapper, or None if its interface is unknown.

    :param env: The environment. The names of its base classes determine the interface.
    :param seed: Seed of the actions.
    """
    names = {f"{base.__module__}:{base.__qualname__}" for base in type(env).__mro__}
    for known, driver in _DRIVERS.items():
        if known in names:
            return driver(env, np.random.default_rng(seed))
    return None


class Driver:
    """Resets and steps one environment with random actions."""

    def __init__(self, env: Any, rng: np.random.Generator) -> None:
        self._env, self._rng = env, rng
        self._spaces: dict[str, Any] = {}

    def reset(self, seed: int | None) -> Any:
        """Start an episode.

        :param seed: Seed of the environment's own generators. None does not seed them.
        :return: Result of the environment without infos, which later steps do not overwrite.
        """
        return copy_output(self._reset(seed))

    def step(self) -> Any:
        """Take a step with a random action. At the end of an episode, start the next one.

        :return: Results of the environment without infos, which later steps do not overwrite.
        """
        result, is_over = self._step()
        result = copy_output(result)
        return [result, self.reset(None)] if is_over else result

    def _reset(self, seed: int | None) -> Any:
        raise NotImplementedError

    def _step(self) -> tuple[Any, Any]:
        """Take a step, and return the results without infos, and whether the episode is over."""
        raise NotImplementedError

    def _draw(self, space: Any, name: str = "", mask: Any = None) -> Any:
        """Draw an action from a copy of a gymnasium space, which has its own generator.

        :param name: Name of the agent. Each has its own copy.
        :param mask: Allowed actions. None allows all.
        """
        if name not in self._spaces:
            self._spaces[name] = copy.deepcopy(space)
            self._spaces[name].seed(int(self._rng.integers(2**31)))
        return self._spaces[name].sample() if mask is None else self._spaces[name].sample(np.asarray(mask, np.int8))


def sample_between(rng: np.random.Generator, low: Any, high: Any, shape: Any, dtype: Any) -> Any:
    """Draw numbers between limits.

    The distribution is uniform, or a clipped normal one if a limit is infinite.
    """
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    if np.issubdtype(dtype, np.integer):
        return np.asarray(rng.integers(low, high, size=shape, endpoint=True), dtype)
    finite = np.isfinite(low) & np.isfinite(high)
    even = rng.uniform(np.where(finite, low, 0), np.where(finite, high, 1))
    return np.clip(np.where(finite, even, rng.standard_normal(shape)), low, high).astype(dtype)


class GymnasiumDriver(Driver):
    """Driver of ``gymnasium.Env``."""

    def _reset(self, seed: int | None) -> Any:
        return self._env.reset(seed=seed)[0]

    def _step(self) -> tuple[Any, Any]:
        *result, _ = self._env.step(self._draw(self._env.action_space))
        return result, result[2] or result[3]


class _PettingZooAEC(Driver):
    """Driver of PettingZoo's ``AECEnv``, whose agents act in turn."""

    def _reset(self, seed: int | None) -> Any:
        self._env.reset(seed=seed)
        return [self._env.agent_selection, *self._env.last()[:4]]

    def _step(self) -> tuple[Any, Any]:
        agent = self._env.agent_selection
        observation, _, *ended, info = self._env.last()
        mask = _action_mask(observation, info)
        self._env.step(None if any(ended) else self._draw(self._env.action_space(agent), agent, mask))
        return ([self._env.agent_selection, *self._env.last()[:4]], False) if self._env.agents else ([], True)


class _PettingZooParallel(Driver):
    """Driver of PettingZoo's ``ParallelEnv``, whose agents act at the same time."""

    _returned: tuple[Any, Any] = ({}, {})

    def _reset(self, seed: int | None) -> Any:
        self._returned = self._env.reset(seed=seed)
        return self._returned[0]

    def _step(self) -> tuple[Any, Any]:
        seen = {agent: [part.get(agent) for part in self._returned] for agent in self._env.agents}
        drawn = {a: self._draw(self._env.action_space(a), a, _action_mask(*parts)) for a, parts in seen.items()}
        *result, infos = self._env.step(drawn)
        self._returned = result[0], infos
        return result, not self._env.agents


def _action_mask(observation: Any, info: Any) -> Any:
    """Return the ``action_mask`` in an info or observation, or None if all actions are allowed."""
    for holder in (info, observation):
        if isinstance(holder, Mapping) and holder.get("action_mask") is not None:
            return holder["action_mask"]
    return None


class _DmEnv(Driver):
    """Driver of ``dm_env.Environment``: dm_control's, dmlab2d's, and wrappers of them."""

    def _reset(self, seed: int | None) -> Any:
        # dm_env has no seeds. dm_control's composer stores its generator in the environment, its suite in the task.
        for holder, name in ((self._env, "random_state"), (getattr(self._env, "task", None), "random")):
            found = getattr(holder, name, None)
            if seed is not None and isinstance(found, np.random.RandomState):
                found.seed(seed)
                break
        return tuple(self._env.reset())

    def _step(self) -> tuple[Any, Any]:
        time_step = self._env.step(self._draw_from_spec(self._env.action_spec()))
        return tuple(time_step), time_step.last()

    def _draw_from_spec(self, spec: Any) -> Any:
        """Draw an action from a dm_env spec, which may be nested in mappings and lists."""
        if isinstance(spec, Mapping):
            return {name: self._draw_from_spec(part) for name, part in spec.items()}
        if isinstance(spec, (list, tuple)):
            drawn = map(self._draw_from_spec, spec)
            return tuple(drawn) if isinstance(spec, tuple) else list(drawn)
        low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
        return sample_between(self._rng, low, high, spec.shape, spec.dtype)


class _Robosuite(Driver):
    """Driver of robosuite's environments and their wrappers."""

    def _reset(self, seed: int | None) -> Any:
        if seed is not None and isinstance(getattr(self._env, "rng", None), np.random.Generator):
            # Seed in place, because placement samplers refer to the same generator. Older versions use a global one.
            self._env.rng.bit_generator.state = type(self._env.rng.bit_generator)(seed).state
        return self._env.reset()

    def _step(self) -> tuple[Any, Any]:
        low, high = self._env.action_spec
        *result, _ = self._env.step(sample_between(self._rng, low, high, np.shape(low), np.float64))
        return result, result[2]


class _TorchRL(Driver):
    """Driver of ``torchrl.envs.EnvBase``."""

    def _reset(self, seed: int | None) -> Any:
        if seed is not None:
            with contextlib.suppress(NotImplementedError):
                self._env.set_seed(seed)
        self._data = self._env.reset()
        return self._data.to_dict()

    def _step(self) -> tuple[Any, Any]:
        torch = sys.modules["torch"]
        # Specs draw actions from torch's global generator, whose state must not change for the environment.
        device = self._env.device
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            torch.manual_seed(int(self._rng.integers(2**31)))
            drawn = self._env.rand_action(self._data)
        taken, self._data = self._env.step_and_maybe_reset(drawn)
        return {"next": taken.get("next").to_dict(), "root": self._data.to_dict()}, False


class _Vmas(Driver):
    """Driver of VMAS's ``Environment``."""

    def _reset(self, seed: int | None) -> Any:
        return self._env.reset(seed=seed)

    def _step(self) -> tuple[Any, Any]:
        *result, _ = self._env.step([self._draw_for_agent(agent) for agent in self._env.agents])
        result = copy_output(result)  # The resets may overwrite it.
        ended = result[2] if len(result) == 3 else result[2] | result[3]
        return [*result, [copy_output(self._env.reset_at(int(index))) for index in ended.nonzero()]], False

    def _draw_for_agent(self, agent: Any) -> Any:
        """Draw an action of one agent for each environment, as a tensor."""
        space = self._env.get_agent_action_space(agent)
        drawn = np.stack([self._draw(space, agent.name) for _ in range(self._env.num_envs)])
        return sys.modules["torch"].as_tensor(drawn, device=self._env.device)


_DRIVERS: dict[str, Callable[[Any, np.random.Generator], Driver]] = {
    "torchrl.envs.common:EnvBase": _TorchRL,
    "vmas.simulator.environment.environment:Environment": _Vmas,
    "gymnasium.core:Env": GymnasiumDriver,
    "pettingzoo.utils.env:AECEnv": _PettingZooAEC,
    "pettingzoo.utils.env:ParallelEnv": _PettingZooParallel,
    "dm_env._environment:Environment": _DmEnv,
    "robosuite.environments.base:MujocoEnv": _Robosuite,
    "robosuite.wrappers.wrapper:Wrapper": _Robosuite,
}
