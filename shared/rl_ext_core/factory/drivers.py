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
        :return: Result of the environment without infos, as plain nested data.
        """
        return copy_plain_data(self._env.reset(seed=seed)[0])

    def step(self) -> Any:
        """Take a step with a random action. At the end of an episode, start the next one.

        :return: Results of the environment without infos, as plain nested data.
        """
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


def copy_plain_data(value: Any) -> Any:
    """Copy a result into nested dicts and lists, which later steps do not overwrite."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping) or hasattr(value, "batch_size"):  # A TensorDict is not a Mapping.
        return {key: copy_plain_data(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_plain_data(part) for part in value]
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return np.array(value)
    return value


class GymnasiumDriver(Driver):
    """Driver of ``gymnasium.Env``."""

    def step(self) -> Any:
        """Take a step with a random action. At the end of an episode, start the next one."""
        *result, _ = self._env.step(self._draw(self._env.action_space))
        if result[2] or result[3]:
            return [copy_plain_data(result), self.reset(None)]
        return copy_plain_data(result)


class _PettingZooAEC(Driver):
    """Driver of PettingZoo's ``AECEnv``, whose agents act in turn."""

    def reset(self, seed: int | None) -> Any:
        self._env.reset(seed=seed)
        return self._last()

    def step(self) -> Any:
        if not self._env.agents:
            return self.reset(None)
        agent = self._env.agent_selection
        observation, _, terminated, truncated, info = self._env.last()
        action = None
        if not (terminated or truncated):
            action = self._draw(self._env.action_space(agent), agent, _action_mask(observation, info))
        self._env.step(action)
        return self._last() if self._env.agents else []

    def _last(self) -> Any:
        """Return the selected agent with its observation, reward and end flags."""
        return [self._env.agent_selection, *copy_plain_data(self._env.last()[:4])]


class _PettingZooParallel(Driver):
    """Driver of PettingZoo's ``ParallelEnv``, whose agents act at the same time."""

    _returned: tuple[Any, Any] = ({}, {})

    def reset(self, seed: int | None) -> Any:
        self._returned = self._env.reset(seed=seed)
        return copy_plain_data(self._returned[0])

    def step(self) -> Any:
        if not self._env.agents:
            return self.reset(None)
        seen = {agent: [part.get(agent) for part in self._returned] for agent in self._env.agents}
        drawn = {a: self._draw(self._env.action_space(a), a, _action_mask(*parts)) for a, parts in seen.items()}
        *result, infos = self._env.step(drawn)
        self._returned = result[0], infos
        return copy_plain_data(result)


def _action_mask(observation: Any, info: Any) -> Any:
    """Return the ``action_mask`` in an info or observation, or None if all actions are allowed."""
    for holder in (info, observation):
        if isinstance(holder, Mapping) and holder.get("action_mask") is not None:
            return holder["action_mask"]
    return None


class _DmEnv(Driver):
    """Driver of ``dm_env.Environment``: dm_control's, dmlab2d's, and wrappers of them."""

    def reset(self, seed: int | None) -> Any:
        # dm_env has no seeds. dm_control's composer stores its generator in the environment, its suite in the task.
        for holder, name in ((self._env, "random_state"), (getattr(self._env, "task", None), "random")):
            found = getattr(holder, name, None)
            if seed is not None and isinstance(found, np.random.RandomState):
                found.seed(seed)
                break
        return copy_plain_data(tuple(self._env.reset()))

    def step(self) -> Any:
        time_step = self._env.step(self._draw_from_spec(self._env.action_spec()))
        if time_step.last():
            return [copy_plain_data(tuple(time_step)), self.reset(None)]
        return copy_plain_data(tuple(time_step))

    def _draw_from_spec(self, spec: Any) -> Any:
        """Draw an action from a dm_env spec, which may be nested in mappings and lists."""
        if isinstance(spec, Mapping):
            return {name: self._draw_from_spec(part) for name, part in spec.items()}
        if isinstance(spec, (list, tuple)):
            drawn = [self._draw_from_spec(part) for part in spec]
            return tuple(drawn) if isinstance(spec, tuple) else drawn
        low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
        return sample_between(self._rng, low, high, spec.shape, spec.dtype)


class _Robosuite(Driver):
    """Driver of robosuite's environments and their wrappers."""

    def reset(self, seed: int | None) -> Any:
        if seed is not None and isinstance(getattr(self._env, "rng", None), np.random.Generator):
            # Seed in place, because placement samplers refer to the same generator. Older versions use a global one.
            self._env.rng.bit_generator.state = type(self._env.rng.bit_generator)(seed).state
        return copy_plain_data(self._env.reset())

    def step(self) -> Any:
        low, high = self._env.action_spec
        *result, _ = self._env.step(sample_between(self._rng, low, high, np.shape(low), np.float64))
        return [copy_plain_data(result), self.reset(None)] if result[2] else copy_plain_data(result)


class _TorchRL(Driver):
    """Driver of ``torchrl.envs.EnvBase``."""

    _data: Any = None

    def reset(self, seed: int | None) -> Any:
        if seed is not None:
            with contextlib.suppress(NotImplementedError):
                self._env.set_seed(seed)
        self._data = self._env.reset()
        return copy_plain_data(self._data)

    def step(self) -> Any:
        if self._data is None:
            self._data = self._env.reset()
        torch = sys.modules["torch"]
        # Specs draw actions from torch's global generator, whose state must not change for the environment.
        device = self._env.device
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            torch.manual_seed(int(self._rng.integers(2**31)))
            drawn = self._env.rand_action(self._data)
        taken, self._data = self._env.step_and_maybe_reset(drawn)
        return [copy_plain_data(taken.get("next")), copy_plain_data(self._data)]


class _GymnasiumVector(Driver):
    """Driver of ``gymnasium.vector.VectorEnv``."""

    def step(self) -> Any:
        result = copy_plain_data(self._env.step(self._draw(self._env.action_space))[:4])
        ended = np.asarray(result[2]) | np.asarray(result[3])
        mode: Mapping[str, Any] = self._env.metadata or {}
        if ended.any() and getattr(mode.get("autoreset_mode"), "name", "") == "DISABLED":
            return [result, copy_plain_data(self._env.reset(options={"reset_mask": ended})[0])]
        return result


class _SB3Vector(Driver):
    """Driver of SB3's ``VecEnv``."""

    def reset(self, seed: int | None) -> Any:
        if seed is not None:
            self._env.seed(seed)
        return copy_plain_data(self._env.reset())

    def step(self) -> Any:
        drawn = [self._draw(self._env.action_space) for _ in range(self._env.num_envs)]
        return copy_plain_data(self._env.step(np.stack(drawn))[:3])


class _Vmas(Driver):
    """Driver of VMAS's ``Environment``."""

    def reset(self, seed: int | None) -> Any:
        return copy_plain_data(self._env.reset(seed=seed))

    def step(self) -> Any:
        *result, _ = self._env.step([self._draw_for_agent(agent) for agent in self._env.agents])
        result = copy_plain_data(result)
        ended = result[2] if len(result) == 3 else result[2] | result[3]
        again = [copy_plain_data(self._env.reset_at(int(index))) for index in ended.nonzero()]
        return [*result, again]

    def _draw_for_agent(self, agent: Any) -> Any:
        """Draw an action of one agent for each environment, as a tensor."""
        space = self._env.get_agent_action_space(agent)
        drawn = np.stack([self._draw(space, agent.name) for _ in range(self._env.num_envs)])
        return sys.modules["torch"].as_tensor(drawn, device=self._env.device)


_DRIVERS: dict[str, Callable[[Any, np.random.Generator], Driver]] = {
    "torchrl.envs.common:EnvBase": _TorchRL,
    "gymnasium.vector.vector_env:VectorEnv": _GymnasiumVector,
    "stable_baselines3.common.vec_env.base_vec_env:VecEnv": _SB3Vector,
    "vmas.simulator.environment.environment:Environment": _Vmas,
    "gymnasium.core:Env": GymnasiumDriver,
    "pettingzoo.utils.env:AECEnv": _PettingZooAEC,
    "pettingzoo.utils.env:ParallelEnv": _PettingZooParallel,
    "dm_env._environment:Environment": _DmEnv,
    "robosuite.environments.base:MujocoEnv": _Robosuite,
    "robosuite.wrappers.wrapper:Wrapper": _Robosuite,
}
