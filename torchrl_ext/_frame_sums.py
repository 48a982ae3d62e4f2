"""A checksum of each element of a storage in files: its small leaves, and the handles of its images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_ext_core.frames._region import Region

Places = npt.NDArray[np.int64]


class RowSums:
    """Checksums in a file.

    :param rows: the elements, mapped.
    :param path: the file.
    """

    def __init__(self, rows: Any, *, path: Path) -> None:
        self._region = Region(len(rows) * np.dtype(np.uint32).itemsize, path=path)
        self._region.reserve(0, self._region.n_bytes)
        self.watch(rows)

    def watch(self, rows: Any) -> None:
        """Finds out where the elements lie in this process."""
        from rl_ext_core.frames._sums import sum_rows  # it loads numba

        self._sum_rows = sum_rows
        self._sums = self._region.array(0, (len(rows),), np.uint32)
        leaves = {str(key): leaf for key, leaf in rows.items(include_nested=True, leaves_only=True)}
        tensors = [leaf for _, leaf in sorted(leaves.items()) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        self._addresses = np.array([leaf.data_ptr() for leaf in tensors], dtype=np.uint64)
        self._sizes = np.array([leaf.nbytes // len(rows) for leaf in tensors], dtype=np.int64)

    def _of(self, places: Places) -> npt.NDArray[np.uint32]:
        found = np.zeros(len(places), dtype=np.uint32)
        self._sum_rows(self._addresses, self._sizes, places, found)
        return found

    def update(self, places: Places) -> None:
        """Notes what these elements are now."""
        self._sums[places] = self._of(places)

    def wrong(self, places: Places) -> Places:
        """Those of these elements that are not what was noted."""
        found: Places = places[self._of(places) != self._sums[places]]
        return found

    def unlock(self) -> None:
        """Lets others use the file."""
        self._region.unlock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_region": self._region}
