"""Stable Baselines3's ``SubprocVecEnv`` where the system lacks what our workers are made of: macOS, Windows."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv

from rl_ext_core._system import TemporaryFolder
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.isolation import apply_cure
from rl_ext_core.isolation.cures import enter_directory
from rl_ext_core.processes.spawned import death_of
from rl_ext_core.vector.arguments import check_cwd

__all__ = ["SpawnedVecEnv"]

_BROKEN = (EOFError, OSError)


class SpawnedVecEnv(SubprocVecEnv):
    """One spawned process each, by Stable Baselines3's own class, which says which of them has died.

    :param env_fns: build the environments
    :param start_method: ``"spawn"`` unless another one is asked for
    :param cure: what keeps their processes apart, see :func:`rl_ext_core.isolation.apply_cure`
    :param cwd: ``"own"`` gives each process an empty working directory below :attr:`working_directory`, which is kept
    :raises WorkerError: at any call: a process has ended; the others are ended too
    """

    def __init__(
        self,
        env_fns: Sequence[Any],
        start_method: str | None = None,
        *,
        cure: str | None = None,
        cwd: str | None = None,
        **options: Any,
    ) -> None:
        if options:
            raise InvalidArgumentError(
                f"{sorted(options)} are options of this package's own workers, which need Linux; leave them out: here "
                "the workers are those of Stable Baselines3's SubprocVecEnv"
            )
        check_cwd(cwd)
        self.working_directory = None if cwd is None else tempfile.mkdtemp(prefix="rl-ext-cwd-")
        if self.working_directory is not None:
            folders = [os.path.join(self.working_directory, str(i)) for i in range(len(env_fns))]
            env_fns = [functools.partial(_in_folder, *pair) for pair in zip(folders, env_fns, strict=True)]
        self._scratch: TemporaryFolder | None = None
        if cure is not None:
            self._scratch = TemporaryFolder()
            place = Path(self._scratch.name)
            env_fns = [functools.partial(_cured, cure, place / str(i), env_fn) for i, env_fn in enumerate(env_fns)]
        try:
            super().__init__(list(env_fns), start_method or "spawn")
        except _BROKEN as error:
            if not hasattr(self, "processes"):
                raise
            raise self._failed(0) from error  # which is the one that is asked for its spaces
        self.remotes = tuple(_Remote(self, index, remote) for index, remote in enumerate(self.remotes))

    def _failed(self, index: int) -> WorkerError:
        """End all processes, and return what became of one."""
        found = death_of(self.processes[index], f"the process of environment {index} of {len(self.processes)}", index)
        for process in self.processes:
            process.kill()
            process.join()
        self.closed, self.waiting = True, False
        self._tidy_up()
        return found

    def _tidy_up(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def step_wait(self) -> Any:
        """Finish a step, with ``DummyVecEnv``'s dtypes: what is chosen changes no numbers."""
        observations, rewards, *rest = super().step_wait()
        return (observations, rewards.astype(np.float32), *rest)

    def close(self) -> None:
        """Close the environments and end their processes; those that have died already are no error."""
        with contextlib.suppress(WorkerError):
            super().close()
        self._tidy_up()


def _cured(cure: str, scratch: Path, env_fn: Any) -> Any:
    scratch.mkdir()
    apply_cure(cure, scratch)
    return env_fn()


def _in_folder(folder: str, env_fn: Any) -> Any:
    enter_directory(folder)
    return env_fn()


class _Remote:
    """The pipe to a process, which says when there is nobody at the other end."""

    def __init__(self, vec_env: SpawnedVecEnv, index: int, remote: Any) -> None:
        self._vec_env, self._index, self._remote = vec_env, index, remote

    def send(self, message: Any) -> None:
        try:
            self._remote.send(message)
        except _BROKEN as error:
            raise self._vec_env._failed(self._index) from error

    def recv(self) -> Any:
        try:
            return self._remote.recv()
        except _BROKEN as error:
            raise self._vec_env._failed(self._index) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)
