"""What the workers of a ``ParallelEnv`` will build, and what has to be known of it before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchrl.envs.common import EnvMetaData

from rl_ext_core import processes
from rl_ext_core.devices import READ_AT_IMPORT
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory._sources import merged_modules
from rl_ext_core.factory.convert import examined
from torchrl_ext._advice import SpeedCheck, warn_of_memory
from torchrl_ext._metadata import metadata_of, schema
from torchrl_ext._workers import WorkerEnvs, chain
from torchrl_ext.factories import factory_of

if TYPE_CHECKING:
    from rl_ext_core.factory import EnvFactory
    from rl_ext_core.factory._examine import Examination
    from rl_ext_core.processes.contexts import WorkerContext

__all__ = ["Plan"]


class Plan:
    """Turns what users hand over into what TorchRL takes.

    :ivar factories: one per worker
    :ivar seeds: one per worker; None: none
    :ivar functions: a function for all workers, or a list if their environments differ in kind
    :ivar kwargs: per worker, what TorchRL passes to it
    """

    def __init__(
        self,
        source: Any,
        num_workers: int,
        *,
        seed: int | None,
        overrides: Sequence[Mapping[str, Any]] | None,
        devices: Any,
        verify: bool,
        start_method: str | None,
        timeout: float | None,
        num_threads: int | None,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    ) -> None:
        sources = list(source) if isinstance(source, (list, tuple)) else [source] * num_workers
        factories: dict[int, list[EnvFactory[Any]]] = {}
        for item in sources:
            if id(item) not in factories:
                factory = factory_of(item, verify=verify, start_method=start_method, timeout=timeout)
                factories[id(item)] = factory.for_workers(num_workers, seed=seed, overrides=overrides, devices=devices)
        self.factories = [factories[id(item)][index] for index, item in enumerate(sources)]
        self.seeds = chain(seed, num_workers)
        alike = {key: WorkerEnvs(own, self.seeds) for key, own in factories.items()}
        self._envs = [alike[id(item)] for item in sources]
        self.functions: Any = self._envs[0] if len(alike) == 1 else self._envs
        self.kwargs = _per_worker(kwargs, num_workers)
        # As upstream's workers: environments may ask how many threads there are when they are built.
        begin = None if num_threads is None else functools.partial(torch.set_num_threads, num_threads)
        self._examined = functools.partial(
            examined, read=metadata_of, start_method=start_method, begin=begin, timeout=timeout
        )
        self._examinations: list[Examination] = []

    def context(self, method: str | None, on_start: Callable[[Any], None]) -> WorkerContext:
        """Give what starts the workers: with the variables of their device decisions."""
        return processes.get_context(
            method,
            preload=merged_modules(*(factory.preload for factory in self.factories)),
            environs=[{} if factory.decision is None else factory.decision.variables for factory in self.factories],
            import_time=READ_AT_IMPORT,
            on_start=on_start,
        )

    def advice(self) -> SpeedCheck:
        """Warn of what was measured of copies, if anything; of their speed, once there is something to compare with."""
        warn_of_memory([found.private_bytes for found in self._examinations], len(self.factories))
        return SpeedCheck([found.step_seconds for found in self._examinations] or [None], len(self.factories))

    def metadata(self) -> list[EnvMetaData]:
        """Read what TorchRL allocates buffers by, one per worker, without building an environment here."""
        known: dict[int, Examination] = {}
        for index, envs in enumerate(self._envs):
            if id(envs) not in known:
                known[id(envs)] = found = self._examination(index)
                envs.schema = schema(found.read)
        self._examinations = [known[id(envs)] for envs in self._envs]
        return [found.read.clone() for found in self._examinations]

    def _examination(self, index: int) -> Examination:
        factory, overrides = self.factories[index], dict(self.kwargs[index])
        del overrides["worker"]
        known, its_own = factory.examination, {**factory.overrides, **overrides}
        if known is not None and isinstance(known.read, EnvMetaData) and not its_own and factory.decision is None:
            return known
        return self._examined(factory, overrides=overrides)


def _per_worker(kwargs: Any, num_workers: int) -> list[dict[str, Any]]:
    entries = [kwargs or {}] * num_workers if kwargs is None or isinstance(kwargs, Mapping) else list(kwargs)
    if len(entries) != num_workers:
        raise InvalidArgumentError(
            f"create_env_kwargs has {len(entries)} entries for {num_workers} workers; expected one for each"
        )
    return [{**entry, "worker": index} for index, entry in enumerate(entries)]
