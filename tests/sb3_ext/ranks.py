"""Program of one rank: trains on its part of Points-like environments. See test_distributed.py."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback
from torch.distributions import normal

from sb3_ext import GymVecEnv, tensor
from tests.sb3_ext.buffer_envs import without_logger
from tests.sb3_ext.tensor_envs import Points

N, T, B = 8, 16, 32  # environments, steps and minibatch of a rank


class GlobalPoints(Points):
    """Points whose start states are a function of the environment's global index and its episode."""

    def __init__(self, num_envs: int, offset: int = 0, *, fails_at: int = -1, **options: Any) -> None:
        super().__init__(num_envs, **options)
        self.fails_at, self.n_calls = fails_at, 0
        self.ids, self.episodes = torch.arange(offset, offset + num_envs).double(), torch.zeros(num_envs).double()

    def _draw_states(self) -> torch.Tensor:
        self.episodes += self._terminated | self._truncated
        x = (
            torch.sin(self.ids[:, None] * 12.9898 + self.episodes[:, None] * 78.233 + torch.arange(8) * 37.719)
            * 43758.5
        )
        return (x - x.floor() - 0.5).float()

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        observation, info = super().reset(seed, options)
        self._steps.copy_(self.ids.long() % self._length)
        return observation, info

    def step(self, action: torch.Tensor) -> Any:
        self.n_calls += 1
        if self.n_calls == self.fails_at:
            raise ValueError("the simulator of this rank is broken")
        return super().step(action)


def model_of(name: str, rank: int, n: int, *, normalized: bool = False, **options: Any) -> Any:
    fails_at = options.pop("fails_at", -1)
    env: Any = GymVecEnv(GlobalPoints(n, rank * n, discrete=name == "DQN", fails_at=fails_at), tensors=True)
    env = tensor.TensorVecNormalize(env) if normalized else env
    sizes: dict[str, Any] = {"PPO": {"n_steps": T, "batch_size": B, "n_epochs": 2}}.get(name, {})
    if name in ("SAC", "TD3", "DQN"):
        sizes = {"learning_starts": 64, "batch_size": 16}
    defaults = {"seed": 3, "device": "cpu", "policy_kwargs": {"net_arch": [8]}, **sizes}
    return without_logger(getattr(tensor, name)("MlpPolicy", env, **{**defaults, **options}))


def share_random_numbers(rank: int) -> None:
    """Give noise and minibatches of a rank the values that a single process with all environments draws."""
    generator = torch.Generator().manual_seed(7)
    streams = [np.random.RandomState(100 + part) for part in range(2)]

    def noise(shape: Any, dtype: Any, device: Any) -> torch.Tensor:
        full = torch.randn(2 * N, *shape[1:], generator=generator, dtype=dtype)
        return full if shape[0] == 2 * N else full[rank * N : (rank + 1) * N]

    def permutation(count: int) -> Any:
        if count == N * T:
            return streams[rank].permutation(count)
        a, b = (stream.permutation(N * T) + part * N * T for part, stream in enumerate(streams))
        return np.concatenate([np.concatenate([a[k : k + B], b[k : k + B]]) for k in range(0, N * T, B)])

    normal._standard_normal = noise  # type: ignore[attr-defined]
    np.random.permutation = permutation  # type: ignore[assignment]


class Record(BaseCallback):
    """Records the number of timesteps, and stops or saves on one rank."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.stop_at = stop_at

    def _on_step(self) -> bool:
        self.seen.append(self.model.num_timesteps)
        return self.n_calls != self.stop_at


def freeze(*_: Any) -> bool:
    """Sleep for longer than the timeout of the group, and end the process."""
    time.sleep(15)
    os._exit(0)


def main(task: str, folder: Path, rank: int) -> None:
    """Run a task, and save what it returns."""
    timeout = timedelta(seconds=8 if task in ("hang", "raise") else 60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    found: dict[str, Any] = {}
    if task == "equal":
        share_random_numbers(rank)
        for name in ("plain", "kl"):
            model = model_of("PPO", rank, N, target_kl=1e-3 if name == "kl" else None)
            model.learn(6 * 2 * N * T)
            found[name] = model.policy.state_dict(), model._n_updates
    elif task == "all":
        for name in ("PPO", "A2C", "SAC", "TD3", "DQN"):
            record = Record()
            model = model_of(name, rank, N, normalized=True)
            model.learn(512, callback=record)
            env = model.get_env()
            statistics = [part for rms in (env.obs_rms, env.ret_rms) for part in (rms.mean, rms.var, rms.count)]
            infos = [(info["r"], info["l"]) for info in model.ep_info_buffer]
            weights = model.policy.state_dict()
            found[name] = weights, model.num_timesteps, record.seen, statistics, infos, model._episode_num
            model.save(folder / f"{name}-{rank}.zip")
            env.save(str(folder / f"normalize-{rank}.pkl"))
        record = Record(5 if rank == 0 else -1)
        model = model_of("PPO", rank, N).learn(10_000, callback=record)
        found["stop"] = model.num_timesteps
    else:
        model = model_of("PPO", rank, N, fails_at=40 if rank == 1 and task == "raise" else -1)
        callback: Any = None
        if task == "hang" and rank == 1:
            callback = freeze
        if task == "differ":
            model.gamma, model.learning_rate = 0.9 - rank * 0.4, 1e-3 * (1 + rank)
        model.learn(100_000, callback=callback)
    torch.save(found, folder / f"{task}-{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
