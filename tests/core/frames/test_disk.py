"""Stores in folders: equal to stores in memory, opened again, shared by processes, and wrong folders."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames import FrameStore, journal, salvage
from tests.core.frames.disk_helpers import LAYOUT, N_ENVS, add, check_store, open_store, transition

KINDS = ("patch", "raw")


def read_all_rows(store: Any) -> list[np.ndarray]:
    """Return the observations and next observations of all rows and environments."""
    rows, envs = np.repeat(np.arange(store.capacity), N_ENVS), np.tile(np.arange(N_ENVS), store.capacity)
    outs = [np.empty((len(rows), *LAYOUT.shape), np.uint8) for _ in range(2)]
    store.get(rows, envs, *outs)
    return outs


class FolderMatchesMemory(RuleBasedStateMachine):
    """Hypothesis test: a store in a folder equals one in memory after any sequence of calls."""

    @initialize(kind=st.sampled_from(KINDS), capacity=st.sampled_from([1, 3, 17, 40, 200]), noise=st.booleans())
    def start(self, kind: str, capacity: int, noise: bool) -> None:
        """Create an empty store in a folder, and one in memory."""
        self.temporary = tempfile.TemporaryDirectory()
        self.folder, self.number, self.kind, self.capacity = Path(self.temporary.name) / "a", 0, kind, capacity
        self.noise = noise
        self.disk, *self.rows = open_store(self.folder, kind, capacity)
        self.ram = FrameStore(capacity, N_ENVS, LAYOUT, codec=kind)
        self.numbers, self.rewards = self.ram.rows("number", (), np.int64), self.ram.rows("reward", (N_ENVS,), "f4")
        self.unsure = 0  # number of transitions that would be lost if the process were killed now

    def _next_transition(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute the next transition: noise, or the one with the next number."""
        if self.noise:
            noise = np.random.default_rng(self.number).integers(256, size=(2, N_ENVS, *LAYOUT.shape), dtype=np.uint8)
            return noise[0], noise[1]
        return transition(self.number)

    @rule(count=st.integers(1, 60))
    def append(self, count: int) -> None:
        """Append transitions and their row values to both stores."""
        for _ in range(count):
            row, pair = self.disk.position, self._next_transition()
            for store, (numbers, rewards) in ((self.disk, self.rows), (self.ram, (self.numbers, self.rewards))):
                store.append(*pair)
                numbers[row], rewards[row] = self.number, self.number * 0.5
            self.number += 1
            self.unsure = 1

    @rule(count=st.integers(1, 40))
    def append_equal_observations(self, count: int) -> None:
        """Append transitions whose observation and next observation are the same."""
        pair = transition(5)
        for _ in range(count):
            row = self.disk.position
            for store, (numbers, rewards) in ((self.disk, self.rows), (self.ram, (self.numbers, self.rewards))):
                store.append(pair[0], pair[0])
                numbers[row], rewards[row] = self.number, 1
            self.unsure = 1

    @rule()
    def replace_newest(self) -> None:
        """Write another transition to the row of the newest one, in both stores."""
        if self.ram.size and self.ram.dropped < self.ram.n_written:
            row = (self.ram.position - 1) % self.capacity
            if row == self.ram.position:
                return
            for store, (numbers, rewards) in ((self.disk, self.rows), (self.ram, (self.numbers, self.rewards))):
                store.append(*self._next_transition(), row=row)
                numbers[row], rewards[row] = -1, -2
            self.unsure = 1

    @rule()
    def flush(self) -> None:
        self.disk.flush()
        self.unsure = 0

    @rule()
    def clear(self) -> None:
        for store in (self.disk, self.ram):
            store.clear()
        self.unsure = 0

    @rule(share=st.floats(0, 1))
    def drop_newest(self, share: float) -> None:
        for store in (self.disk, self.ram):
            if count := int(share * store.size):
                store.drop_newest(count)
                self.unsure = 0

    @rule(share=st.floats(0, 1))
    def drop_oldest(self, share: float) -> None:
        for store in (self.disk, self.ram):
            store.drop_oldest(int(share * store.size))
        self.unsure = min(self.unsure, self.ram.size)

    @rule()
    def open_again(self) -> None:
        """Close the store in the folder, and open it again."""
        self.disk.close()
        size = self.disk.size
        self.disk, *self.rows = open_store(self.folder, self.kind, self.capacity)
        assert self.disk.recovered == (size, 0, 0)
        self.unsure = 0

    @rule()
    def open_copy_as_after_a_kill(self) -> None:
        """Open a copy of the folder made without closing, and check what is recovered."""
        left = self.folder.with_name("left")
        shutil.copytree(self.folder, left)
        store, numbers, rewards = open_store(left, self.kind, self.capacity)
        try:
            assert store.size == self.ram.size - self.unsure
            assert store.recovered.kept == store.size
            assert store.recovered.lost >= self.unsure
            held = (store.first + np.arange(store.size)) % self.capacity
            for ours, theirs in zip(read_all_rows(store), read_all_rows(self.ram), strict=True):
                shape = (self.capacity, -1)
                np.testing.assert_array_equal(ours.reshape(shape)[held], theirs.reshape(shape)[held])
            assert (numbers[held] == self.numbers[held]).all()
            assert (rewards[held] == self.rewards[held]).all()
        finally:
            store.close()
            shutil.rmtree(left)

    @rule()
    def append_to_copies(self) -> None:
        """Append to copies of the store, and check that the store does not change."""
        for other in (copy.copy(self.disk), copy.deepcopy(self.disk), pickle.loads(pickle.dumps(self.disk, 5))):
            self._compare(other)
            other.append(*transition(3))
        self._compare(self.disk)

    def _compare(self, store: Any) -> None:
        """Assert that a store has the same position, size and contents as the one in memory."""
        for name in ("position", "full", "size", "first", "dropped"):
            assert getattr(store, name) == getattr(self.ram, name), name
        for ours, theirs in zip(read_all_rows(store), read_all_rows(self.ram), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    @invariant()
    def stores_are_equal(self) -> None:
        """Assert after each call that both stores and their row values are equal."""
        if hasattr(self, "disk"):
            self._compare(self.disk)
            held = (self.disk.first + np.arange(self.disk.size)) % self.capacity
            assert (self.rows[0][held] == self.numbers[held]).all()

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            self.temporary.cleanup()


TestFolderMatchesMemory = FolderMatchesMemory.TestCase
TestFolderMatchesMemory.settings = settings(max_examples=40 if "CI" in os.environ else 10, stateful_step_count=20)


@pytest.mark.parametrize("n_stack", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_reopened_adaptive_store_keeps_its_encoding(tmp_path: Path, n_stack: int | None) -> None:
    store, *rows = open_store(tmp_path / "a", "adaptive", 300, n_stack=n_stack)
    for number in range(450):
        add(store, *rows, number)
        if number % 50 == 0:
            check_store(store, *rows, end=number + 1)
            left = shutil.copytree(tmp_path / "a", tmp_path / "left")
            found, *there = open_store(left, "adaptive", 300, n_stack=n_stack)
            assert found.recovered.lost == 1
            assert check_store(found, *there) == number
            found.close()
            shutil.rmtree(left)
    chosen = store.layout, store.codec
    assert chosen[0] == LAYOUT
    store.close()
    store, *rows = open_store(tmp_path / "a", "adaptive", 300, n_stack=n_stack)
    assert (store.layout, store.codec) == chosen
    assert len(list((tmp_path / "a").iterdir())) == 8
    check_store(store, *rows, end=450)
    store.close()


WHOLE = """
import os, sys
from tests.core.frames.disk_helpers import *
store, *rows = open_store(sys.argv[1], "patch", 50)
for number in range(30):
    add(store, *rows, number)
print("open", flush=True)
"""


def start_other_process(folder: Path, then: str) -> subprocess.Popen[str]:
    """Start a process that opens a folder and adds 30 transitions.

    :param then: Code to run after that.
    """
    command, root = [sys.executable, "-c", WHOLE + then, folder], Path(__file__).parents[3]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_folder_in_use_is_rejected_and_exit_without_close_loses_nothing(tmp_path: Path) -> None:
    with start_other_process(tmp_path / "a", "sys.stdin.read()") as other:
        with pytest.raises(StorageError, match=f"in use by another process, {other.pid}, or one that .*; close"):
            open_store(tmp_path / "a", "patch", 50)
        other.communicate("")
    store, *rows = open_store(tmp_path / "a", "patch", 50)
    assert store.recovered == (30, 0, 0)
    check_store(store, *rows, end=30)
    store.close()


FORK = """
read, write = os.pipe()
child = os.fork()
if not child:
    try:
        check_store(store, *rows, end=30)
        add(store, *rows, 30)
    except Exception as error:
        store.close()
        print(error, flush=True)
    os.close(write)
    os.read(read, 1)  # until the parent has closed its end
    os._exit(0)
os.close(read)
sys.stdin.readline()
add(store, *rows, 30)
check_store(store, *rows, end=31)
try:
    open_store(sys.argv[1], "patch", 50)
except Exception as error:
    print(error)
store.close()
open_store(sys.argv[1], "patch", 50)[0].close()  # the running child holds no lock
os.close(write)
os.waitpid(child, 0)
print("ends")
"""


def test_forked_process_can_read_but_not_add_and_holds_no_lock(tmp_path: Path) -> None:
    with start_other_process(tmp_path / "a", FORK) as process:
        assert process.stdout is not None
        assert f"belongs to process {process.pid}; this is a fork of it" in process.stdout.readline()
        rest, _ = process.communicate("\n")
    refused, ends = rest.splitlines()
    assert "in use by this process" in refused
    assert ends == "ends"


@pytest.mark.parametrize(
    ("made", "change", "name"),
    [
        ({"kind": "patch"}, {"capacity": 51}, "capacity"),
        ({"kind": "patch"}, {"kind": "raw"}, "codec"),
        ({"kind": "patch"}, {"kind": "adaptive"}, "layout"),
        ({"kind": "adaptive"}, {"n_stack": 1}, "n_stack"),
    ],
    ids=str,
)
def test_folder_with_other_options_is_rejected(tmp_path: Path, made: Any, change: dict[str, Any], name: str) -> None:
    made = {"capacity": 50, **made}
    open_store(tmp_path / "a", **made)[0].close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(InvalidArgumentError, match=f"was created with {name}=.*not with"):
        open_store(tmp_path / "a", **{**made, **change})
    after = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {**before, "lock": b""} == {**after, "lock": b""}
    open_store(tmp_path / "a", **made)[0].close()


@pytest.mark.parametrize("flushed", [False, True])
def test_unused_rows_and_the_newest_row_can_be_written(tmp_path: Path, flushed: bool) -> None:
    for capacity, newest in ((20, 9), (100_000, 29)):
        folder = tmp_path / str(capacity)
        store, numbers, rewards = open_store(folder, "patch", capacity)
        assert store.rows("nothing", (0,), np.float32).shape == (capacity, 0)
        rewards[50_000:] = 7
        for number in range(30):
            add(store, numbers, rewards, number)
        check_store(store, numbers, rewards, end=30)
        if flushed:
            store.flush()
        rewards[newest] = 77
        store.update_newest_checksum()
        store.close()
        store, numbers, rewards = open_store(folder, "patch", capacity)
        assert store.rows("nothing", (0,), np.float32).shape == (capacity, 0)
        assert rewards[newest].tolist() == [77, 77]
        assert store.recovered == (min(capacity, 30), 0, 0)
        rewards[newest] = 14.5
        check_store(store, numbers, rewards, end=30)
        store.close()


def test_unusable_folders_are_rejected_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.tex").write_text("x")

    def refused(*_: Any) -> None:
        """Raise the error of a file system without locks."""
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for folder, options, error, said in (
        ("", {}, InvalidArgumentError, r"storage_dir='' is empty; .*storage_dir='buffer', or None"),
        (tmp_path, {}, InvalidArgumentError, r"contains 'thesis.tex', which is not part of a store; pass an empty"),
        ("thesis.tex/b", {}, StorageError, "thesis.tex"),
        ("a/b", {"codec": "none"}, InvalidArgumentError, "'none'"),
        ("a/b", {"max_bytes": 10}, InvalidArgumentError, "max_bytes=10"),
    ):
        with pytest.raises(error, match=said):
            FrameStore(50, N_ENVS, LAYOUT, storage_dir=folder, **options)  # type: ignore[arg-type]
    for use in (lambda: open_store("", "adaptive", 8), lambda: salvage("")):
        with pytest.raises(InvalidArgumentError, match="is empty"):
            use()
    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(
        StorageError, match=r"cannot lock .*/lock: No locks available. Pass .* a file system that supports locks"
    ):
        open_store(tmp_path / "c", "patch", 8)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("thesis.tex", "lock")]


def test_row_arrays_must_be_created_before_the_first_transition(tmp_path: Path) -> None:
    store, *rows = open_store(tmp_path / "a", "patch", 50)
    add(store, *rows, 0)
    with pytest.raises(InvalidArgumentError, match="no row array 'late'"):
        store.rows("late", (), np.int64)
    with pytest.raises(InvalidArgumentError, match=r"'reward' has rows of shape \(2,\) and dtype float32, not"):
        store.rows("reward", (3,), np.float32)
    with pytest.raises(InvalidArgumentError, match="cannot name a row array"):
        store.rows("../x", (), np.int64)
    assert store.rows("number", (), np.int64) is rows[0]
    store.close()
    for use in (lambda: add(store, *rows, 1), lambda: read_all_rows(store)):  # after close()
        with pytest.raises(StorageError):
            use()


def test_frames_of_many_unfilled_blocks_are_read_from_a_folder(tmp_path: Path) -> None:
    n_envs, n_steps = 9, 35
    store = FrameStore(100, n_envs, LAYOUT, codec="patch", storage_dir=tmp_path / "a")
    noise = np.random.default_rng(0).integers(256, size=(n_steps + 1, n_envs, *LAYOUT.shape), dtype=np.uint8)
    for step in range(n_steps):
        store.append(noise[step], noise[step + 1])
    out = np.empty((n_envs, *LAYOUT.shape), np.uint8)
    for row in (32, 3, n_steps - 1, 20):  # row 32 contains the first frames of open blocks
        store.get(np.full(n_envs, row), np.arange(n_envs), out)
        np.testing.assert_array_equal(out, noise[row])
    store.close()


def test_failed_creation_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        """Raise the error of a full disk."""
        raise StorageError("the disk is full")

    folder = tmp_path / "a"
    folder.mkdir()
    monkeypatch.setattr(journal.Journal, "write_all", refused)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StorageError, match="the disk is full"):
            open_store(folder, "patch", 8)
    assert sorted(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    store, *rows = open_store(folder, "patch", 8)
    add(store, *rows, 0)
    check_store(store, *rows, end=1)
    store.close()


@pytest.mark.parametrize("name", ["frames-0", "store.json", "journal", "journal-2", "row-number", "row-reward", "sums"])
def test_file_of_another_store_is_rejected(tmp_path: Path, name: str) -> None:
    for folder, first in (("a", 0), ("b", 31)):
        store, *rows = open_store(tmp_path / folder, "patch", 20)
        for number in range(first, first + 33 + first // 31):  # the other store has one transition more
            add(store, *rows, number)
        store.close()
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)

    def read_all() -> None:
        """Open the store and read all transitions."""
        with contextlib.closing(open_store(tmp_path / "a", "patch", 20)[0]) as store:
            read_all_rows(store)

    with pytest.raises(CorruptFileError, match=r"salvage|[Pp]ut back the (right )?file"):
        read_all()


@pytest.mark.parametrize("kind", ["patch", "adaptive"])
def test_threads_read_while_another_adds(tmp_path: Path, kind: str) -> None:
    store, *_ = open_store(tmp_path / "a", kind, 200)
    store.append(*transition(0))
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        """Read and compare all transitions until the other thread has finished."""
        try:
            while not done.is_set():
                rows = np.arange(store.size)
                out = np.empty((len(rows), *LAYOUT.shape), np.uint8)
                store.get(rows, np.ones_like(rows), out)
                for row in rows.tolist():
                    np.testing.assert_array_equal(out[row], transition(row)[0][1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 200):
        store.append(*transition(number))
    done.set()
    for thread in threads:
        thread.join()
    store.close()
    assert not failures
