"""Replay buffers in files: pickled small and without a copy, and checked when they are read."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.save_util import open_path

from rl_ext_core.devices import resolve
from rl_ext_core.errors import CorruptFileError, RlExtError
from rl_ext_core.frames._format import checksum
from sb3_ext._buffers import HasObservations
from sb3_ext._observations import Observations
from sb3_ext._store_group import StoreGroup
from sb3_ext._stores import ALONE

FORMAT_VERSION = 1
_Buffer = TypeVar("_Buffer", bound="SavedBuffer")


class SavedBuffer(HasObservations):
    """What replay buffers do to be saved and loaded."""

    # What a file holds of the rows in use, and which numbers its checksum covers.
    _ROWS: tuple[str, ...] = ("actions", "rewards", "dones", "timeouts")
    _NUMBERS: tuple[str, ...] = (
        "buffer_size",
        "n_envs",
        "pos",
        "full",
        "handle_timeout_termination",
        "action_dim",
    )
    _NOT_SAVED: tuple[str, ...] = ("_observations",)

    @property
    def _rows_written(self) -> int:
        return self.buffer_size if self.full else self.pos

    def _allocate_rows(self) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls: type[_Buffer], path: str | pathlib.Path, device: th.device | str = "auto") -> _Buffer:
        """
        Load a buffer that ``model.save_replay_buffer(path)`` wrote. ``model.load_replay_buffer(path)`` does it too,
        with pickle's own errors for damaged files.

        :param path: The file; ``.pkl`` may be left out
        :param device: PyTorch device for the samples
        :return: The buffer
        :raises CorruptFileError: if the file is damaged, cut short, or holds something else
        """
        try:
            # Not load_from_pkl: it leaves the file open where it fails.
            with open_path(path, "r", suffix="pkl") as file:
                buffer = pickle.load(file)
        except (RlExtError, OSError):
            raise
        except Exception as error:  # damaged bytes can make pickle do anything
            raise CorruptFileError(
                f"{path} is cut short, damaged, or no replay buffer ({type(error).__name__}: {error}); "
                "write it with model.save_replay_buffer(path)"
            ) from error
        if not isinstance(buffer, cls):
            raise CorruptFileError(f"{path} holds a {type(buffer).__name__}, expected a {cls.__name__}")
        buffer.device = resolve(device).compute
        return buffer

    def __getstate__(self) -> dict[str, Any]:
        # Views of the rows in use: pickle protocol 5 writes them without a copy.
        state = {name: value for name, value in self.__dict__.items() if name not in self._NOT_SAVED}
        rows = {name: getattr(self, name)[: self._rows_written] for name in self._ROWS}
        store = self._observations.joined(self._observations.stores)
        state = {**state, **rows, "_store": store, "num_threads": self.num_threads, "format": FORMAT_VERSION}
        if (max_bytes := self._observations.group.max_bytes) is not None:
            state["max_bytes"] = max_bytes
        return {**state, "checksum": self._checksum(state)}

    def __setstate__(self, state: Any) -> None:
        state = dict(state) if isinstance(state, dict) else {}
        version = state.get("format")
        if version != FORMAT_VERSION:
            raise CorruptFileError(
                f"the replay buffer has format {version!r}, this version reads {FORMAT_VERSION}; "
                "load it with the version of rl-ext that wrote it"
            )
        if state.pop("checksum", None) != self._checksum(state):
            raise CorruptFileError("the replay buffer is damaged: its checksum does not match its contents")
        del state["format"]
        store, num_threads, max_bytes = state.pop("_store"), state.pop("num_threads"), state.pop("max_bytes", None)
        rows = {name: state.pop(name) for name in self._ROWS}
        self.__dict__.update(state)
        places = (self.buffer_size, self.n_envs)
        stores = store if isinstance(store, dict) else {ALONE: store}
        group = StoreGroup(stores, places, max_bytes=max_bytes)
        self._observations = Observations(self.observation_space, group, places, num_threads=num_threads)
        self._allocate_rows()
        for name, stored in rows.items():
            getattr(self, name)[: len(stored)] = stored

    @classmethod
    def _checksum(cls, state: dict[str, Any]) -> int:
        """Of the names of all that a file holds, and of what is in no checksum of its own."""
        numbers = [state.get(name, -1) for name in cls._NUMBERS]
        # NumPy's integers are written in a way that depends on its version.
        plain = [number if isinstance(number, (float, np.ndarray)) else int(number) for number in numbers]
        return checksum([sorted(state), plain, [state.get(name) for name in cls._ROWS]])
