"""An event that a process may die at, at any moment."""

from __future__ import annotations

import contextlib
import math
import os
import select
from multiprocessing import reduction
from typing import Any

__all__ = ["KernelEvent"]


class KernelEvent:
    """Does what ``multiprocessing.Event`` does, with one counter in the kernel.

    That one is a lock and four counters: a process that is killed while it sets or clears the event takes the lock
    with it, and whoever sets the event next waits forever.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self.wait(0)

    def set(self) -> None:
        """Set it."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it as if it had never been set."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        :param timeout: seconds
        :return: whether it is set
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout in (None, math.inf) else max(timeout, 0) * 1e3))

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _inherited(descriptor: Any) -> KernelEvent:
    return KernelEvent(descriptor.detach())
