"""Pool with spare environments, which are reset while the others are stepped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.processes.failures import require_same_process
from rl_ext_core.recording.calls import RECORDED_CALLS
from rl_ext_core.recording.memory_layout import ENDED
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, WorkerHandle
from rl_ext_core.vector.environments import PoolOptions, check_env_fns
from rl_ext_core.vector.pool import Pool, ResetRequests
from rl_ext_core.vector.worker import StepEntry

__all__ = ["SparePool"]


class SparePool(Pool):
    """Pool in which a spare environment replaces one whose episode has ended; see :class:`Pool`.

    Each environment has its own worker. *Rows* are the environments that the caller sees, and each row is continued by
    one environment until the end of its episode. Then that environment is reset, and waits behind the other spares. The
    first spare continues the row, even if another one is ready earlier, so that results do not depend on times.

    :param env_fns: functions that build the environments of the rows. Spares are built by the first ones
    :param options: options of the pool

    Source: https://github.com/hill-a/stable-baselines/issues/866
    """

    _command = ""  # the awaited one; empty while the workers start

    def __init__(self, env_fns: Sequence[Callable[[], Any]], options: PoolOptions) -> None:
        check_env_fns(env_fns)
        count = len(env_fns)
        fns = [*env_fns, *(env_fns[index % count] for index in range(options.spares))]
        super().__init__(fns, options, autoreset=Autoreset.DISABLED)
        self._rows = list(range(count))  # environment of each row
        self._spares = deque(range(count, len(fns)))  # environments in the order in which they continue rows
        self._reset_infos: list[dict[str, Any]] = [{} for _ in fns]
        self._stepped = list(self._rows)  # environments of the last step
        self._entries: list[StepEntry | None] = []
        # Rows that have no environment, because their episodes ended; None before the answers of a step are read.
        self._open_rows: list[int] | None = None
        # The caller gets these arrays, with a row for each environment that is not a spare.
        self._shared = self.arrays
        self.arrays = {name: array[:count].copy() for name, array in self._shared.items()}
        self._shared_observations = self._observations
        self._observations = [self.arrays[f"observation {index}"] for index in range(len(self._observations))]
        self._actions = self.arrays.get("action")
        self._flags, self._kinds = self.arrays["flags"].data, self.arrays["reward kind"].data
        self._zeros = bytes(count)

    @property
    def num_envs(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def step_seconds(self) -> list[float]:
        """Return how long each environment took for the last step."""
        return [self.workers[number].cells[Cell.STEP_TIME] / 1e9 for number in self._stepped]

    # -- commands

    def begin_step(self, actions: Any, each: Callable[[Any], Sequence[Any]] = list) -> None:
        """Begin a step of the environments of all rows; see :meth:`Pool.begin_step`."""
        self.drain_answers()
        self.step_start = time.perf_counter()
        actions_by_row = self._split_actions(actions, each)
        self._begin("step")
        self._stepped = list(self._rows)
        if actions_by_row is None:
            self._shared["action"][self._rows] = actions
        for row, number in enumerate(self._rows):
            self.send(self.workers[number], "step", None if actions_by_row is None else [actions_by_row[row]])

    def begin_reset(self, requests: ResetRequests) -> None:
        """Begin to reset all environments. Each row gets its own one back, and spares get the seeds after the last."""
        if None in requests:
            raise InvalidArgumentError(
                "options={'reset_mask': ...} is not supported with spares; expected a reset of all environments. Leave "
                "reset_mask out"
            )
        self.drain_answers()
        self._receive_spares()
        seeds = [seed for seed, _ in requests if seed is not None]  # type: ignore[misc]
        count = len(self._rows)
        self._rows, self._spares = list(range(count)), deque(range(count, len(self.workers)))
        self._stepped = list(self._rows)
        self._begin("reset")
        for number, request in enumerate(requests):
            self.send_reset(self.workers[number], [request])
        for index, number in enumerate(self._spares):
            self.send_reset(self.workers[number], [(max(seeds) + 1 + index if seeds else None, None)])

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Begin a call for some rows. Calls that change environments are made for all, spares included."""
        reason = "with spares, a row is continued by another environment after each episode"
        if name in RECORDED_CALLS and len(environments) < len(self._rows):
            raise InvalidArgumentError(
                f"indices={list(environments)}: {reason}; expected a call for all of them. Leave indices out"
            )
        if name in RECORDED_CALLS and any(argument is not arguments[0] for argument in arguments):
            raise InvalidArgumentError(
                f"{arguments[0][0]} with a value for each row: {reason}; expected one value. Write "
                f"set_attr({arguments[0][0]!r}, value), where value is not a list"
            )
        if name in ("env_method", "call") and arguments[0][0] in ("reset", "step"):
            raise InvalidArgumentError(
                f"env_method({arguments[0][0]!r}) with spares: a spare that is reset or stepped in this way would "
                f"continue a row with the observation from before; expected another method. Write "
                f"env.{arguments[0][0]}(...)"
            )
        self.drain_answers()
        self._receive_spares()
        self._begin("call")
        self._n_results = len(environments)
        rows, spares = [self._rows[row] for row in environments], self._spares if name in RECORDED_CALLS else ()
        super().begin_call([*rows, *spares], name, [*arguments, *(arguments[0] for _ in spares)])

    def results(self) -> list[Any]:
        """Return the results of a call, by row."""
        return super().results()[: self._n_results]

    def is_ready(self, timeout: float) -> bool:
        """Raise, because resets of spares may still go on when a step is ready."""
        raise InvalidArgumentError(
            f"timeout={timeout!r} is not supported with spares; expected none. Leave it out, or write step_timeout="
            f"{timeout!r} where the environments are created"
        )

    def _begin(self, command: str) -> None:
        """Record which command is awaited."""
        self._command, self._open_rows = command, None

    # -- answers

    def wait(self, *, starting: bool = False, raise_failures: bool = False) -> None:
        """Wait for the answers of all rows, and for as many spares as episodes have ended."""
        if not self._command:
            super().wait(starting=starting, raise_failures=raise_failures)
            return
        require_same_process(self._owner)
        if self._command == "call":
            self._receive(self._options.step_timeout)
        else:
            self._receive(self._options.step_timeout, [self.workers[number] for number in self._stepped])
            if self._open_rows is None:
                self._read_rows()
            while self._open_rows:
                self._receive_reset(self._spares[0])
                self._continue_row()
            for rows, shared in zip(self._observations, self._shared_observations, strict=True):
                rows[...] = shared[self._rows]
        self._has_unread_answers = False

    @defer_signals
    def _read_rows(self) -> None:
        """Read the results of all rows, and begin to reset environments whose episodes have ended.

        All of them are reset at the same time, so that a row waits for one reset at most.
        """
        answers = [self.workers[number].answer for number in self._rows]
        self._entries = [answer[0] if answer else None for answer in answers]
        for name in ("reward", "reward kind", "flags"):
            self.arrays[name][...] = self._shared[name][self._rows]
        ended = [row for row, flags in enumerate(self._flags) if self._command == "step" and flags & ENDED]
        for row in ended:
            number = self._rows[row]
            info, _, reward, _ = self._entries[row] or ({}, None, None, None)
            final = self.layout.build_observation([array[number].copy() for array in self._shared_observations])
            self._entries[row] = info, None, reward, final
            self.send(self.workers[number], "reset", [(None, None)])
            self._spares.append(number)
        self._open_rows = ended

    @defer_signals
    def _continue_row(self) -> None:
        """Continue the first row that has no environment by the first spare."""
        assert self._open_rows
        row, number = self._open_rows.pop(0), self._spares.popleft()
        self._rows[row] = number
        info, _, reward, final = self._entries[row] or ({}, None, None, None)
        self._entries[row] = info, self._reset_infos[number], reward, final

    def _receive_spares(self) -> None:
        """Wait until the spares are reset."""
        for number in self._spares:
            self._receive_reset(number)

    def _receive_reset(self, number: int) -> None:
        """Wait until a spare is reset."""
        worker = self.workers[number]
        if worker.awaits_answer():
            self._receive(self._options.step_timeout, [worker])
            self._reset_infos[number] = worker.answer[0][1] if worker.answer else {}

    def _handle_failure(self, group: Sequence[WorkerHandle]) -> None:
        """Raise the failure of any worker, while the answers of some are awaited."""
        super()._handle_failure(self.workers)

    def is_plain_step(self) -> bool:
        """Return whether the last step had no infos, ended no episode, and had float rewards."""
        return self._flags == self._kinds == self._zeros and not any(self._entries)

    def entries(self, *, to_reset: bool = False) -> list[tuple[int, StepEntry]]:
        """Return infos and last observations of the last step or reset, by row."""
        return [(row, entry) for row, entry in enumerate(self._entries) if entry is not None]
