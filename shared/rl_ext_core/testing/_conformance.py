"""Conformance tests of frame stores."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import RlExtError
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.testing._transitions import CONTENTS, LAYOUTS, ReferenceStore, make_transitions

_CAPACITY = 40
_STEPS = 110  # nearly three times around the ring
_BIG_FRAME = 1 << 14  # bytes; larger frames are tested with fewer contents
_THREADS = 2
_WRAPS = 8


class ConformanceError(RlExtError, AssertionError):
    """A store does not behave as this project requires."""


class _Store(Protocol):
    """Interface that frame stores share."""

    @property
    def size(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def clear(self) -> None: ...

    def append(self, observations: npt.NDArray[Any], next_observations: npt.NDArray[Any], /) -> None: ...

    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[Any],
        next_observations: npt.NDArray[Any] | None = None,
        *,
        num_threads: int = 1,
    ) -> None: ...


def check_frame_store(
    factory: Callable[[int, int, StackLayout], _Store],
    *,
    contents: Sequence[str] = CONTENTS,
    label: str = "the store",
) -> None:
    """Check that a store returns transitions bit for bit, and that its memory stays bounded.

    The cases cover layouts, contents, resets, a full ring, unrelated stacks, pickled copies and threads.

    :param factory: Function that creates a store, called as ``factory(capacity, n_envs, layout)``
    :param contents: Those of ``CONTENTS`` to test, default all
    :param label: Name of the store in error texts
    :raises ConformanceError: If a check fails; the text names the case and the difference
    """
    for number, layout in enumerate(LAYOUTS):
        big = layout.frame_bytes > _BIG_FRAME
        for held in ("mixed",) if big else contents:
            case = f"{label}, {layout}, contents {held!r}"
            n_envs = 1 + number % 3
            _check_case(factory(_CAPACITY, n_envs, layout), ReferenceStore(_CAPACITY, n_envs, layout), held, case)
    _check_memory(factory, label)


def _check_case(store: _Store, reference: ReferenceStore, contents: str, case: str) -> None:
    """Append the same transitions to a store and its reference, and compare both repeatedly."""
    rng = np.random.default_rng(0)
    steps = make_transitions(
        reference.layout, n_envs=reference.n_envs, n_steps=_STEPS, contents=contents, odd=0.05, transposed=0.2, seed=1
    )
    for step, (observations, nexts) in enumerate(steps):
        store.append(observations, nexts)
        reference.append(observations, nexts)
        if step in (0, 15, 39, 40, 95, _STEPS - 1):
            check_contents(store, reference, f"{case}, after {step + 1} transitions")
        if step == 60:
            copy: _Store = pickle.loads(pickle.dumps(store, protocol=5))
            check_contents(copy, reference, f"{case}, a pickled copy")
            store = copy  # the copy must accept further transitions
        if step % 8 == 7:
            rows, envs = rng.integers(reference.size, size=5), rng.integers(reference.n_envs, size=5)
            _compare(store, reference, rows, envs, f"{case}, after {step + 1} transitions", following=bool(step & 8))
    store.clear()
    reference.clear()
    check_contents(store, reference, f"{case}, cleared")
    for observations, nexts in make_transitions(
        reference.layout, n_envs=reference.n_envs, n_steps=5, contents=contents, seed=2
    ):
        store.append(observations, nexts)
        reference.append(observations, nexts)
    check_contents(store, reference, f"{case}, cleared and filled again")


def check_contents(store: _Store, reference: ReferenceStore, case: str = "the store") -> None:
    """Check that a store equals a reference store bit for bit.

    Rows that were never written are compared too.

    :param store: Store to check
    :param reference: Reference store with the same transitions in the same order
    :param case: Beginning of error texts
    :raises ConformanceError: If the stores differ; the text names the first difference
    """
    _check_that(store.size == reference.size, f"{case}: size is {store.size}, expected {reference.size}")
    rows = np.repeat(np.arange(reference.capacity), reference.n_envs)
    envs = np.tile(np.arange(reference.n_envs), reference.capacity)
    for num_threads in (1, _THREADS):
        _compare(store, reference, rows, envs, f"{case}, num_threads={num_threads}", num_threads=num_threads)


def _compare(
    store: _Store,
    reference: ReferenceStore,
    rows: npt.NDArray[np.int64],
    envs: npt.NDArray[np.int64],
    case: str,
    *,
    following: bool = True,
    num_threads: int = 1,
) -> None:
    """Raise unless both stores return the same transitions for these rows and environments."""
    # With two fill values, an output byte that is not written differs from the expected one at least once.
    for fill in (0x00, 0xA5):
        outs = [np.empty((len(rows), *reference.layout.shape), dtype=reference.layout.dtype) for _ in range(2)]
        for out in outs:
            out.reshape(-1).view(np.uint8)[:] = fill
        store.get(rows, envs, outs[0], outs[1] if following else None, num_threads=num_threads)
        expected = [reference.observations[rows, envs], reference.next_observations[rows, envs]]
        for name, out, right in zip(("observation", "next observation"), outs, expected, strict=True):
            if following or name == "observation":
                _require_equal(out, right, rows, envs, f"{case}: {name}")


def _require_equal(
    out: npt.NDArray[Any], right: npt.NDArray[Any], rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], case: str
) -> None:
    """Raise ``ConformanceError`` with the first difference between two batches, if any."""
    differ = out.reshape(len(out), -1).view(np.uint8) != right.reshape(len(out), -1).view(np.uint8)
    if not differ.any():
        return
    which = int(np.flatnonzero(differ.any(axis=1))[0])
    place = int(np.flatnonzero(differ[which])[0]) // out.dtype.itemsize
    index = tuple(int(i) for i in np.unravel_index(place, out.shape[1:]))
    count = int(differ[which].sum())
    raise ConformanceError(
        f"{case} of row {int(rows[which])}, environment {int(envs[which])} differs in {count} "
        f"{'byte' if count == 1 else 'bytes'}; the first value, at {index}, is {out[which][index]!r}, expected "
        f"{right[which][index]!r}"
    )


def _check_memory(factory: Callable[[int, int, StackLayout], _Store], label: str) -> None:
    """Check that ``nbytes`` does not grow while a ring is filled several times."""
    # The frames take megabytes, because a store may allocate memory in pieces of one megabyte.
    layout, capacity = StackLayout((2, 80, 80), np.dtype(np.uint8), 2, 0), 400
    store = factory(capacity, 1, layout)
    sizes = []
    for transition in make_transitions(layout, n_envs=1, n_steps=capacity * _WRAPS, contents="noise", seed=3):
        store.append(*transition)
        sizes.append(store.nbytes)
    most = max(sizes[: 2 * capacity])
    held = capacity * layout.frame_bytes
    _check_that(most >= held, f"{label}: nbytes is {most:,}, expected at least {held:,} for frames of noise")
    _check_that(
        sizes[-1] <= 1.5 * most,
        f"{label}: nbytes grew to {sizes[-1]:,} after filling the ring {_WRAPS} times, from {most:,} after 2 times",
    )


def _check_that(holds: bool, text: str) -> None:
    """Raise ``ConformanceError`` with this text unless a condition holds."""
    if not holds:
        raise ConformanceError(text)
