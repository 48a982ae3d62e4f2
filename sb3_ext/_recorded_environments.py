"""Recorded environments of a VecEnv, which :class:`~sb3_ext.ResumeCallback` saves and restores.

A pool records the environments in its workers. :class:`EnvironmentsHere` has the same methods for this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder, Repetition
from rl_ext_core.recording.layers import LayerState, layer_states, record_construction, restore_layers
from rl_ext_core.vector.pool import Pool
from sb3_ext.vec_env import PoolVecEnv

__all__ = ["EnvironmentsHere", "recorded_environments"]


_init = DummyVecEnv.__init__


@functools.wraps(_init)
def _init_and_record(self: DummyVecEnv, env_fns: list[Callable[[], gymnasium.Env[Any, Any]]]) -> None:
    """Record how the environments are after construction, because ResumeCallback sees them after their first reset."""
    _init(self, env_fns)
    for env in self.envs:
        record_construction(env)


DummyVecEnv.__init__ = _init_and_record  # type: ignore[method-assign]


class EnvironmentsHere:
    """Environments of a ``DummyVecEnv``, each with a recorder, which is added if there is none.

    :param vec_env: the innermost VecEnv
    :param was_reset: whether the environments were reset, and not stepped since
    """

    def __init__(self, vec_env: DummyVecEnv, *, was_reset: bool) -> None:
        self._vec_env, self._envs = vec_env, vec_env.envs
        for index, env in enumerate(vec_env.envs):
            if isinstance(env, EpisodeRecorder):
                continue
            vec_env.envs[index] = recorder = EpisodeRecorder(env)
            if was_reset:
                recorder.assume_seeded_reset()

    def episode_logs(self) -> list[EpisodeLog | None]:
        """Return the log of each environment's episode; None where there is none."""
        return [env.episode_log() for env in self._envs]  # type: ignore[attr-defined]

    def repeat_episode(self, index: int, log: EpisodeLog) -> Repetition:
        """Repeat the episode of an environment."""
        repetition: Repetition = self._envs[index].repeat(log)  # type: ignore[attr-defined]
        self._vec_env._save_obs(index, repetition.observation)
        return repetition

    def layer_states(self) -> list[list[LayerState]]:
        """Return the state of the wrappers of each environment."""
        return list(map(layer_states, self._envs))

    def restore_layers(self, index: int, states: list[LayerState]) -> list[str]:
        """Set the state of the wrappers of an environment; return sentences on what is not restored."""
        return restore_layers(self._envs[index], states)


def recorded_environments(vec_env: VecEnv, *, was_reset: bool = False) -> EnvironmentsHere | Pool:
    """Return the recorded environments inside a VecEnv and its wrappers.

    :param was_reset: whether the environments were reset, and not stepped since
    :raises InvalidTypeError: If the episodes of this kind of VecEnv cannot be recorded.
    :raises InvalidArgumentError: If the VecEnv was created with ``recorder=False``.
    """
    base = vec_env.unwrapped
    if isinstance(base, PoolVecEnv) and base._pool.records_episodes:
        return base._pool
    if isinstance(base, PoolVecEnv):
        raise InvalidArgumentError(
            f"{type(base).__name__} does not record its episodes: expected recorder=True. Use "
            "SharedMemoryVecEnv(env_fns, recorder=True)"
        )
    if isinstance(base, DummyVecEnv):
        return EnvironmentsHere(base, was_reset=was_reset)
    raise InvalidTypeError(
        f"ResumeCallback cannot record the environments of {type(base).__name__}: expected a DummyVecEnv or a "
        "SharedMemoryVecEnv. Use sb3_ext.make_vec_env(env_id, n_envs=4), or SharedMemoryVecEnv(env_fns)"
    )
