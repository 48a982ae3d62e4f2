"""The compiled loops. ``_kernels_numpy`` has the same names."""

from rl_ext_core.frames._kernels_files import read_regions
from rl_ext_core.frames._kernels_in import (
    append_frame,
    begin_entries,
    best_reference,
    complete_entries,
    copy,
    leading_padding,
    push,
    push_pair,
    take_frames,
    take_newest,
)
from rl_ext_core.frames._kernels_out import CALLS_C, all_exist, gather, list_sealed, next_entries

__all__ = [
    "CALLS_C",
    "all_exist",
    "append_frame",
    "begin_entries",
    "best_reference",
    "complete_entries",
    "copy",
    "gather",
    "leading_padding",
    "list_sealed",
    "next_entries",
    "push",
    "push_pair",
    "read_regions",
    "take_frames",
    "take_newest",
]
