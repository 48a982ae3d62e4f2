"""Files of a storage that were cut short or altered are refused, or salvaged by choice; nothing wrong comes out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from tests.torchrl_ext.frame_kills import KEYS, batch_of
from tests.torchrl_ext.frame_workers import contents
from torchrl_ext import FrameStorage

SIZE = 120


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


def test_a_folder_that_is_in_use_or_empty_is_not_salvaged(tmp_path: Path) -> None:
    buffer = _open(tmp_path / "storage")
    buffer.extend(batch_of(0, 30))
    with pytest.raises(StorageError, match=f"is in use by this process, {os.getpid()}"):
        FrameStorage.salvage(tmp_path / "storage")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="holds no store"):
        FrameStorage.salvage(tmp_path / "empty")
