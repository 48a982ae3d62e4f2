"""Environment instances turned into factories that build faithful copies in worker processes.

What most environments hold cannot be pickled, and what can be is often built anew by the pickle, without what was
changed since. :func:`as_factory` finds a way that keeps everything, or says what is in the way.
"""

from __future__ import annotations

from rl_ext_core.factory import _rules_basics as _rules_basics  # registers its rules
from rl_ext_core.factory._rules import register_rebuilder
from rl_ext_core.factory._sources import capture_constructors
from rl_ext_core.factory.convert import as_factory
from rl_ext_core.factory.factory import EnvFactory

__all__ = ["EnvFactory", "as_factory", "capture_constructors", "register_rebuilder"]
