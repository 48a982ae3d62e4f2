"""Keeps verdicts in the user's cache folder, each with what has to be unchanged for it to hold.

A verdict is found again by what builds the environment, written such that equal recipes read alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rl_ext_core
from rl_ext_core.errors import RlExtError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory._fingerprint import description, fingerprint
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


def key_of(factories: Sequence[EnvFactory[Any]], who: Sequence[int], format_version: int) -> str | None:
    """Give a name that differs where the recipes, the interpreter or this package do; None: it has to hold too much.

    Whether the code is still the same is not for the name to say: that shows in the files that are loaded.

    :param who: which of the factories is used for each environment
    :param format_version: of what is kept under the name
    """
    try:
        recipe = [description(_essence(factory)) for factory in factories]
    except Exception as error:  # of the user's own code, perhaps
        _log.debug("%r cannot be recognized in another process: %r", factories, error)
        return None
    files = [state for tokens in recipe for _, token in tokens for state in _files_in(token) if state is not None]
    here = (format_version, rl_ext_core.__version__, sys.version, sys.prefix, os.getcwd(), *who)
    return hashlib.blake2b(repr((here, recipe, files)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _essence(factory: EnvFactory[Any]) -> tuple[Any, ...]:
    common = (factory.origin, factory._adapters, dict(factory.overrides))
    if factory.live is not None:
        return *common, repr(sorted(fingerprint(factory.live).tokens.items()))
    if factory.origin == "graft" or not factory._recipe.takes_arguments:  # what an instance was made by
        raise ValueError("what is copied is not told by what made it")
    return *common, factory._recipe.unpacked()


def _files_in(token: Any) -> Iterator[Any]:
    """Describe the files that are named: a model, a ROM, the module of a class or a function."""
    if type(token) is tuple and len(token) == 2 and token[0] in ("str", "bytes"):
        yield _state_of_named(token[1])
    elif type(token) is tuple and len(token) > 2 and token[0] in ("name", "function"):
        yield token[1], _file_of(token[1])
    elif type(token) is tuple:
        for part in token:
            yield from _files_in(part)


def _state_of_named(path: Any) -> Any:
    try:
        state = os.stat(path) if path and os.path.isfile(path) else None
    except (OSError, ValueError):
        state = None
    return None if state is None else (path, state.st_mtime_ns, state.st_size)


def _file_of(module: str | None) -> Any:
    path = None if module in ("__main__", "__mp_main__") else getattr(sys.modules.get(module or ""), "__file__", None)
    return None if path is None else _state_of_named(str(Path(path).absolute()))
