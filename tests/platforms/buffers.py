"""Tests of the public buffers, for any operating system and without pytest.

``test_stand_ins.py`` runs this script on imitations of other systems, ``scripts/windows_under_wine.sh`` on Windows.
"""

from __future__ import annotations

import contextlib
import gc
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

from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames import FrameStore, Observation
from rl_ext_core.frames.shared_memory import MemoryFile, ProcessLock

CAPACITY, N_ENVS, SHAPE = 60, 2, (20, 20, 4)
ADDED = 150
ROW = np.dtype([("reward", np.float32, (N_ENVS,))])


def frames(number: int) -> np.ndarray:
    """Return one frame per environment; few pixels change between consecutive numbers."""
    frame = np.zeros((N_ENVS, 20, 20), np.uint8)
    for env in range(N_ENVS):
        frame[env, number % 20, (3 * number + env) % 20] = 200 + env
        frame[env, :3] = 7 * env
    return frame


def observations_at(number: int) -> np.ndarray:
    """Return the last four frames of each environment as an observation."""
    return np.stack([frames(max(number + i, 0)) for i in range(-3, 1)], axis=-1)


def append_transitions(store: FrameStore, start: int, stop: int) -> None:
    """Append transitions and their rewards to a store."""
    row = np.zeros(1, ROW)
    for number in range(start, stop):
        row["reward"] = number
        store.append(observations_at(number), observations_at(number + 1), row)


def check_transitions(store: FrameStore, start: int, stop: int) -> None:
    """Assert that a store contains these transitions."""
    rows = np.arange(CAPACITY, dtype=np.int64)
    outs = [np.empty((CAPACITY, *SHAPE), np.uint8) for _ in range(2)]
    for env in range(N_ENVS):
        store.get(rows, np.full(CAPACITY, env, dtype=np.int64), *outs)
        for number in range(max(start, stop - CAPACITY), stop):
            for out, expected in zip(outs, (observations_at(number), observations_at(number + 1)), strict=True):
                assert (out[number % CAPACITY] == expected[env]).all(), (env, number)


def make_store(codec: str = "patch", **options: Any) -> FrameStore:
    """Create an adaptive store, in memory by default."""
    observation = Observation(SHAPE, np.uint8, codec)
    return FrameStore(CAPACITY, N_ENVS, observation, row_dtype=ROW, **options)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and delete it after the ``with`` block."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)  # on Windows, it fails if a file is still in use


def expect_error(kind: type[Exception], words: str, function: Callable[[], Any]) -> None:
    """Assert that a call raises this kind of exception with these words."""
    text = None
    try:
        function()
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__}"
    assert words in text, text


def test_store_in_memory_returns_transitions() -> None:
    for codec in ("patch", "raw"):
        store = make_store(codec)
        append_transitions(store, 0, ADDED)
        check_transitions(store, 0, ADDED)
        store.clear()
        append_transitions(store, 0, 10)
        check_transitions(store, 0, 10)


def test_pickle_is_loaded_and_damage_detected() -> None:
    store = make_store()
    append_transitions(store, 0, ADDED)
    data = pickle.dumps(store, protocol=5)
    loaded = pickle.loads(data)
    check_transitions(loaded, 0, ADDED)
    append_transitions(loaded, ADDED, ADDED + 20)
    check_transitions(loaded, 0, ADDED + 20)
    damaged = bytearray(data)
    damaged[len(damaged) // 2] ^= 1
    expect_error(CorruptFileError, "damaged", lambda: pickle.loads(bytes(damaged)))


def _use_folder(path: Path, codec: str) -> None:
    """Create, fill and close a store in a folder, and check its errors."""
    store = make_store(codec, storage_dir=path, resume=True)
    append_transitions(store, 0, ADDED)
    check_transitions(store, 0, ADDED)
    expect_error(
        StorageError, f"in use by this process, {os.getpid()}", lambda: make_store(codec, storage_dir=path, resume=True)
    )
    store.close()
    expect_error(StorageError, "was closed", lambda: check_transitions(store, 0, ADDED))


def test_folder_is_reopened_with_all_transitions() -> None:
    with temporary_folder() as path:
        for codec in ("patch", "raw"):
            _use_folder(path / codec, codec)
            store = make_store(codec, storage_dir=path / codec, resume=True)
            assert store.recovered is not None
            assert store.recovered.kept == CAPACITY
            check_transitions(store, 0, ADDED)
            assert (store.rows["reward"].max(axis=1) >= ADDED - CAPACITY).all()
            append_transitions(store, ADDED, ADDED + 7)
            check_transitions(store, 0, ADDED + 7)
            store.close()
            del store


def test_damaged_folder_is_refused() -> None:
    with temporary_folder() as path:
        store = make_store("patch", storage_dir=path / "a", resume=True)
        append_transitions(store, 0, ADDED)
        store.clear()
        append_transitions(store, 0, 20)
        check_transitions(store, 0, 20)
        store.close()
        del store
        segment = max((path / "a").glob("log-*/*.log"))
        whole = bytearray(segment.read_bytes())
        whole[len(whole.rstrip(b"\0")) * 9 // 10] ^= 1  # Windows keeps the unused end of a file
        segment.write_bytes(whole)
        expect_error(CorruptFileError, "from a copy", lambda: make_store("patch", storage_dir=path / "a", resume=True))


def _add_until_killed(path: Path) -> None:
    """Fill a store in a folder, then wait until the process is killed."""
    store = make_store("patch", storage_dir=path, resume=True)
    append_transitions(store, 0, ADDED)
    (path.parent / "added").touch()
    while True:
        time.sleep(1)


def _kill_when_file_exists(path: Path, process: Any) -> None:
    """Wait for a file, then kill a process."""
    for _ in range(6000):
        if path.exists():
            break
        assert process.is_alive()
        time.sleep(0.05)
    process.kill()
    process.join()


def test_transitions_of_a_killed_process_are_recovered() -> None:
    with temporary_folder() as path:
        process = multiprocessing.get_context("spawn").Process(target=_add_until_killed, args=(path / "a",))
        process.start()
        for _ in range(6000):
            if (path / "added").exists():
                break
            time.sleep(0.05)
        expect_error(
            StorageError,
            f"in use by another process, {process.pid}",
            lambda: make_store("patch", storage_dir=path / "a", resume=True),
        )
        _kill_when_file_exists(path / "added", process)
        store = make_store("patch", storage_dir=path / "a", resume=True)
        assert store.recovered is not None
        assert store.recovered.kept >= CAPACITY - 1
        check_transitions(store, ADDED - CAPACITY + 1, ADDED - 1)
        store.close()
        del store


def _increment_under_lock(lock: ProcessLock, memory: MemoryFile, times: int) -> None:
    """Increment a number in shared memory several times, each time under a lock."""
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
        _kill_when_file_exists(path / "held", holder)
        with lock:
            assert dead == [holder.pid]


def test_compressed_replay_buffer_equals_sb3() -> None:
    try:
        import torch  # noqa: F401
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        from sb3_ext import CompressedReplayBuffer
    except ImportError as error:  # SB3 is not installed under Wine
        print(f"not run: {error}")
        return
    space = spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(4)
    buffers = [kind(CAPACITY, *space, n_envs=N_ENVS, device="cpu") for kind in (ReplayBuffer, CompressedReplayBuffer)]
    for number in range(ADDED):
        done = np.array([number % 30 == 29, number % 25 == 24])
        for buffer in buffers:
            buffer.add(
                observations_at(number),
                observations_at(number + 1),
                np.full(N_ENVS, number % 4),
                np.ones(N_ENVS),
                done,
                [{}] * N_ENVS,
            )
    theirs, ours = ([] for _ in range(2))
    for buffer, seen in zip(buffers, (theirs, ours), strict=True):
        np.random.seed(0)
        seen.extend(buffer.sample(64))
    assert all((a == b).all() for a, b in zip(theirs, ours, strict=True) if a is not None)


def test_frame_storage_in_a_folder_can_be_reopened() -> None:
    try:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        from torchrl_ext import FrameStorage
    except (ImportError, OSError) as error:  # under Wine, torch may fail to load a DLL
        print(f"not run: {error}")
        return

    def fill(storage: Any) -> Any:
        """Fill a storage by a replay buffer, and return it."""
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        for start in (0, 30):
            pixels = np.stack([observations_at(number)[0] for number in range(start, start + 30)])
            data = {"pixels": torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), "reward": torch.arange(30)}
            buffer.extend(TensorDict(data, [30]))
        return storage

    every = torch.arange(50)
    expected = fill(LazyTensorStorage(50)).get(every)
    with temporary_folder() as path:
        storage = fill(FrameStorage(50, storage_dir=path / "kept", resume=True))
        expect_error(StorageError, "in use", lambda: FrameStorage(50, storage_dir=path / "kept", resume=True))
        storage.close()
        del storage  # its mappings keep the files in use on Windows
        opened = FrameStorage(50, storage_dir=path / "kept", resume=True)
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
