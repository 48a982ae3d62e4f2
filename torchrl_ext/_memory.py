"""Memory of observations: whose it is, and whether the C library keeps it."""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[Any], dict[str, Any]]

__all__ = ["keep_when_freed", "without_need"]

_MAPPED_FROM, _MAPPED_TO = 128 << 10, 31 << 20


def keep_when_freed(nbytes: int) -> None:
    """Let the C library keep blocks of this size when they are freed, rather than give them back at every step.

    glibc maps pages for a block above a threshold, and the page faults of 3 MB take longer than to fill them. The
    threshold rises to the largest such block that was freed, up to 32 MB: one that nobody touches will do.
    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, _MAPPED_TO)
    if size > _MAPPED_FROM:
        torch.empty(size, dtype=torch.uint8)


def without_need(copied: Read, shared: Read) -> Read:
    """Compile a reader that copies an array unless nobody else can write into it: it owns its memory and is held here
    alone.

    :param copied: a reader that copies
    :param shared: one that does not
    """

    def read(observation: Any) -> dict[str, Any]:
        alone = type(observation) is np.ndarray and observation.base is None and getrefcount(observation) <= held
        return shared(observation) if alone else copied(observation)

    held = _references()
    return read


def _references() -> int:
    """Count the references that a step and a reader hold themselves; interpreters differ."""

    def read(observation: Any) -> int:
        return getrefcount(observation)

    observation, _ = _returned()
    return read(observation)


def _returned() -> tuple[Any, None]:
    return np.empty(1), None
