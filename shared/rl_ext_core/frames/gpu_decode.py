"""Decoding on a GPU: the compressed frames of a batch are uploaded instead of its observations."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError

if TYPE_CHECKING:
    from rl_ext_core.frames.log import FrameLog  # loads numba
    from rl_ext_core.frames.store import FrameStore, StoredPart


def check_decode_on_gpu(value: Any, device: Any, *, codec: Any, max_error: Any) -> bool:
    """Check the argument ``decode_on_gpu`` of a buffer, and return it.

    :param value: The argument.
    :param device: Device of the buffer's samples.
    :param codec: Codec, or a dict of codecs by key.
    :param max_error: Maximum error per byte, or a dict of them by key.
    :raises InvalidTypeError: If it is not a bool.
    :raises InvalidArgumentError: If it is True, and frames are lossy.
    :raises MissingDependencyError: If it is True, the device is a GPU, and Triton is not installed.
    """
    if not isinstance(value, bool):
        raise InvalidTypeError(f"decode_on_gpu={value!r}, expected True or False")
    if not value:
        return False
    codecs, bounds = (option.values() if isinstance(option, Mapping) else [option] for option in (codec, max_error))
    lossy = [f"codec={name!r}" for name in codecs if name == "jpeg"] + [
        f"max_error={bound}" for bound in bounds if bound
    ]
    if lossy:
        raise InvalidArgumentError(f"decode_on_gpu=True is for exact frames, but {lossy[0]}. Leave one of them out")
    if torch.device(device).type != "cpu":
        _require_triton()
    return True


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError(
            "decode_on_gpu=True needs Triton, which is a part of torch's CUDA builds for Linux. Leave it out, or "
            "install Triton with:\n    pip install triton"
        )


class GpuDecoder:
    """Decoder of batches on a GPU.

    :param device: The GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._staging: Any = None
        self._uploaded: Any = None

    def __reduce__(self) -> Any:
        return GpuDecoder, (self.device,)  # buffers and events belong to this process

    @staticmethod
    def can_decode(part: StoredPart) -> bool:
        """Return whether the observations of a part of a store can be decoded on a GPU: patches without error."""
        return part.options.codec == "patch" and not part.max_error

    def _reserve(self, n_bytes: int) -> Any:
        """Return a page-locked buffer in main memory that no upload reads any more."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        if self._staging is None or len(self._staging) < n_bytes:
            on_gpu = self.device.type != "cpu"
            self._staging = torch.empty(n_bytes * 5 // 4, dtype=torch.uint8, pin_memory=on_gpu)
        return self._staging

    def get(self, store: FrameStore, rows: Any, envs: Any, key: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode a batch of transitions.

        :param store: Store for whose part :meth:`can_decode` is True.
        :param rows, envs: ``int64`` rows and environments, shape ``(batch,)``. A row without a transition gives zeros.
        :param key: Key of ``Dict`` observations.
        :return: Observations and next observations on the GPU, shape ``(batch, *layout.shape)``.
        :raises InvalidArgumentError: If a row or environment does not exist.
        :raises MissingDependencyError: If Triton is not installed.
        """
        with store.lock:
            both = np.concatenate(store.handles(rows, envs)[key])
            stacks = self.decode(store._log, [*store.parts].index(key), both)
        return stacks[: len(rows)], stacks[len(rows) :]

    def decode(self, log: FrameLog, number: int, handles: npt.NDArray[np.int64]) -> torch.Tensor:
        """Decode stacks of a column of a log by their handles.

        :param handles: Handles that the log returned, shape ``(batch,)``. Handle 0 gives zeros.
        :return: Stacks on the GPU, shape ``(batch, *layout.shape)``.
        :raises MissingDependencyError: If Triton is not installed.
        """
        _require_triton()
        from rl_ext_core.frames.gpu_kernels import decode_chains
        from rl_ext_core.frames.log_patch import LARGE_FRAME
        from rl_ext_core.frames.log_read import N_CHAIN

        layout = log.columns[number].layout
        uploaded, (chains_at, entries_at, end), padded = self._upload(log, number, handles)
        make = torch.zeros if padded else torch.empty
        out = make(len(handles) * layout.stack_bytes, dtype=torch.uint8, device=self.device)
        if entries_at > chains_at:
            chains = uploaded[chains_at:entries_at].view(torch.int64)
            entries = uploaded[entries_at:end].view(torch.int64)
            count_bytes = 4 if layout.frame_bytes > LARGE_FRAME else 2
            with torch.cuda.device(out.get_device()):  # Triton starts kernels on the current GPU; -1 is the CPU
                grid = (len(chains) // N_CHAIN,)
                decode_chains[grid](uploaded, chains, entries, out, layout.frame_bytes, count_bytes)
        dtype = torch.from_numpy(np.empty(0, layout.dtype)).dtype
        frame_shape = list(layout.shape)
        frame_shape[layout.axis] //= layout.n_stack
        frames = out.view(dtype).view(len(handles), layout.n_stack, *frame_shape)
        # Frames of a channel-last stack are joined along their last axis.
        return frames.movedim(1, layout.axis + 1).reshape(len(handles), *layout.shape)

    def _upload(self, log: FrameLog, number: int, handles: Any) -> tuple[torch.Tensor, tuple[int, int, int], bool]:
        """Upload the entries of stacks, then the tables of chains and entries.

        :return: Buffer on the GPU; places of both tables, and the end of the second one; whether stacks have padding.
        """
        from rl_ext_core.frames.layout import MAX_STACK
        from rl_ext_core.frames.log_read import N_CHAIN, N_ENTRY, N_RECENT, gather_entries
        from rl_ext_core.frames.log_state import MAX_CHAIN
        from rl_ext_core.frames.memory import address_of

        handles, n_stack = np.ascontiguousarray(handles, dtype=np.int64), log.columns[number].layout.n_stack
        chains = np.empty((len(handles) * n_stack, N_CHAIN), np.int64)
        # Each chain of a stack may begin with a patch on a key, which is an entry more.
        entries = np.empty((len(handles) * (2 * n_stack + MAX_CHAIN), N_ENTRY), np.int64)
        n_bytes = len(self._staging) if self._staging is not None else 1 << 20
        while True:
            staging = self._reserve(n_bytes)
            buffer, recent = staging.numpy(), np.full((N_RECENT + MAX_CHAIN + MAX_STACK, 2), -1)
            state, address = log.state, address_of(buffer)
            n_chains, n_entries, used, padding = gather_entries(
                state, number, handles, address, len(buffer), chains, entries, recent
            )
            tables = [table.reshape(-1).view(np.uint8) for table in (chains[:n_chains], entries[:n_entries])]
            places = used, used + len(tables[0]), used + len(tables[0]) + len(tables[1])
            if places[2] <= len(buffer):
                break
            n_bytes = places[2]
        for table, start, stop in zip(tables, places[:2], places[1:], strict=True):
            buffer[start:stop] = table
        uploaded = staging[: places[2]].to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            self._uploaded = torch.cuda.current_stream(self.device).record_event()
        return uploaded, places, padding > 0
