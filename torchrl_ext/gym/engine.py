"""Steps and resets of a single or vectorized environment, as dicts of new tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, OneHot

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
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
from torchrl_ext.gym.infos import merge_infos
from torchrl_ext.gym.io import (
    compile_action,
    compile_flags,
    compile_observation,
    compile_one_hot,
    compile_reward,
    compile_value,
    key_in_env,
    subtract_start,
    zero_flags,
)

__all__ = ["Engine", "refuse_frame_skip"]

Entries = dict[str, Any]
Leaves = dict[str, Any]  # specs, in dicts that are nested like the observations
Step = tuple[Any, ...]


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
    :param observation: spec of the environment's observations, with batch dimensions, without infos
    :param key: key of the observation, if it is not a dict; else None
    :param env_type: ``"numpy"``, ``"torch"`` or ``"jax"``
    """

    def __init__(self, wrapper: Any, observation: Composite, key: str | None, env_type: str) -> None:
        refuse_frame_skip(wrapper)
        options, (self._starts, action_starts) = wrapper.__dict__["_options"], wrapper.__dict__["_starts"]
        self.env, self.frame_skip = wrapper._env, wrapper.wrapper_frame_skip
        self.batch_size, self.device = wrapper.batch_size, wrapper.device
        env, batch_size, device, keys = self.env, self.batch_size, self.device, wrapper.action_keys
        self._leaves, self._key, self._missing_final_obs = _nested_specs(observation), key, options["missing_final_obs"]
        self._keys = tuple(self._leaves)
        self.nested_keys = tuple(name for name, part in self._leaves.items() if isinstance(part, dict))
        # None if the environment's action is a dict.
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
            data.update(_overwrite_rows(self._leaves, observations, mask, rows, final))
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
            try:
                total = total + reward
                done = terminated | truncated
            except TypeError:
                raise EnvironmentOutputError(
                    f"step() returned the reward {reward!r} and the flags {terminated!r} and {truncated!r}; expected "
                    "numbers or arrays. Return them as gymnasium does: observation, reward, terminated, truncated, info"
                ) from None
            if done.any() if hasattr(done, "any") else done:
                break
        return observation, total, terminated, truncated, info

    def _final_observation(
        self, rows: torch.Tensor | None, mask: torch.Tensor, info: Any
    ) -> tuple[torch.Tensor | None, Any]:
        """Return final observations and the indices of their rows.

        :return: the indices (None: there is an observation for every row), and the final observations (None: they are
            lost, or part of the step's observations)
        """
        find = self._stepper.final_observation
        if rows is None:
            final = find(None, info)
            is_lost = final is None and self._missing_final_obs == "error" and bool(mask.any())
            if is_lost or (final is not None and not (self._starts is None and _has_row_per_env(final, mask.numel()))):
                rows = mask.nonzero().view(-1)
        if rows is not None:
            final = find(rows, info)
        if self._starts is not None:
            final = subtract_start(final, self._starts)
        return rows, final if self._key is None or final is None else {self._key: final}

    def info_of_step(self, info: Any) -> Any:
        """Return the info of the last step, without that of the resets after it.

        :param info: info that the step returned
        """
        if self._pending is None:
            return info if self._stepper is None else drop_final_keys(info)
        rows = self._pending[0].nonzero().view(-1).tolist()
        return merge_infos(drop_final_keys(info), self._stepper.infos(info)[0], rows, self._stepper.num_envs)

    # -- resets

    def read_reset(self, result: Any) -> tuple[Entries, Any]:
        """Convert the result of the environment's reset.

        :return: the observations, and the info
        """
        observation, info = check_result_length(result, RESET_RESULT)
        if self._stepper is not None:
            self._stepper.begin(observation)
        return self._read(observation), info

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset all rows, or those of a mask.

        :param mask: (n,) booleans; None: all. Rows that the last step reset are not reset again, unless there are
            ``kwargs``
        :param kwargs: arguments of the environment's reset
        :return: the observations of all rows, and the info
        """
        pending = None if kwargs else self._pending
        if mask is None or (pending is None and bool(mask.all())):
            self._pending = None
            return self.read_reset(self.env.reset(**kwargs))
        if pending is None:
            return self._reset_rows(mask, **kwargs)
        self._pending = None
        done, observations, info = pending
        left, count = mask & ~done, self._stepper.num_envs
        following = self._stepper.infos(info)[1]
        if following is None or isinstance(following, list):
            rest = drop_final_keys(info)
            if isinstance(rest, dict):  # statistics belong to the episodes that ended
                rest = {key: value for key, value in rest.items() if key not in STATISTICS}
            following = merge_infos(rest, following, done.nonzero().view(-1).tolist(), count)
        info = following
        if not left.any():
            return observations, info
        fresh, new_info = self._reset_rows(left)
        rows = left.nonzero().view(-1)
        merged = merge_infos(info, new_info, rows.tolist(), count)
        return _overwrite_rows(self._leaves, observations, left, rows, fresh), merged

    def reset_done(self, data: Entries) -> Entries:
        """Reset what is done after a step.

        :param data: entries of ``next``, as :meth:`step` returned them
        :return: the observations of all rows
        """
        if not self.batch_size:
            return self.read_reset(self.env.reset())[0]
        if self._pending is not None:
            observations, self._pending = self._pending[1], None
            return observations
        mask = data["done"].view(-1)
        rows = mask.nonzero().view(-1) if self.rows is None else self.rows
        before = {key: data[key] for key in self._keys}
        if not len(rows):
            return before
        return _overwrite_rows(self._leaves, before, mask, rows, self.reset(mask)[0])

    def _reset_rows(self, mask: torch.Tensor, **kwargs: Any) -> tuple[Entries, Any]:
        """Reset some rows. The returned observations of other rows are undefined."""
        self._pending = None
        observation, info = self._stepper.reset(mask.cpu().numpy(), **kwargs)
        return self._read(observation), info

    def make_unset_flags(self) -> tuple[torch.Tensor, ...]:
        """Make the flags done, terminated and truncated after a reset: all False."""
        return zero_flags((*self.batch_size, 1), self.device)

    # -- state that is carried to a copy, or to another device

    @property
    def carried_state(self) -> Any:
        """State that the next call needs of the last one; None if there is none."""
        current = None if self._stepper is None else self._stepper.current
        return None if current is None and self._pending is None else (current, self._pending)

    def restore_carried_state(self, carried_state: Any) -> None:
        """Restore the state of another engine of the same environment, maybe on another device."""
        if carried_state is not None:
            self._stepper.current, pending = carried_state
            if pending is not None and self.device is not None:
                mask, observations, info = pending
                pending = mask.to(self.device), {k: v.to(self.device) for k, v in observations.items()}, info
            self._pending = pending


def refuse_frame_skip(wrapper: Any) -> None:
    """Refuse ``frame_skip`` for vectorized environments: rows end at different frames.

    :raises InvalidArgumentError: If ``frame_skip`` is above 1 and the environment is vectorized.
    """
    skip = wrapper.wrapper_frame_skip
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


# -- rows of observations


def _has_row_per_env(final: Any, count: int) -> bool:
    """Return whether all final observations are tensors with a row for every sub-environment."""
    if isinstance(final, dict):
        return all(_has_row_per_env(part, count) for part in final.values())
    return isinstance(final, torch.Tensor) and final.shape[:1] == (count,)


def _nested_specs(spec: Composite) -> Leaves:
    """Convert a Composite to nested dicts, which are much faster to iterate."""
    return {key: _nested_specs(part) if isinstance(part, Composite) else part for key, part in spec.items()}


def _overwrite_rows(
    leaves: Leaves, target: Any, mask: torch.Tensor, rows: torch.Tensor | None, values: Any, path: tuple[str, ...] = ()
) -> Entries:
    """Copy observations, and overwrite some rows of the copies.

    :param leaves: specs of the observations
    :param target: the observations
    :param mask: (n,) booleans of the rows to overwrite
    :param rows: indices of these rows; None: unknown, because reading the mask would wait for the GPU
    :param values: observations of all rows, or of ``rows`` only; None: lost, which writes NaN (zero for integers)
    :param path: keys of the dicts that contain the observations, for errors
    :raises EnvironmentOutputError: If the values do not fit the specs.
    """
    result: Entries = {}
    for key, part in leaves.items():
        old, new, here = target[key], None if values is None else _entry(values, key, path), (*path, key)
        if isinstance(part, dict):
            result[key] = new_tensordict(_overwrite_rows(part, old, mask, rows, new, here), old.batch_size, old.device)
            continue
        if new is None:
            new = torch.full((), float("nan") if old.is_floating_point() else 0, dtype=old.dtype, device=old.device)
            new = new.expand_as(old)
        if rows is None:
            wide = mask.view(-1, *([1] * (old.ndim - 1)))
            result[key] = torch.where(wide, _convert_final(part, old, new, len(mask), here), old)
        else:
            if type(new) is np.ndarray and old.is_cpu and new.shape[1:] == old.shape[1:] and len(new) == len(rows):
                filled = old.clone().numpy()  # writing in NumPy takes less than half as long
                if new.dtype is filled.dtype:
                    filled[rows.numpy()] = new
                    result[key] = torch.from_numpy(filled)
                    continue
            if type(new) is torch.Tensor and new.shape == old.shape:
                new = new.index_select(0, rows)
            result[key] = old.index_copy(0, rows, _convert_final(part, old, new, len(rows), here))
    return result


def _entry(values: Any, key: str, path: tuple[str, ...]) -> Any:
    """Return an entry of the final observations; raise an error if it is missing."""
    if not isinstance(values, (dict, TensorDictBase)):
        raise EnvironmentOutputError(
            f"final_obs{' ' if path else ''}{'.'.join(path)} is of type {type(values).__name__}; expected a dict with "
            f"the key {key!r}"
        )
    keys = values.keys()
    found = key_in_env(key, keys)
    if found not in keys:
        raise EnvironmentOutputError(
            f"final_obs has no {'.'.join((*path, key))!r}, which the observations have; it holds {sorted(keys)}"
        )
    return values[found]


def _convert_final(spec: Any, old: torch.Tensor, new: Any, count: int, path: tuple[str, ...]) -> torch.Tensor:
    """Convert a final observation to a tensor of the dtype and device of ``old``."""
    shape = (count, *old.shape[1:])
    if type(new) is np.ndarray and new.dtype.kind in "fiub" and new.flags.c_contiguous and new.flags.writeable:
        new = torch.from_numpy(new)
    if type(new) is torch.Tensor and new.shape == shape and new.dtype is old.dtype and new.device == old.device:
        return new.detach()
    name = f"final_obs {'.'.join(path)}"
    # Environments return one-hot entries as indices. Entries that were read already are one-hot.
    if isinstance(spec, OneHot) and tuple(getattr(new, "shape", ())) != shape:
        return compile_one_hot(spec, shape[:-1], name=name, device=old.device)(new)
    return compile_value(shape, old.dtype, name=name, device=old.device, copy=False)(new)
