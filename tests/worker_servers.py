"""A fork server of workers that imports the libraries of the tests, once instead of in every worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from rl_ext_core.factory.compare import WORKER_MODULES
from rl_ext_core.processes import server

# Modules of tests import these, and workers import modules of tests. None reads device variables at its import.
_LIBRARIES = (
    *("torch", "pytest", "hypothesis", "psutil", "gymnasium.vector", "stable_baselines3"),
    *("torchrl.envs", "torchrl.data", "torchrl_ext"),
)
_start_process = server.start_process


@contextmanager
def warm_server() -> Iterator[None]:
    """Start workers from a server that has imported the libraries that this process has imported.

    This server is never replaced: it imports nothing that its users ask for.
    """
    libraries = [name for name in _LIBRARIES if name in sys.modules]

    def start_process(
        modules: Sequence[str], variables: Mapping[str, str | None], descriptors: Sequence[int]
    ) -> object:
        return _start_process([*WORKER_MODULES, *libraries], {}, descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "start_process", start_process)
        yield
        server.stop_server()  # otherwise it runs until the interpreter ends


@contextmanager
def cold_server() -> Iterator[None]:
    """Start workers as outside of tests: from servers that import what their users ask for.

    The warm server continues to run, for later tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_server", None)
        patch.setattr(server, "start_process", _start_process)
        yield
        server.stop_server()
