"""Datasets in LeRobot's format. test_venvs.py runs this file in .venv-lerobot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.datasets import Episode, open_dataset
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError

REASON = "needs PyAV and pyarrow, which are in .venv-lerobot; make it with: scripts/make_lerobot_venv.sh"
av = pytest.importorskip("av", reason=REASON)
pa = pytest.importorskip("pyarrow", reason=REASON)
pq = pytest.importorskip("pyarrow.parquet", reason=REASON)

FPS, SHAPE = 10, (32, 48, 3)
LENGTHS = [12, 1, 20]
LEROBOT_LENGTHS = [12, 2, 20]  # LeRobot 0.4.4 fails to record an episode of one step with a matrix
TOP, ACTION = "observation.images.top", "action"
FEATURES = {
    TOP: {"dtype": "video", "shape": [32, 48, 3], "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": [4], "names": None},
    ACTION: {"dtype": "float64", "shape": [2], "names": ["x", "y"]},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
}


def encode(path: Path, images: list[np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", FPS, options={"g": "5", "crf": "20"})
        stream.width, stream.height, stream.pix_fmt = SHAPE[1], SHAPE[0], "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_episode(number: int, length: int) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    rng = np.random.default_rng(number)
    background = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    rows, images = [], []
    for step in range(length):
        image = background.copy()
        image[step : step + 8, 2 * step : 2 * step + 8] = rng.integers(0, 256, 3)
        images.append(image)
        rows.append(
            {
                "observation.state": rng.normal(size=4).astype(np.float32).tolist(),
                ACTION: rng.normal(size=2).tolist(),
                "next.reward": float(np.float32(rng.normal())),
                "timestamp": step / FPS,
                "frame_index": step,
                "episode_index": number,
            }
        )
    return rows, images


OLD_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


def write(folder: Path, version: str, **features: Any) -> Path:
    """Write a dataset of LENGTHS. Each file has two episodes from v3.0 on."""
    old = version != "v3.0"
    paths = OLD_PATHS if old else PATHS
    info = {"codebase_version": version, "features": {**FEATURES, **features}, "chunks_size": 1000, **paths}
    folder.joinpath("meta").mkdir(parents=True)
    folder.joinpath("meta", "info.json").write_text(json.dumps(info))
    lines = [{"episode_index": number, "length": length} for number, length in enumerate(LENGTHS)]
    if old:
        folder.joinpath("meta", "episodes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    else:
        starts = [0.0, LENGTHS[0] / FPS, 0.0]
        write_table(folder / "meta/episodes/chunk-000/file-000.parquet", list(map(add_places, lines, starts)))
    episodes = [make_episode(number, length) for number, length in enumerate(LENGTHS)]
    for group in [[0], [1], [2]] if old else [[0, 1], [2]]:
        names = {"episode_chunk": 0, "chunk_index": 0, "episode_index": group[0], "file_index": group[0] // 2}
        rows, images = ([value for number in group for value in episodes[number][part]] for part in (0, 1))
        write_table(folder / paths["data_path"].format(**names), rows)
        encode(folder / paths["video_path"].format(video_key=TOP, **names), images)
    return folder


def add_places(line: dict[str, int], start: float) -> dict[str, Any]:
    """Add where an episode is stored to its metadata, as in v3.0."""
    place = {"chunk_index": 0, "file_index": line["episode_index"] // 2}
    places = {f"{kind}/{part}": number for kind in ("data", f"videos/{TOP}") for part, number in place.items()}
    return {**line, **places, f"videos/{TOP}/from_timestamp": start}


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "dataset", request.param)


def change_info(folder: Path, **changes: Any) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_rows(folder: Path, **columns: Any) -> None:
    """Set columns of all data files to values that depend on the row."""
    for path in folder.joinpath("data").rglob("*.parquet"):
        rows = pq.read_table(path).to_pylist()
        write_table(path, [{**row, **{name: value(row) for name, value in columns.items()}} for row in rows])


def is_last(row: dict[str, Any]) -> bool:
    return bool(row["frame_index"] == LENGTHS[row["episode_index"]] - 1)


def feature(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None}


def test_episodes_contain_the_rows_and_decoded_frames(folder: Path) -> None:
    dataset = open_dataset(folder)
    frames = np.concatenate([decode(path) for path in sorted(folder.joinpath("videos").rglob("*.mp4"))])
    assert list(dataset.lengths) == LENGTHS
    assert dataset.action_space == spaces.Box(-np.inf, np.inf, (2,), np.float64)
    assert dataset.observation_space["images_top"] == spaces.Box(0, 255, SHAPE, np.uint8)
    for number, episode in enumerate(dataset):
        rows, first = make_episode(number, LENGTHS[number])[0], sum(LENGTHS[:number])
        expected = frames[first : first + LENGTHS[number]]
        np.testing.assert_array_equal(episode.observations["images_top"], np.concatenate([expected, expected[-1:]]))
        states = np.array([row["observation.state"] for row in [*rows, rows[-1]]], np.float32)
        np.testing.assert_array_equal(episode.observations["state"], states)
        np.testing.assert_array_equal(episode.actions, [row[ACTION] for row in rows])
        np.testing.assert_array_equal(episode.rewards, np.array([row["next.reward"] for row in rows], np.float32))
        assert episode.actions.dtype == np.float64
        assert not episode.terminations.any()
        assert episode.truncations.tolist() == [False] * (len(rows) - 1) + [True]


def test_order_of_reading_does_not_change_episodes(folder: Path) -> None:
    dataset = open_dataset(folder)
    expected = [episode.observations["images_top"] for episode in dataset]
    for number in (2, 0, 0, 2, 1, 0):
        np.testing.assert_array_equal(dataset.read(number).observations["images_top"], expected[number])


@pytest.mark.parametrize(
    ("columns", "terminated"),
    [
        ({"next.done": is_last}, True),
        ({"next.done": is_last, "next.truncated": is_last}, False),
        ({"next.done": lambda row: False, "next.success": is_last}, False),
        ({"next.success": lambda row: row["frame_index"] > 0 or is_last(row)}, True),
        ({"next.success": lambda row: not is_last(row)}, False),
    ],
)
def test_ends_of_episodes(tmp_path: Path, columns: dict[str, Any], terminated: bool) -> None:
    folder = write(tmp_path / "dataset", "v3.0", **dict.fromkeys(columns, feature("bool", 1)))
    change_rows(folder, **columns)
    for episode in open_dataset(folder):
        before = [False] * (len(episode) - 1)
        assert episode.terminations.tolist() == [*before, terminated]
        assert episode.truncations.tolist() == [*before, not terminated]


def test_termination_within_an_episode_is_returned(tmp_path: Path) -> None:
    folder = write(tmp_path / "dataset", "v3.0", **{"next.done": feature("bool", 1)})
    change_rows(folder, **{"next.done": lambda row: row["frame_index"] == 3})
    episode = open_dataset(folder).read(0)
    assert np.flatnonzero(episode.terminations).tolist() == [3]
    assert np.flatnonzero(episode.truncations).tolist() == [LENGTHS[0] - 1]


def test_single_observation_is_an_array_and_missing_rewards_are_zero(folder: Path) -> None:
    change_info(folder, features={name: FEATURES[name] for name in (TOP, ACTION)})
    dataset = open_dataset(folder)
    assert dataset.observation_space == spaces.Box(0, 255, SHAPE, np.uint8)
    assert dataset.read(0).observations.shape == (LENGTHS[0] + 1, *SHAPE)
    assert dataset.read(2).rewards.tolist() == [0.0] * LENGTHS[2]


def test_png_images_in_columns(tmp_path: Path) -> None:
    wrist = {"dtype": "image", "shape": [3, 8, 16], "names": ["channels", "height", "width"]}
    folder = write(tmp_path / "dataset", "v3.0", **{"observation.images.wrist": wrist})
    images = np.random.default_rng(0).integers(0, 256, (max(LENGTHS), 8, 16, 3), dtype=np.uint8)

    def as_png(row: dict[str, Any]) -> dict[str, Any]:
        context = av.CodecContext.create("png", "w")
        context.width, context.height, context.pix_fmt = 16, 8, "rgb24"
        context.time_base = Fraction(1, FPS)
        [packet] = context.encode(av.VideoFrame.from_ndarray(images[row["frame_index"]], format="rgb24"))
        return {"bytes": bytes(packet), "path": "frame.png"}

    change_rows(folder, **{"observation.images.wrist": as_png})
    found = open_dataset(folder).read(2).observations["images_wrist"]
    np.testing.assert_array_equal(found, images[[*range(LENGTHS[2]), LENGTHS[2] - 1]])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"codebase_version": "v1.6"}, InvalidArgumentError, r"codebase_version='v1\.6', expected one of"),
        ({"features": FEATURES | {"observation.text": feature("string", 1)}}, InvalidTypeError, "observation.text"),
        (
            {"features": FEATURES | {"observation.depth": feature("image", 8, 8, 1)}},
            InvalidTypeError,
            "observation.dep",
        ),
        (
            {"features": FEATURES | {"observation.images_top": feature("float32", 4)}},
            InvalidArgumentError,
            "observation.images_top",
        ),
        ({"features": {TOP: FEATURES[TOP]}}, InvalidArgumentError, "expected 'action'"),
    ],
)
def test_unsupported_versions_and_features_are_refused(folder: Path, changes: Any, error: Any, said: str) -> None:
    change_info(folder, **changes)
    with pytest.raises(error, match=said):
        open_dataset(folder)


def cut_video(folder: Path) -> None:
    path = max(folder.joinpath("videos").rglob("*.mp4"))
    encode(path, list(decode(path)[:-2]))


def last_table(folder: Path) -> Path:
    return max(folder.joinpath("data").rglob("*.parquet"))


def drop_row(folder: Path, first: bool) -> None:
    path, table = last_table(folder), pq.read_table(last_table(folder))
    pq.write_table(table.slice(1) if first else table.slice(0, len(table) - 1), path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no JSON": lambda folder: folder.joinpath("meta/info.json").write_text("{"),
    "no video": lambda folder: shutil.rmtree(folder / "videos"),
    "cut video": cut_video,
    "delayed frames": lambda folder: change_rows(folder, timestamp=lambda row: row["timestamp"] + 0.04),
    "cut table": lambda folder: last_table(folder).write_bytes(last_table(folder).read_bytes()[:-9]),
    "no first row": lambda folder: drop_row(folder, True),
    "no last row": lambda folder: drop_row(folder, False),
    "short vectors": lambda folder: change_rows(folder, **{ACTION: lambda row: row[ACTION][:1]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_datasets_are_refused(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder)
    with pytest.raises(CorruptFileError, match=str(folder)):
        list(open_dataset(folder))


@pytest.fixture(scope="module")
def lerobot_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lerobot", reason="needs .venv-lerobot; make it with: scripts/make_lerobot_venv.sh")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    folder = tmp_path_factory.mktemp("lerobot") / "dataset"
    features: dict[str, Any] = {name: {**value, "shape": tuple(value["shape"])} for name, value in FEATURES.items()}
    features |= {
        ACTION: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "observation.images.wrist": {"dtype": "image", "shape": (32, 48, 3), "names": ["height", "width", "channels"]},
        "observation.grid": {"dtype": "int64", "shape": (2, 3), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("local/test", FPS, features, root=folder)
    rng = np.random.default_rng(0)
    for number, length in enumerate(LEROBOT_LENGTHS):
        rows, images = make_episode(number, length)
        for row, image in zip(rows, images, strict=True):
            dataset.add_frame(
                {
                    TOP: image,
                    "observation.images.wrist": image[::-1],
                    "observation.state": np.array(row["observation.state"], np.float32),
                    "observation.grid": rng.integers(0, 9, (2, 3)),
                    ACTION: np.array(row[ACTION], np.float32).clip(-1, 1),
                    "next.reward": np.array([row["next.reward"]], np.float32),
                    "next.done": np.array([number == 0 and is_last(row)]),
                    "task": "push",
                }
            )
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return folder


def lerobot_items(folder: Path, backend: str) -> Iterator[dict[str, np.ndarray]]:
    """Return the rows that LeRobot reads, with images as uint8 of shape ``(height, width, 3)``."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/test", root=folder, video_backend=backend)
    for index in range(len(dataset)):
        item = {key: value.numpy() for key, value in dataset[index].items() if key != "task"}
        for key in (TOP, "observation.images.wrist"):
            item[key] = (item[key].transpose(1, 2, 0) * 255).round().astype(np.uint8)
        yield item


def joined(episodes: list[Episode], key: str | None = None) -> np.ndarray:
    """Join actions, or the observations under a key without the repeated last ones."""
    return np.concatenate([episode.actions if key is None else episode.observations[key][:-1] for episode in episodes])


@pytest.mark.parametrize("backend", ["pyav", "torchcodec"])
def test_episodes_equal_those_that_lerobot_reads(lerobot_folder: Path, backend: str) -> None:
    items = list(lerobot_items(lerobot_folder, backend))
    episodes = list(open_dataset(lerobot_folder))
    assert [len(episode) for episode in episodes] == LEROBOT_LENGTHS
    np.testing.assert_array_equal(joined(episodes), [item[ACTION] for item in items])
    for key in ("images_top", "images_wrist", "state", "grid"):
        name = f"observation.{key.replace('_', '.')}"
        np.testing.assert_array_equal(joined(episodes, key), [item[name] for item in items])
    rewards = np.concatenate([episode.rewards for episode in episodes])
    np.testing.assert_array_equal(rewards, [item["next.reward"].item() for item in items])
    assert [episode.terminations[-1] for episode in episodes] == [True, False, False]
    assert [episode.truncations[-1] for episode in episodes] == [False, True, True]


def make_spaces(dataset: Any, bound: float) -> Any:
    """Return an environment of which only the spaces are read."""
    action_space = spaces.Box(-bound, bound, dataset.action_space.shape)
    return SimpleNamespace(observation_space=dataset.observation_space, action_space=action_space)


def test_stores_equal_the_frames_that_lerobot_reads(lerobot_folder: Path) -> None:
    from sb3_ext import CompressedDictReplayBuffer

    items = list(lerobot_items(lerobot_folder, "pyav"))
    frames = np.array([item[TOP] for item in items])
    ends = np.cumsum(LEROBOT_LENGTHS) - 1
    following = np.minimum(np.arange(len(items)) + 1, ends.repeat(LEROBOT_LENGTHS))

    dataset = open_dataset(lerobot_folder)
    buffer = CompressedDictReplayBuffer.from_dataset(lerobot_folder, env=make_spaces(dataset, bound=2.0))
    for found, rows in ((buffer.observations, slice(None)), (buffer.next_observations, following)):
        np.testing.assert_array_equal(found["images_top"][:, 0].transpose(0, 2, 3, 1), frames[rows])
    np.testing.assert_array_equal(buffer.actions[:, 0] * 2, [item[ACTION] for item in items])


def test_sb3_buffers_refuse_actions_outside_of_the_bounds(folder: Path) -> None:
    from sb3_ext import CompressedDictReplayBuffer

    dataset = open_dataset(folder)
    with pytest.raises(InvalidArgumentError, match="pass an env that has them"):
        CompressedDictReplayBuffer.from_dataset(folder)
    with pytest.raises(InvalidArgumentError, match="outside of Box"):
        CompressedDictReplayBuffer.from_dataset(folder, env=make_spaces(dataset, bound=0.01))
