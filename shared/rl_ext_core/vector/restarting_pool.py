"""Pool that replaces failed workers and restores the settings of their environments."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.recording.memory_layout import TRUNCATED
from rl_ext_core.vector import channel
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import WorkerHandle
from rl_ext_core.vector.environments import PoolOptions
from rl_ext_core.vector.pool import Pool, ResetRequests
from rl_ext_core.vector.worker import StepEntry

__all__ = ["RestartingPool", "make_pool"]

_log = logging.getLogger("rl_ext_core.vector")

# Calls that may change an environment, with their names in messages.
_SETTER_NAMES = {"env_method": "env_method({!r})", "call": "call({!r})"}
_SETTER_NAMES |= dict.fromkeys(("set_attr", "set_wrapper_attr"), "set_attr({!r})")


class RestartingPool(Pool):
    """Pool that replaces each worker that fails; see :class:`~rl_ext_core.vector.pool.Pool`.

    The answer of a failed worker is a :class:`WorkerError`. Reading this answer replaces the worker. Ctrl-C during the
    replacement ends all workers.
    """

    def __init__(self, env_fns: Any, options: PoolOptions, *, autoreset: Autoreset = Autoreset.SAME_STEP) -> None:
        super().__init__(env_fns, options, autoreset=autoreset)
        # Per environment: the pickled options of the last reset, and calls by command and name. A call has the pickled
        # value of the attribute that it set, or None if the replacement does not repeat it.
        self._reset_options = [channel.pack(None) for _ in self.worker_by_env]
        self._settings: list[dict[tuple[str, str], bytes | None]] = [{} for _ in self.worker_by_env]
        self._last_observations: list[np.ndarray[Any, Any]] = []  # observations last returned to the caller

    def _failure_groups(self, workers: Sequence[WorkerHandle]) -> list[Sequence[WorkerHandle]]:
        """Return each worker as its own group, so that the others keep running."""
        return [[worker] for worker in reversed(workers)]

    def _handle_failure(self, group: Sequence[WorkerHandle]) -> None:
        """Store the failure as the worker's answer. The worker is replaced later."""
        for worker in group:
            worker.answer = self._group_error(group)
            worker.discard_answer()

    # -- settings and observations

    def send_reset(self, worker: Any, requests: ResetRequests) -> None:
        """Begin to reset the environments of one worker, and record the options."""
        for number, request in enumerate(requests, worker.first):
            if request is not None:
                self._reset_options[number] = channel.pack_by_value(request[1] or None)
        super().send_reset(worker, requests)

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Begin a call for some environments, and record it if it may change them.

        :param environments: numbers of the environments
        :param name: name of the call, a key of ``CALLS``
        :param arguments: data of the call for each environment
        """
        if name in _SETTER_NAMES:
            calls = [(self._settings[n], (name, arg[0])) for n, arg in zip(environments, arguments, strict=True)]
            self._previous_values = [settings.get(key) for settings, key in calls]
            for settings, key in calls:  # until the call has succeeded
                settings[key] = None
        super().begin_call(environments, name, arguments)

    def _record_settings(self, results: Sequence[Any]) -> None:
        """Record the attributes that the last call has set, for replacements of workers."""
        environments, name, arguments = self._call
        if not name.startswith("set_"):
            return
        # Pickle the values now, as the worker got them, because the caller may change them.
        packed = {id(argument): channel.pack_by_value(argument[1]) for argument in arguments}
        for number, argument, before, result in zip(
            environments, arguments, self._previous_values, results, strict=True
        ):
            value = before if isinstance(result, ExceptionRecord) else packed[id(argument)]
            self._settings[number].pop((name, argument[0]), None)  # the order of the last values is kept
            if value is not None:
                self._settings[number][name, argument[0]] = value

    def observations(self, *, copy: bool = True) -> Any:
        """Return the observations, and store a copy.

        If a worker fails in the next step, they are the last observations of its episodes.

        :param copy: whether to copy them; otherwise they are the shared arrays, which the next step overwrites
        """
        self._last_observations = [array.copy() for array in self._observations]
        return super().observations(copy=copy)

    # -- replacements

    def _get_answer(self, worker: WorkerHandle, to_reset: bool) -> Any:
        """Return a worker's last answer. If the worker has failed, replace it first."""
        if not isinstance(worker.answer, WorkerError):
            return worker.answer
        try:
            return self._replace(worker, worker.answer, to_reset)
        except BaseException as error:
            text = "these workers were ended, because the replacement of one was interrupted. Make new environments"
            self.end(error if isinstance(error, WorkerError) else WorkerError(text))
            raise

    def _replace(self, worker: WorkerHandle, first: WorkerError, to_reset: bool) -> list[StepEntry]:
        """Replace a failed worker, reset its environments, and return their entries.

        :raises WorkerError: If ``max_restarts`` is reached.
        """
        failure, timings, limit = first, self.timings, self._options.max_restarts
        # Without SAME_STEP, the caller gets the end of the episode now, and the next episode after the next step.
        delays_reset = not to_reset and self._autoreset is not Autoreset.SAME_STEP
        while True:
            if timings.restarts >= limit:
                raise failure
            timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, timings.restarts, limit)
            try:
                infos = self._restart(worker, same_seeds=to_reset and failure is first, delays_reset=delays_reset)
                break
            except WorkerError as again:
                failure = again
        rows = slice(worker.first, worker.last)
        self.arrays["reward"][rows], self.arrays["reward kind"][rows] = 0.0, 0
        self.arrays["flags"][rows] = TRUNCATED
        entries: list[StepEntry] = []
        for index, (_, info, _, _) in enumerate(infos, worker.first):
            error = {"worker_error": self._worker_error(first, index)}
            # If the first reset fails, there is no last observation to return.
            last = (
                self.layout.build_observation([array[index].copy() for array in self._last_observations])
                if self._last_observations
                else None
            )
            entries.append((dict(error), None if delays_reset else {**info, **error}, None, last))
        if delays_reset:
            for array, before in zip(self._observations, self._last_observations, strict=True):
                array[rows] = before[rows]
        self._has_unread_answers, worker.answer = False, entries
        return entries

    def _restart(self, worker: WorkerHandle, *, same_seeds: bool, delays_reset: bool) -> Any:
        """Replace the process of a worker once, and return the answer to the reset.

        :param same_seeds: whether to reset with the seeds of the last reset. Otherwise new seeds are drawn from them,
            because the same seeds repeat the same episodes, and often the same failure
        :param delays_reset: whether the caller gets the observations of the reset after its next step
        """
        starting, stepping = self._options.start_timeout, self._options.step_timeout
        worker.end()
        worker.attempt += 1
        self._launch([worker])
        self._await_answer(worker, starting)
        self.send(worker, "map", self.layout)
        self._await_answer(worker, starting)
        part = slice(worker.first, worker.last)
        for number, calls in enumerate(self._settings[part]):
            for (command, name), packed in calls.items():
                if packed is not None:
                    self.send(worker, command, [(number, (name, channel.unpack(packed)))])
                    if isinstance(channel.unpack(self._await_answer(worker, stepping)[0]), ExceptionRecord):
                        calls[command, name] = None
        seeds = self.seeds[part]
        if not same_seeds:
            seeds = [None if seed is None else _next_seed(seed, worker.attempt) for seed in seeds]
        options = map(channel.unpack, self._reset_options[part])
        self.send_reset(worker, list(zip(seeds, options, strict=True)))
        infos = self._await_answer(worker, stepping)
        if delays_reset and self._autoreset is Autoreset.NEXT_STEP:
            self.send(worker, "reset at next step", None)
            self._await_answer(worker, stepping)
        return infos

    def _await_answer(self, worker: WorkerHandle, timeout: float | None) -> Any:
        """Wait for the answer of a new worker, and return it.

        :raises WorkerError: If the worker has failed.
        """
        self._receive(timeout, [worker])
        if isinstance(worker.answer, WorkerError):
            raise worker.answer
        return worker.answer

    def _worker_error(self, failure: WorkerError, number: int) -> str:
        """Return the text of ``info["worker_error"]`` for a new environment.

        :param failure: failure of the earlier worker
        :param number: number of the environment
        """
        reset = {"seed": self.seeds[number], "options": channel.unpack(self._reset_options[number])}
        arguments = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in reset.items() if value is not None)
        repeated: list[str] = []
        missing: list[str] = []
        for (command, name), packed in self._settings[number].items():
            (missing if packed is None else repeated).append(_SETTER_NAMES[command].format(name))
        repeated += [f"reset({arguments})"] if arguments else []
        lines = [str(failure)]
        if repeated:
            lines.append(f"Repeated for the new environment: {', '.join(repeated)}.")
        if missing:
            lines.append(f"Not repeated: {', '.join(missing)}. Call them again for environment {number}.")
        return "\n".join(lines)


def make_pool(env_fns: Any, options: PoolOptions, *, autoreset: Autoreset = Autoreset.SAME_STEP) -> Pool:
    """Start a pool. With ``options.restart``, it replaces failed workers."""
    return (Pool if options.restart is None else RestartingPool)(env_fns, options, autoreset=autoreset)


def _next_seed(seed: int, attempt: int) -> int:
    """Draw a seed from another one. It fits into 31 bits, which all environments accept."""
    return int(np.random.SeedSequence([int(seed), attempt]).generate_state(1)[0] >> 1)
