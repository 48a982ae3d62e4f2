"""Repeat the failure of a capsule in a process of its own, and shorten its episode."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rl_ext_core import processes
from rl_ext_core._environment_source import as_gymnasium_env
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, RlExtError, WorkerError
from rl_ext_core.recording.capsule import Capsule, RecordedFailure
from rl_ext_core.recording.episode_log import EpisodeLog, observation_checksum
from rl_ext_core.recording.generators import Generators, layers_of
from rl_ext_core.recording.memory_layout import MemoryLayout
from rl_ext_core.recording.recorder import repeat_calls, restore_beginning

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_TRIES",
    "OutputCheck",
    "ReplayResult",
    "build_env",
    "minimize",
    "play",
    "prepare_env",
]

DEFAULT_TIMEOUT, MAX_TRIES = 60.0, 200
_START_TIMEOUT = 600.0
# Shortened episodes are tried with this limit, because each one that hangs takes all of it.
_SHORT_TIMEOUT = 5.0
_LABEL = "replay"
_RENDERED_S, _DEFAULT_FPS = 10.0, 30.0


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of repeating an episode.

    :ivar failure: failure of the environment; None if all calls returned
    :ivar step: number of steps, including the failed one
    :ivar n_calls: number of calls, including the failed one
    :ivar first_difference: first step whose observation, reward or end differs from the recorded one, 0 for the reset;
        None if all are equal
    """

    failure: RecordedFailure | None
    step: int
    n_calls: int
    first_difference: int | None

    def is_like(self, failure: RecordedFailure) -> bool:
        """Whether the environment failed in the same way.

        Exceptions must have the same class, and come from the same function. Processes must have ended by the same
        signal or exit code, and observations must be wrong in the same way.
        """
        found = self.failure
        if found is None or found.kind != failure.kind:
            return False
        if failure.kind == "observation":
            return _agree(_last_line(found), _last_line(failure))
        if failure.kind == "exception":
            same_class = not failure.exception or found.exception == failure.exception
            return same_class and _agree(_failed_function(found), _failed_function(failure))
        return failure.kind not in ("signal", "exit") or failure.exitcode in (None, found.exitcode)

    def describe(self) -> str:
        """Describe the failure in a few words, such as "SIGSEGV in step, env.py line 12"."""
        assert self.failure is not None
        return describe_failure(self.failure)


def _agree(one: str, other: str) -> bool:
    """Whether two texts are equal, or one of them is not known."""
    return not one or not other or one == other


def _last_line(failure: RecordedFailure) -> str:
    """Return the last line of a traceback, which is the exception; empty if it is not known."""
    return failure.traceback.strip().rpartition("\n")[2].strip()


def _failed_function(failure: RecordedFailure) -> str:
    """Return name and file of the function that failed; empty if it is not known."""
    name, _, place = _innermost_frame(failure.traceback).partition(", ")
    return f"{name}, {os.path.basename(place.rpartition(':')[0])}" if place else ""


def describe_failure(failure: RecordedFailure) -> str:
    """Describe a failure in a few words, with the frame that it occurred in."""
    what = {"timeout": "no answer (it hangs)", "observation": "values that do not fit the spaces"}.get(failure.kind)
    code = failure.exitcode
    if failure.kind == "signal" and code is not None:
        what = signal.Signals(-code).name if -code in signal.valid_signals() else f"exit code {code}"
    elif failure.kind == "exit":
        what = f"exit code {code}"
    what = what or failure.exception or failure.kind
    if failure.kind == "observation":  # the innermost frame is that of the check
        return what
    frame = _innermost_frame(failure.traceback)
    return f"{what} in {frame}" if frame else what


def _innermost_frame(traceback: str) -> str:
    """Return the innermost frame of a traceback or of faulthandler's stacks; empty if there is none."""
    text, is_stack = traceback, False
    for mark in ("Current thread", "most recent call first"):
        if mark in text:
            text, is_stack = text.partition(mark)[2], True
    frames = re.findall(r'File "(.+?)", line (\d+),? in (\S+)', text)
    if not frames:
        return ""
    path, line, name = frames[0] if is_stack else frames[-1]
    return f"{name}, {path}:{line}"


# -- in the process of the environment


def build_env(capsule: Capsule, source: str | None, *, render: bool = False) -> Any:
    """Build the environment of a capsule.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :param render: whether the environment must return images
    :raises InvalidArgumentError: If the factory cannot be loaded, or the environment returns no images.
    """
    if not {"", os.getcwd()} & set(sys.path):  # the command of an installed package does not have it
        sys.path.insert(0, os.getcwd())
    if source is not None:
        from rl_ext_core._environment_source import load_source
        from rl_ext_core.factory import as_factory

        factory: Any = as_factory(load_source(source))
    else:
        factory = _load_factory(capsule)
    env = None
    if render:
        with contextlib.suppress(InvalidArgumentError, TypeError):  # it takes no render_mode
            env = factory(render_mode="rgb_array")
    try:
        env = factory() if env is None else env
    except ModuleNotFoundError as error:  # a factory may load the module of the environment when it is called
        raise _loading_error(error) from error
    if render and getattr(env, "render_mode", None) != "rgb_array":
        raise InvalidArgumentError(
            f"--render: the environment has render_mode={getattr(env, 'render_mode', None)!r}; expected 'rgb_array'. "
            "Write --env module:function with a function that passes render_mode='rgb_array'"
        )
    return env


def _load_factory(capsule: Capsule) -> Any:
    """Unpickle the factory of a capsule."""
    try:
        return capsule.load_factory()
    except Exception as error:
        raise _loading_error(error) from error


def _loading_error(error: Exception) -> InvalidArgumentError:
    """Return the exception for a factory that cannot be loaded."""
    return InvalidArgumentError(
        f"the factory of the capsule cannot be loaded ({type(error).__name__}: {error}); expected its module on the "
        "import path. Start rl-ext in the folder of its module, or pass --env module:function"
    )


class OutputCheck:
    """Check of what an environment returns, as workers do it."""

    def __init__(self, env: Any, *, in_space: bool) -> None:
        self._env, self._in_space = env, in_space
        self._layout = None
        with contextlib.suppress(InvalidArgumentError):  # observations that are not arrays
            self._layout = MemoryLayout.from_spaces(1, env.observation_space, env.action_space)
            arrays = self._layout.arrays(bytearray(self._layout.size))
            self._slots = self._layout.slots(arrays, 0)
            self._rows = [arrays[f"observation {index}"] for index in range(len(self._layout.paths))]

    def check(self, observation: Any, info: Any, is_last: bool) -> tuple[Any, set[int]]:
        """Raise if an observation or an info is invalid; return the observation, and the checksums that it may have.

        :param is_last: whether to check the bounds of the space, too
        """
        found = {observation_checksum(observation)}
        if self._layout is not None:
            for slot in self._slots:
                slot.write(observation)
            found.add(observation_checksum(self._layout.build_observation([row[0] for row in self._rows])))
        if not isinstance(info, dict):
            raise EnvironmentOutputError(f"the environment returned an info of type {type(info).__name__}")
        space = self._env.observation_space
        if self._in_space and is_last and not space.contains(observation):
            raise EnvironmentOutputError(f"the observation is not in {space}")
        return observation, found


def prepare_env(env: Any, log: EpisodeLog) -> Any:
    """Return an environment as one of gymnasium, in the state before a recorded episode.

    :param env: environment that was built like the recorded one
    :raises InvalidArgumentError: If it has other wrappers or spaces.
    """
    env = as_gymnasium_env(env)
    layers = layers_of(env)
    # The innermost layer is the environment, which has this generator. Wrappers do not have it.
    depth = next((number + 1 for number, name in log.generators if name == "_np_random"), len(layers))
    if len(layers) != depth:
        raise _unlike_error(layers, f"{len(layers) - 1} instead of {depth - 1} wrappers")
    try:
        restore_beginning(env, log, Generators(layers))
    except Exception as error:
        raise _unlike_error(layers, f"{type(error).__name__}: {error}") from error
    return env


def _unlike_error(layers: Sequence[Any], reason: str) -> InvalidArgumentError:
    """Return the exception for an environment that has other wrappers or spaces than the recorded one."""
    return InvalidArgumentError(
        f"the environment, {' of '.join(type(layer).__name__ for layer in layers)}, is not built like the recorded one "
        f"({reason}); expected the same wrappers and spaces. Write --env module:function, with a function that builds "
        "them all"
    )


def _serve(connection: Connection, packed: bytes) -> None:
    """Build the environment, and repeat its calls. Target of a process.

    :param packed: capsule, source, numbers of the calls or None, seconds between messages to the parent, and seconds at
        the end whose images are sent
    """
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    capsule, source, chosen, interval, rendered = pickle.loads(packed)
    env = build_env(capsule, source, render=rendered > 0)
    log = capsule.load_log()
    if chosen is not None:
        log = _select_calls(log, chosen)
    env = prepare_env(env, log)
    fps = float(getattr(env, "metadata", {}).get("render_fps") or _DEFAULT_FPS)
    connection.send(fps)
    first_rendered = len(log.calls) - max(1, int(rendered * fps))
    due = time.monotonic() + interval

    def send_progress(call: int, step: int, name: str, first_difference: int | None) -> None:
        """Report the present call, and tell the parent regularly that the environment does not hang."""
        nonlocal due
        processes.set_status(step=step, call=call, phase=name, first_difference=first_difference)
        if time.monotonic() > due:
            connection.send("playing")
            due = time.monotonic() + interval
        if rendered and call >= max(1, first_rendered):
            connection.send(env.render())

    try:
        check = OutputCheck(env, in_space=capsule.failure.kind == "observation")
        repetition = repeat_calls(env, log, read=check.check, before_call=send_progress, stop_at_end=chosen is not None)
    except Exception as error:
        kind = "observation" if isinstance(error, EnvironmentOutputError) else "exception"
        processes.set_status(failure=kind, exception=type(error).__name__)
        raise
    processes.set_status(is_done=True, first_difference=repetition.first_difference)
    connection.send("done")
    with contextlib.suppress(Exception):
        env.close()


def _select_calls(log: EpisodeLog, chosen: Sequence[int]) -> EpisodeLog:
    """Return a log with some of the calls. Only the first observation is known."""
    calls = [log.calls[number] for number in chosen]
    return dataclasses.replace(log, calls=calls, checksums=[*log.checksums[:1], *[None] * len(calls)][: len(calls) - 1])


# -- in the process of the command


def play(
    capsule: Capsule,
    source: str | None = None,
    *,
    chosen: Sequence[int] | None = None,
    timeout: float | None = None,
    frames: list[Any] | None = None,
) -> ReplayResult:
    """Repeat the episode of a capsule in a process of its own.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :param chosen: numbers of the calls to make; default: all
    :param timeout: time limit of a step in seconds; default: that of the capsule, or 60
    :param frames: list to which the frames per second and the images of the last ten seconds are appended
    :raises WorkerError: If the environment cannot be built.
    """
    timeout = timeout or capsule.step_timeout or DEFAULT_TIMEOUT
    interval = timeout / 4
    context = processes.get_context(preload=("gymnasium", __name__), label=_LABEL)
    ours, theirs = context.Pipe()
    packed = pickle.dumps((capsule, source, chosen, interval, 0.0 if frames is None else _RENDERED_S))
    process = context.Process(target=_serve, args=(theirs, packed))
    is_built = False
    with ours, theirs:
        process.start()
        theirs.close()
        watch = processes.Watch([process], label=_LABEL)
        try:
            with watch.operation("the constructor", _START_TIMEOUT):
                message = ours.recv()
            is_built = True
            while not (isinstance(message, str) and message == "done"):
                if frames is not None and not isinstance(message, str):
                    frames.append(message)
                with watch.operation("step", timeout + interval):
                    message = ours.recv()
            watch.expect_exit()
            process.join(_SHORT_TIMEOUT)
        except WorkerError as error:
            if not is_built:
                if isinstance(error.__cause__, RlExtError):
                    raise error.__cause__ from None
                raise
            return _result_of(error)
        finally:
            watch.kill()
            watch.stop()
        notes = process.report.notes
    return ReplayResult(None, notes.get("step", 0), notes.get("call", -1) + 1, notes.get("first_difference"))


def _result_of(error: WorkerError) -> ReplayResult:
    """Return the result of an episode that ended with a failure."""
    notes = error.notes
    failure = RecordedFailure.from_error(error)
    failure = dataclasses.replace(
        failure,
        kind=notes.get("failure", failure.kind),
        exception=notes.get("exception", failure.exception),
        phase=notes.get("phase", failure.phase),
    )
    return ReplayResult(failure, notes.get("step", 0), notes.get("call", 0) + 1, notes.get("first_difference"))


def minimize(
    capsule: Capsule, source: str | None = None, advance: Callable[[int], None] = lambda tries: None
) -> tuple[Capsule, int]:
    """Remove steps from the episode of a capsule, as long as the environment fails in the same way.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :param advance: function called with the number of episodes that were tried since its last call
    :return: capsule with fewer steps, and the number of tries. It is the same capsule if no step can be removed
    """
    log, failure = capsule.load_log(), capsule.failure
    timeout = capsule.step_timeout or DEFAULT_TIMEOUT
    tries, last, tried = 0, len(log.calls) - 1, set[tuple[int, ...]]()

    def fails(numbers: Sequence[int], limit: float) -> int | None:
        """Return the number of calls until the same failure; None if there is none, or no tries are left."""
        nonlocal tries
        if tries >= MAX_TRIES:
            return None
        tries += 1
        advance(1)
        try:
            result = play(capsule, source, chosen=numbers, timeout=limit)
        except WorkerError:
            return None
        return result.n_calls if result.is_like(failure) else None

    def calls_of(steps: list[int]) -> list[int]:
        """Return the numbers of all calls if only these steps are made before the last call."""
        return [*sorted(number for number in {*steps, *others} if number < last), last]

    def shorten(steps: list[int]) -> list[int] | None:
        """Return the steps before the failure if only these are made; None if there is no failure."""
        nonlocal last
        numbers = calls_of(steps)
        count = None if tuple(numbers) in tried else fails(numbers, min(timeout, _SHORT_TIMEOUT))
        tried.add(tuple(numbers))
        if count is None:
            return None
        last = numbers[count - 1]  # it may have failed before the last call
        return [step for step in steps if step < last]

    others = [number for number, (name, _) in enumerate(log.calls[:-1]) if name != "step"]
    steps = [number for number, (name, _) in enumerate(log.calls[:-1]) if name == "step"]
    steps = _remove_parts(_shortest_suffix(steps, shorten), shorten)
    numbers = calls_of(steps)
    if len(numbers) == len(log.calls):
        return capsule, tries
    tries = min(tries, MAX_TRIES - 1)  # one try is left to confirm the result with the whole time limit
    if fails(numbers, timeout) is None:
        return capsule, tries
    short = _select_calls(log, numbers)
    return dataclasses.replace(capsule, log=short, step=short.steps, calls_pickle=None), tries


def _shortest_suffix(steps: list[int], shorten: Callable[[list[int]], list[int] | None]) -> list[int]:
    """Return the last steps, whose number is 0 or a power of two, that still lead to the failure."""
    count = 0
    while count < len(steps):
        found = shorten(steps[len(steps) - count :])
        if found is not None:
            return found
        count = max(1, 2 * count)
    return steps


def _remove_parts(steps: list[int], shorten: Callable[[list[int]], list[int] | None]) -> list[int]:
    """Remove parts of decreasing size that the failure does not need, as in Zeller's delta debugging."""
    size = max(1, len(steps) // 2)
    while steps:
        begin, length = 0, len(steps)
        while begin < len(steps):
            found = shorten([*steps[:begin], *steps[begin + size :]])
            if found is None:
                begin += size
            else:
                steps = found
        if size == 1 and len(steps) == length:
            break
        size = max(1, size // 2)
    return steps
