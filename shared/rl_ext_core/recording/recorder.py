"""Wrapper that records an environment's episode, and repeats a recorded one."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core._values import copy_output
from rl_ext_core.recording.episode_log import (
    MAX_STEPS,
    RECORDED_CALLS,
    EpisodeLog,
    Repetition,
    observation_checksum,
    record_setting,
    step_checksum,
)
from rl_ext_core.recording.generators import Generators, Snapshot, layers_of, read_snapshot
from rl_ext_core.recording.layers import record_construction

__all__ = [
    "EpisodeRecorder",
    "RecordedCall",
    "read_result",
    "repeat_calls",
    "restore_beginning",
]

_ARRAY = np.ndarray  # each step looks it up
# Types of actions that need no copy.
_IMMUTABLE = frozenset((bool, int, float, np.int64, np.int32, np.float32, np.float64))
_MAX_COPIED_BYTES = 256
# The results of so many calls are stored until they are replaced by checksums. Most episodes have fewer.
_MAX_UNPACKED = 1024
_NUMBERS = (bool, int, float)


class RecordedCall(tuple[str, Any]):
    """Name and data of a call of an environment, other than a step."""

    __slots__ = ()


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
        record_construction(env)
        self._on_failure = on_failure
        space = getattr(env, "observation_space", None)
        is_small = isinstance(space, gymnasium.spaces.Box) and space.low.nbytes <= _MAX_COPIED_BYTES
        # Copying a small array takes less time than its checksum.
        self._summarize: Callable[[Any], bytes | int] = _ARRAY.tobytes if is_small else observation_checksum
        self._settings: dict[tuple[str, str], tuple[str, Any]] = {}
        self._head: tuple[Snapshot, list[Any]] | None = None  # generators and settings at the reset
        # For each call: the action of a step or a RecordedCall, then what it returned. For a reset, that is a checksum
        # or a copy of the observation; for a step, also the reward and the flags. If it has a limit and is full, there
        # is no log.
        self._entries: collections.deque[Any] = collections.deque()
        self._packed: list[_PackedCalls] = []  # earlier calls
        self._attach()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN_ATTRIBUTES:
            self.make_recorded_call("set_attr", (name, value))
            return
        object.__setattr__(self, name, value)
        if name == "env" and "_entries" in vars(self):
            self._attach()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":  # which is missing while the recorder is copied
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

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the wrapped environment, and record that."""
        if not force and not self.env.has_wrapper_attr(name):
            return False
        self.make_recorded_call("set_wrapper_attr", (name, value))
        return True

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and begin a new log."""
        generators, settings = self._generators, self._settings
        if self._head is None or generators.is_full_reset():
            self._start(generators.snapshot(), list(settings.values()) if settings else [])
        append = self._entries.append
        # The caller may write to the options later.
        append(RecordedCall(("reset", copy.deepcopy(arguments) if arguments.get("options") else arguments)))
        try:
            result: tuple[Any, dict[str, Any]] = self.env.reset(**arguments)
        except BaseException as error:
            self._end_by_failure(error, "reset")
            raise
        if getattr(getattr(result[0], "dtype", None), "hasobject", False):
            self._summarize = observation_checksum  # the bytes of such an array are addresses
            self._set_entries(self._entries)
        try:
            append(self._summarize(result[0]))
        except TypeError:  # a small observation that is not an array
            append(observation_checksum(result[0]))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and record the action."""
        return self._step(action)

    def _set_entries(self, entries: collections.deque[Any]) -> None:
        """Set the entries, and make the function that steps the environment and appends to them.

        Each attribute that it would look up takes a tenth of the recorder's part of a step.
        """
        env, append, ndarray, summarize, immutable = self.env, entries.append, _ARRAY, self._summarize, _IMMUTABLE
        limit, pack = 2 * _MAX_UNPACKED, self._pack

        def step(action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            # The caller may write to the array, dict or list later.
            kind = type(action)
            append(action.copy() if kind is ndarray else action if kind in immutable else copy_output(action))
            try:
                result: tuple[Any, Any, bool, bool, dict[str, Any]] = env.step(action)
            except BaseException as error:
                self._end_by_failure(error, "step")
                raise
            try:
                append((summarize(result[0]), result[1], result[2], result[3]))
            except TypeError:  # a small observation that is not an array
                append((observation_checksum(result[0]), result[1], result[2], result[3]))
            if len(entries) >= limit:
                pack()
            return result

        self._entries, self._step = entries, step
        if type(self).step is EpisodeRecorder.step:  # saves a call, unless a subclass has its own method
            vars(self)["step"] = step

    def _attach(self) -> None:
        """Find the generators of the environment, and make the function that steps it."""
        self._generators = Generators(layers_of(self.env))
        self._set_entries(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        # Those of a copy belong to the environment of the copy.
        return {name: value for name, value in vars(self).items() if name not in ("step", "_step", "_generators")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attach()

    def _start(self, generators: Snapshot, settings: list[Any]) -> None:
        """Begin a new log."""
        vars(self)["_head"] = generators, settings  # without a call of our __setattr__
        self._packed.clear()
        if self._entries.maxlen is None:
            self._entries.clear()
        else:  # the last episode was interrupted, or too long
            self._set_entries(collections.deque())

    def _pack(self) -> None:
        """Move all entries to less memory, or stop recording an episode of too many steps."""
        self._packed.append(_PackedCalls(self._entries))
        self._entries.clear()
        if len(self._packed) * _MAX_UNPACKED > MAX_STEPS:
            self._stop_recording()

    def _stop_recording(self) -> None:
        """Drop the log, and record nothing until the next full reset."""
        self._packed.clear()
        self._set_entries(collections.deque(maxlen=0))

    def _end_by_failure(self, error: BaseException, method: str) -> None:
        """End the log with a call that did not return, and report an exception.

        A further call before the next full reset makes the log full, because it does not say what the failed call has
        changed.
        """
        log = self.episode_log()
        if log is None:
            return
        self._set_entries(collections.deque(self._entries, len(self._entries) + 1))
        if self._on_failure is not None and isinstance(error, Exception):
            self._on_failure(error, method, log)

    def make_recorded_call(self, name: str, data: Any) -> Any:
        """Record a call, make it, and return its result.

        :param name: one of :data:`RECORDED_CALLS`
        :param data: data of the call, as in :data:`~rl_ext_core.recording.episode_log.RECORDED_CALLS`
        """
        copied = copy_output(data)  # the caller may change the data later
        record_setting(self._settings, name, copied)
        self._entries.append(RecordedCall((name, copied)))
        try:
            return RECORDED_CALLS[name](self.env, data)
        finally:
            self._entries.append(None)

    def assume_seeded_reset(self, observation: Any) -> None:
        """Begin the log of an episode that was reset before this recorder was added.

        The environment has not been stepped since. gymnasium's environments store the seed of their generator. If that
        was not the seed of the last reset, repeating the episode reports a difference.

        :param observation: observation of that reset
        """
        seed = getattr(self.unwrapped, "np_random_seed", None)
        self._start({}, [])
        self._entries.append(RecordedCall(("reset", {} if seed in (None, -1) else {"seed": seed})))
        self._entries.append(observation_checksum(observation))

    def episode_log(self) -> EpisodeLog | None:
        """Return the log of the current episode.

        :return: the log; None before the first reset, and for an episode of more than ``MAX_STEPS`` steps
        """
        entries = list(self._entries)
        if self._head is None or len(entries) == self._entries.maxlen:
            return None
        generators, settings = self._head
        calls: list[tuple[str, Any]] = []
        checksums: list[int | None] = []
        for packed in self._packed:
            packed.append_to(calls, checksums)
        calls += [tuple(call) if type(call) is RecordedCall else ("step", call) for call in entries[::2]]
        checksums += map(read_result, entries[1::2])
        return EpisodeLog(read_snapshot(generators), settings, calls, checksums)

    def repeat(self, log: EpisodeLog) -> Repetition:
        """Reset the environment to the beginning of a recorded episode, and repeat its calls.

        The environment must have been built like the recorded one, and not been used.

        :param log: a log whose last call has returned
        """
        restore_beginning(self.env, log, self._generators)
        self._settings = {(name, data[0]): (name, data) for name, data in log.settings}
        return repeat_calls(self, log)


def read_result(result: Any) -> int | None:
    """Return the checksum of what a call returned, from the recorder's entry for it."""
    observation, *others = result if isinstance(result, tuple) else (result,)
    if isinstance(observation, bytes):
        observation = zlib.crc32(observation)  # that of a small array
    return step_checksum(observation, *others) if others else observation


class _PackedCalls:
    """Calls and the checksums of their results, with the actions in an array.

    :param entries: entries of the recorder
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        calls = list(entries)
        results = [read_result(result) for result in calls[1::2]]
        self._checksums = array("q", [-1 if result is None else result for result in results])
        # Calls other than steps, by their place. All actions are in the list or the array.
        self._others = {place: call for place, call in enumerate(calls[::2]) if type(call) is RecordedCall}
        actions = [call for call in calls[::2] if type(call) is not RecordedCall]
        packed = [action for action in actions if _packs(action)]
        kinds = {(type(action), getattr(action, "dtype", None), getattr(action, "shape", ())) for action in packed}
        self._kind: Any = None
        self._actions: Any = actions
        if len(kinds) == 1 and len(packed) == len(actions):
            self._kind, self._actions = next(iter(kinds))[0], np.array(actions)
            if self._actions.dtype.hasobject:  # integers of more than 64 bits
                self._kind, self._actions = None, actions

    def append_to(self, calls: list[tuple[str, Any]], checksums: list[int | None]) -> None:
        """Append the calls and the checksums to lists."""
        actions = iter(self._actions.tolist() if self._kind in _NUMBERS else self._actions)
        for place, checksum in enumerate(self._checksums):
            if (other := self._others.get(place)) is not None:
                calls.append(tuple(other))
            else:
                action = next(actions)
                calls.append(("step", action.copy() if self._kind is np.ndarray else action))
            checksums.append(None if checksum < 0 else checksum)


def _packs(action: Any) -> bool:
    """Return whether an array can contain an action such that it is read unchanged."""
    kind = type(action)
    return kind in _NUMBERS or (isinstance(action, (np.ndarray, np.generic)) and action.dtype.kind in "biuf")


def restore_beginning(env: Any, log: EpisodeLog, generators: Generators) -> None:
    """Set the attributes and generators of an environment to those before a recorded episode.

    :param env: environment that was built like the recorded one, and has not been used
    :param generators: generators of the environment
    """
    for name, data in log.settings:
        RECORDED_CALLS[name](env, data)
    generators.restore(log.generators)


def _read_observation(observation: Any, info: Any, is_last: bool) -> tuple[Any, set[int]]:
    return observation, {observation_checksum(observation)}


def repeat_calls(
    env: Any,
    log: EpisodeLog,
    *,
    read: Callable[[Any, Any, bool], tuple[Any, set[int]]] = _read_observation,
    before_call: Callable[[int, int, str, int | None], None] = lambda call, step, name, first_difference: None,
) -> Repetition:
    """Repeat all calls of a log, also one that did not return.

    :param env: environment, after :func:`restore_beginning`
    :param read: function that gets an observation, its info, and whether it is the last one. It returns the observation
        as the recorded ones were converted, and the checksums that it may have; default: without conversion
    :param before_call: function called before each call with its number, the number of steps, its name, and the first
        step that differs
    """

    def make_call(name: str, data: Any) -> None:
        if isinstance(env, EpisodeRecorder):
            env.make_recorded_call(name, data)
        else:
            RECORDED_CALLS[name](env, data)

    observation, first_difference, steps, last = None, None, 0, len(log.calls) - 1
    for number, ((name, data), expected) in enumerate(itertools.zip_longest(log.calls, log.checksums)):
        steps += name == "step"
        before_call(number, steps, name, first_difference)
        if name == "reset":
            observation, info = env.reset(**data)
            observation, found = read(observation, info, number == last)
        elif name == "step":
            observation, reward, terminated, truncated, info = env.step(data)
            observation, sums = read(observation, info, number == last)
            found = {step_checksum(value, reward, terminated, truncated) for value in sums}
        else:
            try:
                make_call(name, data)
            except Exception:
                if number == last and log.is_interrupted:
                    raise  # other calls have raised in the recorded episode, too
            continue
        if first_difference is None and expected is not None and expected not in found:
            first_difference = steps
    return Repetition(observation, first_difference)


_OWN_ATTRIBUTES = frozenset(
    (
        *("env", "_action_space", "_observation_space", "_metadata", "_cached_spec"),
        *("_generators", "_summarize", "_settings", "_head", "_entries", "_packed", "_step", "_on_failure"),
    )
)
