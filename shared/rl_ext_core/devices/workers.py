"""Environment factories that carry a device decision into worker processes."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Generic, TypeVar

from rl_ext_core._system import after_fork, process_identity
from rl_ext_core.devices import _apply
from rl_ext_core.errors import DeviceConflictError, InvalidTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_ext_core.devices.decision import Decision

__all__ = ["BoundFactory"]

_Env = TypeVar("_Env")
_log = logging.getLogger("rl_ext_core.devices")

_has_warned = False


def _reset_warning() -> None:
    global _has_warned
    _has_warned = False


after_fork(_reset_warning)


class BoundFactory(Generic[_Env]):
    """Builds an environment under a decision: applies it, and only then unpickles what builds the environment.

    Made by :meth:`Decision.bind`. Unpickling the factory imports the environment's modules, and those read variables at
    import; hence the order. In the process that made it, where vectorised environments build one for its spaces,
    a decision that was applied before is kept, and that is logged once if the worker's is a different one.

    :param decision: for the process that builds the environment
    :param env_fn: builds it
    :raises InvalidTypeError: not callable, or cloudpickle cannot pack it

    >>> from rl_ext_core.devices import resolve
    >>> bound = resolve("cpu").bind(dict)
    >>> bound()
    {}
    """

    def __init__(self, decision: Decision, env_fn: Callable[[], _Env]) -> None:
        if not callable(env_fn):
            raise InvalidTypeError(
                f"env_fn={env_fn!r} is not callable; expected a function that builds the environment. "
                "Write bind(lambda: make_env())"
            )
        self.decision = decision
        self._creator_process = process_identity()
        import cloudpickle  # takes as long to import as the rest of this package

        try:
            self._pickled_env_fn: bytes = cloudpickle.dumps(env_fn)
        except Exception as error:
            raise InvalidTypeError(
                f"env_fn={env_fn!r} cannot be packed for a worker process: {error}. Build what it holds inside of it: "
                "bind(lambda: make_env())"
            ) from error

    def __call__(self) -> _Env:
        """Apply the decision and build the environment.

        :return: the environment
        :raises DeviceConflictError: a library in this process has read other settings already, or this worker has built
            an environment under another decision
        """
        applied = _apply.applied_decision
        if applied is None or _have_same_variables(applied, self.decision):
            self.decision.apply()
        elif self._creator_process == process_identity():
            self._warn_once(applied)
        elif self.decision.variables:
            raise DeviceConflictError(
                f"this worker builds its environments under one decision ({applied.reason}), and one of them came with "
                f"another ({self.decision.reason}): a process has one renderer. Use one worker for each device"
            )
        build: Callable[[], _Env] = pickle.loads(self._pickled_env_fn)
        return build()

    def _warn_once(self, applied: Decision) -> None:
        global _has_warned
        if not _has_warned and self.decision.variables:
            _has_warned = True
            _log.warning(
                "a worker's environment is built in the parent process, under the decision that was applied here (%s) "
                "and not under the worker's (%s): fine where it is built for its spaces only",
                applied.reason,
                self.decision.reason,
            )

    def __repr__(self) -> str:
        return f"BoundFactory({self.decision.device}, render={self.decision.render})"


def _have_same_variables(one: Decision, other: Decision) -> bool:
    return dict(one.variables) == dict(other.variables)
