"""Data-parallel training of the algorithms of :mod:`sb3_ext.tensor`: one policy, several processes (ranks).

    torchrun --nproc-per-node 4 train.py

Each rank has its own environments. Parameters are broadcast from rank 0 when ``learn()`` starts. In ``train()``,
gradients are averaged before they are clipped, and advantages are normalized over all ranks. After a rollout, the ranks
exchange one message: numbers of steps, episodes, whether a callback stops, and statistics of normalization.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnvWrapper

from rl_ext_core.devices import resolve_device
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.vector.array_frameworks import leaves
from sb3_ext._compat import store_of_ranks
from sb3_ext._tensor_vec_env import TensorRunningMeanStd, TensorVecNormalize

__all__ = ["DataParallel"]

# Settings that must be equal on all ranks, because the ranks take the same steps with the same averaged gradients.
_SHARED = [
    "n_envs",
    "n_steps",
    "batch_size",
    "n_epochs",
    "gradient_steps",
    "train_freq",
    "learning_starts",
    "learning_rate",
    "tau",
    "target_update_interval",
    "policy_delay",
    "num_timesteps",
    "_n_updates",
    "gamma",
    "normalize_advantage",
    "target_kl",
    "max_grad_norm",
    "_stats_window_size",
]


def _start_group(device: torch.device) -> None:
    """Start the process group of torchrun, if it has several ranks and the script has not started one."""
    if dist.is_initialized() or not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


class _SharedThreshold:
    """``target_kl`` that compares the mean of all ranks, so that all stop at the same minibatch."""

    __array_ufunc__ = None  # NumPy leaves ``number > self`` to __lt__

    def __init__(self, limit: float, mean: Callable[[float], float]) -> None:
        self._limit, self._mean = limit, mean

    def __rmul__(self, factor: float) -> _SharedThreshold:
        return _SharedThreshold(factor * self._limit, self._mean)

    def __lt__(self, value: Any) -> bool:
        return self._mean(float(value)) > self._limit


class DataParallel(BaseAlgorithm):
    """Base class of the algorithms. It changes nothing unless the process group has several ranks."""

    policy: Any
    env: Any

    # These are not saved.
    _rank: int = 0
    _world: int = 1
    _in_train: bool = False
    _clip: float | None = None  # max_grad_norm, which applies to averaged gradients
    _rollouts: int = 0  # number of exchanges, by which a missing rank is found
    # After the last exchange: num_timesteps and _episode_num, the windows of episodes and successes for logs, and mean,
    # variance and count of each normalization.
    _counts: tuple[int, int]
    _windows: tuple[list[Any], list[Any]]
    _moments: list[Any]
    _new: tuple[list[Any], list[Any]]  # episodes and successes of this rank since then

    def _setup_model(self: Any) -> None:
        """Join the process group, choose the device of this rank, and average gradients before each optimizer step."""
        _start_group(self.device)
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._world == 1:
            super()._setup_model()  # type: ignore[safe-super]
            return
        if self.device.type == "cuda" and self.device.index is None:
            self.device = resolve_device("auto")  # SB3 would use cuda:0 on each rank
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.get_backend() == "nccl":
            raise InvalidArgumentError(
                'the process group has backend "nccl", which cannot exchange logs: expected gloo for the CPU. Use '
                'dist.init_process_group("cpu:gloo,cuda:nccl")'
            )
        super()._setup_model()  # type: ignore[safe-super]
        self._check_model()
        optimizers = [getattr(module, "optimizer", None) for module in self.policy.modules()]
        for optimizer in [*optimizers, getattr(self, "ent_coef_optimizer", None)]:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._average_gradients)

    def _check_model(self: Any) -> None:
        """Refuse what several ranks would train differently."""
        frequency: Any = getattr(self, "train_freq", None)
        if getattr(frequency, "unit", None) == TrainFrequencyUnit.EPISODE:
            raise InvalidArgumentError(
                f'train_freq=({frequency.frequency}, "episode") is not supported by {self._world} ranks, whose '
                'episodes end at different steps: expected steps. Use train_freq=(64, "step")'
            )
        buffer = getattr(self, "rollout_buffer", None)
        if buffer is not None and type(buffer).get.__qualname__ != "TensorRolloutBuffer.get":
            raise InvalidArgumentError(
                f"{type(buffer).__name__}.get makes minibatches whose advantages {self._world} ranks cannot normalize "
                "together: expected that of TensorRolloutBuffer. Override _get_samples instead"
            )
        norm: Any = torch.nn.modules.batchnorm._BatchNorm
        for name, module in self.policy.named_modules():
            differs = isinstance(module, norm) and not isinstance(module, torch.nn.SyncBatchNorm)
            if differs and module.track_running_stats:
                raise InvalidArgumentError(
                    f"policy.{name} is a {type(module).__name__}, whose statistics would differ between ranks: "
                    "expected none. Use torch.nn.LayerNorm"
                )

    def set_random_seed(self: Any, seed: int | None = None) -> None:
        """Set the seeds. Environments of a rank get those that follow the seeds of the rank before."""
        super().set_random_seed(None if seed is None else seed + self._rank * self.n_envs)

    # -- collectives

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a collective operation.

        :raises WorkerError: If another rank has ended, or does not answer within the timeout of the process group.
        """
        try:
            return function(*args)
        except RuntimeError as error:
            raise WorkerError(f"rank {self._rank} stopped: {self._find_cause(error)}") from error

    def _find_cause(self, error: RuntimeError) -> str:
        """Return a sentence about the ranks that raised an error, or have not reached this rollout."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        try:
            store = store_of_ranks()
            keys = {rank: f"rl_ext/{rank}" for rank in others}
            reports = {rank: store.get(key).decode() if store.check([key]) else "0" for rank, key in keys.items()}
        except Exception:  # the process that keeps the store has ended too
            reports = {}
        failed = [f"rank {rank} raised {text}" for rank, text in reports.items() if not text.isdecimal()]
        if failed:
            return "; ".join(failed)
        late = [str(rank) for rank, count in reports.items() if int(count) < self._rollouts]
        names = f"rank {', '.join(late)}" if late else f"one of the ranks {others}"
        reason = str(error).splitlines()[0]
        return f"{names} was killed, or did not finish rollout {self._rollouts} before the timeout ({reason})"

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place."""
        self._call(dist.all_reduce, tensor)
        return tensor

    def _gather(self, value: Any) -> list[Any]:
        found = [None] * self._world
        self._call(dist.all_gather_object, found, value)
        return found

    # -- gradients

    def _average_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Average the gradients of an optimizer over all ranks, then clip them."""
        if not self._in_train:
            raise InvalidArgumentError(
                f"an optimizer step outside of {type(self).__name__}.train() of sb3_ext.tensor is not supported by "
                f"{self._world} ranks. Use super().train() in train(), or start one process"
            )
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total: Any = self._sum(torch.cat([gradient.flatten() for gradient in gradients])).div_(self._world)
        for gradient, part in zip(gradients, total.split([part.numel() for part in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._clip)

    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        """Update the policy with the data of all ranks."""
        if self._world == 1:
            super().train(*args, **kwargs)  # type: ignore[misc]
            return
        names = ("max_grad_norm", "normalize_advantage", "target_kl")
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        if "max_grad_norm" in given:
            self._clip, self.max_grad_norm = self.max_grad_norm, math.inf  # clips nothing before the average
        if given.get("normalize_advantage"):
            self.normalize_advantage, self.rollout_buffer.sum_over_ranks = False, self._sum
        if given.get("target_kl") is not None:
            mean = lambda kl: self._sum(torch.tensor([kl], dtype=torch.float64)).item() / self._world  # noqa: E731
            vars(self)["target_kl"] = _SharedThreshold(given["target_kl"], mean)
        self._in_train = True
        try:
            super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            vars(self).update(given, _clip=None, _in_train=False)
            if hasattr(self, "rollout_buffer"):
                self.rollout_buffer.sum_over_ranks = None

    # -- rollouts

    def _normalizations(self) -> list[TensorRunningMeanStd]:
        """Return the statistics of all ``TensorVecNormalize`` around the environment."""
        env: Any = self.env
        found: list[TensorRunningMeanStd] = []
        while isinstance(env, VecEnvWrapper):
            if isinstance(env, TensorVecNormalize):
                found += leaves([vars(env)[name] for name in ("obs_rms", "ret_rms") if name in vars(env)])
            env = env.venv
        return found

    def _copy_moments(self) -> list[Any]:
        """Return mean, variance and count of each normalization."""
        return [(part.mean.cpu(), part.var.cpu(), part.count) for part in self._normalizations()]

    def _add_episodes(self: Any, episodes: list[Any], successes: list[Any], count: int) -> None:
        """Add ended episodes and successes to the windows for logs, and count the episodes."""
        self.ep_info_buffer.extend(episodes)
        self.ep_success_buffer.extend(successes)
        self._episode_num += count if isinstance(self, OffPolicyAlgorithm) else 0  # as in Stable Baselines3
        if self._world > 1:
            self._new = self._new[0] + episodes, self._new[1] + successes

    def _exchange(self: Any, goes_on: bool) -> bool:
        """Combine steps, episodes and statistics of all ranks after a rollout; return whether no rank stops."""
        if self._world == 1:
            return goes_on
        self._report_rollout()
        steps = (self.num_timesteps - self._counts[0]) // self._world
        share = max(self._stats_window_size // self._world, 1)  # of each rank in the windows
        newest = [part[-share:] for part in self._new]
        own = steps, self._episode_num - self._counts[1], goes_on, newest, self._copy_moments()
        steps, episodes, go_on, new, moments = zip(*self._gather(own), strict=True)
        self.num_timesteps, self._episode_num = self._counts[0] + sum(steps), self._counts[1] + sum(episodes)
        windows = self.ep_info_buffer, self.ep_success_buffer
        for window, before, parts in zip(windows, self._windows, zip(*new, strict=True), strict=True):
            window.clear()
            window.extend(chain(before, *parts))
        columns = zip(self._normalizations(), self._moments, zip(*moments, strict=True), strict=True)
        for statistics, before, parts in columns:
            _combine(statistics, before, parts)
        self._begin_exchange()
        return all(go_on)

    def _begin_exchange(self: Any) -> None:
        """Remember what all ranks have in common."""
        self._counts = self.num_timesteps, self._episode_num
        self._windows, self._new = (list(self.ep_info_buffer), list(self.ep_success_buffer)), ([], [])
        self._moments = self._copy_moments()

    def _report_rollout(self) -> None:
        """Count the exchanges of this rank in the store, where other ranks find which one is missing."""
        self._rollouts += 1
        store = store_of_ranks()
        if store is not None:
            self._call(store.set, f"rl_ext/{self._rank}", str(self._rollouts))

    # -- start, errors and files

    def learn(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on the environments of all ranks; an error ends the other ranks too.

        :raises InvalidArgumentError: If the settings of the ranks differ.
        :raises WorkerError: If another rank has ended, or does not answer within the timeout of the process group.
        """
        try:
            return super().learn(*args, **kwargs)  # type: ignore[safe-super]
        except BaseException as error:
            store = store_of_ranks() if self._world > 1 else None
            if store is not None and not isinstance(error, WorkerError):
                with suppress(RuntimeError):  # the process that keeps the store has ended
                    store.set(f"rl_ext/{self._rank}", f"{type(error).__name__}: {error}".splitlines()[0])
            raise

    def _setup_learn(self: Any, total_timesteps: int, *args: Any, **kwargs: Any) -> Any:
        """Compare the settings of all ranks, and copy parameters and statistics of rank 0."""
        if self._world == 1:
            return super()._setup_learn(total_timesteps, *args, **kwargs)
        self._report_rollout()
        own = {"class": type(self).__name__, "total_timesteps": total_timesteps}
        settings = {name: getattr(self, name) for name in _SHARED if hasattr(self, name)}
        # Functions cannot be compared between processes.
        own |= {name: "function" if callable(value) else value for name, value in settings.items()}
        every = self._gather(own)
        for rank, other in enumerate(every):
            if other != every[0]:
                names = sorted(name for name in {*other, *every[0]} if other.get(name) != every[0].get(name))
                found = ", ".join(f"{name}={other.get(name)!r} and {every[0].get(name)!r}" for name in names)
                raise InvalidArgumentError(
                    f"ranks {rank} and 0 have {found}: expected equal values. Use the same arguments and files on all "
                    "ranks"
                )
        self._copy_from_rank_0()
        if self._rank:
            self.verbose = 0
            self.set_logger(Logger(None, []))
        moments = self._copy_moments()
        result = super()._setup_learn(total_timesteps, *args, **kwargs)
        self._begin_exchange()
        self._moments = moments  # the reset added observations
        return result

    def _init_callback(self: Any, callback: Any, progress_bar: bool = False) -> BaseCallback:
        """Start the callbacks, without a progress bar on ranks other than 0."""
        found = super()._init_callback(callback, progress_bar and self._rank == 0)
        if self._rank and any(isinstance(part, EvalCallback) for part in _all_callbacks(found)):
            raise InvalidArgumentError(
                f"EvalCallback on rank {self._rank} would write the files of rank 0: expected it on rank 0 only. Use "
                "callback=EvalCallback(...) if torch.distributed.get_rank() == 0 else None"
            )
        return found

    def _copy_from_rank_0(self: Any) -> None:
        """Copy parameters, states of optimizers and statistics of normalization from rank 0."""
        content = [b""]
        if self._rank == 0:
            file = io.BytesIO()
            variables = {name: getattr(self, name) for name in self._get_torch_save_params()[1]}
            torch.save((self.get_parameters(), variables, self._copy_moments()), file)
            content = [file.getvalue()]
        self._call(dist.broadcast_object_list, content, 0)
        if self._rank == 0:
            return
        parameters, variables, moments = torch.load(io.BytesIO(content[0]), self.device, weights_only=False)
        self.set_parameters(parameters, device=self.device)
        for name, value in variables.items():
            getattr(self, name).data.copy_(value)
        for statistics, values in zip(self._normalizations(), moments, strict=True):
            statistics.mean, statistics.var, statistics.count = values

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model on rank 0; do nothing on other ranks."""
        if self._rank == 0:
            super().save(*args, **kwargs)

    def _excluded_save_params(self: Any) -> list[str]:
        return [*super()._excluded_save_params(), *_NOT_SAVED]


_NOT_SAVED = [name for name in DataParallel.__annotations__ if name.startswith("_")]


def _all_callbacks(callback: Any) -> Iterator[BaseCallback]:
    yield callback
    inner = [*getattr(callback, "callbacks", []), getattr(callback, "callback", None)]
    for part in inner:
        if isinstance(part, BaseCallback):
            yield from _all_callbacks(part)


def _combine(statistics: TensorRunningMeanStd, before: Any, parts: Any) -> None:
    """Combine statistics that several ranks have updated, in the same order on each rank, for the same bits.

    :param before: mean, variance and count before the updates
    :param parts: mean, variance and count of each rank, which include those before
    """
    if all(count == before[2] for *_, count in parts):
        return
    # All parts include what was before. Deviations from a mean near the others are precise.
    weighted, origin = [*parts, (*before[:2], -(len(parts) - 1) * before[2])], parts[0][0]
    statistics.count = sum(count for *_, count in weighted)
    offset = sum((mean - origin) * count for mean, _, count in weighted) / statistics.count
    squares = sum((var + (mean - origin).square()) * count for mean, var, count in weighted) / statistics.count
    statistics.mean, statistics.var = origin + offset, (squares - offset.square()).clamp(min=0)
