"""When vectorized environments reset themselves, and how some of their rows are reset while the others continue.

Source: gymnasium's ``AutoresetMode`` (https://farama.org/Vector-Autoreset-Mode). The rules of each library are in the
table at the end of this file.
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

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.arrays import map_arrays

__all__ = [
    "Autoreset",
    "PartialReset",
    "accepts_parameter",
    "find_autoreset_mode",
    "wrapper_chain",
    "require_synchronous",
    "get_library_rules",
]

# (n,) booleans of NumPy, and arguments of a reset -> what that returns: of all rows, or of the chosen ones only.
PartialReset = Callable[..., Any]


class Autoreset(Enum):
    """When a row whose episode has ended is reset; the values are gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"

    @classmethod
    def parse(cls, asked: Any, *, write: str = "SameStep") -> Autoreset:
        """Return the mode for a mode of gymnasium's, its name or value; the error for others says what to write."""
        text = str(getattr(asked, "value", asked))
        for mode in cls:
            if text in (mode.value, mode.name):
                return mode
        raise InvalidArgumentError(
            f"autoreset_mode={asked!r} is none of {', '.join(repr(mode.value) for mode in cls)}. Write "
            f'autoreset_mode="{write}"'
        )


class LibraryRules(NamedTuple):
    """How the vectorized environments of one library reset rows.

    :ivar library: its name
    :ivar includes: whether an unwrapped environment belongs to it
    :ivar mode: of environments that set none; None if it is not known
    :ivar partial_reset: from an environment, wrapped and unwrapped, and its mode to the way to reset some rows
    :ivar keeps_other_rows: whether that reset is known to leave the other rows alone
    :ivar info: whether a step's info without ``final_info`` describes the ``"last"`` step or the ``"reset"`` after it
    """

    library: str
    includes: Callable[[Any], bool]
    mode: Autoreset | None
    partial_reset: Callable[[Any, Any, Autoreset], PartialReset]
    keeps_other_rows: bool
    info: str


def wrapper_chain(env: Any) -> list[Any]:
    """Return an environment and the wrappers around it, the outermost first."""
    found = [env]
    while len(found) < 100 and getattr(found[-1], "__dict__", {}).get("env") is not None:
        found.append(found[-1].env)
    base = getattr(env, "unwrapped", env)
    return found if found[-1] is base else [*found, base]


def find_autoreset_mode(env: Any, asked: object, *, uses_torch: bool) -> Autoreset | None:
    """Find the mode of a vectorized environment: as asked for, its attribute, its metadata, its library's.

    :param asked: a mode, its name or value; None: not set
    :param uses_torch: whether it steps on tensors; such environments reset rows in the step unless they set a mode
    :return: the mode; None if it is not known
    :raises InvalidArgumentError: If there is no such mode.
    """
    base = getattr(env, "unwrapped", env)
    named = [asked, *(getattr(layer, "autoreset_mode", None) for layer in (env, base))]
    for found in (*named, (getattr(env, "metadata", None) or {}).get("autoreset_mode")):
        if found is not None:
            return Autoreset.parse(found)
    # ManiSkill's vector wrapper has an attribute, mjlab a setting.
    settings = [getattr(layer, "__dict__", {}).get("auto_reset") for layer in wrapper_chain(env)]
    for resets in (*settings, getattr(getattr(base, "cfg", None), "auto_reset", None)):
        if isinstance(resets, bool):
            return Autoreset.SAME_STEP if resets else Autoreset.DISABLED
    return get_library_rules(env).mode or (Autoreset.SAME_STEP if uses_torch else None)


def accepts_parameter(function: Any, name: str, *, any_keyword: bool = True) -> bool:
    """Return whether a function is known to have a parameter of a name, or to accept any keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or (any_keyword and any(part.kind is part.VAR_KEYWORD for part in parameters.values()))


def require_synchronous(env: Any) -> None:
    """Refuse EnvPool's and ALE's asynchronous mode, in which a step returns ``batch_size`` of the rows, and players."""
    base = getattr(env, "unwrapped", env)
    if not _is_defined_in("envpool.", "ale_py.")(base):
        return
    settings = getattr(getattr(base, "spec", None), "config", base)  # EnvPool has a config, ALE has attributes
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


# -- ways to reset some rows


def _reset_by_mask(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    """Use gymnasium's option ``reset_mask``."""
    return _reset_by_option(env, "reset_mask", lambda mask: mask.copy())


def _reset_by_mask_in_ale(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    found = version("ale-py")
    if mode is not Autoreset.SAME_STEP and tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 12, 1):
        raise InvalidArgumentError(  # reset_mask raises in 0.11, and hangs in 0.12.0
            f"ale-py {found} cannot reset some of its environments: expected 0.12.1 or later. Use pip install "
            "'ale-py>=0.12.1', or AtariVectorEnv(..., autoreset_mode=AutoresetMode.SAME_STEP)"
        )
    return _reset_by_mask(env, base, mode)


def _reset_by_mask_in_async(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    if mode is Autoreset.NEXT_STEP and not base.shared_memory:
        raise InvalidArgumentError(
            "AsyncVectorEnv(shared_memory=False) resets a sub-environment once more after a reset by reset_mask. Write "
            'autoreset_mode="SameStep", or leave shared_memory at True'
        )
    return _reset_by_mask(env, base, mode)


def _reset_by_env_idx(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    """Use ManiSkill's option."""
    return _reset_by_option(env, "env_idx", lambda mask: _indices(mask, base))


def _reset_by_env_ids(env: Any, base: Any, mode: Autoreset) -> PartialReset:
    """Call the outermost reset that may change anything, if all from there on pass the keyword on."""
    from gymnasium import Wrapper, wrappers

    chain = wrapper_chain(env)
    only_look = (Wrapper.reset, wrappers.OrderEnforcing.reset, wrappers.PassiveEnvChecker.reset)
    while len(chain) > 1 and "reset" not in vars(chain[0]) and getattr(type(chain[0]), "reset", None) in only_look:
        del chain[0]
    stops = next((layer for layer in chain if not accepts_parameter(layer.reset, "env_ids")), None)

    def reset(mask: Any, **kwargs: Any) -> Any:
        if stops is not None:
            raise InvalidArgumentError(
                f"{type(stops).__name__}.reset takes no env_ids, so that sub-environments cannot be reset alone "
                "through it. Write def reset(self, **kwargs) and self.env.reset(**kwargs) in it"
            )
        return chain[0].reset(env_ids=_indices(mask, base), **kwargs)

    return reset


def _reset_by_option(env: Any, option: str, value: Callable[[Any], Any]) -> PartialReset:
    base, is_known = wrapper_chain(env)[-1], False

    def reset_and_check(**kwargs: Any) -> Any:
        """Reset, and refuse wrappers that do not pass the option on: they would reset all rows."""
        nonlocal is_known
        if is_known or env is base:
            return env.reset(**kwargs)
        received, before, original = [], vars(base).get("reset"), base.reset

        def record(*args: Any, **given: Any) -> Any:
            received.append(option in (given.get("options") or {}))
            return original(*args, **given)

        base.reset = record
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
                "sub-environments cannot be reset alone. Write def reset(self, **kwargs) and "
                "self.env.reset(**kwargs) in it"
            )
        is_known = True
        return result

    def reset(mask: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        # gymnasium takes the mask out of the options before wrappers around it can read it: they reset what they keep
        # of every sub-environment, such as the sums of RecordEpisodeStatistics and NormalizeReward.
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
    """Replace an environment's reset by one that follows ``reset_mask``, so that wrappers around it can pass it on."""

    def partial_reset(env: Any, base: Any, mode: Autoreset) -> PartialReset:
        if "reset" not in vars(base):
            base.reset = partial(_reset_with_mask, base, reset_rows)
        return _reset_by_mask(env, base, mode)

    return partial_reset


def _reset_with_mask(
    env: Any, reset_rows: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    rest = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
    given = {key: value for key, value in kwargs.items() if value is not None}  # EnvPool before 1.2 takes numbers alone
    given |= {"options": rest} if rest else {}
    if options and "reset_mask" in options:
        return reset_rows(env, options["reset_mask"], **given)
    if hasattr(env, "prev_done"):
        env.prev_done = env.prev_done & False  # else JAX environments reset these rows in the next step again
    return type(env).reset(env, *args, **given)


def _reset_cartpole(env: Any, rows: Any, *, seed: int | None = None, **_: Any) -> tuple[Any, Any]:
    """Do now what gymnasium's vectorized CartPole would do in the next step, from the same random numbers."""
    from gymnasium.vector import VectorEnv

    VectorEnv.reset(env, seed=seed)
    env.state[:, rows] = env.np_random.uniform(low=env.low, high=env.high, size=(4, int(rows.sum())))
    env.steps[rows] = 0
    env.prev_done[rows] = False
    return env.state.T.astype(np.float32), {}


def _reset_functional(env: Any, rows: Any, *, seed: int | None = None, **_: Any) -> tuple[Any, Any]:
    """Reset rows of gymnasium's functional JAX environment, all computed: JAX compiles for each number of rows."""
    import jax
    from jax import numpy as jnp

    def chosen(new: Any, old: Any) -> Any:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    mask = jnp.asarray(rows)
    env.rng, key, observing = jax.random.split(env.rng if seed is None else jax.random.PRNGKey(seed), 3)
    fresh = env.func_env.initial(rng=jax.random.split(key, env.num_envs))
    env.state = jax.tree_util.tree_map(chosen, fresh, env.state)
    env.steps, env.prev_done = jnp.where(mask, 0, env.steps), env.prev_done & ~mask
    observation = env.func_env.observation(env.state, jax.random.split(observing, env.num_envs))
    return observation, env.func_env.state_info(env.state)


def _reset_envpool(env: Any, mask: Any, **kwargs: Any) -> Any:
    """Return all rows where EnvPool returns those alone that it has reset; others are zero."""
    rows = np.flatnonzero(mask)

    def scatter(part: Any) -> Any:
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
    """Return whether the class of an environment, or one of its bases, is defined under one of these names."""
    return lambda base: any(
        f"{kind.__module__}.{kind.__qualname__}".startswith(prefixes) for kind in type(base).__mro__
    )


_is_sync_or_shared = _is_defined_in("gymnasium.vector.sync_vector_env.SyncVectorEnv", "rl_ext_core.vector.")
_is_async = _is_defined_in("gymnasium.vector.async_vector_env.AsyncVectorEnv")
_is_cartpole = _is_defined_in("gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv")
_is_functional = _is_defined_in("gymnasium.envs.functional_jax_env.FunctionalJaxVectorEnv")


def _accepts_env_ids(base: Any) -> bool:
    return accepts_parameter(getattr(base, "reset", None), "env_ids", any_keyword=False)


# The first row that includes an environment counts. All tell last observations as info["final_obs"] (before 1.0:
# "final_observation"), if they reset rows in the step; in other modes, the step's observation is the last one.
LIBRARIES = (
    # library, includes, mode, partial reset, keeps others, info without final_info
    LibraryRules("ALE AtariVectorEnv", _is_defined_in("ale_py."), None, _reset_by_mask_in_ale, True, "reset"),
    LibraryRules(
        "EnvPool", _is_defined_in("envpool."), Autoreset.NEXT_STEP, _patch_reset(_reset_envpool), True, "last"
    ),
    LibraryRules("Isaac Lab, mjlab", _accepts_env_ids, None, _reset_by_env_ids, True, "last"),
    LibraryRules("ManiSkill", _is_defined_in("mani_skill"), Autoreset.DISABLED, _reset_by_env_idx, True, "last"),
    LibraryRules("SyncVectorEnv, ours", _is_sync_or_shared, None, _reset_by_mask, True, "last"),
    LibraryRules("AsyncVectorEnv", _is_async, None, _reset_by_mask_in_async, True, "last"),
    LibraryRules("CartPoleVectorEnv", _is_cartpole, None, _patch_reset(_reset_cartpole), True, "last"),
    LibraryRules("phys2d (JAX)", _is_functional, Autoreset.NEXT_STEP, _patch_reset(_reset_functional), True, "last"),
    LibraryRules("others", lambda base: True, None, _reset_by_mask, False, "last"),
)


def get_library_rules(env: Any) -> LibraryRules:
    """Return the row of the table for a vectorized environment, wrapped or not."""
    base = getattr(env, "unwrapped", env)
    return next(rules for rules in LIBRARIES if rules.includes(base))
