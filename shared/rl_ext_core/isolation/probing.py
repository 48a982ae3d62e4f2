"""``probe``: whether instances of an environment may share a process, and the verdicts that are kept of it."""

from __future__ import annotations

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
from rl_ext_core._import_path import is_found_elsewhere
from rl_ext_core.errors import InvalidArgumentError, RlExtError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory._fingerprint import description, fingerprint
from rl_ext_core.isolation import dependencies
from rl_ext_core.isolation.verdict import LEAST_STEPS, Isolation, Verdict, declared_by_source

__all__ = ["check_timeout", "declaration", "probe", "probe_all"]

# How many are alive at once where nobody says how many there will be.
_TOGETHER = 4
_NAMED = 3


def probe(
    source: Any,
    *,
    cache: bool | str | os.PathLike[str] = True,
    steps: int = 100,
    timeout: float | None = None,
) -> Verdict:
    """Find out whether instances of an environment may share a process, without building any in this one.

    What the environment says itself comes first: ``metadata = {"isolation": "process"}`` in its class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description that it holds. Otherwise some are built in
    processes that are thrown away: one alone; two in one process, interleaved, one reset and closed while the other
    goes on; several at once; two in processes of their own, in turns and at the same time. What they return is compared
    bit for bit, and so are infos, ``action_masks()`` and public arrays; methods with names like ``set_task`` are called
    with numbers, and resets get the options that ``metadata["reset_options"]`` lists. What is shared but did not show
    stays unknown; the explanation says what was not tried. The processes have an empty working directory, and Python
    code in them writes no files elsewhere, except to caches; code in C and programs that it starts may.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: an environment, a function or class that builds one, gymnasium's id or specification, or what
        :func:`~rl_ext_core.factory.as_factory` made of one of these; of these a list for what is to share a process,
        of which up to eight at once are tried. By default that is four of them
    :param cache: True keeps verdicts in the user's cache folder, a path in another one; a kept verdict holds as long
        as the recipe, the environment variables, the libraries, the code that was loaded and the files that were
        opened are the same. A file that C opens outside of the folders of the code, of its libraries and of the working
        directory is not noticed; outside of Linux, none that C opens is. False neither reads nor writes
    :param steps: how many steps are compared; fewer where they take long
    :param timeout: seconds that building an environment, a reset or a step may take. By default one alone has 300, and
        others 20 times what that took, at least 10
    :return: the verdict. It is BROKEN if one fails after it was built, UNKNOWN if none could be tried: neither raises
    :raises InvalidArgumentError: the environment's metadata say something else, ``steps`` is too small, ``timeout`` no
        time
    :raises NotCopyableError: an instance cannot be copied, or a function that holds what cannot be
    :raises WorkerError: Python does not start
    """
    if steps < LEAST_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is not a number from {LEAST_STEPS} on. Write steps=100")
    check_timeout("timeout", timeout)
    sources = list(source) if isinstance(source, (list, tuple)) else [source] * _TOGETHER
    if not sources:
        raise InvalidArgumentError(
            "source is an empty list; expected what builds environments. Write probe([make] * 4)"
        )
    made: dict[int, EnvFactory[Any]] = {}
    for one in sources:
        if id(one) not in made:
            # Its verification would build a copy more, and says nothing of what instances share.
            made[id(one)] = as_factory(one, verify=False)
    return probe_all([made[id(one)] for one in sources], cache=cache, steps=steps, timeout=timeout)


def check_timeout(name: str, timeout: Any) -> None:
    """Check that it is a time.

    :raises InvalidArgumentError: it is none
    """
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise InvalidArgumentError(
            f"{name}={timeout!r} is no time; expected seconds above 0, or None for the default. Write {name}=60"
        )


def probe_all(
    factories: Sequence[EnvFactory[Any]],
    *,
    cache: bool | str | os.PathLike[str] = True,
    steps: int = 100,
    timeout: float | None = None,
) -> Verdict:
    """Do what :func:`probe` does, for the factories of environments that are to share a process."""
    began = time.monotonic()
    distinct = list({id(factory): factory for factory in factories}.values())
    who = [next(i for i, one in enumerate(distinct) if one is factory) for factory in factories]
    verdict = declaration(distinct)
    if verdict is None:
        kept = Cache.of(distinct, who, cache, steps)
        verdict = kept.read() if kept is not None else None
        if verdict is None:
            verdict = _found_out(distinct, who, steps, timeout, kept)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - began, 3))


def declaration(factories: Sequence[EnvFactory[Any]]) -> Verdict | None:
    """Return what they say by themselves; the strictest of it, if all of them say something."""
    said = [declared_by_source(factory) for factory in factories]
    if not any(said):
        return None
    from rl_ext_core.isolation import judge  # which a kept verdict does without, and without all that makes trials

    verdicts = [judge.declared(one) for one in said if one is not None]
    strict = [verdict for verdict in verdicts if not verdict.in_process]
    return strict[0] if strict else verdicts[0] if None not in said else None


def _found_out(
    factories: Sequence[EnvFactory[Any]], who: Sequence[int], steps: int, timeout: float | None, kept: Cache | None
) -> Verdict:
    """Probe, and keep what was found."""
    from rl_ext_core.isolation import judge
    from rl_ext_core.isolation.trials import TrialRunner

    with TrialRunner(factories, timeout) as runner:
        verdict, alone = judge.judge(runner, steps, who)
        fresh = {} if alone is None else alone.facts["globals"]
        runner.globals = changed = dependencies.changed_globals(fresh)
        if changed and verdict.isolation is Isolation.INDEPENDENT:
            # As it is in the processes of workers; and in this one?
            verdict, alone = judge.judge(runner, steps, who)
    if changed:
        names = [f"{module}.{name}" for module, values in changed.items() for name in values]
        named = f"{', '.join(names[:_NAMED])}{' and more' if len(names) > _NAMED else ''}"
        note = f"{named}: not here what importing gives, as processes of their own do."
        return dataclasses.replace(verdict, explanation=f"{verdict.explanation} {note}")
    if kept is not None and alone is not None:
        kept.write(verdict, alone.measured, runner.opened, fresh)
    return verdict


_log = logging.getLogger("rl_ext_core.isolation")
_FORMAT = 5
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
    """The place of one recipe's verdict. Whatever is wrong with it, it is as if nothing were there."""

    path: Path  # of the file
    steps: int  # that a verdict must have looked at, at least
    began: int = dataclasses.field(default_factory=time.time_ns)  # when the question was asked, in nanoseconds

    @classmethod
    def of(
        cls, factories: Sequence[EnvFactory[Any]], who: Sequence[int], where: bool | str | os.PathLike[str], steps: int
    ) -> Cache | None:
        """Find the place; None: nothing is kept of it."""
        folder = _users_folder() if where is True else None if where is False else Path(where).absolute()
        key = None if folder is None else key_of(factories, who, _FORMAT)
        return None if folder is None or key is None else cls(folder / f"{key}.json", steps)

    def read(self) -> Verdict | None:
        """Return the verdict, if there is one and what it was found on is still the same."""
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RlExtError) as error:
            _log.debug("no verdict in %s: %r", self.path, error)
            return None
        return dataclasses.replace(verdict, declared_by="cache") if holds else None

    def write(
        self,
        verdict: Verdict,
        measured: Mapping[str, Any],
        opened: Iterable[str] = (),
        fresh: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Keep a verdict, with the files that it depends on, by what was measured and because they were opened, and
        plain globals as they were imported.
        """
        if verdict.isolation in _NOT_KEPT or "sources" not in measured:
            return
        loaded = {path: _state_of(path) for path in (*measured["libraries"], *measured["sources"])}
        files = {**{path: _state_of(path) for path in opened if not os.path.isdir(path)}, **loaded}
        kept = {
            "format": _FORMAT,
            "steps": self.steps,
            "verdict": dataclasses.asdict(verdict),
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
    """Return a name that differs where the recipes, the interpreter, this package or the machine, by which a step takes
    what it takes, do; None: it has to hold too much.

    Whether the code is still the same is not for the name to say: that shows in the files that are loaded.
    """
    try:
        recipe = [description(_essence(factory)) for factory in factories]
        files = [state for tokens in recipe for _, token in tokens for state in _files_in(token) if state is not None]
    except Exception as error:  # of the user's own code, perhaps
        _log.debug("%r cannot be recognized in another process: %r", factories, error)
        return None
    machine = (sys.version, sys.prefix, platform.node(), os.cpu_count())
    here = (format_version, rl_ext_core.__version__, *machine, os.getcwd(), *who)
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
        if token[1] is not None and not is_found_elsewhere(token[1]):
            raise ValueError(f"the code of {token[1]} is not in a file that is found again")
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
