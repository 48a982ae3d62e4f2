"""When vectorised environments reset themselves, and how some sub-environments are reset while the others go on.

Source: gymnasium's ``AutoresetMode`` (https://farama.org/Vector-Autoreset-Mode). Environments in Isaac Lab's style
reset within the step as well, and older ones say so nowhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError

__all__ = ["Autoreset", "PartialReset", "find_mode", "layers", "partial_reset"]

# (n,) booleans -> observation and info; of all sub-environments, or of those rows alone.
PartialReset = Callable[[Any], tuple[Any, Any]]


class Autoreset(Enum):
    """When a sub-environment whose episode has ended resets itself; the values are gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


def find_mode(env: Any, asked: object, *, speaks_torch: bool) -> Autoreset | None:
    """Find the mode of a vectorised environment: as asked for, its attribute, its metadata, its library's habit.

    :param asked: what the user says: a mode, its name or value; None: nothing
    :param speaks_torch: whether it steps on tensors
    :return: the mode; None: nothing tells
    :raises InvalidArgumentError: no such mode
    """
    base = getattr(env, "unwrapped", env)
    metadata = getattr(env, "metadata", None) or {}
    for found in (
        asked,
        getattr(env, "autoreset_mode", None),
        getattr(base, "autoreset_mode", None),
        metadata.get("autoreset_mode"),
    ):
        if found is not None:
            text = str(getattr(found, "value", found))
            for mode in Autoreset:
                if text in (mode.value, mode.name):
                    return mode
            raise InvalidArgumentError(
                f"autoreset_mode={found!r} is none of {', '.join(repr(mode.value) for mode in Autoreset)}. "
                'Write autoreset_mode="SameStep"'
            )
    # ManiSkill's vector wrapper has an attribute, mjlab a setting.
    said = [getattr(layer, "__dict__", {}).get("auto_reset") for layer in layers(env)]
    said.append(getattr(getattr(base, "cfg", None), "auto_reset", None))
    resets = next((value for value in said if isinstance(value, bool)), None)
    if resets is None and speaks_torch:
        resets = not _is_maniskill(base)
    if resets is None:
        return Autoreset.NEXT_STEP if _is_envpool(base) else None
    return Autoreset.SAME_STEP if resets else Autoreset.DISABLED


def layers(env: Any) -> list[Any]:
    """Give an environment and the wrappers around it, the outermost first."""
    found = [env]
    while len(found) < 100 and getattr(found[-1], "__dict__", {}).get("env") is not None:
        found.append(found[-1].env)
    base = getattr(env, "unwrapped", env)
    return found if found[-1] is base else [*found, base]


def partial_reset(env: Any, mode: Autoreset) -> tuple[PartialReset, bool]:
    """Find the way to reset some sub-environments and leave the others, through all wrappers.

    By the argument ``env_ids`` (Isaac Lab, mjlab), ManiSkill's option ``env_idx``, EnvPool's ``env_id``, else
    gymnasium's option ``reset_mask``.

    :param mode: NEXT_STEP or DISABLED
    :return: the way, and whether it is known to leave the others alone
    :raises InvalidArgumentError: none is known for an environment that would reset itself in its next step as well
    """
    base = getattr(env, "unwrapped", env)
    if _is_envpool(base):
        return lambda mask: _pair(env.reset(np.flatnonzero(mask))), True
    if "env_ids" in _parameters(base.reset):
        return lambda mask: _pair(env.reset(env_ids=_indices(mask, base))), True
    if _is_maniskill(base):
        return lambda mask: _pair(env.reset(options={"env_idx": _indices(mask, base)})), True

    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    known = (SyncVectorEnv, AsyncVectorEnv, CartPoleVectorEnv)
    if isinstance(base, CartPoleVectorEnv) and "reset" not in vars(base):
        # It ignores the option: taught here, so that wrappers around it can pass it on.
        base.reset = partial(_reset_cartpole, base)  # type: ignore[method-assign]
    if mode is Autoreset.NEXT_STEP:
        if isinstance(base, AsyncVectorEnv) and not base.shared_memory:
            raise InvalidArgumentError(
                "AsyncVectorEnv(shared_memory=False) resets a sub-environment once more after a reset by reset_mask. "
                'Write autoreset_mode="SameStep", or leave shared_memory at True'
            )
        if not isinstance(base, known):
            raise InvalidArgumentError(
                f"{type(base).__name__} resets sub-environments one step after their episodes have ended "
                "(autoreset_mode NextStep), and is not known to reset some of them when asked to: the step in between "
                "would be a transition that never happened. If its reset(options={'reset_mask': ...}) resets those "
                'of the mask at once, write autoreset_mode="Disabled"; else make it of single environments: '
                'gymnasium.make_vec(..., vectorization_mode="sync")'
            )
    return partial(_reset_by_mask, env), isinstance(base, known)


def _reset_by_mask(env: Any, mask: Any) -> tuple[Any, Any]:
    # gymnasium takes the mask out of the options before wrappers around it can read it: they reset what they keep of
    # every sub-environment, such as the sums of RecordEpisodeStatistics and NormalizeReward.
    kept = [
        (layer, name, value.copy())
        for layer in layers(env)[:-1]
        for name, value in vars(layer).items()
        if isinstance(value, np.ndarray) and value.shape[:1] == mask.shape
    ]
    result = _pair(env.reset(options={"reset_mask": mask.copy()}))
    for layer, name, old in kept:
        new = getattr(layer, name)
        if isinstance(new, np.ndarray) and new.shape == old.shape:
            setattr(layer, name, np.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old))
    return result


def _reset_cartpole(env: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Do now what gymnasium's vectorised CartPole would do in the next step, from the same random numbers."""
    if not options or "reset_mask" not in options:
        result: tuple[Any, Any] = type(env).reset(env, seed=seed, options=options)
        return result
    rows = options["reset_mask"]
    env.state[:, rows] = env.np_random.uniform(low=env.low, high=env.high, size=(4, int(rows.sum())))
    env.steps[rows] = 0
    env.prev_done[rows] = False
    return env.state.T.astype(np.float32), {}


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], result[1]
    found = f"{len(result)} values" if isinstance(result, tuple | list) else f"a value of type {type(result).__name__}"
    raise EnvironmentOutputError(f"reset() returned {found}; expected the 2 of gymnasium: observation, info")


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_maniskill(base: Any) -> bool:
    """Tell whether it resets by the option ``env_idx``, and never by itself."""
    return any(kind.__module__.startswith("mani_skill") for kind in type(base).__mro__)


def _is_envpool(base: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "envpool" for kind in type(base).__mro__)


def _indices(mask: Any, base: Any) -> Any:
    import torch

    return torch.from_numpy(np.flatnonzero(mask)).to(base.device)
