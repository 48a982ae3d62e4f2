"""Rollout and replay buffers of :mod:`sb3_ext.tensor`, whose tensors stay on one device."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common import type_aliases as types
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.vector.array_frameworks import leaves, map_arrays, to_numpy
from sb3_ext._tensor_vec_env import copy_to_array, map_data
from sb3_ext._vector_steps import TensorInfos, expand, torch_dtype

__all__ = ["TensorReplayBuffer", "TensorRolloutBuffer"]


def _zeros(space: Any, device: Any, steps: int, n_envs: int) -> Any:
    """Return zero tensors for observations of a space, a dict for a Dict."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(part, device, steps, n_envs) for key, part in space.spaces.items()}
    shape = (steps, n_envs, *((1,) if isinstance(space, spaces.Discrete) else space.shape))
    try:
        if device.type == "cpu":  # np.zeros takes memory when it is written, torch.zeros takes all at once
            return torch.from_numpy(np.zeros(shape, space.dtype))
        return torch.zeros(shape, dtype=torch_dtype(space.dtype), device=device)
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"{steps} steps of {n_envs} environments do not fit on {device}. Use buffer_size={steps * n_envs // 10}"
        ) from error


def _as_row(row: torch.Tensor, values: Any) -> torch.Tensor:
    """Return a tensor or array in the shape of a row of a buffer."""
    value: torch.Tensor = torch.as_tensor(values)
    if value.shape[:1] != row.shape[:1] or value.numel() != row.numel():
        raise InvalidArgumentError(
            f"a part of the transition has shape {tuple(value.shape)}, expected {tuple(row.shape)}: one row per "
            "environment. Use a buffer that was made or saved with the same n_envs and spaces"
        )
    return value.view_as(row)


class TensorRolloutBuffer(RolloutBuffer):
    """``RolloutBuffer`` and ``DictRolloutBuffer`` with tensors on one device.

    Attributes have the names and shapes of Stable Baselines3: ``observations``, (n_steps, n_envs, ...), and so on. They
    are tensors. As an exception, ``values`` and ``returns`` are arrays from the first call of :meth:`get` until the
    next rollout, because ``train()`` logs their variance by NumPy. Observations and actions are not copied when they
    are added.

    :param args, kwargs: see ``RolloutBuffer``
    """

    rewards: Any
    advantages: Any
    returns: Any
    episode_starts: Any
    log_probs: Any
    values: Any
    sum_over_ranks: Any = None  # function that adds up a tensor over all ranks, if it normalizes advantages

    def reset(self) -> None:
        """Discard the rollout."""
        self._rows: dict[str, list[Any]] = {"observations": [], "actions": []}  # of each step, until get() joins them
        for name in ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages"):
            setattr(self, name, torch.zeros(self.buffer_size, self.n_envs, device=self.device))
        self.generator_ready = False
        BaseBuffer.reset(self)

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """Observations, (n_steps, n_envs, ...), after :meth:`get` (n_envs * n_steps, ...); None if there are none."""
        return self._stack_steps("observations")

    @property
    def actions(self) -> Any:  # type: ignore[override]
        """Actions, in the same form."""
        return self._stack_steps("actions")

    def _stack_steps(self, name: str, axis: int = 0) -> Any:
        """Stack observations or actions of all steps, unless :meth:`get` has joined them."""
        if self.generator_ready:
            return self._columns[name]
        rows = self._rows[name]
        return map_arrays(lambda *parts: torch.stack(parts, axis), *rows) if rows else None

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Add a step: observations (n_envs, ...), actions, rewards, starts of episodes, values, log probabilities."""
        given = {"rewards": reward, "episode_starts": episode_start, "values": value, "log_probs": log_prob}
        for name, tensor in given.items():
            row = getattr(self, name)[self.pos]
            row.copy_(_as_row(row, tensor))
        tensors = map_arrays(lambda part: torch.as_tensor(part, device=self.device), obs)
        tensors = map_arrays(lambda part: part.view(-1, 1) if part.ndim == 1 else part, tensors)
        self._rows["observations"].append(tensors)
        actions = torch.as_tensor(action, device=self.device).reshape(self.n_envs, self.action_dim)
        self._rows["actions"].append(actions)
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        """Compute returns and advantages of the rollout.

        :param last_values: values of the observations after the last step, (n_envs,) or (n_envs, 1)
        :param dones: whether episodes ended in the last step, (n_envs,)
        """
        next_values = torch.cat([self.values[1:], last_values.detach().reshape(1, -1)])
        ends = torch.as_tensor(dones, device=self.device).float()
        next_non_terminal = 1.0 - torch.cat([self.episode_starts[1:], ends[None]])
        # The order of operations is that of RolloutBuffer, so that results are equal bit for bit.
        deltas = self.rewards + self.gamma * next_values * next_non_terminal - self.values
        factors = self.gamma * self.gae_lambda * next_non_terminal
        last_gae_lam: Any = 0
        for step, (delta, factor) in reversed([*enumerate(zip(deltas, factors, strict=True))]):
            last_gae_lam = delta + factor * last_gae_lam
            self.advantages[step] = last_gae_lam
        self.returns = self.advantages + self.values

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Iterate over minibatches, in the random order of Stable Baselines3."""
        assert self.full, "the rollout is incomplete"
        indices = torch.from_numpy(np.random.permutation(self.buffer_size * self.n_envs)).to(self.device)
        if not self.generator_ready:
            self._flatten()
        batches = torch.split(indices, batch_size or len(indices))
        if self.sum_over_ranks is None:
            yield from map(self._get_samples, batches)
            return
        # Advantages of each minibatch are normalized over all ranks, with two sums for all minibatches.
        parts = [self._columns["advantages"][batch].double() for batch in batches]
        sums = self.sum_over_ranks(
            torch.stack([torch.stack([part.new_tensor(len(part)), part.sum()]) for part in parts])
        )
        means = sums[:, 1] / sums[:, 0]
        squares = [(part - mean).square().sum() for part, mean in zip(parts, means, strict=True)]
        scales = (self.sum_over_ranks(torch.stack(squares)) / (sums[:, 0] - 1)).sqrt().float() + 1e-8
        for batch, mean, scale in zip(batches, means.float(), scales, strict=True):
            samples = self._get_samples(batch)
            yield samples._replace(advantages=(samples.advantages - mean) / scale)

    def _flatten(self) -> None:
        """Join the axes of environments and steps."""
        self._columns: dict[str, Any] = {}
        for name in ("values", "log_probs", "advantages", "returns"):
            self._columns[name] = getattr(self, name).T.reshape(-1)
            flat = self._columns[name].view(-1, 1)
            setattr(self, name, to_numpy(flat) if name in ("values", "returns") else flat)
        for name in ("observations", "actions"):
            self._columns[name] = map_arrays(lambda part: part.flatten(0, 1), self._stack_steps(name, axis=1))
            self._rows[name] = []
        self.generator_ready = True

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> Any:
        """Return the samples of some indices, a tensor."""
        *columns, observations, actions = (
            map_arrays(lambda part: part.index_select(0, batch_inds), column) for column in self._columns.values()
        )
        kind: Any = types.DictRolloutBufferSamples if isinstance(observations, dict) else types.RolloutBufferSamples
        return kind(observations, actions.float(), *columns)


class _LastObservations:
    """Next observations that no later step of a ring of observations repeats, such as the last one of an episode.

    Each leaf has a table: first the next observations of the newest step, then a ring of others, which grows by need.
    Nothing waits for the device, except for one number after every ``size / 32`` steps.

    :param observations: ring of observations, (size, n_envs, ...), to which the user writes
    """

    _NEWEST, _REPEATED = -2, -1

    def __init__(self, observations: Any) -> None:
        first = next(leaves(observations))
        self._size, self._n_envs = first.shape[:2]
        self._interval = min(max(self._size // 32, 1), 1024)  # steps between two looks at the numbers
        self._steps = 0
        self._capacity = self._interval * self._n_envs + 1
        self._table = map_arrays(
            lambda part: part.new_zeros(self._n_envs + self._capacity, *part.shape[2:]), observations
        )
        # Of each row: the number of its next observation in the ring of the table; _NEWEST or _REPEATED.
        self._numbers = torch.full((self._size * self._n_envs,), self._REPEATED, device=first.device)
        self._next = torch.zeros((), dtype=torch.int64, device=first.device)
        self._looks = [0] * (-(-self._size // self._interval) + 1)  # next number at the looks of the last `size` steps

    def add(self, position: int, observations: Any, next_observations: Any) -> None:
        """Add the step whose observations were just written to the ring.

        :param position: position of the step in the ring
        :param observations: the ring
        :param next_observations: next observations, (n_envs, ...), of the ring's dtypes
        """
        newest = map_arrays(lambda part: part[: self._n_envs], self._table)
        if self._steps:
            before = (position - 1) % self._size * self._n_envs
            following = map_arrays(lambda part: part[position], observations)
            self._keep(slice(before, before + self._n_envs), newest, following)
        self._set_newest(position, next_observations)

    def _set_newest(self, position: int, next_observations: Any) -> None:
        """Store the next observations of the newest step."""
        self._steps += 1
        map_arrays(lambda table, new: table[: self._n_envs].copy_(new), self._table, next_observations)
        self._numbers[position * self._n_envs : (position + 1) * self._n_envs] = self._NEWEST

    def _keep(self, rows: Any, candidates: Any, following: Any) -> None:
        """Keep the next observations of some rows that differ from the observations after them.

        :param rows: slice or indices of the rows, in the order of steps
        :param candidates: next observations of the rows
        :param following: observations of the rows one step later
        """
        differs = torch.stack([*leaves(map_arrays(_rows_differ, candidates, following))]).any(0)
        numbers = self._next + differs.cumsum(0) - 1
        self._numbers[rows] = torch.where(differs, numbers, self._REPEATED)
        # Other devices than the CPU would wait for the number of rows, so all are copied, and those that do not differ
        # to the place of the next number, which is free.
        self._next = self._next + differs.sum()
        places = self._n_envs + torch.where(differs, numbers, self._next) % self._capacity
        kept = differs.nonzero().view(-1) if differs.is_cpu else torch.arange(len(differs), device=differs.device)

        def copy(table: torch.Tensor, part: torch.Tensor) -> None:
            _as_integers(table).index_copy_(0, places[kept], _as_integers(part).index_select(0, kept))

        if len(kept):
            map_arrays(copy, self._table, candidates)

    def reserve(self) -> None:
        """Make place for the next observations of the steps until the next look at the numbers."""
        if self._steps == 0 or self._steps % self._interval:
            return
        look = self._steps // self._interval
        begin, end = self._looks[(look + 1) % len(self._looks)], int(self._next)
        self._looks[look % len(self._looks)] = end
        needed = end - begin + self._interval * self._n_envs + 1
        if needed <= self._capacity:
            return
        numbers, capacity = torch.arange(begin, end, device=self._next.device), needed + needed // 2
        old, new = (self._n_envs + numbers % size for size in (self._capacity, capacity))

        def copy(table: torch.Tensor) -> torch.Tensor:
            larger = table.new_zeros(self._n_envs + capacity, *table.shape[1:])
            larger[: self._n_envs] = table[: self._n_envs]
            _as_integers(larger).index_copy_(0, new, _as_integers(table).index_select(0, old))
            return larger

        self._table, self._capacity = map_arrays(copy, self._table), capacity

    def add_all(self, first: int, count: int, observations: Any, next_observations: Any) -> None:
        """Add the steps of a ring.

        :param first: position of the oldest step
        :param count: number of steps
        :param next_observations: next observations at the positions of their steps, (size, n_envs, ...)
        """
        n_rows, select = len(self._numbers), partial(torch.index_select, dim=0)
        flatten = partial(map_arrays, lambda part: _as_integers(part).flatten(0, 1))
        ring, candidates = flatten(observations), flatten(next_observations)
        rows = first * self._n_envs + torch.arange((count - 1) * self._n_envs, device=self._next.device)
        for part in (rows % n_rows).split(self._interval * self._n_envs):
            self.reserve()
            following = partial(select, index=(part + self._n_envs) % n_rows)
            self._keep(part, map_arrays(partial(select, index=part), candidates), map_arrays(following, ring))
            self._steps += len(part) // self._n_envs
        self.reserve()  # for the rows that the next steps keep
        newest = (first + count - 1) % self._size
        self._set_newest(newest, map_arrays(lambda part: part[newest], next_observations))

    def select(self, observations: Any, rows: torch.Tensor) -> Any:
        """Return the next observations of some rows of the ring, (size * n_envs)."""
        numbers = self._numbers.index_select(0, rows)
        following = (rows + self._n_envs) % len(self._numbers)
        kept = torch.where(numbers >= 0, self._n_envs + numbers % self._capacity, rows % self._n_envs)

        def join(ring: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            repeated = ring.flatten(0, 1).index_select(0, following)
            return torch.where(expand(numbers == self._REPEATED, repeated), repeated, table.index_select(0, kept))

        return map_arrays(join, observations, self._table)


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by size in bytes


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers as integers of the same size, because torch does not index uint16, uint32 and uint64."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def _rows_differ(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return whether rows differ in any bit, so that NaN equals NaN, and 0.0 differs from -0.0."""
    first, second = (part.flatten(1) if part.ndim > 1 else part.unsqueeze(-1) for part in (first, second))
    nbytes = first.shape[-1] * first.itemsize
    widest = next(dtype for size, dtype in _INTEGERS.items() if nbytes % size == 0)
    return (first.view(widest) != second.view(widest)).any(-1)


class TensorReplayBuffer(ReplayBuffer):
    """``ReplayBuffer``, ``DictReplayBuffer`` and ``NStepReplayBuffer`` with tensors on one device.

    Each observation is stored once, where Stable Baselines3 stores most of them twice. Attributes have the names and
    shapes of Stable Baselines3, and are tensors; ``next_observations`` is a copy.

    :param n_steps: number of rewards in a return; only 1 for a Dict
    :param gamma: discount of returns
    :param args, kwargs: see ``ReplayBuffer``; ``optimize_memory_usage`` is not supported
    :raises InvalidArgumentError: If ``optimize_memory_usage`` is set.
    :raises OutOfMemoryError: If the observations do not fit.
    """

    observations: Any
    actions: Any
    rewards: Any
    dones: Any
    timeouts: Any

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> None:
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if optimize_memory_usage:
            raise InvalidArgumentError(
                "optimize_memory_usage=True is not supported on tensors, which store each observation once anyway: "
                "expected False. Leave it out"
            )
        if n_steps < 1 or (n_steps > 1 and isinstance(observation_space, spaces.Dict)):
            raise InvalidArgumentError(
                f"n_steps={n_steps} is not supported for {type(observation_space).__name__} observations, expected 1. "
                "Use n_steps=1"
            )
        self.optimize_memory_usage, self.handle_timeout_termination = False, handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        self.buffer_size = size = max(buffer_size // n_envs, 1)
        self.observations = _zeros(observation_space, self.device, size, n_envs)
        self._last = _LastObservations(self.observations)
        dtype = torch_dtype(np.dtype(self._maybe_cast_dtype(action_space.dtype)))
        self.actions = torch.zeros(size, n_envs, self.action_dim, dtype=dtype, device=self.device)
        self.rewards, self.dones, self.timeouts = (torch.zeros(size, n_envs, device=self.device) for _ in range(3))

    @property
    def next_observations(self) -> Any:  # type: ignore[override]
        """Copy of the next observations, (size, n_envs, ...), without a meaning where there are no transitions."""
        found = self._last.select(self.observations, torch.arange(self.dones.numel(), device=self.device))
        return map_arrays(lambda part, ring: part.view_as(ring), found, self.observations)

    @defer_signals  # an interrupt could change the next observations of the previous step
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add a transition of each environment.

        :param infos: infos of an environment on tensors, or a list of dicts
        """
        given = {"actions": action, "rewards": reward, "dones": done}
        if self.handle_timeout_termination:
            given["timeouts"] = (
                infos.truncated
                if isinstance(infos, TensorInfos)
                else np.array([info.get("TimeLimit.truncated", False) for info in infos])
            )
        # All parts are checked before the first is written, because the row may hold a transition.
        convert = partial(map_arrays, lambda ring, value: _as_row(ring[0], value))
        obs, next_obs = convert(self.observations, obs), convert(self.observations, next_obs)
        rows = {name: _as_row(getattr(self, name)[0], value) for name, value in given.items()}
        self._last.reserve()
        map_arrays(lambda ring, value: ring[self.pos].copy_(value), self.observations, obs)
        for name, value in rows.items():
            getattr(self, name)[self.pos] = value
        self._last.add(self.pos, self.observations, next_obs)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def _get_samples(self, batch_inds: np.ndarray[Any, Any], env: Any = None) -> Any:
        """Return transitions of random environments at some positions."""
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        rows = torch.from_numpy(batch_inds * self.n_envs + env_indices).to(self.device)

        def select(part: torch.Tensor) -> torch.Tensor:
            return part.flatten(0, 1).index_select(0, rows)

        observations, actions = map_arrays(select, self.observations), select(self.actions)
        discounts: list[torch.Tensor] = []
        if self.n_steps == 1:
            rewards = select(self.rewards).view(-1, 1)
            rewards = rewards if env is None else env.normalize_reward(rewards)
        else:
            rewards, rows, *discounts = self._returns(rows, env)
        following = self._last.select(self.observations, rows)
        observations, following = (self._normalize_obs(part, env) for part in (observations, following))
        dones = (select(self.dones) * (1 - select(self.timeouts))).view(-1, 1)
        kind: Any = types.DictReplayBufferSamples if isinstance(observations, dict) else types.ReplayBufferSamples
        return kind(observations, actions, following, dones, rewards, *discounts)

    def _returns(self, rows: torch.Tensor, env: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return n-step returns of some rows, the rows where they end, and discounts of the values there.

        They end with an episode or at the newest step, as in ``NStepReplayBuffer``.
        """
        steps = torch.arange(self.n_steps, device=self.device)
        each = (rows[:, None] + steps * self.n_envs) % self.dones.numel()  # (batch, n_steps)
        newest = each // self.n_envs == (self.pos - 1) % self.buffer_size
        ends = ((self.dones + self.timeouts).view(-1)[each] > 0) | newest
        ends[:, -1] = True
        count = ends.int().argmax(1)  # the first
        rewards = self.rewards.view(-1)[each]
        rewards = rewards if env is None else env.normalize_reward(rewards)
        factors = torch.from_numpy(self.gamma ** np.arange(self.n_steps + 1, dtype=np.float32)).to(self.device)
        terms = rewards * factors[:-1] * (steps <= count[:, None])
        total = terms[:, 0].clone()
        for term in terms.T[1:]:  # in NumPy's order, so that returns are equal bit for bit
            total += term
        return total.view(-1, 1), each.gather(1, count[:, None]).view(-1), factors[count + 1].view(-1, 1)

    def to_arrays(self) -> ReplayBuffer:
        """Copy the transitions to a ``ReplayBuffer``, ``DictReplayBuffer`` or ``NStepReplayBuffer``."""
        kind: Any = DictReplayBuffer if isinstance(self.observation_space, spaces.Dict) else ReplayBuffer
        kind = buffers.NStepReplayBuffer if self.n_steps > 1 else kind
        found = kind.__new__(kind)
        values = {**vars(self), "next_observations": self.next_observations}
        dropped = ("_last", *(("n_steps", "gamma") if self.n_steps == 1 else ()))
        values = {name: map_data(copy_to_array, value) for name, value in values.items() if name not in dropped}
        vars(found).update(values)
        return found  # type: ignore[no-any-return]

    @classmethod
    def from_arrays(cls, buffer: ReplayBuffer, device: torch.device) -> TensorReplayBuffer:
        """Copy the transitions of a ``ReplayBuffer``, ``DictReplayBuffer`` or ``NStepReplayBuffer`` to a device.

        :raises InvalidTypeError: If it is a buffer of another class.
        """
        known = (ReplayBuffer, DictReplayBuffer, getattr(buffers, "NStepReplayBuffer", ReplayBuffer))
        if type(buffer) not in known or buffer.optimize_memory_usage:
            raise InvalidTypeError(
                f"cannot read a {type(buffer).__name__}, expected a ReplayBuffer, DictReplayBuffer or "
                "NStepReplayBuffer without optimize_memory_usage. Use the algorithm of stable_baselines3"
            )
        found = cls.__new__(cls)
        found.n_steps, found.gamma = 1, 0.99
        copy = partial(map_data, partial(torch.tensor, device=device))
        values = {name: copy(value) for name, value in vars(buffer).items() if name != "next_observations"}
        vars(found).update(values, device=device)
        found._last = _LastObservations(found.observations)
        if count := buffer.size():
            found._last.add_all(buffer.pos - count, count, found.observations, copy(buffer.next_observations))
        return found
