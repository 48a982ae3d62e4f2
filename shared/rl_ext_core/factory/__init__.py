"""Environment instances turned into factories that build copies of them in worker processes.

How instances are made is recorded from the import of this package on, see ``record``. :func:`as_factory` makes another
one in the same way, finds out in a process that is thrown away what was changed of the original since, and sets that on
the copies, or says what is in the way.
"""

from __future__ import annotations

from rl_ext_core.factory import record
from rl_ext_core.factory.convert import as_factory
from rl_ext_core.factory.factory import EnvFactory
from rl_ext_core.factory.record import capture_constructors

__all__ = ["EnvFactory", "as_factory", "capture_constructors"]

record.start_recording()
