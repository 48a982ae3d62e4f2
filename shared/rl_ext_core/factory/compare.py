"""Compare an instance with its copies in a temporary process, and find the changes that a copy needs.

The process builds a copy and compares fingerprints, path by path. Only if they differ, it tries two copies: it steps
them differently, resets both, and compares them.

- A setting is the same in all copies. If the original differs there, the user changed it.
- Episode state changes with steps, and the reset restores it. A copy does not need it.
- Kept state, such as running statistics, still differs after the reset.

Changed settings and kept state are set on a third copy, which is then compared with the original. The user's files are
protected meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rl_ext_core import _file_guard, _pickle, processes, resources
from rl_ext_core.factory import streams, walk
from rl_ext_core.factory.changes import Change, Examination, apply_changes
from rl_ext_core.factory.drivers import Driver, driver_for
from rl_ext_core.factory.recipe import Recipe
from rl_ext_core.factory.walk import Fingerprint, fingerprint
from rl_ext_core.processes.process_groups import kill_descendants

__all__ = ["WORKER_MODULES", "compare_and_measure", "measure", "run_in_subprocess"]

_LABEL = "trial copy"
# Modules that a fork server imports for all trials and workers, so that no other list replaces the server.
WORKER_MODULES = (
    *("numpy", "gymnasium.wrappers", "rl_ext_core.factory.compare"),
    *("rl_ext_core.isolation.trial", "rl_ext_core.vector.worker"),
)
OPTIONAL_PHASE = "testing an optional feature of a copy"  # If a process dies in this phase, a careful one is started.
_SEED = 20_231
# The two copies take so many steps, for so many seconds at most. The timeout aborts a step that waits indefinitely,
# e.g. for something that only the user's program does.
_STEPS, _HISTORY_S, _HISTORY_TIMEOUT_S = (30, 7), 1.0, 60.0
_MAX_VALUE_CHARS = 40
_MAX_DOUBTFUL = 1000
# Classes whose objects cannot be pickled, and have no settings.
_STATELESS = {
    *("_thread.lock", "_thread.RLock", "threading.Condition", "threading.Thread", "tempfile.TemporaryDirectory"),
    *("multiprocessing.synchronize.Lock", "multiprocessing.synchronize.RLock"),
}

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
    :param preload: Names of modules that a fork server may import.
    :param start_method: Start method of the process.
    :param environ: Environment variables of the process. None unsets a variable.
    :param timeout: Seconds that the task may take. None waits indefinitely.
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
                with watch.operation("building and stepping a copy", timeout=timeout):
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
    build: Callable[[], Any],
    read: Reader | None = None,
    request_changes: ChangeRequest | None = None,
    *,
    begin: Callable[[], object] | None = None,
) -> Examination:
    """Build an environment, and measure its memory. It is neither reset nor stepped.

    :param build: Builds the environment.
    :param read: Called with the environment. Its result is stored in ``examination.read``.
    :param request_changes: Not used. Tasks of :func:`run_in_subprocess` receive it.
    :param begin: Initializer, called first.
    """
    if begin is not None:
        begin()
    environment = build()
    try:
        result = None if read is None else read(environment)
        return Examination(private_bytes=resources.private_memory(), read=result)
    finally:
        _close(environment)


def compare_and_measure(
    recipe: Recipe,
    original: Fingerprint,
    adapt: Reader | None,
    read: Reader | None,
    careful: bool,
    request_changes: ChangeRequest,
) -> Examination:
    """Compare a copy with the original, and measure it.

    :param recipe: Builds the copy.
    :param original: Fingerprint of the instance.
    :param adapt: Turns the environment into the one that workers step, e.g. one of TorchRL.
    :param read: Called with the adapted environment. Its result is stored in ``examination.read``.
    :param careful: Whether to omit operations that may kill the process, such as rendering without a display.
    :param request_changes: Returns the changes for paths of the original, or the reasons why there are none.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(_temporary_copy(recipe))
            if recipe.origin == "pickle":
                found = _compare_pickled(copy, original)
            elif original.differences(fresh := fingerprint(copy)):
                histories = _Histories(careful)
                histories.use(copy, fresh)
                copy = None
                stack.close()
                gc.collect()  # Some simulators allow only one instance.
                found = _find_changes(recipe, original, histories, request_changes)
                if found.problems:
                    return found
                copy = stack.enter_context(_temporary_copy(dataclasses.replace(recipe, changes=found.changes)))
                found = _compare_changed(copy, original, histories, found)
            else:
                found = Examination(opaque=_describe_hidden(original))
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
    streams.seed_process(streams.seed_sequence(_SEED, 0))
    copy = recipe.build()
    try:
        yield copy
    finally:
        _close(copy)


def _compare_pickled(copy: Any, original: Fingerprint) -> Examination:
    copied = fingerprint(copy)
    if (error := _reset_error(copy)) is not None:
        return Examination([f"resetting a copy raises {error!r}"])
    paths = original.differences(copied)
    classes = [path for path in paths if path.startswith("<")]
    different = [_describe_difference(path, original, copied) for path in paths if not path.startswith("<")]
    return Examination(different, opaque=_describe_objects(original.opaque), class_attributes=classes)


def _find_changes(
    recipe: Recipe, original: Fingerprint, histories: _Histories, request_changes: ChangeRequest
) -> Examination:
    """Use a second copy, and return the changes since construction, or problems with setting them.

    :param histories: History of the first copy.
    """
    with _temporary_copy(recipe) as copy:
        histories.use(copy, fingerprint(copy))
        fresh = histories.fresh[0]
        left, _ = histories.changed_paths(original, fresh)
        answers = dict(zip(left, request_changes(left) if left else (), strict=True))
        # A value that cannot be set is ignored if steps create it, such as a window or a cache.
        refused = [
            f"{_describe_difference(path, original, fresh)} ({why})"
            for path, why in answers.items()
            if isinstance(why, str) and not histories.is_restored_by_use(path, original)
        ]
        if refused:
            return Examination(refused)
        changes = tuple({one.path: one for one in answers.values() if isinstance(one, Change)}.values())
        if not histories.careful:
            changes += _changes_within_episode(copy, original, histories, changes, request_changes)
    return Examination(changes=changes)


def _changes_within_episode(
    copy: Any, original: Fingerprint, histories: _Histories, changes: Sequence[Change], request_changes: ChangeRequest
) -> tuple[Change, ...]:
    """Return changes of episode state that survive a reset, such as a goal that the user fixed.

    Each such value is set on a copy, which is then reset. If the reset result depends on the value, it is kept.

    :param changes: Changes that are already known.
    """
    set_already = tuple(one.path for one in changes)
    paths = [path for path in histories.doubtful_paths(original) if not path.startswith(set_already)][:_MAX_DOUBTFUL]
    answers = zip(paths, request_changes(paths) if paths else (), strict=True)
    # Changes with other paths set a whole holder.
    doubtful = [one for path, one in answers if isinstance(one, Change) and one.path == path]
    driver = _driver_of(copy)
    if not doubtful or driver is None:
        return ()
    found = []
    with _optional_phase():
        for group in (changes, doubtful):
            for one in group:
                with contextlib.suppress(Exception):
                    apply_changes(copy, [one])
            with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):
                _seeded_reset(driver, 0)
            found.append(fingerprint(copy))
    without, with_them = found
    return tuple(one for one in doubtful if not with_them.equals_below(one.path, without))


def _compare_changed(copy: Any, original: Fingerprint, histories: _Histories, found: Examination) -> Examination:
    """Compare the original with a copy that has its changes, and reset that copy.

    :param found: The changes.
    """
    copied = fingerprint(copy)
    done = tuple(change.path for change in found.changes)
    error = _reset_error(copy) if done and histories.can_reset else None
    if error is not None:  # A change is at fault, such as a handle that only the original can use.
        return Examination([f"a copy on which {', '.join(done[:3])} was set raises {error!r} when it is reset"])
    left, classes = histories.changed_paths(original, copied)
    different = [
        _describe_difference(path, original, copied)
        for path in left
        if path.startswith(done) or not histories.is_restored_by_use(path, original)
    ]
    opaque = _describe_hidden(original, histories)
    own = histories.own_paths(original, copied)
    return dataclasses.replace(found, problems=different, opaque=opaque, own=own, class_attributes=classes)


def _describe_hidden(original: Fingerprint, histories: _Histories | None = None) -> list[str]:
    """Describe objects that cannot be inspected, except those that steps or resets create."""
    hidden = {
        path: why
        for path, why in {**original.opaque, **original.unpicklable}.items()
        if path.startswith("<") or not {why, *(original.token(path) or ())[:2]} & _STATELESS
    }
    return _describe_objects(
        {p: why for p, why in hidden.items() if histories is None or not histories.is_episode_state(p)}
    )


def _describe_objects(opaque: Mapping[str, str]) -> list[str]:
    """Return the path and class of each object that cannot be inspected, as text."""
    return [f"{path} ({name})" for path, name in opaque.items()]


def _reset_error(environment: Any) -> Exception | None:
    """Reset an environment and return the exception that it raises, or None."""
    driver = _driver_of(environment)
    try:
        if driver is not None:
            with _time_limit(_HISTORY_TIMEOUT_S):
                _seeded_reset(driver, 0)
    except Exception as error:
        return error
    return None


def _driver_of(environment: Any, number: int = 0) -> Driver | None:
    """Return a driver for an environment, or None if it cannot be stepped safely.

    Its interface may be unknown, or it may record videos.
    """
    records = _file_guard.video_triggers(walk.layers(environment))
    return None if records else driver_for(environment, seed=_SEED + number)


def _seeded_reset(driver: Driver, number: int) -> None:
    """Seed the global generators by a number, then reset with a seed."""
    streams.seed_process(streams.seed_sequence(_SEED, number))  # A reset may draw from global generators.
    driver.reset(_SEED + number)


class _Histories:
    """Two copies, used differently. They show which paths are settings, episode state or kept state.

    :ivar careful: Whether to omit operations that may kill the process.
    :ivar fresh: Fingerprints of the copies when they were just built.
    :ivar can_reset: Whether the copies can be reset.
    """

    def __init__(self, careful: bool) -> None:
        self.careful, self.can_reset = careful, False
        self.fresh: list[Fingerprint] = []
        self._all: list[Fingerprint] = []
        self._after_reset: list[Fingerprint] = []
        self._steps: dict[str, Any] = {}
        self._replaced_at_reset: frozenset[str] = frozenset()
        self.kind = functools.cache(self._kind)

    def use(self, environment: Any, fresh: Fingerprint) -> None:
        """Step and reset a copy, and take fingerprints.

        The first copy takes other actions than the second one, and is reset with another seed at first.
        """
        number = len(self.fresh)
        used = again = fresh
        self.fresh.append(fresh)
        driver = _driver_of(environment, number)
        if driver is not None:
            with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):  # Keep what was found so far.
                _seeded_reset(driver, number)
                used = again = fingerprint(environment)
                self.can_reset = True
                if number == 0:
                    self._after_reset.append(used)
                self._take_steps(environment, driver, number)
                used = again = fingerprint(environment)
                _seeded_reset(driver, 0)
                again = fingerprint(environment)
        self._after_reset.append(again)
        self._all += [fresh, *self._after_reset, used]
        if number == 0:
            self._steps = used.steps
            self._replaced_at_reset = frozenset(
                path
                for path, (_, operation, _) in used.steps.items()
                if operation in ("attribute", "item")
                and path in again.objects
                and path not in used.aliases
                and used.tokens.get(path, ("int",))[0] not in walk.SCALAR_TOKENS  # Long paths have no token.
                and used.objects[path] is not again.objects[path]
            )
        for one in self._all:
            one.objects.clear()

    def _take_steps(self, environment: Any, driver: Driver, number: int) -> None:
        """Step a copy with random actions, and render it."""
        until = time.monotonic() + _HISTORY_S
        for _ in range(_STEPS[number]):
            driver.step()
            if time.monotonic() > until:
                break
        if getattr(environment, "render_mode", None) not in (None, "human") and not self.careful:
            with contextlib.suppress(Exception), _optional_phase():
                environment.render()

    def _kind(self, path: str) -> str:
        """Return the kind of state at a path.

        :return: ``"own"`` if each instance has another value, such as a file name, port or handle. ``"kept"`` if it
            outlasts resets, ``"episode"`` if resets restore it, ``"fixed"`` if it never changes. Numbers with a
            fraction, arrays and tensors are never ``"own"``, because a constructor may draw them.
        """
        token, after = self.fresh[0].token(path), [one.token(path) for one in self._after_reset]
        if token != self.fresh[-1].token(path) and not (walk.is_number(token) or self._is_shared(path)):
            return "own"
        if any(token != after[0] for token in after):
            return "kept"
        varies = any(one.token(path) != after[0] for one in self._all)
        return "episode" if varies or self.is_replaced_at_reset(path) else "fixed"

    def _holders(self, path: str) -> Iterator[str]:
        """Yield a path and those of all objects that hold it, up to the environment."""
        while path in self._steps:
            yield path
            path = self._steps[path][0]

    def is_replaced_at_reset(self, path: str) -> bool:
        """Whether a reset replaces the object at a path, or one that holds it."""
        return any(holder in self._replaced_at_reset for holder in self._holders(path))

    def is_episode_state(self, path: str) -> bool:
        """Whether a path belongs to the episode, so that a copy does not need its value."""
        return self.kind(path) == "episode" or self.is_replaced_at_reset(path)

    def changed_paths(self, original: Fingerprint, copy: Fingerprint) -> tuple[list[str], list[str]]:
        """Return the paths to change on a copy, and those of classes and globals."""
        paths = [path for path in copy.differences(original) if self.kind(path) in ("fixed", "kept")]
        paths = [path for path in paths if original.token(path) != copy.token(path) or not self._alias_varies(path)]
        classes = [path for path in paths if path.startswith("<") and self.kind(path) == "fixed"]
        found: dict[str, None] = {}
        for path in paths:
            if not path.startswith("<") and not self._is_covered_by_holder(path, found, original, copy):
                found[path] = None
        return list(found), classes

    def doubtful_paths(self, original: Fingerprint) -> list[str]:
        """Return paths of episode state at which the original has a value that no reset produced."""
        fresh, found = self.fresh[0], dict[str, None]()
        for path in fresh.differences(original):
            token = original.token(path)
            if token is None or token[0] == "object" or path in original.aliases or path.startswith("<"):
                continue
            # An object that fresh copies do not have yet is set as a whole.
            while (holder := original.steps.get(path, ("", None, None))[0]) and _is_scalar(fresh.token(holder)):
                path = holder
            is_doubtful = self.kind(path) in ("episode", "fixed")
            if is_doubtful and not any(original.equals_below(path, one) for one in self._after_reset):
                found[path] = None
        return list(found)

    def own_paths(self, original: Fingerprint, copy: Fingerprint) -> list[str]:
        """Return the paths of plain values that differ in each instance, such as a port or the name of a folder."""
        paths = (path for path in copy.differences(original) if not path.startswith("<") and self.kind(path) == "own")
        paths = (path for path in paths if not self.is_replaced_at_reset(path))
        return [path for path in paths if (original.token(path) or ("",))[0] in ("int", "str")]

    def _is_shared(self, path: str) -> bool:
        """Whether modules or classes refer to the object at a path, too.

        The first copy may have changed such an object.
        """
        tokens = self.fresh[0].tokens
        return path.startswith("<") or any(f"{holder}.<is>" in tokens for holder in self._holders(path))

    def _alias_varies(self, path: str) -> bool:
        """Whether steps or resets change which other path refers to the same object."""
        return any(one.aliases.get(path) != self.fresh[0].aliases.get(path) for one in self._all)

    def _is_covered_by_holder(
        self, path: str, found: Mapping[str, None], original: Fingerprint, copy: Fingerprint
    ) -> bool:
        """Whether a holder of a path is set as a whole, or need not be set."""
        is_new, holder = copy.token(path) is None, path
        while holder:
            steps = original.steps.get(holder) or copy.steps.get(holder) or self._steps.get(holder)
            if steps is None:
                return False
            holder = steps[0]
            if holder in found or (is_new and self.is_replaced_at_reset(holder)):
                return True
            if original.token(holder) != copy.token(holder) and self.kind(holder) in ("own", "episode"):
                return True
        return False

    def is_restored_by_use(self, path: str, original: Fingerprint) -> bool:
        """Whether steps or resets create the object at a path, so that a copy does not need it."""
        if self.kind(path) == "fixed":
            return False
        below = [path, *(each for each in original.tokens if each.startswith(path))]
        return self.is_replaced_at_reset(path) or all(
            self._occurs_in_histories(each, original.token(each)) for each in below
        )

    def _occurs_in_histories(self, path: str, token: Any) -> bool:
        """Whether the copies had this token at some time, or tokens that vary."""
        found = [other for one in self._all if (other := one.token(path)) is not None]
        return token in found or any(other != found[0] for other in found)


def _is_scalar(token: Any) -> bool:
    """Return whether a token describes an immutable value, or is missing."""
    return token is None or token[0] in walk.SCALAR_TOKENS


def _describe_difference(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    """Return a clause on how a value of a copy differs from the instance's."""
    expected, actual = _describe_value(original, path), _describe_value(copy, path)
    if path in original.aliases and expected == actual:
        return f"{path} is the same object as {original.canonical_path(path)} in the instance, but not in a copy"
    if expected == actual:
        return f"{path or 'the environment'} has different contents in a copy"
    return f"{path or 'the environment'} is {expected} in the instance, but {actual} in a copy"


def _describe_value(found: Fingerprint, path: str) -> str:
    token = found.token(path)
    if token is None:
        return "missing"
    if token[0] in walk.SCALAR_TOKENS and isinstance(token[-1], (str, bytes, int, type(None))):
        text = repr(token[-1]) if token[0] in ("str", "bytes") else str(token[-1])
        return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
    return f"a {token[1]}" if token[0] == "object" else "other data"


@contextlib.contextmanager
def _optional_phase() -> Iterator[None]:
    """Report that the ``with`` block is optional, so that a crash in it is retried without it."""
    processes.set_status(phase=OPTIONAL_PHASE)
    try:
        yield
    finally:
        processes.set_status(phase=None)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds.

    Do nothing in other threads than the main one, and on Windows.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_timeout(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _close(environment: Any) -> None:
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # An error does not matter: the process ends next.
        warnings.simplefilter("ignore")
        environment.close()
