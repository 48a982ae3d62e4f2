"""Which recipe gives a faithful copy: found out by building it, in a process that is thrown away."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rl_ext_core import processes, resources
from rl_ext_core.devices import READ_AT_IMPORT
from rl_ext_core.factory import _byvalue, _sources, streams
from rl_ext_core.factory.drivers import driver_for
from rl_ext_core.factory._fingerprint import SAME_AS, Fingerprint, fingerprint, import_own
from rl_ext_core.processes import spawned
from rl_ext_core.processes.worker import kill_own_family

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rl_ext_core.factory.factory import Recipe


_LABEL = "trial copy"
_SEED = 20_231
_TIMING_SECONDS, _TIMING_STEPS = 0.1, 200
# Of the time nothing depends but advice.
_TIMING_PATIENCE_S = 10.0
_LONGEST = 40

Reader = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Examination:
    """What building copies has shown.

    :ivar chosen: index of the first faithful recipe; None: there is none
    :ivar lost: per recipe, at which paths its copy differs and how, or what went wrong
    :ivar opaque: what of an instance could not be looked into: state behind it, changed by calls, is not seen
    :ivar class_attributes: paths of attributes of classes that differ: another process imports the classes anew
    :ivar build_seconds: to build a copy
    :ivar step_seconds: to step it, actions drawn included; None: how to step it is not known, or it raises
    :ivar private_bytes: what the process held alone then; None where the system does not say
    :ivar read: what the reader returned for the copy
    """

    chosen: int | None
    lost: tuple[tuple[str, ...], ...]
    opaque: tuple[str, ...] = ()
    class_attributes: tuple[str, ...] = ()
    build_seconds: float = 0.0
    step_seconds: float | None = None
    private_bytes: int | None = None
    read: Any = None


def in_subprocess(
    task: Callable[[], Examination],
    *,
    preload: Sequence[str] = (),
    start_method: str | None = None,
    environ: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Call a function in a process that ends with it.

    :param environ: variables to set, and to unset (None), in the process
    :raises WorkerError: it has raised, which is the cause, or its process has died
    """
    if not processes.SUPPORTED:
        packed = _byvalue.dumps(functools.partial(_packed, _byvalue.dumps(task)))
        found = spawned.call(packed, environ=environ or {}, timeout=timeout, label=_LABEL)
        return cast("Examination", pickle.loads(found))
    context = processes.get_context(
        start_method, preload=preload, environs=[environ or {}], import_time=READ_AT_IMPORT, label=_LABEL
    )
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, _byvalue.dumps(task)))
    try:
        process.start()
        sender.close()
        watch = processes.Watch([process], label=_LABEL)
        try:
            with watch.operation("building and stepping a copy", timeout=timeout):
                examination: Examination = pickle.loads(receiver.recv_bytes())
                watch.closing()
        finally:
            watch.kill()
            watch.stop()
    finally:
        sender.close()
        receiver.close()
    return examination


def _main(sender: Connection, packed: bytes) -> None:
    sender.send_bytes(_packed(packed))
    sender.close()
    kill_own_family()  # this process may be gone, in good order, before it is killed with all that it has started


def _packed(task: bytes) -> bytes:
    return _byvalue.dumps(pickle.loads(task)())


def examine(
    recipes: Sequence[Recipe], original: Fingerprint, adapt: Reader | None, read: Reader | None = None
) -> Examination:
    """Find the first recipe whose copy is the original's equal as it stands, and measure it.

    :param recipes: in order of preference
    :param original: of the instance that is copied, as :func:`snapshot` gives it
    :param adapt: turns an environment into what will be stepped, e.g. one of TorchRL
    :param read: called with that; what it returns is in the result
    :raises Exception: no recipe builds anything; what the last one raised
    """
    lost: list[tuple[str, ...]] = []
    raised: list[Exception] = []
    classes: list[str] = []
    for recipe in recipes:
        try:
            different, classes = _against(original, recipe)
        except Exception as error:
            raised.append(error)
            different = [f"building one raises {error!r}"]
        lost.append(tuple(different))
        if not different:
            break
    if len(raised) == len(recipes):
        raise raised[-1]
    chosen = None if lost[-1] else len(lost) - 1
    found = Examination(None, ())
    if chosen is not None:
        build = recipes[chosen].build
        found = measure(build if adapt is None else lambda: adapt(build()), read)
    opaque = tuple(f"{path} ({name})" for path, name in original.opaque.items())
    return dataclasses.replace(found, chosen=chosen, lost=tuple(lost), opaque=opaque, class_attributes=tuple(classes))


def measure(
    build: Callable[[], Any], read: Reader | None = None, begin: Callable[[], object] | None = None
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
        step = _timed(environment)
        private = resources.private_memory()
    finally:
        _close(environment)
    return Examination(0, ((),), (), (), built, step, private, result)


def _against(original: Fingerprint, recipe: Recipe) -> tuple[list[str], list[str]]:
    """Say in what a copy differs from the original, and name the attributes of classes that do."""
    streams.seed_process(streams.sequence(_SEED, 0))
    with streams.keeping():
        copy = recipe.build()
    try:
        import_own(original.tokens)
        mine = snapshot(copy)
    finally:
        _close(copy)
    different = original.differences(mine)
    classes = [path for path in different if original.is_of_class(path)]
    return [_said(path, original, mine) for path in different if not original.is_of_class(path)], classes


def _said(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    start, same, place = path.partition(SAME_AS)
    if same:
        return f"{start} is {place} in the instance and another object in a copy"
    said = f"{path or 'the environment'} is {_value(original, path)} in the instance and {_value(copy, path)} in a copy"
    place = original.imported_at(path)
    return f"{said}, because workers import {place} anew" if place else said


def _value(of: Fingerprint, path: str) -> str:
    token = of.tokens.get(path)
    if token is None:
        return "missing"
    if token[0] == "same as":
        return token[1] or "the environment"
    if len(token) == 2 and "." not in token[0]:  # of a scalar: its class and its text
        text = str(token[1])
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "other data"


def snapshot(environment: Any) -> Fingerprint:
    """Fingerprint an environment; specifications that its wrappers keep once they were asked are no difference."""
    with _sources.without_kept_specs(environment):
        return fingerprint(environment, code=True)


def _timed(environment: Any) -> float | None:
    driver = driver_for(environment, seed=_SEED)
    if driver is None:
        return None
    try:
        with _ended_after(_TIMING_PATIENCE_S):
            driver.reset(None)
            driver.step()  # the first one fills caches
            count, begin = 0, time.perf_counter()
            while True:
                driver.step()
                count += 1
                taken = time.perf_counter() - begin
                if taken > _TIMING_SECONDS or count >= _TIMING_STEPS:
                    return taken / count
    except Exception:
        # It is for the user's actions, not for any that its space has; whoever steps a copy gets what it raises.
        return None


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds: a step may wait for what only the user's program does."""

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
    close = getattr(environment, "close", None)
    if close is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                close()
            except Exception:
                return  # the process ends with it
