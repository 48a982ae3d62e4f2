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
from rl_ext_core.factory import _byvalue, _sources, _streams
from rl_ext_core.factory._drivers import driver_for
from rl_ext_core.factory._fingerprint import Fingerprint, fingerprint, import_own
from rl_ext_core.processes import spawned

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rl_ext_core.factory.factory import Recipe


_LABEL = "trial copy"
_SEED = 20_231
_STEPS, _ROLLOUT_SECONDS = 12, 3.0
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


def _packed(task: bytes) -> bytes:
    return _byvalue.dumps(pickle.loads(task)())


def examine(
    recipes: Sequence[Recipe], original: Fingerprint, adapt: Reader | None, read: Reader | None = None
) -> Examination:
    """Find the first recipe whose copy is the original's equal, and measure it.

    A copy made by a graft is compared with the original as it stands. One made in another way has not lived through
    what the original has; it is faithful if from a reset on, with the same seed and actions, it does the same as the
    graft and holds the same. Where there is no faithful graft, or it cannot be stepped, it has to be as the original
    stands too.

    :param recipes: in order of preference
    :param original: of the instance that is copied, as :func:`snapshot` gives it
    :param adapt: turns an environment into what will be stepped, e.g. one of TorchRL
    :param read: called with that; what it returns is in the result
    :raises Exception: no recipe builds anything; what the last one raised
    """
    lost: dict[str, list[str]] = {}
    raised: list[Exception] = []
    classes: list[str] = []
    expected = None
    for recipe in sorted(recipes, key=lambda recipe: recipe.origin != "graft"):
        try:
            with _copy_of(recipe) as copy:
                if expected is not None:
                    lost[recipe.origin] = _unlike(expected, copy)
                else:
                    lost[recipe.origin], classes = _against(original, copy)
                    if recipe.origin == "graft" and not lost["graft"] and len(recipes) > 1:
                        expected = rollout(copy)
        except Exception as error:
            raised.append(error)
            lost[recipe.origin] = [f"building one raises {error!r}"]
    if len(raised) == len(recipes):
        raise raised[-1]
    chosen = next((index for index, recipe in enumerate(recipes) if not lost[recipe.origin]), None)
    found = Examination(None, ())
    opaque = tuple(f"{path} ({name})" for path, name in original.opaque.items())
    if chosen is not None:
        build = recipes[chosen].build
        found = measure(build if adapt is None else lambda: adapt(build()), read)
    differing = tuple(tuple(lost[recipe.origin]) for recipe in recipes)
    return dataclasses.replace(found, chosen=chosen, lost=differing, opaque=opaque, class_attributes=tuple(classes))


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


@contextlib.contextmanager
def _copy_of(recipe: Recipe) -> Iterator[Any]:
    _streams.seed_process(_streams.sequence(_SEED, 0))
    with _streams.keeping():
        copy = recipe.build()
    try:
        yield copy
    finally:
        _close(copy)


def _against(original: Fingerprint, copy: Any) -> tuple[list[str], list[str]]:
    """Say in what a copy differs from the original, and name the attributes of classes that do."""
    import_own(original.tokens)
    mine = snapshot(copy, code=True)
    different = original.differences(mine)
    classes = [path for path in different if original.is_of_class(path)]
    return [_said(path, original, mine) for path in different if not original.is_of_class(path)], classes


def _unlike(expected: Rollout, copy: Any) -> list[str]:
    """Say in what a copy's rollout differs from that of the graft."""
    drawing = [path for path, token in snapshot(copy).tokens.items() if token[0] == "generator"]
    if drawing:
        return [f"{drawing[0]} may draw the same in all copies: the constructor makes it"]
    other = rollout(copy, len(expected.returned) - 1)
    if other is None:
        return ["how to step it is not known"]
    for moment, (mine, its) in enumerate(zip(expected.returned, other.returned, strict=False)):
        if mine != its:
            return [f"{f'step {moment}' if moment else 'reset'} gives something else than in the instance"]
    said: dict[str, str] = {}
    for mine, its in ((expected.begin, other.begin), (expected.end, other.end)):
        said |= {path: _said(path, mine, its) for path in mine.differences(its) if not mine.is_of_class(path)}
    return list(said.values())


def _said(path: str, original: Fingerprint, copy: Fingerprint) -> str:
    return f"{path or 'the environment'} is {_value(original, path)} in the instance and {_value(copy, path)} in a copy"


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


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What a copy did, and what it was.

    :ivar returned: tokens of what it returned for a reset and each step, or the class of the exception that ended it
    :ivar begin: what it was after the reset
    :ivar end: what it was at last
    """

    returned: list[Any]
    begin: Fingerprint
    end: Fingerprint


def snapshot(environment: Any, *, code: bool = False) -> Fingerprint:
    """Fingerprint an environment; what its wrappers have noted and do not go by is no difference."""
    with _sources.without_notes(environment):
        return fingerprint(environment, code=code)


def rollout(environment: Any, steps: int | None = None) -> Rollout | None:
    """Reset a copy and step it so often, by default as a short time allows; None: how to step it is not known."""
    driver = driver_for(environment, seed=_SEED)
    if driver is None:
        return None
    # Building has drawn from the process's generators in one way of building, and has not in another.
    _streams.seed_process(_streams.sequence(_SEED, 1))
    returned, begin = [_tokens(driver.reset, _SEED)], snapshot(environment)
    until = time.monotonic() + _ROLLOUT_SECONDS
    while not isinstance(returned[-1], str) and len(returned) <= (_STEPS if steps is None else steps):
        if steps is None and time.monotonic() > until:
            break
        returned.append(_tokens(driver.step))
    return Rollout(returned, begin, snapshot(environment))


def _tokens(act: Any, *args: Any) -> Any:
    try:
        return fingerprint(act(*args)).tokens
    except Exception as error:  # a copy is to raise what the original raises
        return type(error).__qualname__


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
