"""Tests of the public buffers, for any operating system and without pytest.

``test_stand_ins.py`` runs this script on imitations of other systems, ``scripts/windows_under_wine.sh`` on Windows.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import cli
from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames import Observation
from rl_ext_core.frames.shared_memory import MemoryFile, ProcessLock
from tests.core.frames.numbered import N_ENVS, OBSERVATIONS, add, check, compute_observations, open_store

CAPACITY, ADDED = 60, 150
# Observations of both codecs.
KINDS = (OBSERVATIONS, {"exact": Observation((3, 9, 8), np.uint8, "raw", 3)})


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)  # on Windows, it fails if a file is still in use


def expect_error(kind: type[Exception], words: str, function: Callable[[], Any]) -> None:
    text = None
    try:
        function()
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__}"
    assert words in text, text


def is_missing(name: str) -> bool:
    """Return whether a module cannot be imported, and print its error."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:  # torch raises OSError for a DLL that fails to load
        print(f"not run: {name}: {error}")
        return True
    return False


def test_help_is_printed() -> None:
    """All commands, and workers, are imported. On an imitation, what it hides is missing."""
    importlib.import_module("rl_ext_core.processes")
    system = os.environ.get("RL_EXT_STAND_IN")
    for name in ("fcntl", "resource") if system == "windows" else ():
        with contextlib.suppress(ImportError):
            __import__(name, globals())
            raise AssertionError(f"{name} is there")
    assert system is None or not hasattr(os, "memfd_create")
    with contextlib.suppress(SystemExit):
        cli.main(["--help"])


def test_pickle_is_loaded_and_damage_detected() -> None:
    for observations in KINDS:
        store = open_store(None, CAPACITY, observations)
        add(store, *range(ADDED))
        data = pickle.dumps(store, protocol=5)
        store.clear()
        add(store, *range(10))
        assert check(store) == 9
        loaded = pickle.loads(data)
        add(loaded, *range(ADDED, ADDED + 20))
        assert check(loaded) == ADDED + 19
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1
        expect_error(CorruptFileError, "damaged", lambda data=bytes(damaged): pickle.loads(data))


def _use_folder(path: Path, observations: Any) -> None:
    """Create, fill and close a store in a folder, and check its errors."""
    store = open_store(path, CAPACITY, observations)
    add(store, *range(ADDED))
    expect_error(
        StorageError, f"in use by this process, {os.getpid()}", lambda: open_store(path, CAPACITY, observations)
    )
    store.close()
    expect_error(StorageError, "was closed", lambda: check(store))


def test_folder_is_reopened_with_all_transitions() -> None:
    with temporary_folder() as path:
        for number, observations in enumerate(KINDS):
            _use_folder(path / str(number), observations)
            store = open_store(path / str(number), CAPACITY, observations)
            assert store.recovered.kept == CAPACITY
            assert check(store) == ADDED - 1
            add(store, *range(ADDED, ADDED + 7))
            assert check(store) == ADDED + 6
            store.close()
            del store


def test_damaged_folder_is_refused() -> None:
    with temporary_folder() as path:
        store = open_store(path / "a", CAPACITY)
        add(store, *range(ADDED))
        store.clear()
        add(store, *range(20))
        store.close()
        del store
        segment = max((path / "a").glob("log-*/*.log"))
        whole = bytearray(segment.read_bytes())
        whole[len(whole.rstrip(b"\0")) * 9 // 10] ^= 1  # Windows keeps the unused end of a file
        segment.write_bytes(whole)
        expect_error(CorruptFileError, "from a copy", lambda: open_store(path / "a", CAPACITY))


def _add_until_killed(path: Path) -> None:
    store = open_store(path, CAPACITY)
    add(store, *range(ADDED))
    (path.parent / "added").touch()
    while True:
        time.sleep(1)


def _wait_for_file(path: Path, process: Any) -> None:
    for _ in range(6000):
        if path.exists():
            break
        assert process.is_alive()
        time.sleep(0.05)


def test_transitions_of_a_killed_process_are_recovered() -> None:
    with temporary_folder() as path:
        process = multiprocessing.get_context("spawn").Process(target=_add_until_killed, args=(path / "a",))
        process.start()
        _wait_for_file(path / "added", process)
        expect_error(
            StorageError, f"in use by another process, {process.pid}", lambda: open_store(path / "a", CAPACITY)
        )
        process.kill()
        process.join()
        store = open_store(path / "a", CAPACITY)
        assert store.recovered.kept >= CAPACITY - 1
        assert check(store) >= ADDED - 2
        store.close()
        del store


def _increment_under_lock(lock: ProcessLock, memory: MemoryFile, times: int) -> None:
    (number,) = memory.arrays(((1,), np.int64))
    for _ in range(times):
        with lock:
            seen = int(number[0])
            time.sleep(0)
            number[0] = seen + 1


def _hold_lock_until_killed(lock: ProcessLock, path: Path) -> None:
    """Hold a lock until the process is killed. The file at ``path`` shows that it is held."""
    with lock:
        path.touch()
        time.sleep(600)


def test_processes_share_memory_and_a_lock() -> None:
    context, lock, memory = multiprocessing.get_context("spawn"), ProcessLock(), MemoryFile(1 << 20)
    (number,) = memory.arrays(((1,), np.int64))
    process = context.Process(target=_increment_under_lock, args=(lock, memory, 500))
    process.start()
    _increment_under_lock(lock, memory, 500)
    process.join()
    assert number[0] == 1000
    with temporary_folder() as path:
        holder = context.Process(target=_hold_lock_until_killed, args=(lock, path / "held"))
        holder.start()
        dead: list[int] = []
        lock.recover = dead.append
        _wait_for_file(path / "held", holder)
        holder.kill()
        holder.join()
        with lock:
            assert dead == [holder.pid]


def test_compressed_replay_buffer_equals_sb3() -> None:
    if is_missing("sb3_ext"):
        return
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    from sb3_ext import CompressedReplayBuffer

    space = spaces.Box(0, 255, (3, 9, 8), np.uint8), spaces.Discrete(4)
    buffers = [kind(CAPACITY, *space, n_envs=N_ENVS, device="cpu") for kind in (ReplayBuffer, CompressedReplayBuffer)]
    for number in range(ADDED):
        done = np.array([number % 30 == 29, number % 25 == 24])
        obs, next_obs = (compute_observations(number + side)["exact"] for side in range(2))
        for buffer in buffers:
            buffer.add(obs, next_obs, np.full(N_ENVS, number % 4), np.ones(N_ENVS), done, [{}] * N_ENVS)
    found = []
    for buffer in buffers:
        np.random.seed(0)
        found.append(buffer.sample(64))
    assert all((a == b).all() for a, b in zip(*found, strict=True) if a is not None)


def test_frame_storage_in_a_folder_can_be_reopened() -> None:
    if is_missing("torchrl_ext"):
        return
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    from torchrl_ext import FrameStorage

    def fill(storage: Any) -> Any:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        for start in (0, 30):
            pixels = np.stack([compute_observations(number)["exact"][0] for number in range(start, start + 30)])
            data = {"pixels": torch.from_numpy(pixels), "reward": torch.arange(30)}
            buffer.extend(TensorDict(data, [30]))
        return storage

    every = torch.arange(50)
    expected = fill(LazyTensorStorage(50)).get(every)
    with temporary_folder() as path:
        options = {"storage_dir": path / "kept", "resume": True, "pixels": ["pixels"]}
        storage = fill(FrameStorage(50, **options))
        expect_error(StorageError, "in use", lambda: FrameStorage(50, **options))
        storage.close()
        del storage  # its mappings keep the files in use on Windows
        opened = FrameStorage(50, **options)
        assert (opened.get(every) == expected).all()
        opened.close()
        del opened
        gc.collect()  # TorchRL's buffers are in reference cycles


def main(tests: dict[str, Any]) -> int:
    """Run the tests of a module without pytest: all, or those named on the command line.

    :param tests: The module's globals
    :return: Number of failed tests
    """
    failed = 0
    for name, test in list(tests.items()):
        if name.startswith("test_") and (name in sys.argv or len(sys.argv) == 1):
            start = time.perf_counter()
            try:
                test()
            except Exception as error:
                failed += 1
                print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            else:
                print(f"ok     {name} {time.perf_counter() - start:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(globals()))
