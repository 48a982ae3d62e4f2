"""Stable Baselines3's algorithms on tensors: rollouts and replay buffers stay on the environment's device.

    from sb3_ext import GymVecEnv
    from sb3_ext.tensor import PPO  # in place of stable_baselines3's

    model = PPO("MlpPolicy", GymVecEnv(my_isaac_lab_env, tensors=True), n_steps=24, batch_size=24 * 4096 // 4)

The classes replace the code of Stable Baselines3 that handles arrays, and inherit the rest: losses, policies, options,
callbacks, logs and files. With the same seed, their weights are those of Stable Baselines3, except for the order of
additions. On the CPU, it differs in the statistics of ``TensorVecNormalize`` for more than 15 environments. On other
devices, it also differs where a time limit ends episodes: their values are predicted at once, instead of one by one.
Environments on arrays work too. Source: https://github.com/DLR-RM/stable-baselines3/issues/314
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common import type_aliases as types
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import (
    BaseBuffer,
    DictReplayBuffer,
    DictRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError, OutOfMemoryError
from rl_ext_core.vector.array_frameworks import leaves, map_arrays, take_rows, to_numpy
from sb3_ext import _tensor_vec_env as vec_envs
from sb3_ext._compat import without_validation
from sb3_ext._distributed import DataParallel
from sb3_ext._tensor_vec_env import TensorVecEnv, TensorVecNormalize
from sb3_ext._vector_steps import TensorInfos, expand, torch_dtype

__all__ = [
    "A2C",
    "DQN",
    "PPO",
    "SAC",
    "TD3",
    "TensorReplayBuffer",
    "TensorRolloutBuffer",
    "TensorVecEnv",
    "TensorVecNormalize",
]

if not hasattr(sb3.PPO, "dump_logs"):
    raise MissingDependencyError(
        f"sb3_ext.tensor needs Stable Baselines3 2.6 or later, but {sb3.__version__} is installed. Install it with:\n"
        '    pip install "stable-baselines3>=2.6"'
    )

# Steps after which episode statistics are read from the device, if no log was written before.
_MAX_UNREAD_STEPS = 256


# -- buffers


def _zeros(space: Any, device: Any, steps: int, n_envs: int) -> Any:
    """Return zero tensors for observations of a space, a dict for a Dict."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(part, device, steps, n_envs) for key, part in space.spaces.items()}
    shape = (steps, n_envs, *((1,) if isinstance(space, spaces.Discrete) else space.shape))
    try:
        if device.type == "cpu":  # np.zeros takes memory when it is written, torch.zeros takes all at once
            return torch.from_numpy(np.zeros(shape, space.dtype))
        return torch.zeros(shape, dtype=torch_dtype(space.dtype), device=device)
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"{steps} steps of {n_envs} environments do not fit on {device}. Use buffer_size={steps * n_envs // 10}"
        ) from error


def _write(position: int, batch: torch.Tensor, value: Any) -> None:
    """Copy a tensor or array into a row of a buffer."""
    row, value = batch[position], torch.as_tensor(value)
    if value.shape[:1] != row.shape[:1] or value.numel() != row.numel():
        raise InvalidArgumentError(
            f"a part of the transition has shape {tuple(value.shape)}, expected {tuple(row.shape)}: one row per "
            "environment. Use a buffer that was made or saved with the same n_envs and spaces"
        )
    row.copy_(value.view_as(row))


class TensorRolloutBuffer(RolloutBuffer):
    """``RolloutBuffer`` and ``DictRolloutBuffer`` with tensors on one device.

    Attributes have the names and shapes of Stable Baselines3: ``observations``, (n_steps, n_envs, ...), and so on. They
    are tensors. As an exception, ``values`` and ``returns`` are arrays from the first call of :meth:`get` until the
    next rollout, because ``train()`` logs their variance by NumPy. Observations and actions are not copied when they
    are added.

    :param args, kwargs: see ``RolloutBuffer``
    """

    rewards: Any
    advantages: Any
    returns: Any
    episode_starts: Any
    log_probs: Any
    values: Any
    sum_over_ranks: Any = None  # function that adds up a tensor over all ranks, if it normalizes advantages

    def reset(self) -> None:
        """Discard the rollout."""
        self._rows: list[tuple[Any, Any]] = []  # observations and actions of steps that are not in _by_env
        self._by_env: dict[str, Any] = {}  # stacked, (n_envs, n_steps, ...)
        for name in ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages"):
            setattr(self, name, torch.zeros(self.buffer_size, self.n_envs, device=self.device))
        self.generator_ready = False
        BaseBuffer.reset(self)

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """Observations, (n_steps, n_envs, ...), after :meth:`get` (n_envs * n_steps, ...); None if there are none."""
        return self._stack_steps("observations")

    @property
    def actions(self) -> Any:  # type: ignore[override]
        """Actions, in the same form."""
        return self._stack_steps("actions")

    def _stack_steps(self, name: str) -> Any:
        """Stack observations or actions of all steps."""
        if self._rows:
            # All steps of an environment are contiguous, which is the order of minibatches.
            columns = zip(*self._rows, strict=True)
            stack = partial(map_arrays, lambda *parts: torch.stack(parts, 1))
            self._by_env = {key: stack(*rows) for key, rows in zip(("observations", "actions"), columns, strict=True)}
            self._rows = [] if self.full else self._rows
        join = (lambda part: part.flatten(0, 1)) if self.generator_ready else (lambda part: part.transpose(0, 1))
        return map_arrays(join, self._by_env[name]) if self._by_env else None

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Add a step: observations (n_envs, ...), actions, rewards, starts of episodes, values, log probabilities."""
        given = {"rewards": reward, "episode_starts": episode_start, "values": value, "log_probs": log_prob}
        for name, tensor in given.items():
            _write(self.pos, getattr(self, name), tensor)
        row = map_arrays(lambda part: torch.as_tensor(part, device=self.device), obs)
        row = map_arrays(lambda part: part.view(-1, 1) if part.ndim == 1 else part, row)
        self._rows.append((row, torch.as_tensor(action, device=self.device).reshape(self.n_envs, self.action_dim)))
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        """Compute returns and advantages of the rollout.

        :param last_values: values of the observations after the last step, (n_envs,) or (n_envs, 1)
        :param dones: whether episodes ended in the last step, (n_envs,)
        """
        next_values = torch.cat([self.values[1:], last_values.detach().reshape(1, -1)])
        ends = torch.as_tensor(dones, device=self.device).float()
        next_non_terminal = 1.0 - torch.cat([self.episode_starts[1:], ends[None]])
        # The order of operations is that of RolloutBuffer, so that results are equal bit for bit.
        deltas = self.rewards + self.gamma * next_values * next_non_terminal - self.values
        factors = self.gamma * self.gae_lambda * next_non_terminal
        last_gae_lam: Any = 0
        for step, (delta, factor) in reversed([*enumerate(zip(deltas, factors, strict=True))]):
            last_gae_lam = delta + factor * last_gae_lam
            self.advantages[step] = last_gae_lam
        self.returns = self.advantages + self.values

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Iterate over minibatches, in the random order of Stable Baselines3."""
        assert self.full, "the rollout is incomplete"
        indices = torch.from_numpy(np.random.permutation(self.buffer_size * self.n_envs)).to(self.device)
        if not self.generator_ready:
            self._flatten()
        batches = torch.split(indices, batch_size or len(indices))
        if self.sum_over_ranks is None:
            yield from map(self._get_samples, batches)
            return
        # Advantages of each minibatch are normalized over all ranks, with two sums for all minibatches.
        parts = [self._columns["advantages"][batch].double() for batch in batches]
        sums = self.sum_over_ranks(
            torch.stack([torch.stack([part.new_tensor(len(part)), part.sum()]) for part in parts])
        )
        means = sums[:, 1] / sums[:, 0]
        squares = [(part - mean).square().sum() for part, mean in zip(parts, means, strict=True)]
        scales = (self.sum_over_ranks(torch.stack(squares)) / (sums[:, 0] - 1)).sqrt().float() + 1e-8
        for batch, mean, scale in zip(batches, means.float(), scales, strict=True):
            samples = self._get_samples(batch)
            yield samples._replace(advantages=(samples.advantages - mean) / scale)

    def _flatten(self) -> None:
        """Join the axes of environments and steps."""
        names = ("values", "log_probs", "advantages", "returns")
        self._columns = {name: getattr(self, name).T.reshape(-1) for name in names}
        for name, column in self._columns.items():
            flat = column.view(-1, 1)
            setattr(self, name, to_numpy(flat) if name in ("values", "returns") else flat)
        self.generator_ready = True
        self._columns |= {name: self._stack_steps(name) for name in ("observations", "actions")}

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> Any:
        """Return the samples of some indices, a tensor."""
        *columns, observations, actions = (
            map_arrays(lambda part: part.index_select(0, batch_inds), column) for column in self._columns.values()
        )
        kind: Any = types.DictRolloutBufferSamples if isinstance(observations, dict) else types.RolloutBufferSamples
        return kind(observations, actions.float(), *columns)


class TensorReplayBuffer(ReplayBuffer):
    """``ReplayBuffer`` and ``DictReplayBuffer`` with tensors on one device.

    Attributes have the names and shapes of Stable Baselines3, and are tensors. ``n_steps`` of an algorithm and
    ``optimize_memory_usage`` are not supported.

    :param args, kwargs: see ``ReplayBuffer``
    :raises InvalidArgumentError: If ``optimize_memory_usage`` is set.
    :raises OutOfMemoryError: If the observations do not fit.
    """

    observations: Any
    next_observations: Any
    actions: Any
    rewards: Any
    dones: Any
    timeouts: Any

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ) -> None:
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if optimize_memory_usage:
            raise InvalidArgumentError(
                "optimize_memory_usage=True is not supported on tensors, expected False. Leave it out, or use "
                "sb3_ext.CompressedReplayBuffer with stable_baselines3's algorithm"
            )
        self.optimize_memory_usage, self.handle_timeout_termination = False, handle_timeout_termination
        self.buffer_size = size = max(buffer_size // n_envs, 1)
        self.observations = _zeros(observation_space, self.device, size, n_envs)
        self.next_observations = _zeros(observation_space, self.device, size, n_envs)
        dtype = torch_dtype(np.dtype(self._maybe_cast_dtype(action_space.dtype)))
        self.actions = torch.zeros(size, n_envs, self.action_dim, dtype=dtype, device=self.device)
        self.rewards, self.dones, self.timeouts = (torch.zeros(size, n_envs, device=self.device) for _ in range(3))

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add a transition of each environment.

        :param infos: infos of an environment on tensors, or a list of dicts
        """
        map_arrays(partial(_write, self.pos), self.observations, obs)
        map_arrays(partial(_write, self.pos), self.next_observations, next_obs)
        given = {"actions": action, "rewards": reward, "dones": done}
        if self.handle_timeout_termination:
            given["timeouts"] = (
                infos.truncated
                if isinstance(infos, TensorInfos)
                else np.array([info.get("TimeLimit.truncated", False) for info in infos])
            )
        for name, tensor in given.items():
            _write(self.pos, getattr(self, name), tensor)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def _get_samples(self, batch_inds: np.ndarray[Any, Any], env: Any = None) -> Any:
        """Return transitions of random environments at some positions."""
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        rows = torch.from_numpy(batch_inds * self.n_envs + env_indices).to(self.device)

        def select(part: torch.Tensor) -> torch.Tensor:
            """Return the rows of a tensor."""
            return part.flatten(0, 1).index_select(0, rows)

        observations, following = (
            self._normalize_obs(map_arrays(select, part), env) for part in (self.observations, self.next_observations)
        )
        rewards = select(self.rewards).view(-1, 1)
        kind: Any = types.DictReplayBufferSamples if isinstance(observations, dict) else types.ReplayBufferSamples
        return kind(
            observations,
            select(self.actions),
            following,
            (select(self.dones) * (1 - select(self.timeouts))).view(-1, 1),
            rewards if env is None else env.normalize_reward(rewards),
        )

    def to_arrays(self) -> ReplayBuffer:
        """Copy the transitions to a ``ReplayBuffer`` or ``DictReplayBuffer``."""
        kind = DictReplayBuffer if isinstance(self.observation_space, spaces.Dict) else ReplayBuffer
        found = kind.__new__(kind)
        vars(found).update({name: _map_data(vec_envs.copy_to_array, value) for name, value in vars(self).items()})
        return found

    @classmethod
    def from_arrays(cls, buffer: ReplayBuffer, device: torch.device) -> TensorReplayBuffer:
        """Copy the transitions of a ``ReplayBuffer`` or ``DictReplayBuffer`` to a device.

        :raises InvalidTypeError: If it is a buffer of another class.
        """
        if type(buffer) not in (ReplayBuffer, DictReplayBuffer) or buffer.optimize_memory_usage:
            raise InvalidTypeError(
                f"cannot read a {type(buffer).__name__}, expected a ReplayBuffer or DictReplayBuffer without "
                "optimize_memory_usage. Use the algorithm of stable_baselines3"
            )
        found = cls.__new__(cls)
        copy = partial(_map_data, partial(torch.tensor, device=device))
        vars(found).update({name: copy(value) for name, value in vars(buffer).items()}, device=device)
        return found


def _map_data(function: Any, value: Any) -> Any:
    """Apply a function to a tensor or array, or to a dict of them; return other values as is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return function(value)
    if isinstance(value, dict) and all(isinstance(part, torch.Tensor | np.ndarray) for part in value.values()):
        return {key: function(part) for key, part in value.items()}
    return value


# -- algorithms


class _TensorAlgorithm(BaseAlgorithm):
    """Methods that all algorithms share: environments, predictions, episode statistics and files."""

    uses_tensors = True
    _world = 1  # number of processes that train one policy
    policy: Any
    env: Any
    _last_obs: Any
    _last_original_obs: Any
    _last_episode_starts: Any
    _action_bounds: Any = None
    _clip_bounds: Any
    _unread: list[Any]  # episode statistics of the last steps, on the device

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Convert an environment to a ``VecEnv`` on tensors."""
        vec_envs.check_layers(env)
        on_tensors = getattr(env, "tensors", False)
        return env if on_tensors else TensorVecEnv(BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper))

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict actions as an array, from arrays or tensors of observations."""
        return super().predict(map_arrays(to_numpy, observation), *args, **kwargs)

    def _on_device(self, observation: Any) -> Any:
        """Return observations on the device of the policy."""
        return map_arrays(lambda part: torch.as_tensor(part, device=self.device), observation)

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bounds of actions as tensors."""
        if self._action_bounds is None:
            space: Any = self.action_space
            low, high = (torch.tensor(bound, device=self.device) for bound in (space.low, space.high))
            self._action_bounds = self._clip_bounds = low, high
            if space.dtype == np.float32 and np.ptp(space.low) == np.ptp(space.high) == 0:
                # Clipping to two numbers takes a third of the time, with the same results.
                self._clip_bounds = float(space.low.flat[0]), float(space.high.flat[0])
        return self._action_bounds  # type: ignore[no-any-return]

    def _to_env_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """Scale or clip actions of the policy to the action space."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        low, high = self._bounds()
        if self.policy.squash_output:
            return low + (0.5 * (actions + 1.0) * (high - low))
        return torch.clamp(actions, *self._clip_bounds)

    def _reset_sde_noise(self, step: int | None = None) -> None:
        """Draw noise of state-dependent exploration, before a rollout or if it is due in a step."""
        is_due = step is None or (self.sde_sample_freq > 0 and step % self.sde_sample_freq == 0)
        if self.use_sde and is_due:
            with without_validation():
                getattr(self, "actor", self.policy).reset_noise(self.n_envs)

    # -- episode statistics

    def _update_info_buffer(self, infos: Any, dones: Any = None) -> None:
        """Store the episode statistics of a step on the device; those of environments on arrays are read."""
        if infos.returns is None:
            super()._update_info_buffer(infos, dones)
            self._episode_num += int(dones.sum()) if isinstance(self, _OffPolicy) else 0  # as in Stable Baselines3
            return
        missing = infos.missing if infos.final_observation is None else None
        self._unread.append((dones, infos.returns, infos.lengths, infos.success, infos.seconds, missing))
        if len(self._unread) >= _MAX_UNREAD_STEPS:
            self._read_episodes()

    def _read_episodes(self) -> None:
        """Copy episode statistics from the device to the buffers for logs.

        :raises EnvironmentOutputError: If the environment has lost last observations of episodes.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return
        dones, returns, lengths, successes, seconds, missing = zip(*unread, strict=True)
        steps, rows = torch.stack(dones).nonzero(as_tuple=True)
        unknown = torch.full_like(returns[0], torch.nan)
        known = [unknown if part is None else part for part in successes]
        columns = [torch.stack(parts)[steps, rows].double() for parts in (returns, lengths, known)]
        found = torch.stack([steps.double(), *columns], 1).tolist()  # one transfer
        if any(missing) and (errors := [missing[int(step)] for step, *_ in found if missing[int(step)]]):
            raise errors[0]()
        buffer: Any = self.ep_info_buffer
        for step, total, length, _ in found[-buffer.maxlen :]:  # it would drop the others
            buffer.append({"r": total, "l": int(length), "t": seconds[int(step)]})
        self.ep_success_buffer.extend(row[3] for row in found if row[3] == row[3])  # type: ignore[union-attr]
        self._episode_num += len(found) if isinstance(self, _OffPolicy) else 0

    def _end_rollout(self, goes_on: bool) -> bool:
        """Read the statistics of the rollout; return whether training goes on."""
        self._read_episodes()
        return goes_on

    def dump_logs(self, *args: Any) -> None:
        """Write the log."""
        self._read_episodes()
        super().dump_logs(*args)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_unread", "_action_bounds", "_clip_bounds"]

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the model to a file that Stable Baselines3 loads too: last observations are saved as arrays."""
        self._read_episodes()
        tensors = {name: value for name, value in vars(self).items() if name.startswith("_last_")}
        vars(self).update({name: _map_data(vec_envs.copy_to_array, value) for name, value in tensors.items()})
        try:
            super().save(*args, **kwargs)
        finally:
            vars(self).update(tensors)


def _choose_buffer(given: Any, ours: type, plain: tuple[type, ...]) -> type:
    """Return the user's buffer class; ``ours`` if it is None, or one of Stable Baselines3 from a saved file."""
    if given is None or given in plain:
        return ours
    if not issubclass(given, ours):
        raise InvalidArgumentError(
            f"{given.__name__} stores arrays, expected {ours.__name__} or a subclass. Leave it out, or use the "
            "algorithm of stable_baselines3 over GymVecEnv(env)"
        )
    return given  # type: ignore[no-any-return]


class _OnPolicy(_TensorAlgorithm, OnPolicyAlgorithm):
    """Rollouts of PPO and A2C on tensors."""

    def _setup_model(self) -> None:
        """Create policy and rollout buffer."""
        self._unread = []
        given = self.rollout_buffer_class  # saved files contain the user's choice
        self.rollout_buffer_class = _choose_buffer(given, TensorRolloutBuffer, (RolloutBuffer, DictRolloutBuffer))
        super()._setup_model()
        self.rollout_buffer_class = given

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorCriticPolicy") -> None:
        """Do nothing. The advice is for environments on arrays."""

    def collect_rollouts(self, env: Any, callback: BaseCallback, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """Collect a rollout on the device. The callback's ``locals`` are those of Stable Baselines3, with tensors."""
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        n_steps, time_outs = 0, []
        rollout_buffer.reset()
        self._reset_sde_noise()
        callback.on_rollout_start()
        while n_steps < n_rollout_steps:
            self._reset_sde_noise(n_steps)
            with torch.no_grad(), without_validation():
                obs_tensor = self._on_device(self._last_obs)
                actions, values, log_probs = self.policy(obs_tensor)
            clipped_actions = self._to_env_actions(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs * self._world
            callback.update_locals(vec_envs.locals_for_callbacks(locals()))
            if not callback.on_step():
                return self._end_rollout(False)
            self._update_info_buffer(infos, dones)
            time_outs += infos.copy_time_outs(n_steps)
            n_steps += 1
            rollout_buffer.add(obs_tensor, actions, rewards, self._last_episode_starts, values, log_probs)
            self._last_obs, self._last_episode_starts = new_obs, dones
        self._add_values_of_time_outs(rollout_buffer, time_outs)
        with torch.no_grad():
            values = self.policy.predict_values(self._on_device(new_obs))
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        goes_on = self._end_rollout(True)
        callback.update_locals(vec_envs.locals_for_callbacks(locals()))
        callback.on_rollout_end()
        return goes_on

    def _add_values_of_time_outs(self, rollout_buffer: Any, time_outs: Sequence[Any]) -> None:
        """Add discounted values of last observations to rewards of steps that a time limit ended.

        Stable Baselines3 predicts these values one by one. The same is done here on the CPU, because products of
        larger matrices add up in another order, and weights would differ. Other devices predict all at once.

        :param time_outs: results of ``TensorInfos.copy_time_outs``
        """
        has_masks = len(time_outs) and time_outs[0][1].dtype == torch.bool
        found = _select_time_outs(time_outs) if has_masks else time_outs
        if not found:
            return
        steps = torch.tensor([step for step, rows, _ in found for _ in range(len(rows))], device=self.device)
        rows = torch.cat([rows for _, rows, _ in found]).to(self.device)
        final = self._on_device(map_arrays(lambda *parts: torch.cat(parts), *(part for *_, part in found)))
        chunks = map_arrays(lambda part: part.unsqueeze(1).unbind() if part.is_cpu else (part,), final)
        if isinstance(final, dict):
            chunks = [dict(zip(chunks, parts, strict=True)) for parts in zip(*chunks.values(), strict=True)]
        with torch.no_grad():
            values = torch.cat([self.policy.predict_values(chunk) for chunk in chunks]).flatten()
        rollout_buffer.rewards[steps, rows] += self.gamma * values


def _select_time_outs(steps: Sequence[Any]) -> list[Any]:
    """Return steps with a time limit's end: number of the step, rows, and their last observations.

    :param steps: numbers of steps, whether each episode was truncated, (n,), and last observations, (n, ...)
    """
    ended = torch.stack([truncated for _, truncated, _ in steps])
    rows: Any = ended.nonzero()[:, 1]  # this waits for the device, once for all steps
    return [
        (step, part, map_arrays(partial(take_rows, rows=part), final))
        for (step, _, final), part in zip(steps, rows.split(ended.sum(1).tolist()), strict=True)
        if len(part)
    ]


class _OffPolicy(_TensorAlgorithm, OffPolicyAlgorithm):
    """Transitions of SAC, TD3 and DQN on tensors."""

    def _setup_model(self) -> None:
        """Create policy and replay buffer."""
        if self.n_steps > 1:
            raise InvalidArgumentError(
                f"n_steps={self.n_steps} is not supported on tensors, expected 1. Use the algorithm of "
                "stable_baselines3 over GymVecEnv(env)"
            )
        self._unread = []
        given = self.replay_buffer_class  # saved files contain the user's choice
        self.replay_buffer_class = _choose_buffer(given, TensorReplayBuffer, (ReplayBuffer, DictReplayBuffer))
        super()._setup_model()
        self.replay_buffer_class = given

    def save_replay_buffer(self, path: Any) -> None:
        """Save the replay buffer to a file that Stable Baselines3 loads too."""
        save_to_pkl(path, self.replay_buffer.to_arrays(), self.verbose)  # type: ignore[union-attr]

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Load a replay buffer of this class or of Stable Baselines3."""
        kind: Any = type(self.replay_buffer)
        self.replay_buffer = kind.from_arrays(load_from_pkl(path, self.verbose), self.device)

    def _end_rollout(self, goes_on: bool) -> bool:
        """Read the statistics of the rollout, except where that would wait for the device in each step."""
        is_cpu = next(leaves(self._last_obs)).is_cpu
        if not goes_on or is_cpu or self.num_timesteps >= self._total_timesteps:
            self._read_episodes()
        return goes_on

    def _choose_actions(self) -> torch.Tensor:
        """Return actions of the policy in the action space, with exploration."""
        self.policy.set_training_mode(False)
        with torch.no_grad(), without_validation():
            actions = self.policy._predict(self._on_device(self._last_obs), deterministic=False)
        return self._to_env_actions(actions.reshape(-1, *self.action_space.shape))  # type: ignore[misc]

    def _sample_action(self, learning_starts: int, action_noise: Any = None, n_envs: int = 1) -> Any:
        """Return actions for the environment, and actions to store, which are scaled to [-1, 1]."""
        if self.num_timesteps < learning_starts and not (self.use_sde and self.use_sde_at_warmup):
            actions = self._random_actions(n_envs)
        else:
            actions = self._choose_actions()
        if not isinstance(self.action_space, spaces.Box):
            return actions, actions
        low, high = self._bounds()
        scaled = 2.0 * ((actions - low) / (high - low)) - 1.0
        if action_noise is not None:
            scaled = torch.clamp(scaled + torch.as_tensor(action_noise(), device=self.device), -1, 1)
        return low + (0.5 * (scaled + 1.0) * (high - low)), scaled

    def _random_actions(self, count: int) -> torch.Tensor:
        """Return actions from the space's generator, which Stable Baselines3 uses too."""
        return torch.as_tensor(np.array([self.action_space.sample() for _ in range(count)]), device=self.device)

    def _store_transition(
        self, replay_buffer: Any, buffer_action: Any, new_obs: Any, reward: Any, dones: Any, infos: Any
    ) -> None:
        """Add a step to the replay buffer, without normalization and with last observations."""
        normalize: Any = self._vec_normalize_env
        if normalize is None:
            self._last_original_obs, original = self._last_obs, new_obs
        else:
            original, reward = normalize.get_original_obs(), normalize.get_original_reward()
        next_obs, final = original, infos.final_observation
        if final is not None:
            if normalize is not None:
                # As in Stable Baselines3, which knows only the normalized ones: they are clipped.
                final = normalize.unnormalize_obs(final)
            next_obs = map_arrays(
                lambda last, new: torch.where(expand(dones, new), last.to(new.dtype), new), final, original
            )
        replay_buffer.add(self._last_original_obs, next_obs, buffer_action, reward, dones, infos)
        self._last_obs = new_obs
        if normalize is not None:
            self._last_original_obs = original

    def collect_rollouts(
        self,
        env: Any,
        callback: BaseCallback,
        train_freq: types.TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: Any = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> types.RolloutReturn:
        """Collect steps on the device.

        The log is written at most once, after the last step. To find out whether it is due, the number of ended
        episodes is read from the device then. Action noise is computed on the CPU.
        """
        self.policy.set_training_mode(False)
        num_collected_steps, num_collected_episodes, episodes_before = 0, 0, self._episode_num
        by_episode = train_freq.unit == types.TrainFrequencyUnit.EPISODE
        assert train_freq.frequency > 0, "Should at least collect one step or episode."
        assert env.num_envs == 1 or not by_episode, "You must use only one env when doing episodic training."
        self._reset_sde_noise()
        callback.on_rollout_start()
        while should_collect_more_steps(train_freq, num_collected_steps, num_collected_episodes):
            self._reset_sde_noise(num_collected_steps)
            actions, buffer_actions = self._sample_action(learning_starts, action_noise, env.num_envs)
            new_obs, rewards, dones, infos = env.step(actions)
            self.num_timesteps += env.num_envs * self._world
            num_collected_steps += 1
            callback.update_locals(vec_envs.locals_for_callbacks(locals()))
            if not callback.on_step():
                goes_on = self._end_rollout(False)
                return types.RolloutReturn(num_collected_steps * env.num_envs, num_collected_episodes, goes_on)
            self._update_info_buffer(infos, dones)
            self._store_transition(replay_buffer, buffer_actions, new_obs, rewards, dones, infos)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()
            num_collected_episodes += int(dones) if by_episode else 0
            _reset_noise(action_noise, dones)
        goes_on = self._end_rollout(True)
        callback.on_rollout_end()
        if log_interval is not None:
            self._read_episodes()
            if self._episode_num // log_interval > episodes_before // log_interval:
                self.dump_logs()
        return types.RolloutReturn(num_collected_steps * env.num_envs, num_collected_episodes, goes_on)


def _reset_noise(noise: Any, dones: torch.Tensor) -> None:
    """Reset the noise of ended episodes, if its class has a state. That waits for the device."""
    base = noise.base_noise if isinstance(noise, VectorizedActionNoise) else noise
    if base is None or type(base) is NormalActionNoise:
        return
    rows = np.flatnonzero(to_numpy(dones)).tolist()
    if rows and isinstance(noise, VectorizedActionNoise):
        noise.reset(indices=rows)
    elif rows:
        noise.reset()


class PPO(DataParallel, _OnPolicy, sb3.PPO):  # type: ignore[misc]  # target_kl is a shared threshold in train()
    """PPO of Stable Baselines3 on tensors, with the same arguments, results and files.

    :param env: ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``; or an environment on arrays
    :raises InvalidTypeError: If ``env`` has a wrapper that works on arrays.
    """


class A2C(DataParallel, _OnPolicy, sb3.A2C):
    """A2C of Stable Baselines3 on tensors, with the same arguments, results and files.

    :param env: ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``; or an environment on arrays
    :raises InvalidTypeError: If ``env`` has a wrapper that works on arrays.
    """


class SAC(DataParallel, _OffPolicy, sb3.SAC):
    """SAC of Stable Baselines3 on tensors, with the same arguments, results and files.

    :param env: ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``; or an environment on arrays
    :raises InvalidTypeError: If ``env`` has a wrapper that works on arrays.
    """


class TD3(DataParallel, _OffPolicy, sb3.TD3):
    """TD3 of Stable Baselines3 on tensors, with the same arguments, results and files.

    :param env: ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``; or an environment on arrays
    :raises InvalidTypeError: If ``env`` has a wrapper that works on arrays.
    """


class DQN(DataParallel, _OffPolicy, sb3.DQN):
    """DQN of Stable Baselines3 on tensors, with the same arguments, results and files.

    :param env: ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``; or an environment on arrays
    :raises InvalidTypeError: If ``env`` has a wrapper that works on arrays.
    """

    def _choose_actions(self) -> torch.Tensor:
        """Return random actions at the exploration rate, else those of the policy."""
        if np.random.rand() < self.exploration_rate:
            return self._random_actions(self.n_envs)
        return super()._choose_actions()
