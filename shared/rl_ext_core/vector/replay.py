"""Repeat the failure of a capsule in a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium

from rl_ext_core._environment_source import as_gymnasium_env, load_source
from rl_ext_core._file_guard import ProtectedFileError, protect_files, remove_created
from rl_ext_core.errors import InvalidArgumentError, RlExtError, WorkerError
from rl_ext_core.factory import as_factory
from rl_ext_core.recording.capsule import Capsule, RecordedFailure
from rl_ext_core.recording.episode_log import EpisodeLog
from rl_ext_core.recording.generators import layers_of
from rl_ext_core.recording.recorder import EpisodeRecorder
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.environments import Caller, PoolOptions
from rl_ext_core.vector.pool import Pool
from rl_ext_core.vector.worker import require_dict

_STEP_TIMEOUT, _START_TIMEOUT = 60.0, 600.0


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of repeating an episode.

    :ivar failure: failure of the environment; None if all calls returned
    :ivar step: number of steps, including the failed one
    :ivar first_difference: first step whose observation, reward or end differs from the recorded one, 0 for the reset;
        None if all are equal
    """

    failure: RecordedFailure | None
    step: int
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
        """Describe the failure in a few words, with the frame that it occurred in."""
        failure = self.failure
        assert failure is not None
        if failure.exception == ProtectedFileError.__name__:
            return _last_line(failure).partition(": ")[2]
        if failure.kind == "observation":  # the innermost frame is that of the check
            return "values that do not fit the spaces"
        code, what = failure.exitcode, failure.exception or failure.kind
        if failure.kind == "timeout":
            what = "no answer (it hangs)"
        elif failure.kind == "signal" and code is not None and -code in signal.valid_signals():
            what = signal.Signals(-code).name
        elif failure.kind in ("signal", "exit"):
            what = f"exit code {code}"
        frame = _innermost_frame(failure.traceback)
        return f"{what} in {frame}" if frame else what


def _agree(one: str, other: str) -> bool:
    return not one or not other or one == other


def _last_line(failure: RecordedFailure) -> str:
    return failure.traceback.strip().rpartition("\n")[2].strip()


def _failed_function(failure: RecordedFailure) -> str:
    """Return name and file of the function that failed; empty if it is not known."""
    name, _, place = _innermost_frame(failure.traceback).partition(", ")
    return f"{name}, {os.path.basename(place.rpartition(':')[0])}" if place else ""


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


# -- in the worker


class _RepeatedEpisode(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment whose resets and steps make the next call of a recorded episode.

    Their info contains the first step that has differed from the log.
    """

    def __init__(self, recorder: EpisodeRecorder, log: EpisodeLog) -> None:
        super().__init__(recorder)
        self._calls = recorder.repeat_calls(log)

    def reset(self, **_: Any) -> Any:
        observation, info, first_difference = next(self._calls)
        require_dict(info, "reset")
        return observation, {"first difference": first_difference}

    def step(self, action: Any) -> Any:
        observation, info, first_difference = next(self._calls)
        require_dict(info, "step")
        return observation, 0.0, False, False, {"first difference": first_difference}


def _build_env(capsule: Capsule, source: str | None, folder: str, created: str) -> _RepeatedEpisode:
    """Build the environment of a capsule, in the state before the recorded episode.

    :raises InvalidArgumentError: If the factory cannot be loaded, or the environment has other wrappers or spaces.
    """
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder))
    protect_files(folder, created)
    if not {"", os.getcwd()} & set(sys.path):  # the command of an installed package does not have it
        sys.path.insert(0, os.getcwd())
    factory = None
    try:
        factory = capsule.load_factory() if source is None else as_factory(load_source(source))
        env = as_gymnasium_env(factory())
    except Exception as error:
        # A factory may load the module of the environment when it is called.
        has_failed = factory is not None and not isinstance(error, ModuleNotFoundError)
        if has_failed or isinstance(error, RlExtError):
            raise
        raise InvalidArgumentError(
            f"the factory of the capsule cannot be loaded ({type(error).__name__}: {error}); expected its module on "
            "the import path. Start rl-ext in the folder of its module, or pass --env module:function"
        ) from error
    log, layers, recorder = capsule.log, layers_of(env), EpisodeRecorder(env)
    # The innermost layer is the environment, which has this generator. Wrappers do not have it.
    depth = next((number + 1 for number, name in log.generators if name == "_np_random"), len(layers))
    difference = "" if len(layers) == depth else f"{len(layers) - 1} instead of {depth - 1} wrappers"
    try:
        if not difference:
            recorder.restore_beginning(log)
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    if difference:
        names = " of ".join(type(layer).__name__ for layer in layers)
        raise InvalidArgumentError(
            f"the environment, {names}, is not built like the recorded one ({difference}); expected the same wrappers "
            "and spaces. Use --env module:function, with a function that builds them all, also the Monitor that "
            "make_vec_env adds"
        )
    return _RepeatedEpisode(recorder, log)


# -- in the process of the command


def play(capsule: Capsule, source: str | None = None) -> ReplayResult:
    """Repeat the episode of a capsule in a worker.

    What the environment writes to files of the user is discarded, and new files are removed.

    :param source: ``--env`` of the command line; default: the pickled factory of the capsule
    :raises WorkerError: If the environment cannot be built.
    """
    options = PoolOptions(
        start_timeout=_START_TIMEOUT,
        step_timeout=capsule.step_timeout or _STEP_TIMEOUT,
        recorder=False,
        caller=Caller(label="replay"),
    )
    steps, first_difference = 0, None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-ext-replay-", ignore_cleanup_errors=True))
        created = Path(folder, "created")
        created.touch()
        stack.callback(remove_created, created)
        build = functools.partial(_build_env, capsule, source, folder, str(created))
        try:
            pool = Pool([build], options, autoreset=Autoreset.DISABLED)
        except WorkerError as error:
            if isinstance(error.__cause__, RlExtError):  # the project's own exceptions are raised unchanged
                raise error.__cause__ from None
            raise
        stack.callback(pool.end)
        for number, (name, _) in enumerate(capsule.log.calls):
            steps += name == "step"
            try:
                if number == 0:
                    pool.begin_reset([(None, None)])
                else:
                    pool.begin_step([None])
                pool.wait(raise_failures=True)
            except WorkerError as error:
                return ReplayResult(RecordedFailure.from_error(error, name), steps, first_difference)
            ((_, (info, reset_info, _, _)),) = pool.entries(to_reset=number == 0)
            first_difference = (reset_info or info)["first difference"]
    return ReplayResult(None, steps, first_difference)
