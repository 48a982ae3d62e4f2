"""Minari datasets: HDF5, Arrow and Parquet, read and written by the ``minari`` library."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.datasets.episodes import Episode, check_space
from rl_ext_core.errors import (
    CorruptFileError,
    InvalidArgumentError,
    InvalidTypeError,
    RlExtError,
    StorageError,
    _missing_dependency_error,
)
from rl_ext_core.resources import check_path

_ID = re.compile(r"[\w-][\w/-]*-v\d+")
_METADATA, _DATA = "metadata.json", "data"
_FORMATS = ("hdf5", "arrow", "parquet")
# Minari reads one record batch per episode of an Arrow dataset, and ignores further ones.
_MAX_ARROW_STEPS = 32_767


def _is_id(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is the id of a Minari dataset, and not a folder."""
    return isinstance(source, str) and _ID.fullmatch(source) is not None


class Dataset:
    """Minari dataset whose episodes are read one at a time. :func:`open_dataset` opens it.

    :ivar name: Name of the dataset for messages: its id or folder
    :ivar observation_space: Gymnasium space of the observations
    :ivar action_space: Gymnasium space of the actions
    :ivar lengths: Number of steps of each episode

    >>> from rl_ext_core.datasets import open_dataset
    >>> dataset = open_dataset("cartpole/test-v0")  # doctest: +SKIP
    >>> sum(len(episode) for episode in dataset) == dataset.n_steps  # doctest: +SKIP
    True
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self.name = dataset, name
        self.observation_space, self.action_space = dataset.observation_space, dataset.action_space
        check_space(self.observation_space, f"{name}: observation_space")
        check_space(self.action_space, f"{name}: action_space")
        with _as_our_errors(name):
            metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
            self.lengths = [int(episode["total_steps"]) for episode in metadata]

    @property
    def n_steps(self) -> int:
        """Number of steps in all episodes."""
        return sum(self.lengths)

    def read(self, number: int) -> Episode:
        """Read one episode.

        :param number: Position of the episode in the dataset, from 0
        :raises CorruptFileError: If the episode is damaged, or its arrays have different lengths
        """
        with _as_our_errors(f"{self.name}: episode {number}"):
            found = self._dataset[number]
        terminations, truncations = (np.asarray(flags, bool) for flags in (found.terminations, found.truncations))
        episode = Episode(found.observations, found.actions, np.asarray(found.rewards), terminations, truncations)
        n_steps = self.lengths[number]
        for part, values in vars(episode).items():
            counts, expected = _row_counts(values), n_steps + (part == "observations")
            if counts != {expected}:
                raise CorruptFileError(
                    f"{self.name}: episode {number} has {sorted(counts)} {part}, expected {expected} for {n_steps} "
                    "steps. Download or record the dataset again. Minari reads at most 32,767 steps of an episode from "
                    "Arrow files"
                )
        return episode

    def __iter__(self) -> Iterator[Episode]:
        return map(self.read, range(len(self.lengths)))


def _row_counts(values: Any) -> set[int]:
    """Return the numbers of rows of an array, or of the arrays of a dict."""
    if isinstance(values, Mapping):
        return {count for value in values.values() for count in _row_counts(value)}
    return {len(values)}


def open_dataset(source: Any) -> Dataset:
    """Open a dataset for reading.

    :param source: Minari id, such as ``"atari/pong/expert-v0"``; folder of a Minari dataset; or a
        ``minari.MinariDataset``, which may have a part of the episodes. A text that ends in ``-v`` and a number is an
        id, unless it begins with ``.``, ``~`` or ``/``. A :class:`Dataset` is returned as it is
    :raises InvalidArgumentError: If there is no such dataset, or the installed Minari does not read it
    :raises InvalidTypeError: If a space is not supported, such as a Tuple
    :raises MissingDependencyError: If ``minari``, ``h5py`` or ``pyarrow`` is not installed
    :raises CorruptFileError: If its files are damaged
    """
    if isinstance(source, Dataset):
        return source
    minari = _import_minari()
    if isinstance(source, minari.MinariDataset):
        return Dataset(source, source.id)
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidTypeError(
            f"dataset is of type {type(source).__name__}, expected a Minari id, a folder, or a minari.MinariDataset"
        )
    if _is_id(source):
        folder = _root() / str(source) / _DATA
        if not folder.is_dir():
            raise InvalidArgumentError(
                f"the Minari dataset {source!r} is not on this machine ({folder}). Download it with:\n"
                f"    minari download {source}\nUse './{source}' for a folder"
            )
    else:
        folder = Path(source).expanduser()
        folder = folder if (folder / _METADATA).is_file() else folder / _DATA
        if not (folder / _METADATA).is_file():
            raise InvalidArgumentError(
                f"dataset {str(source)!r} has neither {_METADATA} nor {_DATA}/{_METADATA}: expected the folder of a "
                "Minari dataset, or a Minari id such as 'atari/pong/expert-v0'"
            )
    with _as_our_errors(str(source)):
        version = minari.dataset.minari_storage.MinariStorage.read_raw_metadata(folder)["minari_version"]
        if version not in minari.supported_dataset_versions:
            raise InvalidArgumentError(
                f"{source} was written by Minari {version}, which Minari {minari.__version__} does not read. Update "
                "it with:\n    pip install -U minari"
            )
        return Dataset(minari.MinariDataset(folder), str(source))


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
    minari = _import_minari()
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    if data_format not in _FORMATS:
        raise InvalidArgumentError(f"data_format={data_format!r}, expected one of {[*_FORMATS]}")
    check_path("target", target)
    folder = _root() / str(target) if _is_id(target) else Path(target).expanduser().absolute()
    dataset_id = str(target) if _is_id(target) else folder.name if _is_id(folder.name) else _make_id(folder.name)
    if os.path.lexists(folder):
        raise InvalidArgumentError(f"{folder} exists already, and is not overwritten. Choose another name")
    options: dict[str, Any] = {"data_format": data_format, **_lossless_option(MinariStorage, observation_space)}

    def convert() -> Iterator[Any]:
        """Yield the episodes in Minari's form."""
        for episode in episodes:
            if data_format != "hdf5" and len(episode) > _MAX_ARROW_STEPS:
                raise InvalidArgumentError(
                    f"an episode has {len(episode):,} steps, of which Minari reads only the first {_MAX_ARROW_STEPS:,} "
                    f"from data_format={data_format!r}. Use data_format='hdf5'"
                )
            _check_values(episode.observations, observation_space, "observations")
            _check_values(episode.actions, action_space, "actions")
            yield EpisodeBuffer(**vars(episode), infos={})

    with _temporary_folder(folder) as temporary:
        data = temporary / _DATA if _is_id(target) else temporary
        storage = MinariStorage.new(data, observation_space, action_space, **options)
        storage.update_metadata({"dataset_id": dataset_id, "minari_version": minari.__version__})
        storage.update_episodes(convert())
        if not storage.total_episodes:
            raise InvalidArgumentError("there are no episodes to write, expected at least one")
    namespace = dataset_id.rpartition("/")[0]
    if _is_id(target) and namespace and namespace not in minari.namespace.list_local_namespaces():
        minari.namespace.create_namespace(namespace)
    return folder / _DATA if _is_id(target) else folder


def _check_values(values: Any, space: Any, name: str) -> None:
    """Check that values have the shape of a space, and are among those of a Discrete space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        if not isinstance(values, dict) or values.keys() != space.spaces.keys():
            found = sorted(values) if isinstance(values, dict) else f"an array of shape {np.shape(values)}"
            raise InvalidArgumentError(f"{name} are {found}, expected the keys {sorted(space.spaces)} of their space")
        for key, part in space.spaces.items():
            _check_values(values[key], part, f"{name}[{key!r}]")
        return
    if isinstance(values, dict) or np.shape(values)[1:] != space.shape:
        found = f"are a dict of {sorted(values)}" if isinstance(values, dict) else f"have shape {np.shape(values)[1:]}"
        raise InvalidArgumentError(f"{name} {found}, expected {space.shape} as in {space}. Pass their space")
    if isinstance(space, spaces.Discrete) and len(values):
        low, high = int(np.min(values)), int(np.max(values))
        if low < space.start or high >= space.start + space.n:
            raise InvalidArgumentError(f"{name} are from {low} to {high}, expected those of {space}. Pass their space")


def _make_id(name: str) -> str:
    """Return an id for a folder with another name."""
    return f"{re.sub('[^-_a-zA-Z0-9]', '_', name)}-v0"


def _lossless_option(storage: Any, space: Any) -> dict[str, Any]:
    """Return the argument that makes Minari store images without JPEG."""
    if "jpeg_encoding" in inspect.signature(storage.new).parameters:
        return {"jpeg_encoding": False}
    if _contains_images(space):
        raise InvalidArgumentError(
            "this version of Minari stores images as JPEG, which changes them. Use Python 3.11 or later, and:\n"
            '    pip install "minari>=0.5.4"'
        )
    return {}


def _contains_images(space: Any) -> bool:
    """Return whether Minari may treat the space, or a part of it, as images."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return any(_contains_images(part) for part in parts.values())
    return space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _import_minari() -> Any:
    try:
        import minari
        import minari.namespace
    except ImportError:
        raise _missing_dependency_error("minari", "datasets", "a dataset") from None
    return minari


def _root() -> Path:
    """Return the folder in which Minari finds datasets by their ids."""
    from minari.storage import get_dataset_path

    return Path(get_dataset_path())


@contextlib.contextmanager
def _as_our_errors(what: str, *, writing: bool = False) -> Iterator[None]:
    """Within the context, raise this project's exceptions instead of Minari's.

    :param what: Name of the dataset, or of a part of it, for the error
    :param writing: Whether the dataset is written, so that it cannot be damaged
    """
    import gymnasium

    try:
        yield
    except (RlExtError, MemoryError):
        raise
    except ImportError as error:
        package = error.name or next((name for name in ("h5py", "pyarrow") if name in str(error)), "minari")
        raise _missing_dependency_error(package, "datasets", what) from error
    except gymnasium.error.Error as error:
        raise InvalidArgumentError(
            f"{what} does not contain its spaces, and its environment cannot be created: {error}"
        ) from error
    except Exception as error:  # parsing damaged data can fail in arbitrary ways
        if isinstance(error, PermissionError) or (writing and isinstance(error, OSError)):
            raise StorageError(f"{what} cannot be {'written' if writing else 'read'}: {error}") from error
        if writing:
            raise
        raise CorruptFileError(
            f"{what} is damaged ({type(error).__name__}: {error}). Download or record the dataset again"
        ) from error


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which is renamed to ``folder`` at the end, or deleted after an exception."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        with _as_our_errors(str(folder), writing=True):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
