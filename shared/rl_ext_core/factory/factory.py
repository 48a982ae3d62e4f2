"""``EnvFactory``: a picklable function that builds an environment."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import numbers
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rl_ext_core import _pickle, processes
from rl_ext_core._system import process_identity
from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError
from rl_ext_core.factory import compare, record, streams, walk

if TYPE_CHECKING:
    import uuid

    from rl_ext_core.factory.compare import Examination

__all__ = ["EnvFactory"]

# Module of a layer's class -> the renderer whose rule chooses its GPU.
_RENDERERS = {"robosuite": "robosuite", "dm_control": "dm_control", "gymnasium.envs.mujoco": "gymnasium"}

_Env = TypeVar("_Env")


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Settings of one worker.

    :ivar index: Position of the worker in its group, from 0.
    :ivar entropy: Seed of the group. None draws entropy from the operating system in each process that builds.
    :ivar overrides: Arguments or attributes that differ in this worker.
    :ivar decision: Device decision of the worker.
    :ivar apply_decision: Applies the device decision to the process that builds.
    :ivar creator_process: Process that created the factories. Its own random generators are never reseeded.
    :ivar attempt: How often the worker was started before.
    """

    index: int
    entropy: int | None
    overrides: Mapping[str, Any]
    decision: Decision | None
    apply_decision: Callable[[], None]
    creator_process: uuid.UUID
    attempt: int = 0


class EnvFactory(Generic[_Env]):
    """Picklable function without arguments that builds an environment.

    Created by :func:`as_factory`.

    Pass factories wherever functions that build environments are expected: SB3's ``SubprocVecEnv``, gymnasium's
    ``AsyncVectorEnv``, TorchRL's collectors. A copy of an instance starts at a reset. Its random generators are
    reseeded, so each copy draws differently.

    :ivar instance: Environment that the factory was created from. None in other processes, and if the source was not an
        instance.
    :ivar preload: Names of modules that a fork server may import for all workers.
    :ivar examination: Measurements of a copy. None if no copy was built.

    >>> import gymnasium
    >>> from rl_ext_core.factory import as_factory
    >>> factory = as_factory(gymnasium.make("CartPole-v1", max_episode_steps=50))
    >>> factory().spec.max_episode_steps
    50
    >>> factory.origin
    'spec'
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        instance: Any = None,
        preload: Sequence[str] = (),
        examination: Examination | None = None,
    ) -> None:
        self._recipe = recipe
        self._adapters: tuple[Callable[[Any], Any], ...] = ()
        self._worker: _Worker | None = None
        self.instance = instance
        self.preload = record.merge_modules(preload)
        self.examination = examination

    @property
    def origin(self) -> str:
        """How environments are built.

        :return: ``"callable"``, ``"class"``, ``"id"`` or ``"spec"`` (gymnasium's specification) name the source. Copies
            of an instance have ``"spec"`` or ``"constructor"`` (constructed again), or ``"pickle"``.
        """
        return self._recipe.origin

    @property
    def worker(self) -> int | None:
        """Index of the worker that the factory is for, or None if it is for any worker."""
        return None if self._worker is None else self._worker.index

    @property
    def decision(self) -> Decision | None:
        """Device decision of the worker, or None if devices were not assigned."""
        return None if self._worker is None else self._worker.decision

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Arguments or attributes that differ in the worker's environment, by name."""
        return {} if self._worker is None else self._worker.overrides

    @property
    def is_adapted(self) -> bool:
        """Whether :meth:`then` added a function that wraps the environments."""
        return bool(self._adapters)

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
        other: EnvFactory[Any] = self._copy()
        other._adapters = (*self._adapters, adapt)
        other.preload = record.merge_modules(self.preload, preload)
        return other

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
        inside a copy are seeded, too. So are gymnasium environments and spaces that have not drawn yet, also those in
        lists and vector environments.

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
        before = None if self._worker is None else self._worker.entropy
        entropy = before if seed is None else int(seed)
        factories = []
        for index, decision in enumerate(_decide_for_workers(devices, num_workers, self.instance)):
            factory = self._copy()
            own = {**self.overrides, **(overrides[index] if overrides is not None else {})}
            decision = decision or self.decision
            self._recipe.check(own, self.instance)
            if decision is not None and "device" in self._recipe.parameters:
                own.setdefault("device", decision.device)
            apply_decision = _do_nothing if decision is None else decision.bind(_do_nothing)
            factory._worker = _Worker(index, entropy, own, decision, apply_decision, process_identity())
            factories.append(factory)
        return factories

    def for_attempt(self, attempt: int) -> EnvFactory[_Env]:
        """Return this factory for a restarted worker, with other random seeds.

        :param attempt: How often the worker was started before.
        """
        other = self._copy()
        if self._worker is not None:
            other._worker = dataclasses.replace(self._worker, attempt=attempt)
        return other

    def __call__(self, **overrides: Any) -> _Env:
        """Build the environment.

        :param overrides: Arguments or attributes, in addition to those of the worker.
        :return: The environment.
        :raises InvalidArgumentError: If an override names no argument or attribute.
        :raises DeviceConflictError: If a library in this process already uses another device than the worker's
            decision.
        """
        worker, recipe = self._worker, self._recipe
        if worker is not None:
            worker.apply_decision()
            overrides = {**worker.overrides, **overrides}
            stream = streams.seed_sequence(worker.entropy, worker.index, worker.attempt)
        elif not recipe.takes_arguments:
            stream = np.random.SeedSequence()
        else:
            return self._adapt(recipe.build(overrides))
        is_elsewhere, seeded = worker is not None and worker.creator_process != process_identity(), set[int]()
        if is_elsewhere:
            # Seed before building, so that seeds set by the environment's own code win.
            streams.seed_process(stream)
            if recipe.takes_arguments:
                recipe.load()  # This imports the environment's modules, whose generators are seeded next.
            streams.seed_shared(stream, seeded)
        environment = recipe.build(overrides)
        if is_elsewhere:
            streams.seed_shared(stream, seeded, environment)
        if not recipe.takes_arguments:
            streams.seed_copy(environment, stream)
        streams.seed_unseeded(environment, stream)
        return self._adapt(environment)

    def _adapt(self, environment: Any) -> _Env:
        """Pass an environment through the functions that :meth:`then` added."""
        for adapt in self._adapters:
            environment = adapt(environment)
        adapted: _Env = environment
        return adapted

    def _copy(self) -> EnvFactory[_Env]:
        """Return a shallow copy of this factory."""
        other: EnvFactory[_Env] = EnvFactory.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        # Plain pickle does not include functions and classes of a script's main module.
        return _unpickle_factory, (_pickle.dumps({**self.__dict__, "instance": None}),)

    def __repr__(self) -> str:
        worker = "" if self._worker is None else f", worker={self._worker.index}"
        return f"EnvFactory({self._recipe.source!r}, origin={self.origin!r}{worker})"


def _unpickle_factory(packed: bytes) -> EnvFactory[Any]:
    """Create a factory from its pickled attributes."""
    factory: EnvFactory[Any] = EnvFactory.__new__(EnvFactory)
    factory.__dict__.update(pickle.loads(packed))
    return factory


def _do_nothing() -> None:
    """Do nothing. A bound decision applies itself before it calls this."""


def _check_workers(num_workers: Any, seed: Any, overrides: Any, devices: Any) -> None:
    """Raise if an argument of :meth:`EnvFactory.for_workers` is invalid."""
    checked: list[tuple[str, Any, int, str]] = [("num_workers", num_workers, 1, "")]
    checked += [] if seed is None else [("seed", seed, 0, ", seed=0")]
    for name, value, least, option in checked:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
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
    """Return a device decision for each worker.

    :param environment: Instance whose renderer determines the rule of ``"round-robin"``, or None.
    :raises InvalidArgumentError: If ``devices`` has another form.
    """
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
    """Return the renderer whose rule chooses an environment's GPU, or None."""
    modules = [f"{base.__module__}." for layer in walk.layers(environment) for base in type(layer).__mro__]
    found = (name for start, name in _RENDERERS.items() if any(module.startswith(f"{start}.") for module in modules))
    return next(found, None)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Instructions for building an environment in this or another process.

    :ivar origin: Form of the source, the value of :attr:`EnvFactory.origin`.
    :ivar packed: Pickle of the callable, or of the environment itself. It is loaded on demand, because that imports the
        environment's modules.
    :ivar source: Source code of a function that builds the same environment.
    :ivar takes_arguments: Whether overrides are arguments of the callable. Otherwise they are set on the copy.
    :ivar parameters: Names of the callable's parameters.
    :ivar reload_each_time: Whether each call unpickles the callable again. A callable that contains an environment
        would otherwise return the same one twice.
    :ivar loaded: Callable and the specifications of ids that it names. In the process that packed it, they are the
        caller's own objects.
    :ivar changes: Changes to set on a copy of an instance.
    """

    origin: str
    packed: bytes = dataclasses.field(repr=False)
    source: str
    takes_arguments: bool = False
    parameters: tuple[str, ...] = ()
    reload_each_time: bool = False
    loaded: tuple[Any, Iterable[Any]] | None = dataclasses.field(default=None, repr=False, compare=False)
    changes: tuple[compare.Change, ...] = dataclasses.field(default=(), repr=False)

    def build(self, overrides: Mapping[str, Any] | None = None) -> Any:
        """Build an environment.

        :param overrides: Arguments or attributes that differ in this one.
        :raises InvalidArgumentError: If an override names neither an argument nor an attribute.
        """
        overrides = overrides or {}
        self.check(overrides, None)
        if self.takes_arguments:
            return _call_with_specs(*self.load(), overrides)
        environment = compare.unpack(self.packed) if self.origin == "pickle" else _call_with_specs(*self.load(), {})
        compare.apply_changes(environment, self.changes)
        _set_overrides(environment, overrides)
        return environment

    def load(self) -> tuple[Any, Iterable[Any]]:
        """Unpickle the callable, and the gymnasium specifications of ids that it names."""
        if self.loaded is not None:
            return self.loaded
        loaded: tuple[Any, Iterable[Any]] = pickle.loads(self.packed)
        if not self.reload_each_time:
            object.__setattr__(self, "loaded", loaded)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        # Pickle again, because the user may have changed the script's globals.
        packed = self.packed if self.loaded is None else _pickle.dumps(self.loaded)
        return {**self.__dict__, "packed": packed, "loaded": None}

    def check(self, overrides: Mapping[str, Any], instance: Any) -> None:
        """Check the names of overrides without building an environment.

        :param instance: Instance that the recipe copies, or None.
        :raises InvalidArgumentError: If an override names neither an argument nor an attribute.
        """
        takes_any = any(name.startswith("**") for name in self.parameters)
        for name, value in overrides.items():
            if not self.takes_arguments and instance is not None:
                _layer_with_attribute(instance, name, value)
            if self.takes_arguments and name not in self.parameters and not takes_any:
                raise InvalidArgumentError(
                    f"{self.source} takes no argument {name}={value!r}: expected "
                    f"{', '.join(self.parameters) or 'none'}. "
                    f"Pass a function that takes it, e.g. lambda {name}: MyEnv({name}={name})"
                )


def _call_with_specs(build: Any, specs: Iterable[Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function after registering the gymnasium ids that it uses."""
    for spec in specs:  # A worker has not registered the ids of the user's script.
        importlib.import_module("gymnasium").registry.setdefault(spec.id, spec)
    try:
        return build(**arguments)
    except Exception as error:
        gymnasium = sys.modules.get("gymnasium")
        unknown = gymnasium is not None and isinstance(error, gymnasium.error.UnregisteredEnv)
        # The main module of the user's script may register the id when it is imported.
        if not unknown or not processes.import_main():
            raise
    return build(**arguments)


def recipe_of_callable(build: Any, origin: str, source: str, *, takes_arguments: bool) -> Recipe:
    """Return the recipe that calls a function.

    :raises NotCopyableError: If the function refers to objects that cannot be pickled.
    """
    loaded = (build, record.named_specs(build))
    # Copies of an instance must not share the arguments of its constructor, so each one unpickles its own.
    reload_each_time = not takes_arguments or any(map(walk.is_layer, record.referenced_values(build)))
    parameters = _parameters(build) if takes_arguments else ()
    try:
        packed = _pickle.dumps(loaded)
    except Exception as error:
        found = walk.fingerprint(build, code=False)
        path = compare.unpicklable(found)
        name = f"{path} ({walk.full_name(type(found.objects[path]))}): " if path else ""
        raise NotCopyableError(
            f"{source} cannot be pickled for a worker: {name}{str(error) or type(error).__name__}. Create that object "
            "inside of the function that builds the environment"
        ) from error
    return Recipe(
        origin, packed, source, takes_arguments, parameters, reload_each_time, None if reload_each_time else loaded
    )


def _parameters(build: Any) -> tuple[str, ...]:
    """Return the names of a function's keyword parameters, with ``**`` before a catch-all's."""
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return ("**unknown",)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in found if one.kind not in positional
    )


def _layer_with_attribute(environment: Any, name: str, value: Any) -> Any:
    """Find the outermost layer that has an attribute.

    :raises InvalidArgumentError: If no layer has it.
    """
    for layer in walk.layers(environment):
        if name in walk.attributes(layer) or any(name in vars(base) for base in type(layer).__mro__):
            return layer
    names = sorted({known for layer in walk.layers(environment) for known in walk.attributes(layer)})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    raise InvalidArgumentError(
        f"overrides: no layer of {type(environment).__name__} has the attribute {name}={value!r}: expected one such as "
        f"{', '.join(near)}. {_CONSTRUCTOR_ADVICE}"
    )


def _set_overrides(environment: Any, overrides: Mapping[str, Any]) -> None:
    """Set attributes, each on the outermost layer that has it.

    :raises InvalidArgumentError: If no layer has the attribute, or the layer changes the value that is set.
    """
    for name, value in overrides.items():
        layer = _layer_with_attribute(environment, name, value)
        try:
            setattr(layer, name, value)
        except AttributeError as error:
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} cannot be set on {type(layer).__name__}: {error}. {_CONSTRUCTOR_ADVICE}"
            ) from error
        kept = getattr(layer, name)
        if kept is not value and not _equal(kept, value):
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which stores {kept!r} instead. "
                f"{_CONSTRUCTOR_ADVICE}"
            )


_CONSTRUCTOR_ADVICE = (
    "To override arguments of the constructor, pass the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values or arrays are equal; False if they cannot be compared."""
    try:
        return bool((one == other) if not hasattr(one, "shape") else (one == other).all())
    except (TypeError, ValueError):
        return False
