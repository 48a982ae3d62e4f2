"""Wrapper that records an environment's episode, and repeats a recorded one."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.recording.episode_log import MAX_STEPS, EpisodeLog, Repetition, observation_checksum
from rl_ext_core.recording.generators import Generators, layers_of

__all__ = ["RECORDED_CALLS", "EpisodeRecorder", "record_setting", "repeat_episode"]

# Calls of a vectorized environment that change an environment.
RECORDED_CALLS = ("env_method", "call", "set_attr", "set_wrapper_attr")
_SETTERS = ("set_attr", "set_wrapper_attr")


def record_setting(settings: dict[tuple[str, str], tuple[str, Any]], name: str, data: Any) -> None:
    """Record a call if it sets an attribute, in place of an earlier one for this attribute.

    :param settings: calls by their name and the attribute, in the order of the last values
    """
    if name in _SETTERS:
        settings.pop((name, data[0]), None)
        settings[name, data[0]] = name, data


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that records what is needed to repeat the current episode.

    Attributes are read from and set on the wrapped environment, as if there were no recorder. After an exception,
    nothing is recorded until the next reset.

    :param env: environment, with all its wrappers
    :param on_failure: called with an exception of ``reset`` or ``step``, the name of the method, and the log
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], on_failure: Callable[[Exception, str, EpisodeLog], None] | None = None
    ) -> None:
        super().__init__(env)
        self._on_failure = on_failure
        self._generators = Generators(layers_of(env))
        self._settings: dict[tuple[str, str], tuple[str, Any]] = {}
        self._head: tuple[Any, list[Any]] | None = None  # generators and settings at the reset
        self._calls: list[tuple[str, Any]] = []
        self._checksums: list[int | None] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            self.make_recorded_call("set_attr", (name, value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the wrapped environment. Calls of a method are recorded."""
        value = self.env.get_wrapper_attr(name)
        if not inspect.ismethod(value):
            return value
        if name in ("reset", "step"):
            return getattr(self, name)

        @functools.wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            return self.make_recorded_call("env_method", (name, arguments, options))

        return call

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and begin a new log."""
        if self._head is None or self._generators.is_full_reset():
            self._start(self._generators.states(), list(self._settings.values()))
        self._calls.append(("reset", arguments))
        try:
            result: tuple[Any, dict[str, Any]] = self.env.reset(**arguments)
        except Exception as error:
            self._end_by_failure(error, "reset")
            raise
        self._checksums.append(observation_checksum(result[0]))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and record the action."""
        calls = self._calls
        if len(calls) > MAX_STEPS:
            self._head = None
            return self.env.step(action)
        # The caller may write to the array later.
        calls.append(("step", action.copy() if type(action) is np.ndarray else action))
        try:
            result: tuple[Any, Any, bool, bool, dict[str, Any]] = self.env.step(action)
        except Exception as error:
            self._end_by_failure(error, "step")
            raise
        self._checksums.append(observation_checksum(result[0]))
        return result

    def _start(self, generators: Any, settings: list[Any]) -> None:
        """Begin a new log."""
        self._head, self._calls, self._checksums = (generators, settings), [], []

    def _end_by_failure(self, error: Exception, method: str) -> None:
        """Report an exception, and stop recording, because the log does not say what a failed call has changed."""
        log, self._head = self.episode_log(), None
        if log is not None and self._on_failure is not None:
            self._on_failure(error, method, log)

    def make_recorded_call(self, name: str, data: Any) -> Any:
        """Record a call, make it, and return its result.

        :param name: one of :data:`RECORDED_CALLS`
        :param data: data of the call, as in :data:`~rl_ext_core.vector.environments.CALLS`
        """
        from rl_ext_core.vector.environments import CALLS  # which loads more than a wrapper needs

        record_setting(self._settings, name, data)
        self._calls.append((name, data))
        try:
            return CALLS[name](self.env, data)
        finally:
            self._checksums.append(None)

    def assume_seeded_reset(self, observation: Any) -> None:
        """Begin the log of an episode that was reset before this recorder was added.

        The environment has not been stepped since. gymnasium's environments store the seed of their generator. If that
        was not the seed of the last reset, repeating the episode reports a difference.

        :param observation: observation of that reset
        """
        seed = getattr(self.unwrapped, "np_random_seed", None)
        self._start({}, [])
        self._calls.append(("reset", {} if seed in (None, -1) else {"seed": seed}))
        self._checksums.append(observation_checksum(observation))

    def episode_log(self) -> EpisodeLog | None:
        """Return the log of the current episode.

        :return: the log; None before the first reset, and for an episode of more than ``MAX_STEPS`` steps
        """
        return self._head and EpisodeLog(*self._head, list(self._calls), list(self._checksums))

    def repeat(self, log: EpisodeLog) -> Repetition:
        """Reset the environment to the beginning of a recorded episode, and repeat its calls.

        The environment must have been built like the recorded one, and not been used.

        :param log: a log whose last call has returned
        """
        self._generators.restore(log.generators)
        self._settings = {(name, data[0]): (name, data) for name, data in log.settings}
        return repeat_episode(self, log)


def repeat_episode(
    env: Any,
    log: EpisodeLog,
    generators: Generators | None = None,
    convert: Callable[[Any], Any] = lambda observation: observation,
) -> Repetition:
    """Repeat the calls of a log.

    :param env: environment that was built like the recorded one, and has not been used
    :param log: a log whose last call has returned
    :param generators: generators of the environment; None if they are restored already
    :param convert: function that converts observations as the recorded ones were converted; default: none
    """
    from rl_ext_core.vector.environments import CALLS  # which loads more than a wrapper needs

    is_recorded = isinstance(env, EpisodeRecorder)
    inner = env.env if is_recorded else env
    make_call = env.make_recorded_call if is_recorded else lambda name, data: CALLS[name](env, data)
    for name, data in log.settings:
        CALLS[name](inner, data)
    if generators is not None:
        generators.restore(log.generators)
    observation, first_difference, steps = None, None, 0
    for (name, data), expected in zip(log.calls, log.checksums, strict=True):
        if name == "reset":
            observation = convert(env.reset(**data)[0])
        elif name == "step":
            steps += 1
            observation = convert(env.step(data)[0])
        else:
            with contextlib.suppress(Exception):  # the recorded call raised it, too
                make_call(name, data)
            continue
        if first_difference is None and expected is not None and observation_checksum(observation) != expected:
            first_difference = steps
    return Repetition(observation, first_difference)


_OWN_ATTRIBUTES = frozenset(
    (
        *("env", "_action_space", "_observation_space", "_metadata", "_cached_spec"),
        *("_generators", "_settings", "_head", "_calls", "_checksums", "_on_failure"),
    )
)
