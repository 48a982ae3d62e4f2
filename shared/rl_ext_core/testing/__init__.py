"""Conformance tests of frame stores, and transitions to test them with.

They do not need a test framework.
"""

from rl_ext_core.testing._conformance import ConformanceError, check_contents, check_frame_store
from rl_ext_core.testing._transitions import CONTENTS, LAYOUTS, ReferenceStore, make_transitions

__all__ = [
    "CONTENTS",
    "LAYOUTS",
    "ConformanceError",
    "ReferenceStore",
    "check_contents",
    "check_frame_store",
    "make_transitions",
]
