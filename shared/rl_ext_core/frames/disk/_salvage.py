"""What is left of a damaged folder."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames._state import DEPTH_SHIFT, FRAME_NUMBERS, SLACK, STEP_SHIFT
from rl_ext_core.frames.codecs import get_codec
from rl_ext_core.frames.disk import _journal as journal
from rl_ext_core.frames.disk import _recovery as recovery
from rl_ext_core.frames.disk._files import File
from rl_ext_core.frames.disk._folder import Folder, Head
from rl_ext_core.frames.disk._journal import Contents, Journal
from rl_ext_core.frames.disk._recovery import Span
from rl_ext_core.frames.disk._rows import RowArrays

_logger = logging.getLogger("rl_ext_core.frames")


class Salvaged(NamedTuple):
    """What was left of a damaged folder.

    :ivar kept: transitions, an environment, that can be read.
    :ivar given_up: transitions, an environment, that the journal knew and that are gone.
    """

    kept: int
    given_up: int


def salvage(storage_dir: str | os.PathLike[str]) -> Salvaged:
    """Makes a damaged ``storage_dir`` one that can be opened again, with the longest run of intact transitions.

    All files are read. What is damaged is given up for good: copy the folder first if in doubt.

    :param storage_dir: the folder.
    :raises InvalidArgumentError: if there is no store in it.
    :raises CorruptFileError: if nothing can be read at all.
    :raises StorageError: if it is in use.
    """
    path = Path(storage_dir).absolute()
    if not any(path.glob("journal-*")):
        raise InvalidArgumentError(f"storage_dir={str(path)!r} holds no store")
    folder = Folder(path, damaged=True)
    try:
        found = _salvage(folder)
    finally:
        folder.close()
    _logger.warning("%s: kept %d transitions of each environment, gave up %d", path, *found)
    return found


def _salvage(folder: Folder) -> Salvaged:
    contents, number = _read_what_there_is(folder)
    settings = contents.start["settings"]
    capacity, shift = settings["capacity"], settings["block_length"].bit_length() - 1
    span = recovery.span_of(contents, folder.head)
    rows = RowArrays(capacity, folder)
    _repair_sizes(folder, contents, capacity)
    rows.reopen(contents.arrays)
    numbers = np.arange(span.first, span.end)
    good = rows.sums(numbers % capacity) == contents.sums[numbers % capacity]
    blocks = _intact_blocks(folder, contents, settings)
    first_needed, after = recovery.needed_from(contents, span, shift)
    for env in range(len(after)):
        good &= _readable(contents, blocks, env, int(first_needed[env]), int(after[env]), numbers, shift)
    kept = _longest_run(good, span.first)
    _write(folder, contents, blocks, kept, rows, number, shift)
    return Salvaged(kept.end - kept.first, (span.end - span.first) - (kept.end - kept.first))


def _read_what_there_is(folder: Folder) -> tuple[Contents, int]:
    """The journal that counts, or else the newest one that can be read."""
    numbers = sorted((int(path.name.split("-")[1]) for path in folder.path.glob("journal-*")), reverse=True)
    if folder.head.journal in numbers:
        numbers = [folder.head.journal]
    for number in numbers:
        file = folder.file("journal", number)
        try:
            return journal.read(file, whole=None), max(numbers)
        except CorruptFileError as error:
            reason = str(error)
        finally:
            file.close()
    raise CorruptFileError(f"{folder.path} cannot be salvaged without the beginning of its journal. {reason}")


def _repair_sizes(folder: Folder, contents: Contents, capacity: int) -> None:
    """Makes row arrays as long as they were; what is missing will not have the right checksum."""
    for name, (shape, dtype) in contents.arrays.items():
        n_bytes = int(np.prod([capacity, *shape])) * np.dtype(dtype).itemsize
        file = File(folder.path / f"row-{name}")
        try:
            if file.size != n_bytes:
                file.truncate(n_bytes)
                file.reserve(n_bytes)
        finally:
            file.close()


def _intact_blocks(folder: Folder, contents: Contents, settings: dict[str, Any]) -> npt.NDArray[np.void]:
    """Records of the blocks that can be read, with the reference frames that they start from."""
    layout, number = settings["layout"], contents.start["frames"]
    patches = get_codec(settings["codec"]).patches
    frame_bytes = int(np.prod(layout[0])) * np.dtype(layout[1]).itemsize // layout[2]
    frames, references = (folder.file(kind, number) for kind in ("blocks", "references"))
    try:
        intact = {
            reference: _crc(references, reference * (frame_bytes + SLACK), frame_bytes) == crc
            for reference, crc in contents.references.items()
        }
        good = []
        for block in contents.blocks:
            there = _crc(frames, int(block["slab"] + block["offset"]), int(block["n_bytes"])) == block["crc"]
            good.append(there and (not patches or intact.get(int(block["reference"]), False)))
        found: npt.NDArray[np.void] = contents.blocks[np.array(good, dtype=bool)]
        return found
    finally:
        frames.close()
        references.close()


def _crc(file: File, offset: int, n_bytes: int) -> int:
    try:
        return zlib.crc32(file.read(offset, n_bytes))
    except CorruptFileError:
        return -1


def _readable(
    contents: Contents,
    blocks: npt.NDArray[np.void],
    env: int,
    first: int,
    after: int,
    numbers: npt.NDArray[np.int64],
    shift: int,
) -> npt.NDArray[np.bool_]:
    """Which transitions have all their frames of one environment."""
    there = np.zeros(max(after - first, 0) + 1, dtype=np.int64)
    mine = blocks[blocks["env"] == env]["number"].astype(np.int64)
    there[mine[(mine >= first) & (mine < after)] - first + 1] = 1
    count = np.cumsum(there)
    oldest, newest = _blocks_of(contents, env, numbers, after, shift)
    # Blocks follow each other without a gap: those that no transition needs have to be there too.
    oldest[1:] = np.minimum(oldest[1:], newest[:-1] + 1)
    inside = (oldest >= first) & (newest < after)
    oldest, newest = np.where(inside, oldest, first), np.where(inside, newest, first)
    whole = count[np.minimum(newest - first + 1, len(count) - 1)] - count[oldest - first] == newest - oldest + 1
    readable: npt.NDArray[np.bool_] = inside & whole
    return readable


def _blocks_of(
    contents: Contents, env: int, numbers: npt.NDArray[np.int64], after: int, shift: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first and the last block that each transition needs."""
    entries = contents.index[numbers % len(contents.index), env].astype(np.int64)
    total = after << shift
    newest = total - (total - entries) % FRAME_NUMBERS
    oldest = newest - ((entries >> DEPTH_SHIFT) & 0xFF) + 1
    return oldest >> shift, (newest + ((entries >> STEP_SHIFT) & 0xFF)) >> shift


def _longest_run(good: npt.NDArray[np.bool_], first: int) -> Span:
    """The longest run of what is true; the newest one of equals."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]])))
    if not len(edges):
        return Span(first, first)
    lengths = edges[1::2] - edges[::2]
    longest = len(lengths) - 1 - int(lengths[::-1].argmax())
    return Span(first + int(edges[2 * longest]), first + int(edges[2 * longest + 1]))


def _write(
    folder: Folder,
    contents: Contents,
    blocks: npt.NDArray[np.void],
    kept: Span,
    rows: RowArrays,
    number: int,
    shift: int,
) -> None:
    """Writes a journal that holds nothing else than what is kept."""
    n_envs = contents.index.shape[1]
    needed = np.zeros(len(blocks), dtype=bool)
    for env in range(n_envs) if kept.end > kept.first else ():
        _, after = recovery.needed_from(contents, kept, shift)
        oldest, newest = _blocks_of(contents, env, np.arange(*kept), int(after[env]), shift)
        at = blocks["number"].astype(np.int64)
        needed |= (blocks["env"] == env) & (at >= oldest.min()) & (at <= newest.max())
    written = Journal(folder.file("journal", number + 1), 0)
    try:
        written.append(journal.json_record(journal.START, {**contents.start, "arrays": rows.described()}))
        used = set(blocks[needed]["reference"].tolist())
        for reference, crc in contents.references.items():
            if reference in used:
                written.append(journal.reference_record(reference, crc))
        written.append(b"".join(journal.record(journal.BLOCK, block.tobytes()) for block in blocks[needed]))
        written.append(journal.number_record(journal.FIRST, kept.first))
        written.append(journal.number_record(journal.REDO, kept.end))
        places = np.arange(*kept) % len(contents.index)
        if len(places):
            written.append(journal.rows_record(kept.first, contents.index[places], contents.sums[places]))
        folder.switch(Head(kept.end, number + 1, written.n_bytes))
    finally:
        written.file.close()
    folder.keep_only({"journal": number + 1})
