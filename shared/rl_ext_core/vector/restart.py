"""Workers that are replaced when they fail; the new environments get the settings of those before."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.vector import channel
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import WorkerHandle
from rl_ext_core.vector.environments import PoolOptions
from rl_ext_core.vector.pool import Pool, ResetRequests
from rl_ext_core.vector.worker import TRUNCATED, StepEntry

__all__ = ["RestartingPool"]

_log = logging.getLogger("rl_ext_core.vector")

# Calls that may change an environment, and how they are named to the caller.
_SETTER_NAMES = {"env_method": "env_method({!r})", "call": "call({!r})"}
_SETTER_NAMES |= dict.fromkeys(("set_attr", "set_wrapper_attr"), "set_attr({!r})")


class RestartingPool(Pool):
    """Processes of which each is replaced that fails; see :class:`~rl_ext_core.vector.pool.Pool`.

    The answer of a worker that has failed is a :class:`WorkerError`, until it is asked for: then the worker is
    replaced. Ctrl-C while that is done ends all workers.
    """

    def __init__(self, env_fns: Any, options: PoolOptions, *, autoreset: Autoreset = Autoreset.SAME_STEP) -> None:
        super().__init__(env_fns, options, autoreset=autoreset)
        # Per environment: options of the last reset, pickled; and calls by command and name, with the pickled value of
        # an attribute that was set. None: the replacement does not get it.
        self._reset_options = [channel.pack(None) for _ in self.worker_by_env]
        self._settings: list[dict[tuple[str, str], bytes | None]] = [{} for _ in self.worker_by_env]
        self._last_observations: list[np.ndarray[Any, Any]] = []  # observations that were returned

    def _failure_groups(self, workers: Sequence[WorkerHandle]) -> list[Sequence[WorkerHandle]]:
        return [[worker] for worker in reversed(workers)]

    def _handle_failure(self, group: Sequence[WorkerHandle]) -> None:
        for worker in group:
            worker.answer = self._group_error(group)
            worker.discard_answer()

    # -- what the caller sets and sees

    def reset(self, worker: Any, requests: ResetRequests) -> None:
        """Begin to reset a worker's environments."""
        for number, how in enumerate(requests, worker.first):
            if how is not None:
                self._reset_options[number] = channel.pack_by_value(how[1] or None)
        super().reset(worker, requests)

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Begin a call: see :meth:`~rl_ext_core.vector.pool.Pool.begin_call`."""
        if name in _SETTER_NAMES:
            calls = [(self._settings[n], (name, arg[0])) for n, arg in zip(environments, arguments, strict=True)]
            self._previous_values = [settings.get(key) for settings, key in calls]
            for settings, key in calls:  # until it is known that it was done
                settings[key] = None
        super().begin_call(environments, name, arguments)

    def _record_settings(self, results: Sequence[Any]) -> None:
        environments, name, arguments = self._call
        if not name.startswith("set_"):
            return
        # Pickled now, as the worker got them: the caller may change them.
        packed = {id(argument): channel.pack_by_value(argument[1]) for argument in arguments}
        for number, argument, before, result in zip(
            environments, arguments, self._previous_values, results, strict=True
        ):
            value = before if isinstance(result, ExceptionRecord) else packed[id(argument)]
            self._settings[number].pop((name, argument[0]), None)  # to set them again in the order of the last values
            if value is not None:
                self._settings[number][name, argument[0]] = value

    def observations(self, *, copy: bool = True) -> Any:
        """Return the observations, and store them: the last of an episode whose worker fails in the next step."""
        self._last_observations = [array.copy() for array in self._observations]
        return super().observations(copy=copy)

    # -- replacements

    def _get_answer(self, worker: WorkerHandle, to_reset: bool) -> Any:
        if not isinstance(worker.answer, WorkerError):
            return worker.answer
        try:
            return self._replace(worker, worker.answer, to_reset)
        except BaseException as error:
            text = "these workers were ended, because the replacement of one was interrupted. Make new environments"
            self.end(error if isinstance(error, WorkerError) else WorkerError(text))
            raise

    def _replace(self, worker: WorkerHandle, first: WorkerError, to_reset: bool) -> list[StepEntry]:
        """Replace a worker that has failed by a new process, reset its environments, and return its answer.

        :raises WorkerError: If the limit is reached.
        """
        failure, timings, limit = first, self.timings, self._options.max_restarts
        # Whether the caller sees the episode's end in this step and the next episode only after that.
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
            # Nothing was returned yet where the first reset fails: then there is no last observation to return.
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
        """Replace a process once, and return the answer to the reset of its environments.

        :param same_seeds: whether they are reset with the seeds of the last reset, and not with others drawn from them:
            the same seeds repeat the same episodes, and often the same failure
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
        self.reset(worker, list(zip(seeds, options, strict=True)))
        infos = self._await_answer(worker, stepping)
        if delays_reset and self._autoreset is Autoreset.NEXT_STEP:
            self.send(worker, "reset at next step", None)
            self._await_answer(worker, stepping)
        return infos

    def _await_answer(self, worker: WorkerHandle, timeout: float | None) -> Any:
        """Wait for a new worker's answer, and return it."""
        self._receive(timeout, [worker])
        if isinstance(worker.answer, WorkerError):
            raise worker.answer
        return worker.answer

    def _worker_error(self, failure: WorkerError, number: int) -> str:
        """Return the text for infos of an environment that replaces another."""
        reset = {"seed": self.seeds[number], "options": channel.unpack(self._reset_options[number])}
        how = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in reset.items() if value is not None)
        repeated: list[str] = []
        missing: list[str] = []
        for (command, name), packed in self._settings[number].items():
            (missing if packed is None else repeated).append(_SETTER_NAMES[command].format(name))
        repeated += [f"reset({how})"] if how else []
        lines = [str(failure)]
        if repeated:
            lines.append(f"The new environment got again: {', '.join(repeated)}.")
        if missing:
            lines.append(f"It did not get: {', '.join(missing)}. Call them again for environment {number}.")
        return "\n".join(lines)


def _next_seed(seed: int, attempt: int) -> int:
    """Draw a seed from another one, which fits into 31 bits as all environments take it."""
    return int(np.random.SeedSequence([int(seed), attempt]).generate_state(1)[0] >> 1)
