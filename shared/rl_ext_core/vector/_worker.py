"""The loop of a worker: environments on one side, shared memory and two pipes on the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core import processes
from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector import _messages, environments
from rl_ext_core.vector._calls import call
from rl_ext_core.vector._layout import Layout, Memory, Progress
from rl_ext_core.vector._rows import Row, kept, rows_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["CHANGED", "DONE", "IDLE_IN", "KINDS", "OTHER", "PHASES", "TRUNCATED", "Worker", "main"]

PHASES = (
    "start",
    "idle",
    "constructor",
    "reset",
    "step",
    "close",
    "render",
    "env_method",
    "get_attr",
    "has_attr",
    "set_attr",
    "env_is_wrapped",
)
_IDLE, _CONSTRUCTOR, _RESET, _STEP, _CLOSE = (
    PHASES.index(phase) for phase in ("idle", "constructor", "reset", "step", "close")
)
# The function that waits for commands, by which a worker that hangs is told from one that does not.
IDLE_IN = "in _serve_commands"
# What rewards are that 64-bit floats hold exactly; Stable Baselines3's SubprocVecEnv hands over what it got.
KINDS: dict[type, int] = {float: 0, np.float64: 0, np.float32: 1, int: 2, np.int64: 2, bool: 3, np.bool_: 3}
OTHER = 4
_EXACT = 2**53
# What flags say: the episode has ended; by a limit; the observation's dtype could not hold its values.
DONE, TRUNCATED, CHANGED = 1, 2, 4


def main(
    commands: Connection,
    replies: Connection,
    memory: Memory,
    mail: Memory,
    worker: int,
    num_workers: int,
    first: int,
    env_fns: Sequence[Callable[[], Any]],
    foreign: Sequence[Connection],
    cure: tuple[str, Path] | None,
) -> None:
    """Build environments and do what is asked of them until the parent closes its end.

    :param commands: the parent rings here
    :param replies: where the parent waits for a ring
    :param memory: that all workers share
    :param mail: that this one shares with the parent, for what is no array
    :param worker: number of this worker
    :param num_workers: how many there are
    :param first: number of the first environment among all
    :param env_fns: build this worker's
    :param foreign: ends that belong to the parent, which a forked worker inherits
    :param cure: what keeps this process from disturbing others, and a folder of its own for it
    """
    if cure is not None:
        from rl_ext_core.isolation.cures import apply_cure

        apply_cure(*cure)
    for connection in foreign:
        connection.close()
    progress = Progress(memory.map(Progress.size(num_workers)), num_workers)
    cells, mailbox, doorbell = progress.of(worker), _messages.Mailbox(mail.descriptor), replies.fileno()
    os.set_blocking(doorbell, False)

    def reply(kind: int, data: bytes = b"") -> None:
        if data:
            mailbox.write(data)
        cells[Progress.ANSWER_KIND] = kind
        cells[Progress.ANSWER_SIZE] = len(data)
        cells[Progress.ANSWERED] = cells[Progress.TOLD]
        try:  # noqa: SIM105 a context manager takes as long as the rest of this
            os.write(doorbell, b"\0")
        except (BrokenPipeError, BlockingIOError):
            pass  # as in _messages.ring, which is a call more

    mine = Worker(reply, memory, progress, worker, first, env_fns)
    _serve_commands(mine, commands.fileno(), cells, mailbox)
    mine.close_what_is_open()


def _serve_commands(worker: Worker, doorbell: int, cells: memoryview, mailbox: _messages.Mailbox) -> None:
    told, size, answered = Progress.TOLD, Progress.TOLD_SIZE, Progress.ANSWERED
    while os.read(doorbell, 64):
        if cells[told] == cells[answered]:
            continue  # it was rung twice
        if not cells[size]:
            worker.step_as_shared()
            continue
        name, data = _messages.unpacked(mailbox.read(cells[size]))
        cells[size] = 0  # the next may be a step, which has none
        worker.do(name, data)
        if name == "close":
            return


class Worker:
    """Environments, and what is done with them.

    :param reply: given each answer, a kind and a pickle
    :param memory: for what is not in the answers
    :param progress: for what it is at
    :param worker: its number there
    :param first: number of its first environment in the memory
    :param env_fns: build its environments
    """

    def __init__(
        self,
        reply: Callable[..., None],
        memory: Memory,
        progress: Progress,
        worker: int,
        first: int,
        env_fns: Sequence[Callable[[], Any]],
    ) -> None:
        self._reply, self._memory, self._first = reply, memory, first
        self._progress, self._worker = progress, worker
        self._cells = progress.of(worker)
        self._envs: list[Any] = []
        processes.at_end(self.close_what_is_open)
        for number, env_fn in enumerate(env_fns):
            progress.write(worker, number, _CONSTRUCTOR)
            self._envs.append(environments.checked(env_fn()))
        self._say([(env.observation_space, env.action_space) for env in self._envs])

    def _say(self, value: Any) -> None:
        self._answer(_messages.VALUE, _messages.packed(value))

    def _answer(self, kind: int, data: bytes) -> None:
        # Before the parent knows, so that it finds this if the worker ends while it waits.
        self._cells[Progress.PHASE] = _IDLE
        self._reply(kind, data)

    def do(self, name: str, data: Any) -> None:
        """Do what a command says."""
        if name == "step":
            self._step(data)
        elif name == "close":
            self._close()
        elif name == "map":
            self._map(data)
        elif name == "reset":
            infos = [self._reset(number, *how) for number, how in enumerate(data)]
            self._say_infos(infos, [(None, info) for info in infos])
        else:
            number, argument = data
            self._progress.write(self._worker, number, PHASES.index(name))
            try:
                answer = _messages.VALUE, _messages.packed(call(self._envs[number], name, argument))
            except Exception as error:
                # The environment is as it was; the caller may try something else.
                answer = _messages.RAISED, _messages.packed_error(error)
            self._answer(*answer)

    def close_what_is_open(self) -> None:
        """Close the environments as well as that goes: this process ends, and nobody listens."""
        while self._envs:
            with contextlib.suppress(Exception):
                self._envs.pop().close()

    def _close(self) -> None:
        failed: Exception | None = None
        for number, env in enumerate(self._envs):
            if failed is None:
                self._cells[Progress.ENVIRONMENT], self._cells[Progress.PHASE] = number, _CLOSE
            try:
                env.close()
            except Exception as error:
                failed = failed or error
        self._envs.clear()
        at = self._cells[Progress.ENVIRONMENT]
        # Said rather than raised, so that the others are closed in peace.
        self._say(None if failed is None else (at, _messages.packed_error(failed)))

    def _map(self, layout: Layout) -> None:
        arrays: dict[str, Any] = layout.arrays(self._memory.map(layout.size))
        self._memory.close()
        mine = range(self._first, self._first + len(self._envs))
        fields = [arrays[f"observation {index}"] for index in range(len(layout.keys))]
        self._rows: list[list[Row]] = [rows_of(index, layout.kind, layout.keys, fields) for index in mine]
        part = slice(mine.start, mine.stop)
        # Items of memoryviews are written in a third of the time that items of arrays take.
        self._rewards = memoryview(arrays["reward"][part])
        self._kinds = memoryview(arrays["reward kind"][part])
        self._flags = memoryview(arrays["flags"][part])
        self._own_actions: Any = arrays["action"][part] if "action" in arrays else None
        self._say(None)

    def _reset(self, number: int, seed: int | None, options: dict[str, Any]) -> dict[str, Any]:
        self._progress.write(self._worker, number, _RESET)
        maybe = {"options": options} if options else {}
        observation, info = self._envs[number].reset(seed=seed, **maybe)
        self._write(number, observation)
        found: dict[str, Any] = info
        return found

    def _write(self, number: int, observation: Any) -> None:
        for row in self._rows[number]:
            row.write(observation if row.key is None else observation[row.key])
            if row.changed:
                self._flags[number] |= CHANGED

    def step_as_shared(self) -> None:
        """Step with the actions in the memory."""
        # The environment may keep what it gets, and the next actions are written to the same place.
        self._step(self._own_actions.copy())

    def _step(self, actions: Iterable[Any]) -> None:
        cells, phase_at, environment_at = self._cells, Progress.PHASE, Progress.ENVIRONMENT
        rewards, kinds, flags, all_rows = self._rewards, self._kinds, self._flags, self._rows
        array = np.ndarray
        said: list[Any] | None = None
        for number, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
            cells[environment_at] = number
            cells[phase_at] = _STEP
            observation, reward, terminated, truncated, info = env.step(action)
            reset_info = None
            if terminated or truncated:
                flags[number] = DONE if terminated else DONE | TRUNCATED
                info["terminal_observation"] = kept(observation)
                cells[phase_at] = _RESET
                observation, reset_info = env.reset()
            else:
                flags[number] = 0
            kind = KINDS.get(type(reward), OTHER)
            if kind == 2 and not -_EXACT <= reward <= _EXACT:
                kind = OTHER
            kinds[number] = kind
            if kind != OTHER:
                rewards[number] = reward
            for row in all_rows[number]:
                part = observation if row.key is None else observation[row.key]
                # What row.write does first, without the call.
                if type(part) is array and part.dtype is row.dtype and part.shape == row.shape:
                    row.place[...] = part
                else:
                    row.write(part)
                    if row.changed:
                        flags[number] |= CHANGED
            if info or reset_info is not None or kind == OTHER:
                said = said or [None] * len(self._envs)
                said[number] = (info, reset_info, reward if kind == OTHER else None)
        if said is None:
            cells[phase_at] = _IDLE
            self._reply(_messages.NOTHING)
        else:
            self._say_infos(said, said)

    def _say_infos(self, said: Sequence[Any], infos: Sequence[Any]) -> None:
        try:
            data = _messages.packed(said)
        except Exception as error:
            self._blame(infos, error)
            raise
        self._answer(_messages.VALUE, data)

    def _blame(self, infos: Sequence[Any], error: Exception) -> None:
        """Raise what says which entry of an information cannot be sent."""
        for number, entry in enumerate(infos):
            for where, info in zip(("info", "the info of reset"), entry or (), strict=False):
                for key, value in dict(info or {}).items():
                    try:
                        _messages.packed(value)
                    except Exception:
                        self._progress.write(self._worker, number, _STEP if where == "info" else _RESET)
                        raise EnvironmentOutputError(
                            f"{where}[{key!r}] cannot be pickled, and so cannot leave its process: {error}. Leave it "
                            f"out: info.pop({key!r})"
                        ) from error
