"""Turn environments into picklable factories that build equal ones in workers.

Importing this package starts to record how environments are constructed (``record``). :func:`as_factory` (``factory``)
takes a fingerprint of an instance (``walk``), and packs the recorded calls (``recipe``). A temporary process builds a
copy and compares it (``compare``, ``drivers``, ``simulators``). The recipe sets what was changed since on each copy.
If a copy would differ, an error names the attribute. The result builds and seeds environments in workers
(``streams``).
"""

from __future__ import annotations

from rl_ext_core.factory import record
from rl_ext_core.factory.factory import EnvFactory, as_factory
from rl_ext_core.factory.record import capture_constructors

__all__ = ["EnvFactory", "as_factory", "capture_constructors"]

record.start_recording()
