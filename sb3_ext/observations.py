"""Observation storage shared by all compressed buffers: one frame store per key."""

from __future__ import annotations

import logging
import math
import operator
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from rl_ext_core._interrupts import defer_signals
from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, RlExtError, StorageError
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.folder import copy_stores, validate_path
from rl_ext_core.frames.gpu_decode import GpuDecoder
from rl_ext_core.frames.layout import differing_rows
from rl_ext_core.frames.planning import MemoryWatch
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.vector.environments import check_count
from sb3_ext.observation_view import ObservationView

IndexArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]
HandlesByPart = dict[Any, tuple[IndexArray, IndexArray]]

_SINGLE_KEY = None  # key of an observation that is not a Dict
_DEFAULTS: dict[str, Any] = {"codec": "patch", "n_stack": None, "max_error": 0, "quality": 95}
STORE_OPTIONS = (*_DEFAULTS, "num_threads", "max_bytes", "storage_dir", "resume")

_DROP_BATCH = 16  # transitions per environment that are dropped at a time
_NUMBER_BITS = 32
_NUMBERS = "number"  # row array with the number of each transition
_logger = logging.getLogger("sb3_ext")
_in_folders: weakref.WeakSet[Observations] = weakref.WeakSet()  # of this process


def _as_int64(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Cast integers to int64; copy them only if needed."""
    return numbers.astype(np.int64, copy=False)  # on Windows, NumPy draws 32-bit integers


class Part:
    """Observations in one store: those of a key of a ``Dict`` space, or of another space."""

    def __init__(self, key: Any, store: FrameStore) -> None:
        self.store = store
        self.shape, self.dtype = store.layout.shape, store.layout.dtype
        self.buffer_shape = store.capacity, store.n_envs
        self.recycled = RecycledArrays()
        self._key = key
        self._batch_shape = (store.n_envs, *self.shape)
        self._cast_warned = False

    def __reduce__(self) -> Any:
        return Part, (self._key, self.store)  # recycled arrays belong to this process

    def stage(self, obs: Any, next_obs: Any) -> npt.NDArray[np.int64]:
        """Store the frames of a transition, which :meth:`FrameStore.commit` adds later."""
        try:
            return self.store.stage(self._match_space(obs, "obs"), self._match_space(next_obs, "next_obs"))
        except RlExtError as error:
            _prefix_key(self._key, error)
            raise

    def append(self, obs: Any, next_obs: Any, row: int) -> None:
        """Store one transition per environment in a row, see :meth:`FrameStore.append`."""
        try:
            self.store.append(self._match_space(obs, "obs"), self._match_space(next_obs, "next_obs"), row=row)
        except RlExtError as error:
            _prefix_key(self._key, error)
            raise

    def append_step(self, row: int, obs: Any) -> None:
        """Store the observations of one step of a rollout."""
        try:
            row = operator.index(row)
        except TypeError:
            raise InvalidTypeError(
                f"observations of a rollout are assigned row by row, not by {row!r}. Use "
                "buffer.observations[row] = observations, with those of all environments"
            ) from None
        if row >= self.buffer_shape[0]:
            raise InvalidArgumentError(f"the rollout is full with {row} steps. Call reset() before the next rollout")
        self.append(obs, obs, row)

    def empty(self, n: int) -> Array:
        """Return an array to decode ``n`` observations into, which no batch in use shares."""
        return self.recycled.empty((n, *self.shape), self.dtype)

    def _match_space(self, obs: Any, name: str) -> Array:
        """Return observations with the dtype of the space and with all axes."""
        if type(obs) is np.ndarray and obs.shape == self._batch_shape and obs.dtype == self.dtype:
            return obs  # the usual case
        stack = np.asarray(obs)
        if stack.dtype != self.dtype:
            stack = self._cast_to_space_dtype(stack, name)
        shape = self._batch_shape
        # SB3 may omit an axis: that of a single environment, or of the only value of a discrete observation.
        if stack.shape != shape and stack.shape in (shape[1:], shape[:-1]) and stack.size == math.prod(shape):
            return stack.reshape(shape)
        if len(shape) == 4 and stack.shape == (shape[0], *shape[2:], shape[1]) != shape:
            raise InvalidArgumentError(
                f"{name} has shape {stack.shape}, with channels last, expected {shape}; nothing was stored. Stable "
                "Baselines3 transposes images outside of VecNormalize, whose original observations are stored. Use "
                "VecNormalize(VecTransposeImage(env))"
            )
        return stack

    def _cast_to_space_dtype(self, stack: Array, name: str) -> Array:
        """Cast as an assignment to SB3's arrays does, and warn once if values may change."""
        try:
            cast = stack.astype(self.dtype, copy=False)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"{name} has dtype {stack.dtype}, expected {self.dtype} ({error}); nothing was stored"
            ) from error
        if not self._cast_warned and not np.can_cast(stack.dtype, self.dtype, "safe"):
            self._cast_warned = True
            warnings.warn(
                f"{name if self._key is _SINGLE_KEY else f'{name}[{self._key!r}]'} has dtype {stack.dtype}, but the "
                f"observation space has {self.dtype}. Observations are cast, which may change values; Stable "
                "Baselines3's buffers cast silently. To avoid this warning, return observations of dtype "
                f"np.{self.dtype} from the environment",
                stacklevel=5,
            )
        return cast


class Observations:
    """
    Observations of a buffer, in SB3's form: an array, or a dict of arrays for a ``Dict``.

    Each key of a ``Dict`` is a part; any other space has a single part. All parts contain the same transitions, in the
    same rows.

    :param space: Observation space
    :param buffer_shape: Transitions per environment, and number of environments
    :param num_threads: Number of threads that decode large batches; None for ``torch.get_num_threads()``
    :param max_bytes: Size limit of all parts together, in bytes; None for no limit
    :param storage_dir: Folder to store the observations in; for a ``Dict``, it contains a folder for each key
    :param resume: Whether to continue with the transitions in the folder
    :param decode_on_gpu: Whether :meth:`decode` decodes images on the GPU that it is asked for
    :param options: Arguments of :meth:`FrameStore.adaptive`. A dict sets an option by key. Any other value applies to
        the images: the keys with two or more dimensions
    :ivar parts: Parts by key
    :ivar first: Store of the first part; its position is that of the buffer
    :ivar lock: Lock of the buffer, acquired to change the buffer or to write it to a file
    :ivar arrays: Arrays that :meth:`rows` returned, by name
    :ivar recovered: Counts of transitions found in the folders, see :class:`FrameStore`; None if there were none
    :ivar storage_dir: Folder of the observations, as passed; None if they are in memory
    :ivar watch: Warns if the buffer will not fit into memory; None for a buffer with a limit or a folder
    :raises InvalidArgumentError: If an option is given for an unknown key, or the folders belong to different buffers.
    """

    storage_dir: str | os.PathLike[str] | None = None

    def __init__(
        self,
        space: spaces.Space[Any],
        buffer_shape: tuple[int, int],
        *,
        num_threads: int | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        decode_on_gpu: bool = False,
        **options: Any,
    ) -> None:
        if resume and storage_dir is None:
            raise InvalidArgumentError("resume=True needs a folder. Pass storage_dir too, or leave resume out")
        by_key: dict[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else {_SINGLE_KEY: space}
        if not by_key:
            raise InvalidArgumentError(f"observation_space={space} has no keys, expected at least one")
        for name, value in options.items():
            if isinstance(value, Mapping) and (unknown := [key for key in value if key not in by_key]):
                raise InvalidArgumentError(f"{name} is given for {unknown}, expected keys among {[*by_key]}")
        self.num_threads = None if num_threads is None else check_count("num_threads", num_threads)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        self.decode_on_gpu = decode_on_gpu
        self._arguments = {"space": space, "buffer_shape": buffer_shape, "decode_on_gpu": decode_on_gpu, **options}
        folders = _folder_by_key(storage_dir, [*by_key])
        parts: dict[Any, Part] = {}
        try:
            for key, subspace in by_key.items():
                shape: Any = get_obs_shape(subspace)
                try:
                    chosen = _options_for_key(key, options, image=key is _SINGLE_KEY or len(shape) > 1)
                    chosen |= {"max_bytes": self.max_bytes, "storage_dir": folders[key], "resume": resume}
                    parts[key] = Part(
                        key, FrameStore.adaptive(buffer_shape[0], buffer_shape[1], shape, subspace.dtype, **chosen)
                    )
                except RlExtError as error:
                    _prefix_key(key, error)
                    raise
            self._set_parts(parts, rows_in_store=max_bytes is not None or storage_dir is not None)
            if storage_dir is not None:
                self.storage_dir = storage_dir
                self._reconcile_stores(storage_dir)
                _in_folders.add(self)
        except BaseException:
            for part in parts.values():
                part.store.close()
            raise
        found = [store.recovered for store in self.stores if store.recovered is not None]
        lost, overwritten = (max((part[place] for part in found), default=0) for place in (1, 2))
        self.recovered = found[0]._replace(kept=self.size, lost=lost, overwritten=overwritten) if found else None

    def _set_parts(self, parts: dict[Any, Part], *, rows_in_store: bool) -> None:
        """Set the parts, and initialize the attributes that are derived from them."""
        self.parts, self._rows_in_store = parts, rows_in_store
        self.stores = [part.store for part in parts.values()]
        self.first = self.stores[0]
        self.lock = make_fork_safe_lock()
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._own_arrays: dict[str, npt.NDArray[Any]] = {}  # arrays that are in no store
        self._transition_numbers: list[npt.NDArray[np.int64]] = []  # per store: numbers of its rows' transitions
        self._newest_number = 0
        self.watch: MemoryWatch | None = None
        self._gpu_decoder: GpuDecoder | None = None

    def _reconcile_stores(self, storage_dir: Any) -> None:
        """Drop transitions that are not in all stores, as a killed process may leave them."""
        self._transition_numbers = [store.rows(_NUMBERS, (), np.int64) for store in self.stores]
        if not any(store.size for store in self.stores):
            self._newest_number = _random_start()
            return
        if new := [key for key, part in self.parts.items() if part.store.recovered is None]:
            raise InvalidArgumentError(
                f"storage_dir={str(storage_dir)!r} contains transitions of the other keys, but not of {new}. Pass the "
                "observation space that it was made with, or another storage_dir"
            )
        pairs = zip(self.stores, self._transition_numbers, strict=True)
        ends = {store: int(numbers[store.position - 1]) if store.size else 0 for store, numbers in pairs}
        if len({end >> _NUMBER_BITS for end in ends.values() if end}) > 1:
            raise InvalidArgumentError(
                f"storage_dir={str(storage_dir)!r} contains folders of different buffers for the keys "
                f"{[*self.parts]}, expected those of one buffer. Restore them, or pass another storage_dir"
            )
        self._newest_number = min(ends.values())
        if all(store.size > end - self._newest_number for store, end in ends.items()):
            for store, end in ends.items():
                store.drop_newest(end - self._newest_number)
        else:
            self.clear()  # no transition is in all stores
            self._newest_number = _random_start()

    def rows(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, mutable: bool = False
    ) -> npt.NDArray[Any]:
        """
        Create an array with one row per transition, in the store's file if there is one.

        :param mutable: Whether any row may change at any time; otherwise only the newest one
        """
        if self._rows_in_store:
            self.arrays[name] = self.first.rows(name, shape, dtype, mutable=mutable)
        else:
            self.arrays[name] = self._own_arrays[name] = np.zeros((self.first.capacity, *shape), dtype=dtype)
        return self.arrays[name]

    def check_budget(self) -> None:
        """
        Check that half of ``max_bytes`` is left for frames. Call it after all :meth:`rows`.

        :raises InvalidArgumentError: If they take more than half of ``max_bytes``.
        """
        n_places = self.first.capacity * self.first.n_envs
        n_bytes = 8 * n_places * len(self.stores) + sum(array.nbytes for array in self.arrays.values())
        if self.max_bytes is not None and n_bytes > self.max_bytes // 2:
            raise InvalidArgumentError(
                f"buffer_size={n_places:,} takes {n_bytes:,} bytes of max_bytes={self.max_bytes:,} for actions, "
                "rewards, flags and an index, expected at most half. Pass a smaller buffer_size, or a larger max_bytes"
            )

    def check_arrays(self, class_name: str) -> None:
        """
        Check that the owner updates all arrays in the folder. Call it after all :meth:`rows`.

        :param class_name: Class of the buffer, for the error
        :raises InvalidArgumentError: If another class of buffer has added more arrays.
        """
        if self.storage_dir is not None and (others := self.first.row_names - {*self.arrays, _NUMBERS}):
            raise InvalidArgumentError(
                f"storage_dir={str(self.storage_dir)!r} contains {sorted(others)} of another class of buffer, which "
                f"{class_name} does not update. Pass the class that made the folder, or another storage_dir"
            )

    def append(self, obs: Any, next_obs: Any, *, row: int) -> None:
        """
        Store one transition per environment in a row.

        :raises RlExtError: If it cannot be stored. No store contains any of it then.
        """
        if (single := self.parts.get(_SINGLE_KEY)) is not None:
            single.append(obs, next_obs, row)
        else:
            self._append_dict(obs, next_obs, row)
        self._newest_number += 1
        for numbers in self._transition_numbers:
            numbers[row] = self._newest_number
        if self.max_bytes is not None and len(self.stores) > 1:
            self._enforce_max_bytes(self.max_bytes)

    def _append_dict(self, obs: Any, next_obs: Any, row: int) -> None:
        """Store a transition of all parts or of none; refuse dicts that lack a key."""
        for name, given in (("obs", obs), ("next_obs", next_obs)):
            if not isinstance(given, Mapping) or not self.parts.keys() <= given.keys():
                problem = (
                    f"has keys {list(given)}" if isinstance(given, Mapping) else f"is of type {type(given).__name__}"
                )
                raise InvalidArgumentError(
                    f"{name} {problem}, expected a dict with the keys {[*self.parts]}; nothing was stored"
                )
        *others, last = self.parts
        # Everything that may fail runs first. The last part is staged and committed in one call.
        staged = [(self.parts[key].store, self.parts[key].stage(obs[key], next_obs[key])) for key in others]
        self.parts[last].append(obs[last], next_obs[last], row)
        for store, frames in staged:
            store.commit(frames, row=row)

    def _enforce_max_bytes(self, max_bytes: int) -> None:
        """Drop the oldest transitions until at most ``max_bytes`` are in use."""
        while (size := self.size) > 1 and self.nbytes > max_bytes:
            for store in self.stores:
                # A store that exceeds max_bytes alone has dropped its oldest transitions already.
                store.drop_oldest(min(_DROP_BATCH, size - 1) + store.size - size)

    def decode(self, rows: IndexArray, envs: IndexArray, device: th.device | None = None) -> tuple[Any, Any]:
        """
        Decode observations and next observations of a batch into arrays that no batch shares.

        :param device: Device of the batch, if images may be tensors on it
        """
        n, num_threads = len(rows), self._thread_count()
        before: dict[Any, Any] = {}
        after: dict[Any, Any] = {}
        on_gpu = device is not None and device.type != "cpu" and self.decode_on_gpu
        for key, part in self.parts.items():
            if on_gpu and len(part.shape) > 1:
                found = part.store.get_on_gpu(_as_int64(rows), _as_int64(envs), self._decoder_for(device))
                if found is not None:
                    before[key], after[key] = found
                    continue
            before[key], after[key] = part.empty(n), part.empty(n)
            part.store.get(_as_int64(rows), _as_int64(envs), before[key], after[key], num_threads=num_threads)
        return before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)

    def _decoder_for(self, device: Any) -> GpuDecoder:
        """Return the decoder for a GPU."""
        if self._gpu_decoder is None or self._gpu_decoder.device != device:
            self._gpu_decoder = GpuDecoder(device)
        return self._gpu_decoder

    def _decode_part(
        self, part: Part, of_next_obs: bool, rows: IndexArray, envs: IndexArray, *, reuse_memory: bool = True
    ) -> Array:
        """Decode the observations, or the next observations, of one part."""
        found = part.empty(len(rows)) if reuse_memory else np.empty((len(rows), *part.shape), part.dtype)
        part.store.get(
            _as_int64(rows),
            _as_int64(envs),
            *((None, found) if of_next_obs else (found, None)),
            num_threads=self._thread_count(),
        )
        return found

    def handles(self, rows: IndexArray, envs: IndexArray) -> HandlesByPart:
        """Return the handles of observations and next observations, each of shape ``(batch,)``, by part."""
        return {key: part.store.handles(_as_int64(rows), _as_int64(envs)) for key, part in self.parts.items()}

    def decode_handles(self, handles: HandlesByPart) -> tuple[Any, Any]:
        """Decode observations and next observations by their handles; 0 gives zeros."""
        before, after = {}, {}
        for key, part in self.parts.items():
            stacks, nexts = handles[key]
            before[key], after[key] = part.empty(len(stacks)), part.empty(len(nexts))
            part.store.get_stacks(stacks, before[key], nexts, after[key], num_threads=self._thread_count())
        return before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)

    def are_equal(self, left: Mapping[Any, IndexArray], right: Mapping[Any, IndexArray]) -> npt.NDArray[np.bool_]:
        """Return which of two batches of handles refer to equal observations, shape ``(batch,)``.

        :param left, right: Handles of shape ``(batch,)``, by part
        """
        equal = np.ones(len(left[next(iter(left))]), dtype=np.bool_)
        for key, part in self.parts.items():
            # Equal observations usually have equal handles. Only those that were stored twice are decoded.
            differ = np.flatnonzero(left[key] != right[key])
            if len(differ):
                sides = [np.empty((len(differ), *part.shape), dtype=part.dtype) for _ in range(2)]
                for handles, stacks in zip((left[key], right[key]), sides, strict=True):
                    part.store.get_stacks(handles[differ], stacks, num_threads=self._thread_count())
                equal[differ] &= ~differing_rows(*sides)
        return equal

    def _thread_count(self) -> int:
        """Return the number of threads that decode a batch."""
        return th.get_num_threads() if self.num_threads is None else self.num_threads

    def map_parts(self, read: Callable[[Part], Any]) -> Any:
        """Apply a function to each part. Return a dict by key, or the only result."""
        found = {key: read(part) for key, part in self.parts.items()}
        return found.get(_SINGLE_KEY, found)

    def views(self, *, of_next_obs: bool = False, writable: bool = False) -> Any:
        """Return views for SB3's ``observations`` or ``next_observations``."""

        def view(part: Part) -> ObservationView:
            """Return the view of one part."""
            decode, append = partial(self._decode_part, part, of_next_obs), part.append_step if writable else None
            return ObservationView(decode, part.buffer_shape, part.shape, part.dtype, append=append)

        return self.map_parts(view)

    def is_decoded_batch(self, array: Array) -> bool:
        """Return whether a batch was decoded into this array, or into the array that it views."""
        owner = array if array.base is None else array.base
        return any(part.recycled.owns(owner) for part in self.parts.values())

    @property
    def recycled_nbytes(self) -> int:
        """Size of the arrays that batches are decoded into, in bytes."""
        return sum(part.recycled.nbytes for part in self.parts.values())

    @property
    def size(self) -> int:
        """Number of transitions per environment that all parts contain."""
        return min([store.size for store in self.stores])

    @property
    def _rows_in_use(self) -> int:
        """Number of rows that contain transitions."""
        return self.first.capacity if self.first.full else self.first.position

    @property
    def nbytes(self) -> int:
        """Size of frames, index and rows, in bytes."""
        own = sum(array[: self._rows_in_use].nbytes for array in self._own_arrays.values())
        return own + sum(store.nbytes for store in self.stores)

    @defer_signals
    def clear(self) -> None:
        """Remove all transitions."""
        for store in self.stores:
            store.clear()

    @defer_signals
    def close(self) -> None:
        """Flush the stores, and release their folders for other processes."""
        for store in self.stores:
            store.close()

    def folder_state(self) -> dict[str, Any]:
        """Return the folder and the position in it as plain values, for :meth:`open_saved`."""
        for store in self.stores:
            store.flush()
        given = os.fspath(self.storage_dir)  # type: ignore[arg-type]
        options = {"num_threads": self.num_threads, "max_bytes": self.max_bytes, **self._arguments}
        where = {"folder": os.path.abspath(given), "given": given, "number": self._newest_number}
        return {**where, "size": self.size, "arguments": options}

    @classmethod
    def open_saved(cls, saved: dict[str, Any], replaced: Observations | None) -> Observations:
        """
        Open the folder of a saved buffer, at its position when it was saved.

        If the folder has newer transitions, or another buffer of this process uses it, it is copied.

        :param saved: Result of :meth:`folder_state`
        :param replaced: Observations of the buffer that the saved one replaces; they are closed if they are in the
            folder
        :raises StorageError: If the folder does not exist, belongs to another buffer, or another process uses it.
        :raises InvalidArgumentError: If all saved transitions were overwritten.
        """
        number, start = saved["number"], saved["number"] >> _NUMBER_BITS
        # If the folder was moved, the model may have opened it by its new name.
        living = [found for found in _in_folders if found._is_open and found._newest_number >> _NUMBER_BITS == start]
        opened = next((found for found in living if found is replaced), living[0] if living else None)
        if opened is None:
            paths = dict.fromkeys([saved["folder"], os.path.abspath(saved["given"])])
            path = next(filter(os.path.isdir, paths), None)
            if path is None:
                raise StorageError(
                    f"the saved replay buffer is in storage_dir={saved['folder']!r}, which does not exist. Restore "
                    "that folder, or continue without its transitions: leave out load_replay_buffer"
                )
            opened = replaced = cls(**saved["arguments"], storage_dir=path, resume=True)
            if opened._newest_number >> _NUMBER_BITS != start:
                opened.close()
                raise StorageError(
                    f"storage_dir={path!r} does not contain the saved replay buffer, but another one. Restore the "
                    "folder of the saved one, or leave out load_replay_buffer"
                )
        folder = os.path.abspath(os.fspath(opened.storage_dir))  # type: ignore[arg-type]
        newer = opened._newest_number - number
        if opened is replaced and newer <= 0:
            opened.close()
            _logger.info("the loaded replay buffer continues in %s", folder)
            if newer < 0:
                _logger.warning("%s lacks the newest %d transitions of the saved replay buffer", folder, -newer)
            return cls(**saved["arguments"], storage_dir=opened.storage_dir, resume=True)
        with opened.lock:
            for store in opened.stores:
                store.flush()
            if newer > 0 and newer >= opened.size:
                raise InvalidArgumentError(
                    f"storage_dir={folder!r} has overwritten the {saved['size']} transitions of the saved replay "
                    "buffer with newer ones. To continue with those, leave out load_replay_buffer"
                )
            copy = _free_name(folder)
            copy_stores(Path(folder), Path(copy))
        if opened is replaced:
            opened.close()
        _logger.warning(
            "%s %s, so the loaded replay buffer continues in a copy: %s. To continue in the folder instead, leave out "
            "load_replay_buffer",
            folder,
            f"has {newer} transitions that are newer than the saved replay buffer" if newer > 0 else "is in use",
            copy,
        )
        found = cls(**saved["arguments"], storage_dir=copy, resume=True)
        if newer > 0:
            found._newest_number = number
            for store in found.stores:
                store.drop_newest(newer)
        return found

    @property
    def _is_open(self) -> bool:
        """Whether the folder is open."""
        return not any(store.closed for store in self.stores)

    def __getstate__(self) -> dict[str, Any]:
        # Views of the rows in use: pickle protocol 5 writes them without a copy.
        arrays = {name: array[: self._rows_in_use] for name, array in self.arrays.items()}
        names = ("parts", "num_threads", "max_bytes", "decode_on_gpu")
        return {**{name: getattr(self, name) for name in names}, "arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_threads, self.max_bytes = state["num_threads"], state["max_bytes"]
        self.decode_on_gpu = state.get("decode_on_gpu", False)
        self.recovered = None
        self._set_parts(state["parts"], rows_in_store=self.max_bytes is not None)
        for name, rows in state["arrays"].items():
            self.rows(name, rows.shape[1:], rows.dtype)[: len(rows)] = rows


def _prefix_key(key: Any, error: RlExtError) -> None:
    """Raise an error again with its ``Dict`` key as prefix; without a key, do nothing."""
    if key is not _SINGLE_KEY:
        raise type(error)(f"key {key!r}: {error}") from error


def _random_start() -> int:
    """Return a random number to count transitions from, so that two buffers share no numbers."""
    return secrets.randbits(30) << _NUMBER_BITS


def _free_name(folder: str) -> str:
    """Return a name for a copy of a folder that does not exist yet."""
    number = 1
    while os.path.exists(name := f"{folder}-copy{number}"):
        number += 1
    return name


def quote_key(key: Any) -> str:
    """Return the name of a key's folder."""
    return quote(str(key), safe="").replace(".", "%2E")


def _folder_by_key(storage_dir: str | os.PathLike[str] | None, keys: list[Any]) -> dict[Any, Path | None]:
    """Return the folder of each key, or None without ``storage_dir``."""
    path = None if storage_dir is None else validate_path(storage_dir)
    if path is None or _SINGLE_KEY in keys:
        return dict.fromkeys(keys, path)
    names = {key: quote_key(key) for key in keys}
    if unknown := sorted({entry.name for entry in path.glob("*")} - set(names.values())):
        raise InvalidArgumentError(
            f"storage_dir={str(path)!r} contains {unknown}, expected only folders of the keys {keys}. Pass the "
            "observation space that it was made with, or another storage_dir"
        )
    return {key: path / name for key, name in names.items()}


def _options_for_key(key: Any, options: Mapping[str, Any], *, image: bool) -> dict[str, Any]:
    """Return the options of one key, with defaults."""
    chosen = {}
    for name, default in _DEFAULTS.items():
        value = options.get(name, default)
        value = value.get(key, default) if isinstance(value, Mapping) else value if image else default
        chosen[name] = check_count(name, value) if default is None and value is not None else value
    return chosen
