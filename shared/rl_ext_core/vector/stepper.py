"""One stepper for vectorized environments: SAME_STEP's results whatever their autoreset mode, in their own arrays.

``sb3_ext.GymVecEnv`` and ``torchrl_ext.GymWrapper`` convert what it returns: leaves of observations and infos. It looks
at no flag itself, since that would make a GPU wait: the caller says which rows have ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector.arrays import copy_array, leaves, map_arrays, stack_arrays, take_rows, to_numpy
from rl_ext_core.vector.autoreset import (
    Autoreset,
    PartialReset,
    find_autoreset_mode,
    require_synchronous,
    get_library_rules,
)
from rl_ext_core.vector.spaces import find_attribute

__all__ = [
    "RESET_RESULT",
    "STATISTICS",
    "STEP_RESULT",
    "Stepper",
    "infos_to_dict",
    "is_mask",
    "num_envs_of",
    "object_array",
    "is_per_env",
    "check_result_length",
    "drop_final_keys",
]

Array = np.ndarray[Any, Any]

# What a method of an environment returns, after its name.
RESET_RESULT = ("reset", "observation", "info")
STEP_RESULT = ("step", "observation", "reward", "terminated", "truncated", "info")
_FINAL = ("final_obs", "final_observation", "final_info")
# Keys that gymnasium's RecordEpisodeStatistics writes in the last step of an episode, next to the info of the reset.
STATISTICS = ("episode", "_episode")


class Stepper:
    """Steps a vectorized environment, and returns what an environment in the mode SAME_STEP would.

    After a step whose caller finds rows that have ended::

        last = stepper.final_observation(rows, info)  # None: the step's observation is the last one
        last_info, next_info = stepper.infos(info)
        if not stepper.resets_in_step:
            observation, next_info = stepper.reset(mask)

    :param env: vectorized, wrapped or not
    :param autoreset_mode: of :class:`Autoreset`, or its name; None: as the environment tells
    :param uses_torch: whether it steps on tensors
    :param missing_final_obs: if an environment resets rows in the step and returns no last observations: ``"error"``
        raises, ``"previous"`` returns the observations before, ``"nan"`` returns None
    :param partial_resets: whether the caller also resets rows in the midst of their episodes
    :raises InvalidArgumentError: If the mode does not exist, if the environment is asynchronous, or if it resets rows
        one step late and is not known to reset them when asked to.
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
        self.env, self.num_envs = env, cast(int, num_envs_of(env))
        self._base, self._rules, self._missing_final_obs = (
            getattr(env, "unwrapped", env),
            get_library_rules(env),
            missing_final_obs,
        )
        self._mode = find_autoreset_mode(env, autoreset_mode, uses_torch=uses_torch)
        self._reset_rows: PartialReset | None = None
        if self._mode in (Autoreset.NEXT_STEP, Autoreset.DISABLED):
            self._find_partial_reset()
        self._checks_others = not self._rules.keeps_other_rows and (partial_resets or self._mode is Autoreset.DISABLED)
        self._stores_observations = missing_final_obs == "previous" or self._checks_others
        # Copies of the observation before the last step and of the one after it, where they are needed later.
        self.previous: Any = None
        self.current: Any = None

    @property
    def resets_in_step(self) -> bool:
        """Whether the environment resets rows in the step that ends them."""
        return self._mode is Autoreset.SAME_STEP

    def step(self, action: Any) -> tuple[Any, ...]:
        """Take a step.

        :return: observation, reward, terminated, truncated and info, as the environment returned them
        :raises EnvironmentOutputError: If the environment returned something else.
        """
        self.previous, self.current = self.current, None
        result = check_result_length(self.env.step(action), STEP_RESULT)
        if self._stores_observations:
            self.begin(result[0])
        return result

    # -- rows that the last step has ended

    def final_observation(self, rows: Any, info: Any) -> Any:
        """Return the last observations of rows that the last step has ended.

        :param rows: their indices, of NumPy or torch; None: not known, which returns what the info holds
        :param info: of the step
        :return: (len(rows), ...) each; None if the step's observation shows them, or if they are lost and that is not
            an error, or ``rows`` is None
        :raises EnvironmentOutputError: If they are lost, or do not fit the rows.
        :raises InvalidArgumentError: If the mode is not known, and nothing in the info shows it.
        """
        final = _find_entry(info, "final_obs", "final_observation")
        if self._mode is None and final is None:
            raise InvalidArgumentError(
                f"{type(self.env).__name__} says nowhere when it resets sub-environments whose episodes have ended, "
                'and its info holds no final_obs. Write autoreset_mode="SameStep", "Disabled" (it resets those of '
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
            return final if rows is None else _select_rows(final, rows, self.num_envs)
        if self._missing_final_obs == "nan" or rows is None:
            return None
        raise EnvironmentOutputError(
            f"episodes have ended, {type(self.env).__name__} has reset itself, and its info holds no final_obs: their "
            "last observations are lost. Make it return them (Isaac Lab: cfg.compute_final_obs = True), or write "
            'missing_final_obs="previous", which takes the observations before; after an interrupted step, call reset()'
        )

    def infos(self, info: Any) -> tuple[Any, Any]:
        """Return the info of the last step and that of the resets in it, from what a step returned.

        Rows other than those that have ended are not to be read. What wrappers add next to ``final_info`` belongs to
        the step: episode statistics, and arrays that have no mask where the others have one.

        :param info: a dict of arrays with a row for each sub-environment, or a list with a dict for each
        :return: both in the same form; None as the info of the resets if the environment does not return it
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
        """Refuse last observations that are overwritten: SyncVectorEnv resets environments before it copies them."""
        current = getattr(self._base, "_env_obs", None)  # gymnasium's private name: without it, nothing is checked
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
        """Reset all rows, or those of a mask.

        :param mask: (n,) booleans
        :param kwargs: of the environment's reset: ``seed``, ``options``
        :return: observation and info of all rows; of those that were not reset they may be zero
        :raises EnvironmentOutputError: If the environment has changed rows that it was not to reset.
        """
        before, self.previous, self.current = self.current, None, None
        reset = self.env.reset if mask is None else partial(self._reset_rows or self._find_partial_reset(), mask)
        observation, info = check_result_length(reset(**kwargs), RESET_RESULT)
        self.begin(observation)
        if mask is not None and before is not None and self._checks_others:
            self._require_unchanged(before, observation, ~mask)
        return observation, info

    def begin(self, observation: Any) -> None:
        """Remember an observation if it is needed later; called with that of a reset by others, too."""
        self.current = map_arrays(copy_array, observation) if self._stores_observations else None

    def _find_partial_reset(self) -> PartialReset:
        if self._mode is Autoreset.NEXT_STEP and not self._rules.keeps_other_rows:
            raise InvalidArgumentError(
                f"{type(self._base).__name__} resets sub-environments one step after their episodes have ended "
                "(autoreset_mode NextStep), and is not known to reset some of them when asked to: the step in between "
                "would be a transition that never happened. If its reset(options={'reset_mask': ...}) resets those of "
                'the mask at once, write autoreset_mode="Disabled"; else make it of single environments: '
                'gymnasium.make_vec(..., vectorization_mode="sync")'
            )
        self._reset_rows = self._rules.partial_reset(self.env, self._base, self._mode or Autoreset.SAME_STEP)
        return self._reset_rows

    def _require_unchanged(self, before: Any, after: Any, rows: Array) -> None:
        for old, new in zip(leaves(before), leaves(after), strict=True):
            old, new = (np.asarray(to_numpy(part))[rows] for part in (old, new))
            if old.tobytes() != new.tobytes():
                raise EnvironmentOutputError(
                    f"{type(self.env).__name__}.reset(options={{'reset_mask': ...}}) also changed sub-environments "
                    "that it was not to reset: it cannot reset some of them alone. Write "
                    'gymnasium.make_vec(..., vectorization_mode="sync"), or give its reset an argument env_ids'
                )


# -- what environments return


def num_envs_of(env: Any) -> int | None:
    """Return the number of sub-environments; None for a single environment."""
    count: int | None = find_attribute(env, "num_envs")
    return getattr(getattr(getattr(env, "spec", None), "config", None), "num_envs", count)  # EnvPool has it there


def check_result_length(result: Any, expected: tuple[str, ...]) -> tuple[Any, ...]:
    """Refuse a result that does not have as many values as gymnasium's ``RESET_RESULT`` or ``STEP_RESULT``."""
    if isinstance(result, (tuple, list)) and len(result) == len(expected) - 1:
        return tuple(result)
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    method, *names = expected
    raise EnvironmentOutputError(
        f"{method}() returned {found}; expected the {len(names)} of gymnasium: {', '.join(names)}"
    )


def is_per_env(values: Any) -> bool:
    """Return whether there is one object for each sub-environment, instead of arrays."""
    return isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype == object)


def is_mask(info: dict[str, Any], key: Any, count: int) -> bool:
    """Return whether an entry is gymnasium's mask ``_key`` of the sub-environments that have ``key``."""
    mask: Any = info.get(key) if isinstance(key, str) and key[:1] == "_" and key[1:] in info else None
    has_rows = getattr(mask, "shape", None) == (count,)
    return has_rows and bool(mask.dtype == bool or str(mask.dtype) == "torch.bool")


def drop_final_keys(info: Any) -> Any:
    """Return an info without what belongs to the last observations."""
    if isinstance(info, list):
        return [drop_final_keys(part) for part in info]
    return {key: value for key, value in info.items() if key.removeprefix("_") not in _FINAL} if info else {}


def infos_to_dict(infos: Any) -> Any:
    """Return infos that come one by one, some of them None, as a dict of arrays of objects and their masks."""
    if not is_per_env(infos):
        return infos
    parts = [part if isinstance(part, dict) else {} for part in infos]
    collected: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part.get(key) for part in parts]
        collected[key] = (
            infos_to_dict(values) if any(isinstance(value, dict) for value in values) else object_array(values)
        )
        collected[f"_{key}"] = np.array([key in part for part in parts])
    return collected


def object_array(values: list[Any]) -> Array:
    """Return an array of objects, whatever these are."""
    array = np.empty(len(values), object)
    for place, value in enumerate(values):
        array[place] = value
    return array


def _find_entry(info: Any, *names: str) -> Any:
    if isinstance(info, list):
        each = [_find_entry(part, *names) for part in info]
        return each if any(part is not None for part in each) else None
    for name in names:
        if isinstance(info, dict) and info.get(name) is not None:
            return info[name]
    return None


def _select_rows(final: Any, rows: Any, count: int) -> Any:
    """Return last observations in whatever form they come: a batch, an array for each row, those rows alone."""
    if isinstance(final, dict):
        return {key: _select_rows(part, rows, count) for key, part in final.items() if not is_mask(final, key, count)}
    if isinstance(final, tuple):
        return tuple(_select_rows(part, rows, count) for part in final)
    length = len(final) if hasattr(final, "__len__") else None
    if length not in (count, len(rows)):
        raise EnvironmentOutputError(
            f"final_obs is of type {type(final).__name__} and holds {length} rows; expected {count}, or {len(rows)}, "
            "those that are done"
        )
    if not is_per_env(final):
        return take_rows(final, rows) if length == count else final
    each = [final[row] for row in rows.tolist()] if length == count else list(final)
    absent = [row for row, single in zip(rows.tolist(), each, strict=True) if single is None]
    if absent:
        raise EnvironmentOutputError(f"final_obs holds nothing for the sub-environments {absent}, which are done")
    try:
        return map_arrays(stack_arrays, *each)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentOutputError(f"final_obs holds observations of several shapes ({error})") from None
