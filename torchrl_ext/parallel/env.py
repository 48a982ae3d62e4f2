"""``ParallelEnv``: accepts environment instances, and reports why a worker died."""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torchrl.envs
from tensordict import TensorDict, TensorDictBase
from torchrl._utils import seed_generator
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.common import EnvMetaData

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError
from rl_ext_core.factory.convert import convert, examine_factory
from rl_ext_core.vector.environments import seed_torch
from torchrl_ext._compat import has_wrapper
from torchrl_ext.factories import PRELOAD, adapt, read_metadata
from torchrl_ext.parallel.bases import LeavesBase
from torchrl_ext.parallel.gym_source import GymBase, GymSource, GymWrapper
from torchrl_ext.parallel.plan import WorkerPlan
from torchrl_ext.parallel.worker_env import seed_environment
from torchrl_ext.parallel.worker_pool import EACH, WorkerPool

__all__ = ["ParallelEnv"]

_log = logging.getLogger("torchrl_ext")

# Options of TorchRL's class that have no effect here, because data is always in shared memory and copied out of it.
_WITHOUT_EFFECT = {"share_individual_td", "shared_memory", "policy_proof", "non_blocking", "use_buffers", "daemon"}
_WITHOUT_EFFECT |= {"metadata_from_workers", "consolidate", "allow_step_when_done", "auto_wrap_envs"}
_UNSUPPORTED = {"memmap": False, "pin_memory": False, "num_threads": None}


class _ParallelEnvMeta(type(EnvBase)):  # type: ignore[misc]
    """Metaclass that makes a ``SerialEnv`` for ``serial_for_single=True``."""

    def __call__(cls, num_workers: int | None = None, create_env_fn: Any = None, *args: Any, **kwargs: Any) -> EnvBase:
        if kwargs.pop("serial_for_single", False) and num_workers == 1 and not _needs_process(kwargs):
            return _make_serial_env(create_env_fn, kwargs)
        return super().__call__(num_workers, create_env_fn, *args, **kwargs)


class _DelegatedRandAction:
    """Descriptor of ``rand_action`` that is ``EnvBase.rand_action`` when read from the class.

    ``TransformedEnv`` refuses environments whose class overrides ``rand_action`` if a transform changes the action.
    """

    def __get__(self, env: Any, owner: type) -> Any:
        return EnvBase.rand_action if env is None else env._base.rand_action


class ParallelEnv(EnvBase, metaclass=_ParallelEnvMeta):
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
        num_sub_threads: int = 1,
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        num_workers = _check_num_workers(num_workers, create_env_fn)
        _require_supported_options(kwargs, num_workers)
        plan = WorkerPlan(
            create_env_fn,
            num_workers,
            seed=seed,
            overrides=overrides,
            devices=devices,
            verify=verify,
            start_method=mp_start_method,
            kwargs=create_env_kwargs,
            num_threads=num_sub_threads,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            close_timeout=shutdown_timeout,
            recorder=recorder,
        )
        super().__init__(device=device)
        self._connect(plan)

    def _connect(self, plan: WorkerPlan) -> None:
        """Set the plan, and the environment that steps the workers."""
        pool, device, count = WorkerPool(plan), self.device, len(plan.factories)
        is_gymnasium = isinstance(plan.source, GymSource)
        base: EnvBase = GymBase(pool, plan.source, device) if is_gymnasium else LeavesBase(pool, plan, device)
        # Modules of torch would register attributes that are modules.
        self.__dict__.update(_plan=plan, _pool=pool, _base=base, _seeds=None, num_workers=count, _rows=range(count))
        self.batch_size, self._device = base.batch_size, base.device
        self.__dict__.update(_input_spec=base.input_spec.clone(), _output_spec=base.output_spec.clone())

    # -- steps and resets

    rand_action = _DelegatedRandAction()

    def _delegates(self, tensordict: TensorDictBase) -> bool:
        """Return whether the environment that steps the workers can take a step with all checks."""
        is_original = type(self)._step is ParallelEnv._step and type(self)._reset is ParallelEnv._reset
        return is_original and not self.run_type_checks and "_step" not in tensordict.keys()  # noqa: SIM118

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take a step in all environments, or in those of the entry ``_step``, and write the entry ``next``."""
        return self._base.step(tensordict) if self._delegates(tensordict) else super().step(tensordict)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step and reset what is done; return this TensorDict and the next one."""
        if not self._delegates(tensordict):
            return super().step_and_maybe_reset(tensordict)
        found: tuple[TensorDictBase, TensorDictBase] = self._base.step_and_maybe_reset(tensordict)
        return found

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_step", None)
        if mask is None or mask.all():
            return self._base._step(tensordict)
        mask = mask.reshape(self.num_workers, -1)
        if (mask != mask[:, :1]).any():
            raise InvalidArgumentError(
                "_step is true for a part of a worker's environments: expected one value for each worker. Use "
                "ParallelEnv(num_workers, lambda: TransformedEnv(env, transform)), with the transform in the worker"
            )
        rows = mask[:, 0].nonzero().view(-1).tolist()
        out = self._step_rows(tensordict, rows)
        for key, value in list(out.items(True, True)):  # other rows get the values of the input, or zeros
            if isinstance(value, torch.Tensor):
                before = tensordict.get(key, None)
                result = torch.zeros_like(value) if before is None else before.to(value, copy=True)
                result[rows] = value[rows]
                out.set(key, result)
        return out

    def _step_rows(self, tensordict: TensorDictBase, rows: Sequence[int]) -> TensorDictBase:
        """Step the environments with these numbers. The other rows of the result have no meaning."""
        self._pool.stepped = rows
        try:
            return self._base._step(tensordict)
        finally:
            self._pool.stepped = None

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        each = [{**own, **kwargs} for own in kwargs.pop("list_of_kwargs", [{}] * self.num_workers)]
        if not any(each):
            return self._base._reset(tensordict)
        if not self._plan.is_gymnasium:
            return self._base._reset(tensordict, options={EACH: each})
        if unknown := {name for own in each for name in own} - {"seed", "options"}:
            raise InvalidArgumentError(
                f"reset({min(unknown)}=...) is not an argument of gymnasium's reset: expected seed or options. Use "
                f"reset(options={{{min(unknown)!r}: ...}})"
            )
        seeds = [own.get("seed") for own in each]
        return self._base._reset(tensordict, seed=seeds, options={EACH: [own.get("options") for own in each]})

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the environments as TorchRL's class does, and return the next seed."""
        workers, seeds = self._rows, [seed]
        if not self._plan.is_gymnasium:
            for number in workers:
                arguments = [(seed_environment, seeds[-1], static_seed)]
                seeds += self._pool.call_each([number], "apply", arguments)
        else:
            for _ in workers:
                seeds.append(seeds[-1] if static_seed or seeds[-1] is None else seed_generator(seeds[-1]))
            self._pool.call_each(workers, "apply", [(seed_torch, own) for own in seeds[:-1]])
            rows = np.zeros(self._pool.num_envs, bool)
            each: list[int | None] = [None] * self._pool.num_envs
            for number, own in zip(workers, seeds, strict=False):
                rows[number], each[number] = True, own
            self._pool.reset(seed=each, options={"reset_mask": rows})
        self.__dict__["_seeds"] = seeds[:-1]
        return seeds[-1]

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    @property
    def _supports_set_state(self) -> bool:
        return not self._plan.is_gymnasium and self._plan.source[0].supports_set_state

    # -- start and end

    @property
    def is_closed(self) -> bool:
        """Whether there are no workers."""
        return "_pool" not in self.__dict__ or self._pool.closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None: ...

    def start(self) -> None:
        """Start the workers.

        :raises RuntimeError: If they run.
        """
        if not self.is_closed:
            raise RuntimeError("trying to start a environment that is not closed.")
        self._pool.run("start", lambda: None)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments, and end the workers. The next ``reset`` starts new ones.

        :param raise_if_closed: whether closing twice is an error; closing after a worker's failure is not
        """
        pool = self._pool
        pool.end_interrupted()
        if pool.closed and pool.failure_summary is None and raise_if_closed:
            raise RuntimeError("trying to close a closed environment")
        pool.close()

    @property
    def create_env_fn(self) -> list[Any]:
        """Factory of each worker's environment."""
        return list(self._plan.factories)

    @property
    def create_env_kwargs(self) -> list[dict[str, Any]]:
        """Arguments of each worker's environment."""
        return self._plan.kwargs

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Update the arguments of the environments, from the next start on.

        :param kwargs: arguments for all workers, or a list with those of each
        """
        each = [kwargs] * self.num_workers if isinstance(kwargs, Mapping) else kwargs
        for own, new in zip(self._plan.kwargs, each, strict=True):
            own.update(new)

    def configure_parallel(self, **options: Any) -> ParallelEnv:
        """Change options before the workers start, and return the environment.

        :param options: ``mp_start_method``, ``shutdown_timeout``, or options of TorchRL's class without effect here
        :raises RuntimeError: If the workers run.
        """
        if not self.is_closed:
            raise RuntimeError("configure_parallel() must be called before the environment is started")
        named = {"mp_start_method": "start_method", "shutdown_timeout": "close_timeout"}
        self._plan.configure(**{named[name]: options.pop(name) for name in [*options] if name in named})
        _require_supported_options(options, self.num_workers)
        return self

    def to(self, device: Any) -> ParallelEnv:
        """Return outputs on another device from now on. Seeded environments are seeded again, as in TorchRL's class."""
        before, seeds = self.device, self._seeds
        super().to(device)
        if self.device != before:
            self._base.to(device)
            if seeds is not None:
                self.set_seed(seeds[0])
        return self

    # -- copies

    def __copy__(self) -> NoReturn:
        raise NotCopyableError(
            "ParallelEnv cannot be copied by copy.copy, because both would share the workers: expected the functions "
            "that build its environments. Use ParallelEnv(2, create_env_fn), which starts new workers"
        )

    def __getstate__(self) -> dict[str, Any]:
        self.close(raise_if_closed=False)  # as in TorchRL's class; the copy starts its own workers
        return {name: value for name, value in self.__dict__.items() if name not in ("_pool", "_base")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect(state["_plan"])

    # -- access to the environments

    def state_dict(self, *_: Any, **__: Any) -> OrderedDict[str, Any]:
        """Return the state of each worker's environment. Those of gymnasium have none."""
        if self._plan.is_gymnasium:
            found = self._pool.run("state_dict", lambda: [OrderedDict[str, Any]()] * self.num_workers)
        else:
            found = _WorkerCall(self, "state_dict")()
        return OrderedDict((f"worker{number}", state) for number, state in enumerate(found))

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Load the state of each worker's environment."""
        if not self._plan.is_gymnasium:
            states = [state_dict[f"worker{number}"] for number in range(self.num_workers)]
            self._pool.call_each(self._rows, "call", [("load_state_dict", (state,), {}) for state in states])

    def __getitem__(self, item: Any) -> ParallelEnv:
        self._pool.run("view", lambda: None)
        index = item if isinstance(item, slice) else np.asarray(item)
        if isinstance(index, np.ndarray) and (index.dtype == bool or index.ndim > 1):
            raise NotImplementedError("masks are not supported: expected a number, a slice or a list of numbers")
        workers = np.atleast_1d(np.arange(self.num_workers)[index]).tolist()
        if not workers:
            raise IndexError(f"index {item} selects none of {self.num_workers} environments")
        return _View(self, workers)

    def __setitem__(self, item: Any, source: Any) -> NoReturn:
        raise NotImplementedError(
            "environments in workers do not support snapshot writeback: expected env.reset() or "
            "env.load_state_dict(...). Use torchrl.envs.ParallelEnv(num_workers, create_env_fn)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(type(self), name):  # private, or a property that raised AttributeError
            return super().__getattr__(name)
        if self.is_closed:
            self.start()
            raise RuntimeError("Trying to access attributes of closed/non started environments. Call env.reset() first")
        return _WorkerCall(self, name)

    def __repr__(self) -> str:
        source = self._plan.source
        text = str(self._plan.factories[0]) if self._plan.is_gymnasium else source[0].env_str
        return f"{type(self).__name__.lstrip('_')}(\n\tenv={text}, \n\tbatch_size={self.batch_size})"


class _View(ParallelEnv):
    """Live view of some environments, while their present workers run.

    :param parent: all environments
    :param workers: numbers of the environments
    """

    def __init__(self, parent: ParallelEnv, workers: Sequence[int]) -> None:
        EnvBase.__init__(self, device=parent.device)
        own = {name: getattr(parent, name) for name in ("_plan", "_pool", "_base")}
        workers = [parent._rows[number] for number in workers]
        self.__dict__.update(own, _seeds=None, num_workers=len(workers), _rows=workers)
        self.__dict__.update(_viewed=parent._pool._pool, _is_released=False)
        specs = parent._base.input_spec, parent._base.output_spec
        self.batch_size = torch.Size([len(workers), *parent._base.batch_size[1:]])
        self.__dict__.update(_input_spec=specs[0][workers].clone(), _output_spec=specs[1][workers].clone())
        # For each environment of the pool, its row in this view; 0 for those that are not in it.
        self.__dict__["_index"] = [workers.index(n) if n in workers else 0 for n in range(parent._pool.num_envs)]

    rand_action = EnvBase.rand_action

    def _delegates(self, tensordict: TensorDictBase) -> bool:
        return False

    def _require_running(self) -> None:
        pool = self._pool
        if self._is_released or (not pool.closed and pool._pool is not self._viewed):
            raise RuntimeError(
                "Cannot use a closed indexed batched environment view. Create a new view from the parent environment "
                "instead."
            )
        if pool.closed:
            self.__dict__["_is_released"] = True
            raise RuntimeError(
                "Cannot use an indexed batched environment view after its parent environment has been closed."
            )

    def _step_rows(self, tensordict: TensorDictBase, rows: Sequence[int]) -> TensorDictBase:
        self._require_running()
        rows = [self._rows[number] for number in rows]
        return super()._step_rows(tensordict[self._index], rows)[self._rows]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.get("_step", None) is None:
            return self._step_rows(tensordict, range(self.num_workers))
        return super()._step(tensordict)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._require_running()
        given = TensorDict({}, self.batch_size) if tensordict is None else tensordict
        everything = given[self._index]
        others = torch.tensor([number not in self._rows for number in range(len(self._index))])
        keys = [key for key in self.reset_keys if key in given.keys(True, True)]
        for key in keys or self.reset_keys[:1]:
            mask = torch.ones(self.full_done_spec[self.done_keys[self.reset_keys.index(key)]].shape, dtype=torch.bool)
            mask = (given.get(key) if keys else mask)[self._index].clone()
            mask[others] = False
            everything.set(key, mask)
        each = kwargs.pop("list_of_kwargs", [{}] * self.num_workers)
        kwargs["list_of_kwargs"] = [each[number] for number in self._index]
        return super()._reset(everything, **kwargs)[self._rows]


class _WorkerCall:
    """Method or attribute of the workers' environments, or of an object in them.

    :param env: the environments
    :param path: name, which may have dots
    """

    def __init__(self, env: ParallelEnv, path: str) -> None:
        self._env, self._path = env, path

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        env, path = self._env, self._path
        workers, base = env._rows, env._base
        if isinstance(base, GymWrapper) and (path in vars(base) or hasattr(GymWrapper, path)):
            value = getattr(base, path)  # workers have no wrapper of TorchRL
            return [value(*args, **kwargs) if callable(value) else value for _ in workers]
        return env._pool.call_each(workers, "call", [(path, args, kwargs)] * len(workers))

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __getattr__(self, name: str) -> _WorkerCall:
        if name.startswith("_"):
            raise AttributeError(f"Accessing private/special attribute {name!r} is not supported")
        return _WorkerCall(self._env, f"{self._path}.{name}")


torchrl.envs.ParallelEnv.register(ParallelEnv)
if has_wrapper():
    GymWrapper.make_parallel = ParallelEnv


# -- arguments


def _require_supported_options(options: Mapping[str, Any], num_workers: int) -> None:
    """Refuse options of TorchRL's class that this class does not have."""
    for name, value in options.items():
        if name in _UNSUPPORTED and value != _UNSUPPORTED[name]:
            raise InvalidArgumentError(
                f"{name}={value!r} is not supported: expected {name}={_UNSUPPORTED[name]!r}. Use "
                f"torchrl.envs.ParallelEnv({num_workers}, create_env_fn, {name}={value!r})"
            )
        if name not in _WITHOUT_EFFECT and name not in _UNSUPPORTED:
            raise InvalidTypeError(f"ParallelEnv has no argument {name}={value!r}. Leave it out")


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
    """``SerialEnv`` of one factory, with metadata that is known."""

    def __init__(self, factory: Any, metadata: Any, **kwargs: Any) -> None:
        self.__dict__["_known_metadata"] = metadata
        super().__init__(1, factory, **kwargs)

    def _get_metadata(self, *_: Any) -> None:
        self._set_metadata(self._known_metadata.clone())


def _make_serial_env(create_env_fn: Any, kwargs: dict[str, Any]) -> SerialEnv:
    """Build a :class:`_SingleSerialEnv` from the arguments of ``ParallelEnv``."""
    _check_num_workers(1, create_env_fn)
    item = create_env_fn[0] if isinstance(create_env_fn, (list, tuple)) else create_env_fn
    ours = ("seed", "overrides", "devices", "verify", "start_timeout", "mp_start_method", "num_sub_threads")
    own = {name: kwargs.pop(name) for name in ours if name in kwargs}
    for name in ("step_timeout", "metadata_from_workers", "shutdown_timeout", "recorder"):
        kwargs.pop(name, None)
    options = {"start_method": own.get("mp_start_method"), "timeout": own.get("start_timeout")}
    verify, seed, arguments = own.get("verify", True), own.get("seed"), kwargs.get("create_env_kwargs") or {}
    factory = convert(item, verify=verify, adapt=adapt, preload=PRELOAD, read=read_metadata, **options)
    metadata = factory.examination and factory.examination.read
    (bound,) = factory.for_workers(1, seed=seed, overrides=own.get("overrides"), devices=own.get("devices"))
    if not isinstance(metadata, EnvMetaData) or bound.overrides or arguments:
        metadata = examine_factory(bound, read=read_metadata, overrides=arguments, **options).read
    return _SingleSerialEnv(bound.then(functools.partial(_seed, seed=seed)), metadata, **kwargs)


def _seed(environment: EnvBase, seed: int | None) -> EnvBase:
    """Seed an environment that has seeds, and return it."""
    if seed is not None:
        with contextlib.suppress(NotImplementedError):
            environment.set_seed(seed)
    return environment
