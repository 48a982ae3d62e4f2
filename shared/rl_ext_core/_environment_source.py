"""Lookup of environments by name: functions and classes of modules, gymnasium ids."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, _missing_dependency_error

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


def create_env(name: str) -> Any:
    """Create the environment that ``--env`` names.

    :param name: ``module:function``, ``module:Class.method``, or a gymnasium id, which may be ``module:id``
    :raises InvalidArgumentError: If there is no such environment
    :raises MissingDependencyError: If gymnasium is not installed
    """
    found = load_source(name)
    if isinstance(found, str):
        try:
            import gymnasium
        except ImportError:
            raise _missing_dependency_error("gymnasium", "sb3", "--env") from None
        try:
            return gymnasium.make(found)
        except gymnasium.error.Error as error:
            unknown = isinstance(error, (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv))
            if unknown or type(error) is gymnasium.error.Error:  # gymnasium raises the base class for a malformed id
                raise InvalidArgumentError(
                    f"--env {name!r} cannot be created ({type(error).__name__}: {error}); expected {SOURCE_FORMS}"
                ) from error
            raise
    return found() if callable(found) else found
