"""Keeps verdicts in the user's cache folder, each with what has to be unchanged for it to hold.

A verdict is found again by what builds the environment, written such that equal recipes read alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rl_ext_core
from rl_ext_core.errors import RlExtError
from rl_ext_core.factory import EnvFactory, _parts
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.isolation import dependencies
from rl_ext_core.isolation.verdict import Isolation, Verdict

_log = logging.getLogger("rl_ext_core.isolation")
_FORMAT = 3
# Another time it may be otherwise.
_NOT_KEPT = (Isolation.NON_DETERMINISTIC, Isolation.BROKEN, Isolation.UNKNOWN)
# A bigger file is known by its time and its size alone.
_HASHED_BYTES = 4 << 20
# Of the session, the terminal or the job: no library chooses by them what it does.
_OF_NO_ACCOUNT = re.compile(
    r"_|PWD|OLDPWD|SHLVL|LINES|COLUMNS|LS_COLORS|PS[1-4]|TERM.*|COLORTERM|TMUX.*|STY|WINDOWID|HIST.*|LESS.*|EDITOR|PAGER|"
    r"SSH_.*|GPG_.*|DBUS_.*|XDG_SESSION.*|XDG_RUNTIME_DIR|XDG_CACHE_HOME|INVOCATION_ID|JOURNAL_STREAM|VSCODE_.*|JPY_.*|"
    r"ITERM.*|KONSOLE.*|GNOME_.*|MAIL|PYTEST_CURRENT_TEST|PYTHONHASHSEED|PYTHONUNBUFFERED|GIT_.*"
)
# Verdicts that hold for this process only, because something of theirs cannot be recognized in another one.
_of_this_process: dict[Path, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Cache:
    """The place of one recipe's verdict. Whatever is wrong with it, it is as if nothing were there.

    :ivar path: of the file
    :ivar steps: that a verdict must have looked at, at least
    :ivar began: when the question was asked, in nanoseconds
    """

    path: Path
    steps: int
    began: int = dataclasses.field(default_factory=time.time_ns)

    @classmethod
    def of(
        cls, factories: Sequence[EnvFactory[Any]], who: Sequence[int], where: bool | str | os.PathLike[str], steps: int
    ) -> Cache | None:
        """Find the place; None: nothing is kept of it.

        :param who: which of the factories is used for each environment
        :param where: True is the user's cache folder, a path another one, False none
        """
        folder = _users_folder() if where is True else None if where is False else Path(where).absolute()
        key = None if folder is None else key_of(factories, who, _FORMAT)
        return None if folder is None or key is None else cls(folder / f"{key}.json", steps)

    def read(self) -> Verdict | None:
        """Give the verdict, if there is one and what it was found on is still the same."""
        try:
            kept = _of_this_process.get(self.path) or json.loads(self.path.read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT:
                return None
            verdict = Verdict.from_dict(kept["verdict"])
            holds = (
                verdict.isolation not in _NOT_KEPT
                and (kept["steps"] >= self.steps or verdict.isolation is not Isolation.INDEPENDENT)
                and kept["variables"] == _variables()
                and all(_is_as(path, state) for path, state in kept["files"].items())
                and not dependencies.changed_globals(kept["globals"])
            )
            machine, seconds = kept["step"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RlExtError) as error:
            _log.debug("no verdict in %s: %r", self.path, error)
            return None
        seconds = seconds if machine == _machine() and isinstance(seconds, float) else None
        return dataclasses.replace(verdict, declared_by="cache", step_seconds=seconds) if holds else None

    def write(
        self,
        verdict: Verdict,
        measured: Mapping[str, Any],
        opened: Iterable[str] = (),
        fresh: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Keep a verdict.

        :param verdict: of a probe
        :param measured: by it: which files it depends on
        :param opened: files that were opened besides
        :param fresh: by module, plain globals as they were imported
        """
        if verdict.isolation in _NOT_KEPT or "sources" not in measured:
            return
        loaded = {path: _state_of(path) for path in (*measured["libraries"], *measured["sources"])}
        files = {**{path: _state_of(path) for path in opened if not os.path.isdir(path)}, **loaded}
        kept = {
            "format": _FORMAT,
            "steps": self.steps,
            "verdict": {**dataclasses.asdict(verdict), "step_seconds": None},
            "step": [_machine(), verdict.step_seconds if measured["undisturbed"] else None],
            "files": files,
            "variables": _variables(),
            "globals": fresh or {},
        }
        # A library that was loaded from a temporary folder, and is gone, may be another one next time; and of a file
        # that was written meanwhile nobody knows which contents were read.
        if None in loaded.values() or any(state and max(state[1:3]) >= self.began for state in files.values()):
            _of_this_process[self.path] = {**kept, "files": {path: state for path, state in files.items() if state}}
        else:
            self._write(kept)

    def add_time(self, measured: Mapping[str, Any]) -> None:
        """Keep how long a step takes, with the verdict that is there."""
        if measured["undisturbed"] and self.path not in _of_this_process:
            with contextlib.suppress(OSError, ValueError):
                kept = json.loads(self.path.read_text(encoding="utf-8"))
                self._write({**kept, "step": [_machine(), measured["step_seconds"]]})

    def _write(self, kept: Mapping[str, Any]) -> None:
        """Write the file whole or not at all."""
        _of_this_process.pop(self.path, None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=self.path.stem) as folder:
                Path(folder, "part").write_text(json.dumps(kept), encoding="utf-8")
                os.replace(Path(folder, "part"), self.path)
        except OSError as error:
            _log.debug("%s cannot be written: %r", self.path, error)


def _machine() -> str:
    return f"{platform.node()} {os.cpu_count()}"


def _variables() -> str:
    """Describe the environment variables, by any of which a library may choose what it does."""
    known = sorted((name, value) for name, value in os.environ.items() if not _OF_NO_ACCOUNT.fullmatch(name))
    return hashlib.blake2b(repr(known).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _users_folder() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:  # nobody's
        return None
    return base / "rl-ext" / "isolation"


def _state_of(path: str) -> list[Any] | None:
    """Describe a file: its size, its times and its contents; None: there is none."""
    try:
        state = os.stat(path)
        contents = ""
        if state.st_size <= _HASHED_BYTES and stat.S_ISREG(state.st_mode):
            contents = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except (OSError, ValueError):
        return None
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, contents]


def _is_as(path: str, state: list[Any] | None) -> bool:
    """Whether a file is as it was described. Times are enough where they are the same; else its contents decide."""
    try:
        now = os.stat(path)
    except (OSError, ValueError):
        return state is None
    if state is None or now.st_size != state[0]:
        return False
    if [now.st_mtime_ns, now.st_ctime_ns] == state[1:3]:
        return True
    return bool(state[3]) and _state_of(path) == [state[0], now.st_mtime_ns, now.st_ctime_ns, state[3]]


_DEEPEST = 60
_SCALARS = (int, float, complex, bytes, bool, type(None), type(...), np.generic, np.dtype)
# Whether equal ones are one object is chance.
_NEVER_CYCLIC = (tuple, frozenset, types.CodeType, np.ndarray)
# What a class has by itself, or what says nothing of what its instances do.
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
_OF_CLASSES |= {"__slotnames__"}  # made by pickle


class _UnknownError(Exception):
    """Something that cannot be described."""


def key_of(factories: Sequence[EnvFactory[Any]], who: Sequence[int], format_version: int) -> str | None:
    """Give a name that differs where the recipes, the interpreter or this package do.

    Whether the code is still the same is not for the name to say: that shows in the files that are loaded.

    :param factories: build the environments
    :param who: which factory is used for each
    :param format_version: of what is kept under the name
    :return: a name for a file; None: what the recipe holds cannot be described
    """
    try:
        recipe = _Describer().describe([_essence(factory) for factory in factories])
    except (_UnknownError, RecursionError):
        return None
    here = (format_version, rl_ext_core.__version__, sys.version, sys.prefix, os.getcwd(), *who)
    return hashlib.blake2b(repr((here, recipe)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _essence(factory: EnvFactory[Any]) -> tuple[Any, ...]:
    common = (factory.origin, factory._adapters, dict(factory.overrides))
    if factory.live is not None:
        return *common, repr(sorted(fingerprint(factory.live).tokens.items()))
    if factory.origin == "graft":
        raise _UnknownError
    try:
        return *common, _called(factory)
    except Exception as error:
        raise _UnknownError from error


def _called(factory: EnvFactory[Any]) -> Any:
    if not factory._recipe.takes_arguments:  # what an instance was made by
        raise _UnknownError
    return factory._recipe.unpacked()


class _Describer:
    """Turns values into nested tuples of plain ones."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0

    def describe(self, value: Any) -> Any:
        """Describe a value.

        :raises _UnknownError: it, or something that it holds, cannot be
        """
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name
        if isinstance(value, (str, os.PathLike)):
            return _text(os.fspath(value))
        if isinstance(value, _SCALARS):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        if not isinstance(value, _NEVER_CYCLIC):
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnknownError
        try:
            return self._compound(value)
        finally:
            self._depth -= 1

    def _compound(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__, _file_of(value.__name__)
        if isinstance(value, (type, types.FunctionType)):
            named = _by_name(value)
            return named or (self._class(value) if isinstance(value, type) else self._function(value))
        if isinstance(value, types.BuiltinFunctionType):
            return "builtin", value.__module__, value.__qualname__
        if isinstance(value, types.CodeType):
            return "code", value.co_code, self._all(value.co_consts), value.co_names, value.co_flags
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
        if isinstance(value, (list, tuple)):
            return type(value).__qualname__, self._all(value)
        if isinstance(value, (set, frozenset)):
            return type(value).__qualname__, sorted(map(repr, map(self.describe, value)))
        if isinstance(value, (dict, types.MappingProxyType)):
            return type(value).__qualname__, [
                (self.describe(name), self.describe(item)) for name, item in value.items()
            ]
        return self._object(value)

    def _all(self, values: Any) -> list[Any]:
        return [self.describe(value) for value in values]

    def _object(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, functools.partial):
            return "partial", self.describe(value.func), self._all(value.args), self.describe(value.keywords)
        if isinstance(value, types.MethodType):
            return "method", self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, (staticmethod, classmethod)):
            return kind.__name__, self.describe(value.__func__)
        if isinstance(value, property):
            return "property", self._all((value.fget, value.fset, value.fdel))
        # Of others the attributes have to be all there is.
        if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
            raise _UnknownError
        if not hasattr(value, "__dict__") or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
            raise _UnknownError
        return "object", self.describe(kind), self.describe(vars(value))

    def _function(self, function: types.FunctionType) -> Any:
        """Describe a function that travels by its code, as those of scripts and lambdas do."""
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.describe(cell.cell_contents))
            except ValueError:  # not filled yet
                cells.append("empty")
        used = sorted(_parts.names_in(function.__code__) & function.__globals__.keys())
        return (
            "function",
            self.describe(function.__code__),
            self.describe(function.__defaults__),
            self.describe(function.__kwdefaults__),
            cells,
            [(name, self.describe(function.__globals__[name])) for name in used],
        )

    def _class(self, kind: type) -> Any:
        members = sorted((name, value) for name, value in vars(kind).items() if name not in _OF_CLASSES)
        described = [(name, self.describe(value)) for name, value in members]
        return "class", kind.__qualname__, self._all(kind.__bases__), described


def _text(text: str | bytes) -> Any:
    """Describe a text, and the file if it is the path of one: a model, a ROM."""
    try:
        state = os.stat(text) if text and os.path.isfile(text) else None
    except (OSError, ValueError):
        state = None
    return ("text", text) if state is None else ("file", text, state.st_mtime_ns, state.st_size)


def _by_name(value: Any) -> Any:
    """Describe what a worker imports; None: it does not, because it is not there under its name."""
    if not _parts.is_global(value):
        return None
    return "named", value.__module__, value.__qualname__, _file_of(value.__module__)


def _file_of(module: str) -> Any:
    path = getattr(sys.modules.get(module), "__file__", None)
    return None if path is None else _text(str(Path(path).absolute()))
