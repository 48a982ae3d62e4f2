"""Observation storage shared by all compressed buffers: one store of frames for all keys."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Callable, Mapping
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
from rl_ext_core.frames.store import FrameStore, Observation, StoredPart, prefix_key
from rl_ext_core.vector.environments import check_count
from sb3_ext.observation_view import ObservationView

IndexArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]

_SINGLE_KEY = None  # key of an observation that is not a Dict


class Part:
    """Observations of one key of a ``Dict`` space, or of another space."""

    def __init__(self, stored: StoredPart) -> None:
        self.shape, self.dtype, self._batch_shape = stored.layout.shape, stored.layout.dtype, stored.batch_shape
        self.recycled = RecycledArrays()
        self._suffix = "" if stored.key is _SINGLE_KEY else f"[{stored.key!r}]"
        self._cast_warned = False
        stored.converter = self.match_space

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
                f"{name}{self._suffix} has dtype {stack.dtype}, but the observation space has {self.dtype}. "
                "Observations are cast, which may change values; Stable Baselines3's buffers cast silently. To avoid "
                f"this warning, return observations of dtype np.{self.dtype} from the environment",
                stacklevel=6,
            )
        return cast


class Observations:
    """
    Observations of a buffer, in SB3's form: an array, or a dict of arrays for a ``Dict``.

    :param store: Store of all transitions; its position is that of the buffer
    :param arguments: Arguments of :meth:`create`, except those of the folder
    :param storage_dir: Folder of the store, as passed; None if it is in memory
    :ivar parts: Observations by key; the key is None if the space is not a ``Dict``
    :ivar lock: Lock of the buffer, acquired to change the buffer or to write it to a file
    """

    def __init__(
        self, store: FrameStore, arguments: dict[str, Any], storage_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.store, self.lock, self.arguments, self.storage_dir = store, store.lock, arguments, storage_dir
        self.num_threads, self.decode_on_gpu = arguments["num_threads"], arguments["decode_on_gpu"]
        self.parts: dict[Any, Part] = {key: Part(stored) for key, stored in store.parts.items()}
        self._step: dict[Any, Any] = {}  # observations of a rollout's step, until all keys are given
        self._gpu_decoder: GpuDecoder | None = None

    def __reduce__(self) -> Any:
        return Observations, (self.store, self.arguments)

    @classmethod
    def create(
        cls,
        space: spaces.Space[Any],
        buffer_shape: tuple[int, int],
        *,
        row_dtype: npt.DTypeLike | None = None,
        num_threads: int | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        decode_on_gpu: bool = False,
        **options: Any,
    ) -> Observations:
        """
        Create a store of observations, or open one in a folder.

        :param space: Observation space
        :param buffer_shape: Transitions per environment, and number of environments
        :param row_dtype: Dtype of the other values of each row
        :param options: Fields of :class:`Observation`. A dict sets an option by key. Any other value applies to the
            images: the keys with two or more dimensions. The other arguments are options of the buffers
        :raises InvalidArgumentError: If an option is given for an unknown key, or the folder belongs to another buffer.
        """
        by_key: dict[Any, Any] = space.spaces if isinstance(space, spaces.Dict) else {_SINGLE_KEY: space}
        if not by_key:
            raise InvalidArgumentError(f"observation_space={space} has no keys, expected at least one")
        for name, value in options.items():
            if isinstance(value, Mapping) and (unknown := [key for key in value if key not in by_key]):
                raise InvalidArgumentError(f"{name} is given for {unknown}, expected keys among {[*by_key]}")
        for name, count in (("num_threads", num_threads), ("max_bytes", max_bytes)):
            if count is not None:
                check_count(name, count)
        given = {}
        for key, subspace in by_key.items():
            shape: Any = get_obs_shape(subspace)
            with prefix_key(key):
                chosen = _options_for_key(key, options, image=key is _SINGLE_KEY or len(shape) > 1)
                given[key] = Observation(shape, subspace.dtype, **chosen)
        observation = given.get(_SINGLE_KEY, given)
        rest: dict[str, Any] = {"row_dtype": row_dtype, "max_bytes": max_bytes}
        store = FrameStore(*buffer_shape, observation, **rest, storage_dir=storage_dir, resume=resume)
        rest |= {"num_threads": num_threads, "decode_on_gpu": decode_on_gpu, **options}
        return cls(store, {"space": space, "buffer_shape": buffer_shape, **rest}, storage_dir)

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
        # On Windows, NumPy draws 32-bit integers.
        rows, envs, decoder = rows.astype(np.int64, copy=False), envs.astype(np.int64, copy=False), None
        if self.decode_on_gpu and device is not None and device.type != "cpu":
            if self._gpu_decoder is None or self._gpu_decoder.device != device:
                self._gpu_decoder = GpuDecoder(device)
            decoder = self._gpu_decoder
        before: dict[Any, Any] = {}
        after: dict[Any, Any] = {}
        on_gpu = []
        for key, part in self.parts.items():
            if decoder is not None and len(part.shape) > 1 and decoder.can_decode(self.store.parts[key]):
                on_gpu.append(key)
            else:
                before[key], after[key] = part.empty(len(rows)), part.empty(len(rows))
        if before:
            outs = before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)
            self.store.get(rows, envs, *outs, num_threads=self._thread_count())
        for key in on_gpu:
            before[key], after[key] = decoder.get(self.store, rows, envs, key)  # type: ignore[union-attr]
        return before.get(_SINGLE_KEY, before), after.get(_SINGLE_KEY, after)

    def decode_part(
        self, key: Any, of_next_obs: bool, rows: IndexArray, envs: IndexArray, *, reuse_memory: bool = True
    ) -> Array:
        """
        Decode the observations, or the next observations, of one key.

        :param reuse_memory: Whether later batches may use the memory again, once the result is gone
        """
        part = self.parts[key]
        found = part.empty(len(rows)) if reuse_memory else np.empty((len(rows), *part.shape), part.dtype)
        out: Any = found if key is _SINGLE_KEY else {key: found}
        outs = (None, out) if of_next_obs else (out, None)
        self.store.get(rows, envs, *outs, num_threads=self._thread_count())
        return found

    def are_continued(self, rows: IndexArray, envs: IndexArray, where: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """
        Return whether the next observation of each step but the last is the observation of the step after it.

        With ``max_error``, those are equal that may be one picture.

        :param rows, envs: Steps, shape ``(batch, steps)``
        :param where: Steps to compare, shape ``(batch, steps - 1)``. The result is False for the others
        """
        handles = self.store.handles(rows.ravel(), envs.ravel())
        equal = where.copy()
        for key, part in self.parts.items():
            stacks, nexts = (found.reshape(rows.shape) for found in handles[key])
            sides = nexts[:, :-1], stacks[:, 1:]
            # Equal observations usually have equal handles. Only those that were stored twice are decoded.
            differ = equal & (sides[0] != sides[1])
            if differ.any():
                left, right = (np.empty((np.count_nonzero(differ), *part.shape), part.dtype) for _ in sides)
                for side, out in zip(sides, (left, right), strict=True):
                    self.store.get_stacks(side[differ], out, key=key, num_threads=self._thread_count())
                max_error = self.store.parts[key].max_error
                equal[differ] = may_be_same(left, right, max_error) if max_error else ~differing_rows(left, right)
        return equal

    def _thread_count(self) -> int:
        """Return the number of threads that decode a batch."""
        return th.get_num_threads() if self.num_threads is None else self.num_threads

    def map_parts(self, read: Callable[[Any], Any]) -> Any:
        """Apply a function to the store's options of each key. Return a dict by key, or the only result."""
        found = {key: read(part) for key, part in self.store.parts.items()}
        return found.get(_SINGLE_KEY, found)

    def views(self, **options: bool) -> Any:
        """Return views for SB3's ``observations`` or ``next_observations``, see :class:`ObservationView`."""
        found = {key: ObservationView(self, key, **options) for key in self.parts}
        return found.get(_SINGLE_KEY, found)

    @property
    def recycled_nbytes(self) -> int:
        """Size of the arrays that batches are decoded into, in bytes."""
        return sum(part.recycled.nbytes for part in self.parts.values())


def _options_for_key(key: Any, options: Mapping[str, Any], *, image: bool) -> dict[str, Any]:
    """Return the options of one key. Those that are left out have defaults."""
    chosen = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and key in value:
            chosen[name] = value[key]
        elif image and not isinstance(value, Mapping):
            chosen[name] = value
    if chosen.get("n_stack") is not None:
        chosen["n_stack"] = check_count("n_stack", chosen["n_stack"])
    return chosen
