"""Private names of gymnasium, torch and Stable Baselines3 that this package uses, and what it does without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import torch
import torch.distributed
from gymnasium.vector import AsyncVectorEnv, async_vector_env
from stable_baselines3.common.base_class import BaseAlgorithm
from torch.distributions import Distribution

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["call_in_workers", "progress_remaining", "store_of_ranks", "without_validation"]


# AsyncVectorEnv calls all workers or none. These private names call some of them.
_worker_code = getattr(getattr(async_vector_env, "_async_worker", None), "__code__", None)
_CAN_CALL_SOME = hasattr(AsyncVectorEnv, "_raise_if_errors") and "'_call'" in repr(
    getattr(_worker_code, "co_consts", ())
)


def call_in_workers(env: AsyncVectorEnv, indices: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a method of some sub-environments of an ``AsyncVectorEnv``, or get an attribute.

    :raises InvalidArgumentError: If only some are called, and gymnasium lacks the private names.
    """
    # AsyncVectorEnv.call does not pass on an argument whose name is "name".
    if sorted(indices) == list(range(env.num_envs)) and not ("name" in kwargs and _CAN_CALL_SOME):
        results = env.call(name, *args, **kwargs)
        return [results[index] for index in indices]
    if not _CAN_CALL_SOME:
        raise InvalidArgumentError(
            f"{name!r} of environments {list(indices)}: AsyncVectorEnv of gymnasium {gymnasium.__version__} calls all "
            "or none. Leave indices out, or use gymnasium.vector.SyncVectorEnv(env_fns)"
        )
    for index in indices:
        env.parent_pipes[index].send(("_call", (name, args, kwargs)))
    answers = {index: env.parent_pipes[index].recv() for index in indices}
    env._raise_if_errors([answers.get(index, (None, True))[1] for index in range(env.num_envs)])
    return [answers[index][0] for index in indices]


def progress_remaining(algorithm: BaseAlgorithm) -> float:
    """Return the remaining progress of ``learn()``, from 1 to 0; 1 if SB3 lacks the private name."""
    return min(max(float(getattr(algorithm, "_current_progress_remaining", 1.0)), 0.0), 1.0)


def store_of_ranks() -> Any:
    """Return the key-value store of the process group; None if there is none, or torch lacks the private name."""
    get_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return get_store() if get_store is not None and torch.distributed.is_initialized() else None


@contextmanager
def without_validation() -> Iterator[None]:
    """Do not check parameters of distributions, which would wait for the device in each step.

    Invalid parameters still raise an error in ``train()``. If torch lacks the private name, its default applies after.
    """
    before = getattr(Distribution, "_validate_args", __debug__)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
