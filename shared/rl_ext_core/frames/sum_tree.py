"""Sum tree: weighted random draws among millions of items whose weights change all the time.

Level 0 contains the weights. Each node of a higher level is the sum of 16 neighbors in the level below. A draw descends
from the root. A changed weight updates all sums on its path to the root, so rounding errors do not accumulate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.kernel_primitives import kernel

_FANOUT = 16  # two cache lines of float64

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class SumTree:
    """Weights of items, and draws in proportion to them.

    :param weights: Initial weights, float64, shape ``(n,)``; 0 for items that must not be drawn.
    :ivar weights: Weights, float64, shape ``(n,)``. Change them by :meth:`set`.
    :raises InvalidArgumentError: If a weight is negative or not finite.

    >>> tree = SumTree(np.array([1.0, 0.0, 3.0]))
    >>> tree.find(np.array([0.0, 0.9, 1.0, 3.9])).tolist(), tree.total
    ([0, 0, 2, 2], 4.0)
    """

    @defer_signals  # the first call compiles the kernels
    def __init__(self, weights: Floats) -> None:
        lengths = [_round_up(len(weights))]
        while lengths[-1] > 1:
            nodes = lengths[-1] // _FANOUT
            lengths.append(1 if nodes == 1 else _round_up(nodes))
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # first node of each level
        self._sums = np.zeros(self._starts[-1])
        self.weights = self._sums[: len(weights)]
        self.set(np.arange(len(weights)), weights)
        self.find(np.zeros(0))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._sums[-1])

    @property
    def nbytes(self) -> int:
        """Size of the tree in bytes."""
        return self._sums.nbytes

    def set(self, items: Integers, weights: Floats | float) -> None:
        """Set the weights of some items.

        :param items: Numbers of the items, int64, shape ``(n,)``. If one is repeated, its last weight counts.
        :param weights: Weights, float64, shape ``(n,)``, or one weight for all; 0 for items that must not be drawn.
        :raises InvalidArgumentError: If a weight is negative or not finite. Nothing is changed then.
        """
        if not np.all(np.isfinite(weights) & (np.asarray(weights) >= 0)):
            raise InvalidArgumentError(f"weights={weights!r} of a sum tree: expected finite values of at least 0")
        self.weights[items] = weights
        _update_paths(self._sums, self._starts, items)

    def find(self, positions: Floats) -> Integers:
        """Return the items at positions along the weights laid end to end.

        An item with weight 0 is never returned, unless all weights are 0.

        :param positions: Positions from 0 to :attr:`total`, float64, shape ``(n,)``.
        :return: Numbers of the items, int64, shape ``(n,)``.
        """
        items = np.empty(len(positions), dtype=np.int64)
        _find_items(self._sums, self._starts, positions, items)
        return items


def _round_up(n: int) -> int:
    """Round up to whole groups of neighbors, at least one."""
    return max(-(-n // _FANOUT), 1) * _FANOUT


@kernel
def _update_paths(sums, starts, items):  # type: ignore[no-untyped-def]
    """Compute the sums on the paths from these items to the root."""
    for i in range(items.shape[0]):
        if i > 0 and items[i] // _FANOUT == items[i - 1] // _FANOUT:
            continue  # both are in the same sums
        node = items[i]
        for level in range(starts.shape[0] - 2):
            node //= _FANOUT
            total = 0.0
            first = starts[level] + node * _FANOUT
            for child in range(first, first + _FANOUT):
                total += sums[child]
            sums[starts[level + 1] + node] = total


@kernel
def _find_items(sums, starts, positions, items):  # type: ignore[no-untyped-def]
    """Descend from the root to the items at these positions."""
    for i in range(positions.shape[0]):
        node, left = np.int64(0), positions[i]
        for level in range(starts.shape[0] - 3, -1, -1):
            first = starts[level] + node * _FANOUT
            chosen = first
            for child in range(first, first + _FANOUT):
                if sums[child] > 0.0:
                    chosen = child
                    if left < sums[child]:
                        break
                    left -= sums[child]
            else:
                left = np.inf  # by rounding, the position is behind the last item, which is chosen then
            node = chosen - starts[level]
        items[i] = node
