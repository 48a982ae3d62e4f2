"""Damaged files are rejected or salvaged, and wrong pixels are never returned silently."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames import salvage
from tests.core.frames.disk_helpers import LAYOUT, N_ENVS, add, check_store, open_store, transition

KINDS = ("patch", "raw", "adaptive")
CAPACITY = 60


@pytest.fixture(params=[(kind, count) for kind in KINDS for count in (50, 170)], ids=str)
def filled_folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, int]:
    """Create a folder with a closed store, and return path, kind and number of transitions."""
    kind, count = request.param
    store, *_rows = open_store(tmp_path / "filled_folder", kind, CAPACITY, count=count)
    store.close()
    return tmp_path / "filled_folder", kind, count


def damage_file(path: Path, rng: random.Random) -> str:
    """Damage a file at random, and return a description of the damage.

    :return: Description of the damage.
    """
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    what = rng.choice(["flip", "flip", "cut", "zero"])
    if what == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif what == "cut":
        data = data[:place]
    else:
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    path.write_bytes(data)
    return f"{what} of {path.name} at {place}"


def check_one_by_one(store: Any, numbers: np.ndarray, rewards: np.ndarray) -> int:
    """Check that each transition equals the added one or raises.

    :return: Number of transitions that raise.
    """
    refused = 0
    rows = (store.first + np.arange(store.size)) % CAPACITY
    outs = [np.empty((N_ENVS, *LAYOUT.shape), np.uint8) for _ in range(2)]
    for row in rows.tolist():
        assert rewards[row].tolist() == [numbers[row] * 0.5] * N_ENVS
        try:
            store.get(np.full(N_ENVS, row), np.arange(N_ENVS), *outs)
        except CorruptFileError:
            refused += 1
        else:
            for out, expected in zip(outs, transition(int(numbers[row])), strict=True):
                np.testing.assert_array_equal(out, expected)
    if store.size:
        held = numbers[rows].tolist()
        assert held == list(range(held[0], held[0] + len(held)))
    return refused


def copy_and_damage(filled_folder: tuple[Path, str, int], tmp_path: Path, seed: int) -> tuple[Path, str]:
    """Copy a folder and damage one of its files; return the copy and a description."""
    rng = random.Random(seed)
    folder = tmp_path / f"altered{seed}"
    shutil.copytree(filled_folder[0], folder)
    target = rng.choice(sorted(path for path in folder.iterdir() if path.name != "lock" and path.stat().st_size))
    return folder, damage_file(target, rng)


def check_damage(filled_folder: tuple[Path, str, int], tmp_path: Path, seed: int) -> None:
    """Assert that damage to a folder is found on opening, reading or salvaging."""
    folder, what = copy_and_damage(filled_folder, tmp_path, seed)
    _, kind, count = filled_folder
    refused: int | None = None
    refusal = ""
    try:
        store, *rows = open_store(folder, kind, CAPACITY)
    except CorruptFileError as error:
        refusal = str(error)
    else:
        refused = check_one_by_one(store, *rows)
        assert refused or store.size == min(count, CAPACITY), what
        store.close()
    assert str(folder) in refusal or refused is not None, what
    try:
        kept = salvage(folder)
    except CorruptFileError as error:
        refusal = str(error)
        kept = None
    if kept is None:
        file = what.split()[2]
        assert file == "store.json" or f"{file} is damaged: its head reports 0 rows" in refusal, what
        assert file != "store.json" or "store.json is damaged" in refusal or "has format" in refusal, what
        return
    store, *rows = open_store(folder, kind, CAPACITY)
    end = check_store(store, *rows)
    assert store.size == kept.kept, what
    assert kept.lost > 0 or refused in (None, 0), what
    if refused is not None:
        assert kept.kept + kept.lost == min(count, CAPACITY)
        assert kept.kept >= (min(count, CAPACITY) - refused) / (refused + 1), what
    for number in range(end, end + 70):
        add(store, *rows, number)
    check_store(store, *rows, end=end + 70)
    store.close()
    store, *rows = open_store(folder, kind, CAPACITY)
    check_store(store, *rows, end=end + 70)
    store.close()


@pytest.mark.sample(quick=2)
def test_random_damage_is_detected(filled_folder: tuple[Path, str, int], tmp_path: Path) -> None:
    for seed in range(6):
        check_damage(filled_folder, tmp_path, seed)


def make_folder(tmp_path: Path, count: int = 50) -> Path:
    """Create a folder with a closed store of ``count`` transitions."""
    store, *_rows = open_store(tmp_path / "a", "patch", CAPACITY, count=count)
    store.close()
    return tmp_path / "a"


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("name", ["journal", "journal-2", "frames-0", "row-reward", "sums", "store.json"])
def test_missing_or_truncated_file_is_detected(tmp_path: Path, name: str, share: float | None) -> None:
    folder = make_folder(tmp_path)
    whole = (folder / name).read_bytes()
    if share is None:
        (folder / name).unlink()
    else:
        os.truncate(folder / name, int(share * len(whole)))
    says = rf"{name} is damaged: .*salvage\('{folder}'\)|{name} (is damaged|has [\d,]+ bytes, expected)"
    if (share, name) == (None, "store.json"):
        # A folder without settings must not be treated as an incomplete one, which would be deleted.
        says = r"contains a store, but its store\.json is missing.* restore that file"
        with pytest.raises(CorruptFileError, match=says):
            salvage(folder)
    with pytest.raises(CorruptFileError, match=says):
        open_store(folder, "patch", CAPACITY)
    (folder / name).write_bytes(whole)
    store, *rows = open_store(folder, "patch", CAPACITY)
    check_store(store, *rows, end=50)
    store.close()


@pytest.mark.parametrize("wrong", [{"next_row": 61}, {"length": 51}], ids=str)
def test_journal_with_too_many_transitions_is_rejected(tmp_path: Path, wrong: dict[str, int]) -> None:
    store, *_rows = open_store(tmp_path / "a", "patch", CAPACITY, count=50)
    store.flush()
    store._folder.journal.write_all(**{"length": 50, "next_row": 50, "n_written": 50, "exposed": False, **wrong})
    store._folder.close()  # as if the process were killed
    with pytest.raises(CorruptFileError, match="journal is damaged: its number of elements exceeds the number of rows"):
        open_store(tmp_path / "a", "patch", CAPACITY)


def test_unused_generation_of_frames_is_removed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "frames-1").write_bytes(b"of a process that was killed")
    open_store(folder, "patch", CAPACITY)[0].close()
    assert not (folder / "frames-1").exists()


@pytest.mark.parametrize("count", [50, 130])
def test_salvage_without_journal_needs_a_ring_that_was_never_full(tmp_path: Path, count: int) -> None:
    folder = make_folder(tmp_path, count)
    for name in ("journal", "journal-2"):
        os.truncate(folder / name, 65546)
    if count > CAPACITY:
        with pytest.raises(
            CorruptFileError,
            match=r"journal is damaged: .* oldest row of a full store is unknown\. Restore it from a copy",
        ):
            salvage(folder)
        return
    assert salvage(folder) == (50, 0)
    store, *rows = open_store(folder, "patch", CAPACITY)
    check_store(store, *rows, end=50)
    store.close()


def test_salvage_rejects_a_folder_in_use(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", "patch", CAPACITY)[0]
    with pytest.raises(StorageError, match="in use by this process"):
        salvage(tmp_path / "a")
    store.close()


def test_damaged_frame_is_detected_when_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    store, *rows = open_store(folder, "patch", CAPACITY)
    store._pool._arrays["contents"][20] ^= 4  # a view of the file
    store.close()
    store, *rows = open_store(folder, "patch", CAPACITY)
    everything = np.repeat(np.arange(50), N_ENVS), np.tile(np.arange(N_ENVS), 50)
    for _ in range(2):  # twice, because a damaged block must stay unverified
        with pytest.raises(
            CorruptFileError, match=r"frames-0 is damaged: the checksums of \d+ of 100 stacks do not match"
        ):
            store.get(*everything, np.empty((100, *LAYOUT.shape), np.uint8))
    add(store, *rows, 50)
    store.close()
