"""Opening a folder for a store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.disk import _recovery as recovery
from rl_ext_core.frames.disk._files import damage
from rl_ext_core.frames.disk._folder import Folder
from rl_ext_core.frames.disk._journal import Contents, read
from rl_ext_core.frames.disk._recovery import LiveBlocks, Recovered, Span
from rl_ext_core.frames.disk._rows import RowArrays
from rl_ext_core.frames.disk._store import StoreFiles
from rl_ext_core.frames.layout import StackLayout


@dataclass
class Opening:
    """A folder that was opened, and what a store needs to begin or to go on in it.

    :ivar options: what the folder's owner was told; another owner has to be told the same.
    :ivar contents: what its journal says; None where there is none yet, or where the store replaces the one there.
    :ivar rows: the owner's arrays.
    :ivar replaces: whether what is in the folder stays until the new files take its place.
    """

    folder: Folder
    options: dict[str, Any]
    contents: Contents | None
    rows: RowArrays
    replaces: bool = False

    def settings(self) -> dict[str, Any]:
        """How the frames that are there are stored, as options of a store; nothing where there are none."""
        if self.contents is None:
            return {}
        there = self.contents.start["settings"]
        shape, dtype, n_stack, axis = there["layout"]
        layout = StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis)
        loss = {name: there[name] for name in ("max_error", "quality") if name in there}
        return {"layout": layout, "codec": there["codec"], "block_length": there["block_length"], **loss}

    def files(self, settings: dict[str, Any], frame_bytes: int) -> StoreFiles:
        """The files of a store with these settings."""
        start = {"options": self.options, "settings": settings}
        if self.contents is not None:
            start["frames"] = self.contents.start["frames"]
        return StoreFiles(
            self.folder,
            start,
            self.rows,
            frame_bytes=frame_bytes,
            contents=self.contents,
            replaces=self.replaces,
        )


def open_folder(path: str | os.PathLike[str], options: dict[str, Any], *, capacity: int) -> Opening:
    """Opens a folder for this process alone.

    :param options: plain values.
    :raises InvalidArgumentError: if the folder was made with other options, or holds something else.
    :raises CorruptFileError: if a file in it is damaged.
    :raises StorageError: if it is in use, or cannot be made.
    """
    folder = Folder(path)
    try:
        contents = _read_contents(folder)
        rows = RowArrays(capacity, folder)
        if contents is not None:
            _check_same(folder.path, contents.start["options"], options)
            rows.reopen(contents.arrays)
        return Opening(folder, options, contents, rows)
    except BaseException:
        folder.abandon()
        raise


def _read_contents(folder: Folder) -> Contents | None:
    head = folder.head
    if head.n_bytes == 0:
        return None
    if not (folder.path / f"journal-{head.journal}").exists():
        raise damage(folder.path / f"journal-{head.journal}", "it is gone")
    file = folder.file("journal", head.journal)
    try:
        contents = read(file, whole=head.n_bytes)
    finally:
        file.close()
    number = contents.start["frames"]
    for kind in ("blocks", "references"):
        if not (folder.path / f"{kind}-{number}").exists():
            raise damage(folder.path / f"{kind}-{number}", "it is gone")
    folder.keep_only({"journal": head.journal, "blocks": number, "references": number})
    return contents


def _check_same(path: Path, there: dict[str, Any], options: dict[str, Any]) -> None:
    differing = [name for name in {**there, **options} if there.get(name) != options.get(name)]
    if differing:
        name = differing[0]
        raise InvalidArgumentError(
            f"storage_dir={str(path)!r} was made with {name}={there.get(name)!r}, not with {options.get(name)!r}; pass "
            "what it was made with, or another storage_dir"
        )


def resume(
    opening: Opening, files: StoreFiles, index: npt.NDArray[np.uint64], *, patches: bool
) -> tuple[Span, LiveBlocks, tuple[npt.NDArray[np.int64], list[int], list[int]], Recovered]:
    """Goes on with what is in a folder: fills the index, and says what the files hold.

    :param patches: whether blocks start from reference frames.
    :return: the transitions that count, the blocks that they need, where those lie, and what was lost.
    :raises CorruptFileError: if a file is damaged.
    """
    contents, folder = opening.contents, opening.folder
    assert contents is not None
    shift = contents.start["settings"]["block_length"].bit_length() - 1
    head = folder.head
    span = recovery.span_of(contents, head)
    live = recovery.live_blocks(folder, contents, span, shift)
    places = recovery.lay_out(files, live.records)
    if patches:
        recovery.check_references(files, live.records)
    recovery.check_rows(files, contents, span)
    rows = span.rows(len(index))
    index[rows] = contents.index[rows]
    found = recovery.recovered(contents, head, span)
    files.resume(added=span.end, first=span.first, sealed=live.after << shift)
    if found.lost:
        files.note_first(span.first)
        files.take_place()
    recovery.log(folder, found)
    return span, live, places, found
