"""Whether a recipe gives an environment like the instance that it is for: found out in a process that is thrown away.

Two new instances get different histories, and then the same reset. By the paths of their fingerprints, what is the same
in all of them, and different in the instance that is copied, is a setting that was changed; what their histories have
changed, and the reset has restored, is the episode, which a copy begins anew; what outlasts the reset is state that is
kept, such as running statistics. Settings and kept state are replayed onto a copy, and the copy is compared again.
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
from rl_ext_core.processes.families import kill_descendants

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rl_ext_core.factory.factory import Recipe

__all__ = [
    "Change",
    "Examination",
    "apply_changes",
    "compare_and_measure",
    "run_in_subprocess",
    "measure",
    "pack_values",
    "unpack",
    "unpicklable",
]

_LABEL = "trial copy"
OPTIONAL_PHASE = "what a copy can be tried without"  # the phase of a failure after which a careful trial is made
_SEED = 20_231
# Steps of the two histories; each ends after so many seconds at the latest. A step may wait forever, for what only the
# user's program does; on the time of a step only advice depends.
_STEPS, _HISTORY_S, _HISTORY_TIMEOUT_S = (30, 7), 1.0, 60.0
_TIMING_S, _TIMING_STEPS, _TIMING_TIMEOUT_S = 0.1, 200, 10.0
_MAX_VALUE_CHARS = 40
_MAX_DOUBTFUL = 1000
# Of what cannot be pickled, these hold no settings.
_STATELESS = {
    *("_thread.lock", "_thread.RLock", "threading.Condition", "threading.Thread", "tempfile.TemporaryDirectory"),
    *("multiprocessing.synchronize.Lock", "multiprocessing.synchronize.RLock"),
}

Reader = Callable[[Any], Any]
Step = tuple[str, Any]
ChangeRequest = Callable[[Sequence[str]], "list[Change | str]"]


@dataclasses.dataclass(frozen=True)
class Change:
    """What is set on a copy.

    :ivar path: to it, as in a fingerprint
    :ivar steps: to it from the environment, each an operation and a name, a key or an index
    :ivar packed: the value
    """

    path: str
    steps: tuple[Step, ...]
    packed: bytes


@dataclasses.dataclass(frozen=True)
class Examination:
    """What building copies has shown.

    :ivar problems: at which paths a copy differs and how, or what went wrong
    :ivar changes: what is set on a copy
    :ivar opaque: what of an instance could not be looked into: state behind it, changed by calls, is not seen
    :ivar class_attributes: paths of globals and classes' attributes that differ: another process imports them anew
    :ivar build_seconds: to build a copy
    :ivar step_seconds: to step it, actions drawn included; None: how to step it is not known, or it raises
    :ivar private_bytes: what the process held alone then; None where the system does not say
    :ivar read: what the reader returned for the copy
    """

    problems: Sequence[str] = ()
    changes: tuple[Change, ...] = ()
    opaque: Sequence[str] = ()
    class_attributes: Sequence[str] = ()
    build_seconds: float = 0.0
    step_seconds: float | None = None
    private_bytes: int | None = None
    read: Any = None


# In the process of the instance: what is asked for is taken from it.


def pack_values(original: Fingerprint, paths: Sequence[str]) -> list[Change | str]:
    """Pack what an instance has at paths; a text says why one cannot be set on a copy."""
    found = ((path, part) for path, part in original.objects.items() if path not in original.aliases)
    homes = {id(part): path for path, part in found if walk.is_layer(part)}
    return [_pack_value(original, path, homes) for path in paths]


def _pack_value(original: Fingerprint, path: str, homes: Mapping[int, str]) -> Change | str:
    while path in original.steps and original.steps[path][1] is None:  # what holds it is set
        path = original.steps[path][0]
    steps = _steps_to(original, path)
    if not steps or path not in original.objects:
        return "it cannot be set on a copy"
    for where, reason in original.unpicklable.items():
        if where.startswith(path):
            return reason
    packed = original.objects[path]

    def location_of(value: Any) -> Any:
        """Say where a copy has an environment, or a wrapper, to which the value refers."""
        home = homes.get(id(value))
        if value is packed or home is None or home.startswith(path):
            return None if value is packed else original.references.get(id(value))
        return _steps_to(original, home)

    try:
        return Change(path, steps, _pickle.dumps(packed, location_of))
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__


def _steps_to(original: Fingerprint, path: str) -> tuple[Step, ...] | None:
    found: list[Step] = []
    while path:
        path, operation, key = original.steps.get(path, ("", None, None))
        if operation is None:
            return None
        found.insert(0, (operation, key))
    return tuple(found)


def unpicklable(original: Fingerprint) -> str:
    """Return the path to what cannot be pickled of a value, as deep as it can be found."""
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


# In any process.


def unpack(packed: bytes, environment: Any = None) -> Any:
    """Load what :func:`pack_values` has packed, or a pickle of an environment.

    :param environment: that the value is for
    """

    def find(place: Any) -> Any:
        if len(place) == 2 and isinstance(place[0], str):
            return operator.attrgetter(place[1])(importlib.import_module(place[0]))
        return functools.reduce(_follow_step, place, environment)

    return _pickle.loads(packed, find)


def _follow_step(holder: Any, step: Step) -> Any:
    operation, key = step
    if operation == "attribute":
        return walk.attributes(holder)[key]
    return getattr(holder, key) if operation == "field" else holder[key]


def apply_changes(environment: Any, changes: Sequence[Change]) -> None:
    """Set on a copy what was changed of the original.

    :raises LookupError: it cannot be set there; the text names the path
    """
    for change in changes:
        try:
            _apply_change(environment, change)
        except Exception as error:
            raise LookupError(f"{change.path} cannot be set on a copy: {error!r}") from error


def _apply_change(environment: Any, change: Change) -> None:
    holder = functools.reduce(_follow_step, change.steps[:-1], environment)
    operation, key = change.steps[-1]
    value = unpack(change.packed, environment)
    held: Any = None
    with contextlib.suppress(LookupError, AttributeError):
        held = _follow_step(holder, change.steps[-1])
    if _fits_in_place(held, value):
        held[...] = value  # others may hold this array, or a library in C its memory
    elif type(held) is type(value) and isinstance(held, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        ctypes.memmove(ctypes.byref(held), ctypes.byref(value), ctypes.sizeof(value))
    elif operation == "attribute":
        names = walk.instance_dict(holder)
        if names is not None and (key in names or key not in walk.attributes(holder)):
            names[key] = value
        else:  # of a slot
            object.__setattr__(holder, key, value)
    elif operation == "field":
        setattr(holder, key, value)
    else:
        holder[key] = value


def _fits_in_place(held: Any, value: Any) -> bool:
    """Whether a value goes into an array, or a tensor, that is there."""
    is_array = hasattr(held, "dtype") and hasattr(type(held), "__setitem__")
    if type(held) is not type(value) or not is_array or not getattr(held, "shape", ()):
        return False
    is_fixed = getattr(held, "requires_grad", False) or (isinstance(held, np.ndarray) and not held.flags.writeable)
    return bool(held.shape == value.shape and held.dtype == value.dtype and not is_fixed)


# In the process that is thrown away.


def run_in_subprocess(
    task: Callable[[ChangeRequest], Examination],
    answer: ChangeRequest = lambda paths: [],
    *,
    preload: Sequence[str] = (),
    start_method: str | None = None,
    environ: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Call a function in a process that ends with it.

    :param answer: called here with what it asks for
    :param environ: variables to set, and to unset (None), in the process
    :raises WorkerError: it has raised, which is the cause, or its process has died
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
    def request_changes(paths: Sequence[str]) -> Any:
        connection.send_bytes(pickle.dumps(list(paths)))
        return pickle.loads(connection.recv_bytes())

    connection.send_bytes(_pickle.dumps(pickle.loads(packed)(request_changes)))
    connection.close()
    kill_descendants()  # this process may be gone, in good order, before it is killed with all that it has started


def compare_and_measure(
    recipe: Recipe,
    original: Fingerprint,
    adapt: Reader | None,
    read: Reader | None,
    careful: bool,
    request_changes: ChangeRequest,
) -> Examination:
    """Find out whether a recipe gives what is the original's equal, and measure a copy.

    :param original: of the instance that is copied
    :param adapt: turns an environment into what will be stepped, e.g. one of TorchRL
    :param read: called with that; what it returns is in the result
    :param careful: leave out what may end the process, such as rendering without a display
    :param request_changes: returns changes for paths of the original, or why there is none
    """
    try:
        found = (
            _compare_pickled(recipe, original)
            if recipe.origin == "pickle"
            else _compare_rebuilt(recipe, original, careful, request_changes)
        )
    except Exception as error:
        return Examination([f"building one raises {error!r}"])
    if found.problems:
        return found
    recipe = dataclasses.replace(recipe, changes=found.changes)
    measured = measure(recipe.build if adapt is None else lambda: adapt(recipe.build()), read)
    kept = {name: getattr(found, name) for name in ("changes", "opaque", "class_attributes")}
    return dataclasses.replace(measured, **kept)


def _compare_pickled(recipe: Recipe, original: Fingerprint) -> Examination:
    """Compare the original as it stands with what was pickled of it."""
    with _temporary_copy(recipe) as copy:
        mine = fingerprint(copy)
        if (error := _reset_error(copy)) is not None:
            return Examination([f"a reset of a copy raises {error!r}"])
    paths = original.differences(mine)
    classes = [path for path in paths if path.startswith("<")]
    different = [_describe_difference(path, original, mine) for path in paths if not path.startswith("<")]
    return Examination(different, opaque=_format_opaque(original.opaque), class_attributes=classes)


def _compare_rebuilt(
    recipe: Recipe, original: Fingerprint, careful: bool, request_changes: ChangeRequest
) -> Examination:
    """Find out what the original has that no new instance has, and whether one has it when that is set on it."""
    classifier = _StateClassifier(recipe, careful)
    mine = classifier.fresh[0]
    left, classes = classifier.changed_paths(original, mine)
    hidden = {p: why for p, why in {**original.opaque, **original.unpicklable}.items() if _has_state(p, why, original)}
    opaque = {path: name for path, name in hidden.items() if not classifier.is_episode_state(path)}
    answers = dict(zip(left, request_changes(left) if left else (), strict=True))
    # Of what cannot be set, that which a history makes by itself is left to the copy: a window, a cache.
    refused = {
        path: why
        for path, why in answers.items()
        if isinstance(why, str) and not classifier.is_restored_by_use(path, original)
    }
    if refused:
        return Examination([f"{_describe_difference(path, original, mine)} ({why})" for path, why in refused.items()])
    changes = tuple({one.path: one for one in answers.values() if isinstance(one, Change)}.values())
    if not careful:
        changes += _changes_within_episode(recipe, original, classifier, changes, request_changes)
    if left or changes:
        with _temporary_copy(dataclasses.replace(recipe, changes=changes)) as copy:
            mine = fingerprint(copy)
            error = _reset_error(copy)
        done = tuple(change.path for change in changes)
        if error is not None:
            with _temporary_copy(recipe) as copy:
                if _reset_error(copy) is None:  # as with a simulator's handle: of another process
                    return Examination(
                        [f"a copy on which {', '.join(done[:3])} was set raises {error!r} when it is reset"]
                    )
        left, classes = classifier.changed_paths(original, mine)  # by now, both have met the same classes
        left = [path for path in left if path.startswith(done) or not classifier.is_restored_by_use(path, original)]
    different = [_describe_difference(path, original, mine) for path in left]
    return Examination(different, changes, opaque=_format_opaque(opaque), class_attributes=classes)


def _has_state(path: str, why: str, original: Fingerprint) -> bool:
    """Whether calls may have changed what cannot be looked into: the user's, and what is none of a few classes."""
    return path.startswith("<") or not {why, *(original.token(path) or ())[:2]} & _STATELESS


def _changes_within_episode(
    recipe: Recipe,
    original: Fingerprint,
    classifier: _StateClassifier,
    changes: Sequence[Change],
    request_changes: ChangeRequest,
) -> tuple[Change, ...]:
    """Return what else is to be set: settings that are part of an episode all the same, such as a goal that was fixed.

    What a copy has there after a reset depends on what it had before.

    :param changes: what is set already
    """
    set_already = tuple(one.path for one in changes)
    paths = [path for path in classifier.doubtful_paths(original) if not path.startswith(set_already)][:_MAX_DOUBTFUL]
    answers = zip(paths, request_changes(paths) if paths else (), strict=True)
    # Others are set with what holds them.
    doubtful_paths = [one for path, one in answers if isinstance(one, Change) and one.path == path]
    if not doubtful_paths:
        return ()
    found = []
    with _temporary_copy(recipe) as copy, _optional_phase():
        driver = _driver_of(copy)
        if driver is None:
            return ()
        for group in (changes, doubtful_paths):
            for one in group:
                with contextlib.suppress(Exception):
                    apply_changes(copy, [one])
            with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):
                _seeded_reset(driver, 0)
            found.append(fingerprint(copy))
    without, with_them = found
    return tuple(one for one in doubtful_paths if with_them.token(one.path) != without.token(one.path))


def _format_opaque(opaque: Mapping[str, str]) -> list[str]:
    return [f"{path} ({name})" for path, name in opaque.items()]


def _record_histories(recipe: Recipe, careful: bool) -> Iterator[tuple[list[Fingerprint], frozenset[str]]]:
    """Build two instances, one after the other: of some simulators there can be only one."""
    for number in (0, 1):
        try:
            with _temporary_copy(recipe) as copy:
                history = _record_history(copy, number, careful)
        except Exception:
            if number == 0:
                raise
            return  # the first one is still there, whatever was closed
        del copy
        gc.collect()
        yield history


@contextlib.contextmanager
def _temporary_copy(recipe: Recipe) -> Iterator[Any]:
    streams.seed_process(streams.seed_sequence(_SEED, 0))
    copy = recipe.build()
    try:
        yield copy
    finally:
        _close(copy)


def _record_history(environment: Any, number: int, careful: bool) -> tuple[list[Fingerprint], frozenset[str]]:
    """Take fingerprints of an instance: new, reset if it is the first, with a history, and reset again.

    :param number: of the history
    :return: the fingerprints, and the paths at which the last reset has put other objects
    """
    found = [fingerprint(environment)]
    driver = _driver_of(environment, number)
    if driver is not None:
        with contextlib.suppress(Exception), _time_limit(_HISTORY_TIMEOUT_S):  # what it has shown until then is known
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
        and used.tokens.get(path, ("int",))[0] not in walk.SCALAR_TOKENS  # those of long paths are elsewhere
        and used.objects[path] is not again.objects[path]
    )
    for one in found:
        one.objects.clear()
    return found, replaced_at_reset


def _reset_error(environment: Any) -> Exception | None:
    """Return what a reset of an environment raises."""
    driver = _driver_of(environment)
    try:
        if driver is not None:
            with _time_limit(_HISTORY_TIMEOUT_S):
                _seeded_reset(driver, 0)
    except Exception as error:
        return error
    return None


def _driver_of(environment: Any, number: int = 0) -> Driver | None:
    """Return what steps an environment; None: this is not known, or it would write to files of the user's."""
    records = simulators.records_files(walk.layers(environment))
    return None if records else driver_for(environment, seed=_SEED + number)


def _seeded_reset(driver: Driver, number: int) -> None:
    streams.seed_process(streams.seed_sequence(_SEED, number))  # what it draws from
    driver.reset(_SEED + number)


class _StateClassifier:
    """What instances have by being made, by an episode, and by what they have lived through."""

    def __init__(self, recipe: Recipe, careful: bool) -> None:
        histories, replaced_at_reset = zip(*_record_histories(recipe, careful), strict=True)
        self.fresh = [history[0] for history in histories]
        self._all = [one for history in histories for one in history]
        self._after_reset = [histories[0][1], *(history[-1] for history in histories)]
        self.kind = functools.cache(self._kind)
        self._steps, self._replaced_at_reset = histories[0][2].steps, replaced_at_reset[0]

    def _kind(self, path: str) -> str:
        """Return what a path leads to: "own" of each instance, "kept", of the "episode", or "fixed".

        Numbers that a constructor draws are no instance's own, as names of files, ports and handles are.
        """
        token, after = self.fresh[0].token(path), [one.token(path) for one in self._after_reset]
        if token != self.fresh[-1].token(path) and not (walk.is_number(token) or self._is_shared(path)):
            return "own"
        if any(token != after[0] for token in after):
            return "kept"
        varies = any(one.token(path) != after[0] for one in self._all)
        return "episode" if varies or self.is_replaced_at_reset(path) else "fixed"

    def _holders(self, path: str) -> Iterator[str]:
        """Return a path, that of what holds it, and so on."""
        while path in self._steps:
            yield path
            path = self._steps[path][0]

    def is_replaced_at_reset(self, path: str) -> bool:
        """Whether a reset puts another object there, or where that is held."""
        return any(holder in self._replaced_at_reset for holder in self._holders(path))

    def is_episode_state(self, path: str) -> bool:
        """Whether a reset makes what is at a path, or what holds that."""
        return self.kind(path) == "episode" or self.is_replaced_at_reset(path)

    def changed_paths(self, original: Fingerprint, copy: Fingerprint) -> tuple[list[str], list[str]]:
        """List the paths at which a copy is to be changed to be like the original, and those of classes and globals."""
        paths = [path for path in copy.differences(original) if self.kind(path) in ("fixed", "kept")]
        paths = [path for path in paths if original.token(path) != copy.token(path) or not self._alias_varies(path)]
        classes = [path for path in paths if path.startswith("<") and self.kind(path) == "fixed"]
        found: dict[str, None] = {}
        for path in paths:
            if not path.startswith("<") and not self._is_covered_by_holder(path, found, original, copy):
                found[path] = None
        return list(found), classes

    def doubtful_paths(self, original: Fingerprint) -> Iterator[str]:
        """Return the paths at which the original has plain data that no reset has put there."""
        for path in self.fresh[0].differences(original):
            token = original.token(path)
            if token is None or token[0] == "object" or path in original.aliases or path.startswith("<"):
                continue
            is_made = self.fresh[0].token(original.steps.get(path, ("",))[0]) is None  # with what holds it
            is_doubtful = not is_made and self.kind(path) in ("episode", "fixed")
            if is_doubtful and all(one.token(path) != token for one in self._after_reset):
                yield path

    def _is_shared(self, path: str) -> bool:
        """Whether a path leads into what modules or classes hold too, which the first of the lives may have changed."""
        tokens = self.fresh[0].tokens
        return path.startswith("<") or any(f"{holder}.<is>" in tokens for holder in self._holders(path))

    def _alias_varies(self, path: str) -> bool:
        """Whether an episode, or a reset, puts there what is also elsewhere."""
        return any(one.aliases.get(path) != self.fresh[0].aliases.get(path) for one in self._all)

    def _is_covered_by_holder(
        self, path: str, found: Mapping[str, None], original: Fingerprint, copy: Fingerprint
    ) -> bool:
        """Whether what holds a path is set, or is of an episode, or is each instance's own."""
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
        """Whether an instance gets what cannot be set by being used, or a reset makes it anew."""
        if self.kind(path) == "fixed":
            return False
        below = [path, *(each for each in original.tokens if each.startswith(path))]
        return self.is_replaced_at_reset(path) or all(
            self._occurs_in_histories(each, original.token(each)) for each in below
        )

    def _occurs_in_histories(self, path: str, token: Any) -> bool:
        """Whether instances that were used have such a part, or parts that vary."""
        found = [other for one in self._all if (other := one.token(path)) is not None]
        return token in found or any(other != found[0] for other in found)


def _describe_difference(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    mine, its = _describe_value(original, path), _describe_value(copy, path)
    if path in original.aliases and mine == its:
        return f"{path} is {original.canonical_path(path)} in the instance and another object in a copy"
    if mine == its:
        return f"{path or 'the environment'} has other contents in a copy"
    return f"{path or 'the environment'} is {mine} in the instance and {its} in a copy"


def _describe_value(of: Fingerprint, path: str) -> str:
    token = of.token(path)
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
    """Build an environment, step it and say what that took.

    :param read: called with it before it is stepped; what it returns is in the result
    :param begin: called before all that
    """
    if begin is not None:
        begin()
    started = time.perf_counter()
    environment = build()
    built = time.perf_counter() - started
    try:
        result = None if read is None else read(environment)
        step = _time_steps(environment)
        private = resources.private_memory()
    finally:
        _close(environment)
    return Examination(build_seconds=built, step_seconds=step, private_bytes=private, read=result)


def _time_steps(environment: Any) -> float | None:
    driver = _driver_of(environment)
    if driver is None:
        return None
    try:
        with _time_limit(_TIMING_TIMEOUT_S):
            driver.reset(None)
            driver.step()  # the first one fills caches
            count, begin = 0, time.perf_counter()
            while (taken := time.perf_counter() - begin) <= _TIMING_S and count < _TIMING_STEPS:
                driver.step()
                count += 1
            return taken / count
    except Exception:
        # It is for the user's actions, not for any that its space has; whoever steps a copy gets what it raises.
        return None


@contextlib.contextmanager
def _optional_phase() -> Iterator[None]:
    processes.set_status(phase=OPTIONAL_PHASE)
    try:
        yield
    finally:
        processes.set_status(phase=None)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _close(environment: Any) -> None:
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # the process ends with it
        warnings.simplefilter("ignore")
        environment.close()
