"""``as_factory``: from an environment, in whatever form users have it, to a picklable function that builds it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rl_ext_core.errors import InvalidTypeError, NotCopyableError, missing_dependency
from rl_ext_core.factory import _examine, _objects, _sources
from rl_ext_core.factory._examine import Examination
from rl_ext_core.factory._fingerprint import Fingerprint
from rl_ext_core.factory._graft import References, Refused
from rl_ext_core.factory.factory import EnvFactory, Recipe, by_calling, by_grafting, make

__all__ = ["as_factory", "convert", "examined"]

_log = logging.getLogger("rl_ext_core.factory")


def as_factory(source: Any, *, verify: bool = True, start_method: str | None = None) -> EnvFactory[Any]:
    """Turn an environment into a factory of environments like it.

    An instance is copied as it is, with whatever was changed since it was constructed, or refused; it is only read, and
    stays usable. Whether a copy is faithful is found out in a process that is thrown away.

    .. code-block:: python

        env = gym.make("CartPole-v1")
        env.unwrapped.gravity = 5.0
        venv = SubprocVecEnv(as_factory(env).for_workers(4, seed=0))

    :param source: an environment, a function or class that builds one, gymnasium's id or specification of one, or the
        name of a game of stable-retro
    :param verify: compare a copy of an instance with it. False trusts the copy and saves a process
    :param start_method: of that process, ``"forkserver"``, ``"spawn"`` or ``"fork"``; the first where there is one
    :return: the factory
    :raises NotCopyableError: no copy would be the instance's equal; the text names the attribute, and the line to write
    :raises WorkerError: no copy can be built: the cause is what that raises; or its process has died
    :raises InvalidTypeError: nothing that builds an environment
    :raises InvalidArgumentError: gymnasium does not know the id

    Source: https://github.com/pytorch/rl/issues/2277
    """
    return convert(source, verify=verify, start_method=start_method)


def convert(
    source: Any,
    *,
    verify: bool,
    start_method: str | None,
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
        factory = _of_id(source)
    elif _sources.is_spec(source):
        factory = _of_spec(source, "spec")
    elif _is_environment(source):
        factory = _of_instance(source, verify, start_method, adapt, preload, read, timeout)
    elif callable(source):
        factory = _of_callable(source)
    else:
        raise InvalidTypeError(
            f"{source!r} builds no environment; expected an environment, a function or class that builds one, or an "
            "id. Write as_factory(lambda: MyEnv())"
        )
    return factory if adapt is None or factory.adapted else factory.then(adapt, preload=preload)


def examined(
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
    task = functools.partial(_examine.measure, functools.partial(factory, **overrides), read, begin)
    return _examine.in_subprocess(
        task, preload=factory.preload, start_method=start_method, environ=environ, timeout=timeout
    )


def _is_environment(source: Any) -> bool:
    # Before the question whether it can be called: TorchRL's environments can.
    return not isinstance(source, type) and all(callable(getattr(source, name, None)) for name in ("reset", "step"))


def _of_callable(build: Any) -> EnvFactory[Any]:
    line = _sources.line_of_callable(build)
    try:
        recipe = by_calling(build, "class" if isinstance(build, type) else "callable", line, takes_arguments=True)
    except Refused as refused:
        raise NotCopyableError(
            f"{line} cannot be copied into another process: it holds {refused.path.lstrip('.') or 'something'} "
            f"({type(refused.value).__name__}: {refused.reason}). Create that inside of the function"
        ) from refused
    return EnvFactory(recipe, preload=_sources.modules_of_callable(build))


def _of_spec(spec: Any, origin: str) -> EnvFactory[Any]:
    build = functools.partial(make, copy.deepcopy(spec))
    recipe = by_calling(build, origin, _sources.line_of_spec(spec), takes_arguments=True)
    return EnvFactory(recipe, preload=("gymnasium", *_sources.modules_of_callable(spec)))


def _of_id(name: str) -> EnvFactory[Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise missing_dependency("gymnasium", "sb3", f"the id {name!r}") from error
    game = None if name in gymnasium.registry else _sources.game_of_id(name)
    if game is None:
        return _of_spec(_sources.spec_of_id(name), "id")
    return EnvFactory(by_calling(game, "id", f"stable_retro.make({name!r})", takes_arguments=True))


def _of_instance(
    environment: Any,
    verify: bool,
    start_method: str | None,
    adapt: Callable[[Any], Any] | None,
    adapts: Sequence[str],
    read: Callable[[Any], Any] | None,
    timeout: float | None,
) -> EnvFactory[Any]:
    line = _sources.line_of_instance(environment)
    recipes, refused = _candidates(environment, line)
    preload = _sources.modules_of_instance(environment)
    if not verify:
        return EnvFactory(recipes[0], live=environment, preload=preload)
    original = _examine.snapshot(environment)
    if original.references:
        recipes, refused = _candidates(environment, line, original.references)
    if original.handles:
        recipes = _without_graft(line, original, recipes)
    task = functools.partial(_examine.examine, recipes, original, adapt, read)
    examination = _examine.in_subprocess(
        task, preload=_sources.merged_modules(preload, adapts), start_method=start_method, timeout=timeout
    )
    if examination.chosen is None:
        raise NotCopyableError(_unfaithful(line, recipes, examination.lost, refused)) from refused
    for path, note in original.notes.items():
        _log.warning("%s: %s", path or "the environment", note)
    for path in examination.opaque:
        _log.warning(
            "%s: this cannot be looked into, so whether a copy has it is not known; what was done to it since it was "
            "made may be lost: say how it is copied, with register_rebuilder",
            path,
        )
    for path in examination.class_attributes:
        _log.warning("%s", _of_code(path))
    return EnvFactory(recipes[examination.chosen], live=environment, preload=preload, examination=examination)


def _of_code(path: str) -> str:
    if path.startswith("<setting "):
        return f"{path}: this is set otherwise in workers; set it in the code of the environment"
    what = "the class's attribute" if path.startswith("<class ") else "the module's global"
    return (
        f"{path}: {what} differs in workers, which import the module anew, so what was changed since then is not in a "
        "copy: set it on the instance, or where the module is imported"
    )


def _candidates(
    environment: Any, line: str, references: References = MappingProxyType({})
) -> tuple[list[Recipe], Refused | None]:
    """Return the ways to build a copy, in order of preference, and why there is no graft."""
    recipes, refused = [], None
    try:
        recipes.append(by_grafting(environment, line, references))
    except Refused as error:
        refused = error
    for origin, build in _builders(environment):
        with contextlib.suppress(Refused):
            recipes.append(by_calling(build, origin, line, takes_arguments=False))
    if not recipes:
        assert refused is not None
        kind = ":".join(_objects.name_of(type(refused.value)))
        raise NotCopyableError(_not_copyable(line, refused.path, kind, refused.reason)) from refused
    return recipes, refused


def _without_graft(line: str, original: Fingerprint, recipes: list[Recipe]) -> list[Recipe]:
    """Keep the recipes that let the environment ask its library in C for objects of its own.

    :raises NotCopyableError: there are none
    """
    built_anew = [recipe for recipe in recipes if recipe.origin != "graft"]
    path, (kind, reason) = next(iter(original.handles.items()))
    if not built_anew:
        raise NotCopyableError(_not_copyable(line, path, kind, reason))
    original.opaque.update({path: kind.replace(":", ".") for path, (kind, _) in original.handles.items()})
    return built_anew


def _builders(environment: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return what may build the instance anew."""
    spec = _sources.spec_of(environment)
    if spec is not None:
        yield "spec", functools.partial(make, spec)
    call = _sources.recorded(environment)
    if call is not None:
        cls, args, kwargs = call
        yield "constructor", functools.partial(cls, *args, **kwargs)


def _not_copyable(line: str, path: str, kind: str, reason: str) -> str:
    holds = f"it holds {path} ({kind.replace(':', '.')}): " if path else ""
    return (
        f"this {line.removeprefix('lambda: ').partition('(')[0]} cannot be copied into a worker: {holds}{reason}. Hand "
        f"over what builds it:\n    {line}\nor say how such an object is made: "
        f'register_rebuilder("{kind}", lambda old: (make, (old.option,)))'
    )


_WAYS = {"graft": "copied as it is", "spec": "made by its specification", "constructor": "constructed as it was"}


def _unfaithful(line: str, recipes: list[Recipe], lost: tuple[tuple[str, ...], ...], refused: Refused | None) -> str:
    found = [] if refused is None else [f"{_WAYS['graft']}, it has no {refused.path} ({refused.reason})"]
    for recipe, paths in zip(recipes, lost, strict=True):
        shown = "; ".join(paths[:3]) + (f"; and {len(paths) - 3} more" if len(paths) > 3 else "")
        found.append(f"{_WAYS[recipe.origin]}, {shown}")
    return (
        f"a copy of this {line.removeprefix('lambda: ').partition('(')[0]} would not be its equal: "
        f"{'. And '.join(found)}. Hand over a function that builds it as it is to be:\n    {line}"
    )
