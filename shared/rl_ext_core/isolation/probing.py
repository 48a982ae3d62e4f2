"""``probe``, and its cache of verdicts in the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rl_ext_core
from rl_ext_core._import_path import is_importable_elsewhere
from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory.walk import description, fingerprint, layers
from rl_ext_core.isolation.verdict import MIN_STEPS, Isolation, Verdict, conclude, declared_by_source

__all__ = ["probe"]

_log = logging.getLogger("rl_ext_core.isolation")
_MAX_SOURCES = 8


def probe(
    source: Any,
    *,
    cache: bool | str | os.PathLike[str] = True,
    steps: int = 100,
    timeout: float | None = None,
) -> Verdict:
    """Test whether several instances of an environment can share a process.

    Instances are built in temporary processes, never in this one.

    A declaration takes precedence: ``metadata = {"isolation": "process"}`` in the environment's class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description. Otherwise three trials run in temporary
    processes, with the same seeds and actions and an empty working directory:

    - a single instance,
    - two instances in two processes,
    - two instances in one process, built in both orders. One of them is closed half-way.

    Observations, rewards, flags, infos and ``action_masks()`` are compared bit for bit. Effects of a third instance, of
    more steps, or of ``reset`` options are not detected.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: An environment, a function or class that builds one, a gymnasium id or specification, or the result
        of :func:`~rl_ext_core.factory.as_factory`. A list contains sources that share a process. The first eight
        different ones are tested.
    :param cache: Where to cache verdicts: True for the user's cache folder, a path for another folder, False for
        nowhere. A cached verdict is valid until the recipe, the environment variables, the interpreter, the machine, or
        the loaded modules and libraries change. On macOS and Windows, changes of libraries are not detected.
    :param steps: Number of steps to compare, at least 10. Fewer are compared if steps are slow.
    :param timeout: Seconds that building an environment, a reset or a step may take. The default is 300 for the first
        instance. For others it is 20 times the longest time measured there, at least 20.
    :return: The verdict. Its ``isolation`` is ``UNKNOWN`` if the environment cannot be tested in another process.
    :raises InvalidArgumentError: If the declared value is unknown, or ``steps`` or ``timeout`` is out of range.
    :raises WorkerError: If Python cannot be started.
    """
    start, start_ns = time.monotonic(), time.time_ns()
    if steps < MIN_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is too small: expected at least {MIN_STEPS}. Use steps=100")
    if not (timeout is None or timeout > 0):
        raise InvalidArgumentError(
            f"timeout={timeout!r} is not valid: expected seconds above 0, or None for the default. Use timeout=60"
        )
    sources = list(source) if isinstance(source, (list, tuple)) else [source, source]
    if not sources:
        raise InvalidArgumentError("source=[] is empty: expected at least one factory. Use probe([make] * 4)")
    try:
        made = {key: as_factory(one, verify=False) for key, one in {id(one): one for one in sources}.items()}
    except NotCopyableError as error:
        return conclude(Isolation.UNKNOWN, f"It could not be tested: {str(error).rstrip('.')}.")
    verdict = _strictest_declaration([*made.values()])
    if verdict is None:
        # A source that occurs several times is built twice. There are at least two instances in all.
        times = {key: min(2, sum(id(one) == key for one in sources)) for key in [*made][:_MAX_SOURCES]}
        trial_factories = [made[key] for key, count in times.items() for _ in range(count if len(made) > 1 else 2)]
        file = _cache_file(trial_factories, cache, steps)
        verdict = (_read_verdict(file) if file is not None else None) or _run_trials(
            trial_factories, steps, timeout, file, start_ns
        )
        if len(made) > _MAX_SOURCES:
            text = f"{verdict.explanation} Sources after the first {_MAX_SOURCES} different ones were not tested."
            verdict = dataclasses.replace(verdict, explanation=text)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - start, 3))


def _run_trials(
    trial_factories: Sequence[EnvFactory[Any]], steps: int, timeout: float | None, file: Path | None, start_ns: int
) -> Verdict:
    """Run the trials, and cache the verdict.

    :param trial_factories: Factories of the instances, at least two.
    :param steps: Number of steps to compare.
    :param timeout: Seconds for an operation.
    :param file: File of the verdict, or None to not cache it.
    :param start_ns: Time at which the probe began, in nanoseconds since the epoch.
    """
    from rl_ext_core.isolation.judge import Judge  # A cached verdict does not need this import.

    what = f"{len(trial_factories) + 1} instances of {trial_factories[0].to_source()}"
    _log.info('testing %s in temporary processes. To skip this, use isolation="process"', what)
    judge = Judge(trial_factories, steps, timeout)
    verdict = judge.verdict()
    if file is not None and judge.loaded_files:
        _write_verdict(file, verdict, judge.loaded_files, start_ns)
    return verdict


def _strictest_declaration(factories: Sequence[EnvFactory[Any]]) -> Verdict | None:
    """Return the strictest declared verdict.

    None if a source without a declaration could be stricter.
    """
    declarations = [declared_by_source(factory) for factory in factories]
    verdicts = [declaration.verdict() for declaration in declarations if declaration is not None]
    strict = [verdict for verdict in verdicts if not verdict.in_process]
    return strict[0] if strict else verdicts[0] if verdicts and None not in declarations else None


_FORMAT = 7
# These verdicts are not cached, because a later probe may have another result.
_NOT_CACHED = (Isolation.NON_DETERMINISTIC, Isolation.BROKEN, Isolation.UNKNOWN)
# Variables of the session, the terminal or the job, which libraries do not read.
_IGNORED_VARIABLES = re.compile(
    r"_|PWD|OLDPWD|SHLVL|LINES|COLUMNS|LS_COLORS|PS[1-4]|TERM.*|COLORTERM|TMUX.*|STY|WINDOWID|HIST.*|LESS.*|EDITOR|PAGER|"
    r"SSH_.*|GPG_.*|DBUS_.*|XDG_SESSION.*|XDG_RUNTIME_DIR|XDG_CACHE_HOME|INVOCATION_ID|JOURNAL_STREAM|VSCODE_.*|JPY_.*|"
    r"ITERM.*|KONSOLE.*|GNOME_.*|MAIL|PYTEST_CURRENT_TEST|PYTHONHASHSEED|PYTHONUNBUFFERED|GIT_.*"
)


def _cache_file(factories: Sequence[EnvFactory[Any]], where: bool | str | os.PathLike[str], steps: int) -> Path | None:
    """Return the cache file of a verdict, or None if the verdict is not cached.

    The name is a hash of the recipes, the files that they name, the environment variables, the interpreter, this
    package's version and the machine. The file itself lists the modules and libraries that were loaded.

    :param factories: Factories of the instances.
    :param where: The ``cache`` argument of :func:`probe`.
    :param steps: Number of steps to compare.
    """
    folder = _user_cache_folder() if where is True else None if where is False else Path(where).absolute()
    if folder is None:
        return None
    try:
        distinct = list({id(factory): factory for factory in factories}.values())
        recipe = [[description(_identifying_parts(factory)) for factory in distinct], [*map(distinct.index, factories)]]
        files = sorted({*_files_in_recipe(recipe)})
    except Exception as error:  # The user's own code may raise anything.
        _log.debug("%r cannot be recognized in another process: %r", factories, error)
        return None
    variables = sorted(pair for pair in os.environ.items() if not _IGNORED_VARIABLES.fullmatch(pair[0]))
    machine = (sys.version, sys.prefix, platform.node(), os.cpu_count(), os.getcwd(), rl_ext_core.__version__)
    parts = (_FORMAT, steps, machine, variables, recipe, files)
    return (
        folder / f"{hashlib.blake2b(repr(parts).encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}.json"
    )


def _read_verdict(path: Path) -> Verdict | None:
    """Read a cached verdict. Return None if it cannot be used.

    It may be missing or damaged, or a file that it depends on may have changed.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        fields = kept["verdict"]
        fields |= {"isolation": Isolation(fields["isolation"]), "libraries": tuple(fields["libraries"])}
        verdict = Verdict(**fields)
        if verdict.isolation in _NOT_CACHED or any(_file_state(name) != state for name, state in kept["files"].items()):
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.debug("no verdict in %s: %r", path, error)
        return None
    return dataclasses.replace(verdict, declared_by="cache")


def _write_verdict(path: Path, verdict: Verdict, files: Iterable[str], start_ns: int) -> None:
    """Write a verdict to the cache atomically.

    :param path: File to write.
    :param verdict: The verdict.
    :param files: Files that were loaded. If one is missing, or was modified since the probe began, nothing is written.
    :param start_ns: Time at which the probe began, in nanoseconds since the epoch.
    """
    states = {file: _file_state(file) for file in files}
    if verdict.isolation in _NOT_CACHED or any(state is None or state[0] >= start_ns for state in states.values()):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as folder:
            part = Path(folder, "part")
            part.write_text(json.dumps({"verdict": dataclasses.asdict(verdict), "files": states}), encoding="utf-8")
            os.replace(part, path)
    except OSError as error:
        _log.debug("%s cannot be written: %r", path, error)


def _user_cache_folder() -> Path | None:
    """Return the folder for cached verdicts; None if the user has no home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "rl-ext", "isolation")
    return folder if folder.is_absolute() else None  # It is relative if the user has no home directory.


def _identifying_parts(factory: EnvFactory[Any]) -> tuple[Any, ...]:
    """Return the data that determines which environment a factory builds."""
    common = (factory.origin, factory._adapters, dict(factory.overrides))
    if factory.instance is not None:
        return (
            *common,
            [*map(type, layers(factory.instance))],
            repr(sorted(fingerprint(factory.instance, code=False).tokens.items())),
        )
    if not factory._recipe.takes_arguments:
        raise ValueError("the recipe of a copy does not describe the original")
    return *common, factory._recipe.load()


def _files_in_recipe(recipe: Any) -> Iterator[Any]:
    """Yield name and state of each file that a recipe names, such as a model or ROM."""
    if recipe == "__main__":  # Classes are described by their names.
        recipe = getattr(sys.modules["__main__"], "__file__", None)
        if recipe is None:
            raise ValueError("a class of a notebook has no file")
    if isinstance(recipe, (str, bytes)) and len(recipe) < 4096 and os.path.isfile(recipe):
        yield os.fsdecode(recipe), *(_file_state(os.fsdecode(recipe)) or ())
    elif isinstance(recipe, (tuple, list)):
        if len(recipe) == 3 and recipe[0] in ("class", "function") and not is_importable_elsewhere(str(recipe[1])):
            raise ValueError(f"the code of {recipe[1]} is not in a file that is found again")
        for part in recipe:
            yield from _files_in_recipe(part)


def _file_state(path: str) -> list[int] | None:
    """Return the modification time in nanoseconds and the size in bytes of a file.

    None if it does not exist.
    """
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        # Code may be stored in an archive, as the standard library is in the embeddable build for Windows.
        archive = next((folder for folder in Path(path).parents if folder.is_file()), None)
        if archive is None:
            return None
        state = archive.stat()
    return [state.st_mtime_ns, state.st_size]
