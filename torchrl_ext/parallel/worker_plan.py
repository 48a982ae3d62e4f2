"""Preparation of a ``ParallelEnv``: factories, seeds and metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchrl._utils import seed_generator
from torchrl.envs import EnvBase
from torchrl.envs.common import EnvMetaData

from rl_ext_core import processes, resources
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, StorageError, WorkerError
from rl_ext_core.factory.convert import examine_factory
from rl_ext_core.factory.record import merge_modules
from rl_ext_core.recording.capsule import RecordedFailure, record_crash
from rl_ext_core.recording.shared_log import LOG_BYTES, read_shared_log
from rl_ext_core.vector.channel import SharedMemory
from rl_ext_core.vector.environments import check_recorder
from torchrl_ext.factories import make_factory, read_metadata
from torchrl_ext.parallel.episodes import find_gymnasium_env, start_recorder

if TYPE_CHECKING:
    from rl_ext_core.factory import EnvFactory
    from rl_ext_core.factory.changes import Examination
    from rl_ext_core.processes.context import WorkerContext

__all__ = ["WorkerEnvBuilder", "WorkerPlan"]

_log = logging.getLogger("torchrl_ext")

Schema = tuple[tuple[Any, ...], ...]


class WorkerPlan:
    """Conversion of the arguments of ``ParallelEnv`` to those of TorchRL's class.

    :param source: an environment, or anything that builds one, or a list of these, one per worker
    :param num_workers: number of workers
    :param num_threads: number of torch threads in a worker
    :param kwargs: arguments of ``source``, for all workers or per worker
    :param recorder: folder for records of crashes; True for the working directory; False records no episodes
    :ivar factories: factory of each worker
    :ivar seeds: seed of each worker; None: unseeded
    :ivar functions: one function for all workers, or a list of functions if their sources differ
    :ivar kwargs: per worker, the arguments that TorchRL passes to its function
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
        timeout: float | None = None,
        num_threads: int | None = None,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        recorder: bool | str | os.PathLike[str] = False,
    ) -> None:
        check_recorder(recorder)
        self.recorder, self._logs = recorder, list[Any]()
        sources = list(source) if isinstance(source, (list, tuple)) else [source] * num_workers
        factories: dict[int, list[EnvFactory[Any]]] = {}
        for item in sources:
            if id(item) not in factories:
                factory = make_factory(item, verify=verify, start_method=start_method, timeout=timeout)
                own = _overrides_of(item, sources, overrides)
                factories[id(item)] = factory.for_workers(num_workers, seed=seed, overrides=own, devices=devices)
        self.factories = [factories[id(item)][index] for index, item in enumerate(sources)]
        self.seeds = _worker_seeds(seed, num_workers)
        alike = {key: WorkerEnvBuilder() for key in factories}
        self._envs = [alike[id(item)] for item in sources]
        self.functions: Any = self._envs[0] if len(alike) == 1 else self._envs
        self.kwargs = _per_worker(kwargs, self.factories, self.seeds)
        # Set as in TorchRL's workers, because environments may read the number of threads when they are built.
        begin = None if num_threads is None else functools.partial(torch.set_num_threads, num_threads)
        self._examine_factory = functools.partial(
            examine_factory, read=read_metadata, start_method=start_method, begin=begin, timeout=timeout
        )
        self._examinations: list[Examination] = []

    def make_context(self, method: str | None, on_start: Callable[[Any], None]) -> WorkerContext:
        """Make the context that starts the workers, with the variables of their devices."""
        return processes.get_context(
            method,
            preload=merge_modules(*(factory.preload for factory in self.factories)),
            environs=[{} if factory.decision is None else factory.decision.variables for factory in self.factories],
            on_start=on_start,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_logs": []}  # a copy starts its own workers

    def open_logs(self) -> None:
        """Make the shared memory in which the workers log their episodes, before they start."""
        if self.recorder is False:
            return
        with contextlib.suppress(StorageError):  # a limit of file sizes: nothing is recorded
            memory = SharedMemory(LOG_BYTES * len(self.factories))
            self._logs = [memory.map(LOG_BYTES, LOG_BYTES * index) for index in range(len(self.factories))]
            for envs in self._envs:
                envs.logs = memory

    def close_logs(self) -> None:
        """Release the shared memory of the logs, after the workers have started."""
        for envs in self._envs:
            envs.logs = None

    def record_crash(self, error: WorkerError, step_timeout: float | None) -> None:
        """Write a capsule of a failure, and add its path to the error text, if the environment caused it."""
        worker: Any = error.worker
        log = read_shared_log(self._logs[worker]) if self._logs and worker is not None else None
        # Otherwise the failure is outside of the environment, for example in a transform.
        if log is None or not (log.is_interrupted or isinstance(error.__cause__, EnvironmentOutputError)):
            return
        overrides = {name: value for name, value in self.kwargs[worker].items() if name != "worker"}
        factory: Any = self.factories[worker].then(find_gymnasium_env)
        text = record_crash(
            self.recorder,
            factory=functools.partial(factory, **overrides) if overrides else factory,
            log=log,
            failure=dataclasses.replace(RecordedFailure.from_error(error), phase=log.calls[-1][0]),
            environment=worker,
            step_timeout=step_timeout,
        )
        error.args = (f"{error}\n{text}",)

    def warn_about_memory(self) -> None:
        """Warn once if the workers will exceed the memory."""
        sizes = [found.private_bytes for found in self._examinations if found.private_bytes is not None]
        self._examinations = []
        if sentence := resources.memory_warning(max(sizes, default=0), len(self.factories)):
            _log.warning("%s", sentence)

    def metadata(self) -> list[EnvMetaData]:
        """Read the metadata of each worker's environment, without building one in this process."""
        known: dict[int, Examination] = {}
        for index, envs in enumerate(self._envs):
            if id(envs) not in known:
                known[id(envs)] = found = self._examine(index)
                envs.schema = _schema(found.read)
        self._examinations = [known[id(envs)] for envs in self._envs]
        return [found.read.clone() for found in self._examinations]

    def _examine(self, index: int) -> Examination:
        """Return the metadata of a worker's environment; reuse what its factory has read."""
        factory, overrides = self.factories[index], dict(self.kwargs[index])
        del overrides["worker"]
        known, its_own = factory.examination, {**factory.overrides, **overrides}
        if known is not None and isinstance(known.read, EnvMetaData) and not its_own and factory.decision is None:
            return known
        return self._examine_factory(factory, overrides=overrides)


def _overrides_of(item: Any, sources: list[Any], overrides: Any) -> Any:
    """Return overrides in which entries of workers with another source are empty."""
    entries = overrides if isinstance(overrides, Sequence) else ()
    if len(entries) != len(sources) or not all(isinstance(entry, Mapping) for entry in entries):
        return overrides  # None, or invalid, which for_workers() reports
    return [entry if source is item else {} for source, entry in zip(sources, entries, strict=True)]


def _per_worker(
    kwargs: Any, factories: Sequence[EnvFactory[EnvBase]], seeds: Sequence[int] | None
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each worker's environment, with the worker's own data as ``worker``."""
    number = len(factories)
    entries = [kwargs or {}] * number if kwargs is None or isinstance(kwargs, Mapping) else list(kwargs)
    if len(entries) != number:
        raise InvalidArgumentError(
            f"create_env_kwargs has length {len(entries)} for num_workers={number}; expected one entry per worker"
        )
    own = [
        _WorkerSource(index, factory, None if seeds is None else seeds[index])
        for index, factory in enumerate(factories)
    ]
    return [{**entry, "worker": source} for entry, source in zip(entries, own, strict=True)]


@dataclasses.dataclass(frozen=True)
class _WorkerSource:
    """Data of one worker. Each worker receives only its own.

    :ivar index: index of the worker
    :ivar factory: factory of its environment
    :ivar seed: seed for ``set_seed``; None: unseeded
    """

    index: int
    factory: EnvFactory[EnvBase]
    seed: int | None


class WorkerEnvBuilder:
    """Function that builds the environment of each worker.

    TorchRL requires the same function for equal environments. What differs is in the keyword argument ``worker``.

    :ivar schema: keys, shapes and dtypes of the buffers; None: not checked
    :ivar logs: memory of the workers' logs while they start; None: episodes are not recorded
    """

    def __init__(self) -> None:
        self.schema: Schema | None = None
        self.logs: SharedMemory | None = None

    def __call__(self, *, worker: _WorkerSource, **overrides: Any) -> EnvBase:
        """Build the environment of a worker.

        :param worker: index, factory and seed of the worker
        :param overrides: overrides in addition to those of the factory
        :raises InvalidArgumentError: If the environment's specs differ from those of the buffers.
        """
        index, seed = worker.index, worker.seed
        processes.set_status(phase="building the environment", **({} if seed is None else {"seed": seed}))
        try:
            environment = worker.factory(**overrides)
            processes.on_abnormal_exit(functools.partial(_close_if_alive, weakref.ref(environment)))
            # Read here too, because errors would be lost in TorchRL's worker.
            found = read_metadata(environment)
            if self.schema is not None:
                _check_schema(self.schema, _schema(found), index)
            if self.logs is not None:
                start_recorder(environment, index, self.logs.map(LOG_BYTES, LOG_BYTES * index))
            if seed is not None:
                # Some environments, such as Melting Pot's, have no seed. The process's generators are seeded anyway.
                with contextlib.suppress(NotImplementedError):
                    environment.set_seed(seed)
        except Exception as error:
            processes.abort_worker(error)
        processes.set_status(phase="")
        return environment


def _close_if_alive(reference: weakref.ref[EnvBase]) -> None:
    """Close the referenced environment, unless it has been garbage-collected."""
    environment = reference()
    if environment is not None:
        environment.close()


def _worker_seeds(seed: int | None, num_workers: int) -> list[int] | None:
    """Return the seeds of the workers, as TorchRL's ``set_seed`` derives them."""
    if seed is None:
        return None
    seeds = [int(seed)]
    while len(seeds) < num_workers:
        seeds.append(seed_generator(seeds[-1]))
    return seeds


def _schema(metadata: EnvMetaData) -> Schema:
    """Return the key, shape and dtype of each spec, which buffers depend on."""
    specs = metadata.specs.items(True, True)
    return tuple((key, tuple(spec.shape), str(getattr(spec, "dtype", None))) for key, spec in specs)


def _check_schema(expected: Schema, found: Schema, worker: int) -> None:
    """Compare the schema of the buffers with that of a worker's environment.

    :raises InvalidArgumentError: If they differ.
    """
    if expected == found:
        return
    lines = [f"{key} is {rest}" for key, *rest in found if (key, *rest) not in expected]
    missing = [f"no {key}" for key, *_ in expected if key not in {key for key, *_ in found}]
    raise InvalidArgumentError(
        f"the specs of worker {worker} differ from those of the buffers: {'; '.join([*lines, *missing])}. "
        "If overrides change specs, pass one function per worker: ParallelEnv(2, [make_small, make_large])"
    )
