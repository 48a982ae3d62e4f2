"""``as_factory`` turns an instance, class, function or id into an ``EnvFactory``, a picklable function."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import numbers
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rl_ext_core import _pickle
from rl_ext_core._system import process_identity
from rl_ext_core.devices import Decision, resolve
from rl_ext_core.devices.decision import apply_in_worker
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError, _missing_dependency_error
from rl_ext_core.factory import compare, record, simulators, streams, walk
from rl_ext_core.factory.recipe import (
    Examination,
    Recipe,
    pack_values,
    recipe_of_callable,
    recipe_of_instance,
)
from rl_ext_core.factory.walk import Fingerprint, fingerprint

if TYPE_CHECKING:
    import uuid

__all__ = ["EnvFactory", "as_factory", "convert", "examine_factory"]

_log = logging.getLogger("rl_ext_core.factory")
# Module of a layer's class -> the renderer whose rule chooses its GPU.
_RENDERERS = {"robosuite": "robosuite", "dm_control": "dm_control", "gymnasium.envs.mujoco": "gymnasium"}

_Env = TypeVar("_Env")


@dataclasses.dataclass(eq=False, repr=False)
class EnvFactory(Generic[_Env]):
    """Picklable function without arguments that builds an environment.

    Created by :func:`as_factory`.

    Pass factories wherever functions that build environments are expected: SB3's ``SubprocVecEnv``, gymnasium's
    ``AsyncVectorEnv``, TorchRL's collectors. Reset a copy of an instance before its first step. Its random generators
    are reseeded, so each copy draws differently.

    :ivar origin: How environments are built. ``"callable"``, ``"class"``, ``"id"`` or ``"spec"`` (gymnasium's
        specification) name the source. Copies of an instance have ``"spec"`` or ``"constructor"`` (constructed again),
        or ``"pickle"``.
    :ivar instance: Environment that the factory was created from. None in other processes, and if the source was not an
        instance.
    :ivar preload: Names of modules that a fork server may import for all workers.
    :ivar examination: Measurements of a copy. None if no copy was built.
    :ivar worker: Index of the worker that the factory is for. None if it is for any worker.
    :ivar decision: Device decision of the worker. None if devices were not assigned.
    :ivar overrides: Arguments or attributes that differ in the worker's environment, by name.

    >>> import gymnasium
    >>> from rl_ext_core.factory import as_factory
    >>> factory = as_factory(gymnasium.make("CartPole-v1", max_episode_steps=50))
    >>> factory().spec.max_episode_steps
    50
    >>> factory.origin
    'spec'
    """

    _recipe: Recipe
    instance: Any = None
    preload: tuple[str, ...] = ()
    examination: Examination | None = None
    worker: int | None = None
    decision: Decision | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _adapters: tuple[Callable[[Any], Any], ...] = ()
    _entropy: int | None = None  # seed of the group; None for entropy of each process that builds
    _attempt: int = 0  # how often the worker was started before
    _creator: uuid.UUID | None = None  # process whose own random generators are never reseeded

    @property
    def origin(self) -> str:
        """Form of the source, see the class."""
        return self._recipe.origin

    def to_source(self) -> str:
        """Return the source code of a function that builds the same environment.

        Parts that cannot be written as code are shown as ``...``.

        >>> import gymnasium
        >>> from rl_ext_core.factory import as_factory
        >>> as_factory(gymnasium.make("CartPole-v1")).to_source()
        "lambda: gymnasium.make('CartPole-v1')"
        """
        return self._recipe.source

    def then(self, adapt: Callable[[Any], Any], *, preload: Sequence[str] = ()) -> EnvFactory[Any]:
        """Return a factory that passes each environment through a function, such as a wrapper class.

        :param adapt: Picklable function that takes the environment and returns another one.
        :param preload: Names of modules that it needs and that a fork server may import.
        :return: The new factory. This one stays as it is.
        """
        modules = record.merge_modules(self.preload, preload)
        return dataclasses.replace(self, preload=modules, _adapters=(*self._adapters, adapt))

    def for_workers(
        self,
        num_workers: int,
        *,
        seed: int | None = None,
        overrides: Sequence[Mapping[str, Any]] | None = None,
        devices: str | Decision | Sequence[Decision] | None = None,
    ) -> list[EnvFactory[_Env]]:
        """Return one factory per worker, each with its own random seeds.

        In a worker process, a factory first seeds the generators of Python, NumPy, torch and the C library. It also
        seeds generators that are globals or class attributes of the user's and the environment's modules. Generators
        inside a copy are seeded, too, also those in closures and bound methods. So are gymnasium environments and
        spaces that have not drawn yet, also those in lists and vector environments.

        :param num_workers: Number of workers, at least 1.
        :param seed: Makes all seeds reproducible. By default they differ in each run.
        :param overrides: One mapping per worker. For an instance: attributes to set on the outermost layer of the copy
            that has them. For a callable, a class or an id: keyword arguments.
        :param devices: ``"round-robin"`` distributes the visible GPUs over the workers. Otherwise one decision for all
            workers, or one per worker. A callable with a parameter ``device`` receives the compute device.
        :return: ``num_workers`` factories.
        :raises InvalidArgumentError: If ``num_workers`` or ``seed`` is out of range, a list has another length than
            ``num_workers``, or an override names no argument or attribute.
        :raises InvalidTypeError: If ``overrides`` is not a list of mappings.

        >>> from rl_ext_core.factory import as_factory
        >>> first, second = as_factory("CartPole-v1").for_workers(2, seed=0)
        >>> first.worker, second.worker
        (0, 1)
        """
        _check_workers(num_workers, seed, overrides, devices)
        # A factory of a worker keeps the settings that this call does not replace.
        factories: list[EnvFactory[_Env]] = []
        entropy = self._entropy if seed is None else int(seed)
        for index, decision in enumerate(_decide_for_workers(devices, num_workers, self.instance)):
            own = {**self.overrides, **(overrides[index] if overrides is not None else {})}
            decision = decision or self.decision
            self._recipe.check(own, self.instance)
            if decision is not None and "device" in self._recipe.parameters:
                own.setdefault("device", decision.device)
            settings: dict[str, Any] = {"worker": index, "overrides": own, "decision": decision}
            factories.append(
                dataclasses.replace(self, **settings, _entropy=entropy, _attempt=0, _creator=process_identity())
            )
        return factories

    def for_attempt(self, attempt: int) -> EnvFactory[_Env]:
        """Return this factory for a restarted worker, with other random seeds.

        :param attempt: How often the worker was started before.
        """
        return dataclasses.replace(self, _attempt=attempt)

    def __call__(self, **overrides: Any) -> _Env:
        """Build the environment.

        :param overrides: Arguments or attributes, in addition to those of the worker.
        :return: The environment.
        :raises InvalidArgumentError: If an override names no argument or attribute.
        :raises DeviceConflictError: If a library in this process already uses another device than the worker's
            decision.
        """
        recipe, overrides = self._recipe, {**self.overrides, **overrides}
        is_elsewhere, seeded = self.worker is not None and self._creator != process_identity(), set[int]()
        if self.decision is not None:
            apply_in_worker(self.decision, is_creator=not is_elsewhere)
        stream = np.random.SeedSequence(self._entropy, spawn_key=(self.worker or 0, self._attempt))
        # Seed before building, so that seeds set by the environment's own code win.
        if is_elsewhere:
            streams.seed_process(stream)
        loaded = recipe.load()  # This imports the environment's modules, whose generators are seeded next.
        if is_elsewhere:
            streams.seed_shared(stream, seeded, loaded[0])
        environment = recipe.build(overrides, loaded)
        if is_elsewhere:
            streams.seed_shared(stream, seeded, loaded[0], environment)
        if self.worker is not None or not recipe.takes_arguments:
            generators = not recipe.takes_arguments
            streams.seed_parts(environment, stream, generators=generators, original=self.instance)
        if not recipe.takes_arguments:
            simulators.seed_simulators(walk.layers(environment), stream)
        for adapt in self._adapters:
            environment = adapt(environment)
        adapted: _Env = environment
        return adapted

    def __reduce__(self) -> Any:
        # Plain pickle does not include functions and classes of a script's main module.
        return _unpickle_factory, (_pickle.dumps({**self.__dict__, "instance": None}),)

    def __repr__(self) -> str:
        worker = "" if self.worker is None else f", worker={self.worker}"
        return f"EnvFactory({self._recipe.source!r}, origin={self.origin!r}{worker})"


def _unpickle_factory(packed: bytes) -> EnvFactory[Any]:
    return EnvFactory(**pickle.loads(packed))


def _check_workers(num_workers: Any, seed: Any, overrides: Any, devices: Any) -> None:
    for name, value, least in (("num_workers", num_workers, 1), ("seed", 0 if seed is None else seed, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            option = ", seed=0" if name == "seed" else ""
            raise InvalidArgumentError(
                f"{name}={value!r} is not valid: expected an integer of at least {least}. Use for_workers(2{option})"
            )
    if overrides is not None and not (
        isinstance(overrides, Sequence) and all(isinstance(entry, Mapping) for entry in overrides)
    ):
        raise InvalidTypeError(
            f"overrides={overrides!r} is not a list of mappings: expected one per worker. "
            f"Use overrides=[dict(name=value) for worker in range({num_workers})]"
        )
    for name, value in (("overrides", overrides), ("devices", devices)):
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) != num_workers:
            entry = "dict(name=value)" if name == "overrides" else "decision"
            raise InvalidArgumentError(
                f"{name} has length {len(value)}: expected one entry for each of num_workers={num_workers!r}. Use "
                f"{name}=[{entry} for worker in range({num_workers})]"
            )


def _decide_for_workers(devices: Any, num_workers: int, environment: Any) -> list[Decision | None]:
    """Return a device decision for each worker; the renderer of ``environment`` sets the rule of ``"round-robin"``."""
    if devices is None:
        return [None] * num_workers
    if isinstance(devices, Decision):
        return [devices] * num_workers
    if devices == "round-robin":
        renderer = None if environment is None else _renderer_of(environment)
        render = {} if renderer is None else {"render": "same", "renderer": renderer}
        return [resolve("auto", worker=worker, **render) for worker in range(num_workers)]  # type: ignore[arg-type]
    if isinstance(devices, Sequence) and not isinstance(devices, str) and all(isinstance(d, Decision) for d in devices):
        return list(devices)
    raise InvalidArgumentError(
        f'devices={devices!r} is not valid: expected "round-robin", a Decision, or one Decision per worker. Use '
        'devices=[resolve("cuda", render="same", worker=worker) for worker in range(num_workers)]'
    )


def _renderer_of(environment: Any) -> str | None:
    modules = [f"{base.__module__}." for layer in walk.layers(environment) for base in type(layer).__mro__]
    found = (name for start, name in _RENDERERS.items() if any(module.startswith(f"{start}.") for module in modules))
    return next(found, None)


# ---- Conversion


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
    :raises WorkerError: If the temporary process dies, or does not finish within 600 s.
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
    """Turn an environment into a factory as :func:`as_factory` does, and adapt what it builds to a framework.

    :param adapt: Takes an environment and returns the framework's, which is the one that is measured.
    :param preload: Names of modules that ``adapt`` needs.
    :param read: Called with the copy that is measured. Its result is stored in ``examination.read``.
    :param timeout: Seconds that building and stepping a copy may take, by default 600.
    """
    if isinstance(source, EnvFactory):
        factory = source
    elif isinstance(source, str):
        factory = _factory_from_id(source)
    elif record.is_spec(source):
        factory = _factory_from_spec(source, "spec")
    elif _is_environment(source):

        def examine(recipe: Recipe, original: Fingerprint, modules: Sequence[str]) -> Examination:
            return compare.run_in_subprocess(
                functools.partial(compare.compare_and_measure, recipe, original, adapt, read),
                functools.partial(pack_values, original),
                preload=record.merge_modules(modules, preload),
                start_method=start_method,
                timeout=timeout,
                protects_files=True,
            )

        factory = _factory_from_instance(source, examine if verify else None)
    elif callable(source):
        origin = "class" if isinstance(source, type) else "callable"
        recipe = recipe_of_callable(source, origin, record.source_of_callable(source))
        factory = EnvFactory(recipe, preload=record.modules_of_callable(source))
    else:
        raise InvalidTypeError(
            f"{source!r} builds no environment: expected an environment, a function or class that builds one, or an "
            "id. Use as_factory(lambda: MyEnv())"
        )
    return factory if adapt is None or factory._adapters else factory.then(adapt, preload=preload)


def examine_factory(
    factory: EnvFactory[Any],
    *,
    begin: Callable[[], object],
    read: Callable[[Any], Any],
    preload: Sequence[str],
    start_method: str | None,
    timeout: float | None,
) -> Examination:
    """Build an environment in a temporary process, and measure it.

    :param begin: Initializer of workers, called in the process first.
    :param read: Called with the environment. Its result is stored in ``examination.read``.
    :param preload: Names of modules that ``read`` may need.
    :param timeout: Seconds that building and reading may take, by default 600.
    :raises WorkerError: If building or reading fails, or the process dies.
    """
    return compare.run_in_subprocess(
        functools.partial(compare.measure, begin, factory, read),
        preload=record.merge_modules(factory.preload, preload),
        start_method=start_method,
        environ=None if factory.decision is None else factory.decision.variables,
        timeout=timeout,
    )


def _is_environment(source: Any) -> bool:
    # This check precedes callable(), because TorchRL's environments are callable.
    return not isinstance(source, type) and all(callable(getattr(source, name, None)) for name in ("reset", "step"))


def _factory_from_spec(spec: Any, origin: str) -> EnvFactory[Any]:
    build = functools.partial(record.make_from_spec, copy.deepcopy(spec))
    recipe = recipe_of_callable(build, origin, record.source_of_callable(build))
    return EnvFactory(recipe, preload=record.merge_modules(["gymnasium"], record.modules_of_callable(spec)))


def _factory_from_id(name: str) -> EnvFactory[Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise _missing_dependency_error("gymnasium", "sb3", f"the id {name!r}") from error
    game = None if name in gymnasium.registry else record.game_of_id(name)
    if game is None:
        return _factory_from_spec(record.spec_of_id(name), "id")
    return EnvFactory(recipe_of_callable(game, "id", f"stable_retro.make({name!r})"))


def _factory_from_instance(
    environment: Any, examine: Callable[[Recipe, Fingerprint, Sequence[str]], Examination] | None
) -> EnvFactory[Any]:
    """Return a factory that copies an instance.

    :param examine: Compares a copy with the fingerprint of the instance. None trusts the first recipe.
    """
    line = f"lambda: {record.source_of_environment(environment)}"
    kinds = (type(layer) for layer in walk.layers(environment))
    preload = record.preloadable_modules(base.__module__ for kind in kinds for base in kind.__mro__)
    original = fingerprint(environment)
    problems: list[str] = []
    # Without a comparison, a pickle is more likely to include later changes.
    for constructs in (False, True) if examine is None else (True, False):
        try:
            recipe = recipe_of_instance(original, line, constructs=constructs)
        except NotCopyableError as error:
            problems.append(str(error))
            continue
        if examine is None:
            return EnvFactory(recipe, instance=environment, preload=preload)
        examination = examine(recipe, original, preload)
        if not examination.problems:
            for text, paths in examination.warnings.items():
                if paths:
                    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
                    _log.warning("%s %s", ", ".join(paths[:5]) + more, text)
            recipe = dataclasses.replace(recipe, changes=examination.changes)
            return EnvFactory(recipe, instance=environment, preload=preload, examination=examination)
        more = f"; {len(examination.problems) - 3} more" if len(examination.problems) > 3 else ""
        how = "constructed again" if constructs else "after pickling"
        problems.append(f"{how}, {'; '.join(examination.problems[:3])}{more}")
    name = line.removeprefix("lambda: ").partition("(")[0]
    raise NotCopyableError(
        f"this {name} cannot be copied into a worker: {'. Also, '.join(problems)}. Pass a function that builds and "
        f"configures it:\n    {line}"
    )
