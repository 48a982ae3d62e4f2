"""``as_factory``: turn an instance, class, function or id into an ``EnvFactory``."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from rl_ext_core import _pickle
from rl_ext_core.errors import InvalidTypeError, NotCopyableError, _missing_dependency_error
from rl_ext_core.factory import changes, compare, record, simulators
from rl_ext_core.factory.changes import Examination
from rl_ext_core.factory.factory import EnvFactory
from rl_ext_core.factory.recipe import Recipe, recipe_of_callable
from rl_ext_core.factory.walk import Fingerprint, fingerprint, full_name

__all__ = ["as_factory", "convert", "examine_factory"]

_log = logging.getLogger("rl_ext_core.factory")
# Beginnings of clauses in error messages, by EnvFactory.origin.
_ORIGIN_PHRASES = {
    "pickle": "after pickling",
    "spec": "built from its specification",
    "constructor": "constructed again",
}


def as_factory(source: Any, *, verify: bool = True, start_method: str | None = None) -> EnvFactory[Any]:
    """Turn an environment into a picklable factory that builds equal environments.

    A copy of an instance gets the constructor's arguments and the attributes that were set since, with state that
    outlasts resets, such as running statistics. Reset it before its first step, because the state of simulators in C is
    not copied. A temporary process builds a copy and compares it with the instance. If they differ, an error is raised.
    The instance is only read, and stays usable.

    .. code-block:: python

        env = gym.make("CartPole-v1")
        env.unwrapped.gravity = 5.0
        venv = SubprocVecEnv(as_factory(env).for_workers(4, seed=0))

    :param source: An environment, a function or class that builds one, a gymnasium id or specification, or the name of
        a stable-retro game.
    :param verify: Whether to compare a copy of an instance with it. False saves the process. A copy is then unpickled
        or, if the instance cannot be pickled, constructed again without later changes.
    :param start_method: Start method of the temporary process: ``"forkserver"`` (default, if available), ``"spawn"`` or
        ``"fork"``.
    :return: The factory. An :class:`~rl_ext_core.factory.EnvFactory` is returned as it is.
    :raises NotCopyableError: If a copy would differ from the instance. The message names the attribute, and a function
        to pass instead.
    :raises WorkerError: If the temporary process dies.
    :raises InvalidTypeError: If ``source`` does not build an environment.
    :raises InvalidArgumentError: If gymnasium does not know the id.

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
    """Turn an environment into a factory, and adapt what the factory builds to a framework.

    :param source: An environment, a function or class that builds one, or an id, as for :func:`as_factory`.
    :param verify: Whether to compare a copy of an instance with it.
    :param start_method: Start method of the temporary process.
    :param adapt: Takes an environment and returns the framework's, which is the one that is measured.
    :param preload: Names of modules that ``adapt`` needs.
    :param read: Called with the copy that is measured. Its result is stored in ``examination.read``.
    :param timeout: Seconds that building and stepping a copy may take. None waits indefinitely.
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
            f"{source!r} builds no environment: expected an environment, a function or class that builds one, or an "
            "id. Use as_factory(lambda: MyEnv())"
        )
    return factory if adapt is None or factory.is_adapted else factory.then(adapt, preload=preload)


def examine_factory(
    factory: EnvFactory[Any],
    *,
    read: Callable[[Any], Any],
    start_method: str | None,
    preload: Sequence[str] = (),
    begin: Callable[[], object] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Build an environment in a temporary process, and measure it.

    :param factory: Builds the environment.
    :param read: Called with the environment. Its result is stored in ``examination.read``.
    :param start_method: Start method of the process.
    :param preload: Names of modules that ``read`` may need.
    :param begin: Initializer of workers, called in the process first.
    :param timeout: Seconds that building and stepping may take. None waits indefinitely.
    :raises WorkerError: If building or reading fails, or the process dies.
    """
    environ = None if factory.decision is None else factory.decision.variables
    task = functools.partial(compare.measure, factory, read, begin=begin)
    return compare.run_in_subprocess(
        task,
        preload=record.merge_modules(factory.preload, preload),
        start_method=start_method,
        environ=environ,
        timeout=timeout,
    )


def _is_environment(source: Any) -> bool:
    """Return whether a value is an instance with methods ``reset`` and ``step``."""
    # This check precedes callable(), because TorchRL's environments are callable.
    return not isinstance(source, type) and all(callable(getattr(source, name, None)) for name in ("reset", "step"))


def _factory_from_callable(build: Any) -> EnvFactory[Any]:
    line, origin = record.source_of_callable(build), "class" if isinstance(build, type) else "callable"
    recipe = recipe_of_callable(build, origin, line, takes_arguments=True)
    return EnvFactory(recipe, preload=record.modules_of_callable(build))


def _factory_from_spec(spec: Any, origin: str) -> EnvFactory[Any]:
    build = functools.partial(record.make_from_spec, copy.deepcopy(spec))
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
    """Return a factory that copies an instance; raise if no copy equals the instance."""
    line = record.source_of_instance(environment)
    preload = record.modules_of_instance(environment)
    original = fingerprint(environment)
    problems: list[str] = []
    # Without a comparison, a pickle is more likely to include later changes.
    for make_recipe in (
        (_recipe_from_record, _recipe_from_pickle) if verify else (_recipe_from_pickle, _recipe_from_record)
    ):
        recipe = make_recipe(environment, line, original, problems)
        if recipe is not None and not verify:
            return EnvFactory(recipe, instance=environment, preload=preload)
        if recipe is None:
            continue
        examination = compare.run_in_subprocess(
            functools.partial(compare.compare_and_measure, recipe, original, adapt, read),
            functools.partial(changes.pack_values, original),
            preload=record.merge_modules(preload, adapter_modules),
            start_method=start_method,
            timeout=timeout,
            protects_files=True,
        )
        if not examination.problems:
            _log_warnings(examination)
            recipe = dataclasses.replace(recipe, changes=examination.changes)
            return EnvFactory(recipe, instance=environment, preload=preload, examination=examination)
        more = f"; {len(examination.problems) - 3} more" if len(examination.problems) > 3 else ""
        problems.append(f"{_ORIGIN_PHRASES[recipe.origin]}, {'; '.join(examination.problems[:3])}{more}")
    name = line.removeprefix("lambda: ").partition("(")[0]
    raise NotCopyableError(
        f"this {name} cannot be copied into a worker: {'. Also, '.join(problems)}. Pass a function that builds and "
        f"configures it:\n    {line}"
    )


def _log_warnings(examination: Examination) -> None:
    """Warn of changes to the instance that copies may lack."""
    for paths, text in (
        (
            examination.opaque,
            "cannot be inspected, so copies may lack changes that were made there. To keep the changes, pass a "
            "function that builds and configures the environment",
        ),
        (
            examination.own,
            "differs in each instance, so copies do not get the value of this one. To set it, use "
            "for_workers(n, overrides=[...])",
        ),
    ):
        if paths:
            more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            _log.warning("%s %s", ", ".join(paths[:5]) + more, text)
    for path in examination.class_attributes:
        what = "the class's attribute" if path.startswith("<class ") else "the module's global"
        _log.warning(
            "%s: %s differs in workers, because they import the module again, without later changes. Set the value on "
            "the instance, or in the module itself",
            path,
            what,
        )


def _recipe_from_record(environment: Any, line: str, original: Fingerprint, problems: list[str]) -> Recipe | None:
    """Return the recipe that constructs an instance again.

    If that is impossible, add the reason to ``problems`` and return None.
    """
    for path in original.unpicklable:
        if (name := simulators.name_of_output_file(original.objects.get(path))) is not None:
            problems.append(f"it writes to the file {name} ({path}), which a second instance may overwrite")
            return None
    call = record.call_of(environment)
    if call is not None:
        origin = "spec" if call.function is record.make_from_spec else "constructor"
        try:
            return recipe_of_callable(call.build, origin, line, takes_arguments=False)
        except NotCopyableError as error:
            problems.append(f"its constructor call cannot be sent to a worker: {str(error).rstrip('.')}")
            return None
    problems.append(
        "its constructor call was not recorded, because it happened before this package was imported, or in a function "
        "that was not passed to capture_constructors"
    )
    return None


def _recipe_from_pickle(environment: Any, line: str, original: Fingerprint, problems: list[str]) -> Recipe | None:
    """Return the recipe that unpickles an instance.

    If that is impossible, add the reason to ``problems`` and return None.
    """
    for path, reason in original.unpicklable.items():
        problems.append(f"after pickling, it lacks {path} ({reason})")
        return None
    references = original.references  # A copy refers to the globals and class attributes of its own process.
    try:
        find = (lambda part: references.get(id(part))) if references else None
        return Recipe("pickle", _pickle.dumps(environment, find), line)
    except Exception as error:
        path = changes.unpicklable(original)
        reason = str(error) or type(error).__name__
        problems.append(f"after pickling, it lacks {path} ({full_name(type(original.objects[path]))}: {reason})")
        return None
