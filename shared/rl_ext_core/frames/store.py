"""The frame store: every single frame once, transitions as references to frames."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import threading
from operator import index
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames._format import EXTENDED_FORMAT_VERSION, FORMAT_VERSION, check_format, checksum
from rl_ext_core.frames._loss import checked_block_length, checked_bound, loss_in_words
from rl_ext_core.frames._saving import load, save
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, get_codec
from rl_ext_core.frames.disk._opening import Opening, open_folder
from rl_ext_core.frames.disk._rows import RowArrays
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.reading import Reader
from rl_ext_core.frames.ring import Ring
from rl_ext_core.frames.writer import StreamWriter


def load_kernels() -> ModuleType:
    """The hot loops: compiled ones, or NumPy's where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        from rl_ext_core.frames import _kernels_numpy

        return _kernels_numpy
    from rl_ext_core.frames import _kernels

    return _kernels


class FrameStore(Ring):
    """A ring of transitions ``(observation, next observation)`` for several environments in step.

    A frame is stored once although up to ``2 * n_stack`` stacks contain it. What is shared is decided by comparing
    contents: a stack that does not continue the one before is stored whole. What comes out equals what went in, bit
    for bit, unless a ``max_error`` or the codec ``"jpeg"`` was asked for; then ``repr`` says so.

    :param capacity: transitions an environment; then the oldest is overwritten.
    :param n_envs: number of environments.
    :param layout: how an observation is stacked.
    :param codec: name of the codec, or a codec.
    :param block_length: frames in a block, a power of two, or None for 16. Longer blocks are smaller and slower to
        sample from.
    :param max_error: how far off each byte may be, for frames of dtype uint8 and codecs that patch; 0 is bit-exact.
    :param quality: of JPEG, 1 to 100; for the codec ``"jpeg"`` only.
    :param max_bytes: what the store may hold in all, index and row arrays included, or None. Where that is exceeded the
        oldest transitions are given up, a block at a time: ``size`` shrinks, their rows read as zeros, and those held
        are the ``size`` rows from ``first`` on, around the ring.
    :param storage_dir: a folder for the frames, or None for memory. They may exceed the memory there, and outlive the
        process: opened again with the same arguments, the store goes on where it was, and ``recovered`` says what was
        found. A process that ends without :meth:`close` loses what was added since the last sealed block; a machine
        that goes down may lose what the system had not written yet, which checksums find. Nothing else than the index
        and a few buffers stay in memory. One process at a time may open it.
    :raises CorruptFileError: if a file in ``storage_dir`` is damaged, where that shows without reading all of it. What
        does not show then is found when it is read.
    :raises StorageError: if another process uses ``storage_dir``, or it cannot be made.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        layout: StackLayout,
        *,
        codec: str | Codec = "patch",
        block_length: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | Opening | None = None,
    ) -> None:
        if capacity < 1 or n_envs < 1:
            raise InvalidArgumentError(f"capacity={capacity} and n_envs={n_envs} must both be at least 1")
        self.codec = (get_codec(codec, quality=quality) if isinstance(codec, str) else codec).for_frames(layout)
        block_length = checked_block_length(block_length, self.codec)
        if block_length < 1 or block_length & (block_length - 1):
            raise InvalidArgumentError(f"block_length={block_length} is not a power of two; for example 16")
        # Plain integers: those of NumPy are written in a way that depends on its version.
        self.capacity, self.n_envs, self.layout = index(capacity), index(n_envs), layout
        self.block_length = index(block_length)
        self.max_error = checked_bound(max_error, codec=self.codec, dtype=layout.dtype)
        self.max_bytes = max_bytes if max_bytes is None else index(max_bytes)
        # The kernels release the GIL: a thread that samples must not read a block while another one fills it.
        self._lock = threading.Lock()
        self.recovered, self._files, self._rows = None, None, RowArrays(self.capacity)
        if storage_dir is None or isinstance(storage_dir, Opening):
            opening = storage_dir
        else:
            opening = open_folder(storage_dir, self._settings(), capacity=self.capacity)
        try:
            if opening is not None:
                self._rows = opening.rows
                self._files = opening.files(self._settings(), self.layout.frame_bytes)
            self._begin()
            self._check_budget()
            if opening is not None and opening.contents is not None:
                self._resume(opening)
        except BaseException:
            if self._files is not None:
                self._files.discard()
            if opening is not None and not opening.replaces:
                opening.folder.abandon()
            raise

    def _settings(self) -> dict[str, Any]:
        """What decides how frames are stored, as plain values."""
        layout = self.layout
        return {
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "layout": [list(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)],
            "codec": self.codec.name,
            "block_length": self.block_length,
            **self._loss(),
        }

    def _loss(self) -> dict[str, int]:
        """The options of a store that is not exact. One that is has none, and is described as it always was."""
        loss = {"max_error": self.max_error} if self.max_error else {}
        return {**loss, "quality": self.codec.quality} if isinstance(self.codec, JpegCodec) else loss

    @property
    def lossy(self) -> bool:
        """Whether what comes out may differ from what went in."""
        return self.max_error > 0 or self.codec.lossy

    def __repr__(self) -> str:
        layout, kept = self.layout, loss_in_words(self.max_error, self.codec)
        return (
            f"{type(self).__name__}({self.capacity} x {self.n_envs} transitions of {layout.shape} {layout.dtype}, "
            f"codec={self.codec.name!r}, {kept})"
        )

    def emptied(self, layout: StackLayout, *, codec: str, block_length: int, **loss: int) -> FrameStore:
        """A store for the same transitions, without them, that stores them in another way."""
        return FrameStore(
            self.capacity,
            self.n_envs,
            layout,
            codec=codec,
            block_length=block_length,
            max_bytes=self.max_bytes,
            storage_dir=self._replacement(),
            **loss,
        )

    def clear(self) -> None:
        """Forgets all transitions and gives their memory back."""
        if self._files is not None:
            self._files = self._files.anew()
        self._begin()

    def rest(self) -> None:
        """Gives back the memory that only transitions to come need, which is most of what a small store takes.

        Should there be any, the next ones share nothing with those before.
        """
        with self._lock:
            self._writer.rest()

    def _begin(self) -> None:
        self._begin_ring()
        kernels = load_kernels()
        self._writer = StreamWriter(
            self.layout,
            self.n_envs,
            codec=self.codec,
            block_length=self.block_length,
            kernels=kernels,
            max_error=self.max_error,
            max_bytes=self.max_bytes,
            files=self._files,
        )
        self._reader = Reader(self._writer, codec=self.codec, kernels=kernels, in_files=self._files is not None)

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
            self._advance(self.position if row is None else row, self._stage(observations, next_observations))

    def stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.uint64]:
        """The part of :meth:`append` that may fail: stores frames, and changes no transition.

        Several stores that belong together all stage a transition before the first of them commits it.

        :return: what :meth:`commit` needs, valid until the next call.
        """
        with self._lock:
            return self._stage(observations, next_observations)

    def _stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.uint64]:
        if self._files is None:
            return self._writer.push_pair(observations, next_observations)
        self._prepare_files(self._files)
        try:
            return self._writer.push_pair(observations, next_observations)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._files.nothing_came()
            raise

    def commit(self, staged: npt.NDArray[np.uint64], *, row: int | None = None) -> None:
        """Makes what was staged a transition, over the oldest where the store is full."""
        with self._lock:
            self._advance(self.position if row is None else row, staged)

    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic] | None,
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes a batch of transitions into the arrays given.

        :param rows: (batch,) ``int64`` positions in the ring; one that was never written gives zeros.
        :param envs: (batch,) ``int64`` environments.
        :param observations: C-contiguous, shape ``(batch, *layout.shape)``, of the layout's dtype; written. None where
            they are not wanted.
        :param next_observations: likewise.
        :param num_threads: threads to decode in.
        :raises InvalidArgumentError: if a place does not exist, or an array does not fit.
        """
        with self._lock:
            self._reader.get(self._index, rows, envs, observations, next_observations, num_threads)

    def _kept(self) -> dict[str, int]:
        """What a store with a budget, or without its oldest transitions, has to say."""
        budget = {} if self.max_bytes is None else {"max_bytes": self.max_bytes}
        return {**budget, "dropped": self.dropped} if self.dropped else budget

    def save(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes the store to a file, without another copy in memory. Row arrays are not part of it.

        :param file: a path, which is replaced once all is written, or a file opened for writing bytes.
        :raises StorageError: if it cannot be written; nothing is left of it then.
        """
        save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | BinaryIO) -> FrameStore:
        """Reads what :meth:`save` wrote, into memory.

        :raises CorruptFileError: if it is damaged, cut short, of a later format, or holds something else.
        """
        return load(cls, file)

    def __copy__(self) -> FrameStore:
        return copy.deepcopy(self)  # no two stores may write to the same memory

    def __getstate__(self) -> dict[str, Any]:
        """Arrays and numbers only: views that pickle protocol 5 writes without a copy, and a checksum."""
        layout = self.layout
        state = {
            "format": EXTENDED_FORMAT_VERSION if self.lossy or self._kept() else FORMAT_VERSION,
            **self._loss(),
            **self._kept(),
            "codec": self.codec.name,
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "block_length": self.block_length,
            "layout": (tuple(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)),
            "position": self.position,
            "full": self.full,
            "index": self._index[: self.touched],
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
            state["capacity"],
            state["n_envs"],
            layout,
            codec=state["codec"],
            block_length=state["block_length"],
            max_error=state.get("max_error", 0),
            quality=state.get("quality", DEFAULT_QUALITY),
            max_bytes=state.get("max_bytes"),
        )
        self.position, self.full, self.dropped = state["position"], state["full"], state.get("dropped", 0)
        self._index[: self.touched] = state["index"]
        self._writer.restore(state["writer"])
