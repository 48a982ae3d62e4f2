"""Why something cannot be copied."""

from __future__ import annotations

import pickle

from rl_ext_core.factory import _kinds

__all__ = ["NoCopy", "Refused"]


class NoCopy(pickle.PicklingError):
    """A rule's word that what holds this cannot be copied by making it anew either: its state is somewhere else."""


class Refused(Exception):  # noqa: N818
    """Something that an environment holds has neither a way to be pickled nor a rule.

    :ivar path: where it is, from the environment on, e.g. ``".unwrapped._sim"``
    :ivar value: what it is
    :ivar reason: why it cannot be copied
    """

    def __init__(self, path: str, value: object, reason: str) -> None:
        super().__init__(f"{path} ({_kinds.full_name(type(value))}): {reason}")
        self.path, self.value, self.reason = path, value, reason
