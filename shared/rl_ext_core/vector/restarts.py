"""Replacement of failed workers of a pool, with the settings of their environments."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.recording.recorder import RECORDED_CALLS
from rl_ext_core.vector import channel
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import WorkerHandle
from rl_ext_core.vector.memory_layout import TRUNCATED
from rl_ext_core.vector.worker import StepEntry

_log = logging.getLogger("rl_ext_core.vector")


class Restarts:
    """Policy of a pool that replaces each worker that fails.

    The answer of a failed worker is a :class:`WorkerError`. Reading this answer replaces the worker. Ctrl-C during the
    replacement ends all workers.

    :param num_envs: number of environments of the pool, which reports resets, calls and observations to this object

    :ivar last_observations: observations last returned to the caller. If a worker fails in the next step, they are the
        last ones of its episodes
    """

    def __init__(self, num_envs: int) -> None:
        # Per environment: the pickled options of the last reset, and calls by command and name. A call has its pickled
        # arguments if it set an attribute, or None if the replacement does not repeat it.
        self._reset_options = [channel.pack(None)] * num_envs
        self._settings: list[dict[tuple[str, str], bytes | None]] = [{} for _ in range(num_envs)]
        # Of the call that has begun, if it sets an attribute, per environment: its settings, the key there, and the
        # pickled arguments before the call and after it.
        self._begun: list[tuple[dict[tuple[str, str], bytes | None], tuple[str, str], bytes | None, bytes]] = []
        self.last_observations: list[np.ndarray[Any, Any]] = []

    def record_reset(self, number: int, options: dict[str, Any] | None) -> None:
        """Record the options with which an environment is reset."""
        self._reset_options[number] = channel.pack_by_value(options or None)

    def record_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Record a call that begins, if it may change the environments."""
        self._begun = []
        if name not in RECORDED_CALLS:
            return
        # Pickle the arguments now, because the caller may change them, and what cannot be sent changes nothing.
        packed = {id(argument): channel.pack_by_value(argument) for argument in arguments}
        for number, argument in zip(environments, arguments, strict=True):
            settings, key = self._settings[number], (name, argument[0])
            if name.startswith("set_"):
                self._begun.append((settings, key, settings.get(key), packed[id(argument)]))
            settings[key] = None  # until the call has succeeded

    def record_results(self, results: Sequence[Any]) -> None:
        """Record the attributes that the call has set."""
        begun, self._begun = self._begun, []  # arguments may be large
        if not begun:  # the call sets no attribute
            return
        for (settings, key, before, after), result in zip(begun, results, strict=True):
            call = before if isinstance(result, ExceptionRecord) else after
            settings.pop(key, None)  # the order of the last values is kept
            if call is not None:
                settings[key] = call

    # -- replacements

    def replace(self, pool: Any, worker: WorkerHandle, to_reset: bool) -> None:
        """Replace a failed worker and reset its environments, whose entries become its answer."""
        try:
            self._replace(pool, worker, worker.answer, to_reset)
        except BaseException as error:
            text = "these workers were ended, because the replacement of one was interrupted. Make new environments"
            pool.end(error if isinstance(error, WorkerError) else WorkerError(text))
            raise

    def _replace(self, pool: Any, worker: WorkerHandle, first: WorkerError, to_reset: bool) -> None:
        failure = first
        timings, limit = pool.timings, pool.options.max_restarts
        # Without SAME_STEP, the caller gets the end of the episode now, and the next episode after the next step.
        delays_reset = not to_reset and pool.autoreset is not Autoreset.SAME_STEP
        while True:
            if timings.restarts >= limit:
                raise failure
            timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, timings.restarts, limit)
            try:
                infos = self._restart(pool, worker, same_seeds=to_reset and failure is first, delays_reset=delays_reset)
                break
            except WorkerError as again:
                failure = again
        rows = slice(worker.first, worker.last)
        pool.arrays["reward"][rows], pool.arrays["reward kind"][rows] = 0.0, 0
        pool.arrays["flags"][rows] = TRUNCATED
        entries: list[StepEntry] = []
        for index, (_, info, _, _) in enumerate(infos, worker.first):
            error, last = {"worker_error": self._describe(pool, first, index)}, None
            if self.last_observations:  # otherwise the first reset has failed
                last = pool.layout.build_observation([array[index].copy() for array in self.last_observations])
            entries.append((dict(error), None if delays_reset else {**info, **error}, None, last))
        if delays_reset:
            for array, before in zip(pool._observations, self.last_observations, strict=True):
                array[rows] = before[rows]
        worker.answer = entries

    def _restart(self, pool: Any, worker: WorkerHandle, *, same_seeds: bool, delays_reset: bool) -> Any:
        """Replace the process of a worker once, and return the answer to the reset.

        :param same_seeds: whether to reset with the seeds of the last reset. Otherwise new seeds are drawn from them,
            because the same seeds repeat the same episodes, and often the same failure
        :param delays_reset: whether the caller gets the observations of the reset after its next step
        """
        starting, stepping = pool.options.start_timeout, pool.options.step_timeout
        worker.end()
        worker.attempt += 1
        pool.launch([worker])
        _ask(pool, worker, starting)
        _ask(pool, worker, starting, "map", pool.layout)
        part = slice(worker.first, worker.last)
        for number, calls in enumerate(self._settings[part]):
            for (command, name), packed in calls.items():
                if packed is not None:
                    (answer,) = _ask(pool, worker, stepping, command, [(number, channel.unpack(packed))])
                    if isinstance(channel.unpack(answer), ExceptionRecord):
                        calls[command, name] = None
        seeds = pool.seeds[part]
        if not same_seeds:
            seeds = [None if seed is None else _next_seed(seed, worker.attempt) for seed in seeds]
        options = map(channel.unpack, self._reset_options[part])
        pool.send_reset(worker, list(zip(seeds, options, strict=True)))
        infos = _ask(pool, worker, stepping)
        if delays_reset and pool.autoreset is Autoreset.NEXT_STEP:
            _ask(pool, worker, stepping, "reset at next step", None)
        return infos

    def _describe(self, pool: Any, failure: WorkerError, number: int) -> str:
        """Return the text of ``info["worker_error"]`` for the new environment after a failure."""
        reset = {"seed": pool.seeds[number], "options": channel.unpack(self._reset_options[number])}
        arguments = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in reset.items() if value is not None)
        repeated: list[str] = []
        missing: list[str] = []
        for (command, name), packed in self._settings[number].items():
            (missing if packed is None else repeated).append(f"{command.replace('_wrapper', '')}({name!r})")
        repeated += [f"reset({arguments})"] if arguments else []
        lines = [str(failure)]
        if repeated:
            lines.append(f"Repeated for the new environment: {', '.join(repeated)}.")
        if missing:
            lines.append(f"Not repeated: {', '.join(missing)}. Call them again for environment {number}.")
        return "\n".join(lines)


def _ask(pool: Any, worker: WorkerHandle, timeout: float | None, *command: Any) -> Any:
    """Send a command, if there is one, and return the answer of a new worker; raise its failure."""
    if command:
        worker.send(*command)
    pool._receive(timeout, [worker])
    if isinstance(worker.answer, WorkerError):
        raise worker.answer
    return worker.answer


def _next_seed(seed: int, attempt: int) -> int:
    """Draw a seed from another one. It fits into 31 bits, which all environments accept."""
    # SeedSequence refuses negative numbers, which environments may accept.
    return int(np.random.SeedSequence([int(seed) % 2**64, attempt]).generate_state(1)[0] >> 1)
