"""Test whether several instances of an environment can share one process.

Simulators written in C often allow one instance per process, or silently share state between instances.
:func:`probe` tests this in temporary processes.
"""

from __future__ import annotations

from rl_ext_core.isolation.judge import probe
from rl_ext_core.isolation.verdict import Isolation, Verdict

__all__ = ["Isolation", "Verdict", "probe"]
