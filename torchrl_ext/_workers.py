"""What TorchRL's worker processes call to build their environments."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torchrl._utils import seed_generator
from torchrl.envs import EnvBase

from rl_ext_core import processes
from rl_ext_core.factory import EnvFactory
from torchrl_ext._metadata import Schema, check, metadata_of, schema

__all__ = ["WorkerEnvs", "chain"]


class WorkerEnvs:
    """Builds the environment of each worker; one object for all, as TorchRL wants it for environments that are alike.

    :param factories: one per worker
    :param seeds: one per worker, for ``set_seed``; None: none
    """

    def __init__(self, factories: Sequence[EnvFactory[EnvBase]], seeds: Sequence[int] | None) -> None:
        self.factories, self.seeds = list(factories), seeds
        self.schema: Schema | None = None

    def __call__(self, *, worker: int, **overrides: Any) -> EnvBase:
        """Build the environment of a worker.

        :param worker: its index
        :param overrides: in addition to the factory's
        :raises InvalidArgumentError: it has other specs than the buffers were made for
        """
        seed = None if self.seeds is None else self.seeds[worker]
        processes.note(phase="building the environment", **({} if seed is None else {"seed": seed}))
        try:
            environment = self.factories[worker](**overrides)
            processes.at_end(functools.partial(_close, weakref.ref(environment)))
            # In upstream's worker, where metadata come from there, these errors would be lost likewise.
            found = metadata_of(environment)
            if self.schema is not None:
                check(self.schema, schema(found), worker)
            if seed is not None:
                # Melting Pot's environments, among others, take no seed; the process's generators are seeded all the
                # same.
                with contextlib.suppress(NotImplementedError):
                    environment.set_seed(seed)
        except Exception as error:
            processes.fail(error)
        processes.note(phase="")
        return environment


def _close(reference: weakref.ref[EnvBase]) -> None:
    environment = reference()
    if environment is not None:
        environment.close()


def chain(seed: int | None, num_workers: int) -> list[int] | None:
    """Give the seeds that TorchRL's ``set_seed`` gives to the workers."""
    if seed is None:
        return None
    seeds = [seed]
    while len(seeds) < num_workers:
        seeds.append(seed_generator(seeds[-1]))
    return seeds
