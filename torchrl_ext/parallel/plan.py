"""Preparation of the workers of a ``ParallelEnv``: sources, specs, seeds and options."""

from __future__ import annotations

import contextlib
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
from torchrl.envs import GymEnv as UpstreamGymEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper
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
    is_plain,
    limit_threads,
    read_unless_plain,
)
from torchrl_ext._compat import has_wrapper
from torchrl_ext.factories import PRELOAD, adapt, read_metadata
from torchrl_ext.parallel.leaves import Leaves
from torchrl_ext.parallel.worker_env import TensorDictEnv, seed_if_possible

if has_wrapper():
    from torchrl_ext.gym import GymEnv, GymWrapper
else:  # TorchRL steps all environments in the workers
    from torchrl.envs import GymEnv, GymWrapper  # type: ignore[no-redef]

__all__ = ["GymSource", "GymWrapper", "WorkerPlan"]

_log = logging.getLogger("torchrl_ext")
_WRAPPERS = (GymWrapper, GymEnv, UpstreamGymWrapper, UpstreamGymEnv)  # subclasses may override methods


@dataclasses.dataclass(frozen=True)
class GymSource:
    """Gymnasium environment that workers step without TorchRL.

    :ivar spaces: its observation space and action space
    :ivar options: arguments of ``GymWrapper`` for the parent process
    :ivar from_pixels: whether observations without keys are pixels
    :ivar frame_skip: number of steps per action, which workers take
    """

    spaces: tuple[Any, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    from_pixels: bool = False
    frame_skip: int = 1


def describe(environment: Any) -> Any:
    """Return the :class:`GymSource` of an environment, or the metadata of one that needs TorchRL in the worker."""
    if is_plain(environment):
        return GymSource((environment.observation_space, environment.action_space))
    if (wrapped := _wrapped_env(environment)) is None:
        return read_metadata(adapt(environment))
    options = {name: value for name, value in environment.__dict__.get("_options", {}).items() if name != "env_type"}
    options.pop("trust_env_type", None)
    options |= {"device": environment.device, "categorical_action_encoding": environment._categorical_action_encoding}
    spaces = wrapped.observation_space, wrapped.action_space
    return GymSource(spaces, options, environment.from_pixels, environment.wrapper_frame_skip)


def _wrapped_env(environment: Any) -> Any:
    """Return the plain gymnasium environment in a wrapper of TorchRL; None if the wrapper or its options need torch."""
    own = getattr(environment, "__dict__", {})
    if type(environment) not in _WRAPPERS or environment.info_dict_reader or environment.batch_size:
        return None
    framework = own.get("_options", {}).get("env_type", "auto"), own.get("_detected_env_type")
    return environment._env if is_plain(environment._env) and not {"torch", "jax"} & {*framework} else None


def to_worker_env(environment: Any) -> Any:
    """Return the gymnasium environment that a worker steps."""
    if (wrapped := _wrapped_env(environment)) is None:
        return to_tensordict_env(environment)
    skip = environment.wrapper_frame_skip
    return wrapped if skip == 1 else FrameSkip(wrapped, skip)


def to_tensordict_env(environment: Any) -> TensorDictEnv:
    """Return an environment of TorchRL as the gymnasium environment that a worker steps."""
    return TensorDictEnv(adapt(environment))


def seed_adapted(environment: Any, seed: int | None) -> Any:
    """Return an environment of TorchRL, after seeding it."""
    environment = adapt(environment)
    if seed is not None:
        with contextlib.suppress(NotImplementedError):
            environment.set_seed(seed)
    return environment


_adapt_source = functools.partial(adapt_unless_plain, adapt=pickle.dumps(to_worker_env))
_read_source = functools.partial(read_unless_plain, read=pickle.dumps(describe))


class WorkerPlan:
    """Conversion of the arguments of ``ParallelEnv`` to factories and options of a pool.

    :param source: an environment, or anything that builds one, or a list of these, one per worker
    :param num_workers: number of workers
    :param kwargs: arguments of ``source``, for all workers or per worker
    :param num_threads: number of torch threads in a worker
    :param is_serial: whether the environments are for a ``SerialEnv``
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
        is_serial: bool = False,
        **options: Any,
    ) -> None:
        check_recorder(options.get("recorder", False))
        self.start_method, self.num_threads, self._options = start_method, num_threads, options
        self.kwargs = _per_worker(kwargs, num_workers)
        self._sources = list(source) if isinstance(source, (list, tuple)) else [source] * num_workers
        self._bind_options = {"seed": seed, "devices": devices}
        self._overrides, self._verify = overrides, verify
        self._metadata: dict[int, Any] = {}  # of the environments of sources, by the source's id
        self._private_bytes: list[int | None] = []
        self.factories: list[EnvFactory[Any]] = []
        self.is_single_source = len(set(map(id, self._sources))) == 1
        self.source: Any = None if is_serial or not has_wrapper() else self._prepare_gymnasium()
        if self.source is None:
            self.source = self._prepare_tensordicts()
            Leaves.require_equal(self.source)
            last = functools.partial(seed_adapted, seed=seed) if is_serial else to_tensordict_env
            self.factories = [factory.then(last, preload=PRELOAD) for factory in self.factories]
        self.seeds = _worker_seeds(seed, num_workers)
        del self._sources, self._overrides, self._metadata  # copies of the plan do not need them

    def _prepare_gymnasium(self) -> GymSource | None:
        """Make factories of gymnasium environments; return None if the sources need TorchRL in the workers."""
        if any(_is_instance(item) and not self._is_plain_instance(item) for item in self._sources):
            return None
        found: list[Any] = []
        for item, factory, index in self._bind(self._make_gym_factory):
            instance = item.instance if isinstance(item, EnvFactory) else item
            known: Any = describe(instance) if self._is_plain_instance(instance) else None
            if known is None and isinstance(item, EnvFactory) and item.examination is not None:
                known = item.examination.read
            if known is None or factory.overrides or self.kwargs[index] or factory.decision is not None:
                fresh = self._examine(factory, index, _read_source)
                fresh = GymSource(fresh) if isinstance(fresh, tuple) else fresh
                is_same = isinstance(known, GymSource) and isinstance(fresh, GymSource)
                known = dataclasses.replace(known, spaces=fresh.spaces) if is_same else fresh
            if not isinstance(known, GymSource):
                self._metadata[id(item)] = known
            found.append(known)
        if not all(isinstance(entry, GymSource) and entry == found[0] for entry in found):
            return None
        self.factories = [factory.then(_adapt_source) for factory in self.factories]
        return found[0]

    def _prepare_tensordicts(self) -> list[Any]:
        """Make factories of environments of TorchRL; return the metadata of each worker's environment."""
        for item, factory, index in self._bind(self._make_torchrl_factory):
            if id(item) not in self._metadata or factory.overrides or self.kwargs[index]:
                self._metadata[id(item)] = self._examine(factory, index, _read_metadata)
        return [self._metadata[id(item)] for item in self._sources]

    def _bind(self, make: Callable[[Any], EnvFactory[Any]]) -> list[tuple[Any, EnvFactory[Any], int]]:
        """Set the factories of the workers; return each source, with factory and number of its first worker."""
        made = {}
        for item in {id(item): item for item in self._sources}.values():
            own = _overrides_of(item, self._sources, self._overrides)
            factory = make(item)
            made[id(item)] = factory.for_workers(len(self._sources), overrides=own, **self._bind_options)
            if factory.examination is not None:
                self._private_bytes.append(factory.examination.private_bytes)
        self.factories = [made[id(item)][index] for index, item in enumerate(self._sources)]
        firsts = {id(item): index for index, item in reversed(list(enumerate(self._sources)))}
        return [(self._sources[index], self.factories[index], index) for index in sorted(firsts.values())]

    def _make_gym_factory(self, item: Any) -> EnvFactory[Any]:
        wrapped = _wrapped_env(item) if isinstance(item, EnvBase) else None
        if wrapped is None:
            return convert(item, **self._convert_options)
        factory, skip = convert(wrapped, **self._convert_options), item.wrapper_frame_skip
        return factory if skip == 1 else factory.then(functools.partial(FrameSkip, frames=skip))

    def _make_torchrl_factory(self, item: Any) -> EnvFactory[Any]:
        factory = convert(item, adapt=adapt, preload=PRELOAD, read=read_metadata, **self._convert_options)
        if factory.examination is not None and isinstance(factory.examination.read, EnvMetaData):
            self._metadata.setdefault(id(item), factory.examination.read)
        return factory

    @property
    def _convert_options(self) -> dict[str, Any]:
        timeout = self._options.get("start_timeout")
        return {"verify": self._verify, "start_method": self.start_method, "timeout": timeout}

    def _is_plain_instance(self, item: Any) -> bool:
        """Return whether workers can step copies of this instance without TorchRL."""
        if isinstance(item, EnvBase):
            overridden = {name for entry in self._overrides or () for name in entry}
            return _wrapped_env(item) is not None and not overridden & {*vars(item)}
        return is_plain(item)

    def _examine(self, factory: EnvFactory[Any], index: int, read: Callable[[Any], Any]) -> Any:
        """Build the environment of a worker in a temporary process, and return what a function reads of it."""
        found = examine_factory(
            factory,
            read=read,
            overrides=self.kwargs[index],
            start_method=self.start_method,
            # Set as in the workers, because environments may read the number of threads when they are built.
            begin=None if read is _read_source else functools.partial(torch.set_num_threads, self.num_threads),
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
        found: tuple[Any, Any] = (
            self.source.spaces if self.is_gymnasium else Leaves.from_metadata(self.source[0]).spaces
        )
        return found

    @property
    def records_episodes(self) -> bool:
        """Whether the workers record the episodes of gymnasium environments."""
        return self._options.get("recorder", False) is not False

    def select(self, workers: Sequence[int]) -> WorkerPlan:
        """Return the plan of some workers."""
        other: WorkerPlan = WorkerPlan.__new__(WorkerPlan)
        other.__dict__.update(vars(self), _private_bytes=[])
        other.factories = [self.factories[number] for number in workers]
        other.kwargs = [self.kwargs[number] for number in workers]
        if not self.is_gymnasium:
            other.source = [self.source[number] for number in workers]
        return other

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
            worker_seeds=self.seeds,
            initializer=None if self.is_gymnasium else functools.partial(torch.set_num_threads, self.num_threads),
            **options,
        )

    def configure(self, **options: Any) -> None:
        """Change options of the next start."""
        self.start_method = options.pop("start_method", self.start_method)
        self._options = {**self._options, **options}

    def check_spaces(self, found: tuple[Any, Any]) -> None:
        """Raise an error if the environments in the workers have other spaces than the parent process expects."""
        for name, one, other in zip(("observation_space", "action_space"), self.spaces, found, strict=True):
            if one != other:
                raise InvalidArgumentError(
                    f"the environments in the workers have {name}={other}, and the first one that was built had {one}: "
                    "expected the same. If overrides change spaces or specs, pass one function per worker: "
                    "ParallelEnv(2, [make_small, make_large])"
                )

    def set_up_environments(self, pool: Any) -> None:
        """Limit the threads of new environments, and seed them."""
        if self.is_gymnasium:
            pool.call(range(len(self.factories)), "apply", (limit_threads, self.num_threads))
        if self.seeds is None:
            return
        if self.is_gymnasium:
            pool.begin_reset([(seed, None) for seed in self.seeds])
            pool.wait(raise_failures=True)
        else:
            pool.begin_call(
                range(len(self.factories)), "apply", [(seed_if_possible, seed, False) for seed in self.seeds]
            )
            pool.results()

    def warn_about_memory(self) -> None:
        """Warn once if the workers will exceed the memory."""
        sizes = [size for size in self._private_bytes if size is not None]
        self._private_bytes = []
        if sentence := resources.memory_warning(max(sizes, default=0), len(self.factories)):
            _log.warning("%s", sentence)


def _is_instance(item: Any) -> bool:
    """Return whether a source is an environment, not a function, class, factory or id that builds one."""
    return not isinstance(item, type) and all(callable(getattr(item, name, None)) for name in ("reset", "step"))


def _read_metadata(environment: Any) -> EnvMetaData:
    return read_metadata(adapt(environment))


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


def _worker_seeds(seed: int | None, num_workers: int) -> list[int] | None:
    """Return the seeds of the workers, as TorchRL's ``set_seed`` derives them."""
    if seed is None:
        return None
    seeds = [int(seed)]
    while len(seeds) < num_workers:
        seeds.append(seed_generator(seeds[-1]))
    return seeds
