"""Conformance tests of frame stores, and transitions to test them with.

They do not need a test framework.
"""

from rl_ext_core.testing._conformance import (
    CONTENTS,
    LAYOUTS,
    ConformanceError,
    ReferenceStore,
    check_contents,
    check_frame_store,
    make_transitions,
)

__all__ = [
    "CONTENTS",
    "LAYOUTS",
    "ConformanceError",
    "ReferenceStore",
    "check_contents",
    "check_frame_store",
    "make_transitions",
]
