"""When vectorized environments reset themselves, how some are reset while the others go on, and what both return.

Source: gymnasium's ``AutoresetMode`` (https://farama.org/Vector-Autoreset-Mode). Environments in Isaac Lab's style
reset within the step as well, and older ones do not tell.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError

__all__ = [
    "RESET",
    "STEP",
    "Autoreset",
    "PartialReset",
    "final_observation",
    "find_mode",
    "info_is_after_reset",
    "layers",
    "partial_reset",
    "require_own_final_observations",
    "require_synchronous",
    "unpacked",
    "without_final",
]

# What a method of an environment returns, after its name.
RESET = ("reset", "observation", "info")
STEP = ("step", "observation", "reward", "terminated", "truncated", "info")
_FINAL = ("final_obs", "final_observation", "final_info")

# (n,) booleans of NumPy, and arguments of a reset -> what that returns: of all sub-environments, or of those rows only.
PartialReset = Callable[..., Any]


class Autoreset(Enum):
    """When a sub-environment whose episode has ended resets itself; the values are gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"

    @classmethod
    def of(cls, asked: Any, *, write: str = "SameStep") -> Autoreset:
        """Return the mode for a mode of gymnasium's, its name or value; the error for others says what to write."""
        text = str(getattr(asked, "value", asked))
        for mode in cls:
            if text in (mode.value, mode.name):
                return mode
        raise InvalidArgumentError(
            f"autoreset_mode={asked!r} is none of {', '.join(repr(mode.value) for mode in cls)}. Write "
            f'autoreset_mode="{write}"'
        )


def find_mode(env: Any, asked: object, *, speaks_torch: bool) -> Autoreset | None:
    """Find the mode of a vectorized environment: as asked for, its attribute, its metadata, its library's habit.

    :param asked: a mode, its name or value; None: not set
    :param speaks_torch: whether it steps on tensors
    :return: the mode; None if it is not known
    :raises InvalidArgumentError: If there is no such mode.
    """
    base = getattr(env, "unwrapped", env)
    metadata = getattr(env, "metadata", None) or {}
    attributes = [getattr(layer, "autoreset_mode", None) for layer in (env, base)]
    for found in (asked, *attributes, metadata.get("autoreset_mode")):
        if found is not None:
            return Autoreset.of(found)
    # ManiSkill's vector wrapper has an attribute, mjlab a setting.
    said = [getattr(layer, "__dict__", {}).get("auto_reset") for layer in layers(env)]
    said.append(getattr(getattr(base, "cfg", None), "auto_reset", None))
    resets = next((value for value in said if isinstance(value, bool)), None)
    if resets is None and speaks_torch:
        resets = not _is_of("mani_skill", base)
    if resets is None:
        return Autoreset.NEXT_STEP if _is_of("envpool", base) else None
    return Autoreset.SAME_STEP if resets else Autoreset.DISABLED


def layers(env: Any) -> list[Any]:
    """Return an environment and the wrappers around it, the outermost first."""
    found = [env]
    while len(found) < 100 and getattr(found[-1], "__dict__", {}).get("env") is not None:
        found.append(found[-1].env)
    base = getattr(env, "unwrapped", env)
    return found if found[-1] is base else [*found, base]


def require_synchronous(env: Any) -> None:
    """Refuse EnvPool's and ALE's asynchronous mode, in which a step returns ``batch_size`` of the sub-environments."""
    base = getattr(env, "unwrapped", env)
    if not (_is_of("envpool", base) or _is_of("ale_py", base)):
        return
    settings = getattr(getattr(base, "spec", None), "config", base)  # EnvPool has a config, ALE has attributes
    size, count = getattr(settings, "batch_size", None), getattr(settings, "num_envs", None)
    if isinstance(size, int) and isinstance(count, int) and 0 < size < count:
        raise InvalidArgumentError(
            f"`batch_size={size}` with num_envs={count} makes {type(base).__name__} asynchronous: each step returns "
            f"{size} of the {count} environments, expected all. Use batch_size={count}, or leave batch_size out"
        )


def info_is_after_reset(env: Any) -> bool:
    """Return whether an info without ``final_info`` describes the new episode where a step has ended one: as ALE's."""
    return _is_of("ale_py", getattr(env, "unwrapped", env))


def partial_reset(env: Any, mode: Autoreset) -> tuple[PartialReset, bool]:
    """Find the way to reset some sub-environments and leave the others, through all wrappers.

    By the argument ``env_ids`` (Isaac Lab, mjlab), ManiSkill's option ``env_idx``, EnvPool's ``env_id``, else
    gymnasium's option ``reset_mask``.

    :return: the way, and whether it is known to leave the others alone
    :raises InvalidArgumentError: If the environment is known to do it wrongly.
    """
    base = getattr(env, "unwrapped", env)
    by_mask = _by_option(env, "reset_mask", lambda mask: mask.copy())
    if _is_of("ale_py", base):
        found = version("ale-py")
        if mode is not Autoreset.SAME_STEP and tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 12, 1):
            raise InvalidArgumentError(  # reset_mask raises in 0.11, and hangs in 0.12.0
                f"ale-py {found} cannot reset some of its environments: expected 0.12.1 or later. Use pip install "
                "'ale-py>=0.12.1', or AtariVectorEnv(..., autoreset_mode=AutoresetMode.SAME_STEP)"
            )
        return by_mask, True
    if _is_of("envpool", base):
        if env is base:  # wrappers have another first argument
            return lambda mask, **kwargs: env.reset(np.flatnonzero(mask), **kwargs), True
        if "options" in _parameters(base.reset):
            return by_mask, True
        raise InvalidArgumentError(
            f"`{type(env).__name__}` is a wrapper around an EnvPool whose reset takes no options: expected EnvPool "
            "1.2.5 or later, which can reset some environments through wrappers. Use pip install 'envpool>=1.2.5', or "
            "the pool without wrappers"
        )
    if "env_ids" in _parameters(base.reset):
        return _by_keyword(env, base), True
    if _is_of("mani_skill", base):
        return _by_option(env, "env_idx", lambda mask: _indices(mask, base)), True

    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    from rl_ext_core.vector import SharedMemoryVectorEnv

    if isinstance(base, CartPoleVectorEnv) and "reset" not in vars(base):
        # It ignores the option. Patched here, so that wrappers around it can pass it on.
        base.reset = partial(_reset_cartpole, base)  # type: ignore[method-assign]
    if isinstance(base, AsyncVectorEnv) and mode is Autoreset.NEXT_STEP and not base.shared_memory:
        raise InvalidArgumentError(
            "AsyncVectorEnv(shared_memory=False) resets a sub-environment once more after a reset by reset_mask. Write "
            'autoreset_mode="SameStep", or leave shared_memory at True'
        )
    return by_mask, isinstance(base, (SyncVectorEnv, AsyncVectorEnv, SharedMemoryVectorEnv, CartPoleVectorEnv))


def _by_keyword(env: Any, base: Any) -> PartialReset:
    """Call the outermost reset that may change anything, if all from there on pass the keyword on."""
    chain = layers(env)
    while len(chain) > 1 and _is_passive(chain[0]):
        del chain[0]
    stops = next((layer for layer in chain if not _takes_env_ids(layer.reset)), None)

    def reset(mask: Any, **kwargs: Any) -> Any:
        if stops is not None:
            raise InvalidArgumentError(
                f"{type(stops).__name__}.reset takes no env_ids, so that sub-environments cannot be reset alone "
                "through it. Write def reset(self, **kwargs) and self.env.reset(**kwargs) in it"
            )
        return chain[0].reset(env_ids=_indices(mask, base), **kwargs)

    return reset


def _is_passive(layer: Any) -> bool:
    """Return whether a wrapper leaves resets as they are: gymnasium's own that only look, and those without a reset."""
    import gymnasium

    if not isinstance(layer, gymnasium.Wrapper) or "reset" in vars(layer) or _takes_env_ids(layer.reset):
        return False
    owner = next(cls for cls in type(layer).__mro__ if "reset" in vars(cls))
    return owner in (gymnasium.Wrapper, gymnasium.wrappers.OrderEnforcing, gymnasium.wrappers.PassiveEnvChecker)


def _takes_env_ids(function: Any) -> bool:
    parameters = _parameters(function)
    return "env_ids" in parameters or any(part.kind is part.VAR_KEYWORD for part in parameters.values())


def _by_option(env: Any, option: str, value: Callable[[Any], Any]) -> PartialReset:
    def reset(mask: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        # gymnasium takes the mask out of the options before wrappers around it can read it: they reset what they keep
        # of every sub-environment, such as the sums of RecordEpisodeStatistics and NormalizeReward.
        kept = [
            (layer, name, old.copy())
            for layer in layers(env)[:-1]
            for name, old in vars(layer).items()
            if isinstance(old, np.ndarray) and old.shape[:1] == mask.shape
        ]
        result = env.reset(options={**(options or {}), option: value(mask)}, **kwargs)
        for layer, name, old in kept:
            new = getattr(layer, name)
            if isinstance(new, np.ndarray) and new.shape == old.shape:
                setattr(layer, name, np.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        return result

    return reset


def _reset_cartpole(env: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Do now what gymnasium's vectorised CartPole would do in the next step, from the same random numbers."""
    if not options or "reset_mask" not in options:
        result: tuple[Any, Any] = type(env).reset(env, seed=seed, options=options)
        return result
    from gymnasium.vector import VectorEnv

    VectorEnv.reset(env, seed=seed)
    rows = options["reset_mask"]
    env.state[:, rows] = env.np_random.uniform(low=env.low, high=env.high, size=(4, int(rows.sum())))
    env.steps[rows] = 0
    env.prev_done[rows] = False
    return env.state.T.astype(np.float32), {}


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_of(package: str, base: Any) -> bool:
    return any(kind.__module__.startswith(package) for kind in type(base).__mro__)


def _indices(mask: Any, base: Any) -> Any:
    import torch

    return torch.from_numpy(np.flatnonzero(mask)).to(getattr(base, "device", "cpu"))


# -- what resets and steps return


def unpacked(result: Any, expected: tuple[str, ...]) -> tuple[Any, ...]:
    """Refuse a result that does not have as many values as gymnasium's ``RESET`` or ``STEP``."""
    if isinstance(result, (tuple, list)) and len(result) == len(expected) - 1:
        return tuple(result)
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    method, *names = expected
    raise EnvironmentOutputError(
        f"{method}() returned {found}; expected the {len(names)} of gymnasium: {', '.join(names)}"
    )


def final_observation(info: Any) -> Any:
    """Return the last observations in a step's info, or None."""
    return _taken_out(info, "final_obs", "final_observation")


def require_own_final_observations(env: Any, final: Any, rows: Iterable[int]) -> None:
    """Refuse last observations that are overwritten: SyncVectorEnv resets environments before it copies them.

    :param final: the last observations, as :func:`final_observation` returns them
    :param rows: sub-environments whose episodes have ended
    :raises EnvironmentOutputError: If an environment has returned one array in its last step and in the reset.
    """
    base = getattr(env, "unwrapped", env)
    current = getattr(base, "_env_obs", None)  # gymnasium's private name: without it, nothing is checked
    if not isinstance(current, list) or not isinstance(final, list | np.ndarray) or len(final) != len(current):
        return
    if any(_share_memory(final[row], current[row]) for row in rows):
        raise EnvironmentOutputError(
            f"`autoreset_mode=SAME_STEP` of {type(base).__name__} loses last observations: expected an environment "
            "that returns new arrays, got one that writes every observation to the same array. Use "
            "SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP), or return observation.copy()"
        )


def _share_memory(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return any(_share_memory(part, right.get(key)) for key, part in left.items())
    if isinstance(left, tuple) and isinstance(right, tuple):
        return any(map(_share_memory, left, right))
    return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and np.shares_memory(left, right)


def final_information(info: Any) -> Any:
    """Return the infos that belong to the last observations in a step's info, or None."""
    return _taken_out(info, "final_info")


def _taken_out(info: Any, *names: str) -> Any:
    if isinstance(info, list):  # one info per sub-environment
        each = [_taken_out(part, *names) for part in info]
        return each if any(part is not None for part in each) else None
    found = [info.get(name) for name in names] if isinstance(info, dict) else []
    return next((value for value in found if value is not None), None)


def without_final(info: Any) -> Any:
    """Return an info without what belongs to the last observations."""
    if isinstance(info, list):
        return [without_final(part) for part in info]
    if not isinstance(info, dict):
        return info
    return {key: value for key, value in info.items() if key.removeprefix("_") not in _FINAL}
