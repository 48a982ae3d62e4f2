"""What is said about a worker that has failed: the environment that it was at comes first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import _messages
from rl_ext_core.vector._worker import PHASES

if TYPE_CHECKING:
    from rl_ext_core.processes import Failure
    from rl_ext_core.vector._layout import Progress
    from rl_ext_core.vector._seat import Seat

__all__ = ["described", "failed", "failed_to_close", "warn_of_late"]

_WHEN = {"start": "at its start", "idle": "between two calls", "constructor": "in its constructor"}


def described(
    failure: Failure, watched: Sequence[Seat], progress: Progress, seeds: Sequence[int | None]
) -> WorkerError:
    """Make the exception to raise.

    :param failure: as the watch has found it
    :param watched: the workers that the watch waits for
    :param progress: what the workers are at
    :param seeds: of each environment's last reset
    """
    seat = watched[failure.worker]
    number, at = progress.read(seat.number)
    return failed(
        seat.first + number,
        PHASES[at],
        failure.summary.removeprefix(f"worker {failure.worker} of {len(watched)} "),
        seeds,
        worker=seat.number,
        kind=failure.kind,
        exitcode=failure.exitcode,
        traceback=failure.traceback,
        notes=failure.notes,
    )


def failed_to_close(seat: Any, seeds: Sequence[int | None]) -> WorkerError | None:
    """Make the exception for what an environment has raised in ``close``, if a worker has said so.

    :param seat: of the worker
    :param seeds: of each environment's last reset
    """
    if seat.said is None:
        return None
    number, packed = seat.said
    raised = _messages.answer(_messages.RAISED, packed)
    error = failed(
        seat.first + number,
        "close",
        f"raised {raised.summary}:",
        seeds,
        worker=seat.number,
        kind="exception",
        traceback=str(raised.error.__cause__).strip("\n"),
    )
    error.__cause__ = raised.error
    return error


def warn_of_late(environment: int, num_envs: int, where: str, seconds: float) -> None:
    """Say that the time to close environments was up."""
    warnings.warn(
        f"environment {environment} of {num_envs} was still {where} after {seconds:.3g} s of closing, and its worker "
        "was ended: what it writes may be incomplete. Write close_timeout=None to wait as long as it takes, or more",
        stacklevel=5,
    )


def failed(
    environment: int,
    phase: str,
    what: str,
    seeds: Sequence[int | None],
    *,
    worker: int,
    kind: str,
    exitcode: int | None = None,
    traceback: str = "",
    notes: Mapping[str, Any] | None = None,
) -> WorkerError:
    """Make the exception that says what has happened to an environment.

    :param environment: its number
    :param phase: what its worker was at
    :param what: has happened
    :param seeds: of each environment's last reset
    """
    seed = seeds[environment]
    who = f"environment {environment} of {len(seeds)}" + ("" if seed is None else f" (seed {seed})")
    lines = [f"{who}, {_WHEN.get(phase, f'in {phase}')}: {what}"]
    lines += [f"    {line}" for line in traceback.rstrip("\n").splitlines()]
    return WorkerError(
        "\n".join(lines),
        worker=worker,
        kind=kind,
        phase=phase,
        seed=seed,
        exitcode=exitcode,
        traceback=traceback,
        notes={**(notes or {}), "environment": environment},
    )
