"""What a command line names as an environment: something that a module has, or an id. All commands read it alike."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any

from rl_ext_core.errors import InvalidArgumentError

SOURCE_FORMS = "module:function, module:Class.method, or an id of gymnasium, which may be module:id"


def load_source(text: str) -> Any:
    """Find what builds the environment that a text names.

    Modules are looked for in the working directory too, as ``python -m`` does, and stay there to be found: what builds
    an environment may import its neighbours later.

    :return: an id of gymnasium, whose module was imported where it names one; or what the module has under that name
    :raises InvalidArgumentError: the module cannot be imported, or has no such thing
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing runs what the module's author wrote
        raise InvalidArgumentError(
            f"{text!r}: {module!r} cannot be imported ({type(error).__name__}: {error}). Expected {SOURCE_FORMS}"
        ) from error
    # An id may begin with the module that registers it, and ends in a version.
    if not all(part.isidentifier() for part in name.split(".")):
        return name
    try:
        found = operator.attrgetter(name)(imported)
    except AttributeError as error:
        raise InvalidArgumentError(
            f"{text!r}: {module!r} has no {name!r} ({error}). Expected {SOURCE_FORMS}"
        ) from error
    if not (callable(found) or hasattr(found, "observation_space")):
        raise InvalidArgumentError(f"{text!r} is {found!r}, which builds no environment. Expected {SOURCE_FORMS}")
    return found
