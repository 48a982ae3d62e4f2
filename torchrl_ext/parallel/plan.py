"""Preparation of the workers of a ``ParallelEnv``: sources, specs, seeds and options."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrl._utils import seed_generator
from torchrl.envs import EnvBase
from torchrl.envs.common import EnvMetaData

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.convert import convert, examine_factory
from rl_ext_core.vector.environments import (
    FrameSkip,
    PoolOptions,
    adapt_unless_plain,
    check_recorder,
    limit_threads,
    read_unless_plain,
)
from torchrl_ext.factories import PRELOAD, adapt, read_metadata
from torchrl_ext.parallel.gym_source import GymSource, describe, find_gym_source, to_worker_env
from torchrl_ext.parallel.leaves import Leaves
from torchrl_ext.parallel.worker_env import TensorDictEnv, seed_if_possible

__all__ = ["WorkerPlan"]

_log = logging.getLogger("torchrl_ext")


def to_tensordict_env(environment: Any) -> TensorDictEnv:
    """Return an environment of TorchRL as the gymnasium environment that a worker steps."""
    return TensorDictEnv(adapt(environment))


def read_adapted(environment: Any) -> EnvMetaData:
    """Return the metadata of an environment, after wrapping it for TorchRL."""
    return read_metadata(adapt(environment))


_read_source = functools.partial(read_unless_plain, read=pickle.dumps(describe))


class WorkerPlan:
    """Conversion of the arguments of ``ParallelEnv`` to factories and options of a pool.

    :param source: an environment, or anything that builds one, or a list of these, one per worker
    :param num_workers: number of workers
    :param kwargs: arguments of ``source``, for all workers or per worker
    :param num_threads: number of torch threads in a worker
    :param options: ``start_timeout``, ``step_timeout``, ``close_timeout`` and ``recorder`` of the pool
    :ivar factories: factory of each worker
    :ivar kwargs: per worker, arguments or attributes of its environment
    :ivar seeds: seed of each worker; None: unseeded
    :ivar source: what the workers step: a :class:`GymSource`, or the metadata of each worker's environment
    """

    def __init__(
        self,
        source: Any,
        num_workers: int,
        *,
        seed: int | None = None,
        overrides: Sequence[Mapping[str, Any]] | None = None,
        devices: Any = None,
        verify: bool = True,
        start_method: str | None = None,
        num_threads: int = 1,
        kwargs: Any = None,
        **options: Any,
    ) -> None:
        check_recorder(options.get("recorder", False))
        self.start_method, self.num_threads, self._options = start_method, num_threads, options
        self.kwargs = _per_worker(kwargs, num_workers)
        self._private_bytes: list[int | None] = []
        sources = list(source) if isinstance(source, (list, tuple)) else [source] * num_workers
        items = list({id(item): item for item in sources}.values())
        given: Any = overrides or ()  # other values are refused later
        overridden = {name for entry in given if isinstance(entry, Mapping) for name in entry}
        looks = [_look_at(item, overridden) for item in items]
        unwrap = looks[0][1] is not None and all(found == looks[0][1] for _, found in looks)
        factories, described = dict[int, EnvFactory[Any]](), dict[int, Any]()
        for item, (read, found) in zip(items, looks, strict=True):
            factory = self._convert(item, found, unwrap, verify, read)
            if found is None and factory.examination is not None:
                found = factory.examination.read
            self._private_bytes.append(None if factory.examination is None else factory.examination.private_bytes)
            numbers = [number for number, other in enumerate(sources) if other is item]
            own, index = _overrides_of(item, sources, overrides), numbers[0]
            bound = factory.for_workers(num_workers, overrides=own, seed=seed, devices=devices)
            factories |= {number: bound[number] for number in numbers}
            if found is None or bound[index].overrides or self.kwargs[index] or bound[index].decision is not None:
                fresh = self._examine(bound[index], index, read)
                fresh = GymSource(fresh) if isinstance(fresh, tuple) else fresh
                is_same = isinstance(found, GymSource) and isinstance(fresh, GymSource)
                found = dataclasses.replace(found, spaces=fresh.spaces) if is_same else fresh
            described |= dict.fromkeys(numbers, found)
        self.seeds = _worker_seeds(seed, num_workers)  # for_workers() has checked the seed
        first = described[0]
        if isinstance(first, GymSource) and all(entry == first for entry in described.values()):
            self.source: Any = first
            unwrapped = pickle.dumps(functools.partial(to_worker_env, source=first))
            last = functools.partial(adapt_unless_plain, adapt=unwrapped)
            self.factories = [factories[index].then(last) for index in range(num_workers)]
            return
        if unwrap:
            raise InvalidArgumentError(
                "overrides give environments different spaces: expected the same in all workers. Use "
                f"torchrl.envs.ParallelEnv({num_workers}, [...])"
            )
        for index, entry in described.items():
            if isinstance(entry, GymSource):
                described[index] = self._examine(factories[index], index, read_adapted)
        self.source = [described[index] for index in range(num_workers)]
        leaves, *others = (Leaves.from_metadata(one) for one in {id(one): one for one in self.source}.values())
        if different := {name for other in others for name in leaves.names ^ other.names}:
            raise InvalidArgumentError(
                f"the specs of the environments differ in {', '.join(sorted(different))}: expected the same keys, "
                f"shapes and dtypes in all workers. Use torchrl.envs.ParallelEnv({num_workers}, [...])"
            )
        self.factories = [factories[index].then(to_tensordict_env, preload=PRELOAD) for index in range(num_workers)]

    def _convert(self, item: Any, found: Any, unwrap: bool, verify: bool, read: Any) -> EnvFactory[Any]:
        """Return the factory of an environment, or of the gymnasium environment in it."""
        options: dict[str, Any] = {"verify": verify, "start_method": self.start_method}
        options["timeout"] = self._options.get("start_timeout")
        if unwrap and isinstance(item, EnvBase):
            skip, factory = item.wrapper_frame_skip, convert(item._env, **options)
            return factory if skip == 1 else factory.then(functools.partial(FrameSkip, frames=skip))
        return convert(item, preload=() if isinstance(found, GymSource) else PRELOAD, read=read, **options)

    def _examine(self, factory: EnvFactory[Any], index: int, read: Callable[[Any], Any]) -> Any:
        """Build the environment of a worker in a temporary process, and return what a function reads of it."""
        found = examine_factory(
            factory,
            read=read,
            overrides=self.kwargs[index],
            start_method=self.start_method,
            # Set as in the workers, because environments may read the number of threads when they are built.
            begin=functools.partial(limit_threads, None, self.num_threads),
            timeout=self._options.get("start_timeout"),
        )
        self._private_bytes.append(found.private_bytes)
        return found.read

    @property
    def is_gymnasium(self) -> bool:
        """Whether the workers step gymnasium environments, without TorchRL."""
        return isinstance(self.source, GymSource)

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation space and action space of the environments in the pool."""
        found: Any = self.source if self.is_gymnasium else Leaves.from_metadata(self.source[0])
        spaces: tuple[Any, Any] = found.spaces
        return spaces

    @property
    def records_episodes(self) -> bool:
        """Whether the workers record the episodes of gymnasium environments."""
        return self._options.get("recorder", False) is not False

    # -- start

    def bind_factories(self) -> list[EnvFactory[Any]]:
        """Return the factories with the present keyword arguments of each worker."""
        number = len(self.factories)
        return [
            factory.for_workers(number, overrides=[kwargs] * number)[index] if kwargs else factory
            for index, (factory, kwargs) in enumerate(zip(self.factories, self.kwargs, strict=True))
        ]

    def options(self, step_timeout: float) -> PoolOptions:
        """Return the options of the pool.

        :param step_timeout: time limit of a call if the user has set none
        """
        options = {name: value for name, value in self._options.items() if name != "close_timeout"}
        limit = self._options.get("close_timeout")
        options["step_timeout"] = options.get("step_timeout") or step_timeout
        return PoolOptions(
            start_method=self.start_method,
            close_timeout=None if limit is None or math.isinf(limit) else limit,
            label="worker",
            workers_argument="ParallelEnv({}, ...)",
            close_argument="shutdown_timeout",
            worker_seeds=self.seeds,
            initializer=None if self.is_gymnasium else functools.partial(torch.set_num_threads, self.num_threads),
            **options,
        )

    def check_spaces(self, found: tuple[Any, Any]) -> None:
        """Raise an error if the environments in the workers have other spaces than the parent process expects."""
        if found != self.spaces:
            raise InvalidArgumentError(
                f"the environments in the workers have the spaces {found}, and the first one that was built had "
                f"{self.spaces}: expected the same. If overrides change spaces or specs, pass one function per worker: "
                "ParallelEnv(2, [make_small, make_large])"
            )

    def set_up_environments(self, pool: Any) -> None:
        """Limit the threads of new environments, and seed them."""
        workers = range(len(self.factories))
        if self.is_gymnasium:
            pool.call(workers, "apply", (limit_threads, self.num_threads))
            if self.seeds is not None:
                pool.begin_reset([(seed, None) for seed in self.seeds])
                pool.wait(raise_failures=True)
        elif self.seeds is not None:
            pool.begin_call(workers, "apply", [(seed_if_possible, seed, False) for seed in self.seeds])
            pool.results()

    def warn_about_memory(self) -> None:
        """Warn once if the workers will exceed the memory."""
        sizes = [size for size in self._private_bytes if size is not None]
        self._private_bytes = []
        if sentence := resources.memory_warning(max(sizes, default=0), len(self.factories)):
            _log.warning("%s", sentence)


def _look_at(item: Any, overridden: set[str]) -> tuple[Callable[[Any], Any], Any]:
    """Return the function that describes a source, and the description of an instance that needs no process for it."""
    item = item.instance if isinstance(item, EnvFactory) else item
    if isinstance(item, EnvBase) and overridden & {*vars(item)}:  # overrides of a wrapper: TorchRL has to step it
        return read_adapted, None
    is_instance = not isinstance(item, type) and all(callable(getattr(item, name, None)) for name in ("reset", "step"))
    return _read_source, find_gym_source(item) if is_instance else None


def _overrides_of(item: Any, sources: list[Any], overrides: Any) -> Any:
    """Return overrides in which entries of workers with another source are empty."""
    entries = overrides if isinstance(overrides, Sequence) else ()
    if len(entries) != len(sources) or not all(isinstance(entry, Mapping) for entry in entries):
        return overrides  # None, or invalid, which for_workers() reports
    return [entry if source is item else {} for source, entry in zip(sources, entries, strict=True)]


def _per_worker(kwargs: Any, number: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each worker's environment."""
    entries = [kwargs or {}] * number if kwargs is None or isinstance(kwargs, Mapping) else list(kwargs)
    if len(entries) != number:
        raise InvalidArgumentError(
            f"create_env_kwargs has length {len(entries)} for num_workers={number}; expected one entry per worker"
        )
    return [dict(entry) for entry in entries]


def _worker_seeds(seed: int | None, count: int) -> list[int] | None:
    """Return the seeds of workers, as TorchRL's ``set_seed`` derives them."""
    if seed is None:
        return None
    seeds = [int(seed)]
    while len(seeds) < count:
        seeds.append(seed_generator(seeds[-1]))
    return seeds
