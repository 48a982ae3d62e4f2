"""Finds out whether an environment writes into observations that it has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ReuseProbe", "keep_when_freed"]

_STEPS = 32
_MAPPED_FROM, _MAPPED_TO = 128 << 10, 31 << 20


def keep_when_freed(nbytes: int) -> None:
    """Let the C library keep blocks of this size when they are freed, rather than give them back at every step.

    glibc maps pages for a block above a threshold, and the page faults of 3 MB take longer than to fill them. The
    threshold rises to the largest such block that was freed, up to 32 MB: one that nobody touches will do.
    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    size = min(4 * nbytes, _MAPPED_TO)
    if size > _MAPPED_FROM:
        torch.empty(size, dtype=torch.uint8)


class ReuseProbe:
    """Watches observations for some steps, holding them so that no address is given out twice by the allocator.

    Memory counts as reused if an address comes back, if a kept observation has changed, or if one is a part of a larger
    buffer. Until the verdict, observations are copied.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Any]] = []
        self._addresses: set[int] = set()
        self._left = _STEPS

    def see(self, observation: Any) -> bool | None:
        """Look at one more observation.

        :return: whether memory is reused, None as long as that is open
        """
        for leaf in _leaves(observation):
            address = _address(leaf)
            if address in self._addresses or _is_part(leaf):
                return True
            self._addresses.add(address)
            self._kept.append((leaf, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()))
        self._left -= 1
        if any(not _same(leaf, copy) for leaf, copy in self._kept):
            return True
        return None if self._left > 0 else False


def _leaves(observation: Any) -> Iterator[Any]:
    if isinstance(observation, dict):
        for part in observation.values():
            yield from _leaves(part)
    elif isinstance(observation, (tuple, list)):
        for part in observation:
            yield from _leaves(part)
    elif isinstance(observation, (np.ndarray, torch.Tensor)):
        yield observation


def _address(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.untyped_storage().data_ptr()
    return int(leaf.__array_interface__["data"][0])


def _is_part(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.untyped_storage().nbytes() != leaf.nbytes
    # A view of all of an array is as good as that array.
    base = leaf.base
    return base is not None and not (isinstance(base, np.ndarray) and base.nbytes == leaf.nbytes)


def _same(leaf: Any, copy: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return torch.equal(leaf.nan_to_num(), copy.nan_to_num())
    return bool(np.array_equal(leaf, copy, equal_nan=leaf.dtype.kind in "fc"))
