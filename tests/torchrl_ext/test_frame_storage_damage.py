"""Files of a storage that were cut short or altered are refused, or salvaged by choice; nothing wrong comes out."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from tests.torchrl_ext.frame_kills import KEYS, batch_of, known_contents, part_of
from tests.torchrl_ext.frame_workers import contents
from torchrl_ext import FrameStorage

SIZE = 120
KINDS = {"patch": {}, "patch+lz4": {"codec": "patch+lz4"}, "raw": {"codec": "raw"}, "bounded": {"max_error": 4}}


def _open(folder: Path, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(SIZE, storage_dir=folder, **options), batch_size=16)


def _made(folder: Path, n: int, *, closed: bool = True, **options: Any) -> Any:
    """A folder with the last of so many elements, and what each holds, the oldest first."""
    buffer = _open(folder.with_name("original"), **options)
    for number in range(n // 10):
        buffer.extend(batch_of(number, 10))
    held = [_of(buffer, place) for place in range(len(buffer))]
    start = n % SIZE if n > SIZE else 0
    if closed:
        buffer.storage.close()
    shutil.copytree(folder.with_name("original"), folder)
    if not closed:
        buffer.storage.close()
    shutil.rmtree(folder.with_name("original"))
    return held[start:] + held[:start]


def _of(buffer: Any, place: int) -> str:
    return next(iter(contents(buffer[torch.tensor([place])], KEYS)))


def _used_parts(path: Path) -> list[tuple[int, int]]:
    """Where a file has contents."""
    parts, at = [], 0
    with path.open("rb") as file:
        size = path.stat().st_size
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            data = os.pread(file.fileno(), at - start, start)
            used = [i for i in range(0, len(data), 64) if any(data[i : i + 64])]
            parts += [(start + i, start + i + 64) for i in used]
    return parts


def alter(folder: Path, rng: random.Random) -> str:
    """Does something to a file at random; says what."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    frames = [path for path in files if path.name.startswith("frames")]
    path = rng.choice([*files, *frames * (len(files) // 2)])
    what = rng.choice(["flip", "flip", "flip", "cut", "zero"])
    parts = _used_parts(path)
    place = rng.randrange(*rng.choice(parts)) if parts else 0
    place = min(place, path.stat().st_size - 1)
    with path.open("r+b") as file:
        if what == "cut":
            file.truncate(place)
        else:
            file.seek(place)
            old = file.read(64)
            file.seek(place)
            file.write(bytes(len(old)) if what == "zero" else bytes([old[0] ^ 1 << rng.randrange(8)]))
    return f"{what} of {path.name} at {place}"


def _refused_by(use: Any) -> tuple[Any, str]:
    """What is returned, or else what the refusal says."""
    try:
        return use(), ""
    except CorruptFileError as error:
        return None, str(error)


def _read_one_by_one(buffer: Any, folder: Path) -> tuple[list[str], int]:
    """The elements that can be read, and how many cannot."""
    found = []
    for place in range(len(buffer)):
        held, refusal = _refused_by(lambda place=place: _of(buffer, place))
        assert held or str(folder) in refusal
        found += [held] if held else []
    return found, len(buffer) - len(found)


def check_damage(tmp_path: Path, seed: int) -> str:
    """Damages a folder; returns what came of it."""
    rng = random.Random(seed)
    n, options, closed = rng.choice([50, 200]), rng.choice(list(KINDS.values())), rng.random() < 0.7
    folder = tmp_path / f"altered{seed}"
    held = _made(folder, n, closed=closed, **options)
    what = f"{alter(folder, rng)}, {n}, {options}, closed {closed}"
    buffer, refusal = _refused_by(lambda: _open(folder, **options))
    refused: int | None = None
    if buffer is None:
        assert str(folder) in refusal, what
    else:
        found, refused = _read_one_by_one(buffer, folder)
        if "journal" in what and not closed and Counter(found) != Counter(held):
            # The latest of the two notes is gone; the other one says that the latest elements are being written.
            held = held[-11:-10] * (10 if n > SIZE else 0) + held[:-10]
        assert not Counter(found) - Counter(held), what
        assert refused or len(found) == len(held), what
        buffer.storage._let_go()
    kept, refusal = _refused_by(lambda: FrameStorage.salvage(folder))
    if kept is None:
        assert any(name in refusal for name in ("store.json", "meta.json", "head", "rows")), what
        return "gone"
    buffer = _open(folder, **options)
    found, not_found = _read_one_by_one(buffer, folder)
    assert (len(found), not_found) == (kept.kept, 0), what
    assert "".join(found) in "".join(held), what
    assert kept.given_up or not refused, what
    if refused is not None:
        assert kept.kept >= (len(held) - refused) // (refused + 1) - 10, what
    for number in range(30, 50):
        buffer.extend(batch_of(number, 10))
    if "max_error" not in options:
        expected = Counter(held for number in range(38, 50) for held in known_contents()[part_of(number, 10)])
        assert contents(buffer[:], KEYS) == expected, what
    buffer.storage.close()
    shutil.rmtree(folder)
    return "refused" if refused is None else "found" if refused else "harmless"


def test_where_the_parts_of_a_file_lie_is_damaged(tmp_path: Path) -> None:
    assert check_damage(tmp_path, 358) == "gone"  # one bit, and nothing can be named: refused, not taken for empty


@pytest.mark.slow
def test_random_damage_is_found(tmp_path: Path) -> None:
    happened = Counter(check_damage(tmp_path, seed) for seed in range(20))
    assert happened["refused"] > 1
    assert happened["found"] > 1


@pytest.mark.exhaustive
def test_much_random_damage_is_found(tmp_path: Path) -> None:
    happened = Counter(check_damage(tmp_path, seed) for seed in range(20, 400))
    assert happened["refused"] > 25
    assert happened["found"] > 25


def test_an_altered_pixel_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    held = _made(folder, 100)
    buffer = _open(folder)
    buffer.storage._columns[0].pool._arrays["contents"][20] ^= 4  # a view of the file
    buffer.storage.close()
    buffer = _open(folder)
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=r"frames-0 is damaged: \d+ of 100 stacks have another checksum"):
            buffer[:].clone()
    found, refused = _read_one_by_one(buffer, folder)
    assert 0 < refused < 60
    assert not Counter(found) - Counter(held)
    buffer.extend(batch_of(20, 10))
    buffer.storage.close()
    kept = FrameStorage.salvage(folder)
    assert kept.kept + kept.given_up == 110


def test_an_altered_number_is_found_on_opening(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    _made(folder, 100)
    buffer = _open(folder)
    reward = buffer.storage._storage.get(("next", "reward")).view(torch.int32)  # a view of the file
    for place in (30, 60):
        reward[place] ^= 256
    buffer.storage.close()
    with pytest.raises(CorruptFileError, match=rf"rows is damaged: 2 of 100 elements .*salvage\('{folder}'\)"):
        _open(folder)
    assert FrameStorage.salvage(folder) == (39, 61)
    assert len(_open(folder)) == 39


@pytest.mark.parametrize("closed", [True, False])
def test_numbers_that_the_user_wrote_in_place_are_no_damage(closed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    buffer = _open(folder)
    buffer.extend(batch_of(0, 30))
    buffer[:]["next", "reward"][3] = 7.0
    buffer[5]["action"].fill_(3)
    buffer.storage[0:10]["pixels"][2] = 9
    if closed:
        buffer.storage.close()
    else:  # as if it had been killed
        buffer.storage._let_go()
    buffer = _open(folder)
    assert buffer[3]["next", "reward"] == 7.0
    assert buffer[5]["action"] == 3
    assert (buffer[torch.tensor([2])]["pixels"] == 9).all()
    buffer.storage.close()


def test_sampling_hands_out_nothing_that_could_be_written_to(tmp_path: Path) -> None:
    buffer = _open(tmp_path / "storage")
    buffer.extend(batch_of(0, 30))
    buffer.sample()
    buffer[torch.arange(4)]
    buffer[[1, 2]]
    assert not buffer.storage._journal.read()[0].exposed
    buffer[3]
    assert buffer.storage._journal.read()[0].exposed


def test_a_folder_without_its_description_is_not_taken_for_a_half_made_one(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    _made(folder, 30)
    description = (folder / "store.json").read_bytes()
    (folder / "store.json").unlink()
    with pytest.raises(CorruptFileError, match=r"holds a store, and store\.json is missing"):
        _open(folder)
    (folder / "store.json").write_bytes(description)
    assert len(_open(folder)) == 30


@pytest.mark.parametrize("name", ["journal", "journal-2"])
@pytest.mark.parametrize("cut_at", [0, 40, 65546])
def test_one_of_two_files_of_notes_is_enough_for_the_order_of_a_full_ring(
    cut_at: int, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "storage"
    held = _made(folder, 200)
    os.truncate(folder / name, cut_at)
    with pytest.raises(CorruptFileError, match=rf"{name} .*(salvage|damaged)"):
        _open(folder)
    assert FrameStorage.salvage(folder) == (SIZE, 0)
    buffer = _open(folder)
    assert [_of(buffer, place) for place in range(SIZE)] == held


@pytest.mark.parametrize("n", [50, 200])
def test_without_any_note_an_order_that_is_not_known_is_not_made_up(n: int, tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    held = _made(folder, n)
    for name in ("journal", "journal-2"):
        os.truncate(folder / name, 65546)
    if n > SIZE:
        with pytest.raises(
            CorruptFileError, match=r"which row of a full store is the oldest is not known\. Put it back from a copy"
        ):
            FrameStorage.salvage(folder)
        return
    assert FrameStorage.salvage(folder).kept == n
    for name in ("journal", "journal-2"):
        os.truncate(folder / name, 65546)
    assert FrameStorage.salvage(folder).kept == n  # what was never stored is not kept either
    buffer = _open(folder)
    assert [_of(buffer, place) for place in range(n)] == held


def test_what_is_intact_is_salvaged_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    held = _made(folder, 200)
    assert FrameStorage.salvage(folder) == (SIZE, 0)
    buffer = _open(folder)
    assert [_of(buffer, place) for place in range(SIZE)] == held


def test_a_folder_that_is_in_use_or_empty_is_not_salvaged(tmp_path: Path) -> None:
    buffer = _open(tmp_path / "storage")
    buffer.extend(batch_of(0, 30))
    with pytest.raises(StorageError, match=f"is in use by this process, {os.getpid()}"):
        FrameStorage.salvage(tmp_path / "storage")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="holds no store"):
        FrameStorage.salvage(tmp_path / "empty")
