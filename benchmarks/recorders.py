"""Record episodes of real environments through Stable Baselines3's own wrappers."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AddRenderObservation, TransformObservation
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from benchmarks import policies
from benchmarks.policies import Policy
from benchmarks.replay import Recording


def record(
    venv: VecEnv,
    *,
    name: str,
    policy: Policy,
    n_stack: int,
    steps: int,
    progress: bool = False,
) -> Recording:
    """
    Play ``steps`` steps, store every single frame, and close the environments.

    :param venv: Environments that return single channel-last frames, without ``VecFrameStack``.
    :param name: Name of the recording.
    :param policy: Policy that chooses the actions.
    :param n_stack: Number of frames that the replay stacks.
    :param steps: Number of steps; each makes one transition per environment.
    :param progress: Whether to show a progress bar.
    :return: The recording.
    """
    n_envs, space = venv.num_envs, venv.action_space
    assert isinstance(space, spaces.Discrete | spaces.Box)
    assert venv.observation_space.shape is not None
    frames = np.empty((steps + 1, n_envs, *venv.observation_space.shape), np.uint8)
    rewards = np.empty((steps, n_envs), np.float32)
    dones, truncated = np.empty((2, steps, n_envs), bool)
    actions: list[np.ndarray] = []
    scores: dict[tuple[int, int], float] = {}
    terminal_frames: dict[tuple[int, int], np.ndarray] = {}
    frames[0] = np.asarray(venv.reset())
    for t in tqdm(range(steps), desc=name, unit="step", disable=not progress):
        actions.append(policy.choose(venv))
        seen, rewards[t], dones[t], infos = venv.step(_unscale_actions(actions[-1], space))
        frames[t + 1] = np.asarray(seen)
        for e, info in enumerate(infos):
            truncated[t, e] = info["TimeLimit.truncated"]
            if dones[t, e]:
                terminal_frames[t, e] = info["terminal_observation"]
            if "episode" in info:
                scores[t, e] = float(info["episode"]["r"])
    venv.close()
    return Recording(
        name=name,
        policy=policy.text,
        n_stack=n_stack,
        action_space=space,
        frames=frames,
        actions=np.array(actions),
        rewards=rewards,
        dones=dones,
        truncated=truncated,
        terminal_frames=terminal_frames,
        scores=scores,
    )


def _unscale_actions(actions: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Scale continuous actions from -1..1 to the space, as ``BasePolicy.unscale_action``."""
    if not isinstance(space, spaces.Box):
        return actions
    scaled: np.ndarray = space.low + 0.5 * (actions + 1.0) * (space.high - space.low)
    return scaled


def record_atari(
    game: str,
    *,
    policy: str = "sticky",
    n_envs: int = 2,
    steps: int,
    seed: int = 1,
    name: str | None = None,
    progress: bool = False,
) -> Recording:
    """
    Record an Atari game with ``AtariWrapper``'s defaults: 84×84 gray, frame skip 4.

    :param game: "Pong", "Breakout", "MsPacman", "Seaquest", "MontezumaRevenge", ...
    :param policy: "random", "sticky", or "scripted" (Pong and Breakout).
    :param n_envs: Number of parallel games.
    :param steps: Number of steps.
    :param seed: Seed of games and policy.
    :param name: Name of the recording, by default made of game and policy.
    :param progress: Whether to show a progress bar.
    :return: The recording, with stacks of 4.
    """
    import ale_py

    gym.register_envs(ale_py)
    makers: dict[str, Callable[..., Policy]] = {
        "random": policies.uniform,
        "sticky": policies.sticky,
        "scripted": partial(policies.scripted, game),
    }
    return record(
        make_atari_env(f"{game}NoFrameskip-v4", n_envs=n_envs, seed=seed),
        name=name or f"{game.lower()}-{policy}",
        policy=makers[policy](seed=seed),
        n_stack=4,
        steps=steps,
        progress=progress,
    )


def record_mujoco(
    env_id: str,
    *,
    camera: str | None = None,
    size: int = 100,
    n_envs: int = 2,
    steps: int,
    seed: int = 1,
    name: str | None = None,
    progress: bool = False,
) -> Recording:
    """
    Record images of a MuJoCo environment with Ornstein-Uhlenbeck noise as actions.

    Needs ``imageio``, which gymnasium imports. Without a display, set ``MUJOCO_GL=egl`` or ``osmesa``.

    :param env_id: "HalfCheetah-v5", "Walker2d-v5", ...
    :param camera: Camera of the model. "track" follows the robot, so that the whole floor moves. By default
        gymnasium's fixed camera, whose view a running robot leaves.
    :param size: Height and width of the RGB frames in pixels.
    :param n_envs: Number of parallel environments.
    :param steps: Number of steps.
    :param seed: Seed of environments and policy.
    :param name: Name of the recording, by default the environment's.
    :param progress: Whether to show a progress bar.
    :return: The recording, with stacks of 3.
    :raises RuntimeError: If the renderer returned empty frames.
    """
    # Garbage collection of earlier renderers deletes OpenGL objects by number. In the middle of a recording, these
    # would be this renderer's, and frames would turn black without an error.
    gc.collect()
    recording = record(
        make_vec_env(partial(_make_mujoco_env, env_id, size, camera), n_envs=n_envs, seed=seed),
        name=name or env_id.lower(),
        policy=policies.ornstein_uhlenbeck(seed=seed),
        n_stack=3,
        steps=steps,
        progress=progress,
    )
    first_pixel = recording.frames[:, :, :1, :1]
    if empty := (recording.frames == first_pixel).all(axis=(2, 3, 4)).sum():
        raise RuntimeError(f"{env_id} rendered {empty} empty frames: its OpenGL context was lost during the recording")
    return recording


def _make_mujoco_env(env_id: str, size: int, camera: str | None) -> gym.Env[Any, Any]:
    """Make a MuJoCo environment that observes square images, rendered from a camera."""
    env = gym.make(env_id, render_mode="rgb_array", width=size, height=size, camera_name=camera)
    # The wrapper resets without a seed, and the robot's position decides where the default camera looks.
    env.reset(seed=0)
    return AddRenderObservation(env)


def record_vizdoom(
    env_id: str = "VizdoomMyWayHome-v1",
    *,
    size: int = 100,
    n_envs: int = 2,
    steps: int,
    seed: int = 1,
    name: str | None = None,
    progress: bool = False,
) -> Recording:
    """
    Record a random walk through a Doom level (Freedoom), where the whole image moves.

    Frames are rendered as 160×120 RGB and resized to a square. A step has 4 tics. Actions are sticky and random, with
    one button at a time.

    :param env_id: "VizdoomMyWayHome-v1", "VizdoomDeadlyCorridor-v1", ...
    :param size: Height and width of the recorded frames in pixels.
    :param n_envs: Number of parallel games.
    :param steps: Number of steps.
    :param seed: Seed of games and policy.
    :param name: Name of the recording, by default the environment's.
    :param progress: Whether to show a progress bar.
    :return: The recording, with stacks of 3.
    """
    with _temporary_folder():
        return record(
            make_vec_env(partial(_make_vizdoom_env, env_id, size), n_envs=n_envs, seed=seed),
            name=name or env_id.lower(),
            policy=policies.sticky(seed=seed),
            n_stack=3,
            steps=steps,
            progress=progress,
        )


@contextmanager
def _temporary_folder() -> Iterator[None]:
    """Work in a temporary folder, into which the Doom engine writes files."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _make_vizdoom_env(env_id: str, size: int) -> gym.Env[Any, Any]:
    """Make a Doom level that observes square color images."""
    import cv2
    import vizdoom
    import vizdoom.gymnasium_wrapper  # registers the environments

    env = gym.make(
        env_id,
        frame_skip=4,
        max_buttons_pressed=1,
        screen_resolution=vizdoom.ScreenResolution.RES_160X120,
    )

    def resize_screen(observation: dict[str, np.ndarray]) -> np.ndarray:
        """Return the game's screen, resized to ``size`` pixels per side."""
        return cv2.resize(observation["screen"], (size, size), interpolation=cv2.INTER_AREA)

    return TransformObservation(env, resize_screen, spaces.Box(0, 255, (size, size, 3), np.uint8))
