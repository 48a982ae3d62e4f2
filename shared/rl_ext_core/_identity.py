"""Tells this process from every other, also from its forks and from those of other machines."""

from __future__ import annotations

import uuid

from rl_ext_core._system import after_fork

__all__ = ["process"]

_here = uuid.uuid4()


def _renew() -> None:
    global _here
    _here = uuid.uuid4()


after_fork(_renew)


def process() -> uuid.UUID:
    """Give this process's identity."""
    return _here
