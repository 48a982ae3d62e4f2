"""Views of compressed observations that are indexed like the arrays of SB3's buffers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.frames.planning import format_bytes
from rl_ext_core.resources import available_memory


class ObservationView(np.lib.mixins.NDArrayOperatorsMixin):
    """View of compressed observations that decodes what is indexed.

    It reads like the array ``(buffer_size, n_envs, *obs_shape)`` of SB3's buffers: ``view[rows]``,
    ``view[rows, envs]``, ``np.asarray(view)``, ``view / 255``, ``view.mean(axis=0)``. Indexing decodes into a new
    array; rows that were never added are zero. Arithmetic and array methods decode everything, so index first:
    ``view[:1000].mean()``. Only a rollout can be written to, row by row.

    :param source: The :class:`Observations`
    :param key: Key of a ``Dict``; None for other spaces
    :param of_next_obs: Whether to decode the next observations
    :param writable: Whether ``view[row] = observations`` stores the next step of a rollout
    :param is_flat: Whether the first two axes are one, with all steps of environment 0 first
    :ivar ndim: Number of axes
    :ivar size: Number of values
    :ivar nbytes: Size of all observations once they are decoded, in bytes
    """

    def __init__(
        self, source: Any, key: Any, *, of_next_obs: bool = False, writable: bool = False, is_flat: bool = False
    ) -> None:
        self._source, self._key, self._of_next_obs, self._writable = source, key, of_next_obs, writable
        store, part = source.store, source.parts[key]
        self._buffer_shape = (store.n_envs * store.capacity,) if is_flat else (store.capacity, store.n_envs)
        self.shape: tuple[int, ...] = (*self._buffer_shape, *part.shape)
        self.dtype = part.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[np.generic]:
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) == len(self._buffer_shape) and all(getattr(key, "dtype", None) == np.int64 for key in keys):
            # Buffers index so for each batch. Other shapes, and rows that do not exist, are left to NumPy.
            with contextlib.suppress(InvalidArgumentError, TypeError):
                return self._decode(*keys)
        place, rest = self._split_key(keys)
        positions = [grid[place] for grid in np.broadcast_arrays(*np.indices(self._buffer_shape, sparse=True))]
        # Always copy, because NumPy warns of broadcast arrays if numba reads them.
        flat = [np.array(part, dtype=np.int64, order="C").reshape(-1) for part in positions]
        found = self._decode(*flat, reuse_memory=False).reshape(
            *positions[0].shape, *self.shape[len(self._buffer_shape) :]
        )
        part: npt.NDArray[np.generic] = found[(slice(None),) * positions[0].ndim + rest]
        return part

    def _decode(self, *places: npt.NDArray[np.int64], **options: bool) -> npt.NDArray[np.generic]:
        """Decode the observations at ``(n,)`` positions along each axis of ``buffer_shape``."""
        if len(places) == 1:  # all steps of environment 0 come first
            envs, rows = np.divmod(places[0], self._source.store.capacity)
            places = rows, envs
        found: npt.NDArray[np.generic] = self._source.decode_part(self._key, self._of_next_obs, *places, **options)
        return found

    def _split_key(self, keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split an index into one for rows and environments, and one within observations."""
        n_axes = len(self._buffer_shape)
        mask = np.asarray(keys[0]) if keys and not isinstance(keys[0], (slice, int, np.integer)) else None
        n_place = 1 if mask is not None and mask.dtype == bool and mask.ndim == n_axes else n_axes
        n_keys = len(keys) + n_axes - n_place
        if sum(part is Ellipsis for part in keys) == 1:
            position = next(i for i, part in enumerate(keys) if part is Ellipsis)
            missing_axes = (slice(None),) * (len(self.shape) - n_keys + 1)
            keys = keys[:position] + missing_axes + keys[position + 1 :]
        place, rest = keys[:n_place], keys[n_place:]
        # Indexing with the two parts in turn must give the same result.
        is_separable = all(isinstance(part, slice) for part in rest) or all(
            isinstance(part, (slice, int, np.integer)) for part in keys
        )
        if not is_separable or any(part is None or part is Ellipsis for part in keys):
            raise InvalidArgumentError(
                f"cannot index compressed observations by {keys}. Index rows and environments first, then the array: "
                "observations[rows, envs][:, ...]"
            )
        return place, rest

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:
        if copy is False:
            raise ValueError("copy=False is not supported: reading compressed observations makes a copy. Leave it out")
        free = available_memory()
        if free is not None and self.nbytes > free:
            raise OutOfMemoryError(
                f"all observations of shape {self.shape} take {format_bytes(self.nbytes)}, but only "
                f"{format_bytes(free)} are free. Index what you need: observations[:1000]"
            )
        return self[:].astype(dtype or self.dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(out, ObservationView) for out in options.get("out", ())):
            raise self._read_only_error()
        arrays = [np.asarray(part) if isinstance(part, ObservationView) else part for part in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it has the attributes of a NumPy array"
            )
        decoded = np.asarray(self)
        decoded.flags.writeable = False  # changes by a method would be lost
        return getattr(decoded, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._writable:
            raise self._read_only_error()
        self._source.append_step(self._key, key, value)

    def __bool__(self) -> bool:
        if self.size != 1:  # the error of an array, without decoding
            raise ValueError("The truth value of an array with more than one element is ambiguous. Use any() or all()")
        return bool(np.asarray(self))

    @staticmethod
    def _read_only_error() -> InvalidTypeError:
        """Return the error to raise for assignments to the view."""
        return InvalidTypeError(
            "compressed observations cannot be assigned to. Change a copy: np.array(observations[rows])"
        )

    def swap_and_flatten(self) -> ObservationView:
        """Return a flat view of all steps of each environment in turn, as in SB3."""
        return ObservationView(self._source, self._key, of_next_obs=self._of_next_obs, is_flat=True)
