"""Output arrays that are used again once nobody holds them."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

_MAX_ARRAYS = 4  # observations and next observations, of the batch at hand and of the one before, which is still in use


def _find_unused(
    arrays: list[npt.NDArray[np.generic]], shape: tuple[int, ...], dtype: np.dtype[np.generic], references: int
) -> npt.NDArray[np.generic] | None:
    """One of the arrays to which there are at most that many references."""
    for array in arrays:
        if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) <= references:
            return array
    return None


def _count_unused_references() -> int:
    """How many references ``_find_unused`` counts to an array that only the list holds: it depends on the interpreter."""
    arrays: list[npt.NDArray[np.generic]] = [np.empty(0)]
    return next(count for count in range(1, 9) if _find_unused(arrays, (0,), arrays[0].dtype, count) is not None)


_REFERENCES = _count_unused_references()


class RecycledArrays:
    """Hands out uninitialised arrays, and one of those handed out before once it has no other user.

    A fresh array of megabytes is mapped and faulted in page by page, which costs as much as filling it. Tensors made by
    ``torch.from_numpy`` and views keep their array in use, so nothing that somebody can see is ever overwritten.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.generic]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of that shape and dtype with any contents."""
        array = _find_unused(self._arrays, shape, dtype, _REFERENCES)
        if array is not None:
            return array
        array = np.empty(shape, dtype=dtype)
        self._arrays = [*self._arrays[-_MAX_ARRAYS + 1 :], array]
        return array

    def owns(self, array: npt.NDArray[np.generic]) -> bool:
        """Whether the array is one of those handed out last."""
        return any(array is known for known in self._arrays)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._arrays)
