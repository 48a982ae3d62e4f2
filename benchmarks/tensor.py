"""Rollouts and training of ``sb3_ext.tensor`` against Stable Baselines3 on a torch environment in Isaac Lab's style.

    python -m benchmarks.tensor [rollout iteration replay weights transfers] [--rounds 15] [--epochs 5] [--device cpu]
        [--envs 4096] [--steps 20000] [--isaac-wrapper PATH]

``rollout`` collects 24 steps of 4096 environments with a policy that returns constants, so that the network does not
count. ``iteration`` is a whole iteration of PPO with the default network. Competitors take turns in one process, and
are measured in CPU time of the calling thread, or in seconds if the device is a GPU. Ratios are medians over the
rounds. ``weights`` trains with the same seed, and prints the largest relative difference of weights, which is 0 if they
are equal. ``replay`` fills replay buffers.
``transfers`` counts copies between host and GPU, and waits for it, in one rollout and in one iteration.

``PATH`` is Isaac Lab's ``source/isaaclab_rl/isaaclab_rl/sb3.py``; without it, its wrapper is left out. rsl_rl's PPO of
the same sizes takes part if it is installed: ``pip install rsl-rl-lib``.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from benchmarks import isaac_like
from benchmarks.measure import format_ratio, machine, parse_options, record, speedup, synchronized_time, time_in_turns
from sb3_ext import GymVecEnv, tensor
from tests.sb3_ext.tensor_envs import Points

N_STEPS = 24
_OBS_SIZE = 48  # of replay buffers, as in Isaac Lab's locomotion tasks
OURS, THEIRS, ISAAC, RSL = "sb3_ext.tensor", "SB3, GymVecEnv", "SB3, Sb3VecEnvWrapper", "rsl_rl"
TARGETS = {"rollout": {THEIRS: 3.0, ISAAC: 5.0}, "iteration": {THEIRS: 1.5, ISAAC: None, RSL: 0.8}}


class NoCallback(BaseCallback):
    """Callback that does nothing."""

    def _on_step(self) -> bool:
        return True


class RslRlEnv:
    """Isaac-like environment with rsl_rl's interface.

    :param env: environment
    """

    max_episode_length, num_actions, cfg = 100, isaac_like.ACTION_SIZE, {}

    def __init__(self, env: isaac_like.IsaacLike) -> None:
        self._env, self.num_envs, self.device = env, env.num_envs, env.device
        self.episode_length_buf = env._lengths
        env.reset()

    def get_observations(self) -> TensorDict:
        """Return observations."""
        return TensorDict({"policy": self._env.obs_buf["policy"]}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> Any:
        """Take a step, with clipped actions."""
        _, rewards, terminated, truncated, _ = self._env.step(actions.clamp(-100.0, 100.0))
        return self.get_observations(), rewards, (terminated | truncated).long(), {"time_outs": truncated}


def make_envs(options: argparse.Namespace) -> dict[str, Any]:
    """Return an environment for each competitor."""
    wrapper_path = options.isaac_wrapper

    def make_env() -> Any:
        return isaac_like.IsaacLike(options.envs, final_obs=True, device=options.device)

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
    zeros = partial(torch.zeros, device=model.device)
    n_envs = model.n_envs
    actions, values, log_probs = zeros(n_envs, isaac_like.ACTION_SIZE), zeros(n_envs, 1), zeros(n_envs)
    model.policy.forward = lambda obs, deterministic=False: (actions, values, log_probs)
    # After time limits, values of fewer observations are predicted.
    model.policy.predict_values = lambda obs: values[: len(obs)]


def make_rsl_rl_iteration(options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs an iteration of rsl_rl's PPO, without a log."""
    from rsl_rl.runners import OnPolicyRunner

    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    settings = {
        "num_steps_per_env": N_STEPS,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": network,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": options.epochs, "schedule": "fixed"},
    }
    env = RslRlEnv(isaac_like.IsaacLike(options.envs, device=options.device))
    runner = OnPolicyRunner(env, settings, None, options.device)
    return lambda: runner.learn(1)


def make_iteration(name: str, env: Any, *, trains: bool, settings: argparse.Namespace) -> Callable[[], None]:
    """Return a function that collects a rollout, and trains on it or not."""
    module: Any = tensor if name == OURS else sb3
    options = {
        "n_steps": N_STEPS,
        "batch_size": N_STEPS * settings.envs // 4,
        "n_epochs": settings.epochs,
        "seed": 0,
        "device": settings.device,
    }
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


def make_competitors(part: str, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return a function for each competitor, which collects a rollout, or runs a whole iteration."""
    isaac_like.install()
    torch.set_num_threads(1)
    found = {
        name: make_iteration(name, env, trains=part != "rollout", settings=options)
        for name, env in make_envs(options).items()
    }
    if part != "rollout" and importlib.util.find_spec("rsl_rl") is not None:
        found[RSL] = make_rsl_rl_iteration(options)
        found[RSL]()
    return found


def compare(part: str, options: argparse.Namespace) -> None:
    """Measure rollouts or whole iterations of all competitors."""
    competitors = make_competitors(part, options)
    clock = time.thread_time if options.device == "cpu" else synchronized_time
    seconds = time_in_turns(competitors, rounds=options.rounds, clock=clock)
    frames = N_STEPS * options.envs
    print(f"\n{part}: {N_STEPS} steps of {options.envs} environments on {options.device}")
    print(f"{'':28}{'ms':>12}{'frames/s':>14}")
    for name, found in seconds.items():
        ratio = 1.0 if name == OURS else speedup(seconds, OURS, baseline=name)
        verdict = "" if name == OURS else format_ratio(ratio, TARGETS[part][name])
        median = float(np.median(found))
        print(f"{name:28}{median * 1e3:>12,.1f}{frames / median:>14,.0f}  {verdict}")
        row = f"{part}, {name}" + ("" if options.device == "cpu" else f", {options.device}, {options.envs}")
        record("tensor", row, milliseconds=median * 1e3, frames_per_second=frames / median, ratio=ratio)


def count_transfers(options: argparse.Namespace) -> None:
    """Count copies between host and GPU, and waits for the GPU, in iterations of all competitors."""
    if options.device == "cpu":
        print("\ntransfers: there are none without a GPU. Add --device cuda")
        return
    kinds = {"to GPU": ("Memcpy HtoD",), "to host": ("Memcpy DtoH",), "waits": ("cudaStreamSync", "cudaDeviceSync")}
    for part in ("rollout", "iteration"):
        print(f"\ntransfers: in one {part} of {N_STEPS} steps of {options.envs} environments")
        print(f"{'':28}" + "".join(f"{kind:>10}" for kind in kinds))
        for name, run in make_competitors(part, options).items():
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                run()
            events = profile.events()
            counts = {
                kind: sum(event.name.startswith(names) for event in events or ()) for kind, names in kinds.items()
            }
            print(f"{name:28}" + "".join(f"{count:>10}" for count in counts.values()))
            record("tensor", f"transfers, {part}, {name}, {options.envs}", **counts)


def compare_weights(options: argparse.Namespace) -> None:
    """Train both packages with the same seed, and compare the weights."""
    print(f"\nweights after {options.steps:,} steps on {options.device}: largest relative difference")
    for name in ("PPO", "A2C", "SAC", "TD3"):
        for as_dict in (False, True):
            for normalized in (False, True):
                found = []
                for module in (tensor, sb3):
                    env: Any = GymVecEnv(Points(8, as_dict=as_dict, device=options.device), tensors=module is tensor)
                    if normalized:
                        env = (tensor.TensorVecNormalize if module is tensor else VecNormalize)(env)
                    more = {"train_freq": 8} if name in ("SAC", "TD3") else {}
                    policy = "MultiInputPolicy" if as_dict else "MlpPolicy"
                    model = getattr(module, name)(policy, env, seed=0, device=options.device, **more)
                    model.set_logger(Logger(None, []))
                    found.append(list(model.learn(options.steps).policy.state_dict().values()))
                difference = max(
                    ((part - other).abs().max() / other.abs().max().clamp_min(1e-12)).item()
                    for part, other in zip(*found, strict=True)
                )
                case = f"{name}, {'Dict' if as_dict else 'Box'}, {'normalized' if normalized else 'as is'}"
                print(f"{case:28}{difference:>12.2g}{'' if difference <= 1e-6 else '  missed'}")
                record("tensor", f"weights, {case}", difference=difference)


def compare_replay(options: argparse.Namespace) -> None:
    """Measure transitions of replay buffers: memory, and seconds to add a step and to sample a batch."""
    torch.set_num_threads(1)
    n_envs, steps, batch_size = options.envs, 240, 8192
    spaces = Box(-np.inf, np.inf, (_OBS_SIZE,), np.float32), Box(-1, 1, (isaac_like.ACTION_SIZE,), np.float32)
    found: dict[str, Any] = {
        name: kind(n_envs * steps, *spaces, options.device, n_envs)
        for name, kind in ((OURS, tensor.TensorReplayBuffer), (THEIRS, sb3.common.buffers.ReplayBuffer))
    }
    rows = torch.randn(8, n_envs, _OBS_SIZE, device=options.device)
    rest = [torch.zeros(n_envs, *shape, device=options.device) for shape in ((isaac_like.ACTION_SIZE,), (), ())]
    arrays, array_rest = rows.cpu().numpy(), [part.cpu().numpy() for part in rest]
    infos = [{"TimeLimit.truncated": False}] * n_envs
    step = dict.fromkeys(found, 0)

    def add(name: str) -> None:
        """Add a step; one episode of a hundred ends in it."""
        step[name] += 1
        old, new = step[name] % 8, (step[name] + 1) % 8
        if name == OURS:
            following = rows[new].clone()
            following[::100] += 1.0
            found[name].add(rows[old], following, *rest, infos)
        else:
            found[name].add(arrays[old], arrays[new], *array_rest, infos)

    for name in found:
        for _ in range(2 * steps):
            add(name)
    print(f"\nreplay: {steps} steps of {n_envs} environments on {options.device}")
    clock = time.thread_time if options.device == "cpu" else synchronized_time
    last = found[OURS]._last
    nbytes = {OURS: found[OURS].observations.nbytes + last._table.nbytes + last._numbers.nbytes}
    nbytes[THEIRS] = found[THEIRS].observations.nbytes + found[THEIRS].next_observations.nbytes
    print(
        f"{'observations':28}{nbytes[OURS] / 1e6:,.0f} MB with next ones, {nbytes[OURS] / nbytes[THEIRS]:.2f} of SB3's"
    )
    for part, run in (("add", add), ("sample", lambda name: found[name].sample(batch_size))):
        calls = {name: partial(run, name) for name in found}
        seconds = time_in_turns(calls, rounds=options.rounds, clock=clock)
        ratio = speedup(seconds, OURS, baseline=THEIRS)
        times = ", ".join(f"{name} {np.median(values) * 1e6:,.0f} us" for name, values in seconds.items())
        print(f"{part:28}{times}, {ratio:.2f} times as fast")
        record("tensor", f"replay, {part}, {options.device}, {n_envs}", ratio=ratio)
    record("tensor", f"replay, {options.device}, {n_envs}", bytes_ratio=nbytes[OURS] / nbytes[THEIRS])


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "rollout": lambda options: compare("rollout", options),
    "iteration": lambda options: compare("iteration", options),
    "replay": compare_replay,
    "weights": compare_weights,
    "transfers": count_transfers,
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of an iteration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--envs", type=int, default=4096, help="environments of rollouts and iterations")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of a training")
    parser.add_argument("--isaac-wrapper", metavar="PATH", help="Isaac Lab's isaaclab_rl/sb3.py")
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options)


if __name__ == "__main__":
    main()
