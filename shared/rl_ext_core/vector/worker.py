"""A worker: environments on one side, the channel to the parent on the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rl_ext_core import processes
from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, MemoryLayout, SharedMemory, ObservationSlot, WorkerChannel, pack
from rl_ext_core.vector.environments import CALLS, check_environment, copy_output

__all__ = [
    "CONVERTED",
    "ENDED",
    "IDLE_FRAMES",
    "REWARD_KINDS",
    "OTHER_REWARD",
    "PHASES",
    "TERMINATED",
    "TRUNCATED",
    "WorkerEnvironments",
    "run_worker",
]

PHASES = ("start", "idle", "constructor", "reset", "step", "close", *CALLS)
_IDLE, _CONSTRUCTOR, _RESET, _STEP, _CLOSE = (
    PHASES.index(phase) for phase in ("idle", "constructor", "reset", "step", "close")
)
# Where it waits for commands, by which a worker that hangs is told from one that does not.
IDLE_FRAMES = ("/rl_ext_core/vector/channel.py",)
# What rewards are that 64-bit floats hold exactly; Stable Baselines3's SubprocVecEnv hands over what it got.
REWARD_KINDS: dict[type, int] = {float: 0, np.float64: 0, np.float32: 1, int: 2, np.int64: 2, bool: 3, np.bool_: 3}
OTHER_REWARD = 4
_EXACT = 2**53
# Information of a step, of the reset after it, a reward that is no plain number, the observation before the reset.
StepEntry = tuple[dict[str, Any], dict[str, Any] | None, Any, Any]
# What flags say of the episode, and that the observation's dtype could not hold its values.
TERMINATED, TRUNCATED, CONVERTED = 1, 2, 4
ENDED = TERMINATED | TRUNCATED


def run_worker(
    end: tuple[Any, ...],
    memory: SharedMemory,
    first: int,
    env_fns: Sequence[Callable[[], Any]],
    directory: tuple[str, str | None] | None,
    autoreset: Autoreset,
) -> None:
    """Build environments and do what is asked of them until the parent closes its end.

    :param end: arguments of a :class:`~rl_ext_core.vector.channel.WorkerChannel`
    :param memory: of the arrays
    :param first: number of the first environment
    :param directory: the working directory to make, and the folder that it is a copy of, if any
    """
    if directory is not None:
        folder, original = directory
        if original is not None and not os.path.exists(folder):
            import shutil

            shutil.copytree(original, folder, symlinks=True)
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        os.environ["PWD"] = folder
    channel = WorkerChannel(*end)
    mine = WorkerEnvironments(channel.reply, memory.map, channel.cells, first, env_fns, autoreset)
    for name, data in channel.commands():
        mine.execute(name, data)
        if name == "close":
            return
    mine.close_open_environments()


def _require_dict(info: Any, method: str) -> None:
    if not isinstance(info, dict):
        raise EnvironmentOutputError(
            f"{method}() returned an info of type {type(info).__name__}, expected a dict; write {{}} for none"
        )


class WorkerEnvironments:
    """Those of one worker, and what is done with them."""

    def __init__(
        self,
        reply: Callable[[bytes], None],
        block: Callable[[int], Any],
        cells: memoryview,
        first: int,
        env_fns: Sequence[Callable[[], Any]],
        autoreset: Autoreset = Autoreset.SAME_STEP,
    ) -> None:
        self._autoreset = autoreset
        self._reset_due: set[int] = set()  # their next step is a reset
        self._reply, self._block, self._cells, self._first = reply, block, cells, first
        self._envs: list[Any] = []
        processes.on_abnormal_exit(self.close_open_environments)
        for number, env_fn in enumerate(env_fns):
            self._set_phase(number, _CONSTRUCTOR)
            self._envs.append(check_environment(env_fn()))
        self._answer(pack([(env.observation_space, env.action_space) for env in self._envs]))

    def _set_phase(self, number: int, phase: int) -> None:
        self._cells[Cell.ENVIRONMENT], self._cells[Cell.PHASE] = number, phase

    def _answer(self, message: bytes) -> None:
        # Before the parent knows, so that it finds this if the worker ends while it waits.
        self._cells[Cell.PHASE] = _IDLE
        self._reply(message)

    def execute(self, name: str, data: Any) -> None:
        """Do what a command says."""
        if name == "step":
            # The environment may keep what it gets, and the next actions are written to the same place.
            self._step(self._own_actions.copy() if data is None else data)
        elif name == "close":
            self._close()
        elif name == "map":
            self._map_memory(data)
        elif name == "reset":
            infos = [{} if how is None else self._reset(number, *how) for number, how in enumerate(data)]
            self._answer_infos([({}, info, None, None) for info in infos])
        elif name == "reset at next step":
            self._reset_due.update(range(len(self._envs)))
            self._answer(b"")
        else:
            self._answer(pack([self._call_environment(number, name, argument) for number, argument in data]))

    def _call_environment(self, number: int, name: str, argument: Any) -> bytes:
        """Return the message of what an environment answers to a call."""
        self._set_phase(number, PHASES.index(name))
        try:
            return pack(CALLS[name](self._envs[number], argument))
        except Exception as error:
            # The environment is as it was; the caller may try something else.
            return pack(ExceptionRecord.from_exception(error))

    def close_open_environments(self) -> None:
        """Close the environments as well as that goes: this process ends, and nobody listens."""
        while self._envs:
            with contextlib.suppress(Exception):
                self._envs.pop().close()

    def _close(self) -> None:
        failed: Exception | None = None
        for number, env in enumerate(self._envs):
            if failed is None:
                self._set_phase(number, _CLOSE)
            try:
                env.close()
            except Exception as error:
                failed = failed or error
        self._envs.clear()
        # Said rather than raised, so that the others are closed in peace.
        self._answer(
            b"" if failed is None else pack((self._cells[Cell.ENVIRONMENT], ExceptionRecord.from_exception(failed)))
        )

    def _map_memory(self, layout: MemoryLayout) -> None:
        arrays: dict[str, Any] = layout.arrays(self._block(layout.size))
        self.arrays = arrays
        part = slice(self._first, self._first + len(self._envs))
        self._slots: list[list[ObservationSlot]] = [
            layout.slots(arrays, index) for index in range(part.start, part.stop)
        ]
        # Items of memoryviews are written in a third of the time that items of arrays take.
        self._rewards = memoryview(arrays["reward"][part])
        self._kinds = memoryview(arrays["reward kind"][part])
        self._flags = memoryview(arrays["flags"][part])
        self._own_actions: Any = arrays["action"][part] if "action" in arrays else None
        self._answer(b"")

    def _reset(self, number: int, seed: int | None, options: dict[str, Any] | None) -> Any:
        self._set_phase(number, _RESET)
        self._reset_due.discard(number)
        maybe = {} if options is None else {"options": options}
        observation, info = self._envs[number].reset(seed=seed, **maybe)
        for row in self._slots[number]:
            row.write(observation)
            if row.has_converted:
                self._flags[number] |= CONVERTED
        _require_dict(info, "reset")
        return info

    def _step(self, actions: Iterable[Any]) -> None:
        cells, phase_at, environment_at = self._cells, Cell.PHASE, Cell.ENVIRONMENT
        rewards, kinds, flags, all_slots = self._rewards, self._kinds, self._flags, self._slots
        array, due, same_step = np.ndarray, self._reset_due, self._autoreset is Autoreset.SAME_STEP
        entries: list[Any] | None = None
        reward: Any
        for number, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
            cells[environment_at] = number
            reset_info = final = None
            if due and number in due:
                due.discard(number)
                cells[phase_at] = _RESET
                observation, info = env.reset()
                _require_dict(info, "reset")
                reward = 0.0
                flags[number] = 0
            else:
                cells[phase_at] = _STEP
                observation, reward, terminated, truncated, info = env.step(action)
                if type(info) is not dict:
                    _require_dict(info, "step")
                if terminated or truncated:
                    flags[number] = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
                    if same_step:
                        # The reset may write into what the step returned.
                        final, info = copy_output(observation), copy_output(info)
                        reward = reward if type(reward) in REWARD_KINDS else copy_output(reward)
                        cells[phase_at] = _RESET
                        observation, reset_info = env.reset()
                        _require_dict(reset_info, "reset")
                    elif self._autoreset is Autoreset.NEXT_STEP:
                        due.add(number)
                else:
                    flags[number] = 0
            kind = REWARD_KINDS.get(type(reward), OTHER_REWARD)
            if kind == 2 and not -_EXACT <= reward <= _EXACT:
                kind = OTHER_REWARD
            kinds[number] = kind
            if kind != OTHER_REWARD:
                rewards[number] = reward
            for row in all_slots[number]:
                part = observation
                for key in row.path:
                    part = part[key]
                # What row.write does first, without the call.
                if type(part) is array and part.dtype is row.dtype and part.shape == row.shape:
                    row.place[...] = part
                else:
                    row.write(observation)
                    if row.has_converted:
                        flags[number] |= CONVERTED
            if info or reset_info is not None or kind == OTHER_REWARD:
                entries = entries or [None] * len(self._envs)
                entries[number] = (info, reset_info, reward if kind == OTHER_REWARD else None, final)
        if entries is None:
            cells[phase_at] = _IDLE
            self._reply(b"")
        else:
            self._answer_infos(entries)

    def _answer_infos(self, entries: Sequence[StepEntry | None]) -> None:
        """Answer with an entry for each environment."""
        try:
            message = pack(entries)
        except Exception as error:
            self._raise_unpicklable(entries, error)
            raise
        self._answer(message)

    def _raise_unpicklable(self, entries: Sequence[StepEntry | None], error: Exception) -> None:
        """Raise what says which entry of an information cannot be sent."""
        for number, entry in enumerate(entries):
            for where, info in zip(("info", "the info of reset"), entry or (), strict=False):
                for key, value in dict(info or {}).items():
                    try:
                        pack(value)
                    except Exception:
                        self._set_phase(number, _STEP if where == "info" else _RESET)
                        raise EnvironmentOutputError(
                            f"{where}[{key!r}] cannot be pickled, and so cannot leave its process: {error}. Leave it "
                            f"out: info.pop({key!r})"
                        ) from error
