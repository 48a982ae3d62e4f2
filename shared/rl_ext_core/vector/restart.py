"""Workers that are replaced when they fail; the new environments get the settings of those before."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import channel
from rl_ext_core.vector.arguments import Options
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Raised, WorkerHandle
from rl_ext_core.vector.pool import Pool, Resets
from rl_ext_core.vector.worker import TRUNCATED, Entry

__all__ = ["RestartingPool", "new_pool"]

_log = logging.getLogger("rl_ext_core.vector")

# Calls that may change an environment, and how they are named to the caller.
_SET_ATTRIBUTE = {"set_attr": "set_attr({!r})", "set_wrapper_attr": "set_attr({!r})"}
_SETTING = {**_SET_ATTRIBUTE, "env_method": "env_method({!r})", "call": "call({!r})"}


@dataclasses.dataclass
class Settings:
    """What the caller has set in an environment, for the one that replaces it.

    :ivar options: of the last reset, pickled
    :ivar attributes: pickled values by command and name, in the order in which they were set
    :ivar unrepeated: calls that the replacement does not get: methods, and attributes that may not have been set
    """

    options: bytes | None = None
    attributes: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    unrepeated: dict[str, None] = dataclasses.field(default_factory=dict)

    def unpacked_options(self) -> dict[str, Any] | None:
        """Return the options of the last reset."""
        return None if self.options is None else channel.unpack(self.options)


class RestartingPool(Pool):
    """Processes of which each is replaced that fails; see :class:`~rl_ext_core.vector.pool.Pool`.

    The answer of a worker that has failed is a :class:`WorkerError`, until it is asked for: then the worker is
    replaced. Ctrl-C while that is done ends all workers.
    """

    def __init__(self, env_fns: Any, options: Options, *, autoreset: Autoreset = Autoreset.SAME_STEP) -> None:
        super().__init__(env_fns, options, autoreset=autoreset)
        self._settings = [Settings() for _ in self.worker_of]
        self._last: list[np.ndarray[Any, Any]] = []  # observations that were returned

    def _watch(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            super()._watch([worker])

    # -- what the caller sets

    def reset(self, worker: Any, asked: Resets) -> None:
        """Have a worker's environments begin to reset."""
        for settings, how in zip(self._settings[worker.first : worker.last], asked, strict=True):
            if how is not None:
                settings.options = channel.pack_by_value(how[1]) if how[1] else None
        super().reset(worker, asked)

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Have environments begin a call: see :meth:`~rl_ext_core.vector.pool.WorkerPool.begin_call`."""
        if name in _SETTING:
            for number, argument in zip(environments, arguments, strict=True):
                self._settings[number].unrepeated[_SETTING[name].format(argument[0])] = None
        super().begin_call(environments, name, arguments)

    def _note_results(self, results: Sequence[Any]) -> None:
        environments, name, arguments = self._call
        if name not in _SET_ATTRIBUTE:
            return
        # Pickled now, as the worker got them: the caller may change them.
        packed = {id(argument): channel.pack_by_value(argument) for argument in arguments}
        for number, argument, result in zip(environments, arguments, results, strict=True):
            settings, key = self._settings[number], (name, argument[0])
            settings.unrepeated.pop(_SETTING[name].format(argument[0]), None)
            if not isinstance(result, Raised):
                settings.attributes.pop(key, None)
                settings.attributes[key] = packed[id(argument)]

    def remember(self) -> None:
        """Store the observations that are returned: the last of an episode whose worker fails in the next step."""
        self._last = [array.copy() for array in self._observations]

    # -- failures

    def _receive(self, timeout: float | None) -> None:
        self._receive_from(self.workers, timeout)

    def _receive_from(self, workers: Sequence[WorkerHandle], timeout: float | None) -> None:
        for worker in reversed(workers):
            # The time of each begins when it is waited for: it does not matter how long others take.
            limited = timeout is not None and worker.watch is not None and not worker.is_over()
            try:
                with worker.watch.operation("", timeout) if limited else contextlib.nullcontext():  # type: ignore[union-attr]
                    worker.receive()
            except (EOFError, WorkerError):
                if not worker.has_failed():
                    raise
                worker.answer = self._described([worker])
                worker.await_nothing()

    def answer_of(self, worker: WorkerHandle, *, to_reset: bool = False) -> Any:
        """Return a worker's answer, or its successor's."""
        if not isinstance(worker.answer, WorkerError):
            return worker.answer
        try:
            return self._replaced(worker, worker.answer, to_reset=to_reset)
        except BaseException as error:
            text = "these workers were ended, because the replacement of one was interrupted. Make new environments"
            self.end(error if isinstance(error, WorkerError) else WorkerError(text))
            raise

    def _replaced(self, worker: WorkerHandle, first: WorkerError, *, to_reset: bool) -> list[Entry]:
        """Replace a worker that has failed by a new process, reset its environments, and return its answer.

        :raises WorkerError: If the limit is reached.
        """
        failure, timings, limit = first, self.timings, self._options.max_restarts
        # Whether the caller sees the episode's end in this step and the next episode only after that.
        unseen = not to_reset and self._autoreset is not Autoreset.SAME_STEP
        while True:
            if timings.restarts >= limit:
                raise failure
            timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, timings.restarts, limit)
            try:
                infos = self._restart(worker, same_seeds=to_reset and failure is first, unseen=unseen)
                break
            except WorkerError as again:
                failure = again
        rows = slice(worker.first, worker.last)
        self.arrays["reward"][rows], self.arrays["reward kind"][rows] = 0.0, 0
        self.arrays["flags"][rows] = TRUNCATED
        entries: list[Entry] = []
        for index, (_, info, _, _) in enumerate(infos, worker.first):
            error = {"worker_error": self._worker_error(first, index)}
            # Nothing was returned yet where the first reset fails: then there is no last observation to return.
            last = self.layout.joined([array[index].copy() for array in self._last]) if self._last else None
            entries.append((dict(error), None if unseen else {**info, **error}, None, last))
        if unseen:
            for array, before in zip(self._observations, self._last, strict=True):
                array[rows] = before[rows]
        self._unsettled, worker.answer = False, entries
        return entries

    def _restart(self, worker: WorkerHandle, *, same_seeds: bool, unseen: bool) -> Any:
        """Replace a process once, and return the answer to the reset of its environments.

        :param same_seeds: whether they are reset with the seeds of the last reset, and not with others drawn from them:
            the same seeds repeat the same episodes, and often the same failure
        """
        limit = self._options.step_timeout
        worker.end()
        worker.attempt += 1
        self._launch([worker])
        self._answered(worker, self._options.start_timeout)
        self.send(worker, "map", self.layout)
        self._answered(worker, self._options.start_timeout)
        self._set_attributes(worker)
        seeds = self.seeds[worker.first : worker.last]
        if not same_seeds:
            seeds = [None if seed is None else _next_seed(seed, worker.attempt) for seed in seeds]
        options = [settings.unpacked_options() for settings in self._settings[worker.first : worker.last]]
        self.reset(worker, list(zip(seeds, options, strict=True)))
        infos = self._answered(worker, limit)
        if unseen and self._autoreset is Autoreset.NEXT_STEP:
            self.send(worker, "reset at next step", None)
            self._answered(worker, limit)
        return infos

    def _set_attributes(self, worker: WorkerHandle) -> None:
        """Set in a new worker's environments the attributes that were set in those before."""
        calls: dict[str, list[tuple[int, Any]]] = {}
        for number, settings in enumerate(self._settings[worker.first : worker.last]):
            for (command, _), packed in settings.attributes.items():
                calls.setdefault(command, []).append((number, channel.unpack(packed)))
        for command, asked in calls.items():
            self.send(worker, command, asked)
            answers = self._answered(worker, self._options.step_timeout)
            for (number, (name, _)), result in zip(asked, answers, strict=True):
                if isinstance(channel.unpack(result), Raised):
                    settings = self._settings[worker.first + number]
                    settings.unrepeated[_SETTING[command].format(name)] = None
                    del settings.attributes[command, name]

    def _answered(self, worker: WorkerHandle, timeout: float | None) -> Any:
        """Wait for a new worker's answer, and return it."""
        self._receive_from([worker], timeout)
        if isinstance(worker.answer, WorkerError):
            raise worker.answer
        return worker.answer

    def _worker_error(self, failure: WorkerError, number: int) -> str:
        """Return the text for infos of an environment that replaces another."""
        settings = self._settings[number]
        reset = {"seed": self.seeds[number], "options": settings.unpacked_options()}
        how = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in reset.items() if value is not None)
        repeated = [_SETTING[command].format(name) for command, name in settings.attributes]
        repeated += [f"reset({how})"] if how else []
        lines = [str(failure)]
        if repeated:
            lines.append(f"The new environment got again: {', '.join(repeated)}.")
        if settings.unrepeated:
            lines.append(f"It did not get: {', '.join(settings.unrepeated)}. Call them again for environment {number}.")
        return "\n".join(lines)


def new_pool(env_fns: Any, options: Options, *, autoreset: Autoreset = Autoreset.SAME_STEP) -> Pool:
    """Start the pool that the options ask for."""
    return (Pool if options.restart is None else RestartingPool)(env_fns, options, autoreset=autoreset)


def _next_seed(seed: int, attempt: int) -> int:
    """Draw a seed from another one, which fits into 31 bits as all environments take it."""
    return int(np.random.SeedSequence([int(seed), attempt]).generate_state(1)[0] >> 1)
