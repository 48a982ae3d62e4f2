"""Whether buffers that are there already will fit into memory once they are full."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from rl_ext_core.frames.adaptive import AdaptiveStore
from rl_ext_core.frames.planning._estimates import estimate, likely_layout
from rl_ext_core.frames.planning._text import in_bytes
from rl_ext_core.resources import available_memory


class Forecast(NamedTuple):
    """Bytes that stores will take when they are full: at least, probably, at most. All the same once that is known."""

    low: int
    middle: int
    high: int


def forecast(stores: Sequence[AdaptiveStore]) -> Forecast:
    """What stores will take: by what they hold where that says enough, else by this project's recordings."""
    parts = [_forecast(store) for store in stores]
    return Forecast(*(sum(part[at] for part in parts) for at in range(3)))


def _forecast(store: AdaptiveStore) -> Forecast:
    n_transitions = store.capacity * store.n_envs
    if store.size >= MemoryWatch.KNOWN_AT:
        return Forecast(*[store.nbytes * store.capacity // store.size] * 3)
    layout = store.layout
    if layout.n_stack == 1:
        layout = likely_layout(layout.shape, layout.dtype, n_stack=store.options["n_stack"])
    likely = estimate(layout, store.options) if len(layout.shape) > 1 else None
    parts = likely or (1.0, 1.0, 1.0)
    return Forecast(*(int(n_transitions * part * layout.frame_bytes) for part in parts))


class MemoryWatch:
    """Warns once, as soon as it is clear that stores will not fit: when they are made, or when their sizes are known.

    :param stores: of one buffer.
    :param other_bytes: what the buffer takes beside them.
    """

    KNOWN_AT = 4096  # transitions an environment, after which the stores are found out

    def __init__(self, stores: Sequence[AdaptiveStore], *, other_bytes: int = 0) -> None:
        self._stores, self._other_bytes, self._warned = list(stores), other_bytes, False

    def look(self) -> None:
        """Warns where the stores will probably not fit, unless it was said before."""
        free, expected = available_memory(), forecast(self._stores)
        held = sum(store.nbytes for store in self._stores)
        if self._warned or free is None or expected.middle + self._other_bytes <= free + held:
            return
        self._warned = True
        warnings.warn(self._text(free + held, expected), stacklevel=3)

    def _text(self, free: int, expected: Forecast) -> str:
        largest = max(self._stores, key=lambda store: store.layout.stack_bytes)
        layout, n_transitions = largest.layout, largest.capacity * largest.n_envs
        size = in_bytes(expected.middle + self._other_bytes)
        known = expected.low == expected.high
        spread = f"{in_bytes(expected.low)} to {in_bytes(expected.high)} by estimate"
        how = "by what it holds so far" if known else spread
        plain = in_bytes(2 * n_transitions * layout.stack_bytes)
        stack = f" --stack {layout.n_stack}" if layout.n_stack > 1 else ""
        envs = f" --envs {largest.n_envs}" if largest.n_envs > 1 else ""
        return (
            f"{n_transitions:,} transitions of {layout.shape} {layout.dtype} will take {size} ({how}), and "
            f"{in_bytes(free)} are free; uncompressed they would take {plain}. Pass a smaller buffer_size, max_bytes=, "
            "storage_dir= or max_error=; what each of them costs in your environment says\n"
            f"    rl-ext plan --shape {','.join(map(str, layout.shape))} --size {n_transitions}{stack}{envs} --env ID"
        )
