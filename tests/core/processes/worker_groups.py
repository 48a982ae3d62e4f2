"""Groups of workers with a pipe each, like those of vectorized environments."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes import Watch, get_context
from rl_ext_core.processes.context import Worker
from tests.core.processes import worker_functions

# Time limit of waits, which is generous because the machine may be busy.
LIMIT_S = 120
# Quick tests use the fork server, which is the default. Forked workers do not unpickle their function.
UNPICKLING_METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
METHODS = [*UNPICKLING_METHODS, pytest.param("fork", marks=pytest.mark.slow)]


def pair_with_start_methods(*cases: Any) -> list[tuple[Any, str]]:
    """Pair each case with one start method, because the results hardly depend on it."""
    return [(case, ("forkserver", "fork", "spawn")[number % 3]) for number, case in enumerate(cases)]


class WorkerGroup:
    """Workers that run :func:`worker_functions.serve`, their pipes and their watch."""

    def __init__(self, workers: list[Worker], pipes: list[Connection], watch: Watch) -> None:
        self.workers, self.pipes, self.watch = workers, pipes, watch

    def ask(self, worker: int, command: str) -> Any:
        """Send a command to a worker, and return its answer."""
        self.pipes[worker].send(command)
        if not self.pipes[worker].poll(LIMIT_S):
            raise TimeoutError(command)
        return self.pipes[worker].recv()

    def fail(self, command: str, worker: int = 1, **limits: Any) -> WorkerError:
        """Send a command that makes a worker fail in a step, and return the parent's error."""
        with pytest.raises(WorkerError) as caught, self.watch.operation("step", **limits):
            self.ask(worker, command)
        return caught.value

    def close(self) -> None:
        """Make all workers return, and wait for their ends."""
        self.watch.expect_exit()
        for pipe in self.pipes:
            pipe.send("close")
        for worker in self.workers:
            worker.join(LIMIT_S)


@contextmanager
def group(
    method: str, count: int = 3, *, arguments: tuple[Any, ...] = (), watch: dict[str, Any] | None = None, **options: Any
) -> Iterator[WorkerGroup]:
    """Start workers that run :func:`worker_functions.serve`, and kill them after the ``with`` block.

    :param arguments: further arguments of ``serve``
    :param options: options of ``get_context``
    """
    context = get_context(method, **options)
    workers, pipes = [], []
    try:
        for _ in range(count):
            parent_end, worker_end = context.Pipe()
            worker = context.Process(target=worker_functions.serve, args=(worker_end, *arguments))
            workers.append(worker)
            pipes.append(parent_end)
            worker.start()
            worker_end.close()
        watching = Watch(workers, **(watch or {}))
    except BaseException:
        for worker in workers:
            if worker.popen is not None:
                worker.kill()
                worker.join()
        raise
    try:
        yield WorkerGroup(workers, pipes, watching)
    finally:
        watching.kill()
        watching.stop()
        for pipe in pipes:
            pipe.close()


def retry_with_more_descriptors(call: Callable[[], Any]) -> Any:
    """Repeat a call with a growing limit of file descriptors until it succeeds.

    Return its result. Assert that failed calls leave no descriptor or process.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in itertools.count():
        gc.collect()
        before = set(os.listdir("/proc/self/fd")), set(psutil.Process().children(recursive=True))
        highest = max(map(int, before[0]))
        fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 2 - len(before[0]))]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + more, limits[1]))
        try:
            result = call()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        else:
            assert more > 3
            return result
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for filler in fillers:
                os.close(filler)
        assert set(os.listdir("/proc/self/fd")) == before[0]
        assert set(psutil.Process().children(recursive=True)) <= before[1]
