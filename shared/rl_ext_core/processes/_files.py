"""Files without a name, which vanish with the last process that has them open."""

from __future__ import annotations

import os
import tempfile

__all__ = ["unnamed_file"]


def unnamed_file(purpose: str) -> int:
    """Open a new file, in memory where the system can.

    :param purpose: told by tools that list open files
    :return: its descriptor
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"rl_ext_core-{purpose}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
