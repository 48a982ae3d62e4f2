"""What no copy can have is refused by its path, with the line to write; what builds nothing is refused as well."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError, WorkerError
from rl_ext_core.factory import as_factory
from tests.core.factory.copying import EITHER, REFUSED, SAID, Case, Held, Line, Scaled, use


def _file() -> Any:
    return Path(__file__).open(encoding="utf-8")


def _counting() -> Iterator[int]:
    yield 1


def _locked() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _mapped() -> Any:
    with tempfile.NamedTemporaryFile() as file:
        np.arange(6.0).tofile(file.name)
        return np.memmap(file.name, np.float64, "r+", shape=(2, 3))


def _caught() -> Any:
    try:
        raise KeyError(3)
    except KeyError as error:
        return error


def _pointer() -> Any:
    return ctypes.pointer((ctypes.c_double * 4)(1, 2, 3, 4))


# What an environment may hold and no other process can have: what may become of it if it was put there later.
THINGS: dict[str, tuple[set[str], Callable[[], Any]]] = {
    "file": (REFUSED, _file),
    "socket": (REFUSED, socket.socket),
    "database": (REFUSED, lambda: sqlite3.connect(":memory:")),
    "pipe": (REFUSED, lambda: multiprocessing.Pipe()[0]),
    "shared number": (REFUSED, lambda: multiprocessing.Value("i", 0)),
    "shared memory": (REFUSED, lambda: shared_memory.SharedMemory(create=True, size=8)),
    "folder": (REFUSED, tempfile.TemporaryDirectory),
    "finalizer": (REFUSED, lambda: weakref.finalize(_file, print)),
    "thread": (REFUSED, lambda: threading.Thread(target=print)),
    "generator": (REFUSED, _counting),
    "library": (REFUSED, lambda: ctypes.CDLL(None)),
    "pointer": (REFUSED, _pointer),
    "compressor": (REFUSED, zlib.compressobj),
    "mapped file": (REFUSED, _mapped),
    "view of memory": (REFUSED, lambda: memoryview(bytearray(8))),
    "dead proxy": (EITHER, lambda: weakref.proxy(Scaled(Line()))),
    "error with its frames": (EITHER, _caught),
    "lock": (EITHER, threading.Lock),
    "locked lock": (EITHER, _locked),
}


def _end(thing: Any) -> None:
    for name in ("close", "cleanup", "shutdown", "detach", "wait", "unlink"):
        if hasattr(type(thing), name):
            with contextlib.suppress(Exception):
                getattr(thing, name)()


@pytest.mark.sample(quick=6)
@pytest.mark.parametrize("name", THINGS)
def test_thing_of_this_process_that_was_put_into_an_environment_is_refused_by_path(name: str, judge: Any) -> None:
    allowed, make = THINGS[name]
    env = Scaled(Line())
    use(env)
    env.unwrapped.thing = make()  # type: ignore[attr-defined]
    try:
        assert judge(env, "thing") in allowed
    finally:
        _end(env.unwrapped.thing)  # type: ignore[attr-defined]


def _number(thing: Any) -> float:
    return float(thing is not None)


CASES = {name: Case(EITHER, make, _number) for name, (_, make) in THINGS.items()}


@pytest.mark.sample(quick=3)
@pytest.mark.parametrize("name", CASES)
def test_thing_that_the_constructor_makes_is_made_anew_or_refused_by_path(name: str, judge: Any) -> None:
    env = Held(__name__, name)
    try:
        assert judge(env, "held") in SAID
    finally:
        _end(env.held)


def test_refusal_names_path_and_the_line_to_write() -> None:
    env = Scaled(Line(), 3.0)
    env.unwrapped.engine = zlib.compressobj()  # type: ignore[attr-defined]
    with pytest.raises(NotCopyableError) as caught:
        as_factory(env)
    assert ".engine" in str(caught.value)
    assert "zlib.Compress" in str(caught.value)
    assert "lambda: Scaled(Line(" in str(caught.value)


# Pickles of their own, recorded constructors, libraries in C.


class Easy(Line, EzPickle):
    """One whose own pickle calls the constructor."""

    def __init__(self, gain: float = 1.0) -> None:
        EzPickle.__init__(self, gain)
        super().__init__(gain)


class Forgetful(Line):
    """One whose own pickle leaves something out."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gain": 1.0}


@pytest.mark.parametrize("cls", [Easy, Forgetful])
@pytest.mark.parametrize("change", [{}, {"gain": 6.0}, {"note": 3}])
def test_own_pickle_never_loses_a_change(cls: Any, change: dict[str, Any], judge: Any) -> None:
    env = cls(gain=2.0)
    use(env)
    for name, value in change.items():
        setattr(env, name, value)
    assert judge(env, "gain" if cls is Forgetful else "note") in EITHER
    if cls is Easy:
        assert as_factory(env)().gain == env.gain


PLANT = """
import ctypes, os, numpy as np, gymnasium as gym
_lib = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libsim.so"))
_lib.sim_get.restype = ctypes.c_double
_lib.sim_set.argtypes = [ctypes.c_int, ctypes.c_double]
class Plant(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float64), gym.spaces.Discrete(2)
    def __init__(self, level=1.0):
        self.handle = _lib.sim_new()
        _lib.sim_set(self.handle, level)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([_lib.sim_get(self.handle)]), {}
    def step(self, action):
        return np.array([_lib.sim_get(self.handle)]), 1.0, False, False, {}
"""
SIMULATOR = """
static double level[64]; static int count = 0;
int sim_new(void) { level[count] = 1.0; return count++; }
void sim_set(int h, double x) { level[h] = x; }
double sim_get(int h) { return level[h]; }
"""


@pytest.mark.sample(quick=1)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler of C")
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_library_in_c_whose_state_no_copy_has_is_named(
    first: bool, changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sim.c").write_text(SIMULATOR)
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libsim.so"), str(tmp_path / "sim.c")]
    subprocess.run(command, check=True)
    name = f"plant_{first:d}{changed:d}"
    (tmp_path / f"{name}.py").write_text(PLANT)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    if not first:
        module.Plant(5.0)
    env = module.Plant(100.0)
    if changed:  # in the library alone
        module._lib.sim_set(env.handle, 7.0)
    with contextlib.suppress(NotCopyableError):
        as_factory(env)
        assert any("_lib" in record.getMessage() for record in caplog.records)


# What building raises.


class Unmakeable(Line):
    """One of which no copy can be made by a pickle."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ConnectionRefusedError("the license is taken")

    def __init__(self, gain: float = 1.0) -> None:
        if os.environ.get("LICENSE_IN") not in (None, str(os.getpid())):
            raise ConnectionRefusedError("the license is taken")
        super().__init__(gain)


def test_what_building_a_copy_raises_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LICENSE_IN", str(os.getpid()))
    with pytest.raises((WorkerError, NotCopyableError), match="the license is taken"):
        as_factory(Unmakeable())


class Crashing(Line):
    """One that takes its process down."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_crash_of_a_copy_is_named() -> None:
    with pytest.raises(WorkerError, match="was killed by SIGSEGV") as caught:
        as_factory(Crashing())
    assert caught.value.kind == "signal"
    assert "in step" in caught.value.traceback


class Raising(Line):
    """One that raises when it is stepped."""

    def step(self, action: Any) -> Any:
        raise ArithmeticError("no move here")


def test_environment_that_raises_in_its_steps_is_copied_and_raises_too(judge: Any) -> None:
    env = Raising()
    env.gain = 4.0
    assert judge(env, "gain") == "copied"
    assert as_factory(env)().gain == 4.0


@pytest.mark.parametrize("kind", ["AsyncVectorEnv", pytest.param("SubprocVecEnv", marks=pytest.mark.slow)])
def test_state_of_environments_in_other_processes_is_said_to_be_unseen(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "AsyncVectorEnv":
        options = {"context": "spawn"}
        env = gym.make_vec("CartPole-v1", 1, vectorization_mode="async", vector_kwargs=options)
    else:
        vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
        env = vec_env.SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 2, start_method="forkserver")
    try:
        as_factory(env)  # which makes processes of its own
        assert any("process" in record.getMessage() for record in caplog.records)
    finally:
        env.close()


# Sources that are not environments.


@pytest.mark.parametrize("source", [5, None, object(), ["CartPole-v1"], {"id": "CartPole-v1"}, os])
def test_source_that_builds_nothing_is_refused(source: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"as_factory\(lambda: MyEnv\(\)\)"):
        as_factory(source)


@pytest.mark.parametrize("name", ["NoSuch-v0", "no_such_module:NoSuch-v0", "Airstriker-Genesis-v9", ""])
def test_unknown_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"does not know the id|no_such_module"):
        as_factory(name)


def test_unknown_start_method_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'thread'"):
        as_factory(Line(), start_method="thread")


def test_function_over_a_thing_of_this_process_is_refused() -> None:
    engine = zlib.compressobj()
    with pytest.raises(NotCopyableError, match=r"(?s)zlib.*inside of the function"):
        as_factory(lambda: (engine, Line()))
