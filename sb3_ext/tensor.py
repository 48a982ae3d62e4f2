"""Stable Baselines3's algorithms on tensors: rollouts and replay buffers stay on the environment's device.

    from sb3_ext import GymVecEnv
    from sb3_ext.tensor import PPO  # in place of stable_baselines3's

    model = PPO("MlpPolicy", GymVecEnv(my_isaac_lab_env, tensors=True), n_steps=24, batch_size=24 * 4096 // 4)

The classes replace the code of Stable Baselines3 that handles arrays, and inherit the rest: losses, policies, options,
callbacks, logs and files. With the same seed, their weights are those of Stable Baselines3, except for the order of
additions. On the CPU, it differs in the statistics of ``TensorVecNormalize`` for more than 4 environments. On other
devices, it also differs where a time limit ends episodes: their values are predicted at once, instead of one by one.

``env`` is a ``GymVecEnv(..., tensors=True)``, also in ``TensorVecNormalize``, or an environment on arrays. A wrapper
that works on arrays around an environment on tensors raises :class:`~rl_ext_core.errors.InvalidTypeError`.

Source: https://github.com/DLR-RM/stable-baselines3/issues/314
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common import type_aliases as types
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError
from rl_ext_core.vector.array_frameworks import map_arrays, take_rows, to_numpy
from sb3_ext import _tensor_vec_env as vec_envs
from sb3_ext._compat import without_validation
from sb3_ext._distributed import DataParallel
from sb3_ext._tensor_buffers import TensorReplayBuffer, TensorRolloutBuffer
from sb3_ext._tensor_vec_env import TensorVecEnv, TensorVecNormalize
from sb3_ext._vector_steps import expand

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


class _TensorAlgorithm(DataParallel):
    """Methods that all algorithms share: environments, predictions, episode statistics and files."""

    uses_tensors = True
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
        return map_arrays(lambda part: torch.as_tensor(part, device=self.device), observation)

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
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

    def _setup_learn(self, *args: Any, **kwargs: Any) -> Any:
        """Start training, after the episodes of a rollout that was interrupted are counted."""
        self._read_episodes()
        return super()._setup_learn(*args, **kwargs)

    def _update_info_buffer(self, infos: Any, dones: Any = None) -> None:
        """Store the episode statistics of a step on the device; those of environments on arrays are read."""
        if infos.returns is None:
            ended = [info for info, done in zip(infos, dones.tolist(), strict=True) if done]
            episodes = [info["episode"] for info in infos if info.get("episode") is not None]
            successes = [info["is_success"] for info in ended if info.get("is_success") is not None]
            self._add_episodes(episodes, successes, len(ended))
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
        newest = found[-self._stats_window_size :]  # the window would drop the others
        episodes = [{"r": total, "l": int(length), "t": seconds[int(step)]} for step, total, length, _ in newest]
        self._add_episodes(episodes, [row[3] for row in found if row[3] == row[3]], len(found))

    def _end_rollout(self, goes_on: bool) -> bool:
        """Read the statistics of the rollout; return whether training goes on, on all ranks."""
        self._read_episodes()
        return self._exchange(goes_on)

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
        vars(self).update({name: vec_envs.map_data(vec_envs.copy_to_array, value) for name, value in tensors.items()})
        try:
            super().save(*args, **kwargs)
        finally:
            vars(self).update(tensors)


def _choose_buffer(given: Any, ours: type) -> Any:
    """Return the user's buffer class; ``ours`` if it is None, or one of Stable Baselines3 from a saved file."""
    if given is None or given.__module__ == ReplayBuffer.__module__:
        return ours
    if not issubclass(given, ours):
        raise InvalidArgumentError(
            f"{given.__name__} stores arrays, expected {ours.__name__} or a subclass. Leave it out, or use the "
            "algorithm of stable_baselines3 over GymVecEnv(env)"
        )
    return given


class _OnPolicy(_TensorAlgorithm, OnPolicyAlgorithm):
    """Rollouts of PPO and A2C on tensors."""

    def _setup_model(self) -> None:
        self._unread = []
        given = self.rollout_buffer_class  # saved files contain the user's choice
        self.rollout_buffer_class = _choose_buffer(given, TensorRolloutBuffer)
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
        self._unread = []
        given, n_steps = self.replay_buffer_class, getattr(self, "n_steps", 1)  # saved files contain the user's choice
        self.replay_buffer_class = _choose_buffer(given, TensorReplayBuffer)
        if n_steps > 1 and given is None:
            self.replay_buffer_kwargs.update(n_steps=n_steps, gamma=self.gamma)
            self.n_steps = 1  # SB3 warns that other classes of buffers ignore it
        super()._setup_model()
        self.replay_buffer_class, self.n_steps = given, n_steps

    def save_replay_buffer(self, path: Any) -> None:
        """Save the replay buffer to a file that Stable Baselines3 loads too.

        :raises InvalidArgumentError: If there are several ranks.
        """
        if self._world > 1:
            raise InvalidArgumentError(
                f"path={str(path)!r} would contain the transitions of one of {self._world} ranks: expected a file for "
                'each. Use save_to_pkl(f"buffer-{rank}.pkl", model.replay_buffer.to_arrays())'
            )
        save_to_pkl(path, self.replay_buffer.to_arrays(), self.verbose)  # type: ignore[union-attr]

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Load a replay buffer of this class or of Stable Baselines3."""
        kind: Any = type(self.replay_buffer)
        self.replay_buffer = kind.from_arrays(load_from_pkl(path, self.verbose), self.device)

    def _end_rollout(self, goes_on: bool) -> bool:
        """Read the statistics of the rollout, except where that would wait for the device in each step."""
        is_cpu = all(dones.is_cpu for dones, *_ in self._unread[:1])
        reads = not goes_on or is_cpu or self._world > 1 or self.num_timesteps >= self._total_timesteps
        return super()._end_rollout(goes_on) if reads else goes_on

    def _on_step(self) -> None:
        """Update the exploration rate and target network of DQN, whose interval counts the steps of all ranks."""
        self.n_envs *= self._world
        try:
            super()._on_step()
        finally:
            self.n_envs //= self._world

    def _choose_actions(self) -> torch.Tensor:
        """Return actions of the policy in the action space, with exploration."""
        self.policy.set_training_mode(False)
        # A copy, as in Stable Baselines3: a policy may change its input in place, and the buffer stores the original.
        observations = map_arrays(torch.clone, self._on_device(self._last_obs))
        with torch.no_grad(), without_validation():
            actions = self.policy._predict(observations, deterministic=False)
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


class PPO(_OnPolicy, sb3.PPO):
    """PPO of Stable Baselines3 on tensors, with the same arguments, results and files."""


class A2C(_OnPolicy, sb3.A2C):
    """A2C of Stable Baselines3 on tensors, with the same arguments, results and files."""


class SAC(_OffPolicy, sb3.SAC):
    """SAC of Stable Baselines3 on tensors, with the same arguments, results and files."""


class TD3(_OffPolicy, sb3.TD3):
    """TD3 of Stable Baselines3 on tensors, with the same arguments, results and files."""


class DQN(_OffPolicy, sb3.DQN):
    """DQN of Stable Baselines3 on tensors, with the same arguments, results and files."""

    def _choose_actions(self) -> torch.Tensor:
        """Return random actions at the exploration rate, else those of the policy."""
        if np.random.rand() < self.exploration_rate:
            return self._random_actions(self.n_envs)
        return super()._choose_actions()
