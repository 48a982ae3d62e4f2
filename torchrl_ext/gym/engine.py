"""Steps and resets of the wrapped environment, single or vectorised, as dicts of new tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data import Composite, OneHot

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector import autoreset
from rl_ext_core.vector.autoreset import RESET, STEP, unpacked
from torchrl_ext.gym import vector
from torchrl_ext.gym.infos import info_after_reset, last_info, merge_infos
from torchrl_ext.gym.io import (
    compile_action,
    compile_flags,
    compile_observation,
    compile_reward,
    counted_from_zero,
    unset_flags,
)
from torchrl_ext.gym.specs import device_of

__all__ = ["Engine"]

Entries = dict[str, Any]
Step = tuple[Any, Any, Any, Any, Any]


class Engine:
    """Steps and resets an environment; what it gives are the entries of TensorDicts.

    Of a vectorised environment it knows between two calls:

    - *Nothing pending*: every row's next step starts from the observation that was given out last. A reset of some rows
      resets these in the environment.
    - *Pending*, after a step in which the environment has reset rows that were done (SAME_STEP): which rows those are,
      every observation that it has now, and the info. A reset by a mask takes it: those rows are given their new
      observations and are not reset again, what else it asks for is reset in the environment, and nothing is pending
      after it. A step, a reset of all, and one with arguments (a seed, options) drop it.

    A step and a reset forget what was pending before they call the environment, so that what interrupts them leaves
    nothing behind that is no longer true.

    :param wrapper: whose environment, options and specs these are, as they are now
    :param observation: spec of what the environment returns, with the batch, without infos
    :param key: of the one entry, where observations are no dicts
    :param env_type: ``"numpy"`` or ``"torch"``
    """

    def __init__(self, wrapper: Any, observation: Composite, key: str | None, env_type: str) -> None:
        refuse_frame_skip(wrapper)
        options, (self._starts, action_starts) = wrapper.__dict__["_options"], wrapper.__dict__["_starts"]
        self.env, self.frame_skip = wrapper._env, wrapper.wrapper_frame_skip
        self.batch_size, self.device = wrapper.batch_size, wrapper.device
        env, batch_size, device, keys = self.env, self.batch_size, self.device, wrapper.action_keys
        self._leaves, self._key, self._missing = vector.leaves_of(observation), key, options["missing_final_obs"]
        self._keys = tuple(self._leaves)
        self.containers = tuple(name for name, part in self._leaves.items() if isinstance(part, dict))
        # None: the environment's action is a dict.
        self.action_key = keys[0] if len(keys) == 1 and not wrapper.__dict__["_takes_dict"] else None
        env_device = device_of(env)
        self._decode = compile_action(
            wrapper.full_action_spec if self.action_key is None else wrapper.full_action_spec[self.action_key],
            space=wrapper.__dict__["_action_space"],
            env_type=env_type,
            batch_size=batch_size,
            clip=options["clip_actions"],
            device=env_device if env_device != device else None,
            start=action_starts,
        )
        self._read = compile_observation(observation, key=key, device=device, copy=options["copy"], starts=self._starts)
        self._reward = compile_reward(wrapper.reward_spec, device=device)
        is_finite = vector.has_finite_horizon(env, options["finite_horizon"])
        self._flags = compile_flags(batch_size, device=device, finite_horizon=is_finite)
        self._take = self._step_once if self.frame_skip == 1 else self._step_often
        # Which were done in the last step, where that was looked at.
        self.rows: torch.Tensor | None = None
        # What the environment returned last, where that is asked for later.
        self._now: Entries | None = None
        # Which rows have reset themselves, every observation that now holds, and the info.
        self._pending: tuple[torch.Tensor, Entries, Any] | None = None
        if batch_size:
            said = autoreset.find_mode(env, options["autoreset_mode"], speaks_torch=env_type == "torch")
            mode = said or autoreset.Autoreset.DISABLED
            self._count, self._same_step = batch_size[0], mode is autoreset.Autoreset.SAME_STEP
            # Asking a GPU whether anything is done makes the step wait for it.
            self._looks = device is None or device.type == "cpu"
            if self._looks:
                vector.keep_when_freed(sum(leaf.nbytes for leaf in observation.zero().values(True, True)))
            self._reset_rows, self._trusted = autoreset.partial_reset(env, mode)
            is_array = key is not None and self._starts is None and not isinstance(observation[key], OneHot)
            self._array = key if self._looks and is_array else None
            self._remembers = not self._trusted or self._missing == "previous"

    # -- steps

    def step(self, action: Any) -> tuple[Entries, bool, Any]:
        """Take a step.

        :param action: as it stands in the TensorDict
        :return: the entries of ``next``, whether something may be done, and the info
        """
        before, self._now, self._pending = self._now, None, None
        observation, reward, terminated, truncated, info = self._take(action)
        data: Entries = self._read(observation)
        data["reward"] = self._reward(reward)
        (data["done"], data["terminated"], data["truncated"]), ended = self._flags(terminated, truncated)
        if ended is not None:  # of a single environment
            return data, ended, info
        if self._remembers:
            self._now = self._kept(data)
        mask = data["done"].view(-1)
        if self._looks:
            self.rows = mask.nonzero().view(-1)
            if not len(self.rows):
                return data, False, info
        if self._same_step:
            observations = {key: data[key] for key in self._keys}
            data.update(self._last(observations, mask, autoreset.final_observation(info), before))
            self._pending = (mask.clone(), observations, info)
        return data, True, info

    def _step_once(self, action: Any) -> Step:
        return unpacked(self.env.step(self._decode(action)), STEP)

    def _step_often(self, action: Any) -> Step:
        """Sum the rewards of as many steps as are to be skipped, up to an episode's end."""
        total: Any = 0
        for _ in range(self.frame_skip):
            # decoded anew: the environment may have edited its action
            observation, reward, terminated, truncated, info = self._step_once(action)
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

    def _kept(self, data: Entries) -> Entries:
        """Copy observations: what is handed out may be edited, and so may what is not copied."""
        return {key: data[key].clone() for key in self._keys}

    def _last(self, observations: Entries, mask: torch.Tensor, final: Any, before: Entries | None) -> Entries:
        """Put the last observations where sub-environments were done, into new tensors."""
        rows = self.rows
        if final is None:
            if self._missing == "error" and (rows is not None or mask.any()):
                raise EnvironmentOutputError(
                    "sub-environments are done and the info holds no final_obs: their last observations are lost. Make "
                    'the environment return them, or write missing_final_obs="nan" or "previous"'
                )
            values = before if self._missing == "previous" else None
            return vector.overwritten(self._leaves, observations, mask, rows, values)
        if rows is not None or self._starts is not None or not vector.is_batch(final, self._count):
            rows = mask.nonzero().view(-1) if rows is None else rows
            each = rows.tolist()
            autoreset.require_own_final_observations(self.env, final, each)
            one_by_one = type(final) is np.ndarray and final.dtype == object and len(final) == self._count
            if self._array is not None and one_by_one:
                quick = vector.assigned(observations[self._array], each, final)
                if quick is not None:
                    return {self._array: quick}
            final = vector.rows_of(final, each, self._count)
        final = counted_from_zero(final, self._starts)
        values = final if self._key is None else {self._key: final}
        return vector.overwritten(self._leaves, observations, mask, rows, values)

    def closing(self, info: Any) -> Any:
        """Return the info that belongs to the observations of the last step, from what that step returned."""
        if self._pending is None:
            return info
        rows, is_after_reset = self._pending[0].nonzero().view(-1).tolist(), autoreset.info_is_after_reset(self.env)
        return last_info(info, rows, self._count, is_after_reset=is_after_reset)

    # -- resets

    def begin(self, result: Any) -> tuple[Entries, Any]:
        """Take in what a reset returned.

        :return: the observations, and the info
        """
        observation, info = unpacked(result, RESET)
        data: Entries = self._read(observation)
        if self.batch_size and self._remembers:
            self._now = self._kept(data)
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
            return self.begin(self.env.reset(**kwargs))
        if pending is None:
            return self._partially(mask, **kwargs)
        self._pending = None
        done, observations, info = pending
        left = mask & ~done
        info = info_after_reset(info)
        if not left.any():
            return observations, info
        fresh, new_info = self._partially(left)
        rows = left.nonzero().view(-1)
        merged = merge_infos(info, new_info, rows.tolist(), self._count)
        return vector.overwritten(self._leaves, observations, left, rows, fresh), merged

    def reset_done(self, data: Entries) -> Entries:
        """Return the observations that follow a step in which something may be done.

        :param data: the entries of ``next``
        :return: the observations of all
        """
        if not self.batch_size:
            return self.begin(self.env.reset())[0]
        if self._pending is not None:
            observations, self._pending = self._pending[1], None
            return observations
        mask = data["done"].view(-1)
        rows = mask.nonzero().view(-1) if self.rows is None else self.rows
        before = {key: data[key] for key in self._keys}
        if not len(rows):
            return before
        return vector.overwritten(self._leaves, before, mask, rows, self.reset(mask)[0])

    def _partially(self, mask: torch.Tensor, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset some, and see to it that the others were left alone, where nobody vouches for that."""
        before, self._now, self._pending = self._now, None, None
        rows = mask.cpu().numpy()
        result = unpacked(self._reset_rows(rows, **kwargs), RESET)
        # Others are to show that they left the other rows alone.
        fresh, info = self.begin(vector.of_all_rows(result, rows) if self._trusted else result)
        if self._trusted or before is None:
            return fresh, info
        if not vector.same_rows(self._leaves, fresh, before, (~mask).nonzero().view(-1)):
            raise EnvironmentOutputError(
                f"{type(self.env).__name__}.reset(options={{'reset_mask': ...}}) also changed "
                "sub-environments that it was not to reset: it cannot reset some of them alone. Write "
                'gymnasium.make_vec(..., vectorization_mode="sync"), or give its reset an argument env_ids'
            )
        return fresh, info

    def not_done(self) -> tuple[torch.Tensor, ...]:
        """Make flags for what follows a reset: done, terminated, truncated."""
        return unset_flags((*self.batch_size, 1), self.device)

    # -- what survives a copy or a move

    @property
    def memory(self) -> Any:
        """What the next step and reset have to know of the last one; None if nothing."""
        return None if self._now is None and self._pending is None else (self._now, self._pending)

    def take_up(self, memory: Any) -> None:
        """Remember what another engine of the same environment did, on another device maybe."""
        if memory is not None:
            self._now, self._pending = (_moved(part, self.device) for part in memory)


def refuse_frame_skip(wrapper: Any) -> None:
    """Check that a vectorized environment skips no frames: rows end at different frames, and all are stepped at once.

    :raises InvalidArgumentError: If it is to skip some.
    """
    skip = wrapper.wrapper_frame_skip
    if skip > 1 and wrapper.batch_size:
        raise InvalidArgumentError(
            f"frame_skip={skip} on a vectorized environment is not supported, because its sub-environments end at "
            "different frames. Skip frames in each sub-environment, by gymnasium.make_vec(..., wrappers=[...]) with a "
            "wrapper that repeats its action, or write torchrl_ext.ParallelEnv(n, lambda: torchrl_ext.GymEnv(id, "
            f"frame_skip={skip}))"
        )


def _moved(part: Any, device: torch.device | None) -> Any:
    """Move tensors and TensorDicts, but not those of infos, which are the environment's."""
    if part is None or device is None:
        return part
    if isinstance(part, tuple):
        mask, observations, info = part
        return mask.to(device), _moved(observations, device), info
    return {key: value.to(device) for key, value in part.items()}
