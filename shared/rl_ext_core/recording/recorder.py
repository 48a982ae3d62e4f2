"""Wrapper that records an environment's episode, and repeats a recorded one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gymnasium

from rl_ext_core.recording.episode_log import EpisodeLog, LogWriter, Repetition, checksum, read_log
from rl_ext_core.recording.generators import generator_states, layers_of, restore_generators

__all__ = ["EpisodeRecorder"]

# Calls of a vectorized environment that change an environment.
RECORDED_CALLS = ("env_method", "call", "set_attr", "set_wrapper_attr")
_SETTERS = ("set_attr", "set_wrapper_attr")


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that records what is needed to repeat the current episode.

    Attributes are set on the wrapped environment, as if there were no recorder.

    :param env: environment, with all its wrappers
    :param block: memory of :data:`~rl_ext_core.recording.episode_log.BLOCK_BYTES` bytes for the log; default: memory of
        this process
    """

    _log: LogWriter
    _layers: list[Any]
    # Wrappers that end an episode at each lost life do not reset the game after it.
    _life_layers: list[Any]
    _settings: dict[tuple[str, str], tuple[str, Any]]
    _begin_step: Callable[[Any], bool]
    _end_step: Callable[[Any], None]

    def __init__(self, env: gymnasium.Env[Any, Any], block: Any = None) -> None:
        log = LogWriter(block)
        layers = layers_of(env)
        values = {
            "_log": log,
            "_layers": layers,
            "_settings": {},
            "_begin_step": log.begin_step,
            "_end_step": log.end_step,
            "_life_layers": [layer for layer in layers if "was_real_done" in vars(layer)],
        }
        vars(self).update(values)
        super().__init__(env)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            self.record_call("set_attr", (name, value))
            setattr(self.env, name, value)
            self.end_call()

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and begin a new log."""
        if self._log.is_full or all(layer.was_real_done for layer in self._life_layers):
            self._log.start((generator_states(self._layers), list(self._settings.values()), arguments))
        else:
            self._log.add_event("reset", arguments)
        result: tuple[Any, dict[str, Any]] = self.env.reset(**arguments)
        self._log.end_event(result[0])
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and record the action."""
        has_slot = self._begin_step(action)
        result = self.env.step(action)
        if has_slot:
            self._end_step(result[0])
        else:
            self._log.end_event(result[0])
        return result

    def record_call(self, name: str, data: Any) -> None:
        """Record a call before it is made.

        :param name: one of :data:`RECORDED_CALLS`
        :param data: data of the call, as in :data:`~rl_ext_core.vector.environments.CALLS`
        """
        if name in _SETTERS:
            self._settings.pop((name, data[0]), None)  # the order of the last values is kept
            self._settings[name, data[0]] = name, data
        self._log.add_event(name, data)

    def end_call(self) -> None:
        """Record that the call has returned."""
        self._log.end_event()

    def assume_seeded_reset(self, observation: Any) -> None:
        """Begin the log of an episode that was reset before this recorder was added.

        The environment has not been stepped since. gymnasium's environments store the seed of their generator. If that
        was not the seed of the last reset, repeating the episode reports a difference.

        :param observation: observation of that reset
        """
        seed = getattr(self.unwrapped, "np_random_seed", None)
        self._log.start(({}, [], {} if seed in (None, -1) else {"seed": seed}))
        self._log.end_event(observation)

    def episode_log(self) -> EpisodeLog | None:
        """Return the log of the current episode; None if it was not recorded.

        There is no log before the first reset, and for episodes that do not fit in the memory of the log.
        """
        return read_log(self._log.block)

    def repeat(self, log: EpisodeLog) -> Repetition:
        """Reset the environment to the beginning of a recorded episode, and repeat its calls.

        The environment must have been built like the recorded one, and not been used.

        :param log: a log whose last call has returned
        """
        from rl_ext_core.vector.environments import CALLS  # which loads more than this wrapper needs

        for name, data in log.settings:
            self.record_call(name, data)
            CALLS[name](self.env, data)
        restore_generators(self._layers, log.generators)
        observation, first_difference, steps = None, None, 0
        for (name, data), expected in zip(log.calls, log.checksums, strict=True):
            if name == "reset":
                observation, _ = self.reset(**data)
            elif name == "step":
                steps += 1
                observation = self.step(data)[0]
            else:
                self.record_call(name, data)
                with contextlib.suppress(Exception):  # the recorded call raised it, too
                    CALLS[name](self.env, data)
                self.end_call()
                continue
            if first_difference is None and checksum(observation) != expected:
                first_difference = steps
        return Repetition(observation, first_difference)


_OWN_ATTRIBUTES = frozenset(("env", "_action_space", "_observation_space", "_metadata", "_cached_spec"))
