"""Train a recurrent DQN on a task that needs memory, with SB3's DQN and the compressed replay buffer.

RecurrentDQN is R2D2 without its distributed actors and priorities: an LSTM before the Q-values, stored LSTM states, and
burn-in. Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR 2019.

The task is a T-maze in images. Only the first image shows which way to turn at the end. This trains DQN and
RecurrentDQN with the same budget, and prints their success rates:

    python examples/recurrent_dqn.py [--steps 16000] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sb3_ext import CompressedReplayBuffer


class RecurrentQNetwork(QNetwork):
    """Q-network with an LSTM between the features extractor and the head; it has one unit per feature."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lstm = nn.LSTM(self.features_dim, self.features_dim, batch_first=True)

    def forward(self, obs: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:  # type: ignore[override]
        """
        Return the Q-values of sequences, and the LSTM states after them.

        :param obs: Observations, ``(batch, steps, *obs_shape)``
        :param states: LSTM states before the first step, ``(2, batch, units)``
        :return: Q-values, ``(batch, steps, n_actions)``, and states, ``(2, batch, units)``
        """
        outputs, states_after = self.lstm(self._features(obs), (states[:1], states[1:]))
        return self.q_net(outputs), th.cat(states_after)

    @th.no_grad()
    def burn_in(self, obs: th.Tensor, states: th.Tensor, n_steps: th.Tensor) -> th.Tensor:
        """Return the LSTM states after the first ``n_steps`` steps of each sequence, without gradients."""
        features = self._features(obs[:, : int(n_steps.max())])
        for step in range(features.shape[1]):
            _, states_after = self.lstm(features[:, step : step + 1], (states[:1], states[1:]))
            states = th.where((step < n_steps)[:, None], th.cat(states_after), states)
        return states

    def _features(self, obs: th.Tensor) -> th.Tensor:
        """Extract the features of sequences, ``(batch, steps, units)``."""
        return self.extract_features(obs.flatten(0, 1), self.features_extractor).unflatten(0, obs.shape[:2])


class RecurrentDQNPolicy(DQNPolicy):
    """DQN's policy with recurrent Q-networks. Observations are arrays, not dicts."""

    def make_q_net(self) -> RecurrentQNetwork:
        """Create a Q-network with a features extractor of its own."""
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        return RecurrentQNetwork(**arguments).to(self.device)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[np.ndarray, Any]:
        """Return the greedy actions, and the LSTM states after the observations, ``(2, n_envs, units)``."""
        self.set_training_mode(False)
        obs, is_batch = self.obs_to_tensor(observation)
        if state is None:
            state = np.zeros((2, len(obs), self.q_net.features_dim), np.float32)
        if episode_start is not None:
            state = np.where(np.reshape(episode_start, (-1, 1)), np.float32(0), state)
        with th.no_grad():
            q_values, states_after = self.q_net(obs.unsqueeze(1), th.as_tensor(state, device=self.device))
        actions = q_values[:, 0].argmax(dim=1).cpu().numpy()
        return (actions if is_batch else actions[0]), states_after.cpu().numpy()


class RecurrentReplayBuffer(CompressedReplayBuffer):
    """
    Replay buffer that also stores the LSTM states before each step.

    :ivar lstm_states: States, ``(buffer_size, n_envs, 2, units)``, float32. They are in memory, not in ``storage_dir``
    """

    lstm_states: np.ndarray

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("storage_dir") is not None:
            raise ValueError("storage_dir cannot contain LSTM states. Leave it out of replay_buffer_kwargs")
        super().__init__(*args, **kwargs)


class RecurrentDQN(DQN):
    """
    DQN with an LSTM, for environments whose observations do not show everything.

    :param policy: Policy class, such as ``RecurrentDQNPolicy``
    :param env: Environment, or several in a VecEnv
    :param sequence_length: Number of consecutive steps to learn from, at least as many as must be remembered
    :param burn_in: Number of steps before these, which bring stored LSTM states up to date
    :param kwargs: Arguments of DQN. ``batch_size`` is the number of sequences
    """

    def __init__(self, policy: Any, env: Any, *, sequence_length: int = 16, burn_in: int = 4, **kwargs: Any) -> None:
        self.sequence_length, self.burn_in = sequence_length, burn_in
        super().__init__(policy, env, **{"replay_buffer_class": RecurrentReplayBuffer, **kwargs})

    def _setup_model(self) -> None:
        super()._setup_model()
        units = self.q_net.features_dim
        self._next_states = np.zeros((2, self.n_envs, units), np.float32)
        replay = self.replay_buffer
        replay.lstm_states = np.zeros((replay.buffer_size, self.n_envs, 2, units), np.float32)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[np.ndarray, Any]:
        """
        Choose actions, by epsilon-greedy unless ``deterministic``.

        :param observation: Observations, one per environment, or a single one
        :param state: LSTM states that the previous call returned; by default zeros
        :param episode_start: Whether each environment starts an episode, which sets its states to zero
        :param deterministic: Whether to choose greedy actions only
        :return: Actions, and LSTM states for the next call
        """
        actions, state = self.policy.predict(observation, state, episode_start)
        if not deterministic:
            is_random = np.random.rand(*actions.shape) < self.exploration_rate
            random = [self.action_space.sample() for _ in range(actions.size)]
            actions = np.where(is_random, np.reshape(random, actions.shape), actions)
        return actions, state

    def _sample_action(self, learning_starts: int, action_noise: Any = None, n_envs: int = 1) -> Any:
        """Choose actions. The LSTM also reads observations that random actions follow."""
        if self.num_timesteps < learning_starts:
            self.exploration_rate = 1.0
        self._states = np.where(self._last_episode_starts[:, None], np.float32(0), self._next_states)
        actions, self._next_states = self.predict(self._last_obs, self._states)
        return actions, actions

    def _store_transition(self, replay: Any, action: Any, new_obs: Any, reward: Any, dones: Any, infos: Any) -> None:
        """Store a transition of each environment, and the LSTM states before it."""
        replay.lstm_states[replay.pos] = self._states.swapaxes(0, 1)
        super()._store_transition(replay, action, new_obs, reward, dones, infos)
        self._last_episode_starts = dones

    def train(self, gradient_steps: int, batch_size: int = 32) -> None:
        """Learn from sequences, with double Q-learning."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample_sequences(
                batch_size, self.sequence_length, self.burn_in, env=self._vec_normalize_env
            )
            stored = self.replay_buffer.lstm_states[batch.rows, batch.envs].swapaxes(0, 1)
            states = th.as_tensor(stored, device=self.device)
            # The burn-in is shorter where an episode starts. The steps to learn from follow it.
            steps = batch.n_burn_in[:, None] + th.arange(self.sequence_length, device=self.device)
            learn = th.arange(batch_size, device=self.device)[:, None], steps
            mask, actions, next_obs = batch.mask[learn], batch.actions[learn], batch.next_observations[learn]
            # A step's next observation is the next step's observation: one pass gives the Q-values of both.
            obs = th.cat((batch.observations[learn][:, :1], next_obs), dim=1)
            q_values = self.q_net(obs, self.q_net.burn_in(batch.observations, states, batch.n_burn_in))[0]
            with th.no_grad():
                target_states = self.q_net_target.burn_in(batch.observations, states, batch.n_burn_in)
                target_q_values = self.q_net_target(obs, target_states)[0]
                next_actions = q_values[:, 1:].argmax(dim=2, keepdim=True)
                next_values = target_q_values[:, 1:].gather(2, next_actions)
                targets = batch.rewards[learn] + (1 - batch.dones[learn]) * self.gamma * next_values
            chosen = q_values[:, :-1].gather(2, actions.long())
            loss = F.smooth_l1_loss(chosen[mask], targets[mask])
            losses.append(loss.item())
            self.policy.optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))


class TMaze(gymnasium.Env):
    """
    T-maze in images of 24×24 pixels.

    The first image of an episode has a bright square at the top or at the bottom: the way to turn at the junction. The
    actions are forward, up and down. Turning at the junction ends the episode, with reward 1 if the way is right.
    """

    LENGTH, MAX_STEPS = 6, 30

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (1, 24, 24), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode at the left end of the corridor."""
        super().reset(seed=seed)
        self._place, self._steps, self._goal = 0, 0, int(self.np_random.integers(1, 3))
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move forward, or turn at the junction."""
        self._steps += 1
        at_junction = self._place == self.LENGTH - 1
        if action == 0 and not at_junction:
            self._place += 1
        is_right = bool(at_junction and action == self._goal)
        return self._draw(), float(is_right), at_junction, self._steps == self.MAX_STEPS, {}

    def _draw(self) -> np.ndarray:
        """Draw the corridor, the junction, the agent, and in the first image the goal."""
        image = np.zeros((1, 24, 24), np.uint8)
        image[0, 8:16] = image[0, :, 20:] = 80
        image[0, 8:16, 4 * self._place : 4 * self._place + 4] = 255
        if self._steps == 0:
            image[0, slice(0, 8) if self._goal == 1 else slice(16, 24), :20] = 255
        return image


class SmallCNN(BaseFeaturesExtractor):
    """Convolutional network for images of 24×24 pixels."""

    def __init__(self, observation_space: gymnasium.spaces.Box, features_dim: int = 64) -> None:
        super().__init__(observation_space, features_dim)
        self.layers = nn.Sequential(
            nn.Conv2d(observation_space.shape[0], 16, kernel_size=4, stride=4),  # 16 × 6 × 6
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 6 * 6, features_dim),
            nn.ReLU(),
        )

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """Return the features of images."""
        return self.layers(observations)


def make_model(algorithm: type[DQN], *, steps: int, seed: int, **options: Any) -> DQN:
    """Create DQN or RecurrentDQN for the T-maze."""
    arguments: dict[str, Any] = {
        "policy": RecurrentDQNPolicy if issubclass(algorithm, RecurrentDQN) else DQNPolicy,
        "env": make_vec_env(TMaze, n_envs=8, seed=seed),
        "learning_rate": 2e-3,
        "buffer_size": 20_000,
        "learning_starts": min(2000, steps // 2),
        "gamma": 0.9,
        "train_freq": 1,
        "target_update_interval": 500,
        "exploration_fraction": 0.25,
        "policy_kwargs": {"features_extractor_class": SmallCNN, "net_arch": [64]},
        "seed": seed,
        "device": "cpu",
    }
    return algorithm(**{**arguments, **options})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both algorithms, and print their success rates."""
    short = bool(os.environ.get("RL_EXT_SHORT"))
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=1000 if short else 16_000, help="environment steps of a training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    test_env = make_vec_env(TMaze, n_envs=8, seed=options.seed + 1000)
    # Both learn from as many transitions at each update.
    for algorithm, own_options in (
        (DQN, {"batch_size": 512, "replay_buffer_class": CompressedReplayBuffer}),
        (RecurrentDQN, {"batch_size": 64, "sequence_length": 8, "burn_in": 2}),
    ):
        model = make_model(algorithm, steps=options.steps, seed=options.seed, **own_options)
        model.learn(options.steps, progress_bar=True)
        rewards, _ = evaluate_policy(model, test_env, 20 if short else 400, return_episode_rewards=True)
        print(f"{algorithm.__name__}: success rate {np.mean(rewards):.2f} after {options.steps:,} steps")


if __name__ == "__main__":
    main()
