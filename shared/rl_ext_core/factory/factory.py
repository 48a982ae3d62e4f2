"""A picklable function that builds an environment like the one it was made from, by a call or from a copy."""

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

# By the module of a layer's class, the renderer by whose rule it picks a GPU.
_RENDERERS = {"robosuite": "robosuite", "dm_control": "dm_control", "gymnasium.envs.mujoco": "gymnasium"}

_Env = TypeVar("_Env")


@dataclasses.dataclass(frozen=True)
class _Worker:
    """What is a worker's own.

    :ivar entropy: None is the operating system's, of each process: one pickle may be used in several
    :ivar creator_process: the process that hands out the factories; its own generators are left alone
    """

    index: int
    entropy: int | None
    overrides: Mapping[str, Any]
    decision: Decision | None
    apply_decision: Callable[[], None]
    creator_process: uuid.UUID
    attempt: int = 0


class EnvFactory(Generic[_Env]):
    """Builds an environment; picklable, callable without arguments. Made by :func:`as_factory`.

    It fits wherever a list of functions is expected: Stable Baselines3's ``SubprocVecEnv``, gymnasium's
    ``AsyncVectorEnv``, TorchRL's collectors and its distributed ones. A copy of an instance begins at a reset, and its
    random generators never continue the original's stream: each copy draws differently.

    :ivar origin: how: ``"callable"``, ``"class"``, ``"id"`` or ``"spec"`` (gymnasium's specification); of an instance,
        ``"spec"`` or ``"constructor"`` (made as the instance was, with what was changed of it since) or, where that is
        not known or not enough, ``"pickle"``
    :ivar instance: the instance that it was made from, in the process that did so; else None
    :ivar preload: modules that a fork server may import
    :ivar examination: what was measured of a copy; None if nothing was

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
        """The route by which environments are built."""
        return self._recipe.origin

    @property
    def worker(self) -> int | None:
        """The worker that it is for; None: for any."""
        return None if self._worker is None else self._worker.index

    @property
    def decision(self) -> Decision | None:
        """The worker's device decision."""
        return None if self._worker is None else self._worker.decision

    @property
    def overrides(self) -> Mapping[str, Any]:
        """What is different about the worker's environment."""
        return {} if self._worker is None else self._worker.overrides

    @property
    def is_adapted(self) -> bool:
        """Whether environments go through a function that :meth:`then` added."""
        return bool(self._adapters)

    def to_source(self) -> str:
        """Return the source line that a person would write in place of it, as well as it can be told."""
        return self._recipe.to_source

    def then(self, adapt: Callable[[Any], Any], *, preload: Sequence[str] = ()) -> EnvFactory[Any]:
        """Return a factory whose environments go through a function, e.g. a wrapper's class.

        :param adapt: takes the environment; picklable
        :param preload: modules that it needs and that a fork server may import
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
        """Return a factory for each of several workers.

        In a process other than this one they seed the generators that environments may draw from, before they build:
        Python's, NumPy's, torch's and the C library's, differently in each worker. So are generators that are globals
        or class attributes of the environment's modules and of the user's, those that a copy holds, and gymnasium's in
        environments and spaces that have not drawn yet, in lists and vector environments too.

        :param num_workers: how many
        :param seed: makes all of that reproducible; by default it never is
        :param overrides: per worker: for an instance attributes to set on the copy, on its outermost layer that has
            them; for a callable, a class or an id arguments for it
        :param devices: ``"round-robin"`` gives the visible GPUs out in turn; or a decision for all, or one for each.
            A callable with a parameter ``device`` gets the one that computes
        :return: the factories
        :raises InvalidArgumentError: a number below 1, a seed below 0, a list of another length, or an override that
            names nothing
        :raises InvalidTypeError: overrides are no list of mappings
        """
        _check_workers(num_workers, seed, overrides, devices)
        # Of one that is for a worker already, what is not said anew stays.
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
        """Return the worker's factory for when it is started anew: the environment draws differently.

        :param attempt: how often it was started before
        """
        other = self._copy()
        if self._worker is not None:
            other._worker = dataclasses.replace(self._worker, attempt=attempt)
        return other

    def __call__(self, **overrides: Any) -> _Env:
        """Build the environment.

        :param overrides: in addition to the worker's
        :raises InvalidArgumentError: an override names no attribute of the copy
        :raises DeviceConflictError: a library in this process has read other settings than the worker's decision
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
            # Before it is built: what the environment's own code seeds stays as it says.
            streams.seed_process(stream)
            if recipe.takes_arguments:
                recipe.load()  # which imports its modules
            streams.seed_shared(stream, seeded)
        environment = recipe.build(overrides)
        if is_elsewhere:
            streams.seed_shared(stream, seeded, environment)
        if not recipe.takes_arguments:
            streams.seed_copy(environment, stream)
        streams.seed_unseeded(environment, stream)
        return self._adapt(environment)

    def _adapt(self, environment: Any) -> _Env:
        for adapt in self._adapters:
            environment = adapt(environment)
        is_adapted: _Env = environment
        return is_adapted

    def _copy(self) -> EnvFactory[_Env]:
        other: EnvFactory[_Env] = EnvFactory.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        # What users have given may be of a script's main module, which plain pickle does not bring along.
        return _unpickle_factory, (_pickle.dumps({**self.__dict__, "instance": None}),)

    def __repr__(self) -> str:
        worker = "" if self._worker is None else f", worker={self._worker.index}"
        return f"EnvFactory({self._recipe.to_source!r}, origin={self.origin!r}{worker})"


def _unpickle_factory(packed: bytes) -> EnvFactory[Any]:
    factory: EnvFactory[Any] = EnvFactory.__new__(EnvFactory)
    factory.__dict__.update(pickle.loads(packed))
    return factory


def _do_nothing() -> None:
    """Build nothing: a decision is applied by what it binds."""


def _check_workers(num_workers: Any, seed: Any, overrides: Any, devices: Any) -> None:
    checked: list[tuple[str, Any, int, str]] = [("num_workers", num_workers, 1, "")]
    checked += [] if seed is None else [("seed", seed, 0, ", seed=0")]
    for name, value, least, option in checked:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise InvalidArgumentError(
                f"{name}={value!r} is not a whole number from {least} on. Write for_workers(2{option})"
            )
    if overrides is not None and not (
        isinstance(overrides, Sequence) and all(isinstance(entry, Mapping) for entry in overrides)
    ):
        raise InvalidTypeError(
            f"overrides={overrides!r} is no list of mappings; write overrides=[dict(name=value) for worker in "
            f"range({num_workers})]"
        )
    for name, value in (("overrides", overrides), ("devices", devices)):
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) != num_workers:
            entry = "dict(name=value)" if name == "overrides" else "decision"
            raise InvalidArgumentError(
                f"{name} has {len(value)} entries for {num_workers} workers; expected one for each. Write "
                f"{name}=[{entry} for worker in range({num_workers})]"
            )


def _decide_for_workers(devices: Any, num_workers: int, environment: Any) -> list[Decision | None]:
    """Return a decision for each worker; the renderer of an instance, if there is one, decides the rule.

    :raises InvalidArgumentError: another value
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
        f'devices={devices!r} is no decision; expected "round-robin", a decision or one for each worker. Write '
        'devices=[resolve("cuda", render="same", worker=worker) for worker in range(num_workers)]'
    )


def _renderer_of(environment: Any) -> str | None:
    """Tell by which renderer's rule an environment picks a GPU; None: it does not render on one."""
    modules = [f"{base.__module__}." for layer in walk.layers(environment) for base in type(layer).__mro__]
    found = (name for start, name in _RENDERERS.items() if any(module.startswith(f"{start}.") for module in modules))
    return next(found, None)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Builds an environment, here or in another process.

    :ivar origin: by which route: ``"callable"``, ``"class"``, ``"id"``, ``"spec"``, ``"constructor"`` or ``"pickle"``
    :ivar packed: what is unpickled, no sooner than when it is needed: that imports the environment's modules
    :ivar to_source: the source line that a person would write
    :ivar takes_arguments: whether overrides are the callable's arguments; else they are set on the copy
    :ivar parameters: of the callable, as far as they can be named
    :ivar reload_each_time: whether the callable is unpickled each time, because it holds an environment: two calls give two
    :ivar loaded: the callable, with specifications of ids that it names: in the process that has packed it the
        caller's own, in others as it was unpickled there
    :ivar changes: what is set on a copy of an instance
    """

    origin: str
    packed: bytes = dataclasses.field(repr=False)
    to_source: str
    takes_arguments: bool = False
    parameters: tuple[str, ...] = ()
    reload_each_time: bool = False
    loaded: tuple[Any, Iterable[Any]] | None = dataclasses.field(default=None, repr=False, compare=False)
    changes: tuple[compare.Change, ...] = dataclasses.field(default=(), repr=False)

    def build(self, overrides: Mapping[str, Any] | None = None) -> Any:
        """Build it.

        :param overrides: what is different about this one
        :raises InvalidArgumentError: an override names neither an argument nor an attribute
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
        """Return the callable, with specifications of ids that it names."""
        if self.loaded is not None:
            return self.loaded
        loaded: tuple[Any, Iterable[Any]] = pickle.loads(self.packed)
        if not self.reload_each_time:
            object.__setattr__(self, "loaded", loaded)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        # As it is now: the user may have changed the script's globals.
        packed = self.packed if self.loaded is None else _pickle.dumps(self.loaded)
        return {**self.__dict__, "packed": packed, "loaded": None}

    def check(self, overrides: Mapping[str, Any], instance: Any) -> None:
        """Find out whether overrides name something, as far as that can be told without building it.

        :param instance: the instance that it is made from; None: there is none
        :raises InvalidArgumentError: one does not
        """
        takes_any = any(name.startswith("**") for name in self.parameters)
        for name, value in overrides.items():
            if not self.takes_arguments and instance is not None:
                _layer_with_attribute(instance, name, value)
            if self.takes_arguments and name not in self.parameters and not takes_any:
                raise InvalidArgumentError(
                    f"{self.to_source} takes no argument {name}={value!r}; it takes {', '.join(self.parameters) or 'none'}. "
                    f"Hand over a function that does, e.g. lambda {name}: MyEnv({name}={name})"
                )


def _call_with_specs(build: Any, specs: Iterable[Any], arguments: Mapping[str, Any]) -> Any:
    for spec in specs:  # of ids that this process does not know
        importlib.import_module("gymnasium").registry.setdefault(spec.id, spec)
    try:
        return build(**arguments)
    except Exception as error:
        gymnasium = sys.modules.get("gymnasium")
        unknown = gymnasium is not None and isinstance(error, gymnasium.error.UnregisteredEnv)
        # The user's script may register the id where it says nothing of that to this process.
        if not unknown or not processes.import_main():
            raise
    return build(**arguments)


def recipe_of_callable(build: Any, origin: str, to_source: str, *, takes_arguments: bool) -> Recipe:
    """Pack a callable.

    :raises NotCopyableError: it holds what cannot be pickled
    """
    loaded = (build, record.named_specs(build))
    # What an instance was made by is unpickled each time too: copies do not share what they are made of.
    reload_each_time = not takes_arguments or any(map(walk.is_layer, record.referenced_values(build)))
    parameters = _parameters(build) if takes_arguments else ()
    try:
        packed = _pickle.dumps(loaded)
    except Exception as error:
        found = walk.fingerprint(build, code=False)
        path = compare.unpicklable(found)
        name = f"{path} ({walk.full_name(type(found.objects[path]))}): " if path else ""
        raise NotCopyableError(
            f"{to_source} cannot be pickled for a worker: {name}{str(error) or type(error).__name__}. Make that inside "
            "of the function that builds the environment"
        ) from error
    return Recipe(
        origin, packed, to_source, takes_arguments, parameters, reload_each_time, None if reload_each_time else loaded
    )


def _parameters(build: Any) -> tuple[str, ...]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # built in
        return ("**unknown",)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in found if one.kind not in positional
    )


def _layer_with_attribute(environment: Any, name: str, value: Any) -> Any:
    """Find the outermost layer that has an attribute.

    :raises InvalidArgumentError: there is none
    """
    for layer in walk.layers(environment):
        if name in walk.attributes(layer) or any(name in vars(base) for base in type(layer).__mro__):
            return layer
    names = sorted({known for layer in walk.layers(environment) for known in walk.attributes(layer)})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    raise InvalidArgumentError(
        f"overrides: no layer of {type(environment).__name__} has the attribute {name}={value!r}; there are "
        f"{', '.join(near)}. {_CONSTRUCTOR_ADVICE}"
    )


def _set_overrides(environment: Any, overrides: Mapping[str, Any]) -> None:
    """Set attributes, each on the outermost layer that has it.

    :raises InvalidArgumentError: no layer has such an attribute, or it does not keep the value
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
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which keeps {kept!r}. {_CONSTRUCTOR_ADVICE}"
            )


_CONSTRUCTOR_ADVICE = (
    "What only the constructor takes needs the constructor: hand over the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool((one == other) if not hasattr(one, "shape") else (one == other).all())
    except (TypeError, ValueError):
        return False
