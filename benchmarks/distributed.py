"""PPO of ``sb3_ext.tensor`` on several ranks: steps per second, and the time that ranks exchange data and wait.

    python -m benchmarks.distributed [--ranks 1 2] [--envs 1024] [--iterations 12] [--device cpu]

Each rank has its own environments, so that two ranks have twice the data of one. Networks are SB3's default and that of
Isaac Lab's locomotion tasks. Numbers of ranks take turns; figures are medians over the iterations of all rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger

from benchmarks.measure import machine, record
from sb3_ext import GymVecEnv, tensor
from tests.sb3_ext.tensor_envs import Points

NETWORKS = {"64, 64": [64, 64], "512, 256, 128": [512, 256, 128]}
_STEPS, _EPOCHS, _MINIBATCHES, _ROUNDS = 24, 5, 4, 3


class Timer(BaseCallback):
    """Measures iterations, and the collective operations in them."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.exchanged = [0.0]

    def _init_callback(self) -> None:
        for name in ("_sum", "_gather"):
            setattr(self.model, name, self._time(getattr(self.model, name)))

    def _time(self, function: Any) -> Any:
        """Return a function that adds its duration."""

        def timed(value: Any) -> Any:
            start = time.perf_counter()
            found = function(value)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.exchanged[-1] += time.perf_counter() - start
            return found

        return timed

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.ends.append(time.perf_counter())
        self.exchanged.append(0.0)


def run_rank(network: str, n_envs: int, iterations: int, device: str, path: str) -> None:
    """Train on this rank, and save the seconds of iterations and of exchanges in them."""
    torch.set_num_threads(1)
    env = GymVecEnv(Points(n_envs, device=device), tensors=True)
    sizes: dict[str, Any] = {"n_steps": _STEPS, "batch_size": n_envs * _STEPS // _MINIBATCHES, "n_epochs": _EPOCHS}
    model = tensor.PPO("MlpPolicy", env, policy_kwargs={"net_arch": NETWORKS[network]}, device=device, **sizes)
    model.set_logger(Logger(None, []))
    timer = Timer()
    model.learn(iterations * n_envs * _STEPS * int(os.environ["WORLD_SIZE"]), callback=timer)
    if int(os.environ["RANK"]) == 0:
        np.save(path, [np.diff(timer.ends)[1:], timer.exchanged[2:-1]])  # without the first iteration
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Measure, and print a row per network and number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=main.__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--envs", type=int, default=1024, help="environments of a rank")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank-of", nargs=2, metavar=("NETWORK", "FILE"), help="be one rank")
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of[0], options.envs, options.iterations, options.device, options.rank_of[1])
        return
    print(machine())
    for network in NETWORKS:
        found: dict[int, list[Any]] = {n: [] for n in options.ranks}
        for _ in range(_ROUNDS):
            for n in options.ranks:
                found[n].append(_run(network, n, options))
        for n, runs in found.items():
            seconds, exchanged = np.concatenate(runs, axis=1)
            rate, share = options.envs * _STEPS * n / float(np.median(seconds)), float(np.median(exchanged / seconds))
            print(f"[{network}], {n} ranks: {rate:,.0f} steps/s, {share:.0%} of the time in exchanges")
            record("distributed", f"{network} {n}", rate=rate, share=share)


def _run(network: str, n: int, options: Any) -> Any:
    """Train on some ranks; return what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "seconds.npy")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m"]
        command += ["benchmarks.distributed", "--envs", str(options.envs), "--iterations", str(options.iterations)]
        command += ["--device", options.device, "--rank-of", network, path]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return np.load(path)


if __name__ == "__main__":
    main()
