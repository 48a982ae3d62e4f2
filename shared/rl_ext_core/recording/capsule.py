"""Capsules: files with a failure of an environment, and everything that is needed to repeat it."""

from __future__ import annotations

import base64
import dataclasses
import importlib.metadata
import json
import logging
import os
import pickle
import platform
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import _pickle
from rl_ext_core.errors import CorruptFileError, EnvironmentOutputError, InvalidArgumentError, WorkerError
from rl_ext_core.recording.episode_log import EpisodeLog

__all__ = [
    "MAX_CAPSULES",
    "Capsule",
    "RecordedFailure",
    "current_versions",
    "read_capsule",
    "record_crash",
    "record_exception",
    "save_capsule",
    "write_actions",
    "write_capsule",
]

_log = logging.getLogger("rl_ext_core.recording")

_FORMAT = 1
CRASH_FOLDER = "."  # for recorder=True
MAX_CAPSULES = 10  # per folder
_MAX_TEXT = 100_000
_ABOUT, _LOG, _ACTIONS = "capsule.json", "log.json", "actions.npy"
# These two are pickles. Loading a pickle executes code.
_FACTORY, _CALLS = "environment.pickle", "calls.pickle"
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
    def from_error(cls, error: BaseException) -> RecordedFailure:
        """Describe the failure of a worker, or an exception of an environment in this process."""
        if isinstance(error, WorkerError):
            name = type(error.__cause__).__name__ if error.__cause__ is not None else _raised_class(error.traceback)
            kind, phase, exitcode, traceback = error.kind, error.phase, error.exitcode, error.traceback
            is_output_error = isinstance(error.__cause__, EnvironmentOutputError)
        else:
            import traceback as formatter

            name, kind, phase, exitcode = type(error).__name__, "exception", None, None
            traceback = "".join(formatter.format_exception(error))
            is_output_error = isinstance(error, EnvironmentOutputError)
        kind = "observation" if is_output_error else kind
        summary = (str(error) or name).splitlines()[0].rstrip(":")
        return cls(
            kind, summary, phase, exitcode, traceback, name if kind in ("exception", "observation", "exit") else ""
        )


def _raised_class(traceback: str) -> str:
    """Return the name of the exception class in a formatted traceback; empty if there is none."""
    found = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", traceback, re.MULTILINE)
    return found[-1].rpartition(".")[2] if found else ""


@dataclasses.dataclass(frozen=True)
class Capsule:
    """Failure of an environment, with its factory and the log of its episode.

    Reading a capsule executes no code. :meth:`load_factory` does, and :meth:`load_log` if :attr:`calls_pickle` is set.

    :ivar failure: the failure
    :ivar environment: number of the environment
    :ivar step: number of the failed step in the log, 0 for its reset
    :ivar log: the log; its calls are empty if :attr:`calls_pickle` is set
    :ivar source: source code that built the environment, with dots for parts that are not known
    :ivar factory_pickle: pickled factory; None if it cannot be pickled
    :ivar calls_pickle: pickled settings and calls; None if they are plain data
    :ivar step_timeout: time limit of a step in seconds; None for none
    :ivar created: time of the failure, in UTC
    :ivar versions: versions of Python, of the platform and of packages, by name
    :ivar variables: environment variables that may matter
    :ivar spaces: spaces of the environment, as text
    """

    failure: RecordedFailure
    environment: int
    step: int
    log: EpisodeLog
    source: str = ""
    factory_pickle: bytes | None = None
    calls_pickle: bytes | None = None
    step_timeout: float | None = None
    created: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spaces: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def seed(self) -> Any:
        """Seed of the first reset in the log; None if it had none."""
        name, data = self.log.calls[0] if self.log.calls else ("", {})
        return data.get("seed") if name == "reset" else None

    def load_factory(self) -> Any:
        """Unpickle the factory of the environment, which executes code of the capsule."""
        assert self.factory_pickle is not None
        return pickle.loads(self.factory_pickle)

    def load_log(self) -> EpisodeLog:
        """Return the log. If it contains pickled objects, this executes code of the capsule."""
        if self.calls_pickle is None:
            return self.log
        settings, calls = pickle.loads(self.calls_pickle)
        return dataclasses.replace(self.log, settings=settings, calls=calls)


def record_crash(recorder: bool | str | os.PathLike[str], **contents: Any) -> str:
    """Write a capsule, and return a sentence with the command that repeats the failure.

    :param recorder: folder of the capsules; True for the working directory
    :param contents: arguments of :func:`write_capsule`
    """
    folder = CRASH_FOLDER if isinstance(recorder, bool) else recorder
    path = write_capsule(folder, **contents)
    if path is None and len(list(Path(folder).glob("crash-*.rlx"))) >= MAX_CAPSULES:
        return (
            f"The episode is not recorded, because {os.path.abspath(folder)!r} contains {MAX_CAPSULES} files "
            'crash-*.rlx. Delete some of them, or pass another folder: recorder="crashes"'
        )
    if path is None:
        return f"The episode is not recorded, because {os.path.abspath(folder)!r} cannot be written"
    return f"The episode is recorded. To repeat the failure, run: rl-ext replay {path}"


def record_exception(
    error: Exception,
    method: str,
    log: EpisodeLog,
    *,
    recorder: bool | str | os.PathLike[str],
    build_factories: Callable[[], Sequence[Any]],
    environment: int,
    spaces: tuple[Any, Any],
) -> None:
    """Write a capsule of an exception in this process, and add the command that repeats it as a note.

    Python 3.10 has no notes, so the command is logged there. The first three arguments are those that
    :class:`~rl_ext_core.recording.EpisodeRecorder` passes to ``on_failure``, the others those of :func:`write_capsule`.

    :param recorder: folder of the capsules; True for the working directory
    :param build_factories: returns the factories of all environments, or raises if they cannot be copied
    """
    try:
        factory = build_factories()[environment]
    except Exception:  # the user's objects may raise anything
        factory = None
    failure = dataclasses.replace(RecordedFailure.from_error(error), phase=method)
    text = record_crash(recorder, factory=factory, log=log, failure=failure, environment=environment, spaces=spaces)
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
    spaces: tuple[Any, Any] | None = None,
) -> Path | None:
    """Write a capsule ``crash-<time>-<number>.rlx``. A failure to write is logged, because another error is raised.

    :param folder: folder of the capsules, which is created if necessary
    :param factory: :class:`~rl_ext_core.factory.EnvFactory` that built the environment; None if there is none
    :param log: log of its episode
    :param failure: the failure
    :param environment: number of the environment
    :param step_timeout: time limit of a step in seconds; default: none
    :param spaces: observation space and action space of the environment
    :return: path of the file; None if the folder already contains :data:`MAX_CAPSULES`, or the file cannot be written
    """
    folder = Path(folder)
    try:
        if len(list(folder.glob("crash-*.rlx"))) >= MAX_CAPSULES:
            _log.info("no capsule of the failure is written, because %s contains %d", folder, MAX_CAPSULES)
            return None
        folder.mkdir(parents=True, exist_ok=True)
        name = f"crash-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{environment}"
        path, count = folder / f"{name}.rlx", 1
        while path.exists():
            count += 1
            path = folder / f"{name}-{count}.rlx"
        source = getattr(factory, "to_source", lambda: "")()
        capsule = Capsule(
            failure,
            environment,
            log.steps,
            log,
            source,
            _try_to_pickle(factory),
            None,
            step_timeout,
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            current_versions(getattr(factory, "preload", ())),
            {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
            {} if spaces is None else {"observation": str(spaces[0]), "action": str(spaces[1])},
        )
        save_capsule(path, capsule)
    except Exception as error:  # spaces, factories and arguments have code of the user
        _log.warning("the capsule of the failure cannot be written: %s: %s", type(error).__name__, error)
        return None
    return path


def _try_to_pickle(factory: Any) -> bytes | None:
    """Pickle a factory; return None if there is none, or if that fails."""
    if factory is None:
        return None
    try:
        return _pickle.dumps(factory)
    except Exception:  # an object in it, whose code may raise anything
        return None


def current_versions(modules: Any = ()) -> dict[str, str]:
    """Return the versions of Python, of the platform, and of packages that are loaded.

    :param modules: names of further modules
    """
    names = {name.partition(".")[0] for name in (*_PACKAGES, *modules)} & sys.modules.keys()
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in sorted(names - versions.keys()):
        distribution = name.replace("_", "-")
        for each in (distribution, {"Box2D": "box2d"}.get(name, name)):
            try:
                versions[name] = importlib.metadata.version(each)
                break
            except importlib.metadata.PackageNotFoundError:
                version = getattr(sys.modules[name], "__version__", None)
                if isinstance(version, str):
                    versions[name] = version
    return versions


def save_capsule(path: Path, capsule: Capsule) -> None:
    """Write a capsule to a file, which appears when it is complete."""
    log, calls_pickle = capsule.log, capsule.calls_pickle
    actions, calls = _split_actions(log.calls)
    try:
        settings, calls = _encode(log.settings), _encode(calls)
    except TypeError:
        actions, settings, calls = None, [], []
        calls_pickle = _pickle.dumps((log.settings, log.calls))
    entries = {
        "generators": _encode(log.generators),
        "settings": settings,
        "calls": calls,
        "checksums": log.checksums,
        "actions are scalars": actions is not None and actions[0],
    }
    about = {
        "format": _FORMAT,
        "created": capsule.created,
        "failure": {
            name: value[:_MAX_TEXT] if isinstance(value, str) else value
            for name, value in dataclasses.asdict(capsule.failure).items()
        },
        "environment": capsule.environment,
        "step": capsule.step,
        "seed": repr(capsule.seed),
        "source": capsule.source,
        "step_timeout": capsule.step_timeout,
        "versions": dict(capsule.versions),
        "variables": dict(capsule.variables),
        "spaces": dict(capsule.spaces),
        "executable code": [
            name for name, data in ((_FACTORY, capsule.factory_pickle), (_CALLS, calls_pickle)) if data is not None
        ],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_ABOUT, json.dumps(about, indent=2))
            archive.writestr(_LOG, json.dumps(entries))
            if actions is not None:
                with archive.open(_ACTIONS, "w", force_zip64=True) as file:
                    np.save(file, actions[1], allow_pickle=False)
            for name, data in ((_FACTORY, capsule.factory_pickle), (_CALLS, calls_pickle)):
                if data is not None:
                    archive.writestr(name, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
            names = set(archive.namelist())
            about, entries = json.loads(archive.read(_ABOUT)), json.loads(archive.read(_LOG))
            if about["format"] != _FORMAT:
                raise CorruptFileError(
                    f"{str(path)!r} has format {about['format']}; expected {_FORMAT}. Use the version of rl-ext that "
                    "wrote it"
                )
            actions = None
            if _ACTIONS in names:
                with archive.open(_ACTIONS) as file:
                    actions = np.load(file, allow_pickle=False)
            factory_pickle, calls_pickle = (
                archive.read(name) if name in names else None for name in (_FACTORY, _CALLS)
            )
        calls = _join_actions(_decode(entries["calls"]), actions, entries["actions are scalars"])
        log = EpisodeLog(_decode(entries["generators"]), _decode(entries["settings"]), calls, entries["checksums"])
        return Capsule(
            RecordedFailure(**about["failure"]),
            about["environment"],
            about["step"],
            log,
            about["source"],
            factory_pickle,
            calls_pickle,
            about["step_timeout"],
            about["created"],
            about["versions"],
            about["variables"],
            about["spaces"],
        )
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
    ) as error:
        if isinstance(error, CorruptFileError):
            raise
        raise CorruptFileError(
            f"{str(path)!r} is not a complete capsule ({type(error).__name__}: {error}); expected a file that a "
            "recorder wrote. Copy it again"
        ) from error


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


# -- plain data


def _split_actions(calls: list[tuple[str, Any]]) -> tuple[tuple[bool, Any] | None, list[Any]]:
    """Replace the actions in calls by ``("steps", count)`` if they fit in one array.

    :return: whether they are scalars, and the array, or None; and the calls
    """
    actions = [data for name, data in calls if name == "step"]
    kinds = {(type(data), getattr(data, "dtype", None), np.shape(data)) for data in actions[:1]}
    for data in actions:
        kind = type(data)
        if not (kind is np.ndarray or isinstance(data, np.generic)) or data.dtype.hasobject:
            return None, list(calls)
        if (kind, data.dtype, data.shape) not in kinds:
            return None, list(calls)
    if not actions:
        return None, list(calls)
    short: list[Any] = []
    for name, data in calls:
        if name != "step":
            short.append((name, data))
        elif short and short[-1][0] == "steps":
            short[-1] = "steps", short[-1][1] + 1
        else:
            short.append(("steps", 1))
    return (isinstance(actions[0], np.generic), np.stack(actions)), short


def _join_actions(calls: list[Any], actions: Any, scalars: bool) -> list[tuple[str, Any]]:
    """Undo :func:`_split_actions`."""
    found: list[tuple[str, Any]] = []
    rows = iter(range(0 if actions is None else len(actions)))
    for name, data in calls:
        if name == "steps":
            for _ in range(data):
                row = next(rows)
                found.append(("step", actions[row] if scalars else actions[row, ...]))  # a view, which saves memory
        else:
            found.append((name, data))
    return found


def _encode(value: Any) -> Any:
    """Convert plain data to values of JSON.

    :raises TypeError: If it contains an object of another class.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(part) for part in value]
    if kind is tuple:
        return {"tuple": [_encode(part) for part in value]}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(part)] for key, part in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject and not value.dtype.names:
        data = base64.b64encode(value.tobytes()).decode()
        return {"array" if kind is np.ndarray else "scalar": [value.dtype.str, list(value.shape), data]}
    raise TypeError(f"{kind.__name__} is not plain data")


def _decode(value: Any) -> Any:
    """Undo :func:`_encode`."""
    if isinstance(value, list):
        return [_decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, data),) = value.items()
    if kind == "tuple":
        return tuple(_decode(part) for part in data)
    if kind == "dict":
        return {_decode(key): _decode(part) for key, part in data}
    if kind == "bytes":
        return base64.b64decode(data)
    dtype, shape, text = data
    array = np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    return array if kind == "array" else array[()]
