"""Folders of released versions stay readable; those of later ones are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import FrameStore, folder, salvage
from rl_ext_core.testing import LAYOUTS, transitions
from tests.core.frames.disk_toys import add, check, open_store
from tests.core.frames.make_disk_fixtures import CAPACITY, KINDS, N_STEPS, path_of

GREY = LAYOUTS[0]


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


@pytest.mark.parametrize("kind", ["store", "adaptive"])
@pytest.mark.parametrize("options", [{"max_error": 4}, {"codec": "jpeg", "quality": 80}], ids=str)
def test_a_store_that_is_not_exact_gives_the_same_from_disk(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    if "jpeg" in options.values():
        pytest.importorskip("simplejpeg")

    def opened(**where: Any) -> Any:
        if kind == "adaptive":
            return FrameStore.adaptive(300, 2, GREY.shape, np.uint8, n_stack=4, **options, **where)
        return FrameStore(300, 2, GREY, **options, **where)

    disk, ram = opened(storage_dir=tmp_path / "a"), opened()
    for number, transition in enumerate(transitions(GREY, n_steps=450, contents="mixed", odd=0.02)):
        if number % 150 == 149:
            disk.close()
            disk = opened(storage_dir=tmp_path / "a")
        for store in (disk, ram):
            store.append(*transition)
    assert disk.lossy
    rows, envs = np.repeat(np.arange(300), 2), np.tile(np.arange(2), 300)
    outs = [[np.empty((600, *GREY.shape), np.uint8) for _ in range(2)] for _ in range(2)]
    for store, out in zip((disk, ram), outs, strict=True):
        store.get(rows, envs, *out)
    most = 4 if "max_error" in options else 60
    for ours, theirs in zip(*outs, strict=True):
        assert np.abs(ours.astype(int) - theirs).max() <= 2 * most
    disk.close()
