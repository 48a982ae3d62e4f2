"""Image and video files of the last seconds before a crash."""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError

__all__ = ["check_image_path", "write_images"]

_SUFFIXES = (".mp4", ".png")


def check_image_path(path: Path) -> None:
    """Raise if images cannot be written to a file of this name.

    :raises InvalidArgumentError: If its name has another ending than .mp4 and .png.
    :raises MissingDependencyError: If a package for videos is not installed.
    """
    if path.suffix not in _SUFFIXES:
        raise InvalidArgumentError(
            f"--render {str(path)!r}: expected a name with .mp4 or .png. Write --render crash.png"
        )
    if path.suffix == ".mp4":
        try:
            for name in ("imageio.v2", "imageio_ffmpeg"):
                importlib.import_module(name)
        except ImportError:
            raise MissingDependencyError(
                "--render of a video needs 'imageio' and 'imageio-ffmpeg'. Install them, or write a .png:\n"
                "    pip install imageio imageio-ffmpeg",
                name="imageio",
            ) from None


def write_images(path: Path, images: Sequence[Any], fps: float) -> None:
    """Write a video of all images (.mp4), or the last image (.png).

    :param images: ``(height, width, 3)`` uint8 arrays
    :param fps: images per second
    """
    if path.suffix == ".png":
        _write_png(path, np.asarray(images[-1]))
        return
    imageio: Any = importlib.import_module("imageio.v2")
    with imageio.get_writer(path, fps=fps, macro_block_size=1) as writer:
        for image in images:
            height, width = image.shape[0] & ~1, image.shape[1] & ~1  # the codec needs even sizes
            writer.append_data(np.ascontiguousarray(image[:height, :width]))


def _write_png(path: Path, image: np.ndarray[Any, Any]) -> None:
    """Write an RGB image as a PNG file."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with the number of its filter, 0
    rows[:, 1:] = image[..., :3].reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
