"""Whether one process may hold several instances of an environment.

Simulators written in C often allow one instance per process, or share state between instances without a word.
:func:`probe` finds out in processes that are thrown away.
"""

from __future__ import annotations

from rl_ext_core.isolation.cures import apply_cure
from rl_ext_core.isolation.probing import probe
from rl_ext_core.isolation.verdict import Isolation, Verdict

__all__ = ["Isolation", "Verdict", "apply_cure", "probe"]
