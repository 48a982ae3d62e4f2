"""Autoreset modes of vectorized environments, and resets of some of their rows.

The table at the end of this file has the rules of each library. Source: gymnasium's ``AutoresetMode``
(https://farama.org/Vector-Autoreset-Mode).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import Enum
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.array_frameworks import map_arrays
from rl_ext_core.vector.spaces import find_attribute

# Function of an (n,) boolean NumPy mask and the keyword arguments of reset. It returns observation and info of all rows
# or of the masked rows.
PartialReset = Callable[..., Any]


class Autoreset(Enum):
    """Mode of the automatic resets of rows whose episodes have ended.

    The values are those of gymnasium's ``AutoresetMode``.
    """

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"

    @classmethod
    def parse(cls, requested_mode: Any, *, suggestion: str = "SameStep") -> Autoreset:
        """Convert a mode of gymnasium, or its name or value, to an Autoreset.

        :param suggestion: value that the error message suggests, default ``"SameStep"``
        :raises InvalidArgumentError: If there is no such mode.
        """
        text = str(getattr(requested_mode, "value", requested_mode))
        for mode in cls:
            if text in (mode.value, mode.name):
                return mode
        raise InvalidArgumentError(
            f"autoreset_mode={requested_mode!r}: expected one of {', '.join(repr(mode.value) for mode in cls)}. Use "
            f'autoreset_mode="{suggestion}"'
        )


class LibraryRules(NamedTuple):
    """Rules by which the vectorized environments of one library reset rows.

    :ivar library: name of the library
    :ivar includes: function that returns whether an unwrapped environment belongs to the library
    :ivar mode: mode of environments that do not set one; None if it is unknown
    :ivar partial_reset: function that creates a partial reset from the wrapped and the unwrapped environment, and the
        mode
    :ivar keeps_other_rows: whether a partial reset is known to keep the other rows unchanged
    :ivar info: whether a step's info without ``final_info`` describes the ``"last"`` step or the ``"reset"`` after it
    """

    library: str
    includes: Callable[[Any], bool]
    mode: Autoreset | None
    partial_reset: Callable[[Any, Any, Autoreset], PartialReset]
    keeps_other_rows: bool
    info: str


def wrapper_chain(env: Any) -> list[Any]:
    """Return the wrappers around an environment, outermost first, and the environment."""
    found = [env]
    while len(found) < 100 and getattr(found[-1], "__dict__", {}).get("env") is not None:
        found.append(found[-1].env)
    base = getattr(env, "unwrapped", env)
    return found if found[-1] is base else [*found, base]


def find_autoreset_mode(env: Any, requested_mode: object, *, uses_torch: bool) -> Autoreset | None:
    """Return the autoreset mode of a vectorized environment; None if it is unknown.

    The first of these decides: an attribute, the metadata, the argument, the settings, the rules of the library.

    :param uses_torch: whether it steps on tensors. Such environments reset rows in the step unless they set a mode
    :raises InvalidArgumentError: If a mode does not exist, or the argument differs from the environment's own mode.
    """
    base = getattr(env, "unwrapped", env)
    requested = None if requested_mode is None else Autoreset.parse(requested_mode)
    named = [getattr(layer, "autoreset_mode", None) for layer in (env, base)]
    for found in (*named, (getattr(env, "metadata", None) or {}).get("autoreset_mode")):
        if found is None:
            continue
        declared = Autoreset.parse(found)
        if requested not in (None, declared):
            raise InvalidArgumentError(
                f"autoreset_mode={requested_mode!r}: {type(base).__name__} declares {declared.value!r}, expected the "
                'same. Leave autoreset_mode out; if the environment is wrong, set its metadata["autoreset_mode"]'
            )
        return declared
    if requested is not None:
        return requested
    # ManiSkill's vector wrapper has an attribute, mjlab a setting.
    settings = [getattr(layer, "__dict__", {}).get("auto_reset") for layer in wrapper_chain(env)]
    for resets in (*settings, getattr(getattr(base, "cfg", None), "auto_reset", None)):
        if isinstance(resets, bool):
            return Autoreset.SAME_STEP if resets else Autoreset.DISABLED
    return get_library_rules(env).mode or (Autoreset.SAME_STEP if uses_torch else None)


def accepts_parameter(function: Any, name: str, *, any_keyword: bool = True) -> bool:
    """Return whether a function is known to have a parameter with a name, or ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or (any_keyword and any(part.kind is part.VAR_KEYWORD for part in parameters.values()))


def require_synchronous(env: Any) -> None:
    """Raise if EnvPool or ALE is asynchronous, has several players per environment, or has dm_env's interface.

    In asynchronous mode, a step returns only ``batch_size`` of the rows.

    :raises InvalidArgumentError: If a step does not return one row per environment.
    :raises InvalidTypeError: If the environment has no spaces, but specs as in dm_env.
    """
    base = getattr(env, "unwrapped", env)
    if callable(getattr(base, "observation_spec", None)) and find_attribute(env, "observation_space") is None:
        raise InvalidTypeError(
            f"{type(base).__name__} has the interface of dm_env, with observation_spec(): expected gymnasium's, with "
            'observation_space. Use envpool.make_gymnasium("CartPole-v1", num_envs=16) in place of envpool.make_dm, or '
            "shimmy.DmControlCompatibilityV0(env) for a single environment of dm_control"
        )
    if not _is_defined_in("envpool.", "ale_py.")(base):
        return
    settings = getattr(getattr(base, "spec", None), "config", base)  # ALE has attributes instead of a config
    size, count = getattr(settings, "batch_size", None), getattr(settings, "num_envs", None)
    if getattr(settings, "max_num_players", 1) > 1:
        raise InvalidArgumentError(
            f"{type(base).__name__} has {settings.max_num_players} players in each environment, and returns a row for "
            "each of them: expected one player. Use an environment of EnvPool for one player"
        )
    if isinstance(size, int) and isinstance(count, int) and 0 < size < count:
        raise InvalidArgumentError(
            f"`batch_size={size}` with num_envs={count} makes {type(base).__name__} asynchronous: each step returns "
            f"{size} of the {count} environments, expected all. Use batch_size={count}, or leave batch_size out"
        )


def require_time_limits_per_env(env: Any) -> None:
    """Raise if gymnasium's ``TimeLimit`` wraps a vectorized environment.

    It counts the steps of all sub-environments together, and returns one flag at its limit.

    :raises InvalidArgumentError: If one of the wrappers is a ``TimeLimit``.

    Source: https://github.com/isaac-sim/IsaacLab/pull/7911
    """
    from gymnasium.wrappers import TimeLimit

    base = getattr(env, "unwrapped", env)
    if any(getattr(type(layer), "step", None) is TimeLimit.step for layer in wrapper_chain(env)):
        raise InvalidArgumentError(
            f"TimeLimit around {type(base).__name__} counts the steps of all sub-environments together; expected a "
            "limit for each, in the environment (Isaac Lab: cfg.episode_length_s). Use "
            "gymnasium.make(..., max_episode_steps=-1), which adds no TimeLimit"
        )


# -- resets of some rows


def _reset_by_mask(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    """Return a function that resets rows by ``reset_mask``; raise where that is known to fail."""
    if _is_ale(base) and mode is not Autoreset.SAME_STEP:
        found = version("ale-py")
        if tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 12, 1):
            raise InvalidArgumentError(  # reset_mask raises an error in 0.11, and hangs in 0.12.0
                f"ale-py {found} cannot reset some of its environments: expected 0.12.1 or later. Use pip install "
                "'ale-py>=0.12.1', or AtariVectorEnv(..., autoreset_mode=AutoresetMode.SAME_STEP)"
            )
    if _is_async(base) and mode is Autoreset.NEXT_STEP and not base.shared_memory:
        raise InvalidArgumentError(
            "AsyncVectorEnv(shared_memory=False) resets a sub-environment again after a reset by reset_mask. Use "
            'autoreset_mode="SameStep", or keep shared_memory=True'
        )
    return _reset_by_option(env, "reset_mask", lambda mask: mask.copy())


def _reset_by_env_idx(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    return _reset_by_option(env, "env_idx", lambda mask: _indices(mask, base))


def _reset_by_env_ids(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    """Return a function that resets rows by ``env_ids``, which wrappers must forward."""
    from gymnasium import Wrapper, wrappers

    chain = wrapper_chain(env)
    without_effect = (Wrapper.reset, wrappers.OrderEnforcing.reset, wrappers.PassiveEnvChecker.reset)
    while len(chain) > 1 and "reset" not in vars(chain[0]) and getattr(type(chain[0]), "reset", None) in without_effect:
        del chain[0]
    stops = next((layer for layer in chain if not accepts_parameter(layer.reset, "env_ids")), None)

    def reset(mask: Any, **kwargs: Any) -> Any:
        """Reset the rows of a mask; raise if a wrapper does not forward ``env_ids``."""
        if stops is not None:
            raise InvalidArgumentError(
                f"{type(stops).__name__}.reset takes no env_ids, so that sub-environments cannot be reset alone "
                "through it. Use def reset(self, **kwargs) and self.env.reset(**kwargs) in it"
            )
        return chain[0].reset(env_ids=_indices(mask, base), **kwargs)

    return reset


def _reset_by_option(env: Any, option: str, value: Callable[[Any], Any]) -> PartialReset:
    base, is_known = wrapper_chain(env)[-1], False

    def reset_and_check(**kwargs: Any) -> Any:
        """Reset, and reject wrappers that do not forward the option: they would reset all rows."""
        nonlocal is_known
        if is_known or env is base:
            return env.reset(**kwargs)
        received, before, original = [], vars(base).get("reset"), base.reset

        def record_option(*args: Any, **given: Any) -> Any:
            received.append(option in (given.get("options") or {}))
            return original(*args, **given)

        base.reset = record_option
        try:
            result = env.reset(**kwargs)
        finally:
            del base.reset
            if before is not None:
                base.reset = before
        if not any(received):
            names = ", ".join(type(layer).__name__ for layer in wrapper_chain(env)[:-1])
            raise InvalidArgumentError(
                f"a wrapper around {type(base).__name__} ({names}) does not pass options[{option!r}] on, so that some "
                "sub-environments cannot be reset alone. Use def reset(self, **kwargs) and "
                "self.env.reset(**kwargs) in it"
            )
        is_known = True
        return result

    def reset(mask: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Reset the rows of a mask, and keep the wrappers' data of the other rows."""
        # gymnasium removes the mask from the options before wrappers can read it. So wrappers also reset the data of
        # the other rows, such as the sums of RecordEpisodeStatistics and NormalizeReward. Restore these data.
        kept = [
            (layer, name, old.copy())
            for layer in wrapper_chain(env)[:-1]
            for name, old in vars(layer).items()
            if isinstance(old, np.ndarray) and old.shape[:1] == mask.shape
        ]
        result = reset_and_check(options={**(options or {}), option: value(mask)}, **kwargs)
        for layer, name, old in kept:
            new = getattr(layer, name)
            if isinstance(new, np.ndarray) and new.shape == old.shape:
                setattr(layer, name, np.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        return result

    return reset


def _patch_reset(reset_rows: Callable[..., Any]) -> Callable[[Any, Any, Autoreset], PartialReset]:
    """Return a rule that makes an environment's ``reset`` accept the option ``reset_mask``."""

    def partial_reset(env: Any, base: Any, mode: Autoreset) -> PartialReset:
        if "reset" not in vars(base):
            base.reset = partial(_reset_with_mask, base, reset_rows)
        return _reset_by_mask(env, base, mode)

    return partial_reset


def _reset_with_mask(
    env: Any, reset_rows: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Reset the rows of the option ``reset_mask``; without it, reset all rows."""
    rest = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
    given = {key: value for key, value in kwargs.items() if value is not None}  # EnvPool before 1.2 rejects None
    given |= {"options": rest} if rest else {}
    if options and "reset_mask" in options:
        return reset_rows(env, options["reset_mask"], **given)
    if hasattr(env, "prev_done"):
        env.prev_done = env.prev_done & False  # otherwise JAX environments reset these rows again in the next step
    return type(env).reset(env, *args, **given)


def _reset_cartpole(env: Any, rows: Any, *, seed: int | None = None, **_: Any) -> tuple[Any, Any]:
    """Reset rows with the random numbers that a reset in the next step would use."""
    from gymnasium.vector import VectorEnv

    VectorEnv.reset(env, seed=seed)
    env.state[:, rows] = env.np_random.uniform(low=env.low, high=env.high, size=(4, int(rows.sum())))
    env.steps[rows] = 0
    env.prev_done[rows] = False
    return env.state.T.astype(np.float32), {}


def _reset_functional(env: Any, rows: Any, *, seed: int | None = None, **_: Any) -> tuple[Any, Any]:
    """Reset rows of gymnasium's functional JAX environment.

    All rows are computed, because JAX would compile for each number of rows.
    """
    import jax
    from jax import numpy as jnp

    def choose(new: Any, old: Any) -> Any:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    mask = jnp.asarray(rows)
    env.rng, key, observing = jax.random.split(env.rng if seed is None else jax.random.PRNGKey(seed), 3)
    fresh = env.func_env.initial(rng=jax.random.split(key, env.num_envs))
    env.state = jax.tree_util.tree_map(choose, fresh, env.state)
    env.steps, env.prev_done = jnp.where(mask, 0, env.steps), env.prev_done & ~mask
    observation = env.func_env.observation(env.state, jax.random.split(observing, env.num_envs))
    return observation, env.func_env.state_info(env.state)


def _reset_envpool(env: Any, mask: Any, **kwargs: Any) -> Any:
    """Reset rows of EnvPool, and return all rows. The rows that were not reset are zero."""
    rows = np.flatnonzero(mask)

    def scatter(part: Any) -> Any:
        """Put the rows of an array in their places among all rows; fill the rest with zeros."""
        if not isinstance(part, np.ndarray) or part.shape[:1] != rows.shape:
            return part
        full = np.zeros((len(mask), *part.shape[1:]), part.dtype)
        full[rows] = part
        return full

    return map_arrays(scatter, type(env).reset(env, rows, **kwargs))


def _indices(mask: Any, base: Any) -> Any:
    import torch

    return torch.from_numpy(np.flatnonzero(mask)).to(getattr(base, "device", "cpu"))


# -- the table


def _is_defined_in(*prefixes: str) -> Callable[[Any], bool]:
    """Return a test of where an environment, or a base class of it, is defined."""
    return lambda base: any(
        f"{kind.__module__}.{kind.__qualname__}".startswith(prefixes) for kind in type(base).__mro__
    )


_is_ale = _is_defined_in("ale_py.")
_is_sync_or_shared = _is_defined_in("gymnasium.vector.sync_vector_env.SyncVectorEnv", "rl_ext_core.vector.")
_is_async = _is_defined_in("gymnasium.vector.async_vector_env.AsyncVectorEnv")
_is_cartpole = _is_defined_in("gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv")
_is_functional = _is_defined_in("gymnasium.envs.functional_jax_env.FunctionalJaxVectorEnv")


def _accepts_env_ids(base: Any) -> bool:
    return accepts_parameter(getattr(base, "reset", None), "env_ids", any_keyword=False)


# The first row that includes an environment decides. In the mode SAME_STEP, all libraries return last observations as
# info["final_obs"] (before 1.0: "final_observation"). In other modes, the step's observation is the last one.
LIBRARIES = (
    # library, includes, mode, partial reset, keeps others, info without final_info
    LibraryRules("ALE AtariVectorEnv", _is_ale, None, _reset_by_mask, True, "reset"),
    LibraryRules(
        "EnvPool", _is_defined_in("envpool."), Autoreset.NEXT_STEP, _patch_reset(_reset_envpool), True, "last"
    ),
    LibraryRules("Isaac Lab, mjlab", _accepts_env_ids, None, _reset_by_env_ids, True, "last"),
    LibraryRules("ManiSkill", _is_defined_in("mani_skill"), Autoreset.DISABLED, _reset_by_env_idx, True, "last"),
    LibraryRules("SyncVectorEnv, rl-ext", _is_sync_or_shared, None, _reset_by_mask, True, "last"),
    LibraryRules("AsyncVectorEnv", _is_async, None, _reset_by_mask, True, "last"),
    LibraryRules("CartPoleVectorEnv", _is_cartpole, None, _patch_reset(_reset_cartpole), True, "last"),
    LibraryRules("phys2d (JAX)", _is_functional, Autoreset.NEXT_STEP, _patch_reset(_reset_functional), True, "last"),
    LibraryRules("others", lambda base: True, None, _reset_by_mask, False, "last"),
)


def get_library_rules(env: Any) -> LibraryRules:
    """Return the rules for a vectorized environment, wrapped or not."""
    base = getattr(env, "unwrapped", env)
    return next(rules for rules in LIBRARIES if rules.includes(base))
