"""Stepper that hides the autoreset mode of vectorized environments.

``sb3_ext.GymVecEnv`` and ``torchrl_ext.GymWrapper`` use it, and convert the observations and infos that it returns. The
caller reports which rows have ended, because reading the flags here would wait for the GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np

from rl_ext_core._values import copy_output
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector.array_frameworks import leaves, map_arrays, stack_arrays, take_rows, to_numpy
from rl_ext_core.vector.autoreset import (
    Autoreset,
    PartialReset,
    find_autoreset_mode,
    get_library_rules,
    require_synchronous,
    require_time_limits_per_env,
)
from rl_ext_core.vector.spaces import find_attribute

Array = np.ndarray[Any, Any]

# Name of a method of environments, and the values that it returns.
RESET_RESULT = ("reset", "observation", "info")
STEP_RESULT = ("step", "observation", "reward", "terminated", "truncated", "info")
_FINAL = ("final_obs", "final_observation", "final_info")
# Keys that gymnasium's RecordEpisodeStatistics adds in the last step of an episode, to the info of the reset.
STATISTICS = ("episode", "_episode")


class Stepper:
    """Stepper that gives a vectorized environment the results of the mode SAME_STEP.

    Call it in this way after a step in which episodes have ended::

        last = stepper.final_observation(rows, info)  # None if the step returned them
        last_info, next_info = stepper.infos(info)
        if not stepper.resets_in_step:
            observation, next_info = stepper.reset(mask)

    :param env: vectorized environment, wrapped or not
    :param autoreset_mode: :class:`Autoreset`, or its name or value; default: detected from the environment
    :param uses_torch: whether the environment steps on tensors
    :param missing_final_obs: what to return if the environment resets rows in the step without last observations:
        ``"error"`` raises, ``"previous"`` returns the preceding observations, ``"nan"`` returns None
    :param partial_resets: whether the caller also resets rows whose episodes have not ended
    :raises InvalidArgumentError: If the mode does not exist, the environment is asynchronous, or ``TimeLimit`` wraps
        it. Also if it resets rows one step late and does not support partial resets.

    :ivar num_envs: number of rows
    :ivar previous: copy of the observation before the last step, if it is needed
    :ivar current: copy of the observation after the last step, if it is needed
    """

    def __init__(
        self,
        env: Any,
        *,
        autoreset_mode: Any = None,
        uses_torch: bool = False,
        missing_final_obs: str = "error",
        partial_resets: bool = True,
    ) -> None:
        require_synchronous(env)
        require_time_limits_per_env(env)
        self.env, self.num_envs = env, cast(int, num_envs_of(env))
        self._base, self._rules = getattr(env, "unwrapped", env), get_library_rules(env)
        self._missing_final_obs = missing_final_obs
        self._mode = find_autoreset_mode(env, autoreset_mode, uses_torch=uses_torch)
        self._reset_rows: PartialReset | None = None
        if self._mode in (Autoreset.NEXT_STEP, Autoreset.DISABLED):
            self._find_partial_reset()
        self._checks_others = not self._rules.keeps_other_rows and (partial_resets or self._mode is Autoreset.DISABLED)
        self._stores_observations = missing_final_obs == "previous" or self._checks_others
        self.previous: Any = None
        self.current: Any = None

    @property
    def resets_in_step(self) -> bool:
        """Whether the environment resets rows in the step that ends them."""
        return self._mode is Autoreset.SAME_STEP

    def step(self, action: Any) -> tuple[Any, ...]:
        """Step the environment, and return its five values.

        :raises EnvironmentOutputError: If the environment did not return five values.
        """
        self.previous, self.current = self.current, None
        result = check_result_length(self.env.step(action), STEP_RESULT)
        if self._stores_observations:
            self.begin(result[0])
        return result

    # -- rows that the last step has ended

    def final_observation(self, rows: Any, info: Any) -> Any:
        """Return the last observations of rows whose episodes ended in the last step.

        :param rows: indices of the rows, as NumPy array or tensor; None if they are unknown
        :param info: info of the step
        :return: last observations, ``(len(rows), ...)`` each, or as in the info if ``rows`` is None. None if the step
            returned them as its observation, or if they are missing and ``missing_final_obs`` or ``rows`` permits it
        :raises EnvironmentOutputError: If last observations are missing, or have the wrong number of rows.
        :raises InvalidArgumentError: If the autoreset mode is unknown and the info does not show it.
        """
        final = _find_entry(info, "final_obs", "final_observation")
        if self._mode is None and final is None:
            raise InvalidArgumentError(
                f"{type(self.env).__name__} does not report when it resets sub-environments whose episodes have ended, "
                'and its info has no final_obs. Use autoreset_mode="SameStep", "Disabled" (it resets those of '
                "reset(options={'reset_mask': ...})), or give it metadata[\"autoreset_mode\"]"
            )
        self._mode = self._mode or Autoreset.SAME_STEP
        if not self.resets_in_step:
            return None
        if final is None and self._missing_final_obs == "previous":
            final = self.previous
        elif final is not None and rows is not None:
            self._require_unshared(final, rows)
        if final is not None:
            return final if rows is None else _select_final_rows(final, rows, self.num_envs)
        if self._missing_final_obs == "nan" or rows is None:
            return None
        raise self.missing_final_obs_error()

    def missing_final_obs_error(self) -> EnvironmentOutputError:
        """Return the error for episodes that ended without last observations."""
        return EnvironmentOutputError(
            f"episodes have ended, {type(self.env).__name__} has reset itself, and its info has no final_obs: their "
            "last observations are lost. Make it return them (Isaac Lab: cfg.compute_final_obs = True), or use "
            'missing_final_obs="previous", which uses the preceding ones; after an interrupted step, call reset()'
        )

    def infos(self, info: Any) -> tuple[Any, Any]:
        """Split the info of a step into the info of the last step and that of the resets.

        Read only rows that have ended. Entries that wrappers add next to ``final_info`` belong to the step: episode
        statistics, and arrays without a mask.

        :param info: dict of arrays with a row for each sub-environment, or list of a dict for each
        :return: both infos, in the same form; the second one is None if the environment does not return it
        """
        if isinstance(info, list):
            pairs = [self.infos(part or {}) for part in info]
            return [last for last, _ in pairs], [following for _, following in pairs]
        if not self.resets_in_step or not isinstance(info, dict):
            return info, None
        rest = drop_final_keys(info)
        following = {key: value for key, value in rest.items() if key not in STATISTICS}
        statistics = {key: rest[key] for key in STATISTICS if key in rest}
        final = infos_to_dict(info.get("final_info"))
        if final is None:
            return (rest, None) if self._rules.info == "last" else (statistics, following)
        names = [key for key in following if f"_{key}" not in rest and key[:1] != "_" and key not in final]
        added = {key: following.pop(key) for key in names if "_final_info" in info}
        return {**statistics, **added, **final}, following

    def _require_unshared(self, final: Any, rows: Any) -> None:
        """Raise if SyncVectorEnv has overwritten last observations, as it copies them too late."""
        current = getattr(self._base, "_env_obs", None)  # private in gymnasium; without it there is no check
        if not isinstance(current, list) or not isinstance(final, list | np.ndarray) or len(final) != len(current):
            return
        pairs = [pair for row in rows.tolist() for pair in zip(leaves(final[row]), leaves(current[row]), strict=False)]
        if any(isinstance(part, np.ndarray) and np.shares_memory(part, other) for part, other in pairs):
            raise EnvironmentOutputError(
                f"`autoreset_mode=SAME_STEP` of {type(self._base).__name__} loses last observations: expected an "
                "environment that returns new arrays, got one that writes every observation to the same array. Use "
                "SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP), or return observation.copy()"
            )

    # -- resets

    def reset(self, mask: Array | None = None, **kwargs: Any) -> tuple[Any, Any]:
        """Reset all rows, or the rows of a mask.

        :param mask: ``(num_envs,)`` bool; default: all rows
        :param kwargs: ``seed`` and ``options`` for the environment's reset
        :return: observation and info of all rows. Rows that were not reset may be zero
        :raises EnvironmentOutputError: If the environment did not return two values, or has changed other rows.
        """
        before, self.previous, self.current = self.current, None, None
        reset = self.env.reset if mask is None else partial(self._reset_rows or self._find_partial_reset(), mask)
        observation, info = check_result_length(reset(**kwargs), RESET_RESULT)
        self.begin(observation)
        if mask is not None and before is not None and self._checks_others:
            self._require_unchanged(before, observation, ~mask)
        return observation, info

    def begin(self, observation: Any) -> None:
        """Store a copy of an observation, if needed, also after a reset that bypassed this stepper."""
        self.current = map_arrays(copy_output, observation) if self._stores_observations else None

    def _find_partial_reset(self) -> PartialReset:
        if self._mode is Autoreset.NEXT_STEP and not self._rules.keeps_other_rows:
            raise InvalidArgumentError(
                f"{type(self._base).__name__} resets sub-environments one step after their episodes have ended "
                "(autoreset_mode NextStep), and is not known to support partial resets: the step in between would be a "
                "transition that never happened. If its reset(options={'reset_mask': ...}) resets those of the mask at "
                'once, use autoreset_mode="Disabled"; else create it from single environments: '
                'gymnasium.make_vec(..., vectorization_mode="sync")'
            )
        self._reset_rows = self._rules.partial_reset(self.env, self._base, self._mode or Autoreset.SAME_STEP)
        return self._reset_rows

    def _require_unchanged(self, before: Any, after: Any, rows: Array) -> None:
        """Raise if a partial reset has changed observations of other rows."""

        def compare(old: Any, new: Any) -> None:
            """Raise if the rows of two batches differ. A batch may be a list of rows."""
            old, new = (np.asarray(to_numpy(part))[rows] for part in (old, new))
            if old.tobytes() != new.tobytes():
                raise EnvironmentOutputError(
                    f"{type(self.env).__name__}.reset(options={{'reset_mask': ...}}) also changed sub-environments "
                    "outside the mask: it cannot reset some of them alone. Use "
                    'gymnasium.make_vec(..., vectorization_mode="sync"), or give its reset an argument env_ids'
                )

        map_arrays(compare, before, after)


# -- results of environments


def num_envs_of(env: Any) -> int | None:
    """Return the number of sub-environments of a vectorized environment; None for others."""
    count: int | None = find_attribute(env, "num_envs")
    return getattr(getattr(getattr(env, "spec", None), "config", None), "num_envs", count)  # EnvPool has it there


def check_result_length(result: Any, expected: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values that reset or step returned.

    :param expected: ``RESET_RESULT`` or ``STEP_RESULT``
    :raises EnvironmentOutputError: If ``result`` has another number of values.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(expected) - 1:
        return tuple(result)
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    method, *names = expected
    raise EnvironmentOutputError(
        f"{method}() returned {found}; expected the {len(names)} of gymnasium: {', '.join(names)}"
    )


def is_per_env(values: Any) -> bool:
    """Return whether values are a list or array of objects, one for each sub-environment."""
    return isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype == object)


def is_mask(info: dict[str, Any], key: Any, count: int) -> bool:
    """Return whether ``info[key]`` is gymnasium's mask of the rows that have another entry."""
    mask: Any = info.get(key) if isinstance(key, str) and key[:1] == "_" and key[1:] in info else None
    has_rows = getattr(mask, "shape", None) == (count,)
    return has_rows and bool(mask.dtype == bool or str(mask.dtype) == "torch.bool")


def drop_final_keys(info: Any) -> Any:
    """Return an info without the keys of last observations and last infos."""
    if isinstance(info, list):
        return [drop_final_keys(part) for part in info]
    return {key: value for key, value in info.items() if key.removeprefix("_") not in _FINAL} if info else {}


def infos_to_dict(infos: Any) -> Any:
    """Convert a list with a dict or None for each row to a dict of object arrays and masks."""
    if not is_per_env(infos):
        return infos
    parts = [part if isinstance(part, dict) else {} for part in infos]
    collected: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part.get(key) for part in parts]
        is_nested = any(isinstance(value, dict) for value in values)
        collected[key] = infos_to_dict(values) if is_nested else object_array(values)
        collected[f"_{key}"] = np.array([key in part for part in parts])
    return collected


def object_array(values: list[Any]) -> Array:
    """Return an ``(len(values),)`` array with dtype object."""
    return np.fromiter(values, object, len(values))


def _find_entry(info: Any, *names: str) -> Any:
    if isinstance(info, list):
        each = [_find_entry(part, *names) for part in info]
        return each if any(part is not None for part in each) else None
    for name in names:
        if isinstance(info, dict) and info.get(name) is not None:
            return info[name]
    return None


def _select_final_rows(final: Any, rows: Any, count: int) -> Any:
    """Return the last observations of some rows.

    :param final: a batch of all rows or of these rows, or an observation or None for each, or dicts and tuples of these
    :raises EnvironmentOutputError: If ``final`` has another number of rows, or lacks a row.
    """
    if isinstance(final, dict):
        return {
            key: _select_final_rows(part, rows, count) for key, part in final.items() if not is_mask(final, key, count)
        }
    if isinstance(final, tuple):
        return tuple(_select_final_rows(part, rows, count) for part in final)
    length = len(final) if hasattr(final, "__len__") else None
    if length not in (count, len(rows)):
        raise EnvironmentOutputError(
            f"final_obs is of type {type(final).__name__} and has {length} rows; expected {count}, or {len(rows)}, "
            "those that are done"
        )
    if not is_per_env(final):
        return take_rows(final, rows) if length == count else final
    each = [final[row] for row in rows.tolist()] if length == count else list(final)
    absent = [row for row, single in zip(rows.tolist(), each, strict=True) if single is None]
    if absent:
        raise EnvironmentOutputError(f"final_obs has no entry for the sub-environments {absent}, which are done")
    try:
        return map_arrays(stack_arrays, *each)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentOutputError(f"final_obs has observations of several shapes ({error})") from None
