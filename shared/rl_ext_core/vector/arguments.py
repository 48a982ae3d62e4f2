"""What callers of vectorised environments pass: checks, and factories of what stands for an environment."""

from __future__ import annotations

import dataclasses
import multiprocessing
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.frames.planning import parse_bytes

__all__ = ["Options", "at_least_one", "check_env_fns", "check_seconds", "factories_of"]


def _like(value: Any) -> str:
    """A whole number that may be what was meant: 1e6 and "4GB" have one."""
    try:
        number = parse_bytes(value) if isinstance(value, str) else int(value)
    except (InvalidArgumentError, TypeError, ValueError, OverflowError):
        number = 1
    return f"{max(number, 1):_}"


def at_least_one(name: str, value: Any) -> int:
    """The value as an integer, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}={_like(value)}") from None
    if number < 1:
        raise InvalidArgumentError(f"{name}={number} must be at least 1")
    return number


def check_env_fns(env_fns: Any) -> None:
    """Check that it is a list with something in it.

    :raises InvalidTypeError: it is no list
    :raises InvalidArgumentError: it is empty
    """
    if not isinstance(env_fns, Sequence) or isinstance(env_fns, str):
        raise InvalidTypeError(f"env_fns={env_fns!r} is no list; expected a list of functions. Write [make_env] * 4")
    if not env_fns:
        raise InvalidArgumentError("env_fns is empty; expected a function for each environment. Write [make_env] * 4")


@dataclasses.dataclass(frozen=True)
class Options:
    """What callers say of workers, checked before a process is started.

    :ivar start_method: of processes; None: the default
    :ivar n_workers: how many share the environments; None: one each
    :ivar start_timeout: seconds until all environments must be built
    :ivar step_timeout: seconds until workers must have answered any command
    :ivar close_timeout: seconds until workers must have closed their environments and ended
    :ivar restart: "truncate": workers that have failed are replaced
    :ivar max_restarts: how many times
    :ivar cwd: ``"own"``: each worker has an empty working directory of its own, which is kept; a folder: each has a
        copy of it; None: they share the parent's
    :raises InvalidArgumentError: If an option has another value.
    """

    start_method: str | None = None
    n_workers: int | None = None
    start_timeout: float | None = None
    step_timeout: float | None = None
    close_timeout: float | None = None
    restart: str | None = None
    max_restarts: int = 0
    cwd: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        if self.start_method is not None and self.start_method not in methods:
            raise InvalidArgumentError(
                f"start_method={self.start_method!r}: cannot find context for {self.start_method!r}, for here "
                f"processes are started by one of {', '.join(methods)}. "
                f'Write start_method="{methods[0]}", or leave it out'
            )
        if self.n_workers is not None and not _is_count(self.n_workers, 1):
            raise InvalidArgumentError(
                f"n_workers={self.n_workers!r} is not a number of processes; expected 1 or more, or None"
            )
        for name in ("start_timeout", "step_timeout", "close_timeout"):
            check_seconds(name, getattr(self, name))
        if self.restart not in (None, "truncate"):
            raise InvalidArgumentError(
                f'restart={self.restart!r} is neither "truncate" nor None. Write restart="truncate"'
            )
        if not _is_count(self.max_restarts, 0):
            raise InvalidArgumentError(f"max_restarts={self.max_restarts!r} is no number; expected 0 or more")
        if self.cwd not in (None, "own") and not os.path.isdir(self.cwd):
            raise InvalidArgumentError(
                f'cwd={self.cwd!r} is not a folder: expected "own" (an empty directory for each worker), a folder of '
                'which each gets a copy, or None (this process\'s own). Use cwd="own"'
            )


def check_seconds(name: str, seconds: Any) -> None:
    """Check a time limit.

    :raises InvalidArgumentError: If it is neither a number above 0 nor None.
    """
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise InvalidArgumentError(
            f"{name}={seconds!r} is no time; expected seconds above 0, or None for no limit. Write {name}=60"
        )


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def factories_of(env_fns: Sequence[Callable[[], Any]]) -> list[EnvFactory[Any]]:
    """Turn functions, or what else stands for an environment, into factories, each for its place in the list.

    Those that are for a worker already stay as they are. The same object several times is turned only once.
    """
    made: dict[int, list[EnvFactory[Any]]] = {}
    factories = []
    for index, env_fn in enumerate(env_fns):
        if isinstance(env_fn, EnvFactory) and env_fn.worker is not None:
            factories.append(env_fn)
            continue
        if id(env_fn) not in made:
            made[id(env_fn)] = as_factory(env_fn).for_workers(len(env_fns))
        factories.append(made[id(env_fn)][index])
    return factories
