"""From what a journal says to the state of a store."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames._state import DEPTH_SHIFT, FRAME_NUMBERS
from rl_ext_core.frames.arena import piece_bytes
from rl_ext_core.frames.disk._files import damage
from rl_ext_core.frames.disk._folder import Folder, Head
from rl_ext_core.frames.disk._journal import Contents
from rl_ext_core.frames.disk._store import StoreFiles

_logger = logging.getLogger("rl_ext_core.frames")


class Recovered(NamedTuple):
    """What was in a folder that was opened again.

    :ivar kept: transitions, an environment, that are there.
    :ivar lost: transitions, an environment, that were added last, and whose frames were in no sealed block yet.
    :ivar overwritten: transitions, an environment, that are gone because those lost had taken their rows.
    """

    kept: int
    lost: int
    overwritten: int


class Span(NamedTuple):
    """Numbers of transitions: those from ``first`` to before ``end`` count."""

    first: int
    end: int

    def rows(self, capacity: int) -> npt.NDArray[np.int64]:
        """The rows that they are in."""
        return np.arange(self.first, self.end) % capacity


def span_of(contents: Contents, head: Head) -> Span:
    """The transitions that count: what was added behind them may have overwritten the oldest."""
    added = max(head.added, contents.committed)
    first = max(contents.first, added - len(contents.index))
    return Span(min(first, contents.committed), contents.committed)


def recovered(contents: Contents, head: Head, span: Span) -> Recovered:
    """What :class:`Recovered` says."""
    lost = max(head.added - span.end, 0)
    oldest = max(contents.first, span.end - len(contents.index))
    return Recovered(span.end - span.first, lost, span.first - min(oldest, span.end))


def log(folder: Folder, found: Recovered) -> None:
    """Says what was found."""
    if found.lost:
        _logger.warning(
            "%s: %d transitions of each environment are kept. The process before ended without close(): the last %d, "
            "added since the last sealed block, are lost, and %d that they had overwritten",
            folder.path,
            *found,
        )
    else:
        _logger.info("%s: %d transitions of each environment are kept", folder.path, found.kept)


def needed_from(contents: Contents, span: Span, shift: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(n_envs,) numbers of the first block that is needed, and of the one after the last."""
    blocks, n_envs = contents.blocks, contents.index.shape[1]
    after = np.zeros(n_envs, dtype=np.int64)
    np.maximum.at(after, blocks["env"], blocks["number"].astype(np.int64) + 1)
    if span.first == span.end:
        return after, after
    oldest = contents.index[span.first % len(contents.index)].astype(np.int64)
    total = after << shift
    newest = total - (total - oldest) % FRAME_NUMBERS
    return (newest - ((oldest >> DEPTH_SHIFT) & 0xFF) + 1) >> shift, after


class LiveBlocks(NamedTuple):
    """The blocks that are needed.

    :ivar first: (n_envs,) their first numbers.
    :ivar after: (n_envs,) the numbers after their last.
    :ivar records: as the journal has them, by environment and number.
    """

    first: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    records: npt.NDArray[np.void]


def live_blocks(folder: Folder, contents: Contents, span: Span, shift: int) -> LiveBlocks:
    """The blocks that are needed.

    :raises CorruptFileError: if one is not there.
    """
    first, after = needed_from(contents, span, shift)
    blocks = contents.blocks
    live = blocks[blocks["number"].astype(np.int64) >= first[blocks["env"]]]
    live = live[np.lexsort((live["number"], live["env"]))]
    expected = np.concatenate([np.arange(*part) for part in zip(first.tolist(), after.tolist(), strict=True)])
    if len(expected) != len(live) or (expected != live["number"]).any():
        raise damage(folder.path / "journal", "it lacks blocks")
    return LiveBlocks(first, after, live)


def lay_out(files: StoreFiles, live: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.int64], list[int], list[int]]:
    """Tells the files where the slabs are; what lies between those in use is free.

    :return: the slab of each block, and how many blocks and how many bytes are in use in each slab.
    :raises CorruptFileError: if the file is too short.
    """
    end = int((live["slab"] + live["offset"] + live["n_bytes"]).max(initial=0))
    if files.slabs.file.size < end:
        raise damage(files.slabs.file.path, f"it ends at byte {files.slabs.file.size:,}, expected {end:,}")
    known = sorted(set(zip(live["slab"].tolist(), live["slab_bytes"].tolist(), strict=True)))
    starts, sizes, at = files.slabs.starts, files.slabs.sizes, 0
    for start, size in [*known, (files.slabs.file.size, 0)]:
        for gap in range(at, start, piece_bytes(None)):
            starts.append(gap)
            sizes.append(min(start - gap, piece_bytes(None)))
        if size:
            starts.append(start)
            sizes.append(size)
        at = start + size
    files.slabs.file.grow(at)
    places = np.searchsorted(np.array(starts, dtype=np.uint64), live["slab"])
    count, used = np.zeros(len(starts), dtype=np.int64), np.zeros(len(starts), dtype=np.int64)
    np.add.at(count, places, 1)
    np.maximum.at(used, places, (live["offset"] + live["n_bytes"]).astype(np.int64))
    return places, count.tolist(), used.tolist()


def check_references(files: StoreFiles, live: npt.NDArray[np.void]) -> None:
    """
    :raises CorruptFileError: if reference frames are not there that blocks start from.
    """
    needed = np.unique(live["reference"]).tolist()
    if missing := [number for number in needed if number not in files.frames.sums]:
        raise damage(files.folder.path / "journal", f"it lacks reference frame {missing[0]}")
    end = files.frames.end_of(max(needed)) if needed else 0
    if files.frames.file.size < end:
        raise damage(files.frames.file.path, f"it ends at byte {files.frames.file.size:,}, expected {end:,}")


def check_rows(files: StoreFiles, contents: Contents, span: Span) -> None:
    """
    :raises CorruptFileError: if a row of the owner's arrays is not what it was.
    """
    wrong = wrong_rows(files, contents, span)
    if len(wrong):
        names = ", ".join(files.rows.described())
        raise damage(
            files.folder.path / "row-*", f"row {wrong[0]} of {names} has another checksum, as {len(wrong) - 1} more do"
        )


def wrong_rows(files: StoreFiles, contents: Contents, span: Span) -> npt.NDArray[np.int64]:
    """Rows that do not have the checksum that they had."""
    rows = span.rows(len(contents.index))
    parts = [rows[at : at + 4096] for at in range(0, len(rows), 4096)]
    wrong = [part[files.rows.sums(part) != contents.sums[part]] for part in parts]
    return np.concatenate([np.zeros(0, dtype=np.int64), *wrong])
