"""Observation storage shared by all compressed buffers: one store of frames for all keys."""

from __future__ import annotations

import math
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from rl_ext_core._values import may_be_same
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.gpu_decode import GpuDecoder
from rl_ext_core.frames.layout import differing_rows
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.frames.store import FrameStore, Observation, prefix_key
from rl_ext_core.vector.environments import check_count
from sb3_ext.observation_view import ObservationView

IndexArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]
HandlesByKey = dict[Any, tuple[IndexArray, IndexArray]]

_SINGLE_KEY = None  # key of an observation that is not a Dict
_DEFAULTS: dict[str, Any] = {"codec": "patch", "n_stack": None, "max_error": 0, "quality": 95}

in_folders: weakref.WeakSet[Observations] = weakref.WeakSet()  # of this process


def _as_int64(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Cast integers to int64; copy them only if needed."""
    return numbers.astype(np.int64, copy=False)  # on Windows, NumPy draws 32-bit integers


class Part:
    """Observations of one key of a ``Dict`` space, or of another space."""

    def __init__(self, key: Any, shape: tuple[int, ...], dtype: np.dtype[Any], buffer_shape: tuple[int, int]) -> None:
        self.key, self.shape, self.dtype, self.buffer_shape = key, shape, dtype, buffer_shape
        self.recycled = RecycledArrays()
        self._batch_shape = (buffer_shape[1], *shape)
        self._cast_warned = False

    def empty(self, n: int) -> Array:
        """Return an array to decode ``n`` observations into, which no batch in use shares."""
        return self.recycled.empty((n, *self.shape), self.dtype)

    def match_space(self, obs: Any, name: str) -> Array:
        """Return observations with the dtype of the space and with all axes."""
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
                f"{name if self.key is _SINGLE_KEY else f'{name}[{self.key!r}]'} has dtype {stack.dtype}, but the "
                f"observation space has {self.dtype}. Observations are cast, which may change values; Stable "
                "Baselines3's buffers cast silently. To avoid this warning, return observations of dtype "
                f"np.{self.dtype} from the environment",
                stacklevel=6,
            )
        return cast


class Observations:
    """
    Observations of a buffer, in SB3's form: an array, or a dict of arrays for a ``Dict``.

    :param space: Observation space
    :param buffer_shape: Transitions per environment, and number of environments
    :param row_fields: Name, dtype and shape of the other values of each row, as for :class:`numpy.dtype`
    :param num_threads: Number of threads that decode large batches; None for ``torch.get_num_threads()``
    :param max_bytes: Size limit in bytes; None for no limit
    :param storage_dir: Folder to store the transitions in
    :param resume: Whether to continue with the transitions in the folder
    :param decode_on_gpu: Whether :meth:`decode` decodes images on the GPU that it is asked for
    :param options: Fields of :class:`Observation`. A dict sets an option by key. Any other value applies to the images:
        the keys with two or more dimensions
    :ivar store: Store of all transitions; its position is that of the buffer
    :ivar parts: Observations by key; the key is None if the space is not a ``Dict``
    :ivar lock: Lock of the buffer, acquired to change the buffer or to write it to a file
    :ivar storage_dir: Folder of the observations, as passed; None if they are in memory
    :raises InvalidArgumentError: If an option is given for an unknown key, or the folder belongs to another buffer.
    """

    storage_dir: str | os.PathLike[str] | None = None

    def __init__(
        self,
        space: spaces.Space[Any],
        buffer_shape: tuple[int, int],
        *,
        row_fields: Sequence[tuple[str, Any, tuple[int, ...]]] = (),
        num_threads: int | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        decode_on_gpu: bool = False,
        **options: Any,
    ) -> None:
        by_key: dict[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else {_SINGLE_KEY: space}
        if not by_key:
            raise InvalidArgumentError(f"observation_space={space} has no keys, expected at least one")
        for name, value in options.items():
            if isinstance(value, Mapping) and (unknown := [key for key in value if key not in by_key]):
                raise InvalidArgumentError(f"{name} is given for {unknown}, expected keys among {[*by_key]}")
        self.num_threads = None if num_threads is None else check_count("num_threads", num_threads)
        self.decode_on_gpu = decode_on_gpu
        self.arguments = {
            "space": space,
            "buffer_shape": buffer_shape,
            "row_fields": row_fields,
            "decode_on_gpu": decode_on_gpu,
            "num_threads": num_threads,
            "max_bytes": max_bytes,
            **options,
        }
        given = {}
        for key, subspace in by_key.items():
            shape: Any = get_obs_shape(subspace)
            with prefix_key(key):
                chosen = _options_for_key(key, options, image=key is _SINGLE_KEY or len(shape) > 1)
                given[key] = Observation(shape, subspace.dtype, **chosen)
        store = FrameStore(
            *buffer_shape,
            given.get(_SINGLE_KEY, given),
            row_dtype=np.dtype([*row_fields]) if row_fields else None,
            max_bytes=None if max_bytes is None else check_count("max_bytes", max_bytes),
            storage_dir=storage_dir,
            resume=resume,
        )
        self._set_store(store)
        if storage_dir is not None:
            self.storage_dir = storage_dir
            in_folders.add(self)

    def _set_store(self, store: FrameStore) -> None:
        """Set the store, and initialize the attributes that are derived from it."""
        self.store, self.lock = store, store.lock
        shape = store.capacity, store.n_envs
        self.parts: dict[Any, Part] = {}
        for key, found in store.parts.items():
            self.parts[key] = Part(key, found.layout.shape, found.layout.dtype, shape)
            found.converter = self.parts[key].match_space
        self._step: dict[Any, Any] = {}  # observations of a rollout's step, until all keys are given
        self._gpu_decoder: GpuDecoder | None = None

    def append_step(self, key: Any, row: Any, obs: Any) -> None:
        """Store the observations of one step of a rollout, once those of all keys are given."""
        try:
            row = operator.index(row)
        except TypeError:
            raise InvalidTypeError(
                f"observations of a rollout are assigned row by row, not by {row!r}. Use "
                "buffer.observations[row] = observations, with those of all environments"
            ) from None
        store = self.store
        if row not in (store.size, store.size - 1) or row >= store.capacity:
            raise InvalidArgumentError(
                f"step {row} cannot be stored, because the rollout has {store.size} of {store.capacity} steps: "
                "expected the next one. Call reset() before the next rollout"
            )
        self._step[key] = obs
        if len(self._step) == len(self.parts):
            step, self._step = self._step, {}
            step = step.get(_SINGLE_KEY, step)
            if row < store.size:  # add() failed after the observations were stored
                store.drop_newest(1)
            store.append(step, step)

    def decode(self, rows: IndexArray, envs: IndexArray, device: th.device | None = None) -> tuple[Any, Any]:
        """
        Decode observations and next observations of a batch into arrays that no batch shares.

        :param device: Device of the batch, if images may be tensors on it
        """
        rows, envs, decoder = _as_int64(rows), _as_int64(envs), self._decoder_for(device)
        on_gpu = [key for key, part in self.parts.items() if len(part.shape) > 1 and decoder is not None]
        on_gpu = [key for key in on_gpu if decoder.can_decode(self.store.parts[key])]
        before: dict[Any, Any] = {key: part.empty(len(rows)) for key, part in self.parts.items() if key not in on_gpu}
        after: dict[Any, Any] = {key: self.parts[key].empty(len(rows)) for key in before}
        if before:
            outs = before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)
            self.store.get(rows, envs, *outs, num_threads=self._thread_count())
        for key in on_gpu:
            before[key], after[key] = decoder.get(self.store, rows, envs, key)
        return before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)

    def _decoder_for(self, device: Any) -> Any:
        """Return the decoder for a GPU; None if images are decoded on the CPU."""
        if device is None or device.type == "cpu" or not self.decode_on_gpu:
            return None
        if self._gpu_decoder is None or self._gpu_decoder.device != device:
            self._gpu_decoder = GpuDecoder(device)
        return self._gpu_decoder

    def _decode_part(
        self, key: Any, of_next_obs: bool, rows: IndexArray, envs: IndexArray, *, reuse_memory: bool = True
    ) -> Array:
        """Decode the observations, or the next observations, of one key."""
        part = self.parts[key]
        found = part.empty(len(rows)) if reuse_memory else np.empty((len(rows), *part.shape), part.dtype)
        out: Any = found if key is _SINGLE_KEY else {key: found}
        outs = (None, out) if of_next_obs else (out, None)
        self.store.get(_as_int64(rows), _as_int64(envs), *outs, num_threads=self._thread_count())
        return found

    def handles(self, rows: IndexArray, envs: IndexArray) -> HandlesByKey:
        """Return the handles of observations and next observations, each of shape ``(batch,)``, by key."""
        return self.store.handles(_as_int64(rows), _as_int64(envs))

    def decode_handles(self, handles: HandlesByKey) -> tuple[Any, Any]:
        """Decode observations and next observations by their handles; 0 gives zeros."""
        outs: list[dict[Any, Any]] = [{}, {}]
        for key, part in self.parts.items():
            for found, out in zip(handles[key], outs, strict=True):
                out[key] = part.empty(len(found))
                self.store.get_stacks(found, out[key], key=key, num_threads=self._thread_count())
        before, after = (out.get(_SINGLE_KEY, out) for out in outs)
        return before, after

    def are_equal(self, left: Mapping[Any, IndexArray], right: Mapping[Any, IndexArray]) -> npt.NDArray[np.bool_]:
        """Return which of two batches of handles refer to equal observations, shape ``(batch,)``.

        With ``max_error``, those are equal that may be one picture.

        :param left, right: Handles of shape ``(batch,)``, by key
        """
        equal = np.ones(len(left[next(iter(left))]), dtype=np.bool_)
        for key, part in self.parts.items():
            # Equal observations usually have equal handles. Only those that were stored twice are decoded.
            differ = np.flatnonzero(left[key] != right[key])
            if len(differ):
                sides = [np.empty((len(differ), *part.shape), dtype=part.dtype) for _ in range(2)]
                for handles, stacks in zip((left[key], right[key]), sides, strict=True):
                    self.store.get_stacks(handles[differ], stacks, key=key, num_threads=self._thread_count())
                max_error = self.store.parts[key].max_error
                equal[differ] &= may_be_same(sides[0], sides[1], max_error) if max_error else ~differing_rows(*sides)
        return equal

    def _thread_count(self) -> int:
        """Return the number of threads that decode a batch."""
        return th.get_num_threads() if self.num_threads is None else self.num_threads

    def map_parts(self, read: Callable[[Any], Any]) -> Any:
        """Apply a function to the store's options of each key. Return a dict by key, or the only result."""
        found = {key: read(part) for key, part in self.store.parts.items()}
        return found.get(_SINGLE_KEY, found)

    def views(self, *, of_next_obs: bool = False, writable: bool = False) -> Any:
        """Return views for SB3's ``observations`` or ``next_observations``."""

        def view(key: Any, part: Part) -> ObservationView:
            """Return the view of one key."""
            decode, append = partial(self._decode_part, key, of_next_obs), partial(self.append_step, key)
            return ObservationView(
                decode, part.buffer_shape, part.shape, part.dtype, append=append if writable else None
            )

        found = {key: view(key, part) for key, part in self.parts.items()}
        return found.get(_SINGLE_KEY, found)

    @property
    def recycled_nbytes(self) -> int:
        """Size of the arrays that batches are decoded into, in bytes."""
        return sum(part.recycled.nbytes for part in self.parts.values())

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("store", "num_threads", "decode_on_gpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_threads, self.decode_on_gpu = state["num_threads"], state["decode_on_gpu"]
        self._set_store(state["store"])


def _options_for_key(key: Any, options: Mapping[str, Any], *, image: bool) -> dict[str, Any]:
    """Return the options of one key, with defaults."""
    chosen = {}
    for name, default in _DEFAULTS.items():
        value = options.get(name, default)
        value = value.get(key, default) if isinstance(value, Mapping) else value if image else default
        chosen[name] = check_count(name, value) if default is None and value is not None else value
    return chosen
