"""Preparation of the workers of a ``ParallelEnv``: sources, specs, seeds and options."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchrl._utils
from torchrl._utils import seed_generator
from torchrl.envs import EnvBase
from torchrl.envs import GymWrapper as UpstreamGymWrapper

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.factory import convert, examine_factory
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.environments import (
    FrameSkip,
    PoolOptions,
    adapt_unless_plain,
    limit_threads,
    read_unless_plain,
)
from rl_ext_core.vector.pool import Pool
from torchrl_ext.factories import PRELOAD, adapt
from torchrl_ext.parallel.gym_source import GymSource, describe, find_gym_source, to_worker_env
from torchrl_ext.parallel.leaves import Leaves
from torchrl_ext.parallel.worker_env import TensorDictEnv, seed_if_possible, split_transforms

__all__ = ["WorkerPlan", "derive_seeds"]

_log = logging.getLogger("torchrl_ext")


def to_tensordict_env(environment: Any) -> TensorDictEnv:
    """Return an environment of TorchRL as the gymnasium environment that a worker steps."""
    return TensorDictEnv(adapt(environment))


_read_source = functools.partial(read_unless_plain, read=pickle.dumps(describe))


class WorkerPlan:
    """Conversion of the arguments of ``ParallelEnv`` to factories and options of a pool.

    :param source: an environment, or anything that builds one, or a list of these, one per worker
    :param num_workers: number of workers
    :param kwargs: arguments of ``source``, for all workers or per worker
    :param num_threads: number of torch threads in a worker
    :param options: options of the pool
    :ivar factories: factory of each worker
    :ivar seeds: seed of each worker; None: unseeded
    :ivar source: what the workers step: a :class:`GymSource`, or the metadata of an environment of TorchRL
    :ivar is_gymnasium: whether the workers step gymnasium environments, without TorchRL
    :ivar leaves: inputs and outputs of an environment of TorchRL
    :ivar spaces: observation space and action space of the environments in the pool
    """

    def __init__(
        self,
        source: Any,
        num_workers: int,
        options: PoolOptions,
        *,
        seed: int | None = None,
        overrides: Sequence[Mapping[str, Any]] | None = None,
        devices: Any = None,
        verify: bool = True,
        num_threads: int = 1,
        kwargs: Any = None,
    ) -> None:
        self.options, self.num_threads = options, num_threads
        self._private_bytes = 0  # of a worker, for a warning at the first start
        if kwargs is not None:
            pairs = zip(_per_worker(kwargs, num_workers), overrides or [{}] * num_workers, strict=True)
            overrides = [{**entry, **own} for entry, own in pairs]
        sources = list(source) if isinstance(source, (list, tuple)) else [source] * num_workers
        factories = dict[int, EnvFactory[Any]]()
        self.source: Any = None
        preload: Sequence[str] = PRELOAD
        for item in {id(item): item for item in sources}.values():
            found = find_gym_source(item.instance if isinstance(item, EnvFactory) else item)
            own = _overrides_of(item, sources, overrides)
            # Workers get the gymnasium environment inside, so that unpickling it does not import TorchRL.
            unwrap = found is not None and self.source in (None, found)
            factory = self._convert(item, found, unwrap, verify)
            bound = factory.for_workers(num_workers, overrides=own, seed=seed, devices=devices)
            _refuse_wrapper_options(bound)
            examination = factory.examination
            if examination is not None:
                self._private_bytes = max(self._private_bytes, examination.private_bytes or 0)
            if self.source is None:  # the workers compare the others with the first one
                if found is None and examination is not None and not bound[0].overrides:
                    found = examination.read
                if found is None or bound[0].decision is not None:  # which may conflict with imported renderers
                    read = self._examine(bound[0])
                    found = read if found is None else found
                if unwrap or isinstance(found, tuple):  # nothing in the workers imports TorchRL
                    preload = ()
                self.source = GymSource(found) if isinstance(found, tuple) else found
            factories |= {number: bound[number] for number, other in enumerate(sources) if other is item}
        self.is_gymnasium = isinstance(self.source, GymSource)
        last: Any = to_tensordict_env
        if self.is_gymnasium:
            unwrapped = pickle.dumps(functools.partial(to_worker_env, source=self.source))
            last = functools.partial(adapt_unless_plain, adapt=unwrapped)
        else:
            self.leaves = Leaves(self.source.specs, self.source.env_str.partition("(")[0])
        self.spaces: tuple[Any, Any] = (self.source if self.is_gymnasium else self.leaves).spaces
        # for_workers() has checked the seed
        self.seeds = None if seed is None else derive_seeds(int(seed), num_workers)
        self.factories = [factories[index].then(last, preload=preload) for index in range(num_workers)]

    def _convert(self, item: Any, found: Any, unwrap: bool, verify: bool) -> EnvFactory[Any]:
        """Return the factory of an environment, or of the gymnasium environment in it."""
        start = self.options
        options: dict[str, Any] = {"verify": verify, "start_method": start.start_method, "timeout": start.start_timeout}
        if unwrap and isinstance(item, EnvBase):
            skip, factory = item.wrapper_frame_skip, convert(item._env, **options)
            return factory if skip == 1 else factory.then(functools.partial(FrameSkip, frames=skip))
        return convert(item, preload=() if isinstance(found, GymSource) else PRELOAD, read=_read_source, **options)

    def _examine(self, factory: EnvFactory[Any]) -> Any:
        """Build the environment of a worker in a temporary process, and return its description."""
        found = examine_factory(
            factory,
            read=_read_source,
            start_method=self.options.start_method,
            # Else a second fork server would import TorchRL again, if the workers need it.
            preload=PRELOAD if any(name.startswith("torchrl") for name in factory.preload) else (),
            # Set as in the workers, because environments may read the number of threads when they are built.
            begin=functools.partial(limit_threads, None, self.num_threads),
            timeout=self.options.start_timeout,
        )
        self._private_bytes = max(self._private_bytes, found.private_bytes or 0)
        return found.read

    def start(self) -> Pool:
        """Start the workers, limit the threads of their environments, and seed them. Warn once if memory is short."""
        if sentence := resources.memory_warning(self._private_bytes, len(self.factories)):
            _log.warning("%s", sentence)
        self._private_bytes = 0
        workers, seeds = range(len(self.factories)), self.seeds
        options = dataclasses.replace(
            self.options,
            step_timeout=self.options.step_timeout or torchrl._utils.BATCHED_PIPE_TIMEOUT,
            spaces=self.spaces,
            worker_seeds=seeds,
            initializer=None if self.is_gymnasium else functools.partial(torch.set_num_threads, self.num_threads),
        )
        pool = Pool(self.factories, options, autoreset=Autoreset.DISABLED)
        try:
            if self.is_gymnasium:
                pool.call(workers, "apply", (limit_threads, self.num_threads))
            if seeds is not None and self.is_gymnasium:
                pool.begin_reset([(seed, None) for seed in seeds])
                pool.wait(raise_failures=True)
            elif seeds is not None:
                pool.begin_call(workers, "apply", [(seed_if_possible, seed, False) for seed in seeds])
                pool.results()
        except BaseException:
            pool.end()
            raise
        return pool


def _per_worker(kwargs: Any, number: int) -> list[Mapping[str, Any]]:
    """Return the arguments of each worker's environment."""
    entries = [kwargs] * number if isinstance(kwargs, Mapping) else list(kwargs)
    if len(entries) != number:
        raise InvalidArgumentError(
            f"create_env_kwargs has length {len(entries)} for num_workers={number}; expected one entry per worker"
        )
    return entries


def _overrides_of(item: Any, sources: list[Any], overrides: Any) -> Any:
    """Return overrides in which entries of workers with another source are empty."""
    entries = overrides if isinstance(overrides, Sequence) else ()
    if len(entries) != len(sources) or not all(isinstance(entry, Mapping) for entry in entries):
        return overrides  # None, or invalid, which for_workers() reports
    return [entry if source is item else {} for source, entry in zip(sources, entries, strict=True)]


def _refuse_wrapper_options(factories: Sequence[EnvFactory[Any]]) -> None:
    """Refuse overrides of options of TorchRL's wrapper in an instance, which has made its specs from them."""
    wrapper = split_transforms(factories[0].instance)[1]
    for factory in factories if isinstance(wrapper, UpstreamGymWrapper) else ():
        if refused := sorted(vars(wrapper).keys() & factory.overrides):
            raise InvalidArgumentError(
                f"overrides={dict(factory.overrides)!r} set {refused[0]} of {type(wrapper).__name__}: expected "
                "attributes of the environment in it. Use a function for each worker: "
                "ParallelEnv(2, [make_first, make_second])"
            )


def derive_seeds(seed: int | None, count: int, *, static: bool = False) -> list[Any]:
    """Return the seeds of environments, as TorchRL's ``set_seed`` derives them from each other."""
    seeds = [seed]
    while len(seeds) < count:
        seeds.append(seed if static or seed is None else seed_generator(seeds[-1]))
    return seeds
