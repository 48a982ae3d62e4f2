"""Environments by name (functions and classes of modules, gymnasium ids), and of the old gym."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
import warnings
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError

# Modules that register the ids of a namespace, for error messages.
_REGISTERING_MODULES = {"ALE": "ale_py"}
SOURCE_FORMS = "module:function, module:Class.method, or a gymnasium id, which may be module:id"


def load_source(text: str) -> Any:
    """Find what builds the environment of a name: a function, class or gymnasium id.

    The working directory is added to ``sys.path``, as ``python -m`` does. It stays there, because the environment may
    import modules next to its own later.

    :param text: ``module:function``, ``module:Class.method``, or a gymnasium id, which may be ``module:id``
    :return: A gymnasium id, whose module was imported if it names one, or the object of that name in the module
    :raises InvalidArgumentError: If the module cannot be imported, or has no such object
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the module's code can raise any exception
        raise InvalidArgumentError(
            f"{text!r}: {module!r} cannot be imported ({type(error).__name__}: {error}). Expected {SOURCE_FORMS}"
        ) from error
    # The name of an id, such as ALE/Pong-v5, is not a dotted identifier.
    if not all(part.isidentifier() for part in name.split(".")):
        return name
    try:
        found = operator.attrgetter(name)(imported)
    except AttributeError as error:
        raise InvalidArgumentError(
            f"{text!r}: {module!r} has no {name!r} ({error}). Expected {SOURCE_FORMS}"
        ) from error
    if not (callable(found) or hasattr(found, "observation_space")):
        raise InvalidArgumentError(f"{text!r} is {found!r}, which cannot build an environment. Expected {SOURCE_FORMS}")
    return found


def qualified_id(name: str) -> str:
    """Return a gymnasium id with the module that registers it, or with "my_module" if that is not known."""
    env_id = name.rpartition(":")[2]
    return f"{_REGISTERING_MODULES.get(env_id.partition('/')[0], 'my_module')}:{env_id}"


def as_gymnasium_env(environment: Any) -> Any:
    """Return a gymnasium environment as is, or an old gym environment inside shimmy's wrapper.

    :raises InvalidTypeError: If ``environment`` is neither, or steps several environments at once.
    :raises MissingDependencyError: If ``environment`` is an old gym environment, and shimmy is not installed.
    """
    import gymnasium

    num_envs = getattr(environment, "num_envs", None)
    if isinstance(num_envs, int) and num_envs > 1 and not hasattr(environment, "possible_agents"):
        raise InvalidTypeError(
            f"{type(environment).__name__} steps {num_envs} environments at once: expected a single one. Use "
            "make_vec_env(env) or GymVecEnv(env) of sb3_ext, or torchrl_ext.GymWrapper(env), with the instance"
        )
    if isinstance(environment, gymnasium.Env):
        return environment
    gym_class = getattr(sys.modules.get("gym"), "Env", None)  # an old environment has imported gym
    if gym_class is not None and isinstance(environment, gym_class):
        return _from_gym(environment)
    kind = type(environment)
    advice = "Use a class that inherits from gymnasium.Env"
    if hasattr(environment, "possible_agents"):
        advice = "For PettingZoo, hand over a parallel environment itself: make_vec_env(parallel_env())"
    elif callable(getattr(environment, "observation_spec", None)):
        advice = "For dm_env, use shimmy.DmControlCompatibilityV0(env)"
    raise InvalidTypeError(
        f"the environment is a {kind.__module__}.{kind.__qualname__}; expected a gymnasium.Env. {advice}"
    )


def _from_gym(environment: Any) -> Any:
    """Wrap an old gym environment by the rules of SB3's ``_patch_env``."""
    is_v26 = "seed" in inspect.signature(environment.unwrapped.reset).parameters
    version, wrapper = ("0.26", "GymV26CompatibilityV0") if is_v26 else ("0.21", "GymV21CompatibilityV0")
    text = f"`{type(environment).__name__}` is an environment of gym {version}, which is no longer maintained"
    try:
        shimmy = importlib.import_module("shimmy")
    except ImportError as error:
        raise MissingDependencyError(
            f"{text}, and shimmy, which converts it, is not installed. Use pip install 'shimmy>=2.0', which provides "
            f"shimmy.{wrapper}(env=env)",
            name="shimmy",
        ) from error
    warnings.warn(f"{text}; it runs inside shimmy.{wrapper}. Inherit from gymnasium.Env to avoid that.", stacklevel=3)
    return getattr(shimmy, wrapper)(env=environment)
