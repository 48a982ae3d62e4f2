"""Observations of a compressed buffer under the name and the indices that SB3's buffers have for them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError

Decode = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.generic]]


class ObservationView:
    """A view that decodes what is indexed.

    It reads like the array ``(buffer_size, n_envs, *obs_shape)`` that SB3's buffers keep: ``view[rows]``,
    ``view[rows, envs]``, ``np.asarray(view)``. What is indexed is decoded into a new array; rows never added are zero.

    :param decode: Gives the observations of ``(n,)`` rows and environments
    :param places: ``(buffer_size, n_envs)``
    :param shape: Shape of one observation
    :param dtype: Dtype of the observations
    """

    def __init__(
        self, decode: Decode, places: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> None:
        self._decode, self._places = decode, places
        self.shape = (*places, *shape)
        self.dtype = dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[np.generic]:
        if type(key) is tuple and len(key) == 2 == len(self._places) and _are_places(*key):
            # What buffers do for each batch. Places that do not exist get the error that an array would give, below.
            with contextlib.suppress(InvalidArgumentError):
                return self._decode(*key)
        place, rest = self._split(key if isinstance(key, tuple) else (key,))
        positions = self._positions(place)
        # Copies in any case: numba has NumPy warn of arrays that were made by broadcasting.
        flat = [np.array(part, dtype=np.int64, order="C").reshape(-1) for part in positions]
        found = self._decode(*self._rows_and_envs(*flat)).reshape(*positions[0].shape, *self.shape[len(self._places) :])
        part: npt.NDArray[np.generic] = found[(slice(None),) * positions[0].ndim + rest]
        return part

    def _rows_and_envs(self, *positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rows, envs = positions
        return rows, envs

    def _positions(self, place: tuple[Any, ...]) -> list[npt.NDArray[np.int64]]:
        """What is indexed, as positions along the axes of places, in the shape that an array would give."""
        return [grid[place] for grid in np.broadcast_arrays(*np.indices(self._places, sparse=True))]

    def _split(self, keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """
        Split what selects places from what selects within observations.

        :raises InvalidArgumentError: if an array would read such a key in another way than the two parts apart
        """
        n_axes = len(self._places)
        mask = np.asarray(keys[0]) if keys and not isinstance(keys[0], (slice, int, np.integer)) else None
        n_place = 1 if mask is not None and mask.dtype == bool and mask.ndim == n_axes else n_axes
        n_keys = len(keys) + n_axes - n_place
        if sum(part is Ellipsis for part in keys) == 1:
            at = next(i for i, part in enumerate(keys) if part is Ellipsis)
            filling = (slice(None),) * (len(self.shape) - n_keys + 1)
            keys = keys[:at] + filling + keys[at + 1 :]
        place, rest = keys[:n_place], keys[n_place:]
        plain = all(isinstance(part, slice) for part in rest) or all(
            isinstance(part, (slice, int, np.integer)) for part in keys
        )
        if not plain or any(part is None or part is Ellipsis for part in keys):
            raise InvalidArgumentError(
                f"cannot index compressed observations by {keys}; pick rows and environments first, then within what "
                "you got: observations[rows, envs][:, ...]"
            )
        return place, rest

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:
        return self[:].astype(dtype or self.dtype, copy=False)


class RolloutView(ObservationView):
    """A view of a rollout, which is filled row by row.

    :param decode, places, shape, dtype: As above
    :param append: Stores the observations of a row
    """

    def __init__(
        self,
        decode: Decode,
        places: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        *,
        append: Callable[[int, npt.NDArray[np.generic]], None],
    ) -> None:
        super().__init__(decode, places, shape, dtype)
        self._append = append

    def __setitem__(self, row: int, observations: npt.NDArray[np.generic]) -> None:
        self._append(row, observations)

    def flattened(self) -> FlatView:
        """What ``swap_and_flatten`` makes of the array: all steps of one environment, then those of the next."""
        return FlatView(self._decode, self._places, self.shape[2:], self.dtype)


class FlatView(ObservationView):
    """A view of shape ``(n_envs * buffer_size, *obs_shape)``."""

    def __init__(
        self, decode: Decode, places: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> None:
        super().__init__(decode, (math.prod(places),), shape, dtype)
        self._n_rows = places[0]

    def _rows_and_envs(self, *positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        envs, rows = np.divmod(positions[0], self._n_rows)
        return rows, envs


def _are_places(rows: Any, envs: Any) -> bool:
    return (
        type(rows) is type(envs) is np.ndarray
        and rows.dtype == envs.dtype == np.int64
        and rows.ndim == 1
        and rows.shape == envs.shape
        and rows.flags.c_contiguous
        and envs.flags.c_contiguous
    )
