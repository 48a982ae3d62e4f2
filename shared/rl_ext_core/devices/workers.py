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
    """Let a forked process log the warning of :class:`BoundFactory` again."""
    global _has_warned
    _has_warned = False


after_fork(_reset_warning)


class BoundFactory(Generic[_Env]):
    """Environment factory that applies a decision before it creates the environment.

    :meth:`Decision.bind` creates it. The decision is applied before ``env_fn`` is unpickled, because that imports the
    environment's modules, which read variables at import.

    Vectorized environments also create one environment in the parent process, to read its spaces. There, a decision
    that was applied earlier stays in effect. If it differs from this one, that is logged once.

    :param decision: the decision to apply
    :param env_fn: function that creates the environment
    :raises InvalidTypeError: If ``env_fn`` is not callable, or cloudpickle cannot pickle it.

    >>> from rl_ext_core.devices import resolve
    >>> bound = resolve("cpu").bind(dict)
    >>> bound()
    {}
    """

    def __init__(self, decision: Decision, env_fn: Callable[[], _Env]) -> None:
        if not callable(env_fn):
            raise InvalidTypeError(
                f"env_fn={env_fn!r} is not callable: expected a function that creates the environment. "
                "Use bind(lambda: make_env())"
            )
        self.decision = decision
        self._creator_process = process_identity()
        import cloudpickle  # imported here, because it takes as long as the rest of this package

        try:
            self._pickled_env_fn: bytes = cloudpickle.dumps(env_fn)
        except Exception as error:
            raise InvalidTypeError(
                f"env_fn={env_fn!r} cannot be pickled for a worker process: {error}. Create its objects inside the "
                "function: bind(lambda: make_env())"
            ) from error

    def __call__(self) -> _Env:
        """Apply the decision and create the environment.

        :return: the environment
        :raises DeviceConflictError: If a library in this process has already read other values, or if this worker has
            created an environment under another decision.
        """
        applied = _apply.applied_decision
        if applied is None or _have_same_variables(applied, self.decision):
            self.decision.apply()
        elif self._creator_process == process_identity():
            self._warn_once(applied)
        elif self.decision.variables:
            raise DeviceConflictError(
                f"this worker has applied one decision ({applied.reason}), but an environment came with another "
                f"({self.decision.reason}): a process has one rendering device. Use one worker for each device"
            )
        build: Callable[[], _Env] = pickle.loads(self._pickled_env_fn)
        return build()

    def _warn_once(self, applied: Decision) -> None:
        """Warn, once per process, that the environment is built under another decision."""
        global _has_warned
        if not _has_warned and self.decision.variables:
            _has_warned = True
            _log.warning(
                "a worker's environment is built in the parent process, under the decision that was applied here (%s) "
                "instead of the worker's (%s). This is harmless if only its spaces are used",
                applied.reason,
                self.decision.reason,
            )

    def __repr__(self) -> str:
        return f"BoundFactory({self.decision.device}, render={self.decision.render})"


def _have_same_variables(one: Decision, other: Decision) -> bool:
    """Return whether two decisions set the same variables to the same values."""
    return dict(one.variables) == dict(other.variables)
