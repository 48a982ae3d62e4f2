"""Worker process of a pool: builds environments and executes the parent's commands."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rl_ext_core import processes
from rl_ext_core._environment_source import as_gymnasium_env
from rl_ext_core._values import copy_output
from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.recording.episode_log import LOG_BYTES, Repetition
from rl_ext_core.recording.recorder import RECORDED_CALLS, EpisodeRecorder
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, SharedMemory, WorkerChannel, pack
from rl_ext_core.vector.environments import CALLS
from rl_ext_core.vector.memory_layout import (
    CONVERTED,
    MAX_EXACT,
    OTHER_REWARD,
    REWARD_KINDS,
    TERMINATED,
    TRUNCATED,
    MemoryLayout,
)
from rl_ext_core.vector.stepper import RESET_RESULT, STEP_RESULT, check_result_length

REPEAT_EPISODE = "repeat_episode"
PHASES = ("start", "idle", "constructor", "reset", "step", "close", *CALLS, REPEAT_EPISODE)
_IDLE, _CONSTRUCTOR, _RESET, _STEP, _CLOSE = (
    PHASES.index(phase) for phase in ("idle", "constructor", "reset", "step", "close")
)
# A worker waits for commands in this file. The watch reports other workers as hanging.
IDLE_FRAMES = ("/rl_ext_core/vector/channel.py",)
# Info of the step, info of the reset after it, reward if it is of another type, and last observation of the episode.
StepEntry = tuple[dict[str, Any], dict[str, Any] | None, Any, Any]


def run_worker(
    end: tuple[Any, ...],
    memory: SharedMemory,
    first: int,
    env_fns: Sequence[Callable[[], Any]],
    directory: tuple[str, str | None] | None,
    autoreset: Autoreset,
    logs: SharedMemory | None,
    initializer: Callable[[], object] | None,
) -> None:
    """Build environments, and execute commands until the parent closes its end.

    :param end: arguments of :class:`~rl_ext_core.vector.channel.WorkerChannel`
    :param directory: working directory to create, and the folder to copy to it or None. None keeps the present one

    The other parameters are those of :class:`WorkerEnvironments` and of ``PoolOptions``.
    """
    if initializer is not None:
        initializer()
    if directory is not None:
        folder, original = directory
        if original is not None and not os.path.exists(folder):
            import shutil

            shutil.copytree(original, folder, symlinks=True)
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        os.environ["PWD"] = folder
    channel = WorkerChannel(*end)
    log = None if logs is None else functools.partial(map_log, logs)
    environments = WorkerEnvironments(channel.reply, memory.map, channel.cells, first, env_fns, autoreset, log)
    for name, data in channel.commands():
        environments.execute(name, data)
        if name == "close":
            return
    environments.close_open_environments()


def map_log(memory: SharedMemory, environment: int) -> Any:
    """Map the log of an environment, in the memory of a pool's logs."""
    return memory.map(LOG_BYTES, environment * LOG_BYTES)


def require_dict(info: Any, method: str) -> None:
    """Raise if the info that ``reset`` or ``step`` returned is not a dict."""
    if not isinstance(info, dict):
        raise EnvironmentOutputError(
            f"{method}() returned an info of type {type(info).__name__}, expected a dict; use {{}} for none"
        )


class WorkerEnvironments:
    """Environments of one worker, and the commands that they execute.

    :param reply: function that sends an answer
    :param block: function that returns the memory of the arrays, from its size in bytes
    :param first: number of the first environment
    :param log: function that returns the memory of an episode log, from the number of the environment; default: record
        no episodes
    """

    def __init__(
        self,
        reply: Callable[[bytes], None],
        block: Callable[[int], Any],
        cells: memoryview,
        first: int,
        env_fns: Sequence[Callable[[], Any]],
        autoreset: Autoreset = Autoreset.SAME_STEP,
        log: Callable[[int], Any] | None = None,
    ) -> None:
        self._autoreset = autoreset
        self._reset_due: set[int] = set()  # environments that their next step resets
        self._reply, self._block, self._cells, self._first = reply, block, cells, first
        self._envs: list[Any] = []
        processes.on_abnormal_exit(self.close_open_environments)
        for number, env_fn in enumerate(env_fns):
            self._set_phase(number, _CONSTRUCTOR)
            env = as_gymnasium_env(env_fn())
            if log is not None and getattr(env, "records_episodes", True):
                env = EpisodeRecorder(env, memory=log(first + number))
            self._envs.append(env)
        self._answer(pack([(env.observation_space, env.action_space) for env in self._envs]))

    def _set_phase(self, number: int, phase: int) -> None:
        self._cells[Cell.ENVIRONMENT], self._cells[Cell.PHASE] = number, phase

    def _answer(self, message: bytes) -> None:
        """Send an answer to the parent, after recording that this worker is idle."""
        # The phase is set before the answer, so that it is right if the worker dies while it waits.
        self._cells[Cell.PHASE] = _IDLE
        self._reply(message)

    def execute(self, name: str, data: Any) -> None:
        """Execute a command, and answer it."""
        if name == "step":
            # The environment may keep its action, and the next actions are written to the same memory.
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
        self._set_phase(number, PHASES.index(name))
        env = self._envs[number]
        try:
            if name == REPEAT_EPISODE:
                repetition = env.repeat(argument)
                for slot in self._slots[number]:
                    slot.write(repetition.observation)
                return pack(Repetition(None, repetition.first_difference))
            if isinstance(env, EpisodeRecorder):
                if name in RECORDED_CALLS:
                    return pack(env.make_recorded_call(name, argument))
                env = env.env
            return pack(CALLS[name](env, argument))
        except Exception as error:
            # The environment stays usable, so the caller gets the exception and may continue.
            return pack(ExceptionRecord.from_exception(error))

    def close_open_environments(self) -> None:
        """Close the environments that are still open, ignoring errors, because this process ends."""
        while self._envs:
            with contextlib.suppress(Exception):
                self._envs.pop().close()

    def _close(self) -> None:
        message = b""
        for number, env in enumerate(self._envs):
            self._set_phase(number, _CLOSE)
            try:
                env.close()
            except Exception as error:
                message = message or pack((number, ExceptionRecord.from_exception(error)))
        self._envs.clear()
        # The first error is sent rather than raised, so that other workers can close their environments.
        self._answer(message)

    def _map_memory(self, layout: MemoryLayout) -> None:
        arrays: dict[str, Any] = layout.arrays(self._block(layout.size))
        self.arrays = arrays
        part = slice(self._first, self._first + len(self._envs))
        self._slots = [layout.slots(arrays, index) for index in range(part.start, part.stop)]
        # Writing an item of a memoryview takes a third of the time of an array's.
        self._rewards = memoryview(arrays["reward"][part])
        self._kinds = memoryview(arrays["reward kind"][part])
        self._flags = memoryview(arrays["flags"][part])
        self._own_actions: Any = arrays["action"][part] if "action" in arrays else None
        self._answer(b"")

    def _reset(self, number: int, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Reset one environment, write its observation to shared memory, and return the info."""
        self._set_phase(number, _RESET)
        self._reset_due.discard(number)
        arguments = {} if options is None else {"options": options}
        observation, info = check_result_length(self._envs[number].reset(seed=seed, **arguments), RESET_RESULT)
        for slot in self._slots[number]:
            slot.write(observation)
            if slot.has_converted:
                self._flags[number] |= CONVERTED
        require_dict(info, "reset")
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
                observation, info = check_result_length(env.reset(), RESET_RESULT)
                require_dict(info, "reset")
                reward = 0.0
                flags[number] = 0
            else:
                cells[phase_at] = _STEP
                result = env.step(action)
                if type(result) is not tuple or len(result) != 5:
                    result = check_result_length(result, STEP_RESULT)
                observation, reward, terminated, truncated, info = result
                if type(info) is not dict:
                    require_dict(info, "step")
                if terminated or truncated:
                    flags[number] = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
                    if same_step:
                        # The reset may overwrite the values that the step returned.
                        final, info = copy_output(observation), copy_output(info)
                        reward = reward if type(reward) in REWARD_KINDS else copy_output(reward)
                        cells[phase_at] = _RESET
                        observation, reset_info = check_result_length(env.reset(), RESET_RESULT)
                        require_dict(reset_info, "reset")
                    elif self._autoreset is Autoreset.NEXT_STEP:
                        due.add(number)
                else:
                    flags[number] = 0
            kind = REWARD_KINDS.get(type(reward), OTHER_REWARD)
            if kind == 2 and not -MAX_EXACT <= reward <= MAX_EXACT:
                kind = OTHER_REWARD
            kinds[number] = kind
            if kind != OTHER_REWARD:
                rewards[number] = reward
            for slot in all_slots[number]:
                part = observation
                for key in slot.path:
                    part = part[key]
                # The common case of slot.write, without the call.
                if type(part) is array and part.dtype is slot.dtype and part.shape == slot.shape:
                    slot.place[...] = part
                else:
                    slot.write(observation)
                    if slot.has_converted:
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
        """Send the parent the entry of each environment, or None for environments without infos."""
        try:
            message = pack(entries)
        except Exception as error:
            self._raise_unpicklable(entries, error)
            raise
        self._answer(message)

    def _raise_unpicklable(self, entries: Sequence[StepEntry | None], error: Exception) -> None:
        """Raise an error that names the key of an info that cannot be pickled."""
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
