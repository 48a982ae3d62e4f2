"""What runs in a Ray actor: a worker's environments, whose answers carry the arrays that others share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl_ext_core.vector import _messages
from rl_ext_core.vector._layout import Layout, Memory, Progress
from rl_ext_core.vector._worker import Worker

__all__ = ["Actor", "ActorFailure"]


class ActorFailure(Exception):  # noqa: N818 - on its way to the driver, which raises a WorkerError
    """An environment has failed.

    :param number: of the environment, among this actor's
    :param phase: number of what it was at
    :param message: the exception, as :func:`~rl_ext_core.vector._messages.packed_error` gives it
    """

    def __init__(self, number: int, phase: int, message: bytes) -> None:
        super().__init__(number, phase, message)


class Actor:
    """Holds environments; Ray calls one method at a time.

    Each answer is a kind, a pickle and what of the arrays goes with it, (environments, ...) each.
    """

    def __init__(self) -> None:
        self._said: list[tuple[int, bytes]] = []
        self._size = Progress.size(1)
        self._memory = Memory(self._size)
        self._progress = Progress(self._memory.map(self._size), 1)
        self._arrays: dict[str, Any] = {}
        self._worker: Worker | None = None

    def _keep(self, kind: int, data: bytes = b"") -> None:
        self._said.append((kind, data))

    def build(self, env_fns: Sequence[Callable[[], Any]]) -> tuple[int, bytes, dict[str, Any]]:
        """Build the environments."""

        def build() -> None:
            self._worker = Worker(self._keep, self._memory, self._progress, 0, 0, env_fns)

        return self._answer(build, {})

    def map(self, layout: Layout) -> tuple[int, bytes, dict[str, Any]]:
        """Lay out the arrays."""
        self._memory.grow(layout.size)
        self._arrays = layout.arrays(self._memory.map(layout.size))
        return self.do("map", layout)

    def told(self, packed: bytes) -> tuple[int, bytes, dict[str, Any]]:
        """Do what a command says that was pickled."""
        return self.do(*_messages.unpacked(packed))

    def do(self, name: str, data: Any) -> tuple[int, bytes, dict[str, Any]]:
        """Do what a command says."""
        worker = self._worker
        assert worker is not None
        if name == "step" and not isinstance(data, list):
            data = data.copy()  # it lies in Ray's own memory, where environments cannot write
        sent = {key: array for key, array in self._arrays.items() if key != "action"}
        return self._answer(lambda: worker.do(name, data), sent if name in ("step", "reset") else {})

    def _answer(self, act: Callable[[], None], arrays: dict[str, Any]) -> tuple[int, bytes, dict[str, Any]]:
        try:
            act()
        except BaseException as error:  # Ray takes SystemExit for a wish to end the actor
            raise ActorFailure(*self._progress.read(0), _messages.packed_error(error)) from None
        return (*self._said.pop(), arrays)
