"""Script that collects data from copies of an environment, and prints it as JSON.

    python tests/torchrl_ext/collector_script.py FOLDER KIND SOURCE:SEED ...

KIND is a kind of collector, SOURCE one of SOURCES. Ray writes its files into FOLDER. Every warning is
an error, except those in IGNORED_WARNINGS.
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
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl._utils import logger
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # TorchRL's own classes inherit from a class that TorchRL deprecates.
    ("Creating .* which inherits from WeightUpdaterBase", DeprecationWarning),
)
GRAVITY = 5.0
MAX_STEPS = 3
WORKERS = 2
STEPS = 8  # Per worker.


class RandomObservations(gymnasium.Env[np.ndarray, Any]):
    """Environment that observes a number of each generator: its own, random, NumPy, torch."""

    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._draw(), 0.0, False, False, {}

    def _draw(self) -> np.ndarray:
        """Draw one number from each of the four generators."""
        return np.array([self.np_random.random(), random.random(), np.random.random(), torch.rand(()).item()])


class SignPolicy(torch.nn.Module):
    """Policy with a parameter that pushes by the sign of the last observation entry."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        right = (observation[..., -1] + self.bias > 0).long()
        return torch.nn.functional.one_hot(right, 2)


def make_changed() -> Any:
    """Make a CartPole whose gravity is changed after its construction."""
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = GRAVITY  # type: ignore[attr-defined]
    return env


def make_transformed() -> Any:
    """Make a CartPole with transforms that count steps and sum rewards."""
    from torchrl_ext import GymEnv

    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=MAX_STEPS), RewardSum()))


# Only main() registers the id, so workers that import this script do not register it.
SOURCES: dict[str, Callable[[], Any]] = {
    "changed": make_changed,
    "transformed": make_transformed,
    "id": lambda: "OfAScript-v0",
}


@contextlib.contextmanager
def local_ray(folder: str) -> Iterator[None]:
    """Run Ray on this machine alone.

    :param folder: Folder for its files, with a short name, since paths of sockets are limited to 107 characters.
    """
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 2**27, "log_to_driver": False}
    ray.init("local", num_cpus=WORKERS, _temp_dir=folder, **options)
    try:
        yield
    finally:
        ray.shutdown()


class SingleCollectors:
    """TorchRL's ``Collector`` for each copy, one after the other."""

    def __init__(self, factories: list[Any], policy: Any, *, frames_per_batch: int, **options: Any) -> None:
        from torchrl.collectors import Collector

        options.update(frames_per_batch=frames_per_batch // WORKERS, total_frames=frames_per_batch // WORKERS)
        self.collectors = [Collector(factory, policy, **options) for factory in factories]

    def __iter__(self) -> Iterator[Any]:
        return (batch for collector in self.collectors for batch in collector)

    def shutdown(self) -> None:
        for collector in self.collectors:
            collector.shutdown()


def collector(kind: str, factories: list[Any], policy: Any) -> Any:
    """Make a collector that returns one batch per worker, or one batch of all workers."""
    frames: dict[str, Any] = {"frames_per_batch": WORKERS * STEPS, "total_frames": WORKERS * STEPS}
    # Without this option, TorchRL warns that it will add transforms by default.
    transforms = {"auto_register_policy_transforms": False}
    if kind == "single":
        return SingleCollectors(factories, policy, **frames, **transforms)
    if kind == "sync":
        from torchrl.collectors import MultiSyncCollector

        return MultiSyncCollector(factories, policy, cat_results="stack", **frames)
    from torchrl.collectors import distributed

    remote = {"num_cpus": 1, "memory": 2**28}
    options = {**frames, "sync": True, "collector_kwargs": transforms, "remote_configs": remote}
    ray_collector = distributed.RayCollector(factories, policy, **options)
    ray_collector.update_policy_weights_(policy)
    return ray_collector


def collect_first_batches(kind: str, source: Any, seed: int) -> TensorDict:
    """Return the first batches of both workers as a TensorDict of shape (2, steps)."""
    from torchrl_ext import as_factory

    factories = as_factory(source).for_workers(WORKERS, seed=seed)
    policy = TensorDictModule(SignPolicy(), in_keys=["observation"], out_keys=["action"])
    collecting = collector(kind, factories, policy)
    batches = [batch.clone() for batch in collecting]
    collecting.shutdown()
    return torch.cat([batch.reshape(-1) for batch in batches]).reshape(WORKERS, STEPS)


def as_lists(batch: TensorDict) -> dict[str, Any]:
    """Return the entries that tests compare, as lists."""
    names = ("observation", "action", "step_count", ("next", "episode_reward"), ("next", "observation"))
    keys = batch.keys(include_nested=True)
    return {name if isinstance(name, str) else ".".join(name): batch[name].tolist() for name in names if name in keys}


def main() -> None:
    """Print the first batches of each run as JSON."""
    folder, kind, *runs = sys.argv[1:]
    logger.setLevel(logging.ERROR)
    gymnasium.register("OfAScript-v0", entry_point=RandomObservations)
    results = []
    with local_ray(folder) if kind == "ray" else contextlib.nullcontext():
        for run in runs:
            source, seed = run.split(":")
            results.append(as_lists(collect_first_batches(kind, SOURCES[source](), int(seed))))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("error")
    for message, category in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    main()
