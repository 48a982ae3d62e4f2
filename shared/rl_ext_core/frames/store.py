"""The frame store: every single frame once, transitions as references to frames."""

from __future__ import annotations

import importlib.util
import threading
import zlib
from operator import index
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames._parallel import run_parts
from rl_ext_core.frames._state import DEPTH_SHIFT, ENTRY_HEADER, FRAME_NUMBERS, SLACK, Blocks
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.codecs import Codec, get_codec
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.writer import StreamWriter

FORMAT_VERSION = 1


def checksum(state: Any) -> int:
    """CRC-32 of nested containers of arrays and plain values, without its own entry."""
    if isinstance(state, np.ndarray):
        contents = zlib.crc32(np.ascontiguousarray(state).reshape(-1).view(np.uint8).data)
        parts: Any = (state.dtype.str, state.shape, contents)
    elif isinstance(state, dict):
        parts = [(key, checksum(value)) for key, value in state.items() if key != "checksum"]
    elif isinstance(state, (list, tuple)):
        parts = [checksum(value) for value in state]
    else:
        parts = state
    return zlib.crc32(repr(parts).encode())


def check_format(state: Any) -> None:
    """Refuses what this version does not read.

    :raises CorruptFileError: if it is of another format, or of none.
    """
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CorruptFileError(
            f"the frame store has format {version!r}, this version reads {FORMAT_VERSION}; "
            "load it with the version of rl-ext that wrote it"
        )


def load_kernels() -> ModuleType:
    """The hot loops: compiled ones, or NumPy's where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        from rl_ext_core.frames import _kernels_numpy

        return _kernels_numpy
    from rl_ext_core.frames import _kernels

    return _kernels


class FrameStore:
    """A ring of transitions ``(observation, next observation)`` for several environments in step.

    A frame is stored once although up to ``2 * n_stack`` stacks contain it. What is shared is decided by comparing
    contents: a stack that does not continue the one before is stored whole. What comes out equals what went in, bit
    for bit.

    :param capacity: transitions an environment; then the oldest is overwritten.
    :param n_envs: number of environments.
    :param layout: how an observation is stacked.
    :param codec: name of the codec, or a codec.
    :param block_length: frames in a block, a power of two. Longer blocks are smaller and slower to sample from.
    """

    def __init__(
        self, capacity: int, n_envs: int, layout: StackLayout, *, codec: str | Codec = "patch", block_length: int = 16
    ) -> None:
        if capacity < 1 or n_envs < 1:
            raise InvalidArgumentError(f"capacity={capacity} and n_envs={n_envs} must both be at least 1")
        if block_length < 1 or block_length & (block_length - 1):
            raise InvalidArgumentError(f"block_length={block_length} is not a power of two; for example 16")
        # Plain integers: those of NumPy are written in a way that depends on its version.
        self.capacity, self.n_envs, self.layout = index(capacity), index(n_envs), layout
        self.codec = get_codec(codec) if isinstance(codec, str) else codec
        self.block_length = index(block_length)
        # The kernels release the GIL: a thread that samples must not read a block while another one fills it.
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forgets all transitions and gives their memory back."""
        self.position = 0  # where the next transition goes
        self.full = False
        self._index = np.zeros((self.capacity, self.n_envs), dtype=np.uint64)
        self._kernels = load_kernels()
        self._decompressor = self._kernels.CALLS_C and self.codec.c_decompressor()
        block_bytes = self.block_length * (self.layout.frame_bytes + ENTRY_HEADER)
        self._work_bytes = self.layout.frame_bytes + SLACK + (block_bytes + SLACK if self._decompressor else 0)
        self._writer = StreamWriter(
            self.layout, self.n_envs, codec=self.codec, block_length=self.block_length, kernels=self._kernels
        )

    @property
    def size(self) -> int:
        """Transitions held, an environment."""
        return self.capacity if self.full else self.position

    @property
    def nbytes(self) -> int:
        """Bytes held, the index included; what the process has grown by."""
        return self._writer.nbytes + self._index[: self.size].nbytes

    @property
    def changed_fraction(self) -> float:
        """What a frame takes on average, as a fraction of its raw size."""
        return self._writer.bytes_a_frame / self.layout.frame_bytes

    def append(
        self,
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic],
        *,
        row: int | None = None,
    ) -> None:
        """Stores one transition of each environment, over the oldest where the store is full.

        :param observations: shape ``(n_envs, *layout.shape)``, of the layout's dtype.
        :param next_observations: likewise.
        :param row: where the caller's own rows have come to. One that was interrupted behind this call says the same
            row again, and what it had stored there is replaced.
        :raises InvalidArgumentError: if a shape is another one.
        :raises InvalidTypeError: if a dtype cannot be converted without loss.
        :raises OutOfMemoryError: where the system has no more.
            Whatever is raised, the store holds what it held before.
        """
        with self._lock:
            row = self.position if row is None else row
            self._index[row] = self._writer.push_pair(observations, next_observations)
            self.position = row + 1
            if self.position == self.capacity:
                self.position, self.full = 0, True
            if self.full and self.position % self.block_length == 0:
                self._free_overwritten()

    def _free_overwritten(self) -> None:
        """Frees the blocks that no transition needs any more."""
        count = self._writer.streams.total
        oldest = self._index[self.position].astype(np.int64)
        behind = (count - oldest) % FRAME_NUMBERS
        first = count - behind - ((oldest >> DEPTH_SHIFT) & 0xFF) + 1
        for env, block in enumerate((first // self.block_length).tolist()):
            self._writer.blocks.free_before(env, block)

    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes a batch of transitions into the arrays given.

        :param rows: (batch,) ``int64`` positions in the ring; one that was never written gives zeros.
        :param envs: (batch,) ``int64`` environments.
        :param observations: C-contiguous, shape ``(batch, *layout.shape)``, of the layout's dtype; written.
        :param next_observations: likewise, or None where they are not wanted.
        :param num_threads: threads to decode in.
        :raises InvalidArgumentError: if a place does not exist, or an array does not fit.
        """
        with self._lock:
            self._get(rows, envs, observations, next_observations, num_threads)

    def _get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic] | None,
        num_threads: int,
    ) -> None:
        self._check_request(rows, envs, observations, next_observations)
        blocks = self._writer.blocks.view()
        geometry, entries, kernels = self._writer.geometry, self._index, self._kernels
        nexts = 0 if next_observations is None else address_of(next_observations)
        outs = address_of(observations), nexts
        opened, contents = self._open_sealed(rows, envs, blocks)
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
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        *outs: npt.NDArray[np.generic] | None,
    ) -> None:
        """Refuses what would make the kernels read or write out of bounds."""
        whole = rows.dtype == envs.dtype == np.int64 and len(rows) == len(envs)
        if not whole or not self._kernels.all_exist(rows, envs, self._index):
            raise InvalidArgumentError(
                f"rows {rows!r} and envs {envs!r} must be as many numbers of dtype int64, from 0 to "
                f"{self.capacity - 1} and from 0 to {self.n_envs - 1}"
            )
        expected = (len(rows), *self.layout.shape)
        for out in outs:
            if out is not None and not (
                out.shape == expected and out.dtype == self.layout.dtype and out.flags.c_contiguous
            ):
                raise InvalidArgumentError(
                    f"an output has shape {out.shape} and dtype {out.dtype}, expected a C-contiguous array of shape "
                    f"{expected} and dtype {self.layout.dtype}"
                )

    def _open_sealed(
        self, rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], blocks: Blocks
    ) -> tuple[npt.NDArray[np.uint64], bytes]:
        """Unseals the blocks that a batch touches; returns their addresses and what these point into."""
        if not self.codec.seals or self._decompressor:
            return np.zeros((0, 0), dtype=np.uint64), b""
        most = 2 * self.layout.n_stack // self.block_length + 2
        opened = np.zeros((len(rows), most), dtype=np.uint64)
        places = np.zeros((len(rows) * most, 4), dtype=np.int64)
        n_places = self._kernels.list_sealed(rows, envs, self._index, self._writer.geometry, blocks, opened, places)
        unseal = self._writer.blocks.unseal
        pieces = [unseal(slab, offset) for _, _, slab, offset in places[:n_places].tolist()]
        contents = b"".join([*pieces, bytes(SLACK)])
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint64)
        starts = np.concatenate([np.zeros(1, dtype=np.uint64), ends[:-1]]) if pieces else ends
        base = np.uint64(address_of(np.frombuffer(contents, dtype=np.uint8)))
        opened[places[:n_places, 0], places[:n_places, 1]] = starts + base
        return opened, contents

    def __getstate__(self) -> dict[str, Any]:
        """Arrays and numbers only: views that pickle protocol 5 writes without a copy, and a checksum."""
        layout = self.layout
        state = {
            "format": FORMAT_VERSION,
            "codec": self.codec.name,
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "block_length": self.block_length,
            "layout": (tuple(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)),
            "position": self.position,
            "full": self.full,
            "index": self._index[: self.size],
            "writer": self._writer.state(),
        }
        return {**state, "checksum": checksum(state)}

    def __setstate__(self, state: Any) -> None:
        """
        :raises CorruptFileError: if the state is damaged, or of a later format.
        :raises MissingDependencyError: if its codec needs a package that is not installed.
        """
        check_format(state)
        if checksum(state) != state.get("checksum"):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        shape, dtype, n_stack, axis = state["layout"]
        layout = StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis)
        self.__init__(  # type: ignore[misc]
            state["capacity"], state["n_envs"], layout, codec=state["codec"], block_length=state["block_length"]
        )
        self.position, self.full = state["position"], state["full"]
        self._index[: self.size] = state["index"]
        self._writer.restore(state["writer"])
