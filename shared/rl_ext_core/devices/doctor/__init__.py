"""What ``rl-ext doctor`` reports, as data: which GPU computes, which one each renderer uses, why, and what to type.

:func:`examine` makes a report of this machine, or of another one from its inventory and variables; :func:`replay`
reads the JSON that somebody else's doctor wrote.
"""

from __future__ import annotations

from rl_ext_core.devices.doctor._advice import Advice
from rl_ext_core.devices.doctor._fixes import Fix
from rl_ext_core.devices.doctor._predict import Prediction
from rl_ext_core.devices.doctor._report import Compute, GpuNames, Question, Report, examine, replay
from rl_ext_core.devices.doctor._verified import Verified
from rl_ext_core.devices.doctor._verify import verify

__all__ = [
    "Advice",
    "Compute",
    "Fix",
    "GpuNames",
    "Prediction",
    "Question",
    "Report",
    "Verified",
    "examine",
    "replay",
    "verify",
]
