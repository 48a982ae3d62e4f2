"""``probe``, and the verdicts that are kept in the user's cache folder while what they depend on stays the same."""

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
    """Try whether instances of an environment may share a process, without building any in this one.

    A declaration comes first: ``metadata = {"isolation": "process"}`` in the environment's class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description that it holds. Otherwise three trials run in
    temporary processes with an empty working directory, with the same seeds and actions: one instance alone; two in
    two processes; two in one process, built in both orders, one of them closed half-way. Observations, rewards, flags,
    infos and ``action_masks()`` are compared bit for bit. Sharing that shows only later, with a third instance or
    with options of ``reset`` is not detected.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: an environment, a function or class that builds one, a gymnasium id or specification, or the
        result of :func:`~rl_ext_core.factory.as_factory`; or a list of these, which are to share a process. Of a list,
        the first eight different ones are tried
    :param cache: True keeps verdicts in the user's cache folder, a path in another folder, False nowhere. A verdict is
        reused while the recipe, the environment variables, the modules and shared libraries that were loaded, the
        interpreter and the machine stay the same. On macOS and Windows libraries are not noticed
    :param steps: number of steps to compare, at least 10; fewer are taken if they are slow
    :param timeout: seconds that building an environment, a reset or a step may take. By default 300 for one instance
        alone, and for others 20 times what that took, at least 20
    :return: the verdict; ``Isolation.UNKNOWN`` if the environment cannot be tried in another process
    :raises InvalidArgumentError: If the declared value is unknown, or ``steps`` or ``timeout`` is out of range.
    :raises WorkerError: If Python cannot be started.
    """
    start, start_ns = time.monotonic(), time.time_ns()
    if steps < MIN_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is too small: expected at least {MIN_STEPS}. Write steps=100")
    if not (timeout is None or timeout > 0):
        raise InvalidArgumentError(
            f"timeout={timeout!r} is not a time: expected seconds above 0, or None for the default. Write timeout=60"
        )
    sources = list(source) if isinstance(source, (list, tuple)) else [source, source]
    if not sources:
        raise InvalidArgumentError("source=[] is empty: expected what builds environments. Write probe([make] * 4)")
    try:
        made = {key: as_factory(one, verify=False) for key, one in {id(one): one for one in sources}.items()}
    except NotCopyableError as error:
        return conclude(Isolation.UNKNOWN, f"It could not be tried: {str(error).rstrip('.')}.")
    verdict = _strictest_declaration([*made.values()])
    if verdict is None:
        # Two instances of a source that occurs several times, and at least two in all.
        times = {key: min(2, sum(id(one) == key for one in sources)) for key in [*made][:_MAX_SOURCES]}
        trial_factories = [made[key] for key, count in times.items() for _ in range(count if len(made) > 1 else 2)]
        file = _cache_file(trial_factories, cache, steps)
        verdict = (_read_verdict(file) if file is not None else None) or _run_trials(
            trial_factories, steps, timeout, file, start_ns
        )
    if len(made) > _MAX_SOURCES:
        text = f"{verdict.explanation} Not tried: more than {_MAX_SOURCES} different sources."
        verdict = dataclasses.replace(verdict, explanation=text)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - start, 3))


def _run_trials(
    trial_factories: Sequence[EnvFactory[Any]], steps: int, timeout: float | None, file: Path | None, start_ns: int
) -> Verdict:
    """Run trials, and keep the verdict in a file if there is one."""
    from rl_ext_core.isolation.judge import Judge  # A kept verdict needs none of it.

    what = f"{len(trial_factories) + 1} instances of {trial_factories[0].to_source()}"
    _log.info('trying %s in temporary processes; isolation="process" skips this', what)
    judge = Judge(trial_factories, steps, timeout)
    verdict = judge.verdict()
    if file is not None and judge.loaded_files:
        _write_verdict(file, verdict, judge.loaded_files, start_ns)
    return verdict


def _strictest_declaration(factories: Sequence[EnvFactory[Any]]) -> Verdict | None:
    """Return the strictest declared verdict, or None if a source without a declaration might be stricter."""
    declarations = [declared_by_source(factory) for factory in factories]
    verdicts = [declaration.verdict() for declaration in declarations if declaration is not None]
    strict = [verdict for verdict in verdicts if not verdict.in_process]
    return strict[0] if strict else verdicts[0] if verdicts and None not in declarations else None


_FORMAT = 7
# A later probe may find something else.
_NOT_CACHED = (Isolation.NON_DETERMINISTIC, Isolation.BROKEN, Isolation.UNKNOWN)
# Variables of the session, the terminal or the job, by which libraries do not choose what they do.
_IGNORED_VARIABLES = re.compile(
    r"_|PWD|OLDPWD|SHLVL|LINES|COLUMNS|LS_COLORS|PS[1-4]|TERM.*|COLORTERM|TMUX.*|STY|WINDOWID|HIST.*|LESS.*|EDITOR|PAGER|"
    r"SSH_.*|GPG_.*|DBUS_.*|XDG_SESSION.*|XDG_RUNTIME_DIR|XDG_CACHE_HOME|INVOCATION_ID|JOURNAL_STREAM|VSCODE_.*|JPY_.*|"
    r"ITERM.*|KONSOLE.*|GNOME_.*|MAIL|PYTEST_CURRENT_TEST|PYTHONHASHSEED|PYTHONUNBUFFERED|GIT_.*"
)


def _cache_file(factories: Sequence[EnvFactory[Any]], where: bool | str | os.PathLike[str], steps: int) -> Path | None:
    """Return the file of a verdict; None: it is not kept.

    The name depends on the recipes and the files that they name, on the environment variables, the interpreter, this
    package and the machine. The file itself lists the modules and libraries that were loaded.
    """
    folder = _user_cache_folder() if where is True else None if where is False else Path(where).absolute()
    if folder is None:
        return None
    try:
        distinct = list({id(factory): factory for factory in factories}.values())
        recipe = [[description(_identifying_parts(factory)) for factory in distinct], [*map(distinct.index, factories)]]
        files = sorted({*_files_in_recipe(recipe)})
    except Exception as error:  # from the user's own code, perhaps
        _log.debug("%r cannot be recognized in another process: %r", factories, error)
        return None
    variables = sorted(pair for pair in os.environ.items() if not _IGNORED_VARIABLES.fullmatch(pair[0]))
    machine = (sys.version, sys.prefix, platform.node(), os.cpu_count(), os.getcwd(), rl_ext_core.__version__)
    parts = (_FORMAT, steps, machine, variables, recipe, files)
    return (
        folder / f"{hashlib.blake2b(repr(parts).encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}.json"
    )


def _read_verdict(path: Path) -> Verdict | None:
    """Return a kept verdict; None if there is none, it is damaged, or a file that it depends on has changed."""
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
    """Keep a verdict, whole or not at all.

    :param files: what was loaded. If one is gone, or was modified since the probe began, nothing is kept
    :param start_ns: time at which the probe began, in nanoseconds since the epoch
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
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "rl-ext", "isolation")
    return folder if folder.is_absolute() else None  # The user has no home.


def _identifying_parts(factory: EnvFactory[Any]) -> tuple[Any, ...]:
    """Return what an environment is made from."""
    common = (factory.origin, factory._adapters, dict(factory.overrides))
    if factory.instance is not None:
        return (
            *common,
            [*map(type, layers(factory.instance))],
            repr(sorted(fingerprint(factory.instance, code=False).tokens.items())),
        )
    if not factory._recipe.takes_arguments:
        raise ValueError("the recipe of a copy does not describe what was copied")
    return *common, factory._recipe.load()


def _files_in_recipe(recipe: Any) -> Iterator[Any]:
    """Yield the names and states of files that a recipe names, such as a model, a ROM or the script of a class."""
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
    """Return when a file was modified, in nanoseconds, and its size in bytes; None if there is none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        # Code may lie in an archive, as Python's own does in the embeddable build for Windows.
        archive = next((folder for folder in Path(path).parents if folder.is_file()), None)
        if archive is None:
            return None
        state = archive.stat()
    return [state.st_mtime_ns, state.st_size]
