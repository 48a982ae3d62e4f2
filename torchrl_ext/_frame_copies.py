"""Frame storages on their way to other processes, into copies and into checkpoints."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any

from tensordict import TensorDict

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.frames._process_lock import ProcessLock
from torchrl_ext._frame_budget import Budget
from torchrl_ext._frame_buffers import bear_kills
from torchrl_ext._frame_columns import FrameColumn
from torchrl_ext._frame_files import as_arrays, as_tensors
from torchrl_ext._frame_folder import StorageFolder
from torchrl_ext._frame_marks import Marks
from torchrl_ext._frame_rows import FrameRows


class FrameCopies(FrameRows):
    """What :class:`FrameStorage` is, without its options."""

    _budget: Budget | None
    _folder: StorageFolder | None

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            if not self.initialized:
                raise NotCopyableError(
                    "an empty FrameStorage cannot be shared with another process, since it does not know yet what it "
                    "holds; add something first: buffer.extend(data), or buffer.extend(data) and buffer.empty()"
                )
            if self._budget is not None:
                raise NotCopyableError("a FrameStorage with max_bytes cannot be shared; pass a max_size instead")
            with self.lock:
                bear_kills(self)
                if self._marks is None:
                    self._marks = Marks(len(self._storage))
                    self._written()
                state: dict[str, Any] = super().__getstate__()
                return state
        if self._folder is not None:
            raise NotCopyableError(
                f"a FrameStorage in {self._folder.path} cannot be pickled, since it would be in two places; save it "
                "with storage.dumps(path)"
            )
        with self.lock:
            state = super().__getstate__()
            del state["lock"], state["_columns"], state["_storage"]
            state.pop("_marks", None)
            if self.initialized:
                rows, frames = self.held()
                state["held"] = rows.clone(), frames, state.pop("len__context")
                state.update(initialized=False, len__context=0)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        held, shared = state.pop("held", None), "lock" in state
        super().__setstate__(state if shared else {**state, "_storage": None, "_columns": []})
        if not shared:
            self.lock = ProcessLock()
            bear_kills(self)
        self.lock.recover = self._make_whole
        if self._sums is not None:
            self._sums.watch(self._storage)
        if held is not None:
            self.take(*held)

    def held(self) -> tuple[Any, list[dict[str, Any]]]:
        """What a file needs: the elements with handles in place of images, and what these refer to. Views, no copies.

        The caller holds the lock.
        """
        rows = self._storage[: self._len_along_dim0]
        n_images = [sum(self._storage.get(key)[0].numel() for key in column.keys) for column in self._columns]
        return rows, [column.state(n) for column, n in zip(self._columns, n_images, strict=True)]

    def take(self, rows: Any, frames: list[dict[str, Any]], length: int) -> None:
        """Holds what :meth:`held` gave, in place of what was there.

        :raises CorruptFileError: if it is damaged.
        :raises InvalidArgumentError: if there is no room for it, or it cannot be exchanged.
        """
        if length > self.max_size or rows.ndim < self.ndim:
            raise InvalidArgumentError(
                f"{length} elements of {rows.ndim} batch dimensions do not fit into FrameStorage({self.max_size}, "
                f"ndim={self.ndim}); make one like that they were saved from"
            )
        if self._folder is not None:
            raise InvalidArgumentError(
                f"a FrameStorage in {self._folder.path} cannot be loaded into; leave out storage_dir, or extend it"
            )
        rows = rows.to("cpu")
        with self.lock:
            if any(column.pool.shared for column in self._columns):
                raise InvalidArgumentError(
                    "a FrameStorage cannot be loaded once other processes share it; load it first"
                )
            new_pool = self._pool_maker(self._shape_for(rows[0])[0])
            columns = [FrameColumn.restored(column, new_pool, num_threads=self._num_threads) for column in frames]
            self._allocate(rows[0], columns)
            self._storage[: len(rows)] = rows
            self._len = length
            self._last_cursor = None
            self._bump_mutation_revision()

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is stored, made of tensors and plain values."""
        with self.lock:
            if not self.initialized:
                return {"initialized": False, "_len": 0}
            rows, frames = self.held()
            return {
                "_storage": rows.clone().state_dict(),
                "_frames": as_tensors(frames),
                "initialized": True,
                "_len": self._len,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Holds what :meth:`state_dict` gave, in place of what was there.

        :raises CorruptFileError: if it is damaged.
        :raises InvalidArgumentError: if there is no room for it.
        """
        if not state_dict["initialized"]:
            if self.initialized:
                self._empty()
            return
        rows = TensorDict().load_state_dict(state_dict["_storage"], strict=False)
        self.take(rows, as_arrays(state_dict["_frames"]), state_dict["_len"])
