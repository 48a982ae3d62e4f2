"""Choice of the format of a dataset, and names of datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_ext_core.datasets import lerobot_format, minari_format
from rl_ext_core.datasets.episodes import Dataset, Episode, check_space
from rl_ext_core.errors import InvalidArgumentError


def open_dataset(source: Any, *, download: bool = False) -> Dataset:
    """Open a dataset for reading.

    :param source: Minari id, such as ``"atari/pong/expert-v0"``; folder of a Minari or LeRobot dataset; or an object of
        ``minari.MinariDataset``, which may have a part of the episodes. A text that ends in ``-v`` and a number is an
        id, unless it begins with ``.``, ``~`` or ``/``. A :class:`Dataset` is returned as it is
    :param download: Whether to download a Minari id that is not on this machine
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
    return minari_format.open_minari(source, download=download)


def write_dataset(
    target: str | os.PathLike[str],
    episodes: Iterable[Episode],
    observation_space: Any,
    action_space: Any,
    *,
    data_format: str = "hdf5",
) -> Path:
    """Write a Minari dataset, one episode at a time.

    Images are stored without JPEG, so every value is read again with the same bits. The dataset is written next to the
    target and renamed at the end.

    :param target: Minari id, such as ``"cartpole/mine-v0"``, which ``minari.load_dataset`` loads; or folder, which
        ``minari.MinariDataset`` loads
    :param episodes: Episodes, at least one
    :param observation_space: Gymnasium space of the observations
    :param action_space: Gymnasium space of the actions
    :param data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``
    :return: Folder that ``minari.MinariDataset`` loads
    :raises InvalidArgumentError: If the target exists, there is not an episode, or Minari does not know the format
    :raises InvalidTypeError: If a space is not supported, such as a Tuple
    :raises MissingDependencyError: If ``minari``, ``h5py`` or ``pyarrow`` is not installed
    :raises StorageError: If the folder cannot be written
    """
    check_space(observation_space, "observation_space")
    check_space(action_space, "action_space")
    return minari_format.write_minari(target, episodes, observation_space, action_space, data_format=data_format)
