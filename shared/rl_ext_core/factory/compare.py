"""Compare an instance with its copies in a temporary process, and find the changes that a copy needs.

The process builds a copy and compares fingerprints, path by path. If they differ, it steps and resets the copy, and
builds another one. A copy then gets every value that differs from the original's, except two kinds:

- Values that differ in each instance, such as ports and file names.
- Objects that a reset creates again, if they cannot be pickled, such as windows, or if several paths share them.

A copy with these changes is compared with the original again. The user's files are protected meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rl_ext_core import _file_guard, _pickle, processes, resources
from rl_ext_core.factory import streams, walk
from rl_ext_core.factory.drivers import Driver, driver_for
from rl_ext_core.factory.recipe import Change, Examination, Recipe
from rl_ext_core.factory.walk import Fingerprint, fingerprint
from rl_ext_core.processes.process_groups import kill_descendants

__all__ = ["WORKER_MODULES", "compare_and_measure", "measure", "run_in_subprocess"]

_LABEL = "trial copy"
# Modules that a fork server imports for all trials and workers, so that no other list replaces the server.
WORKER_MODULES = (
    *("numpy", "gymnasium.wrappers", "rl_ext_core.factory.compare"),
    *("rl_ext_core.isolation.trial", "rl_ext_core.vector.worker"),
)
_SEED = 20_231
# A copy takes so many steps, for so many seconds at most. Because the number is prime, they seldom end with an episode.
_STEPS, _HISTORY_S = 31, 1.0
# A copy may wait indefinitely, e.g. for something that only the user's program does.
_TIMEOUT_S = 600.0
_MAX_VALUE_CHARS = 40
# Classes whose objects cannot be pickled, and have no settings.
_STATELESS = {
    *("_thread.lock", "_thread.RLock", "threading.Condition", "threading.Thread", "tempfile.TemporaryDirectory"),
    *("multiprocessing.synchronize.Lock", "multiprocessing.synchronize.RLock"),
}
_OPAQUE = (
    "cannot be inspected, so copies may lack changes that were made there. To keep the changes, pass a function that "
    "builds and configures the environment"
)
_OWN = (
    "differs in each instance, so copies do not get the value of this one. To set it, use "
    "for_workers(n, overrides=[...])"
)
_IMPORTED_AGAIN = (
    "differs in workers, because they import the module again, without later changes. Set the value on the instance, "
    "or in the module itself"
)

Reader = Callable[[Any], Any]
ChangeRequest = Callable[[Sequence[str]], "list[Change | str]"]


def run_in_subprocess(
    task: Callable[[ChangeRequest], Examination],
    answer: ChangeRequest = lambda paths: [],
    *,
    preload: Sequence[str] = (),
    start_method: str | None = None,
    environ: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    protects_files: bool = False,
) -> Examination:
    """Call a function in a temporary process.

    :param task: Picklable function. It receives a function that requests changes from this process.
    :param answer: Called in this process for each request.
    :param environ: Environment variables of the process. None unsets a variable.
    :param timeout: Seconds that the task may take, by default 600.
    :param protects_files: Whether the process must not change the user's files.
    :raises WorkerError: If the task raises, or its process dies. An exception of the task is the cause.
    """
    with tempfile.TemporaryDirectory(prefix="rl-ext-", ignore_cleanup_errors=True) as folder:
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder) if protects_files else {}
        environs = [{**(environ or {}), **temporary}]
        modules = (*WORKER_MODULES, *preload)
        context = processes.get_context(start_method, preload=modules, environs=environs, label=_LABEL)
        ours, theirs = context.Pipe()
        writable = folder if protects_files else None
        process = context.Process(target=_serve_task, args=(theirs, _pickle.dumps(task), writable))
        with ours, theirs:
            process.start()
            theirs.close()
            watch = processes.Watch([process], label=_LABEL)
            try:
                with watch.operation("building and stepping a copy", timeout=timeout or _TIMEOUT_S):
                    found = pickle.loads(ours.recv_bytes())
                    while isinstance(found, list):
                        ours.send_bytes(pickle.dumps(answer(found)))
                        found = pickle.loads(ours.recv_bytes())
                    watch.expect_exit()
            finally:
                watch.kill()
                watch.stop()
    examination: Examination = found
    return examination


def _serve_task(connection: Connection, packed: bytes, writable: str | None) -> None:
    """Call a function in the temporary process, and send the result to the parent.

    :param writable: The only folder in which it may change files. None allows all.
    """
    if writable is not None:
        _file_guard.protect_files(writable)

    def request_changes(paths: Sequence[str]) -> Any:
        """Ask the parent for the pickled values at some paths."""
        connection.send_bytes(pickle.dumps(list(paths)))
        return pickle.loads(connection.recv_bytes())

    connection.send_bytes(_pickle.dumps(pickle.loads(packed)(request_changes)))
    connection.close()
    kill_descendants()  # The parent may find this process ended, and would then not kill the processes that it started.


def measure(
    begin: Callable[[], object], build: Callable[[], Any], read: Reader, request_changes: ChangeRequest
) -> Examination:
    """Build an environment, read it, and measure its memory. It is neither reset nor stepped.

    :param begin: Initializer, called first.
    """
    begin()
    environment = build()
    try:
        result = read(environment)
        return Examination(private_bytes=resources.private_memory(), read=result)
    finally:
        _close(environment)


def compare_and_measure(
    recipe: Recipe,
    original: Fingerprint,
    adapt: Reader | None,
    read: Reader | None,
    request_changes: ChangeRequest,
) -> Examination:
    """Compare a copy with the original, and measure it.

    :param adapt: Turns the environment into the one that workers step, e.g. one of TorchRL, which ``read`` gets.
    :param request_changes: Returns the changes for paths of the original, or the reasons why there are none.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(_temporary_copy(recipe))
            fresh = fingerprint(copy)
            paths = original.differences(fresh)
            found = Examination(warnings={_OPAQUE: _describe_hidden(original)})
            if recipe.origin == "pickle" and (error := _reset_error(copy)) is not None:
                return Examination([f"resetting a copy raises {error!r}"])
            if paths:
                # Rendering may kill a process without a display, so it is tried only if it may explain new objects.
                renders = any(
                    token[0] == "object" and _is_scalar(fresh.token(path)) for path, token in original.tokens.items()
                )
                used, replaced = _use(copy, renders)
                fresh.objects.clear()
                copy = None
                stack.close()
                gc.collect()  # Some simulators allow only one instance.
                with _temporary_copy(recipe) as copy:
                    other = fingerprint(copy)
                other.objects.clear()
                copy = None
                gc.collect()
                histories = _Histories(original, fresh, other, used, replaced)
                found = _find_changes(histories, request_changes)
                if found.problems:
                    return found
                copy = stack.enter_context(_temporary_copy(dataclasses.replace(recipe, changes=found.changes)))
                found = _compare_changed(copy, histories, found)
        except Exception as error:
            return Examination([f"building a copy raises {error!r}"])
        if found.problems:
            return found
        adapted = copy if adapt is None else adapt(copy)
        result = None if read is None else read(adapted)
        return dataclasses.replace(found, private_bytes=resources.private_memory(), read=result)


@contextlib.contextmanager
def _temporary_copy(recipe: Recipe) -> Iterator[Any]:
    """Build a copy after seeding this process, and close it after the ``with`` block."""
    streams.seed_process(np.random.SeedSequence(_SEED))
    copy = recipe.build({}, recipe.load())
    try:
        yield copy
    finally:
        _close(copy)


def _find_changes(histories: _Histories, request_changes: ChangeRequest) -> Examination:
    """Return the changes since construction, and the problems with setting them."""
    paths = histories.changed_paths(histories.fresh)
    answers = dict(zip(paths, request_changes(paths) if paths else (), strict=True))
    refused = [
        f"{_describe_difference(path, histories.original, histories.fresh)} ({why})"
        for path, why in answers.items()
        if isinstance(why, str) and not histories.is_created_by_use(path)
    ]
    changes = {one.path: one for one in answers.values() if isinstance(one, Change)}
    return Examination(refused, changes=tuple(changes.values()))


def _compare_changed(copy: Any, histories: _Histories, found: Examination) -> Examination:
    """Compare the original with a copy that has its changes, and reset that copy."""
    original, copied = histories.original, fingerprint(copy)
    done = tuple(change.path for change in found.changes)
    error = _reset_error(copy) if done and histories.used else None
    if error is not None:  # A change is at fault, such as a handle that only the original can use.
        return Examination([f"a copy on which {', '.join(done[:3])} was set raises {error!r} when it is reset"])
    different = [
        _describe_difference(path, original, copied)
        for path in histories.changed_paths(copied)
        if not histories.is_created_by_use(path)
        or (any(walk.is_part(path, one) for one in done) and not histories.is_restored(path))
    ]
    opaque = _describe_hidden(original, histories)
    paths = copied.differences(original)
    own = [path for path in paths if histories.is_own(path) and not histories.is_restored(path)]
    own = [path for path in own if (original.token(path) or ("", ""))[1] in ("int", "str")]
    # A copy that lacks an object of the episode does not lead to its class, and to the globals that the class reads.
    met = {path.partition(">")[0] for path in copied.tokens if path.startswith("<")}
    # The first copy may have changed globals in its steps.
    shared = {**copied.tokens, **histories.fresh.tokens}
    paths = sorted(path for path in {**copied.tokens, **original.tokens} if path.partition(">")[0] in met)
    classes = [p for p in paths if shared.get(p) != original.tokens.get(p) and not histories.is_restored(p)]
    return dataclasses.replace(
        found, problems=different, warnings={_OPAQUE: opaque, _OWN: own, _IMPORTED_AGAIN: classes}
    )


def _describe_hidden(original: Fingerprint, histories: _Histories | None = None) -> list[str]:
    """Return path and class of each object that cannot be inspected, except those that resets create."""
    return [
        f"{path} ({why})"
        for path, why in original.hidden.items()
        if (path.startswith("<") or original.token(path)[1] not in _STATELESS)
        and not (histories is not None and histories.is_restored(path))
    ]


def _reset_error(environment: Any) -> Exception | None:
    driver = driver_for(environment, seed=_SEED)
    try:
        if driver is not None:
            _seeded_reset(driver)
    except Exception as error:
        return error
    return None


def _seeded_reset(driver: Driver) -> None:
    streams.seed_process(np.random.SeedSequence(_SEED))  # A reset may draw from global generators.
    driver.reset(_SEED)


def _use(environment: Any, renders: bool) -> tuple[list[Fingerprint], set[str]]:
    """Reset, step and reset a copy.

    :param renders: Whether to render it, too.
    :return: Its fingerprints in between, none if it cannot be reset, and the paths of objects that resets replace.
    """
    found: list[Fingerprint] = []
    replaced: set[str] = set()
    driver = driver_for(environment, seed=_SEED)
    if driver is not None:
        with contextlib.suppress(Exception):  # Keep what was found so far.
            _seeded_reset(driver)
            found.append(fingerprint(environment))
            until = time.monotonic() + _HISTORY_S
            for _ in range(_STEPS):
                driver.step()
                if time.monotonic() > until:
                    break
            if renders and getattr(environment, "render_mode", None) not in (None, "human"):
                with contextlib.suppress(Exception):
                    environment.render()
            found.append(stepped := fingerprint(environment))
            _seeded_reset(driver)
            found.append(again := fingerprint(environment))
            replaced = {
                path
                for path, token in stepped.tokens.items()
                if token[0] not in walk.SCALAR_TOKENS
                and path in again.objects
                and stepped.objects.get(path) is not again.objects[path]
                and stepped.steps.get(path, ("", None))[1] in ("attribute", "item")
            }
    for one in found:
        one.objects.clear()
    return found, replaced


@dataclasses.dataclass
class _Histories:
    """Fingerprints of the original, of two copies that were just built, and of the first one after resets and steps."""

    original: Fingerprint
    fresh: Fingerprint
    other: Fingerprint
    used: list[Fingerprint]
    replaced: set[str]

    def is_own(self, path: str) -> bool:
        """Whether each instance has another value at a path, such as a file name, port or handle.

        Numbers with a fraction, arrays and tensors do not count, because a constructor may draw them.
        """
        token = self.fresh.token(path)
        if path.startswith("<") or token == self.other.token(path) or walk.is_number(token):
            return False
        # The first copy may have changed an object to which modules or classes refer, too.
        holders = self._holders(path, self.fresh)
        return not any(f"{holder}.<is>" in self.fresh.tokens for holder in (path, *holders))

    def varies(self, path: str, *, in_value: bool = True) -> bool:
        """Whether steps or resets change the value at a path, or the object to which it refers."""
        is_other = any(one.aliases.get(path) != self.fresh.aliases.get(path) for one in self.used)
        return is_other or (in_value and any(one.token(path) != self.fresh.token(path) for one in self.used))

    def is_restored(self, path: str) -> bool:
        """Whether a reset restores a value and its parts after steps, or creates an object that holds it."""
        # Lists of the original may be longer, because they belong to another episode.
        if not self.replaced.isdisjoint((path, *self._holders(path, *self.used, self.original))):
            return True
        if not self.varies(path):
            return False
        token, first, last = self.original.token(path), self.used[0], self.used[-1]
        # The token of a container has no values. If the original's has other keys, the user may have added them.
        is_known = path.startswith("<") or token is None or token[0] != "object"
        is_known = is_known or any(one.token(path) == token for one in self.used)
        return is_known and _tokens_of_parts(first, path) == _tokens_of_parts(last, path)

    def is_created_by_use(self, path: str) -> bool:
        """Whether steps or resets create the object at a path, so that a copy does not need it."""
        if self.is_restored(path):
            return True
        below = [path, *(each for each in self.original.tokens if walk.is_part(each, path))]
        return self.varies(path) and all(
            self.varies(each) or self.original.token(each) in [one.token(each) for one in self.used] for each in below
        )

    def changed_paths(self, copy: Fingerprint) -> list[str]:
        """Return the paths of values to change on a copy. A path stands for all parts below it."""
        original, found = self.original, dict[str, None]()
        shared = {*original.aliases, *self.fresh.aliases, *self.fresh.aliases.values()}
        for path in copy.differences(original):
            token = original.token(path)
            is_alias = token == copy.token(path) and self.varies(path, in_value=False)
            # Each reset sets such a value, e.g. that the environment was reset.
            is_certain = self.used and _is_scalar(token) and all(one.token(path) == token for one in self.used)
            # An object that several paths share cannot be set by one of them.
            is_created = path in shared and self.is_restored(path)
            if path.startswith("<") or is_alias or is_certain or is_created or self.is_own(path):
                continue
            holders = list(self._holders(path, original, copy))
            if not any(holder in found or self.is_own(holder) for holder in holders):
                found[path] = None
        return list(found)

    def _holders(self, path: str, *fingerprints: Fingerprint) -> Iterator[str]:
        """Yield the paths of all objects that hold the one at a path."""
        while path:
            steps = next((one.steps[path] for one in fingerprints if path in one.steps), None)
            if steps is None:
                return
            path = steps[0]
            yield path


def _tokens_of_parts(found: Fingerprint, path: str) -> dict[str, Any]:
    """Return the tokens of a value and of its parts, also if the path is an alias."""
    place, token = found.canonical_path(path), found.token(path)
    below = () if _is_scalar(token) else (part for part in found.tokens if walk.is_part(part, place))
    return {"": token, **{part[len(place) :]: found.tokens[part] for part in below}}


def _is_scalar(token: Any) -> bool:
    """Whether a token describes an immutable value, or is missing."""
    return token is None or token[0] in walk.SCALAR_TOKENS


def _describe_difference(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    """Return a clause on how a value of a copy differs from the instance's."""
    expected, actual = _describe_value(original, path), _describe_value(copy, path)
    if path.endswith(".<is>"):
        where = "a copy" if original.token(path) is None else "the instance"
        return f"{path.removesuffix('.<is>')} is an object of its module or class only in {where}"
    if path in original.aliases and expected == actual:
        return f"{path} is the same object as {original.canonical_path(path)} in the instance, but not in a copy"
    if expected == actual:
        return f"{path or 'the environment'} has different contents in a copy"
    return f"{path or 'the environment'} is {expected} in the instance, but {actual} in a copy"


def _describe_value(found: Fingerprint, path: str) -> str:
    token = found.token(path)
    if token is None:
        return "missing"
    if token[0] in walk.SCALAR_TOKENS and token[0] != "tuple":
        text = repr(token[-1]) if token[1] in ("str", "bytes") else str(token[-1])
        return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
    return f"a {token[1]}" if token[0] == "object" else "other data"


def _close(environment: Any) -> None:
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # An error does not matter: the process ends next.
        warnings.simplefilter("ignore")
        environment.close()
