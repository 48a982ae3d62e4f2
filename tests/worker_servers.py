"""Fork servers of workers, which import the libraries of the tests once instead of in every worker."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from rl_ext_core.processes import server

# Modules of tests import these, and workers import modules of tests. Only those of the present session are imported.
_LIBRARIES = ("torch", "pytest", "hypothesis", "gymnasium.vector", "torchrl.envs", "torchrl.data", "stable_baselines3")
_ColdServer = server._Server


class _WarmServer(_ColdServer):
    """Fork server that has also imported the libraries of the present tests."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
        super().__init__([*modules, *_libraries()], variables)


def _libraries() -> list[str]:
    return [name for name in _LIBRARIES if name in sys.modules]


@contextmanager
def warm_servers() -> Iterator[None]:
    """Let new servers import the libraries, multiprocessing's own included."""
    multiprocessing.set_forkserver_preload(["__main__", *_libraries()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_Server", _WarmServer)
        yield
        server.stop_server()  # otherwise it runs until the interpreter ends


@contextmanager
def cold_server() -> Iterator[None]:
    """Start workers from a new server that has imported only what its user asks for."""
    server.stop_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_Server", _ColdServer)
        yield
        server.stop_server()
