"""Tells this process from every other, also from its forks and from those of other machines."""

from __future__ import annotations

import os
import uuid

__all__ = ["process"]

_here = uuid.uuid4()


def _renew() -> None:
    global _here
    _here = uuid.uuid4()


os.register_at_fork(after_in_child=_renew)


def process() -> uuid.UUID:
    """Give this process's identity."""
    return _here
