"""Resets some sub-environments of a vectorised environment and leaves the others."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from torchrl_ext._autoreset import Autoreset, is_maniskill, layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    PartialReset = Callable[..., tuple[Any, Any]]

__all__ = ["pair", "partial_reset"]

_STATISTICS = ("episode_returns", "episode_lengths", "episode_start_times", "prev_dones")


def pair(result: Any) -> tuple[Any, Any]:
    """Check what a reset returned.

    :raises EnvironmentOutputError: it is no pair
    """
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    raise EnvironmentOutputError(f"reset() returned {found}; expected the 2 of gymnasium: observation, info")


def partial_reset(env: Any, mode: Autoreset) -> tuple[PartialReset, bool]:
    """Find the way to reset some sub-environments and leave the others.

    By a keyword argument ``env_ids`` (Isaac Lab, mjlab), by ManiSkill's option ``env_idx``, else by gymnasium's option
    ``reset_mask``; through all wrappers, which may change what is returned.

    :return: ``(mask, **kwargs) -> (observation, info)``, and whether it is known to leave the others alone
    :raises InvalidArgumentError: the environment is known to do it wrongly
    """
    base = getattr(env, "unwrapped", env)
    if "env_ids" in _parameters(base.reset):
        return _by_keyword(env, base), True
    if is_maniskill(base):
        return _by_option(env, "env_idx", lambda mask: _indices(mask, base)), True
    if isinstance(base, CartPoleVectorEnv) and "reset" not in vars(base):
        # It ignores the option: taught here, so that wrappers around it can pass it on.
        base.reset = partial(_reset_cartpole, base)  # type: ignore[method-assign]
    if isinstance(base, gymnasium.vector.AsyncVectorEnv) and mode is Autoreset.NEXT_STEP and not base.shared_memory:
        raise InvalidArgumentError(
            "AsyncVectorEnv(shared_memory=False) resets a sub-environment once more after a reset by reset_mask. Write "
            'autoreset_mode="SameStep", or leave shared_memory at True'
        )
    known = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv, CartPoleVectorEnv)
    return _by_option(env, "reset_mask", lambda mask: mask.cpu().numpy()), isinstance(base, known)


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _by_keyword(env: Any, base: Any) -> PartialReset:
    """Call the outermost reset that may change anything, if all from there on pass the keyword on."""
    chain = layers(env)
    while len(chain) > 1 and _is_passive(chain[0]):
        del chain[0]
    stops = next((layer for layer in chain if not _takes_env_ids(layer.reset)), None)

    def reset(mask: torch.Tensor, **kwargs: Any) -> tuple[Any, Any]:
        if stops is not None:
            raise InvalidArgumentError(
                f"{type(stops).__name__}.reset takes no env_ids, so that sub-environments cannot be reset alone "
                "through it. Write def reset(self, **kwargs) and self.env.reset(**kwargs) in it"
            )
        return pair(chain[0].reset(env_ids=_indices(mask, base), **kwargs))

    return reset


def _is_passive(layer: Any) -> bool:
    """Tell whether a wrapper leaves resets as they are: gymnasium's own that only look, and those without a reset."""
    if not isinstance(layer, gymnasium.Wrapper) or "reset" in vars(layer) or _takes_env_ids(layer.reset):
        return False
    owner = next(cls for cls in type(layer).__mro__ if "reset" in vars(cls))
    return owner in (gymnasium.Wrapper, gymnasium.wrappers.OrderEnforcing, gymnasium.wrappers.PassiveEnvChecker)


def _takes_env_ids(function: Any) -> bool:
    parameters = _parameters(function)
    return "env_ids" in parameters or any(part.kind is part.VAR_KEYWORD for part in parameters.values())


def _by_option(env: Any, option: str, value: Callable[[torch.Tensor], Any]) -> PartialReset:
    recorders = list(_recorders(env))

    def reset(mask: torch.Tensor, *, options: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, Any]:
        kept = [{name: getattr(recorder, name).copy() for name in _STATISTICS} for recorder in recorders]
        result = pair(env.reset(options={**(options or {}), option: value(mask)}, **kwargs))
        # What is below this wrapper takes the mask out of the options, before the wrapper reads it.
        for recorder, values in zip(recorders, kept, strict=True):
            for name, old in values.items():
                setattr(recorder, name, np.where(mask.cpu().numpy(), getattr(recorder, name), old))
        return result

    return reset


def _recorders(env: Any) -> Iterator[RecordEpisodeStatistics[Any, Any]]:
    while isinstance(env, gymnasium.vector.VectorWrapper):
        if isinstance(env, RecordEpisodeStatistics):
            yield env
        env = env.env


def _reset_cartpole(env: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Do now what gymnasium's vectorised CartPole would do in the next step, from the same random numbers."""
    if not options or "reset_mask" not in options:
        return type(env).reset(env, seed=seed, options=options)
    rows = options["reset_mask"]
    gymnasium.vector.VectorEnv.reset(env, seed=seed)
    env.state[:, rows] = env.np_random.uniform(low=env.low, high=env.high, size=(4, int(rows.sum())))
    env.steps[rows] = 0
    env.prev_done[rows] = False
    return env.state.T.astype(np.float32), {}


def _indices(mask: torch.Tensor, env: Any) -> torch.Tensor:
    return mask.nonzero().squeeze(-1).to(getattr(env, "device", mask.device))
