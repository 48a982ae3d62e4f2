"""Recorded episodes, and their replay with SB3's exact arguments of ``ReplayBuffer.add``."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

FORMAT = 1

Transition = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]


@dataclass
class Recording:
    """
    Episodes of ``E`` environments over ``T`` steps, with every single frame stored once.

    :param name: Name in the registry.
    :param policy: Description of the policy ("random", "sticky random (repeat 0.75)", ...).
    :param n_stack: Number of frames that an observation stacks.
    :param action_space: Action space for the buffer.
    :param frames: Single frames, uint8 ``(T + 1, E, H, W, c)``. Step ``t`` returned ``frames[t + 1]``. At the end
        of an episode, this is the first frame of the next one, since vectorized environments reset themselves.
    :param actions: Actions for the buffer: ``(T, E)`` if discrete, ``(T, E, n)`` in -1..1 if continuous.
    :param rewards: Rewards, float32 ``(T, E)``.
    :param dones: Ends of episodes, bool ``(T, E)``.
    :param truncated: Ends of episodes by a time limit, bool ``(T, E)``.
    :param terminal_frames: Last single frame ``(H, W, c)`` of each finished episode, by ``(t, e)``.
    :param scores: Unclipped return of each finished game, by ``(t, e)``.
    """

    name: str
    policy: str
    n_stack: int
    action_space: spaces.Discrete | spaces.Box
    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    truncated: np.ndarray
    terminal_frames: dict[tuple[int, int], np.ndarray]
    scores: dict[tuple[int, int], float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of steps ``T``; each is one transition per environment."""
        return len(self.dones)

    @property
    def n_envs(self) -> int:
        """Number of environments ``E``."""
        return self.frames.shape[1]

    @property
    def n_transitions(self) -> int:
        """Number of transitions, ``T * E``."""
        return self.dones.size

    @property
    def observation_space(self) -> spaces.Box:
        """Observation space for the buffer, channel-first: uint8 ``(n_stack * c, H, W)``."""
        height, width, channels = self.frames.shape[2:]
        return spaces.Box(0, 255, (self.n_stack * channels, height, width), np.uint8)

    def head(self, steps: int) -> Recording:
        """
        Return the first steps as a recording that shares this one's memory.

        :param steps: Number of steps.
        :return: The first ``steps`` steps.
        """
        return replace(
            self,
            frames=self.frames[: steps + 1],
            actions=self.actions[:steps],
            rewards=self.rewards[:steps],
            dones=self.dones[:steps],
            truncated=self.truncated[:steps],
            terminal_frames={key: frame for key, frame in self.terminal_frames.items() if key[0] < steps},
            scores={key: score for key, score in self.scores.items() if key[0] < steps},
        )

    def transitions(self, *, transposed_views: bool = True) -> Iterator[Transition]:
        """
        Yield the arguments that SB3 passes to ``ReplayBuffer.add`` in training.

        They are the same bit for bit. SB3's ``StackedObservations`` builds the stacks, so that padding after a reset,
        terminal stacks and memory layout are those of training.

        :param transposed_views: If true, observations are those of ``VecTransposeImage``: channel-first *views*
            ``(E, k * c, H, W)`` of channel-last memory. If false, they are those of a channel-first environment:
            C-contiguous arrays of the same shape and content.
        :return: ``(obs, next_obs, actions, rewards, dones, infos)`` for each step.
        """
        from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

        _, n_envs, height, width, channels = self.frames.shape
        shape = (height, width, channels) if transposed_views else (channels, height, width)
        space = spaces.Box(0, 255, shape, np.uint8)
        order = "last" if transposed_views else "first"
        stacker: StackedObservations[np.ndarray] = StackedObservations(n_envs, self.n_stack, space, order)

        def frame_to_channel_first(frame: np.ndarray) -> np.ndarray:
            """Convert single frames to channel-first: a view or a copy."""
            return frame if transposed_views else np.ascontiguousarray(np.moveaxis(frame, -1, -3))

        def stack_to_channel_first(stack: np.ndarray) -> np.ndarray:
            """Convert a stack to channel-first by a view, if views are wanted."""
            return np.moveaxis(stack, -1, -3) if transposed_views else stack

        obs = stack_to_channel_first(stacker.reset(frame_to_channel_first(self.frames[0])))
        for t in range(len(self)):
            infos: list[dict[str, Any]] = [{"TimeLimit.truncated": bool(flag)} for flag in self.truncated[t]]
            ended = np.flatnonzero(self.dones[t])
            for e in ended:
                infos[e]["terminal_observation"] = frame_to_channel_first(self.terminal_frames[t, int(e)])
            stacks, infos = stacker.update(frame_to_channel_first(self.frames[t + 1]), self.dones[t], infos)
            new_obs = stack_to_channel_first(stacks)
            # deepcopy preserves the memory order of the view, unlike np.array(..., order="C")
            next_obs = deepcopy(new_obs)
            for e in ended:
                infos[e]["terminal_observation"] = stack_to_channel_first(infos[e]["terminal_observation"])
                next_obs[e] = infos[e]["terminal_observation"]
            yield obs, next_obs, self.actions[t].copy(), self.rewards[t].copy(), self.dones[t].copy(), infos
            obs = new_obs

    def save(self, path: Path) -> None:
        """
        Write an ``.npz`` file atomically; ``numpy.load`` reads it without pickle.

        :param path: Path of the file; missing folders are created.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = self.frames.shape[2:]
        arrays = {
            "header": np.array(json.dumps(self._header())),
            "frames": self.frames,
            "actions": self.actions,
            "rewards": self.rewards,
            "dones": self.dones,
            "truncated": self.truncated,
            "terminal_frames": np.array(list(self.terminal_frames.values()), np.uint8).reshape(-1, *shape),
            "terminal_frames_at": np.array(list(self.terminal_frames), np.int64).reshape(-1, 2),
            "scores": np.array(list(self.scores.values()), np.float64),
            "scores_at": np.array(list(self.scores), np.int64).reshape(-1, 2),
        }
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            # level 1 is several times faster than savez_compressed's level 6, and files are hardly larger
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for key, array in arrays.items():
                    with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """
        Read a file that :meth:`save` wrote.

        :param path: Path of the file.
        :return: The recording, completely in memory.
        :raises ValueError: If the file has another format version.
        """
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        header = json.loads(arrays.pop("header").item())
        if header.pop("format") != FORMAT:
            raise ValueError(f"{path} is not in format {FORMAT}: delete it to record again")
        action_space = _space_from_json(header.pop("action_space"))
        for key in ("terminal_frames", "scores"):
            places = map(tuple, arrays.pop(f"{key}_at").tolist())
            arrays[key] = dict(zip(places, arrays[key], strict=True))
        return cls(action_space=action_space, **header, **arrays)

    def _header(self) -> dict[str, Any]:
        """Return the fields that a file stores as JSON, for :meth:`load`."""
        return {
            "format": FORMAT,
            "name": self.name,
            "policy": self.policy,
            "n_stack": self.n_stack,
            "action_space": _space_to_json(self.action_space),
        }


def _space_to_json(space: spaces.Discrete | spaces.Box) -> dict[str, Any]:
    """Convert an action space to a dict that JSON can store."""
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n)}
    return {"low": space.low.tolist(), "high": space.high.tolist(), "dtype": str(space.dtype)}


def _space_from_json(fields: dict[str, Any]) -> spaces.Discrete | spaces.Box:
    """Make the action space that ``_space_to_json`` has converted."""
    if "n" in fields:
        return spaces.Discrete(fields["n"])
    dtype = np.dtype(fields["dtype"])
    return spaces.Box(np.array(fields["low"], dtype), np.array(fields["high"], dtype), dtype=dtype.type)
