"""LeRobot datasets of MuJoCo's Pusher, recorded by LeRobot's own writer in ``.venv-lerobot``.

``pusher-96`` and ``pusher-480`` contain rendered frames. ``camera-480`` adds the noise of a camera to them. Without a
display, set ``MUJOCO_GL=egl`` or ``osmesa``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from tqdm import tqdm

FPS = 10
CAMERA = "observation.images.front"


class Recording(NamedTuple):
    """Size of a dataset, and the standard deviation of its noise."""

    height: int
    width: int
    n_episodes: int
    noise: float = 0.0


RECORDINGS = {
    "pusher-96": Recording(96, 96, n_episodes=20),
    "pusher-480": Recording(480, 640, n_episodes=10),
    "camera-480": Recording(480, 640, n_episodes=10, noise=3.0),
}


def record_once(name: str, folder: Path, *, n_steps: int = 200) -> Path:
    """Record a dataset, unless its folder exists.

    :return: Folder of the dataset
    """
    target = folder / name
    if not target.exists():
        temporary = folder / f".{name}.new"
        shutil.rmtree(temporary, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        record(RECORDINGS[name], temporary, n_steps=n_steps)
        temporary.rename(target)
    return target


def record(recording: Recording, folder: Path, *, n_steps: int) -> None:
    """Record episodes of a smooth random policy with LeRobot's default video codec, AV1."""
    environment: Any = gymnasium.make(
        "Pusher-v5",
        render_mode="rgb_array",
        width=recording.width,
        height=recording.height,
        max_episode_steps=n_steps,
    )
    # Detailed shadows take most of the time of rendering without a GPU.
    environment.unwrapped.model.vis.quality.shadowsize = 1024
    rng = np.random.default_rng(0)
    shape = (recording.height, recording.width, 3)
    features = {
        CAMERA: {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": (23,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("local/pusher", FPS, features, root=folder, streaming_encoding=True)
    for episode in tqdm(range(recording.n_episodes), desc=f"recording {folder.name}"):
        observation, _ = environment.reset(seed=episode)
        action = np.zeros(7)
        for _ in range(n_steps):
            action = 0.9 * action + 0.3 * rng.normal(size=7)
            image = environment.render()
            if recording.noise:
                noisy = image + rng.normal(scale=recording.noise, size=shape)
                image = noisy.round().clip(0, 255).astype(np.uint8)
            state, move = observation.astype(np.float32), action.clip(-2, 2).astype(np.float32)
            observation, reward, terminated, truncated, _ = environment.step(move)
            dataset.add_frame(
                {
                    CAMERA: image,
                    "observation.state": state,
                    "action": move,
                    "next.reward": np.array([reward], np.float32),
                    "next.done": np.array([terminated or truncated]),
                    "task": "push the object to the goal",
                }
            )
        dataset.save_episode()
    dataset.finalize()
    environment.close()
