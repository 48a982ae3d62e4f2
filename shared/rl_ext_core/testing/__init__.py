"""Conformance tests for third parties' codecs and frame stores.

They do not need a test framework.

.. code-block:: python

    from rl_ext_core.testing import check_codec

    def test_my_codec_is_lossless() -> None:
        check_codec("my-codec")  # registered by rl_ext_core.frames.register_codec
"""

from rl_ext_core.testing._conformance import ConformanceError, check_codec, check_contents, check_frame_store
from rl_ext_core.testing._transitions import CONTENTS, LAYOUTS, ReferenceStore, make_transitions

__all__ = [
    "CONTENTS",
    "LAYOUTS",
    "ConformanceError",
    "ReferenceStore",
    "check_codec",
    "check_contents",
    "check_frame_store",
    "make_transitions",
]
