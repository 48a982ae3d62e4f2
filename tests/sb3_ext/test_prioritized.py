from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN, TQC, CrossQ
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from sb3_ext import (
    CompressedHerReplayBuffer,
    CompressedPrioritizedDictReplayBuffer,
    CompressedPrioritizedHerReplayBuffer,
    CompressedPrioritizedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    critic_hooks,
    register_critic,
)
from tests.sb3_ext.buffer_envs import (
    TransitionSource,
    add_all,
    collect_transitions,
    dict_env,
    image_env,
    make_reach_vec_env,
    repeating_in_thread,
    without_logger,
)

BATCH = 32  # dividing by a power of two is exact
IMAGE = spaces.Box(0, 255, (1, 6, 6), np.uint8)
ACTIONS = spaces.Discrete(3)


def make_model(cls: Any, env: Any, policy: str = "MlpPolicy", **options: Any) -> Any:
    defaults = {"learning_starts": 40, "buffer_size": 400, "batch_size": BATCH, "train_freq": 4, "gradient_steps": 1}
    options = {**defaults, "replay_buffer_class": CompressedPrioritizedReplayBuffer, **options}
    return without_logger(cls(policy, env, seed=0, device="cpu", policy_kwargs={"net_arch": [16]}, **options))


def make_buffer(n: int = 64, *, n_envs: int = 2, cls: Any = CompressedPrioritizedReplayBuffer, **options: Any) -> Any:
    return cls(n, IMAGE, ACTIONS, "cpu", n_envs=n_envs, **options)


def fill(buffer: Any, n_steps: int) -> None:
    source = TransitionSource(buffer.observation_space, buffer.action_space, buffer.n_envs)
    add_all([buffer], [source.step() for _ in range(n_steps)])


def mse_loss(given: th.Tensor, target: th.Tensor, weights: th.Tensor) -> th.Tensor:
    return (weights.view(-1, 1) * (given - target) ** 2).mean()


def smooth_l1_loss(given: th.Tensor, target: th.Tensor, weights: th.Tensor) -> th.Tensor:
    return (weights.view(-1, 1) * th.nn.functional.smooth_l1_loss(given, target, reduction="none")).mean()


def quantile_huber_loss(given: th.Tensor, target: th.Tensor, weights: th.Tensor) -> th.Tensor:
    """Return sb3-contrib's loss, weighted; its sum over the quantiles only for QR-DQN."""
    n = given.shape[-1]
    taus = ((th.arange(n) + 0.5) / n).view(*[1] * (given.ndim - 1), -1, 1)
    delta = target.unsqueeze(-2) - given.unsqueeze(-1)
    huber = th.where(delta.abs() > 1, delta.abs() - 0.5, delta**2 * 0.5)
    losses = (taus - (delta.detach() < 0).float()).abs() * huber
    losses = losses.sum(dim=-2) if given.ndim == 2 else losses
    return (weights.view(-1, *[1] * (losses.ndim - 1)) * losses).mean()


def make_rich() -> Any:
    """Make CartPole whose errors exceed 1, above which DQN's loss is linear."""
    return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: 100 * reward)


def make_normalized() -> VecNormalize:
    return VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]))


CASES: dict[str, tuple[Any, str, str, Any, int, dict[str, Any]]] = {
    "dqn": (DQN, make_rich, "F.smooth_l1_loss", smooth_l1_loss, 1, {"max_grad_norm": 0.5, "gradient_steps": 2}),
    "sac": (SAC, "Pendulum-v1", "F.mse_loss", mse_loss, 2, {}),
    "td3": (TD3, "Pendulum-v1", "F.mse_loss", mse_loss, 2, {"policy_delay": 2}),
    "ddpg": (DDPG, "Pendulum-v1", "F.mse_loss", mse_loss, 1, {}),
    "crossq": (CrossQ, "Pendulum-v1", "F.mse_loss", mse_loss, 2, {"policy_delay": 2}),
    "qrdqn": (QRDQN, "CartPole-v1", "quantile_huber_loss", quantile_huber_loss, 1, {}),
    "tqc": (TQC, "Pendulum-v1", "quantile_huber_loss", quantile_huber_loss, 1, {}),
}


def weight_explicitly(monkeypatch: Any, name: str, model: Any, loss_name: str, loss: Any, n_losses: int) -> None:
    """Replace an algorithm's loss by one that is weighted, and that updates the priorities itself."""
    owner = next(cls for cls in type(model).__mro__ if "train" in vars(cls))
    monkeypatch.setitem(critic_hooks._CRITICS, f"{owner.__module__}.{owner.__qualname__}", None)
    scale = 0.5 if name in ("sac", "crossq") else 1.0
    errors: list[th.Tensor] = []

    def weighted_loss(given: th.Tensor, target: th.Tensor, **options: Any) -> th.Tensor:
        buffer = model.replay_buffer
        plain = given.detach().clone().requires_grad_()
        (gradient,) = th.autograd.grad(scale * loss(plain, target, th.ones(BATCH)), plain)
        found = gradient.abs().flatten(1).sum(dim=1) * BATCH
        errors.append((given - target).detach().abs().flatten() if name == "dqn" else found)
        result = loss(given, target, th.from_numpy(buffer.importance_weights))
        if len(errors) == n_losses:
            buffer.update_priorities(th.stack(errors).mean(dim=0).numpy())
            errors.clear()
        return result

    module = __import__(owner.__module__, fromlist=["F"])
    if loss_name.startswith("F."):
        functional = type("Functional", (), {**vars(module.F), loss_name[2:]: staticmethod(weighted_loss)})
        monkeypatch.setattr(module, "F", functional)
    else:
        monkeypatch.setattr(module, loss_name, weighted_loss)


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_an_explicitly_weighted_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, env, loss_name, loss, n_losses, options = CASES[name]
    # Other losses compute their gradients in another order, so the last bits differ.
    exact = name in ("dqn", "sac", "td3", "ddpg")
    steps = 120 if exact else 60

    def make() -> Any:
        return make_model(cls, env() if callable(env) else env, **options)

    models = [make().learn(steps), make()]
    weight_explicitly(monkeypatch, name, models[1], loss_name, loss, n_losses)
    models[1].learn(steps)
    ours, theirs = (model.policy.state_dict() for model in models)
    priorities = [model.replay_buffer.priorities[: steps + 1] for model in models]
    assert np.unique(priorities[0]).size > 20
    assert name != "dqn" or priorities[0].max() > 50
    if exact:
        assert all(th.equal(ours[key], theirs[key]) for key in ours)
        assert np.array_equal(*priorities)
    else:
        assert all(th.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-5) for key in ours)
        np.testing.assert_allclose(*priorities, rtol=1e-3)


@pytest.mark.parametrize(
    ("beta", "exponent"), [(lambda progress: 1.0 - progress / 2, 0.875), (0.4, 0.85)], ids=["a schedule", "a number"]
)
def test_transitions_are_drawn_and_weighted_by_priority(beta: Any, exponent: float) -> None:
    buffer = make_buffer(200, n_envs=2, alpha=0.7, beta=beta)
    buffer._progress_remaining = 0.25
    fill(buffer, 100)
    buffer.actions[...] = np.arange(200).reshape(100, 2, 1)
    buffer._batch = np.arange(200), buffer._observations.store.seen
    buffer.update_priorities(np.arange(200))
    masses = (np.arange(200) + 1e-6) ** 0.7
    batch = buffer.sample(64)
    expected = masses[batch.actions.numpy().ravel()] ** -exponent
    np.testing.assert_allclose(buffer.importance_weights, expected / expected.max(), rtol=1e-3)
    counts = np.bincount(np.concatenate([buffer.sample(64).actions.numpy().ravel() for _ in range(300)]), minlength=200)
    np.testing.assert_allclose(counts, 300 * 64 * masses / masses.sum(), atol=25)


def test_transitions_overwritten_after_sample_keep_the_new_priority() -> None:
    buffer = make_buffer(20, n_envs=2)
    fill(buffer, 10)
    buffer._batch = np.arange(20), buffer._observations.store.seen
    fill(buffer, 3)
    buffer.update_priorities(np.full(20, 5.0))
    assert (buffer.priorities[:3] == 1).all()
    assert (buffer.priorities[3:] == np.float32(5 + 1e-6)).all()
    fill(buffer, 1)
    assert (buffer.priorities[3] == np.float32(5 + 1e-6)).all()  # new ones get the largest


def test_loaded_buffer_has_the_same_weights_for_any_largest_priority() -> None:
    buffer = make_buffer(200)
    for step in range(1, 100):
        fill(buffer, 1)  # gets the largest priority so far
        buffer.sample(1)
        buffer.update_priorities([1 + step / 97])
    assert np.array_equal(pickle.loads(pickle.dumps(buffer))._tree.weights, buffer._tree.weights)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 42_000}], ids=["ring", "max_bytes"])
def test_only_stored_transitions_are_drawn(options: dict[str, Any]) -> None:
    buffer = make_buffer(600, n_envs=2, **options)
    for n in (1, 7, 100, 150, 300, 20):
        fill(buffer, n)
        stored = np.zeros((300, 2), dtype=bool)
        stored[(buffer.pos - buffer.size() + np.arange(buffer.size())) % 300] = True
        assert np.array_equal(buffer._tree.weights.reshape(300, 2) > 0, stored)
        assert np.array_equal(buffer.priorities > 0, stored)
        buffer.sample(16)
    assert (buffer.size() < 300) == bool(options)
    buffer.reset()
    assert buffer._tree.total == 0
    with pytest.raises(ValueError, match="the buffer is empty"):
        buffer.sample(4)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 60_000}], ids=["ring", "max_bytes"])
def test_hindsight_draws_complete_episodes(options: dict[str, Any]) -> None:
    venv = make_reach_vec_env()
    buffer = CompressedPrioritizedHerReplayBuffer(
        80, venv.observation_space, venv.action_space, env=venv, device="cpu", n_envs=2, **options
    )
    with pytest.raises(RuntimeError, match="Unable to sample"):
        buffer.sample(4)
    for number, transition in enumerate(collect_transitions(venv, 130)):
        buffer.add(*transition)
        assert np.array_equal(buffer._tree.weights.reshape(-1, 2) > 0, buffer.ep_length > 0)
        if number > 20:
            buffer.sample(8)
            buffer.update_priorities(np.full(8, 0.01 * number))
    loaded = pickle.loads(pickle.dumps(buffer))
    loaded.set_env(venv)
    assert np.array_equal(loaded._tree.weights, buffer._tree.weights)
    loaded.sample(8)


# Algorithm, policy, function that makes the environment, class of the buffer, and its options.
MODELS: dict[str, tuple[Any, str, Callable[[], Any], Any, dict[str, Any]]] = {
    "images": (DQN, "CnnPolicy", lambda: image_env(1, 2, 2), CompressedPrioritizedReplayBuffer, {}),
    "dict": (DQN, "MultiInputPolicy", dict_env, CompressedPrioritizedDictReplayBuffer, {}),
    "n-step": (
        *(DQN, "MlpPolicy", lambda: "CartPole-v1", CompressedPrioritizedNStepReplayBuffer),
        {"n_steps": 3, "beta": lambda progress: 0.25},
    ),
    "hindsight": (
        *(SAC, "MultiInputPolicy", lambda: make_reach_vec_env(size=36), CompressedPrioritizedHerReplayBuffer),
        {"n_sampled_goal": 4},
    ),
    "normalized": (SAC, "MlpPolicy", make_normalized, CompressedPrioritizedReplayBuffer, {}),
}


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize(("cls", "policy", "make", "buffer_class", "options"), MODELS.values(), ids=MODELS)
def test_training_changes_priorities(
    cls: Any, policy: str, make: Any, buffer_class: Any, options: Any, tmp_path: Path
) -> None:
    model = make_model(cls, make(), policy, replay_buffer_class=buffer_class, replay_buffer_kwargs=options)
    buffer = model.learn(120).replay_buffer
    assert np.unique(buffer.priorities[: buffer.size()]).size > 10
    model.save_replay_buffer(tmp_path / "buffer")
    priorities = buffer.priorities.copy()
    model.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    assert np.array_equal(model.replay_buffer.priorities, priorities)
    assert np.array_equal(model.replay_buffer._tree.weights, buffer._tree.weights)
    assert model.replay_buffer._current_beta() == buffer._current_beta()
    model.learn(60, reset_num_timesteps=False)
    assert not np.array_equal(model.replay_buffer.priorities, priorities)


def test_storage_dir_keeps_priorities_and_adds_them_to_a_uniform_buffer(tmp_path: Path) -> None:
    buffer = make_buffer(200, cls=CompressedReplayBuffer, storage_dir=tmp_path / "run", resume=True)
    fill(buffer, 60)
    buffer.close()
    buffer = make_buffer(200, storage_dir=tmp_path / "run", resume=True)
    assert (buffer.priorities[:60] == 1).all()
    for number in range(5):
        buffer.sample(32)
        buffer.update_priorities(np.linspace(0.5, 3 + number, 32))
    priorities, weights = buffer.priorities.copy(), buffer._tree.weights.copy()
    buffer.close()
    buffer = make_buffer(200, storage_dir=tmp_path / "run", resume=True)
    assert np.array_equal(buffer.priorities, priorities)
    assert np.array_equal(buffer._tree.weights, weights)
    assert buffer.max_priority == priorities.max()
    fill(buffer, 70)
    buffer.priorities[5], buffer.priorities[6] = np.nan, -1
    buffer.close()
    buffer = make_buffer(200, storage_dir=tmp_path / "run", resume=True)
    assert (buffer.priorities[[5, 6]] == buffer.max_priority).all()
    buffer.close()


class Watch(BaseCallback):
    """Callback that predicts, evaluates and samples between the training steps."""

    def _on_step(self) -> bool:
        self.model.predict(self.model.observation_space.sample())
        self.model.policy.q_net(th.zeros(3, 4))  # with gradients, as a logger of saliency would
        if self.model.replay_buffer.size() > 4:
            self.model.replay_buffer.sample(4)
        return True


def test_other_calls_between_samples_do_not_disturb_training() -> None:
    model = make_model(DQN, "CartPole-v1", replay_buffer_kwargs={"alpha": 0.5}).learn(100, callback=Watch())
    assert np.unique(model.replay_buffer.priorities[:100]).size > 20
    for policy in (model.policy, copy.deepcopy(model.policy)):
        assert not policy.q_net._forward_hooks
        assert not policy.q_net_target._forward_hooks


def test_critic_used_after_an_interrupt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(DQN, "CartPole-v1")
    model.learn(60)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stable_baselines3.dqn.dqn.F.smooth_l1_loss", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.train(1, BATCH)
    before = model.replay_buffer.priorities.copy()
    copies = copy.deepcopy(model.q_net), pickle.loads(pickle.dumps(model.q_net))
    for q_net in (model.q_net, *copies):
        q_net(th.zeros(BATCH, 4)).sum().backward()
    assert np.array_equal(model.replay_buffer.priorities, before)
    model.train(1, BATCH)
    assert not np.array_equal(model.replay_buffer.priorities, before)


def test_compiled_policies() -> None:
    model = make_model(DQN, "CartPole-v1")
    model.q_net = th.compile(model.q_net, backend="eager")
    model.learn(60)
    assert np.unique(model.replay_buffer.priorities[:60]).size > 10
    model = make_model(DQN, "CartPole-v1")
    model.q_net.compile(backend="eager")
    with pytest.raises(InvalidArgumentError, match=r"model.q_net = torch.compile\(model.q_net\)"):
        model.learn(60)


class OwnTrain(DQN):
    """DQN with a ``train()`` that prioritized replay does not know."""

    loss_factor = 1
    n_calls = n_copies = 1

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size)
            q_values = [self.q_net(batch.observations.repeat(self.n_copies, 1)) for _ in range(self.n_calls)]
            loss = self.loss_factor * sum(q_values).pow(2).mean()
            self.policy.optimizer.zero_grad()
            if self.loss_factor:
                loss.backward()
            self.policy.optimizer.step()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critic_hooks, "_CRITICS", dict(critic_hooks._CRITICS))


def test_unknown_algorithms_are_refused_until_registered(registry: None) -> None:
    model = make_model(OwnTrain, "CartPole-v1")
    with pytest.raises(InvalidArgumentError, match=r"does not know OwnTrain.train\(\)"):
        model.learn(60)
    register_critic(OwnTrain, "no_net")
    with pytest.raises(InvalidArgumentError, match="no_net=None of OwnTrain, expected a critic"):
        model.learn(60)
    register_critic(OwnTrain, "q_net")
    model.learn(60)
    assert np.unique(model.replay_buffer.priorities[:60]).size > 10
    for given in (DQN("MlpPolicy", "CartPole-v1", buffer_size=10), int, type("Plain", (DQN,), {})):
        with pytest.raises(InvalidTypeError, match="expected a subclass of OffPolicyAlgorithm that defines train"):
            register_critic(given, "q_net")  # type: ignore[arg-type]


def test_losses_that_cannot_be_weighted_are_refused(registry: None) -> None:
    register_critic(OwnTrain, "q_net")
    for attribute, value, message in (
        ("n_calls", 2, r"OwnTrain.train\(\) calls the critic more than once for one loss"),
        ("n_copies", 2, "a loss of 64 transitions, but 32 were sampled"),
        ("n_copies", 3, "returned shape"),
        ("loss_factor", 0, "the outputs of its critic got no gradients"),
    ):
        model = make_model(OwnTrain, "CartPole-v1")
        setattr(model, attribute, value)
        with pytest.raises(InvalidArgumentError, match=message):
            model.learn(100)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alpha": -0.1}, InvalidArgumentError, "alpha=-0.1"),
        ({"alpha": "much"}, InvalidTypeError, "alpha='much': expected a number"),
        ({"beta": 1.5}, InvalidArgumentError, "beta=1.5: expected a number from 0 to 1"),
        ({"epsilon": 0}, InvalidArgumentError, "epsilon=0"),
    ],
)
def test_invalid_options(options: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        make_buffer(storage_dir=tmp_path / "run", resume=True, **options)
    assert not (tmp_path / "run").exists()


def test_invalid_schedules_and_td_errors_change_nothing() -> None:
    buffer = make_buffer(beta=lambda progress: 3.0)
    fill(buffer, 10)
    with pytest.raises(InvalidArgumentError, match=r"beta\(progress\)=3.0: expected a number from 0 to 1"):
        buffer.sample(2)
    buffer = make_buffer()
    fill(buffer, 10)
    with pytest.raises(InvalidArgumentError, match="there is no batch to update"):
        buffer.update_priorities(np.ones(3))
    buffer.sample(4)
    buffer.update_priorities(th.ones(4, requires_grad=True))
    before = buffer.priorities.copy()
    for td_errors, error, match in (
        (np.ones(3), InvalidArgumentError, "td_errors has 3 values, expected 4"),
        ("abc", InvalidTypeError, "td_errors='abc': expected numbers"),
        (np.array([1, 2, np.nan, 4]), InvalidArgumentError, "1 values that are not finite: training has diverged"),
    ):
        with pytest.raises(error, match=match):
            buffer.update_priorities(td_errors)
    assert np.array_equal(buffer.priorities, before)


def test_threads_that_add_while_sampling() -> None:
    buffer = make_buffer(64)
    fill(buffer, 8)
    with repeating_in_thread(lambda: fill(buffer, 50)):
        for _ in range(200):
            buffer.sample(16)
            buffer.update_priorities(np.random.default_rng(0).exponential(size=16))
    assert (buffer.priorities > 0).all()
    assert buffer._tree.total == pytest.approx((buffer.priorities.astype(float) ** 0.6).sum())


def test_hindsight_forgets_episodes_that_a_folder_has_lost(tmp_path: Path) -> None:
    venv = make_reach_vec_env()
    options = {"env": venv, "device": "cpu", "n_envs": 2, "storage_dir": tmp_path / "run", "resume": True}
    arguments = 80, venv.observation_space, venv.action_space
    buffer = CompressedHerReplayBuffer(*arguments, **options)
    add_all([buffer], collect_transitions(venv, 25))
    buffer._observations.store.drop_newest(10)
    buffer.close()
    buffer = CompressedHerReplayBuffer(*arguments, **options)
    assert buffer.size() == 15
    assert buffer.ep_length[:15].any()
    assert not buffer.ep_length[15:].any()
    buffer.close()
