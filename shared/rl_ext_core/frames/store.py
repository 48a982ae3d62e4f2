"""Store of transitions on a log: a ring whose frames are stored once each, in memory or in a folder."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, RlExtError, StorageError
from rl_ext_core.frames.checkpoint import FORMAT, checksum, format_error, reduce_with_lock
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, JpegCodec, check_codec, check_numba
from rl_ext_core.frames.layout import INTERLEAVED, PLANAR, StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.log_folder import MANIFEST, LogFolder, as_corrupt_file
from rl_ext_core.frames.memory import address_of

if TYPE_CHECKING:
    from rl_ext_core.frames.log import Column, FrameLog  # loads numba

_LAST_CHECK = 4096  # transitions per environment after which the layout is not detected any more
_LEAST_FOR_LOSS = 64  # transitions per environment before a permitted loss is used
_LOOK_BACK = 16  # newest transitions per environment that are used to detect the layout
_COPY_BATCH = 64  # transitions per environment that are copied at a time
_LEAST_SEGMENTS = 8  # that max_bytes must leave room for
_SEGMENT_SHARE = 12  # a segment takes at most so much of max_bytes
_SMALL_FRAME = 512  # bytes

_logger = logging.getLogger("rl_ext_core.frames")
_NO_ENVS = np.zeros(0, dtype=np.int64)

Array = npt.NDArray[Any]


class Observation(NamedTuple):
    """One kind of observations, such as those of a key of a ``Dict`` space, and how to store them.

    :ivar shape: Shape of one observation.
    :ivar dtype: Dtype of the observations.
    :ivar codec: ``"patch"``, ``"raw"`` or ``"jpeg"``.
    :ivar n_stack: Frames per stack, or None to detect it.
    :ivar max_error: Largest error per byte; 0 is exact.
    :ivar quality: JPEG quality, 1 to 100.

    >>> import numpy as np
    >>> from rl_ext_core.frames.store import Observation
    >>> Observation((4, 84, 84), np.uint8, n_stack=4).max_error
    0
    """

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    codec: str = "patch"
    n_stack: int | None = None
    max_error: int = 0
    quality: int = DEFAULT_QUALITY


Converter = Callable[[Any, str], Array]


@contextlib.contextmanager
def prefix_key(key: Any) -> Iterator[None]:
    """Within the context, prefix errors with the ``Dict`` key they concern; without a key, do nothing."""
    try:
        yield
    except RlExtError as error:
        if key is None:
            raise
        raise type(error)(f"key {key!r}: {error}") from error


@cache
@defer_signals
def load_kernels(max_error: int = 0) -> None:
    """Import the kernels, and compile those that every store needs. The first time takes seconds.

    numba cannot be imported again after its import was interrupted. So Ctrl-C waits.

    :param max_error: Largest error per byte.
    :raises MissingDependencyError: If numba is not installed.
    """
    check_numba("A store of frames")
    from rl_ext_core.frames.log import Column, FrameLog

    layout = StackLayout((2, 4, 4), np.dtype(np.uint8), 2, 0)
    log, stacks = FrameLog(2, 1, [Column(layout, max_error)]), np.arange(64, dtype=np.uint8).reshape(2, *layout.shape)
    for _ in range(3):
        log.set_inputs(0, address_of(stacks), PLANAR, address_of(stacks[1:]), PLANAR)
        log.push()
        run_pending_handlers()
    place = np.zeros(1, dtype=np.int64)
    log.contains(place, place)
    log.decode(0, place, place, stacks[:1], stacks[1:])


class RecoveryReport(NamedTuple):
    """Transitions found in a ``storage_dir`` that was opened again, per environment.

    :ivar kept: Transitions in the store.
    :ivar lost: Transitions that were being written when the previous process was killed: 0 or 1.

    >>> store = FrameStore(1000, 1, observation, storage_dir="run1", resume=True)  # doctest: +SKIP
    >>> store.recovered  # doctest: +SKIP
    RecoveryReport(kept=512, lost=1)
    """

    kept: int
    lost: int


class StoredPart:
    """Observations of one key: their layout and codec, and the form in which they are given.

    :ivar key: Key of a ``Dict``, or None.
    :ivar options: Options of the observations.
    :ivar layout: Current layout.
    :ivar candidates: Possible layouts.
    :ivar is_lossy: Whether a loss is permitted.
    :ivar waits: Whether it is not used yet.
    :ivar converter: Function that converts observations of another form than the usual one, or None. It gets them, and
        their name for error texts.
    """

    converter: Converter | None = None

    def __init__(self, key: Any, options: Observation, n_envs: int, *, others_detect: bool = False) -> None:
        dtype = np.dtype(options.dtype)
        self.key, self.options, self.n_envs = key, options._replace(dtype=dtype), n_envs
        layouts = list(candidate_layouts(options.shape, dtype, n_stack=options.n_stack))
        self.max_error = check_codec(options.codec, quality=options.quality, max_error=options.max_error, dtype=dtype)
        self.is_jpeg = options.codec == "jpeg"
        self.candidates = layouts
        self._lossy_layouts = [layout for layout in layouts if not self.is_jpeg or self._has_images(layout)]
        if not self._lossy_layouts:
            JpegCodec(layouts[-1], options.quality)  # raises
        self.detects = options.n_stack is None
        # Until all layouts are known, a permitted loss is not used, because storing frames twice would add to it.
        self.is_lossy = self.is_jpeg or self.max_error > 0
        self.waits = self.is_lossy and (self.detects or others_detect)
        self.set_layout(layouts[-1] if self.detects else layouts[0])

    @property
    def can_change(self) -> bool:
        """Whether the settings may still change. The errors of a lossy codec would add up."""
        return self.waits or (self.detects and not self.is_lossy)

    def _has_images(self, layout: StackLayout) -> bool:
        """Return whether the frames of a layout are images that JPEG can store."""
        try:
            JpegCodec(layout, self.options.quality)
        except (InvalidArgumentError, InvalidTypeError):
            return False
        return True

    def set_layout(self, layout: StackLayout) -> None:
        """Use a layout from now on."""
        self.layout = layout
        self.batch_shape = (self.n_envs, *layout.shape)
        batch = np.empty(self.batch_shape, layout.dtype)
        self.order = PLANAR if layout.planar or layout.n_stack == 1 else INTERLEAVED
        self.strides = batch.strides
        # VecTransposeImage returns views with these strides: channel-first over channel-last memory.
        last = np.empty((self.n_envs, *layout.shape[1:], layout.shape[0]), layout.dtype)
        self.transposed = np.moveaxis(last, -1, 1).strides if layout.planar and len(layout.shape) > 1 else None
        self.encoder: JpegCodec | None = None
        if self.is_jpeg and not self.waits:
            self.encoder = JpegCodec(layout, self.options.quality)

    def update_layout(self, found: StackLayout | None, n_stored: int, *, is_final: bool) -> bool:
        """Use a layout that was detected, and the permitted loss once the layout is known.

        :param found: The layout, or None if it was not found.
        :param n_stored: Transitions per environment that would be stored again; 0 to permit no loss yet.
        :param is_final: Whether the layout will not be detected again.
        :return: Whether the settings have changed.
        """
        before = self.settings
        if found is not None:
            self.set_layout(found)
        if self.waits and (is_final or (found is not None and n_stored >= _LEAST_FOR_LOSS)):
            self.waits = False
            allowed = self._lossy_layouts
            self.set_layout(self.layout if self.layout in allowed else allowed[-1])
        return self.settings != before

    @property
    def codec(self) -> str:
        """Codec in use; ``"raw"`` if frames are too small for patches."""
        is_small = self.layout.frame_bytes < _SMALL_FRAME and not self.max_error
        return "raw" if is_small and self.options.codec == "patch" else self.options.codec

    @property
    def column(self) -> Column:
        """The column of the log in which the frames are stored."""
        from rl_ext_core.frames.log import Column

        is_waiting, patches = self.waits and self.max_error > 0, self.options.codec != "raw"
        bound = 0 if self.waits else self.max_error
        return Column(self.layout, bound, patches=patches, is_waiting=is_waiting, encoder=self.encoder)

    @property
    def settings(self) -> list[Any]:
        """Plain values that determine how frames are stored, for :meth:`restore`."""
        return [int(self.layout.n_stack), int(self.layout.axis), self.waits]

    def restore(self, settings: list[Any]) -> None:
        """Use the layout of a store that was opened or loaded.

        :raises CorruptFileError: If the observations cannot have this layout.
        """
        n_stack, axis, waits = settings
        shape, self.waits = self.layout.shape, bool(waits)
        if axis not in (0, len(shape) - 1):
            raise CorruptFileError(f"settings={settings} do not fit observations of shape {shape}")
        self.set_layout(StackLayout(shape, self.layout.dtype, index(n_stack), axis))

    def prepare(self, stacks: Any, name: str) -> tuple[Array, int]:
        """Check a batch of stacks, and copy it if the kernels cannot read its memory order.

        :return: The batch, and its memory order.
        :raises InvalidTypeError: If the dtype cannot be converted without loss.
        :raises InvalidArgumentError: If the shape is wrong.
        """
        if type(stacks) is not np.ndarray or stacks.shape != self.batch_shape or stacks.dtype != self.layout.dtype:
            if self.converter is not None:
                stacks = self.converter(stacks, name)
            stacks = self._convert(np.asarray(stacks), name)
        strides = stacks.strides
        if strides == self.strides:
            return stacks, self.order
        if strides == self.transposed:
            return stacks, INTERLEAVED
        return np.ascontiguousarray(stacks), self.order

    def _convert(self, stacks: Array, name: str) -> Array:
        """Return a batch with the right dtype; raise if it has the wrong shape."""
        dtype = self.layout.dtype
        if stacks.shape != self.batch_shape:
            raise InvalidArgumentError(
                f"{name} has shape {stacks.shape}, expected {self.batch_shape}: (number of environments, "
                "*observation shape). Nothing was stored."
            )
        if not np.can_cast(stacks.dtype, dtype, "safe"):
            raise InvalidTypeError(
                f"{name} has dtype {stacks.dtype}, which cannot be converted to {dtype} without loss. "
                f"Nothing was stored. To convert it all the same, use {name}.astype(np.{dtype})."
            )
        return stacks.astype(dtype, copy=False)

    def check_output(self, out: Array, n: int) -> None:
        """Raise unless an output array is writable and has the right shape and dtype."""
        expected = (n, *self.layout.shape)
        if not (out.shape == expected and out.dtype == self.layout.dtype and out.flags.carray):
            kind = "an" if out.flags.writeable else "a read-only"
            raise InvalidArgumentError(
                f"an output is {kind} array of shape {out.shape} and dtype {out.dtype}, expected a C-contiguous "
                f"one to write to, of shape {expected} and dtype {self.layout.dtype}; for example "
                f"np.empty({expected}, np.{self.layout.dtype})"
            )


class FrameStore:
    """A ring buffer of transitions ``(observation, next observation)``, one of each environment per row.

    Each frame is stored once, although up to ``2 * n_stack`` stacks contain it. The store compares contents to detect
    shared frames. Observations are returned bit for bit, unless ``max_error`` or the codec ``"jpeg"`` is used.

    :param capacity: Transitions per environment. A full store overwrites the oldest one.
    :param n_envs: Number of environments.
    :param observation: The observations; or, for ``Dict`` observations, a dict of them by key.
    :param row_dtype: Dtype of the caller's data per row, such as actions and rewards; or None.
    :param max_bytes: Size limit of the store in bytes, index and rows included, or None. A store that exceeds it drops
        the oldest transitions, a segment at a time. Their rows read as zeros then.
    :param storage_dir: Folder for the transitions, or None for memory. They outlive the process. A killed process loses
        at most the transition that it was adding. Only one process at a time can open the folder.
    :param resume: Whether to continue with the transitions in ``storage_dir``, and to set ``recovered``. The arguments
        must be those of the store that added them. Without it, a folder with transitions is refused. Default False.
    :ivar parts: Observations by key; the key is None if they are not a ``Dict``.
    :ivar lock: Lock that is held while the store is changed or read. It can be acquired again by the same thread.
    :ivar recovered: Transitions found in ``storage_dir``, or None if it was new.
    :ivar seen: Transitions per environment that this process has added or found.
    :raises CorruptFileError: If a file in ``storage_dir`` is damaged.
    :raises StorageError: If another process uses ``storage_dir``, or it cannot be created.

    >>> import numpy as np
    >>> from rl_ext_core.frames.store import FrameStore, Observation
    >>> store = FrameStore(100, 1, Observation((4, 84, 84), np.uint8, n_stack=4))
    >>> observation = np.zeros((1, 4, 84, 84), np.uint8)
    >>> store.append(observation, observation)
    >>> store.size
    1
    """

    recovered: RecoveryReport | None

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        observation: Observation | Mapping[Any, Observation],
        *,
        row_dtype: npt.DTypeLike | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        if resume and storage_dir is None:
            raise InvalidArgumentError("resume=True needs a folder. Pass storage_dir too, or leave resume out")
        if capacity < 1 or n_envs < 1:
            raise InvalidArgumentError(f"capacity={capacity}, n_envs={n_envs}: expected at least 1 for both")
        self.capacity, self.n_envs = index(capacity), index(n_envs)
        self.max_bytes = None if max_bytes is None else index(max_bytes)
        self.row_dtype = None if row_dtype is None else np.dtype(row_dtype)
        if self.row_dtype is not None and self.row_dtype.hasobject:
            raise InvalidTypeError(f"row_dtype={row_dtype!r} contains Python objects, expected numbers")
        by_key = observation if isinstance(observation, Mapping) else {None: observation}
        self.parts: dict[Any, StoredPart] = {}
        detects = any(options.n_stack is None for options in by_key.values())
        for key, options in by_key.items():
            with prefix_key(key):
                self.parts[key] = StoredPart(key, options, self.n_envs, others_detect=detects)
        self._single = self.parts.get(None)
        self.lock = make_fork_safe_lock()
        self.recovered, self.seen, self._folder = None, 0, None
        self._data: Array | None = None
        if storage_dir is None:
            self._log = self._new_log()
            return
        self._folder = LogFolder(storage_dir, self._options)
        try:
            self._open_folder(self._folder, resume=resume)
        except BaseException:
            self._folder.abandon()
            raise

    @property
    def _options(self) -> dict[str, Any]:
        """Requested options as plain values. A folder can be opened with the same ones only."""
        parts = [[str(part.key), *part.options._replace(dtype=part.layout.dtype.str)] for part in self.parts.values()]
        dtype, n_bytes = (None, 0) if self.row_dtype is None else (str(self.row_dtype.descr), self.row_dtype.itemsize)
        return {
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "observations": parts,
            "rows": dtype,
            "row_bytes": n_bytes,
        }

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings that determine how frames are stored, as plain values."""
        return {"parts": [part.settings for part in self.parts.values()]}

    def _new_log(self, folder: Path | None = None, rows: Array | None = None) -> FrameLog:
        """Create an empty log for the current layouts.

        :param rows: Array for the data of the caller, or None for a new one.
        """
        load_kernels(int(any(part.max_error for part in self.parts.values())))
        from rl_ext_core.frames.log import FrameLog

        n_bytes = 0 if self.row_dtype is None else self.row_dtype.itemsize
        columns = [part.column for part in self.parts.values()]
        log = FrameLog(self.capacity, self.n_envs, columns, row_bytes=n_bytes, folder=folder, rows=rows)
        if self._folder is not None:
            log.is_in_place = self._folder.is_in_place
        if self.max_bytes is not None:
            least = log.nbytes + log.pairs.nbytes + log.rows.nbytes + 4 * _LEAST_SEGMENTS * log.record_words
            if self.max_bytes < least:
                raise InvalidArgumentError(
                    f"max_bytes={self.max_bytes:,} is too little for {self.capacity:,} x {self.n_envs} transitions, "
                    f"whose index and data alone take {least:,}. Pass a smaller buffer_size, or a larger max_bytes"
                )
            log.most_words = min(log.most_words, max(self.max_bytes // 4 // _SEGMENT_SHARE, log.record_words))
        return log

    def _open_folder(self, folder: LogFolder, *, resume: bool) -> None:
        """Create the log in an empty folder, or resume the one in it."""
        if folder.settings is None:
            self._log = self._new_log(folder.segments(new=True))
            folder.use(self._settings)
            return
        with as_corrupt_file(f"{folder.path / MANIFEST} is"):
            for part, settings in zip(self.parts.values(), folder.settings["parts"], strict=True):
                part.restore(settings)
        self._log = self._new_log(folder.segments())
        self._log.recover()
        if self.size and not resume:
            raise InvalidArgumentError(
                f"storage_dir={str(folder.path)!r} contains {self.size:,} rows of an earlier buffer, expected an empty "
                "folder. Pass resume=True to continue with them, or another storage_dir"
            )
        self.seen = self.size
        self.recovered = RecoveryReport(self.size, int(self._log.has_torn_record()))
        _logger.info(
            "%s: recovered %d transitions per environment; lost %d that was being written when the previous process "
            "was killed",
            folder.path,
            *self.recovered,
        )
        self._enforce_max_bytes()

    # Properties

    @property
    def layout(self) -> Any:
        """Current layout of the observations; a dict by key for a ``Dict``."""
        layouts = {key: part.layout for key, part in self.parts.items()}
        return layouts if self._single is None else layouts[None]

    @property
    def lossy(self) -> bool:
        """Whether returned observations may differ from the stored ones, now or later."""
        return any(part.is_lossy for part in self.parts.values())

    @property
    def closed(self) -> bool:
        """Whether ``storage_dir`` was closed."""
        return self._folder is not None and not self._folder.close.alive

    @property
    def identity(self) -> str | None:
        """Random name of the store in ``storage_dir``, which copies of the folder share; None without a folder."""
        return None if self._folder is None else self._folder.identity

    @property
    def n_records(self) -> int:
        """Number of transitions that were ever added to ``storage_dir``, and of other changes, modulo 2**32."""
        return self._log.n_records

    @property
    def position(self) -> int:
        """Row of the next transition."""
        return self._log.position

    @property
    def full(self) -> bool:
        """Whether all rows have been written."""
        return self._log.full

    @property
    def size(self) -> int:
        """Number of stored transitions per environment."""
        return self._log.stored

    @property
    def first(self) -> int:
        """Row of the oldest stored transition. The others follow it around the ring."""
        return (self.position - self.size) % self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes in use by frames, index and rows, in memory or in files."""
        return self._log.nbytes

    @property
    def rows(self) -> Array:
        """Data of the caller, shape ``(capacity,)``, of dtype ``row_dtype``. Write to it by :meth:`append` only."""
        assert self.row_dtype is not None
        return self._log.rows.view(self.row_dtype)[:, 0]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{'' if part.key is None else f'{part.key}: '}{part.layout.shape} {part.layout.dtype}"
            for part in self.parts.values()
        )
        loss = "lossy" if self.lossy else "lossless"
        return f"{type(self).__name__}({self.capacity} x {self.n_envs} transitions of {parts}, {loss})"

    # Adding

    def append(self, observations: Any, next_observations: Any, data: Any = None) -> None:
        """Store one transition of each environment. A full store overwrites the oldest one.

        An exception leaves the store as it was.

        :param observations: Shape ``(n_envs, *shape)``; for ``Dict`` observations, a dict of such arrays.
        :param next_observations: The same for the next observations.
        :param data: Data of the row: an array of dtype ``row_dtype`` with one element.
        :raises InvalidArgumentError: If a shape is wrong.
        :raises InvalidTypeError: If a dtype cannot be converted without loss.
        :raises OutOfMemoryError: If there is not enough memory.
        :raises StorageError: If the disk is full.
        """
        with self.lock:
            log = self._log
            if self._folder is not None:
                self._folder.check_open()
            if (single := self._single) is not None:
                obs, order = single.prepare(observations, "obs")
                next_obs, next_order = single.prepare(next_observations, "next_obs")
                log.set_inputs(0, address_of(obs), order, address_of(next_obs), next_order)
            else:
                kept = self._set_dict_inputs(observations, next_observations)  # noqa: F841  # until it was read
            if data is not self._data:
                self._check_data(data)
            address = 0 if data is None else address_of(data)
            log.push(data=address)
            if self.max_bytes is not None:
                self._enforce_max_bytes()
            self.seen += 1
            if self.seen <= _LAST_CHECK and self.seen & (self.seen - 1) == 0:
                self._update_layouts()

    def _check_data(self, data: Array | None) -> None:
        if data is not None and not (
            data.dtype == self.row_dtype and data.size == 1 and data.flags.c_contiguous and data.dtype.itemsize
        ):
            raise InvalidArgumentError(
                f"data has dtype {data.dtype} and shape {data.shape}, expected one element of {self.row_dtype}. "
                "Nothing was stored"
            )
        self._data = data

    def write_newest_data(self) -> None:
        """Store the data of the newest row again, after the caller has changed it in :attr:`rows`."""
        with self.lock:
            if self._folder is not None:
                self._folder.check_open()
            self._log.write_newest_data()

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array of the caller that may change at any time. It is in ``storage_dir``, if there is one.

        :param name: Name of lower-case letters.
        :param shape: Shape of a row.
        :param dtype: Dtype.
        :return: Array of shape ``(capacity, *shape)``, zeros at first.
        """
        shape = (self.capacity, *shape)
        return np.zeros(shape, dtype) if self._folder is None else self._folder.array(name, shape, dtype)

    @property
    def array_names(self) -> set[str]:
        """Names of the arrays in ``storage_dir``."""
        return set() if self._folder is None else self._folder.array_names

    def _set_dict_inputs(self, observations: Any, next_observations: Any) -> list[Array]:
        """Set the inputs of the log for ``Dict`` observations; return arrays that must live until it has read them."""
        kept = []
        for name, given in (("obs", observations), ("next_obs", next_observations)):
            if not isinstance(given, Mapping) or not self.parts.keys() <= given.keys():
                problem = f"has keys {[*given]}" if isinstance(given, Mapping) else f"is a {type(given).__name__}"
                raise InvalidArgumentError(
                    f"{name} {problem}, expected a dict with the keys {[*self.parts]}. Nothing was stored"
                )
        for number, (key, part) in enumerate(self.parts.items()):
            with prefix_key(key):
                obs, order = part.prepare(observations[key], "obs")
                next_obs, next_order = part.prepare(next_observations[key], "next_obs")
            self._log.set_inputs(number, address_of(obs), order, address_of(next_obs), next_order)
            kept += [obs, next_obs]
        return kept

    @defer_signals
    def _update_layouts(self) -> None:
        """Detect the layouts again, and store the transitions again if one has changed."""
        parts = [*self.parts.values()]
        if not any(part.can_change for part in parts) or self.first:
            return
        if any(part.is_lossy and not part.waits for part in parts):
            return
        settings, is_final = self._settings["parts"], self.seen >= _LAST_CHECK
        found = [self._detect_layout(number, part) for number, part in enumerate(parts)]
        is_known = all(layout is not None or not part.waits for part, layout in zip(parts, found, strict=True))
        n_stored = self.seen if is_known else 0
        for part, layout in zip(parts, found, strict=True):
            part.update_layout(layout, n_stored, is_final=is_final)
        if self._settings["parts"] == settings:
            return
        try:
            self._store_again()
        except (MemoryError, StorageError):  # the new transition is stored already, so the layouts stay
            for part, old in zip(parts, settings, strict=True):
                part.restore(old)

    def _detect_layout(self, number: int, part: StoredPart) -> StackLayout | None:
        """Return the layout of one part that was given or is detected, or None if it was not found."""
        if not part.detects:
            return part.layout
        rows = np.arange(max(self.size - _LOOK_BACK, 0), self.size)
        before, after = self._read_rows(number, part, rows)
        below = before[: -self.n_envs], before[self.n_envs :]  # in a rollout, the next row has the next observations
        shape, dtype = part.layout.shape, part.layout.dtype
        found = find_layout(shape, dtype, before, after) or find_layout(shape, dtype, *below)
        if found not in (None, part.layout):
            _logger.info("observations of shape %s: frames per stack: %d", shape, found.n_stack)
        return found

    def _store_again(self) -> None:
        """Copy all transitions into a log with the current layouts. An exception leaves the old log in use."""
        folder, old = self._folder, self._log
        if not old.is_in_place():
            raise StorageError(f"{old.folder} was moved or replaced")
        new = self._new_log(None if folder is None else folder.segments(new=True), old.rows)
        new.n_records = old.n_records - self.size
        for start in range(0, self.size, _COPY_BATCH):
            rows = np.arange(start, min(start + _COPY_BATCH, self.size))
            batches = [self._read_rows(number, part, rows) for number, part in enumerate(self.parts.values())]
            for i, row in enumerate(rows.tolist()):
                for number, (part, both) in enumerate(zip(self.parts.values(), batches, strict=True)):
                    obs, next_obs = (batch[i * self.n_envs :] for batch in both)
                    new.set_inputs(number, address_of(obs), part.order, address_of(next_obs), part.order)
                new.push(data=address_of(old.rows[row:]))
        if folder is not None:
            folder.use(self._settings)
        self._log = new

    def _read_rows(self, number: int, part: StoredPart, rows: Array) -> tuple[Array, Array]:
        """Return observations and next observations of all environments, row by row."""
        grid = np.repeat(rows, self.n_envs), np.tile(np.arange(self.n_envs), len(rows))
        before, after = (np.empty((len(grid[0]), *part.layout.shape), part.layout.dtype) for _ in range(2))
        self._log.decode(number, *grid, before, after)
        return before, after

    # Reading

    def get(
        self, rows: Array, envs: Array, observations: Any, next_observations: Any = None, *, num_threads: int = 1
    ) -> None:
        """Decode a batch of transitions into arrays.

        :param rows: ``int64`` positions in the ring, shape ``(batch,)``. A row that was never written gives zeros.
        :param envs: ``int64`` environments, shape ``(batch,)``.
        :param observations: Output, C-contiguous, shape ``(batch, *shape)``; a dict of such arrays for ``Dict``
            observations; or None.
        :param next_observations: The same for the next observations.
        :param num_threads: Threads to decode in; default 1.
        :raises InvalidArgumentError: If a row or environment does not exist, or an output has the wrong form.
        """
        with self.lock:
            if self._folder is not None:
                self._folder.check_open()
            rows, envs = self._check_places(rows, envs)
            for number, (key, part) in enumerate(self.parts.items()):
                outs = (observations, next_observations)
                if self._single is None:
                    outs = tuple(None if out is None else out.get(key) for out in outs)  # type: ignore[assignment]
                for out in outs:
                    if out is not None:
                        part.check_output(out, len(rows))
                if not (outs[0] is outs[1] is None):
                    self._log.decode(number, rows, envs, *outs, num_threads=num_threads)

    def _check_places(self, rows: Array, envs: Array) -> tuple[Array, Array]:
        """Return rows and environments for the kernels; raise if one does not exist."""
        if rows.dtype == envs.dtype == np.int64 and rows.shape == envs.shape == (rows.size,):
            # HER passes strided arrays, for which the kernels would be compiled once more.
            rows, envs = (places if places.flags.carray else places.copy() for places in (rows, envs))
            if self._log.contains(rows, envs):
                return rows, envs
        raise InvalidArgumentError(
            f"rows={rows!r}, envs={envs!r}: expected two int64 arrays of the same length, with rows from 0 to "
            f"{self.capacity - 1} and envs from 0 to {self.n_envs - 1}"
        )

    def handles(self, rows: Array, envs: Array) -> dict[Any, tuple[Array, Array]]:
        """Return handles of transitions for :meth:`get_stacks`. They are valid until the store changes.

        Equal handles refer to the same stored frames.

        :param rows, envs: As for :meth:`get`.
        :return: Handles of the observations and of the next observations, ``int64`` of shape ``(batch,)``, by key. A
            row without a transition has handle 0.
        """
        with self.lock:
            rows, envs = self._check_places(rows, envs)
            return {key: self._log.find_handles(number, rows, envs) for number, key in enumerate(self.parts)}

    def get_stacks(self, handles: Array, observations: Array, *, key: Any = None, num_threads: int = 1) -> None:
        """Decode observations by their handles. Handle 0 gives zeros.

        :param handles: Handles that :meth:`handles` returned, shape ``(batch,)``.
        :param observations: Output, C-contiguous, shape ``(batch, *shape)``.
        :param key: Key of ``Dict`` observations.
        :param num_threads: Threads to decode in; default 1.
        """
        with self.lock:
            number, part = [*self.parts].index(key), self.parts[key]
            part.check_output(observations, len(handles))
            handles = np.ascontiguousarray(handles, dtype=np.int64)
            self._log.decode(number, handles, _NO_ENVS, None, observations, num_threads=num_threads)

    # Dropping

    def drop_newest(self, count: int) -> None:
        """Drop the newest transitions.

        :param count: Number of transitions per environment.
        :raises InvalidArgumentError: If the store contains fewer.
        """
        with self.lock:
            if not 0 <= count <= self.size:
                raise InvalidArgumentError(
                    f"count={count}: expected 0 to {self.size}, the number of stored transitions"
                )
            if self._folder is not None:
                self._folder.check_open()
            if count:
                self._log.drop((self.position - index(count)) % self.capacity, self.size - index(count))

    def _enforce_max_bytes(self) -> None:
        """Drop the oldest transitions, a segment at a time, until the store takes at most ``max_bytes``."""
        if self.max_bytes is None:
            return
        log = self._log
        while self.size > 1 and log.nbytes > self.max_bytes:
            log.drop(self.position, self.size - min(log.count_oldest(), self.size - 1))

    def clear(self) -> None:
        """Delete all transitions and free their memory."""
        with self.lock:
            if self._folder is not None:
                self._folder.check_open()
            self._log.clear()

    # Files

    def close(self) -> None:
        """Release ``storage_dir`` to other processes. A closed store cannot be read.

        Without ``storage_dir``, do nothing, because there is nothing to release.
        """
        if self._folder is not None and self._folder.close.alive:
            with self.lock:
                self._log.close_segment()
                self._folder.close()

    def __copy__(self) -> FrameStore:
        return copy.deepcopy(self)  # because two stores must not write to the same memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_with_lock(self.lock, lambda: super(FrameStore, self).__reduce_ex__(protocol))

    def __getstate__(self) -> dict[str, Any]:
        """Return numbers, a checksum, and views of arrays, which pickle protocol 5 writes without a copy."""
        parts = {
            part.key: (*part.options._replace(dtype=part.layout.dtype.str), part.settings)
            for part in self.parts.values()
        }
        state = {
            "format": FORMAT,
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "max_bytes": self.max_bytes,
            "row_dtype": None if self.row_dtype is None else self.row_dtype.descr,
            "parts": parts,
            "log": self._log.contents(),
        }
        return {**state, "checksum": checksum(state)}

    def __setstate__(self, state: Any) -> None:
        """Restore the store.

        :raises CorruptFileError: If the state is damaged or has another format.
        """
        version = state.get("format") if isinstance(state, dict) else None
        if version != FORMAT:
            raise format_error("the frame store", version, FORMAT)
        found = {name: value for name, value in state.items() if name != "held"}
        if checksum(found) != found.get("checksum"):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        with as_corrupt_file("the frame store is"):
            parts = {key: Observation(*options) for key, (*options, _) in state["parts"].items()}
            options = {name: state[name] for name in ("row_dtype", "max_bytes")}
            FrameStore.__init__(self, state["capacity"], state["n_envs"], parts, **options)
            for part, (*_, settings) in zip(self.parts.values(), state["parts"].values(), strict=True):
                part.restore(settings)
            log = self._new_log()
            log.restore(state["log"])
        self._log = log
        self.seen = self.size
