"""Capsules: files with a failure of an environment, and everything that is needed to repeat it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import logging
import os
import pickle
import platform
import re
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import format_exception
from typing import Any

import numpy as np

from rl_ext_core import _pickle
from rl_ext_core.errors import CorruptFileError, EnvironmentOutputError, InvalidArgumentError, StorageError, WorkerError
from rl_ext_core.recording.episode_log import EpisodeLog, pickle_value

_log = logging.getLogger("rl_ext_core.recording")

_FORMAT = 3
CRASH_FOLDER = "."  # for recorder=True
MAX_CAPSULES = 10  # per folder
_MAX_TEXT = 100_000
_ABOUT, _LOG, _FACTORY = "capsule.json", "log.pickle", "environment.pickle"
# Functions and classes in the pickles of arrays.
_ARRAY_NAMES = ("_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype")
_PACKAGES = ("gymnasium", "numpy", "stable_baselines3", "torch", "torchrl", "ale_py", "mujoco", "Box2D", "stable_retro")
# Variables that change how environments compute or render. Others may contain secrets.
_VARIABLES = re.compile(
    r"CUDA_\w+|NVIDIA_VISIBLE_DEVICES|MUJOCO_\w+|EGL_\w+|PYOPENGL_PLATFORM|PYRENDER_\w+|SDL_\w+|\w+_NUM_THREADS|"
    r"LD_LIBRARY_PATH|PYTHONHASHSEED|DISPLAY"
)


@dataclasses.dataclass(frozen=True)
class RecordedFailure:
    """Failure of an environment.

    :ivar kind: ``"exception"``, ``"signal"``, ``"exit"``, ``"timeout"``, or ``"observation"`` for values that do
        not fit the environment's spaces
    :ivar summary: the failure in one line
    :ivar phase: method that failed, such as ``"step"``; None if unknown
    :ivar exitcode: exit code of the process, negative for a signal; None if it had not ended
    :ivar traceback: traceback of the exception, or faulthandler's stacks
    :ivar exception: name of the exception's class; empty if there is none
    """

    kind: str
    summary: str
    phase: str | None = None
    exitcode: int | None = None
    traceback: str = ""
    exception: str = ""

    @classmethod
    def from_error(cls, error: BaseException, phase: str) -> RecordedFailure:
        """Describe the failure of a worker, or an exception of an environment in this process."""
        if isinstance(error, WorkerError):
            found, cause = error, error.__cause__
        else:
            found, cause = WorkerError("", kind="exception", traceback="".join(format_exception(error))), error
        name = _raised_class(found.traceback) if cause is None else type(cause).__name__
        kind = "observation" if isinstance(cause, EnvironmentOutputError) else found.kind
        summary = (str(error) or name).splitlines()[0].rstrip(":")
        exception = name if kind in ("exception", "observation", "exit") else ""
        return cls(kind, summary, phase, found.exitcode, found.traceback, exception)


def _raised_class(traceback: str) -> str:
    found = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", traceback, re.MULTILINE)
    return found[-1].rpartition(".")[2] if found else ""


@dataclasses.dataclass(frozen=True)
class Capsule:
    """Failure of an environment, with its factory and the log of its episode.

    Reading a capsule executes no code. :meth:`load_factory` does.

    :ivar failure: the failure
    :ivar environment: number of the environment
    :ivar step: number of the failed step in the log, 0 for its reset
    :ivar log: the log, which is plain data
    :ivar source: source code that built the environment, with dots for parts that are not known
    :ivar factory_pickle: pickled factory; None if it cannot be pickled
    :ivar step_timeout: time limit of a step in seconds; None for none
    :ivar encoded_actions: whether actions are the bytes of TensorDicts
    :ivar created: time of the failure, in UTC
    :ivar versions: versions of Python, of the platform and of packages, by name
    :ivar variables: environment variables that may matter
    """

    failure: RecordedFailure
    environment: int
    step: int
    log: EpisodeLog
    source: str = ""
    factory_pickle: bytes | None = None
    step_timeout: float | None = None
    encoded_actions: bool = False
    created: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def load_factory(self) -> Any:
        """Unpickle the factory of the environment, which executes code of the capsule."""
        assert self.factory_pickle is not None
        return pickle.loads(self.factory_pickle)


def record_crash(recorder: bool | str | os.PathLike[str], **contents: Any) -> str:
    """Write a capsule, and return a sentence with the command that repeats the failure."""
    folder = CRASH_FOLDER if isinstance(recorder, bool) else recorder
    try:
        return f"The episode is recorded. To repeat the failure, run: rl-ext replay {write_capsule(folder, **contents)}"
    except Exception as error:  # factories and arguments have code of the user
        return f"The episode is not recorded: {error}"


def record_exception(
    error: Exception,
    method: str,
    log: EpisodeLog,
    *,
    recorder: bool | str | os.PathLike[str],
    build_factories: Callable[[], Sequence[Any]],
    environment: int,
) -> None:
    """Write a capsule of an exception in this process, and add the command that repeats it as a note.

    Python 3.10 has no notes, so the command is logged there.

    :param build_factories: returns the factories of all environments, or raises if they cannot be copied
    """
    try:
        factory = build_factories()[environment]
    except Exception:  # the user's objects may raise anything
        factory = None
    failure = RecordedFailure.from_error(error, method)
    text = record_crash(recorder, factory=factory, log=log, failure=failure, environment=environment)
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        _log.error("%s", text)


def write_capsule(
    folder: str | os.PathLike[str],
    *,
    factory: Any,
    log: EpisodeLog,
    failure: RecordedFailure,
    environment: int,
    step_timeout: float | None = None,
    encoded_actions: bool = False,
) -> Path:
    """Write a capsule ``crash-<time>-<number>.rlx`` to a folder, which is created if necessary; return its path.

    :raises StorageError: If the folder already contains :data:`MAX_CAPSULES`, or cannot be written.
    :raises InvalidArgumentError: If the log contains other objects than plain values and arrays.
    """
    folder, where = Path(folder), os.path.abspath(folder)
    packed = pickle_value((log.generators, log.settings, log.calls, log.checksums))
    if len(list(folder.glob("crash-*.rlx"))) >= MAX_CAPSULES:
        raise StorageError(
            f"{where!r} contains {MAX_CAPSULES} files crash-*.rlx. Delete some of them, or use another folder: "
            'recorder="crashes"'
        )
    try:
        _PlainUnpickler(io.BytesIO(packed)).load()
    except Exception as error:
        raise InvalidArgumentError(
            f"its actions, options or calls contain an object ({error}): expected numbers, texts and arrays in dicts, "
            "lists and tuples. Use action.numpy(), for example"
        ) from None
    texts = {name: text[:_MAX_TEXT] for name, text in vars(failure).items() if isinstance(text, str)}
    about = {
        "format": _FORMAT,
        "failure": {**vars(failure), **texts},
        "environment": environment,
        "step": log.steps,
        "source": getattr(factory, "to_source", lambda: "")(),
        "step_timeout": step_timeout,
        "encoded_actions": encoded_actions,
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "versions": current_versions(getattr(factory, "preload", ())),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }
    code: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # an object in the factory, whose code may raise anything
        code = {} if factory is None else {_FACTORY: _pickle.dumps(factory)}
    entries = {_ABOUT: json.dumps({**about, "executable code": [*code]}, indent=2), _LOG: packed, **code}
    name = f"crash-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{environment}"
    target = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = _open_new_file(folder, name)
        with target, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry, data in entries.items():
                archive.writestr(entry, data)
    except OSError as error:
        if target is not None:
            with contextlib.suppress(OSError):  # if the disk is full, there is a part of the file
                os.unlink(target.name)
        raise StorageError(f'{where!r} cannot be written: {error}. Pass another folder: recorder="crashes"') from error
    return Path(target.name)


def _open_new_file(folder: Path, name: str) -> Any:
    """Create a file whose name is new, also if another process writes a capsule at the same time."""
    path, number = folder / f"{name}.rlx", 1
    while True:
        try:
            return path.open("xb")
        except FileExistsError:
            number += 1
            path = folder / f"{name}-{number}.rlx"


def current_versions(modules: Any = ()) -> dict[str, str]:
    """Return the versions of Python, of the platform, and of packages that are loaded."""
    names = {name.partition(".")[0] for name in (*_PACKAGES, *modules)} & sys.modules.keys()
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in sorted(names - versions.keys()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name.replace("_", "-"))
    return versions


def read_capsule(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule, without executing code of it.

    :raises InvalidArgumentError: If there is no such file.
    :raises CorruptFileError: If it is damaged, or has a format that this version does not read.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidArgumentError(
            f"{str(path)!r} is not a file; expected a capsule, such as crash-20260101T120000-0.rlx"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        about = json.loads(entries[_ABOUT])
        if (found := about.pop("format")) == _FORMAT:
            del about["executable code"]
            log = EpisodeLog(*_PlainUnpickler(io.BytesIO(entries[_LOG])).load())
            failure = RecordedFailure(**about.pop("failure"))
            return Capsule(failure, log=log, factory_pickle=entries.get(_FACTORY), **about)
    except Exception as error:  # damaged bytes may raise anything
        raise CorruptFileError(
            f"{str(path)!r} is not a complete capsule ({type(error).__name__}: {error}); expected a file that a "
            "recorder wrote. Copy it again"
        ) from error
    raise CorruptFileError(
        f"{str(path)!r} has format {found}; expected {_FORMAT}. Use the version of rl-ext that wrote it"
    )


def write_actions(path: Path, log: EpisodeLog) -> list[str]:
    """Write the seeds and actions of an episode to a file of NumPy, for code that does not import this package.

    The arrays are ``actions``, ``seeds`` of the resets (-1 for none), and ``resets``, the number of steps before each.
    ``np_random`` is the state of the environment's generator before the first reset, as JSON.

    :return: what else the episode depends on, and the file does not contain
    :raises InvalidArgumentError: If the actions are not numbers or arrays of one shape and dtype, or the file exists.
    """
    steps = [number for number, (name, _) in enumerate(log.calls) if name == "step"]
    actions = [np.asarray(log.calls[number][1]) for number in steps]
    kinds = {(action.shape, action.dtype) for action in actions}
    if len(kinds) > 1 or any(dtype.kind not in "biuf" for _, dtype in kinds):
        raise InvalidArgumentError(
            f"--actions {str(path)!r}: the actions are not numbers or arrays of one shape and dtype, so no array can "
            "contain them. Use log.calls of rl_ext_core.recording.capsule.read_capsule(path)"
        )
    resets = [(number, data) for number, (name, data) in enumerate(log.calls) if name == "reset"]
    place = max((place for place in log.generators if place[1] == "_np_random"), default=None)
    state = None if place is None else log.generators[place]
    try:
        with open(path, "xb") as file:
            np.savez(
                file,
                actions=np.array(actions),
                seeds=np.array([-1 if data.get("seed") is None else data["seed"] for _, data in resets], np.int64),
                resets=np.searchsorted(steps, [number for number, _ in resets]),
                np_random=json.dumps(state, default=np.ndarray.tolist),
            )
    except OSError as error:
        raise InvalidArgumentError(
            f"--actions {str(path)!r} cannot be written: {error.strerror}; expected a new file in an existing folder. "
            f"Use --actions {path.stem}-2.npz"
        ) from None
    others = {name for name, _ in (*log.settings, *log.calls)} - {"step", "reset"}
    others |= {each[1] for each in log.generators if each != place and "space" not in each[1]}
    others |= {"options" for _, data in resets if data.get("options")}
    return sorted(others)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain values and arrays, which executes no other code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _ARRAY_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")
