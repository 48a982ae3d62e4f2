"""What TorchRL allocates its buffers by."""

from __future__ import annotations

from typing import Any

from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.common import EnvMetaData

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["Schema", "check", "metadata_of", "schema"]

Schema = tuple[tuple[Any, ...], ...]


def metadata_of(environment: EnvBase) -> EnvMetaData:
    """Read it of an environment, which caches what it is made from.

    :raises RuntimeError: TorchRL's, for transforms that may not be in a worker
    """
    if hasattr(BatchedEnvBase, "_validate_worker_env"):  # else the worker finds out
        BatchedEnvBase._validate_worker_env(environment)
    return EnvMetaData.metadata_from_env(environment)


def schema(metadata: EnvMetaData) -> Schema:
    """Give the part of it that buffers depend on."""
    specs = metadata.specs.items(True, True)
    return tuple((key, tuple(spec.shape), str(getattr(spec, "dtype", None))) for key, spec in specs)


def check(expected: Schema, found: Schema, worker: int) -> None:
    """Compare what buffers were made for with what a worker's environment has.

    :raises InvalidArgumentError: it does not fit
    """
    if expected == found:
        return
    lines = [f"{key} is {rest}" for key, *rest in found if (key, *rest) not in expected]
    missing = [f"no {key}" for key, *_ in expected if key not in {key for key, *_ in found}]
    raise InvalidArgumentError(
        f"the environment of worker {worker} differs from what the buffers are for: {'; '.join([*lines, *missing])}. "
        "Overrides that change specs need environments of their own: ParallelEnv(2, [make_small, make_large])"
    )
