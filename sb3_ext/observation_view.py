"""Observations of a compressed buffer under the name and the indices that SB3's buffers have for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import AdaptiveStore


class ObservationView:
    """A view that decodes what is indexed.

    It reads like the array ``(buffer_size, n_envs, *obs_shape)`` that SB3's buffers keep: ``view[rows]``,
    ``view[rows, envs]``, ``np.asarray(view)``. What is indexed is decoded into a new array; rows never added are zero.

    :param store: Where the frames are
    :param rows: ``(buffer_size, n_envs)``
    :param following: Whether to read the next observations
    """

    def __init__(self, store: AdaptiveStore, rows: tuple[int, int], *, following: bool) -> None:
        self._store, self._following = store, following
        self.shape = (*rows, *store.layout.shape)
        self.dtype = store.layout.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[np.generic]:
        place, rest = self._split(key if isinstance(key, tuple) else (key,))
        grids = np.broadcast_arrays(np.arange(self.shape[0])[:, None], np.arange(self.shape[1]))
        rows, envs = (grid[place] for grid in grids)
        flat = (rows.size, *self.shape[2:])
        stacks, nexts = np.empty(flat, self.dtype), np.empty(flat, self.dtype) if self._following else None
        index = [np.ascontiguousarray(part, dtype=np.int64).reshape(-1) for part in (rows, envs)]
        self._store.get(index[0], index[1], stacks, nexts)
        found = (stacks if nexts is None else nexts).reshape(*rows.shape, *self.shape[2:])
        part: npt.NDArray[np.generic] = found[(slice(None),) * rows.ndim + rest]
        return part

    def _split(self, keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """
        Split what selects rows and environments from what selects within observations.

        :raises InvalidArgumentError: if an array would read such a key in another way than the two parts apart
        """
        mask = np.asarray(keys[0]) if keys and not isinstance(keys[0], (slice, int, np.integer)) else None
        n_place = 1 if mask is not None and mask.dtype == bool and mask.ndim == 2 else 2
        n_keys = len(keys) + n_place % 2
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
