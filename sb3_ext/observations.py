"""What all compressed buffers are made of: the observations of a space, ``Dict`` or not, in frame stores."""

from __future__ import annotations

import math
import operator
import os
import secrets
import warnings
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
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, RlExtError
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.folder import validate_path
from rl_ext_core.frames.planning import MemoryWatch
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.vector.environments import check_count
from sb3_ext.observation_view import ObservationView

IndexArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]

_SINGLE_KEY = None  # the key of an observation that is no Dict
_DEFAULTS: dict[str, Any] = {"codec": "auto", "n_stack": None, "block_length": None, "max_error": 0, "quality": 95}
STORE_OPTIONS = (*_DEFAULTS, "num_threads", "max_bytes", "storage_dir")

_DROP_BATCH = 16  # transitions an environment that are given up at a time
_NUMBER_BITS = 32


def _as_int64(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return numbers.astype(np.int64, copy=False)  # on Windows, NumPy draws numbers of 32 bits


class Part:
    """What has a store of its own: an observation that is no ``Dict``, or one key of a ``Dict``."""

    def __init__(self, key: Any, store: FrameStore) -> None:
        self.store = store
        self.shape, self.dtype = store.layout.shape, store.layout.dtype
        self.buffer_shape = store.capacity, store.n_envs
        self.recycled = RecycledArrays()
        self._key = key
        self._batch_shape = (store.n_envs, *self.shape)
        self._cast_warned = False  # that it comes in another dtype

    def __reduce__(self) -> Any:
        return Part, (self._key, self.store)  # what was decoded stays with its users

    def stage(self, obs: Any, next_obs: Any) -> npt.NDArray[np.int64]:
        """Store the frames of one transition of each environment; see :meth:`FrameStore.stage`."""
        try:
            return self.store.stage(self._match_space(obs, "obs"), self._match_space(next_obs, "next_obs"))
        except RlExtError as error:
            _prefix_key(self._key, error)
            raise

    def append(self, obs: Any, next_obs: Any, row: int) -> None:
        """Store them and make them a transition; see :meth:`FrameStore.append`."""
        try:
            self.store.append(self._match_space(obs, "obs"), self._match_space(next_obs, "next_obs"), row=row)
        except RlExtError as error:
            _prefix_key(self._key, error)
            raise

    def append_step(self, row: int, obs: Any) -> None:
        """Store one step of a rollout."""
        try:
            row = operator.index(row)
        except TypeError:
            raise InvalidTypeError(
                f"observations of a rollout are assigned row by row, not by {row!r}; write "
                "buffer.observations[row] = observations, of all environments"
            ) from None
        if row >= self.buffer_shape[0]:
            raise InvalidArgumentError(f"the rollout is full with {row} steps; call reset() before the next one")
        self.append(obs, obs, row)

    def empty(self, n: int) -> Array:
        """Return an array to decode ``n`` observations into, which nobody else holds."""
        return self.recycled.empty((n, *self.shape), self.dtype)

    def _match_space(self, obs: Any, name: str) -> Array:
        """Return them in the observation space's dtype, which environments may not keep to, and with all axes."""
        stack = np.asarray(obs)
        if stack.dtype != self.dtype:
            stack = self._cast_to_space_dtype(stack, name)
        shape = self._batch_shape
        # Upstream's callers may leave one out: of one environment, or of a discrete observation's only value.
        if stack.shape != shape and stack.shape in (shape[1:], shape[:-1]) and stack.size == math.prod(shape):
            return stack.reshape(shape)
        return stack

    def _cast_to_space_dtype(self, stack: Array, name: str) -> Array:
        """Return what assigning it to the arrays of Stable Baselines3's buffers makes of it."""
        try:
            cast = stack.astype(self.dtype, copy=False)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"{name} has dtype {stack.dtype}, expected {self.dtype} ({error}); nothing was stored"
            ) from error
        if not self._cast_warned and not np.can_cast(stack.dtype, self.dtype, "safe"):
            self._cast_warned = True
            warnings.warn(
                f"{name if self._key is _ALONE else f'{name}[{self._key!r}]'} comes as {stack.dtype} and the "
                f"observation space says {self.dtype}: from here on it is cast, as Stable Baselines3's buffers do in "
                f"silence, which may change values; return observations as np.{self.dtype} from the environment to be "
                "without this warning",
                stacklevel=5,
            )
        return cast


class Observations:
    """
    Observations go in and come out as Stable Baselines3 has them: an array, or a dictionary of arrays. One that is no
    ``Dict`` is a group of one part. All parts hold the same transitions, in the same rows.

    :param space: Observation space
    :param buffer_shape: Transitions an environment, and number of environments
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``
    :param max_bytes: Bytes for all of it together, or None for as many as it takes
    :param storage_dir: Folder that they are kept in, those of a ``Dict`` in one of its own for each key
    :param options: Of :meth:`FrameStore.adaptive`. For a ``Dict``, a dictionary gives an option by key; any other value
        holds for the images, which are the keys of two or more dimensions
    :ivar parts: Each with its store, by key
    :ivar first: The store that says which row is next
    :ivar lock: Of the buffer: whoever changes it, or writes it to a file, holds this
    :ivar arrays: What :meth:`rows` has returned, by name
    :ivar recovered: What was found in the folders, see :class:`FrameStore`; None where nothing was
    :ivar watch: Warns where they will not fit into memory; None where that is no question
    :raises InvalidArgumentError: if an option is given for a key that is not there, or the folders are not those of one
        buffer
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        buffer_shape: tuple[int, int],
        *,
        num_threads: int | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        by_key: dict[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else {_SINGLE_KEY: space}
        if not by_key:
            raise InvalidArgumentError(f"the observation space {space} has no keys, so that there is nothing to store")
        for name, value in options.items():
            if isinstance(value, Mapping) and (unknown := [key for key in value if key not in by_key]):
                raise InvalidArgumentError(f"{name} is given for {unknown}, which are not among the keys {[*by_key]}")
        self.num_threads = None if num_threads is None else check_count("num_threads", num_threads)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        folders = _folder_by_key(storage_dir, [*by_key])
        parts: dict[Any, Part] = {}
        try:
            for key, subspace in by_key.items():
                shape: Any = get_obs_shape(subspace)
                try:
                    chosen = _options_for_key(key, options, image=key is _SINGLE_KEY or len(shape) > 1)
                    chosen |= {"max_bytes": self.max_bytes, "storage_dir": folders[key]}
                    parts[key] = Part(
                        key, FrameStore.adaptive(buffer_shape[0], buffer_shape[1], shape, subspace.dtype, **chosen)
                    )
                except RlExtError as error:
                    _prefix_key(key, error)
                    raise
            self._set_parts(parts, rows_in_store=max_bytes is not None or storage_dir is not None)
            if storage_dir is not None and len(parts) > 1:
                self._reconcile_stores(storage_dir)
        except BaseException:
            for part in parts.values():
                part.store.close()
            raise
        found = [store.recovered for store in self.stores if store.recovered is not None]
        lost, overwritten = (max((part[place] for part in found), default=0) for place in (1, 2))
        self.recovered = found[0]._replace(kept=self.size, lost=lost, overwritten=overwritten) if found else None

    def _set_parts(self, parts: dict[Any, Part], *, rows_in_store: bool) -> None:
        self.parts, self._rows_in_store = parts, rows_in_store
        self.stores = [part.store for part in parts.values()]
        self.first = self.stores[0]
        self.lock = make_fork_safe_lock()
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._own_arrays: dict[str, npt.NDArray[Any]] = {}  # those that no store counts
        self._transition_numbers: list[
            npt.NDArray[np.int64]
        ] = []  # of the transition in each row, in each store's folder
        self._newest_number = 0
        self.watch: MemoryWatch | None = None

    def _reconcile_stores(self, storage_dir: Any) -> None:
        """Have the stores hold the same transitions: each may have lost other ones when its process was killed."""
        self._transition_numbers = [store.rows("number", (), np.int64) for store in self.stores]
        if not any(store.size for store in self.stores):
            self._newest_number = _random_start()
            return
        if new := [key for key, part in self.parts.items() if part.store.recovered is None]:
            raise InvalidArgumentError(
                f"storage_dir={str(storage_dir)!r} has nothing of {new}, and transitions of the other keys; pass the "
                "observation space that it was made with, or another storage_dir"
            )
        pairs = zip(self.stores, self._transition_numbers, strict=True)
        ends = {store: int(numbers[store.position - 1]) if store.size else 0 for store, numbers in pairs}
        if len({end >> _NUMBER_BITS for end in ends.values() if end}) > 1:
            raise InvalidArgumentError(
                f"storage_dir={str(storage_dir)!r} holds folders of different buffers, one for each of "
                f"{[*self.parts]}; put back those that belong together, or pass another storage_dir"
            )
        self._newest_number = min(ends.values())
        if all(store.size > end - self._newest_number for store, end in ends.items()):
            for store, end in ends.items():
                store.drop_newest(end - self._newest_number)
        else:
            self.clear()  # there is no transition that all of them hold
            self._newest_number = _random_start()

    def rows(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, any_row_writable: bool = False
    ) -> npt.NDArray[Any]:
        """
        Return an array with one row a transition, kept where the frames are. Only the newest row may be written to.

        :param any_row_writable: Any row may be written to; the array is in memory in any case
        """
        if any_row_writable or not self._rows_in_store:
            self._own_arrays[name] = np.zeros((self.first.capacity, *shape), dtype=dtype)
        self.arrays[name] = self._own_arrays[name] if name in self._own_arrays else self.first.rows(name, shape, dtype)
        return self.arrays[name]

    def check_budget(self) -> None:
        """
        Call it once all rows were asked for.

        :raises InvalidArgumentError: if they would leave too little of the budget to frames
        """
        n_places = self.first.capacity * self.first.n_envs
        n_bytes = 8 * n_places * len(self.stores) + sum(array.nbytes for array in self.arrays.values())
        if self.max_bytes is not None and n_bytes > self.max_bytes // 2:
            raise InvalidArgumentError(
                f"buffer_size={n_places:,} takes {n_bytes:,} of max_bytes={self.max_bytes:,} for what goes with the "
                "frames: actions, rewards, flags and an index; pass a smaller buffer_size, or more max_bytes"
            )

    def append(self, obs: Any, next_obs: Any, *, row: int) -> None:
        """
        Store one transition of each environment in a row.

        :raises RlExtError: if it cannot be stored; then no store holds any of it
        """
        *others, (last, before, after) = self._split_by_part(obs, next_obs)
        # What may fail comes first: for the last part, that and the rest are one step.
        staged = [(part.store, part.stage(*pair)) for part, *pair in others]
        last.append(before, after, row)
        for store, frames in staged:
            store.commit(frames, row=row)
        self._newest_number += 1
        for numbers in self._transition_numbers:
            numbers[row] = self._newest_number
        if self.max_bytes is not None and len(self.stores) > 1:
            self._enforce_max_bytes(self.max_bytes)

    def _split_by_part(self, obs: Any, next_obs: Any) -> list[tuple[Part, Any, Any]]:
        if _SINGLE_KEY in self.parts:
            return [(self.parts[_SINGLE_KEY], obs, next_obs)]
        for name, given in (("obs", obs), ("next_obs", next_obs)):
            if not isinstance(given, Mapping) or not self.parts.keys() <= given.keys():
                problem = (
                    f"has keys {list(given)}" if isinstance(given, Mapping) else f"is of type {type(given).__name__}"
                )
                raise InvalidArgumentError(f"{name} {problem}, expected those of {[*self.parts]}; nothing was stored")
        return [(part, obs[key], next_obs[key]) for key, part in self.parts.items()]

    def _enforce_max_bytes(self, max_bytes: int) -> None:
        while (size := self.size) > 1 and self.nbytes > max_bytes:
            for store in self.stores:
                # One that is too large by itself has given up its oldest before.
                store.drop_oldest(min(_DROP_BATCH, size - 1) + store.size - size)

    def decode(self, rows: IndexArray, envs: IndexArray) -> tuple[Any, Any]:
        """Return observations and next observations of a batch of places, in arrays that nobody else holds."""
        n, num_threads = len(rows), self._thread_count()
        before, after = {}, {}
        for key, part in self.parts.items():
            before[key], after[key] = part.empty(n), part.empty(n)
            part.store.get(_as_int64(rows), _as_int64(envs), before[key], after[key], num_threads=num_threads)
        return before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)

    def _decode_part(self, part: Part, of_next_obs: bool, rows: IndexArray, envs: IndexArray) -> Array:
        found = part.empty(len(rows))
        part.store.get(
            _as_int64(rows),
            _as_int64(envs),
            *((None, found) if of_next_obs else (found, None)),
            num_threads=self._thread_count(),
        )
        return found

    def _thread_count(self) -> int:
        return th.get_num_threads() if self.num_threads is None else self.num_threads

    def map_parts(self, read: Callable[[Part], Any]) -> Any:
        """Return what is read of each part as Stable Baselines3 has it: by key, or the only one."""
        found = {key: read(part) for key, part in self.parts.items()}
        return found.get(_SINGLE_KEY, found)

    def views(self, *, of_next_obs: bool = False, writable: bool = False) -> Any:
        """Return Stable Baselines3's ``observations`` or ``next_observations``; a rollout takes assignments."""

        def view(part: Part) -> ObservationView:
            decode, append = partial(self._decode_part, part, of_next_obs), part.append_step if writable else None
            return ObservationView(decode, part.buffer_shape, part.shape, part.dtype, append=append)

        return self.map_parts(view)

    def is_decoded_batch(self, array: Array) -> bool:
        """Return whether the array is one that a batch was decoded into, or a view of it."""
        owner = array if array.base is None else array.base
        return any(part.recycled.owns(owner) for part in self.parts.values())

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays that batches are decoded into."""
        return sum(part.recycled.nbytes for part in self.parts.values())

    @property
    def size(self) -> int:
        """Transitions held by all parts, an environment."""
        return min([store.size for store in self.stores])

    @property
    def _rows_in_use(self) -> int:
        return self.first.capacity if self.first.full else self.first.position

    @property
    def nbytes(self) -> int:
        """Bytes held: frames, index and rows."""
        own = sum(array[: self._rows_in_use].nbytes for array in self._own_arrays.values())
        return own + sum(store.nbytes for store in self.stores)

    @defer_signals
    def clear(self) -> None:
        """Forget all transitions."""
        for store in self.stores:
            store.clear()

    @defer_signals
    def close(self) -> None:
        """Write what is not written yet, and let another process open the folders."""
        for store in self.stores:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        # Views of the rows in use: pickle protocol 5 writes them without a copy.
        arrays = {name: array[: self._rows_in_use] for name, array in self.arrays.items()}
        return {"parts": self.parts, "num_threads": self.num_threads, "max_bytes": self.max_bytes, "arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_threads, self.max_bytes = state["num_threads"], state["max_bytes"]
        self.recovered = None
        self._set_parts(state["parts"], rows_in_store=self.max_bytes is not None)
        for name, rows in state["arrays"].items():
            self.rows(name, rows.shape[1:], rows.dtype)[: len(rows)] = rows


def _prefix_key(key: Any, error: RlExtError) -> None:
    """Have an error say which key of a ``Dict`` it is about."""
    if key is not _SINGLE_KEY:
        raise type(error)(f"key {key!r}: {error}") from error


def _random_start() -> int:
    """Return what the transitions of a buffer are counted from: no other buffer's numbers are the same."""
    return secrets.randbits(30) << _NUMBER_BITS


def _folder_by_key(storage_dir: str | os.PathLike[str] | None, keys: list[Any]) -> dict[Any, Path | None]:
    """Return the folder of each key."""
    path = None if storage_dir is None else validate_path(storage_dir)
    if path is None or _SINGLE_KEY in keys:
        return dict.fromkeys(keys, path)
    names = {key: quote(str(key), safe="").replace(".", "%2E") for key in keys}
    if unknown := sorted({entry.name for entry in path.glob("*")} - set(names.values())):
        raise InvalidArgumentError(
            f"storage_dir={str(path)!r} holds {unknown}, which does not belong to the keys {keys}; pass "
            "the observation space that it was made with, or another storage_dir"
        )
    return {key: path / name for key, name in names.items()}


def _options_for_key(key: Any, options: Mapping[str, Any], *, image: bool) -> dict[str, Any]:
    """Return what was chosen for one part."""
    chosen = {}
    for name, default in _DEFAULTS.items():
        value = options.get(name, default)
        value = value.get(key, default) if isinstance(value, Mapping) else value if image else default
        chosen[name] = check_count(name, value) if default is None and value is not None else value
    return chosen
