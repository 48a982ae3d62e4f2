"""The frame pool: stacks of frames by handle, stored and freed in any order, and shared by processes."""

from __future__ import annotations

import zlib
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._geometry import geometry_of, kept_bytes
from rl_ext_core.frames._loss import checked_block_length, checked_bound
from rl_ext_core.frames._pool_room import Room
from rl_ext_core.frames._pool_state import Pool, Sizes
from rl_ext_core.frames._region import Region
from rl_ext_core.frames._state import (
    GROUP,
    SCRATCH_FRAMES,
    SLACK,
    Bytes,
)
from rl_ext_core.frames.arena import address_of
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, codec_names, get_codec
from rl_ext_core.frames.layout import StackLayout, candidate_layouts

Handles = npt.NDArray[np.int64]

MOST_STREAMS = 256  # trajectories that are followed at a time
_SHORT_BLOCK_FRAMES, _USUAL_BLOCK_FRAMES = 4, 16
_SEALED_STACKS = 64  # at a time: until they are sealed, they take their full size


class FramePool:
    """Stacks of frames by handle. A frame is stored once, however many stacks contain it.

    Stacks come in any order: each is looked for among the newest ones of the trajectories that are being followed, by
    comparing contents. What continues none is stored whole. What comes out equals what went in, bit for bit, unless a
    ``max_error`` or the codec ``"jpeg"`` was asked for; even then, a frame always reads the same.

    All that it holds lies in one :class:`Region`; pickled for a child process, it is the same pool there. Calls that
    change it must not overlap with others, in any process: the caller holds a lock.

    :param n_handles: the most stacks that are held at a time. Room for them costs nothing before it is used.
    :param layout: how a stack is made of frames.
    :param codec: name of the codec.
    :param block_length: frames in a block, a power of two.
    :param max_error: how far a pixel may be off; 0 is exact.
    :param quality: of JPEG, 1 to 100; for the codec ``"jpeg"`` only.
    :param path: a file to keep it in; where there is one, it is that pool, and has to be recovered.
    """

    def __init__(
        self,
        n_handles: int,
        layout: StackLayout,
        *,
        codec: str = "patch",
        block_length: int = 16,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        path: Path | None = None,
    ) -> None:
        self._shape, self._dtype = layout.shape, layout.dtype
        self._sizes = state.worst_case(
            index(n_handles),
            stack_bytes=layout.stack_bytes,
            n_stack=max(other.n_stack for other in (layout, *candidate_layouts(layout.shape, layout.dtype))),
            least_frames=min(block_length, _SHORT_BLOCK_FRAMES),
            block_frames=max(block_length, _USUAL_BLOCK_FRAMES),
            streams=MOST_STREAMS,
        )
        self._attach(Region(state.region_bytes(self._sizes), path=path))
        if self._arrays["head"][state.KIND_OF_POOL] and not self.interrupted:  # found again in a file
            if self._arrays["head"][state.SUM_OF_KIND] != self._sum_of_kind():
                raise CorruptFileError(f"{path} is damaged: the checksum of its head does not match its contents")
            self.refresh()
            return
        self.become(layout, codec=codec, block_length=block_length, max_error=max_error, quality=quality)

    def _attach(self, region: Region) -> None:
        from rl_ext_core.frames import (  # they load numba
            _pool_checks,
            _pool_in,
            _pool_out,
            _pool_reading,
            _pool_seal,
        )

        self._checks = _pool_checks
        self._in, self._out, self._reading, self._sealing = _pool_in, _pool_out, _pool_reading, _pool_seal
        self._region = region
        self._arrays = {name: region.array(*field) for name, field in state.fields(self._sizes).items()}
        self._known = -1
        self._unchecked: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None = None

    def distrust(self) -> None:
        """Has all that lies in a file compared with its checksum when it is first read."""
        if self._region.path is not None:
            n_blocks, n_references = map(int, self._arrays["head"][[state.BLOCKS, state.REFERENCES]])
            used = self._arrays["blocks"][:n_blocks, state.USERS] > 0
            self._unchecked = used, self._arrays["users"][:n_references] > 0

    def _sum_of_kind(self) -> int:
        return zlib.crc32(self._arrays["head"][state.N_STACK : state.QUALITY + 1].tobytes())

    def become(
        self,
        layout: StackLayout,
        *,
        codec: str,
        block_length: int,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
    ) -> None:
        """Forgets everything, gives the memory back, and stores in another way from here on, in all processes.

        :param layout: another one of the same shape and dtype.
        :raises MissingDependencyError: if the codec needs a package that is not installed.
        """
        if not 1 <= block_length <= self._sizes.block_frames or block_length & (block_length - 1):
            raise InvalidArgumentError(
                f"block_length={block_length} is not a power of two from 1 to {self._sizes.block_frames}; for example "
                "16"
            )
        chosen = _usable_codec(codec, quality).for_frames(layout)
        checked_block_length(block_length, chosen)
        max_error = checked_bound(max_error, codec=chosen, dtype=layout.dtype)
        head = self._arrays["head"]
        head[state.BECOMING] = 1
        self._region.clear(state.offset_of("blocks", self._sizes))
        head[: state.KIND_OF_POOL] = 0
        head[state.BLOCKS] = 1
        head[state.RECENT : state.RECENT + state.N_RECENT] = -1
        head[[state.N_STACK, state.AXIS, state.BLOCK_LENGTH]] = layout.n_stack, layout.axis, block_length
        head[[state.MAX_ERROR, state.QUALITY]] = max_error, quality
        head[state.CODEC] = zlib.crc32(codec.encode())
        head[state.KIND_OF_POOL] += 1
        head[state.SUM_OF_KIND] = self._sum_of_kind()
        head[state.BECOMING] = 0
        self.refresh()

    @property
    def interrupted(self) -> bool:
        """Whether a process was killed while it made another pool of this one, which is empty then."""
        return bool(self._arrays["head"][state.BECOMING])

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        self.refresh()
        self.become(
            self.layout,
            codec=self.codec.name,
            block_length=self.block_length,
            max_error=self.max_error,
            quality=self.quality,
        )

    def refresh(self) -> None:
        """Learns what this or another process has made of the pool."""
        head = self._arrays["head"]
        if head[state.KIND_OF_POOL] == self._known:
            return
        n_stack, axis, block_length, codec, max_error, quality = map(int, head[state.N_STACK : state.QUALITY + 1])
        self.block_length, self.max_error, self.quality = block_length, max_error, quality
        self.layout = layout = StackLayout(self._shape, self._dtype, n_stack, axis)
        name = next(name for name in codec_names() if zlib.crc32(name.encode()) == codec)
        self.codec = _usable_codec(name, quality).for_frames(layout)
        self._seals = (state.AT_ONCE if self.codec.lossy else state.IN_TURN) if self.codec.seals else state.NEVER
        self._decompressor = self.codec.c_decompressor() if self.codec.seals else 0
        # The newest frame, and of a block that was put away at once, what still is where it was filled.
        stream_frames = 2 if self._seals == state.AT_ONCE else 1
        self._room = Room(self._region, self._arrays, self._sizes, layout=layout, stream_frames=stream_frames)
        places = [address_of(self._arrays["pages"]), address_of(self._arrays["references"])]
        arrays = {name: array for name, array in self._arrays.items() if name in Pool._fields}
        self._pool = Pool(**arrays, starts=np.array([*places, layout.frame_bytes + SLACK], dtype=np.uint64))
        self._geometry = geometry_of(layout, codec=self.codec, block_length=self.block_length, max_error=self.max_error)
        self._kept = np.concatenate([kept_bytes(layout), np.zeros(SLACK, dtype=np.uint8)])
        self._scratch = np.zeros(
            SCRATCH_FRAMES * (layout.frame_bytes + GROUP) + layout.stack_bytes + SLACK, dtype=np.uint8
        )
        self._known = int(head[state.KIND_OF_POOL])

    @property
    def lossy(self) -> bool:
        """Whether what comes out may differ from what went in."""
        return self.max_error > 0 or self.codec.lossy

    @property
    def held(self) -> int:
        """Stacks that were put and not released."""
        return int(self._arrays["head"][state.HELD])

    @property
    def nbytes(self) -> int:
        """Bytes held; what the process, or all that share the pool, have grown by."""
        self.refresh()
        return self._room.nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes held, without what was freed and waits to be used again."""
        return self.nbytes - self._room.unused_nbytes

    @property
    def changed_fraction(self) -> float:
        """What a frame took on average, as a fraction of its raw size, before anything was freed."""
        return self._room.changed_fraction

    def put(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None = None,
        *,
        ended: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Handles, Handles]:
        """Stores stacks, and for each the one that follows it.

        :param stacks: C-contiguous, shape ``(n, *layout.shape)``, of the layout's dtype.
        :param nexts: likewise, or None.
        :param ended: (n,) where a trajectory is over, so that nothing is expected behind.
        :return: (n,) their handles, and those of the next ones, or as many zeros. Each has to be released.
        :raises OutOfMemoryError: where there is no room for so many stacks. Nothing is stored then.
        """
        self.refresh()
        for array in (stacks, nexts):
            if array is not None:
                self._check(array, len(stacks))
        n = len(stacks)
        handles, next_handles = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        if self._pool.head[state.UNSEALED]:  # of a call that failed, or of a process that was killed
            self._sealing.seal_full(self._pool, self.codec)
        self._room.make_sure_of(n if nexts is None else 2 * n, block_length=self.block_length)
        flags = np.zeros(n, dtype=np.uint8) if ended is None else np.ascontiguousarray(ended).astype(np.uint8)
        part = _SEALED_STACKS if self.codec.seals else max(n, 1)
        try:
            for start in range(0, n, part):
                some = slice(start, start + part)
                following = None if nexts is None else nexts[some]
                self._put(stacks[some], following, flags[some], handles[some], next_handles[some])
        except BaseException:
            for put in (handles, next_handles):
                self._in.release(self._pool, put, self._geometry)
            raise
        self._pool.head[state.HELD] += np.count_nonzero(handles) + np.count_nonzero(next_handles)
        return handles, next_handles

    def _put(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None,
        ended: Bytes,
        handles: Handles,
        next_handles: Handles,
    ) -> None:
        self._in.put(
            self._pool,
            address_of(stacks),
            0 if nexts is None else address_of(nexts),
            len(stacks),
            ended,
            self._geometry,
            address_of(self._kept),
            self._seals,
            address_of(self._scratch),
            handles,
            next_handles,
        )
        if self.codec.seals:
            self._sealing.seal_full(self._pool, self.codec)

    def _check(self, array: npt.NDArray[Any], n: int) -> None:
        expected = (n, *self.layout.shape)
        if array.shape != expected or array.dtype != self.layout.dtype or not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"an array has shape {array.shape} and dtype {array.dtype}, expected a C-contiguous one of shape "
                f"{expected} and dtype {self.layout.dtype}"
            )

    def release(self, handles: Handles) -> None:
        """Gives stacks up. Each handle may be released as often as :meth:`put` returned it; 0 is passed over.

        :raises InvalidArgumentError: if a handle was never given out.
        """
        self.refresh()
        handles = self._checked(handles)
        self._in.release(self._pool, handles, self._geometry)
        self._pool.head[state.HELD] -= np.count_nonzero(handles)

    def _checked(self, handles: Handles) -> Handles:
        handles = np.ascontiguousarray(handles, dtype=np.int64).reshape(-1)
        if not self._out.all_held(self._pool, handles):
            raise InvalidArgumentError(
                f"handles {handles!r} name no stacks of this pool; only what put() returned and nobody released does"
            )
        return handles

    def get(
        self,
        handles: Handles,
        out: npt.NDArray[Any],
        next_handles: Handles | None = None,
        next_out: npt.NDArray[Any] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes stacks into arrays; those of handle 0 are zeros.

        :param handles: (n,).
        :param out: C-contiguous, shape ``(n, *layout.shape)``, of the layout's dtype; written.
        :param next_handles: (n,) or None; where these follow the others, their frames are decoded together.
        :param next_out: like ``out``.
        :raises InvalidArgumentError: if a handle names nothing, or an array does not fit.
        :raises CorruptFileError: where a block is damaged.
        """
        self.refresh()
        handles = self._checked(handles)
        self._check(out, len(handles))
        wanted = [(handles, address_of(out))]
        if next_handles is not None and next_out is not None:
            wanted.append((self._checked(next_handles), address_of(next_out)))
            self._check(next_out, len(handles))
        if self._unchecked is not None:
            asked = np.concatenate([part for part, _ in wanted])
            if wrong := len(asked) - int(self.readable(asked).sum()):
                raise CorruptFileError(
                    f"{self._region.path} is damaged: {wrong} of {len(asked)} stacks have another checksum than when "
                    "they were stored; to keep what is intact, salvage the folder"
                )
        place, reading = (self._pool, self._geometry), self._reading
        if self.codec.seals and not self._decompressor:
            damaged = reading.open_frames(*place, self.codec, wanted, num_threads=num_threads)
        else:
            damaged = reading.decode(*place, self._decompressor, wanted, num_threads=num_threads)
        if damaged:
            raise CorruptFileError(
                f"{damaged} of {len(handles)} stacks cannot be read: their blocks are damaged, as by a program that "
                "wrote over this process's memory; start again from a checkpoint"
            )

    def readable(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """(n,) which stacks have the checksum that they had, as far as that was not found out before."""
        right = np.ones(len(handles), dtype=np.bool_)
        if self._unchecked is not None:
            self._checks.check_contents(self._pool, handles, self._geometry, *self._unchecked, right)
            if not any(left.any() for left in self._unchecked):
                self._unchecked = None
        return right

    def __getstate__(self) -> dict[str, Any]:
        # Only on the way to a child process, which shares the memory; files are written by ``_pool_files``.
        shape = self._shape, self._dtype.str
        return {"shape": shape, "sizes": tuple(self._sizes), "region": self._region}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        shape, dtype = sent["shape"]
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._sizes = Sizes(*sent["sizes"])
        self._attach(sent["region"])
        self.distrust()


def _usable_codec(name: str, quality: int) -> Codec:
    codec = get_codec(name, quality=quality)
    if codec.seals and not codec.lossy and not codec.c_decompressor():
        raise InvalidArgumentError(
            f"codec={name!r} opens its blocks in Python, which is too slow for reading single stacks; use codec='patch'"
        )
    return codec
