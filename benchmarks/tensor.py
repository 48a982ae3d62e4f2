"""Rollouts and training of ``sb3_ext.tensor`` against Stable Baselines3 on a torch environment in Isaac Lab's style.

    python -m benchmarks.tensor [rollout iteration weights] [--rounds 15] [--epochs 5] [--isaac-wrapper PATH]

``rollout`` collects 24 steps of 4096 environments with a policy that returns constants, so that the network does not
count. ``iteration`` is a whole iteration of PPO with the default network. Competitors take turns in one process, and
are measured in CPU time of the calling thread. Ratios are medians over the rounds. ``weights`` trains with the same
seed for 20,000 steps, and prints the largest relative difference of weights, which is 0 if they are equal.

``PATH`` is Isaac Lab's ``source/isaaclab_rl/isaaclab_rl/sb3.py``; without it, its wrapper is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks import isaac_like
from benchmarks.measure import format_ratio, machine, parse_options, record, speedup, time_in_turns
from sb3_ext import GymVecEnv, tensor
from tests.sb3_ext.tensor_envs import Points

N_ENVS, N_STEPS = 4096, 24
OURS, THEIRS, ISAAC = "sb3_ext.tensor", "SB3, GymVecEnv", "SB3, Sb3VecEnvWrapper"
TARGETS = {"rollout": {THEIRS: 3.0, ISAAC: 5.0}, "iteration": {THEIRS: 1.5, ISAAC: None}}


class NoCallback(BaseCallback):
    """Callback that does nothing."""

    def _on_step(self) -> bool:
        return True


def make_envs(wrapper_path: str | None) -> dict[str, Any]:
    """Return an environment for each competitor."""

    def make_env() -> Any:
        return isaac_like.IsaacLike(N_ENVS, final_obs=True)

    envs: dict[str, Any] = {
        OURS: GymVecEnv(make_env(), clip_actions=100.0, tensors=True),
        THEIRS: GymVecEnv(make_env(), clip_actions=100.0),
    }
    if wrapper_path:
        spec = importlib.util.spec_from_file_location("isaac_wrapper", wrapper_path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        wrap = module.Sb3VecEnvWrapper
        bounds = {"action_low": -100.0, "action_high": 100.0}
        envs[ISAAC] = wrap(make_env(), **(bounds if "action_low" in inspect.signature(wrap).parameters else {}))
    return envs


def replace_network(model: Any) -> None:
    """Make a policy return constants."""
    actions, values, log_probs = (
        torch.zeros(N_ENVS, isaac_like.ACTION_SIZE),
        torch.zeros(N_ENVS, 1),
        torch.zeros(N_ENVS),
    )
    single = torch.zeros(1, 1)
    model.policy.forward = lambda obs, deterministic=False: (actions, values, log_probs)
    model.policy.predict_values = lambda obs: single if obs.shape[0] == 1 else values


def make_iteration(name: str, env: Any, *, trains: bool, epochs: int) -> Callable[[], None]:
    """Return a function that collects a rollout, and trains on it or not."""
    module: Any = tensor if name == OURS else sb3
    options = {"n_steps": N_STEPS, "batch_size": N_STEPS * N_ENVS // 4, "n_epochs": epochs, "seed": 0, "device": "cpu"}
    model = module.PPO("MlpPolicy", env, **options)
    model.set_logger(Logger(None, []))
    if not trains:
        replace_network(model)
    _, callback = model._setup_learn(10**9, NoCallback())

    def iterate() -> None:
        """Collect a rollout, write the log, and train."""
        model.collect_rollouts(model.env, callback, model.rollout_buffer, N_STEPS)
        model.dump_logs(1)
        if trains:
            model.train()

    iterate()
    return iterate


def compare(part: str, options: argparse.Namespace) -> None:
    """Measure rollouts or whole iterations of all competitors."""
    isaac_like.install()
    torch.set_num_threads(1)
    competitors = {
        name: make_iteration(name, env, trains=part == "iteration", epochs=options.epochs)
        for name, env in make_envs(options.isaac_wrapper).items()
    }
    seconds = time_in_turns(competitors, rounds=options.rounds, clock=time.thread_time)
    print(f"\n{part}: milliseconds for {N_STEPS} steps of {N_ENVS} environments")
    for name, found in seconds.items():
        ratio = 1.0 if name == OURS else speedup(seconds, OURS, baseline=name)
        verdict = "" if name == OURS else format_ratio(ratio, TARGETS[part][name])
        print(f"{name:28}{np.median(found) * 1e3:>12,.1f}  {verdict}")
        record("tensor", f"{part}, {name}", milliseconds=float(np.median(found)) * 1e3, ratio=ratio)


def compare_weights(options: argparse.Namespace) -> None:
    """Train both packages with the same seed, and compare the weights."""
    print("\nweights after 20,000 steps: largest relative difference")
    for name in ("PPO", "A2C", "SAC", "TD3"):
        for as_dict in (False, True):
            for normalized in (False, True):
                found = []
                for module in (tensor, sb3):
                    env: Any = GymVecEnv(Points(8, as_dict=as_dict), tensors=module is tensor)
                    if normalized:
                        env = (tensor.TensorVecNormalize if module is tensor else VecNormalize)(env)
                    more = {"train_freq": 8} if name in ("SAC", "TD3") else {}
                    policy = "MultiInputPolicy" if as_dict else "MlpPolicy"
                    model = getattr(module, name)(policy, env, seed=0, device="cpu", **more)
                    model.set_logger(Logger(None, []))
                    found.append(list(model.learn(20_000).policy.state_dict().values()))
                difference = max(
                    ((part - other).abs().max() / other.abs().max().clamp_min(1e-12)).item()
                    for part, other in zip(*found, strict=True)
                )
                case = f"{name}, {'Dict' if as_dict else 'Box'}, {'normalized' if normalized else 'as is'}"
                print(f"{case:28}{difference:>12.2g}{'' if difference <= 1e-6 else '  missed'}")
                record("tensor", f"weights, {case}", difference=difference)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "rollout": lambda options: compare("rollout", options),
    "iteration": lambda options: compare("iteration", options),
    "weights": compare_weights,
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of an iteration")
    parser.add_argument("--isaac-wrapper", metavar="PATH", help="Isaac Lab's isaaclab_rl/sb3.py")
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options)


if __name__ == "__main__":
    main()
