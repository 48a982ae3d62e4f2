"""One step and one reset of the wrapped environment, as dicts of tensors: what the wrapper's methods have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import Composite, OneHot, TensorSpec

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext.gym.io import (
    compile_action,
    compile_flags,
    compile_observation,
    compile_reward,
    counted_from_zero,
    keep_when_freed,
    no_end,
    no_flags,
    without_need,
)
from torchrl_ext.gym.vector import (
    Autoreset,
    assigned,
    equal,
    final_observation,
    invalid,
    is_batch,
    is_one_each,
    last_info,
    merged_info,
    pair,
    partial_reset,
    rows_of,
    take,
    where,
    without_final,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BatchedEngine", "Layout", "SingleEngine", "compiled_reader", "compiled_step"]


@dataclass(frozen=True)
class Layout:
    """What an engine is compiled from.

    :param env: the environment
    :param observation: spec of what it returns, with the batch, without infos
    :param key: of the one entry, where observations are no dicts
    :param observation_starts: what the integers in it count from, where that is not zero
    :param action: spec of its action
    :param action_starts: the same of it
    :param reward: spec of its reward
    :param batch_size: of the wrapper
    :param device: of the tensors
    :param env_type: ``"numpy"`` or ``"torch"``
    :param env_device: where a torch environment lives
    :param copy: True, False or ``"auto"``
    :param clip_actions: bound on the magnitude of continuous actions
    :param frame_skip: environment steps to a step
    :param finite_horizon: whether time-outs are terminations
    """

    env: Any
    observation: Composite
    key: str | None
    observation_starts: Any
    action: TensorSpec
    action_starts: Any
    reward: TensorSpec
    batch_size: torch.Size
    device: torch.device | None
    env_type: str
    env_device: torch.device | None
    copy: bool | str
    clip_actions: float | None
    frame_skip: int
    finite_horizon: bool


def compiled_step(layout: Layout) -> Callable[[Any], tuple[Any, Any, Any, Any, Any]]:
    """Compile an environment step that takes the action of a TensorDict and sums rewards over skipped frames."""
    decode = compile_action(
        layout.action,
        env_type=layout.env_type,
        batched=bool(layout.batch_size),
        clip=layout.clip_actions,
        device=layout.env_device if layout.env_device != layout.device else None,
        start=layout.action_starts,
    )
    env, skip = layout.env, layout.frame_skip
    if layout.finite_horizon:
        return _ending(compiled_step(replace(layout, finite_horizon=False)))
    if skip == 1:
        return lambda action: _five(env.step(decode(action)))

    def repeat(action: Any) -> tuple[Any, Any, Any, Any, Any]:
        total: Any = 0
        for _ in range(skip):
            # decoded anew: the environment may have edited its action
            observation, reward, terminated, truncated, info = _five(env.step(decode(action)))
            try:
                total = total + reward
                done = terminated | truncated
            except TypeError:
                raise EnvironmentOutputError(
                    f"step() returned the reward {reward!r} and the flags {terminated!r} and {truncated!r}; expected a "
                    "number, or an array, and booleans, or arrays of them"
                ) from None
            if done.any() if hasattr(done, "any") else done:
                break
        return observation, total, terminated, truncated, info

    return repeat


def _ending(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turn time-outs into terminations."""

    def run(action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, terminated, truncated, info = step(action)
        try:
            ended = terminated | truncated
            return observation, reward, ended, ended ^ ended, info
        except TypeError:
            raise no_flags(terminated, truncated) from None

    return run


def _five(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    if type(result) is tuple and len(result) == 5:
        return result
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return tuple(result)
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    raise EnvironmentOutputError(
        f"step() returned {found}; expected the 5 of gymnasium: observation, reward, terminated, truncated, info"
    )


def compiled_reader(layout: Layout, sample: Any) -> Callable[[Any], dict[str, Any]]:
    """Compile the reader of observations."""

    def compile_with(copy: bool) -> Callable[[Any], dict[str, Any]]:
        starts = layout.observation_starts
        return compile_observation(
            layout.observation, sample, key=layout.key, device=layout.device, copy=copy, starts=starts
        )

    if layout.copy != "auto":
        return compile_with(bool(layout.copy))
    copied = compile_with(True)
    return copied if layout.key is None else without_need(copied, compile_with(False))


class SingleEngine:
    """Steps and resets one environment.

    :param layout: what to compile from
    :param sample: one of its observations; None: not seen yet
    """

    def __init__(self, layout: Layout, sample: Any) -> None:
        self._read = compiled_reader(layout, sample)
        self.step = self._compile_step(layout, self._read)
        self.env, self.batch_size, self.device = layout.env, layout.batch_size, layout.device
        self.frame_skip = layout.frame_skip
        self.containers = tuple(key for key, part in layout.observation.items() if isinstance(part, Composite))

    @staticmethod
    def _compile_step(
        layout: Layout, read: Callable[[Any], dict[str, Any]]
    ) -> Callable[[Any], tuple[dict[str, Any], bool, Any]]:
        step, device = compiled_step(layout), layout.device
        read_reward = compile_reward(layout.reward, batched=False, device=device)
        tensor, shape = torch.tensor, (1,)

        def run(action: Any) -> tuple[dict[str, Any], bool, Any]:
            observation, reward, terminated, truncated, info = step(action)
            data = read(observation)
            data["reward"] = read_reward(reward)
            try:
                ended = bool(terminated or truncated)
            except (ValueError, RuntimeError):  # of arrays
                raise no_flags(terminated, truncated) from None
            if ended:
                flags = ((True,), (bool(terminated),), (bool(truncated),))
                data["done"], data["terminated"], data["truncated"] = tensor(flags, device=device).unbind(0)
                return data, True, info
            if terminated is None or truncated is None:
                raise no_flags(terminated, truncated)
            data["done"], data["terminated"], data["truncated"] = no_end(shape, device)
            return data, False, info

        return run

    memory = None

    def take_up(self, memory: Any) -> None:
        """Remember nothing: there is nothing that the next reset has to know."""

    @staticmethod
    def closing(info: Any) -> Any:
        """Give the info that belongs to the observations of the last step."""
        return info

    def begin(self, result: Any) -> tuple[dict[str, Any], Any]:
        """Take in what a reset returned.

        :return: the observations, and the info
        """
        observation, info = pair(result)
        return self._read(observation), info

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """Reset.

        :param mask: says that all are reset: there is one
        :return: the observations, and the info
        """
        del mask
        return self.begin(self.env.reset(**kwargs))

    def reset_done(self, data: dict[str, Any]) -> dict[str, Any]:
        """Reset after a step in which it was done.

        :param data: the entries of ``next``
        :return: the observations
        """
        del data
        return self.begin(self.env.reset())[0]

    def not_done(self) -> tuple[torch.Tensor, ...]:
        """Make flags for what follows a reset: done, terminated, truncated."""
        return no_end((1,), self.device)


Entries = dict[str, Any]

_SMALL = 64 << 10  # bytes


class BatchedEngine:
    """Steps and resets a vectorised environment.

    :param layout: what to compile from
    :param sample: one of its observations; None: not seen yet
    :param mode: when it resets itself
    :param missing: what stands for a last observation that it does not give: ``"nan"``, ``"previous"`` or ``"error"``
    """

    def __init__(self, layout: Layout, sample: Any, *, mode: Autoreset, missing: str) -> None:
        self._layout, self._missing = layout, missing
        self.env, self.batch_size, self.device = layout.env, layout.batch_size, layout.device
        self.frame_skip = layout.frame_skip
        self._same_step = mode is Autoreset.SAME_STEP
        self._count = layout.batch_size[0]
        # Asking a GPU whether anything is done makes the step wait for it.
        self._looks = layout.device is None or layout.device.type == "cpu"
        nbytes = sum(leaf.nbytes for leaf in layout.observation.zero().values(True, True))
        # Then one operation over all rows is faster than to take some out.
        self._small = nbytes <= _SMALL
        if self._looks:
            keep_when_freed(nbytes)
        self._step = compiled_step(layout)
        self._reward = compile_reward(layout.reward, batched=True, device=layout.device)
        self._flags = compile_flags(torch.Size((*layout.batch_size, 1)), device=layout.device)
        self._reset_rows, self._trusted = partial_reset(layout.env, mode)
        self._keys = tuple(layout.observation.keys())
        self.containers = tuple(key for key, part in layout.observation.items() if isinstance(part, Composite))
        self._read = compiled_reader(layout, sample)
        # What the environment returned last, where that is asked for later.
        self._remembers = not self._trusted or missing == "previous"
        self._now: Entries | None = None
        # Which were done in the last step, where that was looked at.
        self.rows: torch.Tensor | None = None
        # After a step in which some were done and reset: which, every observation that now holds, and the info.
        self._pending: tuple[torch.Tensor, Entries, Any] | None = None

    def step(self, action: Any) -> tuple[Entries, bool, Any]:
        """Take a step.

        :param action: as it stands in the TensorDict
        :return: the entries of ``next``, whether something may be done, and the info
        """
        # Forgotten first: what interrupts this leaves nothing behind that is no longer true.
        before, self._now, self._pending = self._now, None, None
        observation, reward, terminated, truncated, info = self._step(action)
        data = self._read(observation)
        data["reward"] = self._reward(reward)
        data["done"], data["terminated"], data["truncated"] = self._flags(terminated, truncated)
        if self._remembers:
            self._now = self._kept(data)
        mask = data["done"].view(-1)
        if self._looks:
            self.rows = mask.nonzero().view(-1)
            if not len(self.rows):
                return data, False, info
        if self._same_step:
            observations = {key: data[key] for key in self._keys}
            data.update(self._last(observations, mask, final_observation(info), before))
            self._pending = (mask.clone(), observations, info)
        return data, True, info

    def _kept(self, data: Entries) -> Entries:
        """Copy observations: what is handed out may be edited, and so may what is not copied."""
        return {key: data[key].clone() for key in self._keys}

    @property
    def memory(self) -> Any:
        """What the next step and reset have to know of the last one."""
        return self._now, self._pending

    def take_up(self, memory: Any) -> None:
        """Remember what another engine of the same environment did, on another device maybe."""
        if memory is not None:
            self._now, self._pending = (_moved(part, self.device) for part in memory)

    def closing(self, info: Any) -> Any:
        """Give the info that belongs to the observations of the last step, from what that step returned."""
        if self._pending is None:
            return info
        return last_info(info, self._pending[0].nonzero().view(-1).tolist(), self._count)

    def _last(self, observations: Entries, mask: torch.Tensor, final: Any, before: Entries | None) -> Entries:
        """Put the last observations where sub-environments were done, into new tensors."""
        spec, key, rows = self._layout.observation, self._layout.key, self.rows
        starts = self._layout.observation_starts
        if final is None and self._missing == "error" and (rows is not None or mask.any()):
            raise EnvironmentOutputError(
                "sub-environments are done and the info holds no final_obs: their last observations are lost. Make the "
                'environment return them, or write missing_final_obs="nan" or "previous"'
            )
        if final is None:
            values = before if self._missing == "previous" else None
            if rows is None:
                return where(spec, observations, mask, values)
            if values is None:
                return invalid(spec, observations, rows)
            return written(spec, observations, rows, take(spec, values, rows))
        if starts is not None:
            rows = mask.nonzero().view(-1) if rows is None else rows
        elif (rows is None or self._small) and is_batch(final, self._count):
            return where(spec, observations, mask, final if key is None else {key: final})
        if rows is None:
            rows = mask.nonzero().view(-1)
        elif starts is None and key is not None and is_one_each(final) and len(final) == self._count:
            quick = None if isinstance(spec[key], OneHot) else assigned(observations[key], rows.tolist(), final)
            if quick is not None:
                return {key: quick}
        taken = rows_of(final, rows.tolist(), self._count)
        return written(spec, observations, rows, counted_from_zero(taken if key is None else {key: taken}, starts))

    def begin(self, result: Any) -> tuple[Entries, Any]:
        """Take in what a reset of all returned.

        :return: the observations, and the info
        """
        observation, info = pair(result)
        data = self._read(observation)
        self._now = self._kept(data) if self._remembers else None
        return data, info

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset all, or those of a mask.

        :param mask: (n,) booleans; those that have reset themselves in the last step are not reset again, unless there
            are arguments for the reset
        :return: the observations of all, and the info
        """
        pending = None if kwargs else self._pending
        if mask is None or (pending is None and bool(mask.all())):
            self._pending = self._now = None
            return self.begin(self._layout.env.reset(**kwargs))
        if pending is None:
            return self._partially(mask, **kwargs)
        self._pending = None
        done, observations, info = pending
        left = mask & ~done
        info = without_final(info)
        if not left.any():
            return observations, info
        fresh, new_info = self._partially(left, **kwargs)
        rows = left.nonzero().view(-1)
        spec = self._layout.observation
        return (
            written(spec, observations, rows, take(spec, fresh, rows)),
            merged_info(info, new_info, rows.tolist(), self._count),
        )

    def reset_done(self, data: Entries) -> Entries:
        """Give the observations that follow a step in which something may be done.

        :param data: the entries of ``next``
        :return: the observations of all
        """
        if self._pending is not None:
            observations, self._pending = self._pending[1], None
            return observations
        mask, spec = data["done"].view(-1), self._layout.observation
        rows = mask.nonzero().view(-1) if self.rows is None else self.rows
        before = {key: data[key] for key in self._keys}
        if not len(rows):
            return before
        fresh = self.begin(self._layout.env.reset())[0] if len(rows) == self._count else self._partially(mask)[0]
        return written(spec, before, rows, take(spec, fresh, rows))

    def _partially(self, mask: torch.Tensor, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset some, and see to it that the others were left alone, where nobody vouches for that."""
        before, self._now, self._pending = self._now, None, None
        observation, info = self._reset_rows(mask, **kwargs)
        fresh = self._read(observation)
        if not self._trusted and before is not None:
            spec, kept = self._layout.observation, (~mask).nonzero().view(-1)
            if not equal(spec, take(spec, fresh, kept), take(spec, before, kept)):
                raise EnvironmentOutputError(
                    f"{type(self._layout.env).__name__}.reset(options={{'reset_mask': ...}}) also changed "
                    "sub-environments that it was not to reset: it cannot reset some of them alone. Write "
                    'gymnasium.make_vec(..., vectorization_mode="sync"), or give its reset an argument env_ids'
                )
        if self._remembers:
            self._now = self._kept(fresh)
        return fresh, info

    def not_done(self) -> tuple[torch.Tensor, ...]:
        """Make flags for what follows a reset: done, terminated, truncated."""
        return no_end((*self._layout.batch_size, 1), self.device)


def _moved(part: Any, device: torch.device | None) -> Any:
    """Move tensors and TensorDicts, but not those of infos, which are the environment's."""
    if part is None or device is None:
        return part
    if isinstance(part, tuple):
        mask, observations, info = part
        return mask.to(device), _moved(observations, device), info
    return {key: value.to(device) for key, value in part.items()}
