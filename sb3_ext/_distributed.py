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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnvWrapper

from rl_ext_core.devices import resolve_device
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from sb3_ext._compat import store_of_ranks
from sb3_ext._tensor_vec_env import TensorRunningMeanStd, TensorVecNormalize

__all__ = ["DataParallel"]

_MISSING = object()
# Settings that must be equal on all ranks, because the ranks take the same number of steps.
_SHARED = [
    "n_envs",
    "n_steps",
    "batch_size",
    "n_epochs",
    "gradient_steps",
    "train_freq",
    "learning_starts",
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


class _Episodes(deque[Any]):
    """Window of the newest episodes of all ranks, for logs.

    :param shared: episodes at the last exchange
    :ivar new: newest episodes of this rank since then
    """

    def __init__(self, shared: Iterable[Any], maxlen: int) -> None:
        super().__init__(shared, maxlen)
        self.shared, self.new = deque(self, maxlen), deque[Any](maxlen=maxlen)

    def append(self, item: Any) -> None:
        """Add an episode of this rank."""
        super().append(item)
        self.new.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Add episodes of this rank."""
        for item in items:
            self.append(item)

    def __reduce__(self) -> Any:
        return deque, (list(self), self.maxlen)  # SB3 loads files without this class


class DataParallel:
    """Mixin of an algorithm. It changes nothing unless the process group has several ranks."""

    # Attributes of the algorithm.
    policy: Any
    env: Any
    device: torch.device
    n_envs: int
    num_timesteps: int
    ep_info_buffer: Any
    ep_success_buffer: Any
    _episode_num: int
    _stats_window_size: int

    _rank, _world = 0, 1
    _in_train = False
    _clip: float | None = None  # max_grad_norm, which applies to averaged gradients
    _rollouts = 0  # number of exchanges, by which a missing rank is found
    _counts = (0, 0)  # num_timesteps and _episode_num after the last exchange
    _moments: list[Any]  # mean, variance and count of each normalization after the last exchange

    def _setup_model(self: Any) -> None:
        """Join the process group, choose the device of this rank, and average gradients before each optimizer step."""
        _start_group(self.device)
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._world == 1:
            super()._setup_model()  # type: ignore[misc]
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
        super()._setup_model()  # type: ignore[misc]
        self._check_model()
        owners = [*self.policy.modules(), *([self] if getattr(self, "ent_coef_optimizer", None) is not None else [])]
        for owner in owners:
            optimizer = owner.ent_coef_optimizer if owner is self else getattr(owner, "optimizer", None)
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
        super().set_random_seed(None if seed is None else seed + self._rank * self.n_envs)  # type: ignore[misc]

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
        store = store_of_ranks()
        others = [rank for rank in range(self._world) if rank != self._rank]
        try:
            failed = {rank: store.get(f"rl_ext/error/{rank}").decode() for rank in others if _has(store, "error", rank)}
            reached = {
                rank: int(store.get(f"rl_ext/rollout/{rank}")) if _has(store, "rollout", rank) else 0 for rank in others
            }
        except Exception:  # the process that keeps the store has ended too
            failed, reached = {}, {}
        if failed:
            return "; ".join(f"rank {rank} raised {text}" for rank, text in failed.items())
        late = [rank for rank, count in reached.items() if count < self._rollouts]
        names = f"rank {', '.join(map(str, late))}" if late else f"one of the ranks {others}"
        reason = str(error).splitlines()[0]
        return f"{names} was killed, or did not finish rollout {self._rollouts} before the timeout ({reason})"

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place."""
        self._call(dist.all_reduce, tensor)
        return tensor

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
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
                for part in (vars(env)[name] for name in ("obs_rms", "ret_rms") if name in vars(env)):
                    found += part.values() if isinstance(part, dict) else [part]
            env = env.venv
        return found

    def _end_rollout(self: Any, goes_on: bool) -> bool:
        """Exchange steps, episodes and statistics; return whether no rank stops."""
        if self._world == 1:
            return super()._end_rollout(goes_on)  # type: ignore[misc,no-any-return]
        self._read_episodes()
        self._report_rollout()
        windows = self.ep_info_buffer, self.ep_success_buffer
        steps = (self.num_timesteps - self._counts[0]) // self._world
        own = [steps, self._episode_num - self._counts[1], goes_on, [list(window.new) for window in windows]]
        moments = [_new_moments(*pair) for pair in zip(self._normalizations(), self._moments, strict=True)]
        every = self._gather([*own, moments])
        steps, episodes, go_on, new, of_ranks = zip(*every, strict=True)
        self.num_timesteps, self._episode_num = self._counts[0] + sum(steps), self._counts[1] + sum(episodes)
        for window, parts in zip(windows, zip(*new, strict=True), strict=True):
            # The window of logs ends with the newest episodes of each rank, in turns.
            turns = [*zip_longest(*(reversed(part) for part in parts), fillvalue=_MISSING)]
            window.shared.extend(item for turn in reversed(turns) for item in turn if item is not _MISSING)
        columns = zip(self._normalizations(), self._moments, zip(*of_ranks, strict=True), strict=True)
        for statistics, before, parts in columns:
            statistics.mean, statistics.var, statistics.count = before
            for mean, var, count in parts:  # in the same order on each rank, so that all get the same bits
                if count:
                    statistics.update_from_moments(mean.to(self.device), var.to(self.device), count)
        self._begin_exchange()
        return all(go_on)

    def _begin_exchange(self: Any) -> None:
        """Remember what all ranks have in common."""
        self._counts = self.num_timesteps, self._episode_num
        self._moments = [(part.mean, part.var, part.count) for part in self._normalizations()]
        self.ep_info_buffer, self.ep_success_buffer = (
            _Episodes(getattr(window, "shared", window), self._stats_window_size)
            for window in (self.ep_info_buffer, self.ep_success_buffer)
        )

    def _report_rollout(self) -> None:
        """Count the exchanges of this rank in the store, where other ranks find which one is missing."""
        self._rollouts += 1
        store = store_of_ranks()
        if store is not None:
            self._call(store.set, f"rl_ext/rollout/{self._rank}", str(self._rollouts))

    def _on_step(self: Any) -> None:
        """Update the exploration rate and target network of DQN, whose interval counts the steps of all ranks."""
        self.n_envs *= self._world
        try:
            super()._on_step()  # type: ignore[misc]
        finally:
            self.n_envs //= self._world

    # -- start, errors and files

    def learn(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on the environments of all ranks; an error ends the other ranks too.

        :raises InvalidArgumentError: If the settings of the ranks differ.
        :raises WorkerError: If another rank has ended, or does not answer within the timeout of the process group.
        """
        try:
            return super().learn(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            store = store_of_ranks() if self._world > 1 else None
            if store is not None and not isinstance(error, WorkerError):
                with suppress(RuntimeError):  # the process that keeps the store has ended
                    store.set(f"rl_ext/error/{self._rank}", f"{type(error).__name__}: {error}".splitlines()[0])
            raise

    def _setup_learn(self: Any, total_timesteps: int, *args: Any, **kwargs: Any) -> Any:
        """Compare the settings of all ranks, and copy parameters and statistics of rank 0."""
        if self._world == 1:
            return super()._setup_learn(total_timesteps, *args, **kwargs)  # type: ignore[misc]
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
        self._counts, self._moments = (0, 0), [(part.mean, part.var, part.count) for part in self._normalizations()]
        found = super()._setup_learn(total_timesteps, *args, **kwargs)  # type: ignore[misc]
        before = self._moments
        self._begin_exchange()
        self._moments = before  # the reset added observations
        return found

    def _init_callback(self: Any, callback: Any, progress_bar: bool = False) -> BaseCallback:
        """Start the callbacks, without a progress bar on ranks other than 0."""
        found = super()._init_callback(callback, progress_bar and self._rank == 0)  # type: ignore[misc]
        if self._rank and any(isinstance(part, EvalCallback) for part in _all_callbacks(found)):
            raise InvalidArgumentError(
                f"EvalCallback on rank {self._rank} would write the files of rank 0: expected it on rank 0 only. Use "
                "callback=EvalCallback(...) if torch.distributed.get_rank() == 0 else None"
            )
        return found  # type: ignore[no-any-return]

    def _copy_from_rank_0(self: Any) -> None:
        """Copy parameters, states of optimizers and statistics of normalization from rank 0."""
        content = [b""]
        if self._rank == 0:
            file = io.BytesIO()
            variables = {name: getattr(self, name) for name in self._get_torch_save_params()[1]}
            statistics = [(part.mean, part.var, part.count) for part in self._normalizations()]
            torch.save((self.get_parameters(), variables, statistics), file)
            content = [file.getvalue()]
        self._call(dist.broadcast_object_list, content, 0)
        if self._rank == 0:
            return
        parameters, variables, statistics = torch.load(io.BytesIO(content[0]), self.device, weights_only=False)
        self.set_parameters(parameters, device=self.device)
        for name, value in variables.items():
            getattr(self, name).data.copy_(value)
        for part, moments in zip(self._normalizations(), statistics, strict=True):
            part.mean, part.var, part.count = moments

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model on rank 0; do nothing on other ranks."""
        if self._rank == 0:
            super().save(*args, **kwargs)  # type: ignore[misc]

    def save_replay_buffer(self: Any, path: Any) -> None:
        """Save the replay buffer, with one rank."""
        if self._world > 1:
            raise InvalidArgumentError(
                f"path={str(path)!r} would contain the transitions of one of {self._world} ranks: expected a file for "
                'each. Use save_to_pkl(f"buffer-{rank}.pkl", model.replay_buffer.to_arrays())'
            )
        super().save_replay_buffer(path)  # type: ignore[misc]

    def _excluded_save_params(self: Any) -> list[str]:
        return [*super()._excluded_save_params(), *_PRIVATE]  # type: ignore[misc]


_PRIVATE = [
    "_rank",
    "_world",
    "_in_train",
    "_clip",
    "_rollouts",
    "_counts",
    "_moments",
]


def _has(store: Any, kind: str, rank: int) -> bool:
    """Return whether a rank has stored an error or a number of rollouts."""
    return bool(store.check([f"rl_ext/{kind}/{rank}"]))


def _all_callbacks(callback: Any) -> Iterator[BaseCallback]:
    """Iterate over a callback and those in it."""
    yield callback
    inner = [*getattr(callback, "callbacks", []), getattr(callback, "callback", None)]
    for part in inner:
        if isinstance(part, BaseCallback):
            yield from _all_callbacks(part)


def _new_moments(statistics: TensorRunningMeanStd, before: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return mean, variance and count of what was added to statistics since the last exchange."""
    mean0, var0, count0 = (
        part.to(statistics.mean.device) if isinstance(part, torch.Tensor) else part for part in before
    )
    count = statistics.count - count0
    if count <= 0:
        return statistics.mean.cpu(), statistics.var.cpu(), 0
    mean = (statistics.mean * statistics.count - mean0 * count0) / count
    squares = statistics.var * statistics.count - var0 * count0
    squares = squares - (mean - mean0).square() * count0 * count / statistics.count
    return mean.cpu(), (squares / count).clamp(min=0).cpu(), count
