"""Datasets of episodes: read one episode at a time, and write Minari datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rl_ext_core.datasets import lerobot_format, minari_format
from rl_ext_core.datasets.episodes import Dataset, Episode
from rl_ext_core.datasets.minari_format import write_dataset
from rl_ext_core.errors import InvalidArgumentError

__all__ = ["Dataset", "Episode", "open_dataset", "write_dataset"]


def open_dataset(source: Any) -> Dataset:
    """Open a dataset for reading.

    :param source: Minari id, such as ``"atari/pong/expert-v0"``; folder of a Minari or LeRobot dataset; or an object of
        ``minari.MinariDataset``, which may have a part of the episodes. A text that ends in ``-v`` and a number is an
        id, unless it begins with ``.``, ``~`` or ``/``. A :class:`Dataset` is returned as it is
    :raises InvalidArgumentError: If there is no such dataset, or the installed Minari does not read it
    :raises InvalidTypeError: If a space is not supported, such as a Tuple
    :raises MissingDependencyError: If ``minari``, ``h5py``, ``pyarrow`` or ``av`` is not installed
    :raises CorruptFileError: If its files are damaged
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, (str, os.PathLike)) and not minari_format.is_id(source):
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise InvalidArgumentError(
                f"dataset {str(source)!r} is not a folder, expected the folder of a dataset, or a Minari id such as "
                "'atari/pong/expert-v0'"
            )
        if (folder / lerobot_format.INFO_FILE).is_file():
            return lerobot_format.LeRobotReader(folder)
    return minari_format.open_minari(source)
