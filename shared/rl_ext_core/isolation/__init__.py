"""Whether one process may hold several instances of an environment.

Simulators written in C often allow one instance per process, or share state between instances silently.
:func:`probe` tries it in temporary processes.
"""

from __future__ import annotations

from rl_ext_core.isolation.probing import probe
from rl_ext_core.isolation.verdict import Isolation, Verdict

__all__ = ["Isolation", "Verdict", "probe"]
