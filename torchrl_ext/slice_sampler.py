"""TorchRL's ``SliceSampler`` for buffers that grow between samples."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torchrl.data import SliceSampler as TorchRLSliceSampler
from torchrl.data import SliceSamplerWithoutReplacement, TensorStorage

from torchrl_ext import _compat

__all__ = ["SliceSampler"]


class SliceSampler(TorchRLSliceSampler):
    """Replacement for :class:`torchrl.data.SliceSampler` whose cached values survive additions.

    With ``cache_values=True``, TorchRL's sampler reads the flags or ids of all elements again after each write. This
    sampler reads only those of the added elements. Samples equal those of TorchRL's sampler bit for bit::

        sampler = SliceSampler(slice_len=4, traj_key="episode", cache_values=True)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6_000_000), sampler=sampler, batch_size=1024)

    The arguments are those of TorchRL's sampler. Without ``cache_values=True``, this sampler is as slow as TorchRL's.
    With it, both miss flags and ids that are changed in place, as in ``buffer[:]["episode"][3] = 7``, until the next
    write. This sampler misses changes through NumPy arrays even longer: use ``buffer[i] = data``.

    These writes are rare. After them, all elements are read again:

    - ``buffer[i] = data``, ``empty()``, ``loads()`` and ``load_state_dict()``;
    - writes of another process;
    - writes to places that do not follow the last ones, as at the end of the ring;
    - all writes to a storage with ``ndim=2``, and to one that is not a ``TensorStorage``.

    ``replacement=False`` returns TorchRL's ``SliceSamplerWithoutReplacement``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    >>> from torchrl_ext import SliceSampler
    >>> sampler = SliceSampler(slice_len=4, traj_key="episode", cache_values=True)
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=32)
    >>> _ = buffer.extend(TensorDict({"episode": torch.arange(100) // 10}, [100]))
    >>> buffer.sample()["episode"].shape
    torch.Size([32])
    """

    _tracker: _BoundaryTracker | None = None

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Record the places that a writer has written to.

        :param index: a place, or a tensor of places
        :param storage: the storage that contains them
        """
        super().mark_update(index, storage=storage)
        if self._tracker is not None:
            self._tracker.mark_written(index, storage)

    def _get_stop_and_length(self, storage: Any, fallback: bool = True) -> Any:
        """Return starts (n, 1), stops (n, 1) and lengths (n,) of the trajectories in a storage."""
        if not self.cache_values or "static-stop-and-length" in self._cache:
            return super()._get_stop_and_length(storage, fallback)
        known = None if self._tracker is None else self._tracker.update(storage, self._source())
        if known is not None:
            return known
        # The state is read first. What other threads write meanwhile is then read again at the next call.
        state, self._tracker = _State.read(storage), None
        boundaries = super()._get_stop_and_length(storage, fallback)
        source = self._source()
        is_tracked = isinstance(storage, TensorStorage) and storage.ndim == 1 and not storage._compilable
        if is_tracked and _count_changes(source.get_leaves(storage)):
            self._tracker = _BoundaryTracker(storage, source, state, boundaries)
        return boundaries

    def _source(self) -> _Source:
        """Return the keys that boundaries are read from, which TorchRL chooses at the first call."""
        if self._fetch_traj:
            return _Source((self._used_traj_key,), ids=True)
        return _Source((self.end_key,) if self.end_keys is None else self.end_keys, ids=False)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_tracker": None}


_compat.register_without_replacement(SliceSampler, SliceSamplerWithoutReplacement)


class _Source(NamedTuple):
    """Keys of leaves with ids of trajectories, or else with flags, which are True at their ends."""

    keys: tuple[Any, ...]
    ids: bool

    def get_leaves(self, storage: Any) -> list[torch.Tensor]:
        """Return the leaves that exist, or none if one does not have a single value per element."""
        rows = storage._storage
        leaves = [leaf for key in self.keys if (leaf := rows.get(key, None)) is not None]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() == len(rows)]
        # TorchRL squeezes flags, but not ids.
        return tensors if len(tensors) == len(leaves) and not (self.ids and tensors[0].ndim > 1) else []


class _State(NamedTuple):
    """State of a storage that each write changes."""

    revision: int  # number of writes
    length: int
    full: bool
    cursor: int | None  # place of the last element that was added

    @classmethod
    def read(cls, storage: Any) -> _State:
        """Read the present state of a storage."""
        return cls(storage._mutation_revision, len(storage), storage._is_full, storage._last_cursor_index)


class _BoundaryTracker:
    """Boundaries of the trajectories in a storage of one dimension, updated after additions.

    Additions write one run of consecutive places. All other writes are detected, and require a new tracker.

    :param storage: the storage
    :param source: keys of the boundaries
    :param state: state of the storage before the boundaries were read
    :param boundaries: starts, stops and lengths, as TorchRL returns them
    """

    def __init__(self, storage: Any, source: _Source, state: _State, boundaries: Any) -> None:
        self._storage, self._source = weakref.ref(storage), source
        self._state, self._boundaries = state, boundaries
        self._lock = threading.Lock()  # other threads may write through other buffers
        self._run: range | None = range(0)  # places written since, or None if they are not consecutive
        self._n_writes = 0  # number of those writes
        leaves = source.get_leaves(storage)
        self._versions = _count_changes(leaves)
        # TorchRL also adds an end at the last element, which may not be one later.
        stops = boundaries[1][:, 0]
        self._ends = stops[self._is_end(stops, leaves, state.length)]

    def mark_written(self, index: Any, storage: Any) -> None:
        """Append written places to the run."""
        places = torch.as_tensor(index).cpu()
        with self._lock:
            self._n_writes += 1
            self._run = self._extend_run(places, storage)

    def _extend_run(self, places: torch.Tensor, storage: Any) -> range | None:
        """Return the run with more places, or None if they do not continue it."""
        run, tracked = self._run, self._storage()
        if run is None or tracked is None or storage is not tracked or places.ndim > 1 or not places.numel():
            return None
        # A storage counts its writes, including those that no writer has marked.
        if tracked._mutation_revision != self._state.revision + self._n_writes:
            return None
        places = places.reshape(-1)
        first, last = int(places[0]), int(places[-1])
        if first < 0 or (run and first != run.stop) or not bool((places.diff() == 1).all()):
            return None
        return range(run.start if run else first, last + 1)

    def update(self, storage: Any, source: _Source) -> Any:
        """Return the present boundaries, or None if more than the run of places has changed."""
        if self._storage() is not storage or source != self._source:
            return None
        state = _State.read(storage)
        with self._lock:
            if state != self._state and not self._update(storage, state):
                return None
            return self._boundaries

    def _update(self, storage: Any, state: _State) -> bool:
        """Read the ends in the run of places; return False if more than that has changed."""
        run, before = self._run, self._state
        if not run or state.revision != before.revision + self._n_writes:
            return False
        if state.length != before.length and not run.start <= before.length < run.stop == state.length:
            return False
        leaves = self._source.get_leaves(storage)
        # Each write changes each leaf once. Any more changes were made in place.
        versions = _count_changes(leaves)
        if versions != [version + self._n_writes for version in self._versions]:
            return False
        # An element ends a trajectory if the next one has another id.
        start = run.start - 1 if self._source.ids else run.start
        if start < 0:
            return False
        places = torch.arange(start, run.stop, device=self._ends.device)
        low, high = torch.searchsorted(self._ends, self._ends.new_tensor([start, run.stop])).tolist()
        found = places[self._is_end(places, leaves, state.length)]
        self._ends = torch.cat([self._ends[:low], found, self._ends[high:]])
        self._state, self._versions, self._run, self._n_writes = state, versions, range(0), 0
        self._boundaries = _make_boundaries(self._ends, state)
        return True

    def _is_end(self, places: torch.Tensor, leaves: list[torch.Tensor], length: int) -> torch.Tensor:
        """Return for each place (n,) whether a trajectory ends there."""
        if self._source.ids:
            return leaves[0][places] != leaves[0][(places + 1) % length]
        return torch.stack([leaf.reshape(-1)[places] != 0 for leaf in leaves]).any(0)


def _count_changes(leaves: list[torch.Tensor]) -> list[int]:
    """Return how often each leaf was changed in place, or an empty list if torch does not count it."""
    return [] if any(leaf.is_inference() for leaf in leaves) else [leaf._version for leaf in leaves]


def _make_boundaries(ends: torch.Tensor, state: _State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return starts (n, 1), stops (n, 1) and lengths (n,), as TorchRL computes them from all elements.

    :param ends: (n,) ascending places at which a trajectory ends
    """
    # The element that was added last is an end, because the next one is older or missing.
    last = state.cursor if state.full else state.length - 1
    if last is None and not len(ends):
        last = state.length - 1
    if last is not None:
        low, high = (int(torch.searchsorted(ends, last, right=right)) for right in (False, True))
        ends = torch.cat([ends[:low], ends.new_tensor([last]), ends[high:]])
    starts = ((ends + 1) % state.length).roll(1)
    lengths = ends - starts + 1
    lengths[lengths <= 0] += state.length
    return starts.unsqueeze(1), ends.unsqueeze(1), lengths
