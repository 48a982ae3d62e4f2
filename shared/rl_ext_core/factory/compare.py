"""Compare an instance with its copies, and find the changes that a copy needs.

The process builds two copies, steps them differently, and resets both. It compares their fingerprints path by path:

- A setting is the same in all copies. If the original differs there, the user changed it.
- Episode state changes with steps, and the reset restores it. A copy does not need it.
- Kept state, such as running statistics, still differs after the reset.

Changed settings and kept state are set on a copy, which is then compared once more.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import operator
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core import _pickle, processes, resources
from rl_ext_core.factory import simulators, streams, walk
from rl_ext_core.factory.drivers import Driver, driver_for
from rl_ext_core.factory.walk import Fingerprint, fingerprint
from rl_ext_core.processes.process_groups import kill_descendants

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rl_ext_core.factory.factory import Recipe

__all__ = [
    "Change",
    "Examination",
    "apply_changes",
    "compare_and_measure",
    "measure",
    "pack_values",
    "run_in_subprocess",
    "unpack",
    "unpicklable",
]

_LABEL = "trial copy"
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
Step = tuple[str, Any]
ChangeRequest = Callable[[Sequence[str]], "list[Change | str]"]


@dataclasses.dataclass(frozen=True)
class Change:
    """A value to set on a copy.

    :ivar path: Path of the value, as in a fingerprint.
    :ivar steps: The way from the environment to the value. Each step is an operation and a name, a key or an index.
    :ivar packed: Pickle of the value.
    """

    path: str
    steps: tuple[Step, ...]
    packed: bytes


@dataclasses.dataclass(frozen=True)
class Examination:
    """Results of building and comparing a copy.

    :ivar problems: Descriptions of differences between a copy and the original, or of errors. Empty if they are equal.
    :ivar changes: Changes to set on each copy.
    :ivar opaque: Paths of objects that cannot be inspected. Differences in their state are not detected.
    :ivar class_attributes: Paths of globals and class attributes that differ, because workers import them again.
    :ivar build_seconds: Seconds to build a copy.
    :ivar private_bytes: Memory in bytes that the process did not share. None if the system does not report it.
    :ivar read: Result of the caller's reader.
    """

    problems: Sequence[str] = ()
    changes: tuple[Change, ...] = ()
    opaque: Sequence[str] = ()
    class_attributes: Sequence[str] = ()
    build_seconds: float = 0.0
    private_bytes: int | None = None
    read: Any = None


# ---- In the process of the original: pack the values that a copy needs.


def pack_values(original: Fingerprint, paths: Sequence[str]) -> list[Change | str]:
    """Pickle the values of an instance at some paths.

    :return: For each path a change, or the reason why its value cannot be set on a copy.
    """
    found = ((path, part) for path, part in original.objects.items() if path not in original.aliases)
    homes = {id(part): path for path, part in found if walk.is_layer(part)}
    return [_pack_value(original, path, homes) for path in paths]


def _pack_value(original: Fingerprint, path: str, homes: Mapping[int, str]) -> Change | str:
    """Pickle the value at a path as a change; return the reason if that is impossible."""
    while path in original.steps and original.steps[path][1] is None:  # It cannot be set itself, but its holder can.
        path = original.steps[path][0]
    steps = _steps_to(original, path)
    if not steps or path not in original.objects:
        return "it cannot be set on a copy"
    for where, reason in original.unpicklable.items():
        if where.startswith(path):
            return reason
    packed = original.objects[path]

    def location_of(value: Any) -> Any:
        """Return the location of an object in a copy, or None to pickle the object."""
        home = homes.get(id(value))
        if value is packed or home is None or home.startswith(path):
            return None if value is packed else original.references.get(id(value))
        return _steps_to(original, home)

    try:
        return Change(path, steps, _pickle.dumps(packed, location_of))
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__


def _steps_to(original: Fingerprint, path: str) -> tuple[Step, ...] | None:
    """Return the steps from an environment to a path; None if a copy has no such path."""
    found: list[Step] = []
    while path:
        path, operation, key = original.steps.get(path, ("", None, None))
        if operation is None:
            return None
        found.insert(0, (operation, key))
    return tuple(found)


def unpicklable(original: Fingerprint) -> str:
    """Return the path of the innermost part of a value that cannot be pickled."""
    found, parts = "", dict[str, list[str]]()
    for path, (holder, _, _) in original.steps.items():
        parts.setdefault(holder, []).append(path)
    while True:
        for deeper in parts.get(found, ()):
            try:
                _pickle.dumps(original.objects[deeper])
            except Exception:
                found = deeper
                break
        else:
            return found


# ---- In any process: set values on a copy.


def unpack(packed: bytes, environment: Any = None) -> Any:
    """Unpickle a value of :func:`pack_values`, or an environment.

    :param packed: The pickle.
    :param environment: Copy that the value is for. Parts of it that the value refers to are taken from it.
    """

    def find_object(place: Any) -> Any:
        """Find a module's attribute or a part of the environment by its location in a pickle."""
        if len(place) == 2 and isinstance(place[0], str):
            return operator.attrgetter(place[1])(importlib.import_module(place[0]))
        return functools.reduce(_follow_step, place, environment)

    return _pickle.loads(packed, find_object)


def _follow_step(holder: Any, step: Step) -> Any:
    """Return the attribute, field or item of ``holder`` that a step names."""
    operation, key = step
    if operation == "attribute":
        return walk.attributes(holder)[key]
    return getattr(holder, key) if operation == "field" else holder[key]


def apply_changes(environment: Any, changes: Sequence[Change]) -> None:
    """Set the changes of the original on a copy.

    :raises LookupError: If a value cannot be set. The message names the path.
    """
    for change in changes:
        try:
            _apply_change(environment, change)
        except Exception as error:
            raise LookupError(f"{change.path} cannot be set on a copy: {error!r}") from error


def _apply_change(environment: Any, change: Change) -> None:
    """Set one changed value on a copy, in place if its type and shape allow that."""
    holder = functools.reduce(_follow_step, change.steps[:-1], environment)
    operation, key = change.steps[-1]
    value = unpack(change.packed, environment)
    held: Any = None
    with contextlib.suppress(LookupError, AttributeError):
        held = _follow_step(holder, change.steps[-1])
    if _fits_in_place(held, value):
        held[...] = value  # Other objects may refer to this array, or a C library to its memory.
    elif type(held) is type(value) and isinstance(held, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        ctypes.memmove(ctypes.byref(held), ctypes.byref(value), ctypes.sizeof(value))
    elif operation == "attribute":
        names = walk.instance_dict(holder)
        if names is not None and (key in names or key not in walk.attributes(holder)):
            names[key] = value
        else:  # It is the attribute of a slot.
            object.__setattr__(holder, key, value)
    elif operation == "field":
        setattr(holder, key, value)
    else:
        holder[key] = value


def _fits_in_place(held: Any, value: Any) -> bool:
    """Whether a value can be written into the present array or tensor."""
    is_array = hasattr(held, "dtype") and hasattr(type(held), "__setitem__")
    if type(held) is not type(value) or not is_array or not getattr(held, "shape", ()):
        return False
    is_fixed = getattr(held, "requires_grad", False) or (isinstance(held, np.ndarray) and not held.flags.writeable)
    return bool(held.shape == value.shape and held.dtype == value.dtype and not is_fixed)


# ---- In the temporary process.


def run_in_subprocess(
    task: Callable[[ChangeRequest], Examination],
    answer: ChangeRequest = lambda paths: [],
    *,
    preload: Sequence[str] = (),
    start_method: str | None = None,
    environ: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Call a function in a temporary process.

    :param task: Picklable function. It receives a function that requests changes from this process.
    :param answer: Called in this process for each request.
    :param preload: Names of modules that a fork server may import.
    :param start_method: Start method of the process.
    :param environ: Environment variables of the process. None unsets a variable.
    :param timeout: Seconds that the task may take. None waits indefinitely.
    :raises WorkerError: If the task raises, or its process dies. An exception of the task is the cause.
    """
    context = processes.get_context(start_method, preload=preload, environs=[environ or {}], label=_LABEL)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_task, args=(theirs, _pickle.dumps(task)))
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


def _serve_task(connection: Connection, packed: bytes) -> None:
    """Call a function in the temporary process, and send the result to the parent."""

    def request_changes(paths: Sequence[str]) -> Any:
        """Ask the parent for the pickled values at some paths."""
        connection.send_bytes(pickle.dumps(list(paths)))
        return pickle.loads(connection.recv_bytes())

    connection.send_bytes(_pickle.dumps(pickle.loads(packed)(request_changes)))
    connection.close()
    kill_descendants()  # The parent may find this process ended, and would then not kill the processes that it started.


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
    try:
        found = (
            _compare_pickled(recipe, original)
            if recipe.origin == "pickle"
            else _compare_rebuilt(recipe, original, careful, request_changes)
        )
    except Exception as error:
        return Examination([f"building a copy raises {error!r}"])
    if found.problems:
        return found
    recipe = dataclasses.replace(recipe, changes=found.changes)
    measured = measure(recipe.build if adapt is None else lambda: adapt(recipe.build()), read)
    kept = {name: getattr(found, name) for name in ("changes", "opaque", "class_attributes")}
    return dataclasses.replace(measured, **kept)


def _compare_pickled(recipe: Recipe, original: Fingerprint) -> Examination:
    """Compare the original with a copy that was unpickled."""
    with _temporary_copy(recipe) as copy:
        copied = fingerprint(copy)
        if (error := _reset_error(copy)) is not None:
            return Examination([f"resetting a copy raises {error!r}"])
    paths = original.differences(copied)
    classes = [path for path in paths if path.startswith("<")]
    different = [_describe_difference(path, original, copied) for path in paths if not path.startswith("<")]
    return Examination(different, opaque=_format_opaque(original.opaque), class_attributes=classes)


def _compare_rebuilt(
    recipe: Recipe, original: Fingerprint, careful: bool, request_changes: ChangeRequest
) -> Examination:
    """Find the changes since construction, and compare a copy that has them."""
    classifier = _StateClassifier(recipe, careful)
    copied = classifier.fresh[0]
    left, classes = classifier.changed_paths(original, copied)
    hidden = {p: why for p, why in {**original.opaque, **original.unpicklable}.items() if _has_state(p, why, original)}
    opaque = {path: name for path, name in hidden.items() if not classifier.is_episode_state(path)}
    answers = dict(zip(left, request_changes(left) if left else (), strict=True))
    # A value that cannot be set is ignored if steps create it, such as a window or a cache.
    refused = {
        path: why
        for path, why in answers.items()
        if isinstance(why, str) and not classifier.is_restored_by_use(path, original)
    }
    if refused:
        return Examination([f"{_describe_difference(path, original, copied)} ({why})" for path, why in refused.items()])
    changes = tuple({one.path: one for one in answers.values() if isinstance(one, Change)}.values())
    if not careful:
        changes += _changes_within_episode(recipe, original, classifier, changes, request_changes)
    if left or changes:
        with _temporary_copy(dataclasses.replace(recipe, changes=changes)) as copy:
            copied = fingerprint(copy)
            error = _reset_error(copy)
        done = tuple(change.path for change in changes)
        if error is not None:
            with _temporary_copy(recipe) as copy:
                if _reset_error(copy) is None:  # A change is at fault, such as a handle that only the original can use.
                    return Examination(
                        [f"a copy on which {', '.join(done[:3])} was set raises {error!r} when it is reset"]
                    )
        # Use the classes of this comparison, because both environments have loaded the same modules by now.
        left, classes = classifier.changed_paths(original, copied)
        left = [path for path in left if path.startswith(done) or not classifier.is_restored_by_use(path, original)]
    different = [_describe_difference(path, original, copied) for path in left]
    return Examination(different, changes, opaque=_format_opaque(opaque), class_attributes=classes)


def _has_state(path: str, why: str, original: Fingerprint) -> bool:
    """Whether an object that cannot be inspected may have state that calls change."""
    return path.startswith("<") or not {why, *(original.token(path) or ())[:2]} & _STATELESS


def _changes_within_episode(
    recipe: Recipe,
    original: Fingerprint,
    classifier: _StateClassifier,
    changes: Sequence[Change],
    request_changes: ChangeRequest,
) -> tuple[Change, ...]:
    """Return changes of episode state that survive a reset, such as a goal that the user fixed.

    Each such value is set on a copy, which is then reset. If the reset result depends on the value, it is kept.

    :param changes: Changes that are already known.
    """
    set_already = tuple(one.path for one in changes)
    paths = [path for path in classifier.doubtful_paths(original) if not path.startswith(set_already)][:_MAX_DOUBTFUL]
    answers = zip(paths, request_changes(paths) if paths else (), strict=True)
    # Changes with other paths set a whole holder.
    doubtful = [one for path, one in answers if isinstance(one, Change) and one.path == path]
    if not doubtful:
        return ()
    found = []
    with _temporary_copy(recipe) as copy, _optional_phase():
        driver = _driver_of(copy)
        if driver is None:
            return ()
        for group in (changes, doubtful):
            for one in group:
                with contextlib.suppress(Exception):
                    apply_changes(copy, [one])
            with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):
                _seeded_reset(driver, 0)
            found.append(fingerprint(copy))
    without, with_them = found
    return tuple(one for one in doubtful if with_them.token(one.path) != without.token(one.path))


def _format_opaque(opaque: Mapping[str, str]) -> list[str]:
    """Return the path and class of each object that cannot be inspected, as text."""
    return [f"{path} ({name})" for path, name in opaque.items()]


def _record_histories(recipe: Recipe, careful: bool) -> Iterator[tuple[list[Fingerprint], frozenset[str]]]:
    """Build two copies and yield the history of each.

    The first one is closed before the second one is built, because some simulators allow only one instance.
    """
    for number in (0, 1):
        try:
            with _temporary_copy(recipe) as copy:
                history = _record_history(copy, number, careful)
        except Exception:
            if number == 0:
                raise
            return  # Some simulators allow only one instance, even after it was closed.
        del copy
        gc.collect()
        yield history


@contextlib.contextmanager
def _temporary_copy(recipe: Recipe) -> Iterator[Any]:
    """Build a copy after seeding this process, and close it after the ``with`` block."""
    streams.seed_process(streams.seed_sequence(_SEED, 0))
    copy = recipe.build()
    try:
        yield copy
    finally:
        _close(copy)


def _record_history(environment: Any, number: int, careful: bool) -> tuple[list[Fingerprint], frozenset[str]]:
    """Take fingerprints of a copy before steps, after steps and after a reset.

    :param number: Index of the copy, which determines its seeds and steps. The first copy is also reset before steps.
    :return: The fingerprints, and the paths at which the last reset replaced an object.
    """
    found = [fingerprint(environment)]
    driver = _driver_of(environment, number)
    if driver is not None:
        with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):  # Keep the fingerprints taken so far.
            if number == 0:
                _seeded_reset(driver, 0)
                found.append(fingerprint(environment))
            _seeded_reset(driver, 1 + number)
            until = time.monotonic() + _HISTORY_S
            for _ in range(_STEPS[number]):
                driver.step()
                if time.monotonic() > until:
                    break
            if getattr(environment, "render_mode", None) not in (None, "human") and not careful:
                with contextlib.suppress(Exception), _optional_phase():
                    environment.render()
            found.append(fingerprint(environment))
            _seeded_reset(driver, 0)
            found.append(fingerprint(environment))
    found += found[-1:] * (4 - number - len(found))
    *_, used, again = found
    replaced_at_reset = frozenset(
        path
        for path, (_, operation, _) in used.steps.items()
        if operation in ("attribute", "item")
        and path in again.objects
        and path not in used.aliases
        and used.tokens.get(path, ("int",))[0] not in walk.SCALAR_TOKENS  # Long paths have no token of their own.
        and used.objects[path] is not again.objects[path]
    )
    for one in found:
        one.objects.clear()
    return found, replaced_at_reset


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
    records = simulators.records_files(walk.layers(environment))
    return None if records else driver_for(environment, seed=_SEED + number)


def _seeded_reset(driver: Driver, number: int) -> None:
    """Seed the global generators by a number, then reset with a seed."""
    streams.seed_process(streams.seed_sequence(_SEED, number))  # A reset may draw from global generators.
    driver.reset(_SEED + number)


class _StateClassifier:
    """Classifies the paths of an environment as settings, episode state or kept state.

    :ivar fresh: Fingerprints of copies that were just built.
    """

    def __init__(self, recipe: Recipe, careful: bool) -> None:
        histories, replaced_at_reset = zip(*_record_histories(recipe, careful), strict=True)
        self.fresh = [history[0] for history in histories]
        self._all = [one for history in histories for one in history]
        self._after_reset = [histories[0][1], *(history[-1] for history in histories)]
        self.kind = functools.cache(self._kind)
        self._steps, self._replaced_at_reset = histories[0][2].steps, replaced_at_reset[0]

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

    def doubtful_paths(self, original: Fingerprint) -> Iterator[str]:
        """Yield paths of plain episode state at which the original has a value that no reset produced."""
        for path in self.fresh[0].differences(original):
            token = original.token(path)
            if token is None or token[0] == "object" or path in original.aliases or path.startswith("<"):
                continue
            is_new = self.fresh[0].token(original.steps.get(path, ("",))[0]) is None  # Its holder is set as a whole.
            is_doubtful = not is_new and self.kind(path) in ("episode", "fixed")
            if is_doubtful and all(one.token(path) != token for one in self._after_reset):
                yield path

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


def _describe_difference(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    """Return a clause on how a value of a copy differs from the instance's."""
    expected, actual = _describe_value(original, path), _describe_value(copy, path)
    if path in original.aliases and expected == actual:
        return f"{path} is the same object as {original.canonical_path(path)} in the instance, but not in a copy"
    if expected == actual:
        return f"{path or 'the environment'} has different contents in a copy"
    return f"{path or 'the environment'} is {expected} in the instance, but {actual} in a copy"


def _describe_value(found: Fingerprint, path: str) -> str:
    """Return the value at a path as short text."""
    token = found.token(path)
    if token is None:
        return "missing"
    if token[0] in walk.SCALAR_TOKENS and isinstance(token[-1], (str, bytes, int, type(None))):
        text = repr(token[-1]) if token[0] in ("str", "bytes") else str(token[-1])
        return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
    return f"a {token[1]}" if token[0] == "object" else "other data"


def measure(
    build: Callable[[], Any],
    read: Reader | None = None,
    request_changes: ChangeRequest | None = None,
    *,
    begin: Callable[[], object] | None = None,
) -> Examination:
    """Build an environment, and measure time and memory. It is neither reset nor stepped.

    :param build: Builds the environment.
    :param read: Called with the environment. Its result is stored in ``examination.read``.
    :param request_changes: Not used. Tasks of :func:`run_in_subprocess` receive it.
    :param begin: Initializer, called first.
    """
    if begin is not None:
        begin()
    started = time.perf_counter()
    environment = build()
    built = time.perf_counter() - started
    try:
        result = None if read is None else read(environment)
        private = resources.private_memory()
    finally:
        _close(environment)
    return Examination(build_seconds=built, private_bytes=private, read=result)


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
        """Raise TimeoutError when the alarm signal arrives."""
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _close(environment: Any) -> None:
    """Close an environment, ignoring errors and warnings."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # An error does not matter: the process ends next.
        warnings.simplefilter("ignore")
        environment.close()
