"""Folders of released versions stay readable; those of later ones are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import folder, salvage
from tests.core.frames.disk_toys import add, check, open_store
from tests.core.frames.make_disk_fixtures import CAPACITY, KINDS, N_STEPS, path_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_this_format_is_opened(tmp_path: Path, kind: str) -> None:
    assert path_of(kind).stat().st_size < 20_000
    zipfile.ZipFile(path_of(kind)).extractall(tmp_path)
    options = {"codec": "patch", "n_stack": 3} if kind == "adaptive" else {}
    store, *rows = open_store(tmp_path, kind, CAPACITY, **options)
    assert store.recovered == (CAPACITY, 0, 0)
    check(store, *rows, end=N_STEPS)
    for number in range(N_STEPS, N_STEPS + 50):
        add(store, *rows, number)
    check(store, *rows, end=N_STEPS + 50)
    store.close()


def test_there_are_folders_of_the_format_that_is_written() -> None:
    assert folder.FORMAT_VERSION == 6


def test_a_folder_of_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder, "FORMAT_VERSION", 7)
        open_store(tmp_path / "a", "raw", CAPACITY)[0].close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for opened in (lambda: open_store(tmp_path / "a", "raw", CAPACITY), lambda: salvage(tmp_path / "a")):
        with pytest.raises(
            CorruptFileError, match="has format 7, this version reads 6; open the folder with the version"
        ):
            opened()
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
