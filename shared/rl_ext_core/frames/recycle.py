"""Output arrays that are reused after the last reference to them is gone."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

_MAX_ARRAYS = 4  # observations and next observations of the current and of the previous batch, which is still in use
_RECENT = 8  # requests; a shape is usual if it occurs more than twice among them


def _find_unused(
    arrays: list[npt.NDArray[np.generic]], shape: tuple[int, ...], dtype: np.dtype[np.generic], references: int
) -> npt.NDArray[np.generic] | None:
    """Find an array of a shape and dtype with at most ``references`` references."""
    for array in arrays:
        if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) <= references:
            return array
    return None


def _count_unused_references() -> int:
    """Measure how many references ``_find_unused`` counts for an unused array, which depends on the interpreter."""
    arrays: list[npt.NDArray[np.generic]] = [np.empty(0)]
    return next(count for count in range(1, 9) if _find_unused(arrays, (0,), arrays[0].dtype, count) is not None)


_REFERENCES = _count_unused_references()


class RecycledArrays:
    """Factory of uninitialized arrays that reuses arrays of usual shapes without other references.

    The system maps a new array of megabytes page by page, which takes as long as filling it. Views, and tensors made by
    ``torch.from_numpy``, keep a reference to their array, so arrays in use are never overwritten.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.generic]] = []
        self._recent: list[tuple[int, ...]] = []  # shapes of the latest requests

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Return an array with undefined contents."""
        self._recent = [*self._recent[-_RECENT + 1 :], shape]
        array = _find_unused(self._arrays, shape, dtype, _REFERENCES)
        if array is not None:
            return array
        array = np.empty(shape, dtype=dtype)
        if self._recent.count(shape) > 2:
            usual = [known for known in self._arrays if known.shape in self._recent]
            self._arrays = [*usual[-_MAX_ARRAYS + 1 :], array]
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that can be reused."""
        return sum(array.nbytes for array in self._arrays)
