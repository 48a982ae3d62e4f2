"""``ParallelEnv``: TorchRL's, for environments in whatever form users have them; its workers say why they died."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs import batched_envs as upstream

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from torchrl_ext._compat import has_supervision
from torchrl_ext.parallel.plan import WorkerPlan

__all__ = ["ParallelEnv"]

_BaseParallelEnv: Any
_IS_SUPERVISED = has_supervision()
if _IS_SUPERVISED:
    from torchrl_ext.parallel.supervision import SupervisedEnv as _BaseParallelEnv
else:
    _BaseParallelEnv = upstream.ParallelEnv


class _ParallelEnvMeta(type(upstream.ParallelEnv)):  # type: ignore[misc]
    """Takes environments as they come; upstream's would build those of lambdas, in this process."""

    def __call__(
        cls,
        num_workers: int | None = None,
        create_env_fn: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> EnvBase:
        kwargs.pop("auto_wrap_envs", None)
        if kwargs.pop("serial_for_single", False) and num_workers == 1:
            return _make_serial_env(create_env_fn, kwargs)
        return super().__call__(num_workers, create_env_fn, *args, auto_wrap_envs=False, **kwargs)


class ParallelEnv(_BaseParallelEnv, metaclass=_ParallelEnvMeta):
    """TorchRL's ``ParallelEnv`` that takes an environment: an instance, or anything else that stands for one.

    In place of ``torchrl.envs.ParallelEnv``, with its arguments and these:

    :param num_workers: how many processes; default: as many as this process has cores
    :param create_env_fn: an environment of TorchRL, gymnasium, PettingZoo, dm_control, Melting Pot or VMAS: the workers
        get copies, with all that was changed since its construction; it stays usable. Or a function or class that
        builds one, an id, an :class:`EnvFactory`; or a list of these, one per worker
    :param seed: makes it reproducible: ``set_seed`` is called with it, and Python's, NumPy's, torch's and the C
        library's generators are seeded in each worker. Workers always draw differently
    :param overrides: per worker, what is different about its environment: attributes for copies of an instance,
        arguments for a callable, class or id
    :param devices: ``"round-robin"``, or a :class:`rl_ext_core.devices.Decision` for all or for each worker
    :param verify: compare a copy of an instance with it, in a process that is thrown away, before the workers start
    :param start_timeout: seconds until workers must have built their environments; None: ever
    :param step_timeout: seconds until they must have answered any later call; None: ever
    :param shutdown_timeout: seconds that workers may take to close their environments; those that take longer are
        ended, and a warning says so. None: ever. Upstream's default is 10
    :param mp_start_method: ``"forkserver"`` (the default where there is one: modules that all workers need are imported
        once), ``"spawn"`` or ``"fork"``
    :raises NotCopyableError: a copy would not be the instance's equal; the text names the attribute, and the line to
        write
    :raises WorkerError: at any call: a worker has failed; the cause is its own exception. All workers are gone then,
        and the next ``reset`` starts new ones

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
        )
        # Torch's modules take no attribute by assignment until their constructor.
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

    if has_supervision():  # else upstream reads it of an environment that it builds here

        def _get_metadata(self, create_env_fn: Any, create_env_kwargs: Any) -> None:
            """Set what buffers are allocated by: as a copy has it that was built elsewhere, or the instance itself."""
            metadata = self._plan.metadata()
            self._set_metadata(metadata[0] if self._single_task else metadata)


def _check_num_workers(num_workers: Any, create_env_fn: Any) -> int:
    if create_env_fn is None:
        is_number = num_workers is None or isinstance(num_workers, numbers.Integral)
        given = "" if is_number else f"; {type(num_workers).__name__} is no number"
        raise InvalidTypeError(
            f"ParallelEnv was given no environment{given}. Write ParallelEnv(4, env), or "
            "ParallelEnv(create_env_fn=env) for as many workers as there are cores"
        )
    if isinstance(create_env_fn, (list, tuple)):
        if num_workers is None:
            return len(create_env_fn)
        if len(create_env_fn) != num_workers:
            raise InvalidArgumentError(
                f"create_env_fn has {len(create_env_fn)} entries for num_workers={num_workers}; expected one for each. "
                f"Write ParallelEnv({len(create_env_fn)}, [...])"
            )
    if num_workers is None:
        return resources.usable_cores()
    if isinstance(num_workers, bool) or not isinstance(num_workers, numbers.Integral) or num_workers < 1:
        raise InvalidArgumentError(f"num_workers={num_workers!r} is not a number of workers; expected 1 or more")
    return int(num_workers)  # upstream takes NumPy's integers for lists


class _SingleSerialEnv(SerialEnv):
    """The one environment of ``serial_for_single=True``; metadata are read elsewhere, so that it is the only one."""

    def __init__(self, plan: WorkerPlan, **kwargs: Any) -> None:
        self.__dict__["_plan"] = plan
        super().__init__(1, plan.functions, create_env_kwargs=plan.kwargs, **kwargs)

    if has_supervision():
        _get_metadata = ParallelEnv._get_metadata


def _make_serial_env(create_env_fn: Any, kwargs: dict[str, Any]) -> SerialEnv:
    for name in ("step_timeout", "metadata_from_workers", "shutdown_timeout"):
        kwargs.pop(name, None)
    named = {"mp_start_method": "start_method", "start_timeout": "timeout", "create_env_kwargs": "kwargs"}
    ours = {name: name for name in ("seed", "overrides", "devices", "verify")}
    options = {option: kwargs.pop(name) for name, option in {**ours, **named}.items() if name in kwargs}
    return _SingleSerialEnv(WorkerPlan(create_env_fn, _check_num_workers(1, create_env_fn), **options), **kwargs)
