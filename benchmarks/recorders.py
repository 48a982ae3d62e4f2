"""Play real environments through Stable Baselines3's own wrappers and keep what they return."""

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
    Play ``steps`` steps, keep every single frame, and close the environments.

    :param venv: Environments that give single channel-last frames, without ``VecFrameStack``.
    :param name: Name of the recording.
    :param policy: What acts.
    :param n_stack: How many frames the replay stacks.
    :param steps: How many steps; each makes one transition per environment.
    :param progress: Show a bar.
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
        seen, rewards[t], dones[t], infos = venv.step(_for_env(actions[-1], space))
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


def _for_env(actions: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Scale a buffer's -1..1 to a continuous space's bounds, as ``BasePolicy.unscale_action`` does."""
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
    Play an Atari game behind ``AtariWrapper``'s defaults: 84×84 grey, 4 frames a step, an episode per life.

    :param game: "Pong", "Breakout", "MsPacman", "Seaquest", "MontezumaRevenge", ...
    :param policy: "random", "sticky", or "scripted" (Pong and Breakout).
    :param n_envs: How many games at once.
    :param steps: How many steps.
    :param seed: Seeds games and policy.
    :param name: Name of the recording; by default the game's and the policy's.
    :param progress: Show a bar.
    :return: The recording, of stacks of 4.
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
    Film a MuJoCo environment that acts on Ornstein-Uhlenbeck noise.

    Needs ``imageio``, which gymnasium imports. Without a screen, start with ``MUJOCO_GL=egl`` or ``osmesa``.

    :param env_id: "HalfCheetah-v5", "Walker2d-v5", ...
    :param camera: A camera of the model: "track" follows the robot, so that the whole floor moves. By default
        gymnasium's, which stands still and loses a robot that runs.
    :param size: Height and width of the RGB frames.
    :param n_envs: How many environments at once.
    :param steps: How many steps.
    :param seed: Seeds environments and policy.
    :param name: Name of the recording; by default the environment's.
    :param progress: Show a bar.
    :return: The recording, of stacks of 3.
    :raises RuntimeError: The renderer gave empty frames.
    """
    # What earlier renderers left behind deletes OpenGL objects of the same number when it is collected. In
    # the middle of a recording those would be ours, and frames turn black without an error.
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
        raise RuntimeError(f"{env_id} rendered {empty} empty frames: its OpenGL context was lost on the way")
    return recording


def _make_mujoco_env(env_id: str, size: int, camera: str | None) -> gym.Env[Any, Any]:
    env = gym.make(env_id, render_mode="rgb_array", width=size, height=size, camera_name=camera)
    # The wrapper resets without a seed, and where the robot then is decides where the default camera looks.
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
    Walk through a textured Doom level (Freedoom) at random: the whole picture moves.

    Renders 160×120 RGB, resized to a square; 4 tics a step; sticky random actions, one button at a time.

    :param env_id: "VizdoomMyWayHome-v1", "VizdoomDeadlyCorridor-v1", ...
    :param size: Height and width of the recorded frames.
    :param n_envs: How many games at once.
    :param steps: How many steps.
    :param seed: Seeds games and policy.
    :param name: Name of the recording; by default the environment's.
    :param progress: Show a bar.
    :return: The recording, of stacks of 3.
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
    """Work in a folder that goes away: the Doom engine leaves files where it is started."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _make_vizdoom_env(env_id: str, size: int) -> gym.Env[Any, Any]:
    import cv2
    import vizdoom
    import vizdoom.gymnasium_wrapper  # registers the environments

    env = gym.make(
        env_id,
        frame_skip=4,
        max_buttons_pressed=1,
        screen_resolution=vizdoom.ScreenResolution.RES_160X120,
    )

    def screen(observation: dict[str, np.ndarray]) -> np.ndarray:
        return cv2.resize(observation["screen"], (size, size), interpolation=cv2.INTER_AREA)

    return TransformObservation(env, screen, spaces.Box(0, 255, (size, size, 3), np.uint8))
