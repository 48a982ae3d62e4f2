"""LeRobot datasets: values in Parquet files, images in video files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.datasets.episodes import Dataset, Episode
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.log_folder import as_corrupt_file

# Describes a dataset, and has the key codebase_version.
INFO_FILE = Path("meta", "info.json")

# From v3.0 on, a file contains many episodes. Before, each episode has its own files.
_VERSIONS = ("v2.0", "v2.1", "v3.0")
_IMAGES = ("image", "video")
_REWARD, _DONE, _TRUNCATED, _SUCCESS = "next.reward", "next.done", "next.truncated", "next.success"
_INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index")
# LeRobot's default tolerance for the times of frames, in seconds.
_TOLERANCE = 1e-4
# Gap in seconds beyond which a video is decoded from another place instead of onward.
_LONGEST_SKIP = 1.0


class LeRobotReader(Dataset):
    """Reader of a LeRobot dataset on this machine.

    If episodes are read in order, each video file is decoded once, without seeking.

    The action space has infinite bounds, because LeRobot does not record its bounds. Several observations form a dict,
    in which ``observation.images.top`` has the key ``images_top``.

    LeRobot stores as many observations as actions. The last observation of an episode is repeated as the one after the
    last step, as in LeRobot's own replay buffer.

    :param folder: Folder that contains ``meta``, ``data`` and ``videos``
    :raises InvalidArgumentError: If the version of the format, or a name of a feature, is not supported
    :raises InvalidTypeError: If an observation or an action is neither a number nor an RGB image
    """

    def __init__(self, folder: Path) -> None:
        from gymnasium import spaces

        self._parquet, self._av = _import_libraries(folder)
        self._folder, self.name = folder, str(folder)
        path = folder / INFO_FILE
        with as_corrupt_file(f"{path} is"):
            info = json.loads(path.read_text())
            version, features = info["codebase_version"], info["features"]
            self._data_path, self._video_path = str(info["data_path"]), str(info["video_path"])
            self._chunk_size = int(info["chunks_size"])
        if version not in _VERSIONS:
            raise InvalidArgumentError(
                f"{folder} has codebase_version={version!r}, expected one of {[*_VERSIONS]}. Convert it with a script "
                "of LeRobot (lerobot/datasets/v*)"
            )
        self._per_episode = version != "v3.0"
        self._kinds = {name: str(feature["dtype"]) for name, feature in features.items()}
        self._spaces = {
            name: _make_space(f"{folder}: {name}", feature)
            for name, feature in features.items()
            if name.split(".")[0] in ("observation", "action")
        }
        parts = (self._combine(part, self._spaces) for part in ("observation", "action"))
        self.observation_space, self.action_space = (
            spaces.Dict(part) if isinstance(part, dict) else part for part in parts
        )
        with as_corrupt_file(f"{folder / 'meta'} is"):
            self._episodes = self._read_metadata()
            self.lengths = [int(episode["length"]) for episode in self._episodes]
        self._table: tuple[Path, Any] | None = None
        self._videos: dict[str, _VideoFile] = {}

    def _read_metadata(self) -> list[dict[str, Any]]:
        """Return the length of each episode, and where it is stored."""
        rows: list[dict[str, Any]] = []
        if self._per_episode:
            lines = (self._folder / "meta" / "episodes.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        else:
            columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
            for name in self._of_kind("video"):
                columns += [f"videos/{name}/{part}" for part in ("chunk_index", "file_index", "from_timestamp")]
            for path in sorted((self._folder / "meta" / "episodes").glob("*/*.parquet")):
                rows += self._parquet.ParquetFile(path).read(columns=columns).to_pylist()
        return sorted(rows, key=lambda row: int(row["episode_index"]))

    def _of_kind(self, *kinds: str) -> list[str]:
        """Return the names of the observations and actions of these kinds."""
        return [name for name in self._spaces if self._kinds[name] in kinds]

    def _read(self, number: int) -> Episode:
        with as_corrupt_file(f"{self.name}: episode {number} is"):
            return self._read_episode(self._episodes[number])

    def _read_episode(self, entry: Mapping[str, Any]) -> Episode:
        """Read the episode that an entry of the metadata describes."""
        table = self._read_rows(entry)
        n_steps = len(table)
        observed = table.take([*range(n_steps), n_steps - 1])
        values: dict[str, npt.NDArray[Any]] = {}
        for name, space in self._spaces.items():
            rows = observed if name.startswith("observation") else table
            if self._kinds[name] == "video":
                values[name] = self._read_video(entry, name, _column_values(rows["timestamp"]))
            elif self._kinds[name] == "image":
                values[name] = self._decode_images(rows[name], space.shape)
            else:
                values[name] = _column_values(rows[name]).reshape(len(rows), *space.shape)
        rewards = _column_values(table[_REWARD]) if _REWARD in self._kinds else np.zeros(n_steps, np.float32)
        terminations, truncations = _episode_ends(
            n_steps,
            {name: _column_values(table[name]) for name in (_DONE, _TRUNCATED, _SUCCESS) if name in self._kinds},
        )
        observations, actions = (self._combine(part, values) for part in ("observation", "action"))
        return Episode(observations, actions, rewards, terminations, truncations)

    def _combine(self, part: str, values: Mapping[str, Any]) -> Any:
        """Return the only observation or action, or a dict of several with keys such as ``images_top``.

        :param part: ``"observation"`` or ``"action"``
        :param values: Values by names such as ``"observation.images.top"``
        """
        names = [part] if part in values else [name for name in values if name.startswith(f"{part}.")]
        if len(names) == 1:
            return values[names[0]]
        # Keys of TensorDicts and of torch modules cannot contain dots.
        combined = {name[len(part) + 1 :].replace(".", "_"): values[name] for name in names}
        if not names or len(combined) < len(names):
            raise InvalidArgumentError(
                f"{self.name} has the features {names}, expected {part!r}, or different names after {part + '.'!r}"
            )
        return combined

    def _read_rows(self, entry: Mapping[str, Any]) -> Any:
        """Return the rows of an episode, as a table without the columns that are not needed."""
        path = self._folder / self._data_path.format(**self._location(entry, "data"))
        if self._table is None or self._table[0] != path:
            _check_file(path)
            names = [*self._spaces, _REWARD, _DONE, _TRUNCATED, _SUCCESS]
            columns = [name for name in names if self._kinds.get(name, "video") != "video"]
            with as_corrupt_file(f"{path} is"):
                found = self._parquet.ParquetFile(path).read(columns=[*_INDEX_COLUMNS, *columns])
            self._table = path, found
        table = self._table[1]
        rows = table.filter(_column_values(table["episode_index"]) == int(entry["episode_index"]))
        if not len(rows) or not np.array_equal(_column_values(rows["frame_index"]), np.arange(len(rows))):
            raise CorruptFileError(f"{path}: frames of episode {entry['episode_index']} are missing or out of order")
        return rows

    def _location(self, entry: Mapping[str, Any], columns: str) -> dict[str, int]:
        """Return the numbers in a path of a file of an episode.

        :param columns: First part of the columns that contain them, such as ``"data"``
        """
        if self._per_episode:
            episode = int(entry["episode_index"])
            return {"episode_chunk": episode // self._chunk_size, "episode_index": episode}
        return {part: int(entry[f"{columns}/{part}"]) for part in ("chunk_index", "file_index")}

    def _read_video(self, entry: Mapping[str, Any], name: str, timestamps: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Decode the frames of an episode."""
        path = self._folder / self._video_path.format(video_key=name, **self._location(entry, f"videos/{name}"))
        start = 0.0 if self._per_episode else float(entry[f"videos/{name}/from_timestamp"])
        if name not in self._videos or self._videos[name].path != path:
            _check_file(path)
            self._videos[name] = _VideoFile(self._av, path)
        with as_corrupt_file(f"{path} is"):
            return self._videos[name].read(start + timestamps.astype(np.float64), self._spaces[name].shape)

    def _decode_images(self, column: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Decode PNG images, which are stored in a column."""
        images = np.empty((len(column), *shape), np.uint8)
        for image, entry in zip(images, column.to_pylist(), strict=True):
            with self._av.open(io.BytesIO(entry["bytes"])) as container:
                image[:] = next(container.decode(video=0)).to_ndarray(format="rgb24")
        return images


class _VideoFile:
    """Video file that continues decoding where the last call stopped."""

    def __init__(self, av: Any, path: Path) -> None:
        self.path = path
        with as_corrupt_file(f"{path} is"):
            self._container = av.open(str(path), metadata_errors="ignore")
            self._stream = self._container.streams.video[0]
        self._stream.thread_type = "AUTO"
        self._frame: Any = None
        self._time: Any = -np.inf

    def read(self, times: npt.NDArray[np.float64], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return RGB frames of shape ``(len(times), *shape)``.

        :param times: Ascending times in seconds
        :param shape: Expected shape ``(height, width, 3)``
        :raises CorruptFileError: If there is not a frame at one of these times
        """
        images = np.empty((len(times), *shape), np.uint8)
        if len(times) and not self._time - _TOLERANCE <= times[0] < self._time + _LONGEST_SKIP:
            self._seek(float(times[0]))
        for image, time in zip(images, times, strict=True):
            while self._time < time - _TOLERANCE:
                self._frame = next(self._frames, None)
                self._time = np.inf if self._frame is None else float(self._frame.time)
            if self._time > time + _TOLERANCE:
                raise CorruptFileError(f"{self.path} has no frame at {time:.4f} s. Download the dataset again")
            image[:] = self._frame.to_ndarray(format="rgb24")
        return images

    def _seek(self, time: float) -> None:
        """Continue with the last key frame before this time."""
        self._container.seek(round(time / self._stream.time_base), stream=self._stream)
        self._frames = self._container.decode(self._stream)
        self._time = -np.inf


def _import_libraries(folder: Path) -> tuple[Any, Any]:
    """Import ``pyarrow.parquet`` and PyAV.

    :raises MissingDependencyError: If one of them is not installed
    """
    try:
        import av
        import pyarrow.parquet
    except ImportError as error:
        name = (error.name or "av").split(".")[0]
        raise _missing_dependency_error(name, "lerobot", f"the LeRobot dataset {folder}") from error
    return pyarrow.parquet, av


def _make_space(name: str, feature: Mapping[str, Any]) -> Any:
    """Return the space of a feature in ``info.json``."""
    from gymnasium import spaces

    kind, shape = str(feature["dtype"]), tuple(int(size) for size in feature["shape"])
    if kind in _IMAGES:
        names = feature.get("names") or ()
        channels_first = str(names[0]).startswith("channel") if names else shape[-1] != 3
        height, width, channels = (*shape[1:], shape[0]) if channels_first else shape
        if channels != 3:
            raise InvalidTypeError(f"{name} has images of shape {shape}, expected three channels")
        return spaces.Box(0, 255, (height, width, 3), np.uint8)
    if not kind.startswith(("float", "int", "uint")):
        raise InvalidTypeError(f"{name} has dtype={kind!r}, expected a number or an image")
    dtype = np.dtype(kind)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)


def _episode_ends(
    n_steps: int, columns: Mapping[str, npt.NDArray[Any]]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return terminations and truncations of an episode.

    Without ``next.done``, only success in the last step terminates it.
    """
    terminations, truncations = (columns.get(name, np.zeros(n_steps)).astype(bool) for name in (_DONE, _TRUNCATED))
    terminations &= ~truncations
    if n_steps and _DONE not in columns and _SUCCESS in columns:
        terminations[-1] = columns[_SUCCESS][-1]
    truncations[-1:] = ~terminations[-1:]
    return terminations, truncations


def _column_values(column: Any) -> npt.NDArray[Any]:
    """Return the numbers in a column, without its shape."""
    values = column.combine_chunks()
    while hasattr(values, "flatten") and str(values.type).startswith(("list", "fixed_size_list", "large_list")):
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _check_file(path: Path) -> None:
    """Check that a file of a dataset exists."""
    if not path.is_file():
        raise CorruptFileError(f"{path} is missing. Download the dataset again, including its videos")
