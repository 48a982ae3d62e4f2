"""``EnvFactory``: a picklable function that builds an environment."""

from __future__ import annotations

import dataclasses
import numbers
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rl_ext_core import _pickle
from rl_ext_core._system import process_identity
from rl_ext_core.devices import Decision, resolve
from rl_ext_core.devices.decision import apply_in_worker
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import record, streams, walk
from rl_ext_core.factory.changes import Examination
from rl_ext_core.factory.recipe import Recipe

if TYPE_CHECKING:
    import uuid

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
    :ivar creator_process: Process that created the factories. Its own random generators are never reseeded.
    :ivar attempt: How often the worker was started before.
    """

    index: int
    entropy: int | None
    overrides: Mapping[str, Any]
    decision: Decision | None
    creator_process: uuid.UUID
    attempt: int = 0


class EnvFactory(Generic[_Env]):
    """Picklable function without arguments that builds an environment.

    Created by :func:`as_factory`.

    Pass factories wherever functions that build environments are expected: SB3's ``SubprocVecEnv``, gymnasium's
    ``AsyncVectorEnv``, TorchRL's collectors. Reset a copy of an instance before its first step. Its random generators
    are reseeded, so each copy draws differently.

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
            factory._worker = _Worker(index, entropy, own, decision, process_identity())
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
            if worker.decision is not None:
                apply_in_worker(worker.decision, is_creator=worker.creator_process == process_identity())
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
    factory: EnvFactory[Any] = EnvFactory.__new__(EnvFactory)
    factory.__dict__.update(pickle.loads(packed))
    return factory


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
