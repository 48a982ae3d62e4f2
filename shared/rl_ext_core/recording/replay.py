"""Repeat the failure of a capsule in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_ext_core import processes
from rl_ext_core._environment_source import as_gymnasium_env
from rl_ext_core._file_guard import ProtectedFileError, protect_files, remove_created
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, RlExtError, WorkerError
from rl_ext_core.recording.capsule import Capsule, RecordedFailure
from rl_ext_core.recording.episode_log import EpisodeLog
from rl_ext_core.recording.generators import layers_of
from rl_ext_core.recording.memory_layout import MemoryLayout
from rl_ext_core.recording.recorder import EpisodeRecorder

__all__ = [
    "DEFAULT_TIMEOUT",
    "ReplayResult",
    "play",
]

DEFAULT_TIMEOUT = 60.0
_START_TIMEOUT = 600.0
_EXIT_TIMEOUT = 5.0
_LABEL = "replay"


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
    if failure.exception == ProtectedFileError.__name__:
        return _last_line(failure).partition(": ")[2]
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


def _build_env(capsule: Capsule, source: str | None) -> Any:
    """Build the environment of a capsule.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :raises InvalidArgumentError: If the factory cannot be loaded.
    """
    if not {"", os.getcwd()} & set(sys.path):  # the command of an installed package does not have it
        sys.path.insert(0, os.getcwd())
    if source is not None:
        from rl_ext_core._environment_source import load_source
        from rl_ext_core.factory import as_factory

        factory: Any = as_factory(load_source(source))
    else:
        factory = _load_factory(capsule)
    try:
        return factory()
    except ModuleNotFoundError as error:  # a factory may load the module of the environment when it is called
        raise _loading_error(error) from error


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


def _output_check(env: Any, *, in_space: bool) -> Callable[[Any, Any, bool], None]:
    """Return a function that raises if an observation or an info is invalid, as workers do.

    :param in_space: whether to check that the last observation is in the space, too
    """
    slots: list[Any] = []
    with contextlib.suppress(InvalidArgumentError):  # observations that are not arrays
        layout = MemoryLayout.from_spaces(1, env.observation_space, env.action_space)
        slots = layout.slots(layout.arrays(bytearray(layout.size)), 0)

    def check(observation: Any, info: Any, is_last: bool) -> None:
        for slot in slots:
            slot.write(observation)
        if not isinstance(info, dict):
            raise EnvironmentOutputError(f"the environment returned an info of type {type(info).__name__}")
        if in_space and is_last and not env.observation_space.contains(observation):
            raise EnvironmentOutputError(f"the observation is not in {env.observation_space}")

    return check


def _prepare_env(env: Any, log: EpisodeLog) -> EpisodeRecorder:
    """Return an environment in a recorder, in the state before a recorded episode.

    :param env: environment that was built like the recorded one
    :raises InvalidArgumentError: If it has other wrappers or spaces.
    """
    env = as_gymnasium_env(env)
    layers = layers_of(env)
    # The innermost layer is the environment, which has this generator. Wrappers do not have it.
    depth = next((number + 1 for number, name in log.generators if name == "_np_random"), len(layers))
    if len(layers) != depth:
        raise _unlike_error(layers, f"{len(layers) - 1} instead of {depth - 1} wrappers")
    recorder = EpisodeRecorder(env)
    try:
        recorder.restore_beginning(log)
    except Exception as error:
        raise _unlike_error(layers, f"{type(error).__name__}: {error}") from error
    return recorder


def _unlike_error(layers: Sequence[Any], reason: str) -> InvalidArgumentError:
    """Return the exception for an environment that has other wrappers or spaces than the recorded one."""
    return InvalidArgumentError(
        f"the environment, {' of '.join(type(layer).__name__ for layer in layers)}, is not built like the recorded one "
        f"({reason}); expected the same wrappers and spaces. Use --env module:function, with a function that builds "
        "them all"
    )


def _serve(connection: Connection, packed: bytes) -> None:
    """Build the environment, and repeat its calls. Target of a process.

    :param packed: capsule, source, seconds between messages to the parent, and arguments of ``protect_files``
    """
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    capsule, source, interval, folder, created = pickle.loads(packed)
    protect_files(folder, created)
    log, env = capsule.load_log(), _build_env(capsule, source)
    recorder = _prepare_env(env, log)
    connection.send("playing")
    due = time.monotonic() + interval

    def send_progress(call: int, step: int, name: str, first_difference: int | None) -> None:
        """Report the present call, and tell the parent regularly that the environment does not hang."""
        nonlocal due
        processes.set_status(step=step, call=call, phase=name, first_difference=first_difference)
        if time.monotonic() > due:
            connection.send("playing")
            due = time.monotonic() + interval

    try:
        check = _output_check(recorder, in_space=capsule.failure.kind == "observation")
        repetition = recorder.repeat_calls(log, before_call=send_progress, check=check)
    except Exception as error:
        kind = "observation" if isinstance(error, EnvironmentOutputError) else "exception"
        processes.set_status(failure=kind, exception=type(error).__name__)
        raise
    processes.set_status(is_done=True, first_difference=repetition.first_difference)
    connection.send("done")
    with contextlib.suppress(Exception):
        recorder.close()


# -- in the process of the command


def play(capsule: Capsule, source: str | None = None) -> ReplayResult:
    """Repeat the episode of a capsule in a process of its own.

    What the environment writes to files of the user is discarded, and new files are removed.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :raises WorkerError: If the environment cannot be built.
    """
    timeout = capsule.step_timeout or DEFAULT_TIMEOUT
    interval = timeout / 4
    is_built = False
    with contextlib.ExitStack() as stack:
        options: Any = {"prefix": "rl-ext-replay-", "ignore_cleanup_errors": True}
        folder = stack.enter_context(tempfile.TemporaryDirectory(**options))
        created = Path(folder, "created")
        created.touch()
        environs = [dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)]
        context = processes.get_context(preload=("gymnasium", __name__), environs=environs, label=_LABEL)
        ours, theirs = map(stack.enter_context, context.Pipe())
        packed = pickle.dumps((capsule, source, interval, folder, str(created)))
        process = context.Process(target=_serve, args=(theirs, packed))
        process.start()
        theirs.close()
        watch = processes.Watch([process], label=_LABEL)
        try:
            with watch.operation("the constructor", _START_TIMEOUT):
                message = ours.recv()
            is_built = True
            while message != "done":
                with watch.operation("step", timeout + interval):
                    message = ours.recv()
            watch.expect_exit()
            process.join(_EXIT_TIMEOUT)
        except WorkerError as error:
            if not is_built:
                if isinstance(error.__cause__, RlExtError):
                    raise error.__cause__ from None
                raise
            return _result_of(error)
        finally:
            watch.kill()
            watch.stop()
            remove_created(created)
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
