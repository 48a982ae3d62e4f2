from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError, WorkerError
from rl_ext_core.factory import as_factory
from tests.core.factory.copying import EITHER, NOT_SILENT, REFUSED, Case, HoldingEnv, Line, Scaled, rollout


def _make_locked_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _make_memmap() -> Any:
    with tempfile.NamedTemporaryFile() as file:
        np.arange(6.0).tofile(file.name)
        return np.memmap(file.name, np.float64, "r+", shape=(2, 3))


# Objects that belong to one process, and the allowed outcomes if the user added them to an environment.
THINGS: dict[str, tuple[set[str], Callable[[], Any]]] = {
    "file": (REFUSED, lambda: Path(__file__).open(encoding="utf-8")),  # noqa: SIM115 (it is closed below)
    "socket": (REFUSED, socket.socket),
    "shared number": (REFUSED, lambda: multiprocessing.Value("i", 0)),
    "shared memory": (REFUSED, lambda: shared_memory.SharedMemory(create=True, size=8)),
    "finalizer": (REFUSED, lambda: weakref.finalize(_make_locked_lock, print)),
    "thread": (REFUSED, lambda: threading.Thread(target=print)),
    "generator": (REFUSED, lambda: (part for part in ())),
    "pointer": (REFUSED, lambda: ctypes.pointer(ctypes.c_double(1))),
    "compressor": (REFUSED, zlib.compressobj),
    "mapped file": (REFUSED, _make_memmap),
    "dead proxy": (EITHER, lambda: weakref.proxy(Scaled(Line()))),
    "lock": (EITHER, threading.Lock),
    "locked lock": (EITHER, _make_locked_lock),
}


def _release(thing: Any) -> None:
    for name in ("close", "cleanup", "shutdown", "detach", "wait", "unlink"):
        if hasattr(type(thing), name):
            with contextlib.suppress(Exception):
                getattr(thing, name)()


@pytest.mark.sample(quick=6)
@pytest.mark.parametrize("name", THINGS)
def test_added_object_of_this_process_is_rejected_by_its_path(name: str, copy_outcome: Any) -> None:
    allowed, make = THINGS[name]
    env = Scaled(Line())
    rollout(env)
    env.unwrapped.thing = make()  # type: ignore[attr-defined]
    try:
        assert copy_outcome(env, "thing") in allowed
    finally:
        _release(env.unwrapped.thing)  # type: ignore[attr-defined]


CASES = {name: Case(EITHER, make, lambda thing: thing is not None) for name, (_, make) in THINGS.items()}


@pytest.mark.sample(quick=3)
@pytest.mark.parametrize("name", CASES)
def test_object_that_the_constructor_creates_is_created_again_or_rejected(name: str, copy_outcome: Any) -> None:
    env = HoldingEnv(__name__, name)
    try:
        assert copy_outcome(env, "held") in NOT_SILENT
    finally:
        _release(env.held)


def test_error_names_the_path_and_the_code_to_write() -> None:
    env = Scaled(Line(), 3.0)
    env.unwrapped.engine = zlib.compressobj()  # type: ignore[attr-defined]
    with pytest.raises(NotCopyableError) as caught:
        as_factory(env)
    assert ".engine" in str(caught.value)
    assert "zlib.Compress" in str(caught.value)
    assert "lambda: Scaled(Line(" in str(caught.value)


# -- Classes with their own pickles, libraries in C.


class Easy(Line, EzPickle):
    def __init__(self, gain: float = 1.0) -> None:
        EzPickle.__init__(self, gain)
        super().__init__(gain)


class Forgetful(Line):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gain": 1.0}


@pytest.mark.parametrize("cls", [Easy, Forgetful])
@pytest.mark.parametrize("change", [{}, {"gain": 6.0}, {"note": 3}])
def test_own_pickle_never_loses_a_change(cls: Any, change: dict[str, Any], copy_outcome: Any) -> None:
    env = cls(gain=2.0)
    rollout(env)
    for name, value in change.items():
        setattr(env, name, value)
    assert copy_outcome(env, "gain" if cls is Forgetful else "note") in EITHER
    if cls is Easy:
        assert as_factory(env)().gain == env.gain


LIBRARY = ctypes.CDLL(None)


class Plant(Line):
    def __init__(self) -> None:
        super().__init__()
        self.handle = LIBRARY.dup(1)


@pytest.mark.parametrize("others", [0, 3])
def test_c_library_whose_state_cannot_be_copied_is_named(others: int, caplog: pytest.LogCaptureFixture) -> None:
    *before, env = [Plant() for _ in range(others + 1)]
    with contextlib.suppress(NotCopyableError):
        as_factory(env)
        assert any("LIBRARY" in record.getMessage() for record in caplog.records)
    for one in [*before, env]:
        os.close(one.handle)


TABLE = {"k": 1.0}


class Unrecorded:
    """Environment of an unknown library, which can only be pickled. It refers to a global of its module."""

    def __init__(self) -> None:
        self.table = TABLE

    def reset(self) -> float:
        return self.table["k"]

    step = reset


def test_pickle_that_would_separate_an_object_from_its_module_is_rejected() -> None:
    with pytest.raises(NotCopyableError, match=r"\.table is an object of its module or class only in the instance"):
        as_factory(Unrecorded())


# -- Environments that raise or crash.


class Unmakeable(Line):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ConnectionRefusedError("the license is taken")

    def __init__(self, gain: float = 1.0) -> None:
        if os.environ.get("LICENSE_IN") not in (None, str(os.getpid())):
            raise ConnectionRefusedError("the license is taken")
        super().__init__(gain)


def test_exception_of_a_constructor_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LICENSE_IN", str(os.getpid()))
    with pytest.raises((WorkerError, NotCopyableError), match="the license is taken"):
        as_factory(Unmakeable())


class Crashing(Line):
    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_crash_of_a_copy_raises_worker_error() -> None:
    env = Crashing()
    as_factory(env)  # An unchanged instance is not stepped.
    env.gain = 4.0
    with pytest.raises(WorkerError, match="was killed by SIGSEGV") as caught:
        as_factory(env)
    assert caught.value.kind == "signal"
    assert "in step" in caught.value.traceback


_connected: list[int] = []


class Client(Line):
    """Environment with the lowest free number in its process, as clients of PyBullet have."""

    def __init__(self) -> None:
        super().__init__()
        self.client = min(set(range(9)) - {*_connected})
        _connected.append(self.client)

    def reset(self, **options: Any) -> Any:
        if self.client not in _connected:
            raise RuntimeError(f"not connected: {self.client}")
        return super().reset(**options)

    def close(self) -> None:
        _connected.remove(self.client)


def test_handle_that_a_copy_cannot_use_is_rejected() -> None:
    first, second = Client(), Client()
    with pytest.raises(
        NotCopyableError, match=r"(?s)on which \.client was set raises RuntimeError.*lambda: Client\(\)"
    ):
        as_factory(second)
    as_factory(first)
    second.close()
    first.close()


class Parameters(ctypes.Structure):
    _fields_ = (("gain", ctypes.c_double),)


class Addressed(Line):
    """Environment that gives its simulator the address of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = Parameters(1.0)
        self._address = ctypes.addressof(self.parameters)

    def gain_at_address(self) -> float:
        return Parameters.from_address(self._address).gain


def test_structure_is_changed_in_place_if_a_library_may_use_its_address() -> None:
    env = Addressed()
    env.parameters.gain = 9.0
    assert as_factory(env)().gain_at_address() == 9.0


def test_state_of_environments_in_other_processes_is_reported_as_unknown(caplog: pytest.LogCaptureFixture) -> None:
    env = gym.make_vec("CartPole-v1", 1, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    try:
        as_factory(env)  # Its copies start their own processes.
        assert any("process" in record.getMessage() for record in caplog.records)
    finally:
        env.close()


@pytest.mark.parametrize("source", [5, None, object(), ["CartPole-v1"], {"id": "CartPole-v1"}, os])
def test_as_factory_rejects_objects_that_are_not_environments_or_factories(source: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"as_factory\(lambda: MyEnv\(\)\)"):
        as_factory(source)


@pytest.mark.parametrize("name", ["NoSuch-v0", "no_such_module:NoSuch-v0", "Airstriker-Genesis-v9", ""])
def test_unknown_id_is_rejected(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"does not know the id|no_such_module"):
        as_factory(name)


def test_function_that_refers_to_an_object_of_this_process_is_rejected() -> None:
    engine = zlib.compressobj()
    with pytest.raises(NotCopyableError, match=r"(?s)zlib.*inside of the function"):
        as_factory(lambda: (engine, Line()))
