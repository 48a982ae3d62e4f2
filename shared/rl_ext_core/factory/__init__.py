"""Turn environments into picklable factories that build equal ones in workers.

Importing this package starts to record how environments are constructed, see ``record``. :func:`as_factory` repeats
that construction. In a temporary process it detects what was changed since, and sets the changes on each copy. If a
copy would differ, it raises an error that names the attribute.
"""

from __future__ import annotations

from rl_ext_core.factory import record
from rl_ext_core.factory.convert import as_factory
from rl_ext_core.factory.factory import EnvFactory
from rl_ext_core.factory.record import capture_constructors

__all__ = ["EnvFactory", "as_factory", "capture_constructors"]

record.start_recording()
