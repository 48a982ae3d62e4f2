"""Decoding on a GPU: the compressed frames of a batch are uploaded instead of its observations."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames.geometry import Counts

if TYPE_CHECKING:
    from rl_ext_core.frames.pool import FramePool  # loads numba

_SEGMENT_BYTES = 5 * 8  # see ``gather``


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
    """Raise an error if Triton is not installed."""
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
    def can_decode(pool: FramePool) -> bool:
        """Return whether the frames of a pool can be decoded on a GPU: patches without error."""
        return pool.codec == "patch" and not pool.lossy

    def _reserve(self, n_bytes: int) -> Any:
        """Return a page-locked buffer in main memory that no upload reads any more."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        if self._staging is None or len(self._staging) < n_bytes:
            on_gpu = self.device.type != "cpu"
            self._staging = torch.empty(n_bytes * 5 // 4, dtype=torch.uint8, pin_memory=on_gpu)
        return self._staging

    def decode(self, pool: FramePool, handles: Counts) -> torch.Tensor:
        """Decode stacks.

        :param pool: Pool for which :meth:`can_decode` is True.
        :param handles: Handles of the stacks, shape ``(n,)``; 0 gives zeros.
        :return: Stacks on the GPU, ``(n, *layout.shape)``, of the layout's dtype.
        :raises InvalidArgumentError: If a handle names no stored stack.
        :raises CorruptFileError: If a block in a file is damaged.
        :raises MissingDependencyError: If Triton is not installed.
        """
        _require_triton()
        from rl_ext_core.frames.gpu_kernels import decode_segments

        pool.refresh()
        handles, layout = pool.check_handles(handles), pool.layout
        uploaded, n_segments, padded = self._upload(pool, handles)
        make = torch.zeros if padded else torch.empty
        n_frames = len(handles) * layout.n_stack
        out = make(n_frames * layout.frame_bytes, dtype=torch.uint8, device=self.device)
        if n_segments:
            segments = uploaded[: n_segments * _SEGMENT_BYTES].view(torch.int64)
            with torch.cuda.device(out.get_device()):  # Triton starts kernels on the current GPU; -1 is the CPU
                decode_segments[(n_segments,)](uploaded, segments, out, layout.frame_bytes)
        dtype = torch.from_numpy(np.empty(0, layout.dtype)).dtype
        frame_shape = list(layout.shape)
        frame_shape[layout.axis] //= layout.n_stack
        frames = out.view(dtype).view(len(handles), layout.n_stack, *frame_shape)
        # Frames of a channel-last stack are joined along their last axis.
        return frames.movedim(1, layout.axis + 1).reshape(len(handles), *layout.shape)

    def _upload(self, pool: FramePool, handles: Counts) -> tuple[torch.Tensor, int, bool]:
        """Upload the segments and compressed blocks of stacks.

        :return: Buffer on the GPU, number of segments, and whether stacks have padding.
        """
        n_bytes = len(self._staging) if self._staging is not None else 1 << 20
        while True:
            staging = self._reserve(n_bytes)
            n_segments, used, padding = pool.gather_blocks(handles, staging.numpy())
            if used <= len(staging):
                break
            n_bytes = used
        uploaded = staging[:used].to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            self._uploaded = torch.cuda.current_stream(self.device).record_event()
        return uploaded, n_segments, padding > 0
