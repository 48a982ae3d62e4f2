"""``as_factory``: from an environment, in whatever form users have it, to a picklable function that builds it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_ext_core import _pickle
from rl_ext_core.errors import InvalidTypeError, NotCopyableError, WorkerError, _missing_dependency_error
from rl_ext_core.factory import compare, record, simulators
from rl_ext_core.factory.compare import Examination
from rl_ext_core.factory.factory import EnvFactory, Recipe, recipe_of_callable
from rl_ext_core.factory.walk import Fingerprint, fingerprint, full_name

__all__ = ["as_factory", "convert", "examine_factory"]

_log = logging.getLogger("rl_ext_core.factory")
_ORIGIN_PHRASES = {"pickle": "pickled", "spec": "made by its specification", "constructor": "made as it was"}


def as_factory(source: Any, *, verify: bool = True, start_method: str | None = None) -> EnvFactory[Any]:
    """Turn an environment into a factory of environments like it.

    A copy of an instance begins at a reset: it has what the instance was made with, what was set on it since, and what
    outlasts its resets, such as running statistics, but not the middle of its episode. Whether a copy is the
    instance's equal in all of that is found out in a process that is thrown away; where none is, it is refused. The
    instance is only read, and stays usable.

    .. code-block:: python

        env = gym.make("CartPole-v1")
        env.unwrapped.gravity = 5.0
        venv = SubprocVecEnv(as_factory(env).for_workers(4, seed=0))

    :param source: an environment, a function or class that builds one, gymnasium's id or specification of one, or the
        name of a game of stable-retro
    :param verify: compare copies with an instance. False saves the process: a copy is what a pickle gives, or, if there
        is none, has nothing that was changed since the instance was made
    :param start_method: of that process, ``"forkserver"``, ``"spawn"`` or ``"fork"``; the first where there is one
    :return: the factory
    :raises NotCopyableError: no copy would be the instance's equal; the text names the attribute, and the line to write
    :raises WorkerError: the process in which copies are compared has died
    :raises InvalidTypeError: nothing that builds an environment
    :raises InvalidArgumentError: gymnasium does not know the id

    Source: https://github.com/pytorch/rl/issues/2277
    """
    return convert(source, verify=verify, start_method=start_method)


def convert(
    source: Any,
    *,
    verify: bool,
    start_method: str | None = None,
    adapt: Callable[[Any], Any] | None = None,
    preload: Sequence[str] = (),
    read: Callable[[Any], Any] | None = None,
    timeout: float | None = None,
) -> EnvFactory[Any]:
    """Do what :func:`as_factory` does, for environments that are adapted to a framework.

    :param adapt: takes an environment and gives the framework's; what is measured is the latter
    :param preload: modules that it needs
    :param read: called with the copy of an instance that is examined; what it returns is in the examination
    :param timeout: seconds that building and stepping a copy may take
    """
    if isinstance(source, EnvFactory):
        factory = source
    elif isinstance(source, str):
        factory = _factory_from_id(source)
    elif record.is_spec(source):
        factory = _factory_from_spec(source, "spec")
    elif _is_environment(source):
        factory = _factory_from_instance(source, verify, start_method, adapt, preload, read, timeout)
    elif callable(source):
        factory = _factory_from_callable(source)
    else:
        raise InvalidTypeError(
            f"{source!r} builds no environment; expected an environment, a function or class that builds one, or an "
            "id. Write as_factory(lambda: MyEnv())"
        )
    return factory if adapt is None or factory.is_adapted else factory.then(adapt, preload=preload)


def examine_factory(
    factory: EnvFactory[Any],
    *,
    read: Callable[[Any], Any],
    overrides: Mapping[str, Any],
    start_method: str | None,
    begin: Callable[[], object] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Build and measure what a factory builds, in a process that is thrown away.

    :param read: called with it; what it returns is in the result
    :param overrides: in addition to the factory's
    :param begin: called in the process before, as the workers call it
    :param timeout: seconds that it may take
    :raises WorkerError: building or reading it has failed, or its process has died
    """
    environ = None if factory.decision is None else factory.decision.variables
    task = functools.partial(compare.measure, functools.partial(factory, **overrides), read, begin=begin)
    return compare.run_in_subprocess(
        task, preload=factory.preload, start_method=start_method, environ=environ, timeout=timeout
    )


def _is_environment(source: Any) -> bool:
    # Before the question whether it can be called: TorchRL's environments can.
    return not isinstance(source, type) and all(callable(getattr(source, name, None)) for name in ("reset", "step"))


def _factory_from_callable(build: Any) -> EnvFactory[Any]:
    line, origin = record.source_of_callable(build), "class" if isinstance(build, type) else "callable"
    recipe = recipe_of_callable(build, origin, line, takes_arguments=True)
    return EnvFactory(recipe, preload=record.modules_of_callable(build))


def _factory_from_spec(spec: Any, origin: str) -> EnvFactory[Any]:
    build = functools.partial(record.make, copy.deepcopy(spec))
    recipe = recipe_of_callable(build, origin, f"lambda: {record.Call(build.func, build.args)}", takes_arguments=True)
    return EnvFactory(recipe, preload=("gymnasium", *record.modules_of_callable(spec)))


def _factory_from_id(name: str) -> EnvFactory[Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise _missing_dependency_error("gymnasium", "sb3", f"the id {name!r}") from error
    game = None if name in gymnasium.registry else record.game_of_id(name)
    if game is None:
        return _factory_from_spec(record.spec_of_id(name), "id")
    return EnvFactory(recipe_of_callable(game, "id", f"stable_retro.make({name!r})", takes_arguments=True))


def _factory_from_instance(
    environment: Any,
    verify: bool,
    start_method: str | None,
    adapt: Callable[[Any], Any] | None,
    adapter_modules: Sequence[str],
    read: Callable[[Any], Any] | None,
    timeout: float | None,
) -> EnvFactory[Any]:
    line = record.source_of_instance(environment)
    preload = record.modules_of_instance(environment)
    original = fingerprint(environment)
    problems: list[str] = []
    # Of a pickle that is not compared, more can be hoped for.
    for make_recipe in (
        (_recipe_from_record, _recipe_from_pickle) if verify else (_recipe_from_pickle, _recipe_from_record)
    ):
        recipe = make_recipe(environment, line, original, problems)
        if recipe is not None and not verify:
            return EnvFactory(recipe, instance=environment, preload=preload)
        if recipe is None:
            continue

        def run_examination(recipe: Recipe, *, careful: bool) -> Examination:
            return compare.run_in_subprocess(
                functools.partial(compare.compare_and_measure, recipe, original, adapt, read, careful),
                functools.partial(compare.pack_values, original),
                preload=record.merge_modules(preload, adapter_modules),
                start_method=start_method,
                timeout=timeout,
            )

        try:
            examination = run_examination(recipe, careful=False)
        except WorkerError as error:
            if error.phase != compare.OPTIONAL_PHASE:
                raise
            examination = run_examination(recipe, careful=True)
        if not examination.problems:
            _log_warnings(examination)
            recipe = dataclasses.replace(recipe, changes=examination.changes)
            return EnvFactory(recipe, instance=environment, preload=preload, examination=examination)
        more = f"; and {len(examination.problems) - 3} more" if len(examination.problems) > 3 else ""
        problems.append(f"{_ORIGIN_PHRASES[recipe.origin]}, {'; '.join(examination.problems[:3])}{more}")
    name = line.removeprefix("lambda: ").partition("(")[0]
    raise NotCopyableError(
        f"this {name} cannot be copied into a worker: {'. And '.join(problems)}. Hand over a function that builds it as it "
        f"is to be:\n    {line}"
    )


def _log_warnings(examination: Examination) -> None:
    if examination.opaque:
        more = f" and {len(examination.opaque) - 5} more" if len(examination.opaque) > 5 else ""
        _log.warning(
            "%s: this cannot be looked into, so whether a copy has it is not known; what was done to it since it was "
            "made may be lost: hand over a function that builds the environment as it is to be",
            ", ".join(examination.opaque[:5]) + more,
        )
    for path in examination.class_attributes:
        what = "the class's attribute" if path.startswith("<class ") else "the module's global"
        _log.warning(
            "%s: %s differs in workers, which import the module anew, so what was changed since then is not in a "
            "copy: set it on the instance, or where the module is imported",
            path,
            what,
        )


def _recipe_from_record(environment: Any, line: str, original: Fingerprint, problems: list[str]) -> Recipe | None:
    """Return the recipe that makes an instance as it was made; None, and why, if that is unknown."""
    for path in original.unpicklable:
        if (name := simulators.name_of_output_file(original.objects.get(path))) is not None:
            problems.append(f"it writes to the file {name} ({path}), which making another one may begin anew")
            return None
    call = record.call_of(environment)
    if call is not None:
        origin = "spec" if call.function is record.make else "constructor"
        with contextlib.suppress(NotCopyableError):
            return recipe_of_callable(call.build, origin, line, takes_arguments=False)
    problems.append(
        "how it was made is not known, because that was before this package was imported, or by a function that "
        "capture_constructors was not told of"
    )
    return None


def _recipe_from_pickle(environment: Any, line: str, original: Fingerprint, problems: list[str]) -> Recipe | None:
    """Return the recipe that loads a pickle; None, and why, if there is no pickle."""
    for path, reason in original.unpicklable.items():
        problems.append(f"pickled, it has no {path} ({reason})")
        return None
    kept = original.references  # globals and classes' attributes are those of the process that loads it
    try:
        return Recipe("pickle", _pickle.dumps(environment, (lambda part: kept.get(id(part))) if kept else None), line)
    except Exception as error:
        path = compare.unpicklable(original)
        reason = str(error) or type(error).__name__
        problems.append(f"pickled, it has no {path} ({full_name(type(original.objects[path]))}: {reason})")
        return None
