"""Wrapper that records an environment's episode, and repeats a recorded one."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium

from rl_ext_core._values import copy_output
from rl_ext_core.recording.episode_log import NOT_CHECKED, EpisodeLog, LogMemory, Repetition
from rl_ext_core.recording.generators import Generators, layers_of
from rl_ext_core.recording.layers import record_construction


def _call_or_get(env: Any, data: Any) -> Any:
    """Call a method of an environment, or return an attribute; its name may have dots."""
    name, args, kwargs = data
    first, *rest = name.split(".")
    found = functools.reduce(getattr, rest, env.get_wrapper_attr(first))
    return found(*args, **kwargs) if callable(found) else found


# Calls of a vectorized environment that change an environment. Each function calls one environment with its data.
RECORDED_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "env_method": lambda env, data: env.get_wrapper_attr(data[0])(*data[1], **data[2]),
    "call": _call_or_get,
    "set_attr": lambda env, data: setattr(env, *data),
    "set_wrapper_attr": lambda env, data: env.set_wrapper_attr(*data),
}
_SETTERS = ("set_attr", "set_wrapper_attr")
_OWN_ATTRIBUTES = frozenset(
    (
        *("env", "_action_space", "_observation_space", "_metadata", "_cached_spec"),
        *("_generators", "_settings", "_log", "_step", "_on_failure"),
    )
)


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that records what is needed to repeat the current episode.

    Attributes are read from and set on the wrapped environment, as if there were no recorder. After an exception,
    nothing is recorded until the next reset. A copy of a recorder records from its next reset.

    :param env: environment, with all its wrappers
    :param on_failure: called with an exception of ``reset`` or ``step``, the name of the method, and the log
    :param memory: memory of the log, see :class:`~rl_ext_core.recording.episode_log.LogMemory`; default: memory of
        this process
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        on_failure: Callable[[Exception, str, EpisodeLog], None] | None = None,
        memory: Any = None,
    ) -> None:
        super().__init__(env)
        record_construction(env)
        self._on_failure = on_failure
        # Calls that have set attributes, by their name and the attribute, in the order of the last values.
        self._settings: dict[tuple[str, str], tuple[str, Any]] = {}
        self._attach(memory)

    def _attach(self, memory: Any = None) -> None:
        self._generators = Generators(layers_of(self.env))
        self._log = LogMemory(getattr(self.env, "action_space", None), memory)
        self._log.clear()
        self._step = self._log.make_step(self.env, self._report_failure)
        if type(self).step is EpisodeRecorder.step:  # saves a call, unless a subclass has its own method
            vars(self)["step"] = self._step

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN_ATTRIBUTES:
            self.make_recorded_call("set_attr", (name, value))
            return
        object.__setattr__(self, name, value)
        if name == "env" and "_log" in vars(self):
            self._attach()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":  # which is missing while the recorder is copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_generators", "_log", "_step", "step")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attach()

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

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the wrapped environment, and record that."""
        if not force and not self.env.has_wrapper_attr(name):
            return False
        self.make_recorded_call("set_wrapper_attr", (name, value))
        return True

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and begin a new log."""
        generators, settings, log = self._generators, self._settings, self._log
        if generators.is_full_reset() or not log.is_started:
            log.start(generators.snapshot(), list(settings.values()) if settings else [], arguments)
        else:
            log.begin("reset", arguments)
        try:
            result: tuple[Any, dict[str, Any]] = self.env.reset(**arguments)
        except BaseException as error:
            self._report_failure(error, "reset")
            raise
        log.end(result[0])
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and record the action."""
        return self._step(action)

    def _report_failure(self, error: BaseException, method: str) -> None:
        self._log.end_by_failure()
        if self._on_failure is not None and isinstance(error, Exception) and (log := self.episode_log()) is not None:
            self._on_failure(error, method, log)

    def make_recorded_call(self, name: str, data: Any) -> Any:
        """Record a call of :data:`RECORDED_CALLS`, make it, and return its result."""
        if name in _SETTERS:
            self._settings.pop((name, data[0]), None)
            self._settings[name, data[0]] = name, copy_output(data)  # the caller may change the data later
        self._log.begin(name, data)
        try:
            return RECORDED_CALLS[name](self.env, data)
        finally:
            self._log.end()

    def assume_seeded_reset(self) -> None:
        """Begin the log of an episode that was reset before this recorder was added.

        The environment has not been stepped since. gymnasium's environments store the seed of their generator. If that
        was not the seed of the last reset, repeating the episode reports a difference.
        """
        seed = getattr(self.unwrapped, "np_random_seed", None)
        self._log.start(pickle.dumps({}), [], {} if seed in (None, -1) else {"seed": seed})
        self._log.end(flags=NOT_CHECKED)

    def episode_log(self) -> EpisodeLog | None:
        """Return the log of the current episode; None if it has not begun or is too long."""
        return self._log.read()

    def restore_beginning(self, log: EpisodeLog) -> None:
        """Set the attributes and generators of the environment to those before a recorded episode."""
        self._settings = {(name, data[0]): (name, data) for name, data in log.settings}
        for name, data in log.settings:
            RECORDED_CALLS[name](self.env, data)
        self._generators.restore(log.generators)

    def repeat_calls(self, log: EpisodeLog) -> Iterator[tuple[Any, Any, int | None]]:
        """Make all calls of a log, also one that did not return, after :meth:`restore_beginning`.

        :return: after each call, the last observation and info, and the first step that has differed so far
        """
        observation: Any = None
        info: Any = {}
        steps, first_difference = 0, None
        for number, (name, data) in enumerate(log.calls):
            steps += name == "step"
            if name in ("reset", "step"):
                observation, *_, info = self.reset(**data) if name == "reset" else self.step(data)
            else:
                try:
                    self.make_recorded_call(name, data)
                except Exception:
                    if log.is_interrupted and number == len(log.calls) - 1:
                        raise  # other calls have raised in the recorded episode, too
            expected = log.checksums[number] if number < len(log.checksums) else None
            if first_difference is None and expected not in (None, self._log.last_checksum()):
                first_difference = steps
            yield observation, info, first_difference

    def repeat(self, log: EpisodeLog) -> Repetition:
        """Repeat a log whose last call has returned.

        The environment must have been built like the recorded one, and not been used.
        """
        self.restore_beginning(log)
        observation = first_difference = None
        for observation, _, first_difference in self.repeat_calls(log):  # noqa: B007 the last ones are returned
            pass
        return Repetition(observation, first_difference)
