"""``ParallelEnv``: accepts environment instances, and reports why a worker died."""

from __future__ import annotations

import logging
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs import batched_envs as upstream

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from torchrl_ext._compat import has_supervision
from torchrl_ext.parallel.worker_plan import WorkerPlan

__all__ = ["ParallelEnv"]

_log = logging.getLogger("torchrl_ext")

_BaseParallelEnv: Any
_IS_SUPERVISED = has_supervision()
if _IS_SUPERVISED:
    from torchrl_ext.parallel.supervision import SupervisedEnv as _BaseParallelEnv
else:
    _BaseParallelEnv = upstream.ParallelEnv


class _ParallelEnvMeta(type(upstream.ParallelEnv)):  # type: ignore[misc]
    """Metaclass that does not build the environments of lambdas in this process."""

    def __call__(
        cls,
        num_workers: int | None = None,
        create_env_fn: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> EnvBase:
        kwargs.pop("auto_wrap_envs", None)
        if kwargs.pop("serial_for_single", False) and num_workers == 1 and not _needs_process(kwargs):
            return _make_serial_env(create_env_fn, kwargs)
        return super().__call__(num_workers, create_env_fn, *args, auto_wrap_envs=False, **kwargs)


class ParallelEnv(_BaseParallelEnv, metaclass=_ParallelEnvMeta):
    """Replacement for TorchRL's ``ParallelEnv`` that accepts environment instances.

    It takes the arguments of ``torchrl.envs.ParallelEnv``, and these:

    :param num_workers: number of processes; default: number of cores that this process may use
    :param create_env_fn: an environment of TorchRL, gymnasium, PettingZoo, dm_control, Melting Pot or VMAS, of which
        the workers get copies in its present state. Or a function or class that builds one, an id or an
        :class:`EnvFactory`. Or a list of these, one per worker
    :param seed: seed of ``set_seed``, and of the generators of Python, NumPy, torch and the C library in each worker.
        Workers always draw different numbers; default: not reproducible
    :param overrides: per worker, a mapping with the differences of its environment: attributes for copies of an
        instance, arguments for a callable, class or id
    :param devices: ``"round-robin"``, or a :class:`rl_ext_core.devices.Decision` for all workers or for each
    :param verify: whether to compare a copy of an instance with the instance, in a temporary process, before the
        workers start; default: True
    :param start_timeout: limit for building the environments, in seconds; None: no limit
    :param step_timeout: limit for the answers to any later call, in seconds; None: no limit
    :param shutdown_timeout: limit for closing the environments, in seconds. Workers that take longer are killed, with
        a warning. None: no limit. TorchRL's default is 10
    :param recorder: folder for records of failed episodes, which ``rl-ext replay`` repeats. True (default): the working
        directory; at most ten files ``crash-*.rlx`` are written to a folder. False: record nothing. Environments are
        recorded if they are single gymnasium environments in ``GymWrapper`` or ``GymEnv``
    :param mp_start_method: ``"forkserver"`` (the default if available, which imports modules once for all workers),
        ``"spawn"`` or ``"fork"``
    :raises NotCopyableError: If a copy would differ from the instance. The text names the attribute and a fix.
    :raises WorkerError: If a worker fails, at any call. Its cause is the worker's exception. All workers are ended, and
        the next ``reset`` starts new ones.

    Source: https://github.com/pytorch/rl/issues/2277

    >>> from torchrl_ext import GymEnv, ParallelEnv
    >>> env = ParallelEnv(2, GymEnv("Pendulum-v1"), seed=0)
    >>> env.rollout(3).batch_size
    torch.Size([2, 3])
    >>> env.close()
    """

    def __init__(
        self,
        num_workers: int | None = None,
        create_env_fn: Any = None,
        *,
        seed: int | None = None,
        overrides: Sequence[Mapping[str, Any]] | None = None,
        devices: Any = None,
        verify: bool = True,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        shutdown_timeout: float | None = None,
        recorder: bool | str | os.PathLike[str] = True,
        mp_start_method: str | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        num_workers = _check_num_workers(num_workers, create_env_fn)
        plan = WorkerPlan(
            create_env_fn,
            num_workers,
            seed=seed,
            overrides=overrides,
            devices=devices,
            verify=verify,
            start_method=mp_start_method,
            timeout=start_timeout,
            num_threads=kwargs.get("num_sub_threads", 1),
            kwargs=create_env_kwargs,
            recorder=recorder,
        )
        # Modules of torch do not support attributes before their constructor was called.
        self.__dict__.update(_plan=plan, _start_timeout=start_timeout, _step_timeout=step_timeout)
        if _IS_SUPERVISED:
            kwargs["shutdown_timeout"] = math.inf
        if shutdown_timeout is not None:
            kwargs["shutdown_timeout"] = shutdown_timeout
        super().__init__(
            num_workers,
            plan.functions,
            create_env_kwargs=plan.kwargs,
            mp_start_method=mp_start_method,
            **kwargs,
        )

    if has_supervision():  # else TorchRL reads the metadata of an environment that it builds in this process

        def _get_metadata(self, create_env_fn: Any, create_env_kwargs: Any) -> None:
            """Set the metadata for buffers, without building an environment in this process."""
            metadata = self._plan.metadata()
            self._set_metadata(metadata[0] if self._single_task else metadata)


def _check_num_workers(num_workers: Any, create_env_fn: Any) -> int:
    """Return the number of workers; refuse one that does not match ``create_env_fn``."""
    if create_env_fn is None:
        is_number = num_workers is None or isinstance(num_workers, numbers.Integral)
        given = "" if is_number else f"; num_workers is of type {type(num_workers).__name__}"
        raise InvalidTypeError(
            f"ParallelEnv got no environment{given}. Use ParallelEnv(4, env), or ParallelEnv(create_env_fn=env) for as "
            "many workers as there are cores"
        )
    if isinstance(create_env_fn, (list, tuple)):
        if num_workers is None:
            return len(create_env_fn)
        if len(create_env_fn) != num_workers:
            raise InvalidArgumentError(
                f"create_env_fn has length {len(create_env_fn)} for num_workers={num_workers}; expected one entry per "
                f"worker. Use ParallelEnv({len(create_env_fn)}, [...])"
            )
    if num_workers is None:
        return resources.usable_cores()
    if isinstance(num_workers, bool) or not isinstance(num_workers, numbers.Integral) or num_workers < 1:
        raise InvalidArgumentError(f"num_workers={num_workers!r} is not a number of workers; expected 1 or more")
    return int(num_workers)  # TorchRL treats NumPy's integers as lists


def _needs_process(kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments of ``ParallelEnv`` have an effect in processes only; log them."""
    names = ("start_timeout", "step_timeout", "shutdown_timeout", "recorder")
    needed = [name for name in names if not isinstance(kwargs.get(name), bool | None)]
    if needed:
        _log.info("serial_for_single=True has no effect, because only processes can use %s", ", ".join(needed))
    return bool(needed)


class _SingleSerialEnv(SerialEnv):
    """``SerialEnv`` with one environment, for ``serial_for_single=True``.

    Its metadata is read without building another one.
    """

    def __init__(self, plan: WorkerPlan, **kwargs: Any) -> None:
        self.__dict__["_plan"] = plan
        super().__init__(1, plan.functions, create_env_kwargs=plan.kwargs, **kwargs)

    if has_supervision():
        _get_metadata = ParallelEnv._get_metadata


def _make_serial_env(create_env_fn: Any, kwargs: dict[str, Any]) -> SerialEnv:
    """Build a :class:`_SingleSerialEnv` from the arguments of ``ParallelEnv``."""
    for name in ("step_timeout", "metadata_from_workers", "shutdown_timeout", "recorder"):
        kwargs.pop(name, None)
    named = {"mp_start_method": "start_method", "start_timeout": "timeout", "create_env_kwargs": "kwargs"}
    ours = {name: name for name in ("seed", "overrides", "devices", "verify")}
    options = {option: kwargs.pop(name) for name, option in {**ours, **named}.items() if name in kwargs}
    return _SingleSerialEnv(WorkerPlan(create_env_fn, _check_num_workers(1, create_env_fn), **options), **kwargs)
