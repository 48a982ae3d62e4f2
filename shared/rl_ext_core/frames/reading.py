"""Reading transitions: which blocks they are in, and having the kernels decode those."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames._parallel import run_parts
from rl_ext_core.frames._state import (
    ENTRY_HEADER,
    GROUP,
    SLACK,
    WORK_FRAMES,
    Blocks,
    Counts,
)
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.codecs import Codec
from rl_ext_core.frames.writer import StreamWriter

Index = npt.NDArray[np.uint64]


class Reader:
    """Reads what a writer has stored.

    :param writer: the writer.
    :param codec: opens sealed blocks.
    :param kernels: the module with the loops.
    :param in_files: whether sealed blocks are in files.
    """

    def __init__(self, writer: StreamWriter, *, codec: Codec, kernels: ModuleType, in_files: bool) -> None:
        self._writer, self._codec, self._kernels, self._in_files = writer, codec, kernels, in_files
        self._decompressor = kernels.CALLS_C and codec.c_decompressor()
        frame_bytes, geometry = writer.layout.frame_bytes, writer.geometry
        self._work_bytes = (WORK_FRAMES if geometry.max_error else 1) * (frame_bytes + GROUP)
        if self._decompressor:
            self._work_bytes += (1 << geometry.block_shift) * (frame_bytes + ENTRY_HEADER) + SLACK

    def get(
        self,
        index: Index,
        rows: Counts,
        envs: Counts,
        observations: npt.NDArray[np.generic] | None,
        next_observations: npt.NDArray[np.generic] | None,
        num_threads: int,
    ) -> None:
        """Writes a batch of transitions into the arrays given; see :meth:`FrameStore.get`.

        :param index: of the store.
        """
        self._check_request(index, rows, envs, observations, next_observations)
        blocks = self._writer.blocks.view()
        geometry, entries, kernels = self._writer.geometry, index, self._kernels
        if observations is None:
            if next_observations is None:
                return
            entries = np.empty((len(rows), index.shape[1]), dtype=np.uint64)  # the others are never read
            kernels.next_entries(rows, envs, index, entries)
            rows, observations, next_observations = np.arange(len(rows)), next_observations, None
        nexts = 0 if next_observations is None else address_of(next_observations)
        outs = address_of(observations), nexts
        opened, contents = self._open_sealed(rows, envs, entries, blocks)
        unreadable: list[int] = []  # appended to, since threads adding to one number would lose counts

        def decode(start: int, stop: int) -> None:
            work = allocate(self._work_bytes, "buffers")
            count = kernels.gather(
                start, stop, rows, envs, entries, geometry, blocks, opened, *outs, self._decompressor, address_of(work)
            )
            unreadable.append(count)

        run_parts(decode, len(rows), num_threads=num_threads)
        del contents  # the addresses in ``opened`` point into it
        if damaged := sum(unreadable):
            raise CorruptFileError(
                f"{damaged} of {len(rows)} transitions cannot be read: their blocks are damaged, as by a program that "
                "wrote over this process's memory; start again from a checkpoint"
            )

    def _check_request(
        self,
        index: Index,
        rows: Counts,
        envs: Counts,
        *outs: npt.NDArray[np.generic] | None,
    ) -> None:
        """Refuses what would make the kernels read or write out of bounds."""
        whole = rows.dtype == envs.dtype == np.int64 and len(rows) == len(envs)
        if not whole or not self._kernels.all_exist(rows, envs, index):
            raise InvalidArgumentError(
                f"rows {rows!r} and envs {envs!r} must be as many numbers of dtype int64, from 0 to "
                f"{len(index) - 1} and from 0 to {index.shape[1] - 1}"
            )
        expected = (len(rows), *self._writer.layout.shape)
        for out in outs:
            if out is not None and not (
                out.shape == expected and out.dtype == self._writer.layout.dtype and out.flags.c_contiguous
            ):
                raise InvalidArgumentError(
                    f"an output has shape {out.shape} and dtype {out.dtype}, expected a C-contiguous array of shape "
                    f"{expected} and dtype {self._writer.layout.dtype}"
                )

    def _open_sealed(
        self,
        rows: Counts,
        envs: Counts,
        entries: Index,
        blocks: Blocks,
    ) -> tuple[Index, Any]:
        """Unseals the blocks that a batch touches; returns their addresses and what these point into."""
        if not self._in_files and (not self._codec.seals or self._decompressor):
            return np.zeros((0, 0), dtype=np.uint64), b""
        most = 2 * self._writer.layout.n_stack // (1 << self._writer.geometry.block_shift) + 2
        opened = np.zeros((len(rows), most), dtype=np.uint64)
        places = np.zeros((len(rows) * most, 4), dtype=np.int64)
        n_places = self._kernels.list_sealed(rows, envs, entries, self._writer.geometry, blocks, opened, places)
        table, places = self._writer.blocks, places[:n_places]
        if not self._in_files:
            pieces = [table.unseal(env, slot) for _, _, env, slot in places.tolist()]
        else:
            found, starts, sizes = table.read_from_files(places[:, 2], places[:, 3], self._kernels.read_regions)
            if self._decompressor or not self._codec.seals:
                opened[places[:, 0], places[:, 1]] = starts.astype(np.uint64) + np.uint64(address_of(found))
                return opened, found
            parts = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
            pieces = [table.opened(found[start:end].data) for start, end in parts]
        contents = b"".join([*pieces, bytes(SLACK)])
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint64)
        begins = np.concatenate([np.zeros(1, dtype=np.uint64), ends[:-1]]) if pieces else ends
        base = np.uint64(address_of(np.frombuffer(contents, dtype=np.uint8)))
        opened[places[:, 0], places[:, 1]] = begins + base
        return opened, contents
