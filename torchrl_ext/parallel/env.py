"""``ParallelEnv``: accepts environment instances, and reports why a worker died."""

from __future__ import annotations

import functools
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError
from rl_ext_core.vector.environments import Caller, PoolOptions, check_count, check_seconds, seed_torch
from torchrl_ext._compat import HAS_FAST_PATH, HAS_WRAPPER, new_tensordict
from torchrl_ext.parallel.gym_source import GymBase, GymSource, GymWrapper
from torchrl_ext.parallel.leaves import Key
from torchrl_ext.parallel.plan import WorkerPlan, derive_seeds
from torchrl_ext.parallel.worker_env import NON_TENSOR, TENSORDICT, seed_environment
from torchrl_ext.parallel.worker_pool import EACH, WorkerPool

__all__ = ["ParallelEnv"]

# Options of TorchRL's class that have no effect here, because data is always in shared memory and copied out of it.
_WITHOUT_EFFECT = {"share_individual_td", "shared_memory", "policy_proof", "non_blocking", "use_buffers", "daemon"}
_WITHOUT_EFFECT |= {"metadata_from_workers", "consolidate", "allow_step_when_done", "auto_wrap_envs"}
_CONTROL_KEYS = ("next", "_step", "_reset")
_UNSUPPORTED = {"memmap": False, "pin_memory": False, "num_threads": None, "serial_for_single": False}
_CALLER = Caller(
    label="worker",
    workers_argument="ParallelEnv({}, ...)",
    close_argument="shutdown_timeout",
    different_spaces="Use torchrl.envs.ParallelEnv(num_workers, [...]) for different ones",
    failed_calls_end=True,
)


class ParallelEnv(EnvBase):
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
        check_seconds("shutdown_timeout", shutdown_timeout)  # PoolOptions has another name for it
        options = PoolOptions(
            start_method=mp_start_method,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            close_timeout=None if shutdown_timeout == math.inf else shutdown_timeout,
            recorder=recorder,
            caller=_CALLER,
        )
        plan = WorkerPlan(
            create_env_fn,
            num_workers,
            options,
            seed=seed,
            overrides=overrides,
            devices=devices,
            verify=verify,
            kwargs=create_env_kwargs,
            num_threads=num_sub_threads,
        )
        super().__init__(device=device)
        self._connect(plan)

    def _connect(self, plan: WorkerPlan) -> None:
        """Set the plan, and the specs of what steps the workers."""
        pool, count = WorkerPool(plan), len(plan.factories)
        own = self.__dict__  # modules of torch would register attributes that are modules
        own.update(_plan=plan, _pool=pool, _base=None, _seeds=None, num_workers=count)
        if isinstance(plan.source, GymSource):
            base = GymBase(pool, plan.source, self.device)
            own.update(_base=base, _input_spec=base.input_spec.clone(), _output_spec=base.output_spec.clone())
            self.batch_size, self._device = base.batch_size, base.device
            return
        first, leaves = plan.source, plan.leaves
        self._device = first.device if self.device is None else self.device
        self.batch_size = torch.Size([count, *first.batch_size])
        specs = first.specs.expand(self.batch_size)
        read, written = specs["input_spec"].to(self._device), specs["output_spec"].to(self._device)
        leaves.allocate_inputs(count)
        zeros = [written[f"full_{name}_spec"].zero() for name in ("observation", "reward", "done")]
        template = functools.reduce(TensorDictBase.update, zeros).clear_device_()
        template = template if self._device is None else template.to(self._device)
        own.update(_input_spec=read, _output_spec=written, _leaves=leaves, _template=template, _memory=None)
        own["_others"] = [None] * count  # last entries of each environment that are not tensors

    # -- steps and resets

    def _delegates(self, tensordict: TensorDictBase) -> bool:
        """Return whether the wrapper of gymnasium environments can take a step with all checks."""
        is_original = type(self)._step is ParallelEnv._step and type(self)._reset is ParallelEnv._reset
        has_mask = self.run_type_checks or "_step" in tensordict.keys()  # noqa: SIM118
        return self._base is not None and is_original and not has_mask

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take a step in all environments, or in those of the entry ``_step``, and write the entry ``next``."""
        return self._base.step(tensordict) if self._delegates(tensordict) else super().step(tensordict)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step and reset what is done; return this TensorDict and the next one."""
        stepper: Any = self._base if self._delegates(tensordict) else super()
        return stepper.step_and_maybe_reset(tensordict)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = self._step_leaves if self._base is None else self._base._step
        mask = tensordict.get("_step", None)
        if mask is None or mask.all():
            return step(tensordict)
        mask = mask.reshape(self.num_workers, -1)
        if (mask != mask[:, :1]).any():
            raise InvalidArgumentError(
                "_step is true for a part of a worker's environments: expected one value for each worker. Use "
                "ParallelEnv(num_workers, lambda: TransformedEnv(env, transform)), with the transform in the worker"
            )
        self._pool.stepped = mask[:, 0].nonzero().view(-1).tolist()
        try:
            out = step(tensordict)
        finally:
            self._pool.stepped = None
        # Other rows get the values of the input, or zeros.
        return out.where(mask[:, 0], tensordict.select(*out.keys(True, True), strict=False), pad=0)

    def _step_leaves(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = self._leaves.write_inputs(tensordict)
        observations, *_, infos = self._pool.step(actions)
        return self._read(observations, infos)

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step of a plain TensorDict, with the results of TorchRL's method, which takes three times as long."""
        entries: Any = tensordict._tensordict if type(tensordict) is TensorDict else None
        is_original = type(self)._step is ParallelEnv._step and self._base is None and not self.run_type_checks
        if entries is None or tensordict.is_locked or not (is_original and self._leaves.are_flat):
            return super()._step_and_maybe_reset(tensordict)
        is_here = tensordict.batch_size == self.batch_size and tensordict.device == self.device
        if not is_here or not entries.keys().isdisjoint(_CONTROL_KEYS) or self._post_step_mdp_hooks is not None:
            return super()._step_and_maybe_reset(tensordict)
        out: Any = self._step_leaves(tensordict)
        entries["next"] = out
        following = self._leaves.next_root(entries, out._tensordict)
        return tensordict, self.maybe_reset(new_tensordict(following, self.batch_size, self.device))

    def _read(self, memory: Any, infos: dict[str, Any], keys: set[Key] | None = None) -> TensorDictBase:
        """Return a TensorDict of new tensors.

        :param memory: records of the outputs
        :param keys: keys of the tensors; default: all
        """
        own = self.__dict__
        if memory is not own["_memory"]:  # of new workers
            own["_memory"], (_, own["_arrays"]) = memory, self._leaves.outputs.map(memory)
        arrays = own["_arrays"] if keys is None else {key: own["_arrays"][key] for key in keys}
        tensors: dict[Any, Any] = {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
        if self._device is not None and self._device.type != "cpu":
            tensors = {key: tensor.to(self._device) for key, tensor in tensors.items()}
        if self._leaves.are_flat:
            return new_tensordict(tensors, self.batch_size, self._device)
        out: TensorDictBase = self._template.select(*tensors)
        out.update(tensors)
        if NON_TENSOR in infos:
            pairs = zip(self._others, infos[NON_TENSOR], strict=True)
            self.__dict__["_others"] = others = [before if new is None else new for before, new in pairs]
            out.update(LazyStackedTensorDict(*others).copy())  # the caller may change entries in place
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        each = [{**own, **kwargs} for own in kwargs.pop("list_of_kwargs", [{}] * self.num_workers)]
        if self._base is None:
            return self._reset_leaves(tensordict, each)
        if not any(each):
            return self._base._reset(tensordict)
        if unknown := {name for own in each for name in own} - {"seed", "options"}:
            raise InvalidArgumentError(
                f"reset({min(unknown)}=...) is not an argument of gymnasium's reset: expected seed or options. Use "
                f"reset(options={{{min(unknown)!r}: ...}})"
            )
        seeds = [own.get("seed") for own in each]
        return self._base._reset(tensordict, seed=seeds, options={EACH: [own.get("options") for own in each]})

    def _reset_leaves(self, tensordict: TensorDictBase | None, each: list[dict[str, Any]]) -> TensorDictBase:
        options: dict[str, Any] = {EACH: each}
        if tensordict is not None:
            given = tensordict.select(*self._leaves.keys, *self.reset_keys, strict=False).to("cpu")
            masks = {key: mask for key in self.reset_keys if (mask := given.get(key, None)) is not None}
            for key, mask in masks.items():
                if mask.ndim == self.batch_dims:
                    given[key] = mask.unsqueeze(-1)  # as TorchRL's class, which has masks in buffers of this shape
            each_mask = [mask.reshape(self.num_workers, -1).any(-1) for mask in masks.values()]
            rows = torch.stack(each_mask).any(0) if masks else torch.ones(self.num_workers, dtype=torch.bool)
            options["reset_mask"] = rows.numpy()
            for number in rows.nonzero().view(-1).tolist() if not given.is_empty() else ():
                # Arrays are pickled faster than TensorDicts, and are plain data in records of crashes.
                items = [(key, value.numpy(force=True)) for key, value in given[number].items(True, True)]
                each[number] = {**each[number], TENSORDICT: items}
        observations, infos = self._pool.reset(options=options)
        return self._read(observations, infos, self._leaves.reset_keys)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the environments as TorchRL's class does, and return the next seed."""
        if self._base is None:
            seeds = [seed]
            for number in range(self.num_workers):
                seeds += self._pool.call_each("apply", [(seed_environment, seeds[-1], static_seed)], [number])
        else:
            seeds = derive_seeds(seed, self.num_workers + 1, static=static_seed)
            self._pool.call_each("apply", [(seed_torch, own) for own in seeds[:-1]])
            self._pool.reset(seed=seeds[:-1])
        self.__dict__["_seeds"] = seeds[:-1]
        return seeds[-1]

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    @property
    def _supports_set_state(self) -> bool:
        return not self._plan.is_gymnasium and self._plan.source.supports_set_state

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
        self._pool.running_pool()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments, and end the workers. The next ``reset`` starts new ones.

        :param raise_if_closed: whether closing twice is an error; closing after a worker's failure is not
        """
        pool = self._pool
        if pool.closed and pool.failure is None and raise_if_closed:
            raise RuntimeError("trying to close a closed environment")
        pool.close()

    @property
    def create_env_fn(self) -> list[Any]:
        """Factory of each worker's environment."""
        return list(self._plan.factories)

    def configure_parallel(self, *args: Any, **options: Any) -> NoReturn:
        """Raise an error, because options of the workers and arguments of the environments are fixed.

        :raises InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            f"{options or args} cannot be set later: expected all options and arguments in the constructor. Use "
            f"ParallelEnv({self.num_workers}, create_env_fn, create_env_kwargs=...)"
        )

    update_kwargs = configure_parallel

    def to(self, device: Any) -> ParallelEnv:
        """Return outputs on another device from now on. Seeded environments are seeded again, as in TorchRL's class."""
        before, seeds = self.device, self._seeds
        super().to(device)
        if self.device != before:
            if self._base is None:
                self.__dict__["_template"] = self._template.to(device)
            else:
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
        of_workers = ("_pool", "_base", "_memory", "_arrays")
        return {name: value for name, value in self.__dict__.items() if name not in of_workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect(state["_plan"])

    # -- access to the environments

    def state_dict(self, *_: Any, **__: Any) -> OrderedDict[str, Any]:
        """Return the state of each worker's environment. Those of gymnasium have none."""
        found = _WorkerCall(self, "state_dict")()
        return OrderedDict((f"worker{number}", state) for number, state in enumerate(found))

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Load the state of each worker's environment."""
        if not self._plan.is_gymnasium:
            states = [state_dict[f"worker{number}"] for number in range(self.num_workers)]
            self._pool.call_each("call", [("load_state_dict", (state,), {}) for state in states])

    def __getitem__(self, item: Any, source: Any = None) -> NoReturn:
        raise NotImplementedError(
            f"env[{item!r}] is not supported, neither views nor snapshot writeback: expected all environments, or the "
            f"entry _step to step some. Use torchrl.envs.ParallelEnv({self.num_workers}, create_env_fn)[{item!r}]"
        )

    __setitem__ = __getitem__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(type(self), name):  # private, or a property that raised AttributeError
            return super().__getattr__(name)
        return _WorkerCall(self, name)

    def __repr__(self) -> str:
        source = self._plan.source
        text = str(self._plan.factories[0]) if self._plan.is_gymnasium else source.env_str
        return f"{type(self).__name__.lstrip('_')}(\n\tenv={text}, \n\tbatch_size={self.batch_size})"


class _WorkerCall:
    """Method or attribute of the workers' environments, or of an object in them.

    :param env: the environments
    :param path: name, which may have dots
    """

    def __init__(self, env: ParallelEnv, path: str) -> None:
        self._env, self._path = env, path

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        count, base, path = self._env.num_workers, self._env._base, self._path
        if base is not None and (path in vars(base) or hasattr(GymWrapper, path)):
            value = getattr(base, path)  # workers have no wrapper of TorchRL
            return [value(*args, **kwargs) if callable(value) else value for _ in range(count)]
        return self._env._pool.call_each("call", [(path, args, kwargs)] * count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __getattr__(self, name: str) -> _WorkerCall:
        if name.startswith("_"):
            raise AttributeError(f"Accessing private/special attribute {name!r} is not supported")
        return _WorkerCall(self._env, f"{self._path}.{name}")


torchrl.envs.ParallelEnv.register(ParallelEnv)
if HAS_FAST_PATH:
    from torchrl_ext.gym.fast_path import RandAction

    ParallelEnv.rand_action = RandAction()
if HAS_WRAPPER:
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
        raise InvalidTypeError(
            f"ParallelEnv got no environment; num_workers is of type {type(num_workers).__name__}. Use "
            "ParallelEnv(4, env), or ParallelEnv(create_env_fn=env) for as many workers as there are cores"
        )
    given = create_env_fn if isinstance(create_env_fn, (list, tuple)) else None
    if num_workers is None:
        return resources.usable_cores() if given is None else len(given)
    number = check_count("num_workers", num_workers)
    if given is not None and len(given) != number:
        raise InvalidArgumentError(
            f"create_env_fn has length {len(given)} for num_workers={number}; expected one entry per worker. Use "
            f"ParallelEnv({len(given)}, [...])"
        )
    return number
