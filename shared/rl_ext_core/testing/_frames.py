"""The conformance suite of codecs and of frame stores."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import RlExtError
from rl_ext_core.frames.codecs import Codec, get_codec
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.store import FrameStore
from rl_ext_core.testing._streams import CONTENTS, LAYOUTS, ReferenceStore, make_transitions

_BLOCK_LENGTHS = {1: ("mixed",), 4: CONTENTS, 16: ("mixed", "sparse")}  # and the contents that each is run with
_CAPACITY = 40
_STEPS = 110  # nearly three times around the ring
_BIG_FRAME = 1 << 14  # bytes, from which on fewer cases are run
_THREADS = 2
_WRAPS = 8


class ConformanceError(RlExtError, AssertionError):
    """Something does not do what the rest of this project relies on."""


class _Store(Protocol):
    """What stores of frames have in common."""

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


def check_codec(codec: str | Codec) -> None:
    """Checks that a codec is lossless and that stores which use it are what :func:`check_frame_store` asks for.

    It takes a few seconds.

    :param codec: a registered codec, or its name.
    :raises ConformanceError: if something is not as it has to be; the text says what, and in which case.
    """
    name = codec if isinstance(codec, str) else codec.name
    found = get_codec(name)
    if not isinstance(codec, str) and type(found) is not type(codec):
        raise ConformanceError(f"another codec is registered under {name!r}; files would be read with that one")
    if found.name != name:
        raise ConformanceError(f"the codec registered as {name!r} calls itself {found.name!r}")
    if found.lossy:
        raise ConformanceError(f"codec {name!r} is lossy, and these checks are those of lossless ones")
    _check_sealing(found)
    for block_length, contents in _BLOCK_LENGTHS.items():

        def factory(capacity: int, n_envs: int, layout: StackLayout, block_length: int = block_length) -> FrameStore:
            return FrameStore(capacity, n_envs, layout, codec=found, block_length=block_length)

        check_frame_store(factory, contents=contents, label=f"codec {name!r}, block_length={block_length}")


def _check_sealing(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for block in (bytes(1), bytes(5000), b"\xff" * 300, rng.bytes(7), rng.bytes(3000), bytes(range(256)) * 20):
        given = bytearray(block)
        sealed = bytes(codec.seal(memoryview(given)))
        _check_that(bytes(given) == block, f"codec {codec.name!r}: seal() changed the block that it was given")
        unsealed = bytes(codec.unseal(memoryview(sealed), len(block)))
        _check_that(
            unsealed == block,
            f"codec {codec.name!r}: unseal() gave {_preview(unsealed)} for a block of {_preview(block)}, which "
            f"seal() had made {_preview(sealed)} of",
        )


def check_frame_store(
    factory: Callable[[int, int, StackLayout], _Store],
    *,
    contents: Sequence[str] = CONTENTS,
    label: str = "the store",
) -> None:
    """Checks that a store returns what was appended, bit for bit, and keeps to its memory.

    Runs over layouts, contents, resets, wraps and stacks that share nothing; with pickled copies and with threads.

    :param factory: makes a store of ``capacity`` make_transitions, of ``n_envs`` environments, of a layout.
    :param contents: which of ``CONTENTS`` to run with.
    :param label: what to call the store in errors.
    :raises ConformanceError: if something is not as it has to be; the text says what, and in which case.
    """
    for number, layout in enumerate(LAYOUTS):
        big = layout.frame_bytes > _BIG_FRAME
        for held in ("mixed",) if big else contents:
            case = f"{label}, {layout}, contents {held!r}"
            n_envs = 1 + number % 3
            _check_case(factory(_CAPACITY, n_envs, layout), ReferenceStore(_CAPACITY, n_envs, layout), held, case)
    _check_memory(factory, label)


def _check_case(store: _Store, reference: ReferenceStore, contents: str, case: str) -> None:
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
            store = copy  # what follows has to fit to it
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
    check_contents(store, reference, f"{case}, cleared and filled anew")


def check_contents(store: _Store, reference: ReferenceStore, case: str = "the store") -> None:
    """Checks that a store holds what the plain arrays hold, bit for bit, rows never written included.

    :param store: as ``check_frame_store`` describes it.
    :param reference: what it was given, and in the same order.
    :param case: how to begin the error's text.
    :raises ConformanceError: if something differs; the text says what and where.
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
    # Two fills: an output byte that is not written differs from the expected one in at least one of them.
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
    differ = out.reshape(len(out), -1).view(np.uint8) != right.reshape(len(out), -1).view(np.uint8)
    if not differ.any():
        return
    which = int(np.flatnonzero(differ.any(axis=1))[0])
    place = int(np.flatnonzero(differ[which])[0]) // out.dtype.itemsize
    index = tuple(int(i) for i in np.unravel_index(place, out.shape[1:]))
    count = int(differ[which].sum())
    raise ConformanceError(
        f"{case} of row {int(rows[which])}, environment {int(envs[which])} differs in {count} bytes; the first value, "
        f"at {index}, is {out[which][index]!r}, expected {right[which][index]!r}"
    )


def _check_memory(factory: Callable[[int, int, StackLayout], _Store], label: str) -> None:
    # Megabytes, because memory may well be taken in pieces of one.
    layout, capacity = StackLayout((2, 80, 80), np.dtype(np.uint8), 2, 0), 400
    store = factory(capacity, 1, layout)
    sizes = []
    for transition in make_transitions(layout, n_envs=1, n_steps=capacity * _WRAPS, contents="noise", seed=3):
        store.append(*transition)
        sizes.append(store.nbytes)
    most = max(sizes[: 2 * capacity])
    held = capacity * layout.frame_bytes
    _check_that(most >= held, f"{label}: nbytes is {most:,} where {held:,} bytes of noise are held")
    _check_that(
        sizes[-1] <= 1.5 * most,
        f"{label}: nbytes grew to {sizes[-1]:,} in {_WRAPS} times around the ring; the first 2 took {most:,}",
    )


def _check_that(holds: bool, text: str) -> None:
    if not holds:
        raise ConformanceError(text)


def _preview(data: bytes) -> str:
    return f"{data[:12]!r}{'...' if len(data) > 12 else ''} ({len(data)} bytes)"
