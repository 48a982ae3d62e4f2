"""Returns of PPO in ``GymVecEnv`` and ``GymWrapper`` against a target of 200.

    .venv-jax/bin/python -m benchmarks.learning [sb3 torchrl] [--envs envpool phys2d] [--seeds 3]

``scripts/make_jax_venv.sh`` makes that virtual environment. PPO of Stable Baselines3 and of TorchRL learn CartPole for
30,000 steps, on EnvPool's version and on gymnasium's in JAX (``phys2d/CartPole-v1``). For each seed, the mean return of
the deterministic policy over one episode in each of 16 new environments is printed. The maximum is 500.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.measure import format_ratio, machine, parse_options, record
from sb3_ext import GymVecEnv
from torchrl_ext import GymWrapper

STEPS, N_ENVS, N_EVAL_ENVS, LENGTH, TARGET = 30_000, 8, 16, 500, 200.0
# Hyperparameters of PPO in both libraries.
GAMMA, LAMBDA, HORIZON, EPOCHS, MINIBATCH, RATE, CLIP = 0.99, 0.95, 64, 10, 64, 1e-3, 0.2


def envpool(count: int, seed: int) -> Any:
    """Make EnvPool's CartPole."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=count, seed=seed)


def phys2d(count: int, seed: int) -> Any:
    """Make gymnasium's CartPole in JAX."""
    del seed  # reset() sets it
    return gymnasium.make_vec("phys2d/CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")


Make = Callable[[int, int], Any]
ENVS: dict[str, Make] = {"envpool": envpool, "phys2d": phys2d}


def sb3(make: Make, seed: int) -> float:
    """Train Stable Baselines3's PPO, and return the mean return of the trained policy."""

    def linear_decay(value: float) -> Callable[[float], float]:
        """Return a schedule that falls linearly from ``value`` to 0."""
        return lambda left: value * left

    venv = GymVecEnv(make(N_ENVS, seed))
    model = PPO(
        "MlpPolicy",
        venv,
        n_steps=HORIZON,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        learning_rate=linear_decay(RATE),
        clip_range=linear_decay(CLIP),
        seed=seed,
        device="cpu",
    )
    model.learn(STEPS)
    venv.close()
    venv = GymVecEnv(make(N_EVAL_ENVS, seed + 1000))
    venv.seed(seed + 1000)
    observations, returns, running = venv.reset(), np.zeros(N_EVAL_ENVS), np.ones(N_EVAL_ENVS, bool)
    for _ in range(LENGTH):
        observations, rewards, dones, _ = venv.step(model.predict(observations, deterministic=True)[0])
        returns += rewards * running
        running &= ~dones
    venv.close()
    return float(returns.mean())


def network(outputs: int, gain: float) -> MLP:
    """Make a network as Stable Baselines3 does, with orthogonal weights."""
    layers = MLP(4, outputs, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    for layer in linear:
        torch.nn.init.orthogonal_(layer.weight, gain if layer is linear[-1] else 2**0.5)
        torch.nn.init.zeros_(layer.bias)
    return layers


def torchrl(make: Make, seed: int) -> float:
    """Train TorchRL's PPO, and return the mean return of the trained policy."""
    torch.manual_seed(seed)
    env = GymWrapper(make(N_ENVS, seed), categorical_action_encoding=True)
    env.set_seed(seed)
    scores = TensorDictModule(network(2, 0.01), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        scores, in_keys=["logits"], spec=env.action_spec, distribution_class=Categorical, return_log_prob=True
    )
    critic = ValueOperator(network(1, 1.0), in_keys=["observation"])
    advantage = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), RATE)
    per_batch = N_ENVS * HORIZON
    batches = STEPS // per_batch
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, batches)
    collector = Collector(
        env,
        actor,
        frames_per_batch=per_batch,
        total_frames=batches * per_batch,
        auto_register_policy_transforms=False,
    )
    for batch in collector:
        with torch.no_grad():
            data = advantage(batch).reshape(-1)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(data)).split(MINIBATCH):
                terms = loss(data[rows])
                optimizer.zero_grad()
                (terms["loss_objective"] + terms["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        schedule.step()
    env = GymWrapper(make(N_EVAL_ENVS, seed + 1000), categorical_action_encoding=True)
    env.set_seed(seed + 1000)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(LENGTH, actor, break_when_any_done=False)["next"]
    env.close()
    done = data["done"].squeeze(-1).long()
    running = done.cumsum(1) - done == 0  # true up to the end of the first episode
    return float((data["reward"].squeeze(-1) * running).sum(1).mean())


PARTS: dict[str, Callable[[Make, int], float]] = {"sb3": sb3, "torchrl": torchrl}


def main() -> None:
    """Train, and print the mean returns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=main.__doc__)
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=list(ENVS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parse_options(parser, PARTS)
    torch.set_num_threads(1)
    print(machine())
    for name in options.names:
        for kind in options.envs:
            start, found = time.perf_counter(), []
            print(f"{name:10}{kind:10}", end="", flush=True)
            for seed in range(options.seeds):
                found.append(PARTS[name](ENVS[kind], seed))
                print(f"{found[-1]:.0f}, ", end="", flush=True)
            seconds = (time.perf_counter() - start) / len(found)
            print(f"lowest {format_ratio(min(found), TARGET, unit='')}, {seconds:.0f} s per seed", flush=True)
            record("learning", f"{name} {kind}", **{f"seed {seed}": value for seed, value in enumerate(found)})


if __name__ == "__main__":
    main()
