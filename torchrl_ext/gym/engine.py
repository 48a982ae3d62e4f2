"""Steps and resets of a single or vectorized environment, as dicts of new tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Dict
from tensordict import TensorDict
from torchrl.data import Composite

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.array_frameworks import keep_freed_memory
from rl_ext_core.vector.spaces import device_of
from rl_ext_core.vector.stepper import (
    RESET_RESULT,
    STATISTICS,
    STEP_RESULT,
    Stepper,
    check_result_length,
    drop_final_keys,
)
from torchrl_ext._compat import new_tensordict
from torchrl_ext.gym.io import compile_action, compile_flags, compile_observation, compile_reward, zero_flags
from torchrl_ext.gym.specs import SingleSpaces

__all__ = ["Engine", "fill_rows", "refuse_frame_skip"]

Entries = dict[str, Any]
Step = tuple[Any, ...]
# Mask of rows (None: all), the observations of all rows, and the info (None: lost).
ResetPart = tuple[torch.Tensor | None, Entries, Any]


class Engine:
    """Converter between an environment and the entries of TensorDicts.

    Between two calls, a vectorized environment is in one of two states:

    - *Nothing pending*: the next step of every row starts from its last returned observation. A reset by a mask resets
      these rows in the environment.
    - *Pending*: the last step reset the rows that were done (SAME_STEP). The engine stores these rows, all observations
      after the resets, and the info.

    A reset by a mask uses what is pending: rows that the step has reset get their new observations. Other rows of the
    mask are reset in the environment. A step, a reset of all rows and a reset with arguments drop what is pending.

    Steps and resets drop what is pending before they call the environment. Therefore, an interrupt leaves no outdated
    state.

    :param wrapper: wrapper with the environment, the options and the specs, which are read once
    :param single: spaces of one sub-environment
    :param observation: spec of the environment's observations, with batch dimensions, without infos
    :param key: key of the observation, if it is not a dict; else None
    :param env_type: ``"numpy"``, ``"torch"`` or ``"jax"``
    """

    def __init__(
        self, wrapper: Any, single: SingleSpaces, observation: Composite, key: str | None, env_type: str
    ) -> None:
        refuse_frame_skip(wrapper)
        options, (starts, action_starts) = wrapper.__dict__["_options"], single.starts
        self.env, self.frame_skip = wrapper._env, wrapper.wrapper_frame_skip
        self.batch_size, self.device = wrapper.batch_size, wrapper.device
        env, batch_size, device, keys = self.env, self.batch_size, self.device, wrapper.action_keys
        self._keys, self._missing_final_obs = tuple(observation.keys()), options["missing_final_obs"]
        self.nested_keys = tuple(name for name, part in observation.items() if isinstance(part, Composite))
        # None if the environment's action is a dict.
        self.action_key = keys[0] if len(keys) == 1 and not isinstance(single.action_space, Dict) else None
        env_device = device_of(env)
        self._decode = compile_action(
            wrapper.full_action_spec if self.action_key is None else wrapper.full_action_spec[self.action_key],
            # A MultiDiscrete of the batch has a part per sub-environment.
            space=None if single.is_batched else single.action_space,
            env_type=env_type,
            batch_size=batch_size,
            clip=options["clip_actions"],
            device=env_device if env_device != device else None,
            start=action_starts,
        )
        compile_reader = partial(compile_observation, observation, key=key, device=device, starts=starts)
        self._read, self._read_final = compile_reader(copy=options["copy"]), compile_reader(copy=False, is_final=True)
        self._reward = compile_reward(wrapper.reward_spec, device=device)
        is_finite = _has_finite_horizon(env, options["finite_horizon"])
        self._flags = compile_flags(batch_size, device=device, finite_horizon=is_finite)
        self._step_env = self._step_once if self.frame_skip == 1 else self._step_skipping_frames
        # Indices of the rows that were done in the last step; None if the flags were not read.
        self.rows: torch.Tensor | None = None
        # Mask of the rows that the last step reset, all observations after the resets, and the info.
        self._pending: tuple[torch.Tensor, Entries, Any] | None = None
        self._stepper: Any = None
        if batch_size:
            self._stepper = Stepper(
                env,
                autoreset_mode=options["autoreset_mode"],
                uses_torch=env_type == "torch",
                missing_final_obs=self._missing_final_obs,
            )
            # Reading the flags makes a step wait for the GPU. Only a reset of some rows needs them.
            is_cpu = device is None or device.type == "cpu"
            self._finds_done_rows = is_cpu or not self._stepper.resets_in_step
            if is_cpu:
                keep_freed_memory(sum(leaf.nbytes for leaf in observation.zero().values(True, True)))

    # -- steps

    def step(self, action: Any) -> tuple[Entries, bool, Any]:
        """Take a step.

        :param action: entry ``action`` of the TensorDict
        :return: entries of ``next``, whether an environment may be done, and the info
        """
        self._pending = None
        observation, reward, terminated, truncated, info = self._step_env(action)
        data: Entries = self._read(observation)
        data["reward"] = self._reward(reward)
        (data["done"], data["terminated"], data["truncated"]), ended = self._flags(terminated, truncated)
        if ended is not None:  # a single environment
            return data, ended, info
        mask = data["done"].view(-1)
        self.rows = rows = None
        if self._finds_done_rows:
            found = mask.cpu().numpy().nonzero()[0]  # three times as fast as torch's
            if not len(found):
                return data, False, info
            self.rows = rows = torch.from_numpy(found).to(mask.device)
        rows, final = self._final_observation(rows, mask, info)
        if self._stepper.resets_in_step:
            observations = {key: data[key] for key in self._keys}
            data.update(_overwrite_rows(observations, mask, rows, final))
            self._pending = (mask.clone(), observations, info)
        return data, True, info

    def _step_once(self, action: Any) -> Step:
        """Convert an action, and step the environment once."""
        action = self._decode(action)
        return (
            check_result_length(self.env.step(action), STEP_RESULT)
            if self._stepper is None
            else self._stepper.step(action)
        )

    def _step_skipping_frames(self, action: Any) -> Step:
        """Repeat an action ``frame_skip`` times, until the episode ends, and sum the rewards."""
        total: Any = 0
        for _ in range(self.frame_skip):
            # decoded in every step, because the environment may have edited its action
            observation, reward, terminated, truncated, info = self._step_once(action)
            self._reward(reward)  # raises an error if it cannot be added
            total = total + reward
            if self._flags(terminated, truncated)[1]:
                break
        return observation, total, terminated, truncated, info

    def _final_observation(
        self, rows: torch.Tensor | None, mask: torch.Tensor, info: Any
    ) -> tuple[torch.Tensor | None, Entries | None]:
        """Return final observations and the indices of their rows.

        :return: the indices (None: there is an observation for every row), and the final observations (None: they are
            lost, or part of the step's observations)
        """
        find = self._stepper.final_observation
        if rows is None:
            final = find(None, info)
            is_lost = final is None and self._missing_final_obs == "error" and bool(mask.any())
            if is_lost or (final is not None and not _has_row_per_env(final, mask.numel())):
                rows = mask.nonzero().view(-1)
        if rows is not None:
            final = find(rows, info)
        return rows, None if final is None else self._read_final(final)

    def split_info(self, info: Any) -> tuple[Any, torch.Tensor | None, Any]:
        """Split the info of the last step.

        :param info: info that the step returned
        :return: info of the other rows, the mask of the rows that the step has reset, and the info of their last step
        """
        if self._stepper is None:
            return info, None, None
        if self._pending is None:
            return drop_final_keys(info), None, None
        return _drop_ended(info), self._pending[0], self._stepper.infos(info)[0]

    # -- resets

    def read_reset(self, result: Any) -> ResetPart:
        """Convert the result of the environment's reset."""
        observation, info = check_result_length(result, RESET_RESULT)
        if self._stepper is not None:
            self._stepper.begin(observation)
        return None, self._read(observation), {} if info is None else info

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> list[ResetPart]:
        """Reset all rows, or those of a mask.

        :param mask: (n,) booleans; None: all. Rows that the last step reset are not reset again, unless there are
            ``kwargs``
        :param kwargs: arguments of the environment's reset
        :return: parts, of which each replaces rows of those before it
        """
        pending, self._pending = None if kwargs else self._pending, None
        if mask is None or (pending is None and bool(mask.all())):
            return [self.read_reset(self.env.reset(**kwargs))]
        if pending is None:
            return [(None, *self._reset_rows(mask, **kwargs))]
        done, observations, info = pending
        following = self._stepper.infos(info)[1]
        if isinstance(following, list):
            following = [part or {} for part in following]
        parts: list[ResetPart] = [(None, observations, following)]
        if following is None:  # other rows keep the info of the step, without statistics of episodes that ended
            parts = [(None, observations, _drop_ended(info)), (done, observations, None)]
        left = mask & ~done
        return [*parts, (left, *self._reset_rows(left))] if left.any() else parts

    def reset_done(self, data: Entries) -> Entries:
        """Reset what is done after a step.

        :param data: entries of ``next``, as :meth:`step` returned them
        :return: the observations of all rows
        """
        if not self.batch_size:
            return self.read_reset(self.env.reset())[1]
        if self._pending is not None:
            observations, self._pending = self._pending[1], None
            return observations
        mask = data["done"].view(-1)
        rows = mask.nonzero().view(-1) if self.rows is None else self.rows
        before = {key: data[key] for key in self._keys}
        return _overwrite_rows(before, mask, rows, self.reset(mask)[0][1]) if len(rows) else before

    def _reset_rows(self, mask: torch.Tensor, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset some rows. The returned observations of other rows are undefined."""
        observation, info = self._stepper.reset(mask.cpu().numpy(), **kwargs)
        return self._read(observation), {} if info is None else info

    def make_unset_flags(self) -> tuple[torch.Tensor, ...]:
        """Make the flags done, terminated and truncated after a reset: all False."""
        return zero_flags((*self.batch_size, 1), self.device)

    def continue_episodes(self, last: Engine | None) -> None:
        """Take over the state of the last engine, if only specs or options have changed since."""
        if last is not None and last.env is self.env and last.device == self.device:
            self._stepper, self._pending = last._stepper, last._pending


def refuse_frame_skip(wrapper: Any) -> None:
    """Refuse ``frame_skip`` below 1, and above 1 for vectorized environments: rows end at different frames.

    :raises InvalidArgumentError: If ``frame_skip`` is below 1, or above 1 and the environment is vectorized.
    """
    skip = wrapper.wrapper_frame_skip
    if skip < 1:
        raise InvalidArgumentError(f"frame_skip={skip} takes no step; expected at least 1. Use frame_skip=1")
    if skip > 1 and wrapper.batch_size:
        raise InvalidArgumentError(
            f"frame_skip={skip} on a vectorized environment is not supported, because its sub-environments end at "
            "different frames. Skip frames in each sub-environment, by gymnasium.make_vec(..., wrappers=[...]) with a "
            "wrapper that repeats its action, or use torchrl_ext.ParallelEnv(n, lambda: torchrl_ext.GymEnv(id, "
            f"frame_skip={skip}))"
        )


def _has_finite_horizon(env: Any, asked: bool | None) -> bool:
    """Return whether time-outs are terminations.

    :param asked: the user's option; None: ``is_finite_horizon`` in the environment's Isaac Lab configuration

    Source: ``is_finite_horizon`` of isaaclab.envs.ManagerBasedRLEnvCfg, https://github.com/isaac-sim/IsaacLab/pull/7502
    """
    if asked is not None:
        return asked
    return getattr(getattr(getattr(env, "unwrapped", env), "cfg", None), "is_finite_horizon", None) is True


def _drop_ended(info: Any) -> Any:
    """Return an info without entries of episodes that have ended."""
    if isinstance(info, list):
        return [_drop_ended(part) for part in info]
    return {key: value for key, value in drop_final_keys(info).items() if key not in STATISTICS}


# -- rows of observations


def _has_row_per_env(final: Any, count: int) -> bool:
    """Return whether all final observations are tensors with a row for every sub-environment."""
    if isinstance(final, dict):
        return all(_has_row_per_env(part, count) for part in final.values())
    return isinstance(final, torch.Tensor) and final.shape[:1] == (count,)


def _overwrite_rows(target: Any, mask: torch.Tensor, rows: torch.Tensor | None, values: Any) -> Entries:
    """Copy observations, and overwrite some rows of the copies.

    :param target: the observations
    :param mask: (n,) booleans of the rows to overwrite
    :param rows: indices of these rows; None: unknown, because reading the mask would wait for the GPU
    :param values: observations of all rows, or of ``rows`` only; None: lost, which writes NaN (zero for integers)
    """
    result: Entries = {}
    for key, old in target.items():
        new = None if values is None else values[key]
        if isinstance(old, TensorDict):
            result[key] = new_tensordict(_overwrite_rows(old, mask, rows, new), old.batch_size, old.device)
        elif new is None:
            result[key] = fill_rows(old, mask, rows, float("nan") if old.is_floating_point() else 0)
        elif rows is None:
            result[key] = torch.where(_expand_mask(mask, old), new, old)
        else:
            new = new.index_select(0, rows) if new.shape == old.shape else new
            result[key] = old.index_copy(0, rows, new)
    return result


def fill_rows(values: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor | None, number: float) -> torch.Tensor:
    """Return a copy with some rows filled with a number.

    :param mask: (n,) booleans of the rows
    :param rows: their indices; None: unknown
    """
    if rows is None:
        return values.masked_fill(_expand_mask(mask, values), number)
    return values.index_fill(0, rows, number)


def _expand_mask(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give a mask of rows as many axes as the values have."""
    return mask.view(-1, *([1] * (values.ndim - 1)))
