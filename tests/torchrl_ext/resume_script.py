"""Script that trains a small DQN with TorchRL, saves every 5th batch, and resumes if there is a save.

Arguments: the folder of the saves, the number of workers, and the number of batches after which the process kills
itself, or 0.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import CatFrames, Compose, EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_ext import EnvironmentState, GymWrapper, ParallelEnv

N_BATCHES, SAVE_EVERY, FRAMES = 24, 5, 16


def make_env() -> EnvBase:
    """Build an environment in which episodes last for about 20 steps, with transforms that have a state."""
    env = GymWrapper(gymnasium.make("CartPole-v1"), categorical_action_encoding=True)
    return TransformedEnv(env, Compose(StepCounter(), RewardSum()))


def train(folder: Path, num_workers: int, kill_at: int) -> None:
    torch.manual_seed(0)
    stack = CatFrames(N=2, dim=-1, in_keys=["observation"])
    env = TransformedEnv(ParallelEnv(num_workers, make_env), stack, auto_unwrap=False)
    env.set_seed(0)
    network, spec = MLP(in_features=8, out_features=2, num_cells=[16]), Categorical(2)
    actor = QValueActor(network, spec=spec, action_space="categorical")
    exploration = EGreedyModule(spec, annealing_num_steps=300)
    policy = TensorDictSequential(actor, exploration)
    collector = Collector(
        env,
        policy,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * N_BATCHES,
        init_random_frames=FRAMES * 3,
        auto_register_policy_transforms=False,
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    loss = DQNLoss(actor, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)  # otherwise made by the first call, after the state is loaded
    target = SoftUpdate(loss, tau=0.05)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    parts = {
        **{"loss": loss, "optimizer": optimizer, "policy": policy, "buffer": buffer},
        "environments": EnvironmentState(collector),
    }
    path, batch = folder / "save.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        batch = saved["batch"]
        torch.set_rng_state(saved["rng"])  # after the environments
    seen = []
    data: Any = None
    for data in collector:
        batch += 1
        seen.append(data["observation"].sum().item())
        buffer.extend(data.reshape(-1))
        exploration.step(data.numel())
        for _ in range(2):
            optimizer.zero_grad()
            loss(buffer.sample())["loss"].backward()
            optimizer.step()
            target.step()
        if batch == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch % SAVE_EVERY == 0:
            save = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**save, "batch": batch, "rng": torch.get_rng_state()}, folder / "new.pt")
            os.replace(folder / "new.pt", path)
    last = {"step_count": data["step_count"], "episode_reward": data["episode_reward"], "seen": seen[-3:]}
    torch.save({**actor.state_dict(), **last, "traj": data["collector", "traj_ids"]}, folder / "weights.pt")
    collector.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
