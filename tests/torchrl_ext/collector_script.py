"""Script that collects data from copies of environments in other processes, and prints it as JSON.

    python tests/torchrl_ext/collector_script.py FOLDER KIND

KIND is a kind of collector. Ray writes its files into FOLDER. Every warning is an error, except one of TorchRL's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl._utils import logger
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

MAX_STEPS, WORKERS, STEPS = 3, 2, 8  # STEPS per worker
KEYS = ("observation", "action", "step_count", ("next", "episode_reward"), ("next", "observation"))


class Draws(gymnasium.Env[np.ndarray, Any]):
    """Environment that observes a number of each generator: its own, random, NumPy, torch."""

    observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    scale = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._draw(), 1.0, False, False, {}

    def _draw(self) -> np.ndarray:
        drawn = [self.np_random.random(), random.random(), np.random.random(), torch.rand(()).item()]
        return np.array(drawn) * self.scale


class SignPolicy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((observation[..., 0] + self.bias > 0.5).long(), 2)


def make_changed() -> Any:
    env = Draws()
    env.scale = 5.0
    return env


def make_transformed() -> Any:
    from torchrl_ext import GymWrapper

    return TransformedEnv(GymWrapper(Draws()), Compose(StepCounter(max_steps=MAX_STEPS), RewardSum()))


SOURCES: dict[str, Callable[[], Any]] = {
    "changed": make_changed,
    "transformed": make_transformed,
    "id": lambda: "OfAScript-v0",  # only main() registers it, so workers that import this script do not register it
}


@contextlib.contextmanager
def local_ray(folder: str) -> Iterator[None]:
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 2**27, "log_to_driver": False}
    ray.init("local", num_cpus=WORKERS, _temp_dir=folder, **options)
    try:
        yield
    finally:
        ray.shutdown()


def collectors(kind: str, factories: list[Any], policy: Any) -> list[Any]:
    """Make one collector per worker in this process, or one of all workers."""
    frames: dict[str, Any] = {"frames_per_batch": WORKERS * STEPS, "total_frames": WORKERS * STEPS}
    # Without this option, TorchRL warns that it will add transforms by default.
    transforms = {"auto_register_policy_transforms": False}
    if kind == "here":
        from torchrl.collectors import Collector

        frames = dict.fromkeys(frames, STEPS)
        return [Collector(factory, policy, **frames, **transforms) for factory in factories]
    if kind == "sync":
        from torchrl.collectors import MultiSyncCollector

        return [MultiSyncCollector(factories, policy, cat_results="stack", **frames)]
    from torchrl.collectors import distributed

    options = {"sync": True, "collector_kwargs": transforms, "remote_configs": {"num_cpus": 1, "memory": 2**28}}
    collector = distributed.RayCollector(factories, policy, **frames, **options)
    collector.update_policy_weights_(policy)
    return [collector]


def collect(kind: str, source: Any, seed: int) -> dict[str, Any]:
    """Return the first batches of both workers as lists, in a reproducible order."""
    from torchrl_ext import as_factory

    policy = TensorDictModule(SignPolicy(), in_keys=["observation"], out_keys=["action"])
    batches = []
    for collector in collectors(kind, as_factory(source).for_workers(WORKERS, seed=seed), policy):
        batches += [batch.clone().reshape(-1) for batch in collector]
        collector.shutdown()
    data = torch.cat(batches).reshape(WORKERS, STEPS)
    data = data[data["observation"][:, 0, 0].argsort()]
    return {str(key): data[key].tolist() for key in KEYS if key in data.keys(include_nested=True)}


def main(folder: str, kind: str) -> None:
    """Print the batches of each source, and of the id again and with another seed, as JSON."""
    logger.setLevel(logging.ERROR)
    gymnasium.register("OfAScript-v0", entry_point=Draws)
    with local_ray(folder) if kind == "ray" else contextlib.nullcontext():
        found = {name: collect(kind, make(), 0) for name, make in SOURCES.items()}
        found |= {"again": collect(kind, SOURCES["id"](), 0), "other seed": collect(kind, SOURCES["id"](), 1)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("error")
    # TorchRL's own classes inherit from a class that TorchRL deprecates.
    warnings.filterwarnings("ignore", "Creating .* which inherits from WeightUpdaterBase", DeprecationWarning)
    main(*sys.argv[1:])
