"""Starts the processes of workers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_ext_core import processes
from rl_ext_core.devices import READ_AT_IMPORT
from rl_ext_core.vector._layout import Memory, Progress
from rl_ext_core.vector._worker import main

if TYPE_CHECKING:
    from rl_ext_core.factory import EnvFactory
    from rl_ext_core.vector._seat import Seat

__all__ = ["Launcher"]

# What a worker needs whatever its environment is.
_PRELOAD = (
    "numpy",
    "gymnasium.wrappers",
    "rl_ext_core.factory",
    "rl_ext_core.vector._worker",
    "rl_ext_core.vector.monitor",
)


class Launcher:
    """Puts processes into seats.

    :param factories: build the environments
    :param seats: all of them
    :param memory: that the workers share
    :param progress: of the workers, in it
    :param start_method: of the processes
    :param cure: see :class:`~rl_ext_core.vector.pool.Pool`
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory[Any]],
        seats: Sequence[Seat],
        memory: Memory,
        progress: Progress,
        start_method: str | None,
        cure: str | None,
    ) -> None:
        self._factories, self._seats, self._memory, self._start_method = factories, seats, memory, start_method
        self._progress, self._cure = progress, cure
        self._scratch = None if cure is None else tempfile.TemporaryDirectory(prefix="rl-ext-")

    def launch(self, seats: Sequence[Seat]) -> None:
        """Start a process in each of these seats; if that fails, there is none."""
        preload = dict.fromkeys([*_PRELOAD, *(name for factory in self._factories for name in factory.preload)])
        decisions = [self._factories[seat.first].decision for seat in seats]
        environs: list[Mapping[str, str | None]] = [
            {} if decision is None else decision.variables for decision in decisions
        ]
        context = processes.get_context(
            self._start_method, preload=tuple(preload), environs=environs, import_time=READ_AT_IMPORT
        )
        started: list[Any] = []
        try:
            for seat in seats:
                started.append(self._launch(context, seat))
        except BaseException:
            for process in started:
                process.kill()
                process.join()
            for seat in seats:
                seat.give_up()
            raise

    def _launch(self, context: Any, seat: Seat) -> Any:
        seat.give_up()
        cells = self._progress.of(seat.number)
        for place in range(len(cells)):
            cells[place] = 0
        cells[Progress.TOLD] = 1  # to build its environments
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            command_reader, commands = context.Pipe(duplex=False)
            theirs.enter_context(command_reader)
            ours.enter_context(commands)
            replies, reply_writer = context.Pipe(duplex=False)
            ours.enter_context(reply_writer)
            ours.enter_context(replies)
            mail = Memory(0)
            forked = context.get_start_method() == "fork"
            foreign = [end for other in self._seats for end in other.ends] + [commands, replies] if forked else []
            factories = [factory.again(seat.attempt) for factory in self._factories[seat.first : seat.last]]
            args = (command_reader, reply_writer, self._memory, mail, seat.number, len(self._seats), seat.first)
            process = context.Process(target=main, args=(*args, factories, foreign, self._own_cure(seat)))
            process.start()
            seat.take(process, commands, replies, reply_writer, mail, cells)
            ours.pop_all()
        return process

    def _own_cure(self, seat: Seat) -> tuple[str, Path] | None:
        if self._cure is None or self._scratch is None:
            return None
        folder = Path(self._scratch.name, f"{seat.number}-{seat.attempt}")
        folder.mkdir()
        return self._cure, folder

    def close(self) -> None:
        """Remove what workers had of their own; they have ended."""
        if self._scratch is not None:
            self._scratch.cleanup()
