"""Frame stores that belong together: each holds its part of the same transitions, in the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import AdaptiveStore

_DROPPED = 16  # transitions an environment that are given up at a time


class StoreGroup:
    """
    The stores of a buffer by key.

    :param stores: New ones, or all in the folders that they were in before
    :param places: Rows, and number of environments
    :param max_bytes: Bytes for all of them together, or None for as many as it takes
    :param storage_dir: Where their folders are, or None
    :ivar recovered: What was found in the folders, see :class:`FrameStore`; None where nothing was
    :raises InvalidArgumentError: if the folders are not those of one buffer
    """

    def __init__(
        self,
        stores: dict[Any, AdaptiveStore],
        places: tuple[int, int],
        *,
        max_bytes: int | None = None,
        storage_dir: Any = None,
    ) -> None:
        self.stores, self.max_bytes = stores, max_bytes
        self.capacity, self._n_envs = places
        self._first_store = next(iter(stores.values()))
        self._limited = max_bytes is not None or storage_dir is not None
        self._numbers: list[npt.NDArray[np.int64]] = []  # of the transition in each row, in each store's folder
        self._count = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._changing: set[str] = set()
        if storage_dir is not None and len(stores) > 1:
            self._numbers = [store.rows("number", (), np.int64) for store in stores.values()]
            self._meet(storage_dir)
        found = [store.recovered for store in stores.values() if store.recovered is not None]
        lost, overwritten = (max((part[place] for part in found), default=0) for place in (1, 2))
        self.recovered = found[0]._replace(kept=self.size, lost=lost, overwritten=overwritten) if found else None

    def _meet(self, storage_dir: Any) -> None:
        """Has the stores hold the same transitions: each may have lost other ones when its process was killed."""
        kept = [store.size for store in self.stores.values()]
        if max(kept) and any(store.recovered is None for store in self.stores.values()):
            new = [key for key, store in self.stores.items() if store.recovered is None]
            raise InvalidArgumentError(
                f"storage_dir={str(storage_dir)!r} has nothing of {new}, and transitions of the other keys; pass the "
                "observation space that it was made with, or another storage_dir"
            )
        ends = [
            int(numbers[store.position - 1]) if store.size else 0
            for numbers, store in zip(self._numbers, self.stores.values(), strict=True)
        ]
        self._count = min(ends)
        behind = {key: end - self._count for key, end in zip(self.stores, ends, strict=True)}
        if all(store.size > behind[key] for key, store in self.stores.items()):
            for key, store in self.stores.items():
                store.forget_newest(behind[key])
        elif max(kept):
            self.clear()  # there is no transition that all of them hold

    @property
    def position(self) -> int:
        """The row that the next transition goes to."""
        return self._first_store.position

    @property
    def full(self) -> bool:
        """Whether all rows were written."""
        return self._first_store.full

    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array with one row a transition, kept where the frames are. Only the newest row may be written to."""
        if not self._limited:
            return self.changing_rows(name, shape, dtype)
        self._arrays[name] = self._first_store.rows(name, shape, dtype)
        self._changing.discard(name)
        return self._arrays[name]

    def changing_rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """One of which any row may be written to, always in memory."""
        self._arrays[name] = np.zeros((self.capacity, *shape), dtype=dtype)
        self._changing.add(name)
        return self._arrays[name]

    def check_budget(self) -> None:
        """
        Call it once all rows were asked for.

        :raises InvalidArgumentError: if they would leave too little of the budget to frames
        """
        index = 8 * self.capacity * self._n_envs * len(self.stores)
        n_bytes = index + sum(array.nbytes for array in self._arrays.values())
        if self.max_bytes is not None and n_bytes > self.max_bytes // 2:
            raise InvalidArgumentError(
                f"buffer_size={self.capacity * self._n_envs:,} takes {n_bytes:,} of max_bytes={self.max_bytes:,} for "
                "what goes with the frames: actions, rewards, flags and an index; pass a smaller buffer_size, or more "
                "max_bytes"
            )

    def commit(self, staged: dict[Any, npt.NDArray[np.uint64]], row: int) -> None:
        """Makes what each of them staged a transition."""
        for key, store in self.stores.items():
            store.commit(staged[key], row=row)
        self._count += 1
        for numbers in self._numbers:
            numbers[row] = self._count
        if self.max_bytes is not None and len(self.stores) > 1:
            self._keep_within(self.max_bytes)

    def _keep_within(self, max_bytes: int) -> None:
        while (size := self.size) > 1 and self.nbytes > max_bytes:
            for store in self.stores.values():
                # One that is too large by itself has given up its oldest before.
                store.drop_oldest(min(_DROPPED, size - 1) + store.size - size)

    @property
    def has_dropped(self) -> bool:
        """Whether there are rows whose transitions were given up."""
        return self._limited and any(store.dropped for store in self.stores.values())

    @property
    def size(self) -> int:
        """Transitions held by all, an environment."""
        return min(store.size for store in self.stores.values())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        touched = self.capacity if self.full else self.position
        rows = sum(self._arrays[name][:touched].nbytes for name in self._changing)
        return rows + sum(store.nbytes for store in self.stores.values())

    def newest_row_changed(self) -> None:
        """To be called where the newest row was written to once more."""
        self._first_store.newest_row_changed()

    def rest(self) -> None:
        """Gives back the memory that only transitions to come need."""
        for store in self.stores.values():
            store.rest()

    def clear(self) -> None:
        """Forgets all transitions."""
        for store in self.stores.values():
            store.clear()

    def flush(self) -> None:
        """Makes sure that what was added survives the process."""
        for store in self.stores.values():
            store.flush()

    def close(self) -> None:
        """Writes what is not written yet, and lets another process open the folders."""
        for store in self.stores.values():
            store.close()
