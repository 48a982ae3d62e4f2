from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rl_ext_core.datasets import Episode, open_dataset, write_dataset
from rl_ext_core.datasets.episodes import Steps, split_episodes
from rl_ext_core.errors import (
    CorruptFileError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    StorageError,
)
from tests.dataset_checks import assert_equal_episodes, random_episodes, require_minari

minari = require_minari()

IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
MIXED = spaces.Dict({"image": IMAGE, "inner": spaces.Dict({"number": spaces.Discrete(5), "vector": VECTOR})})
ACTIONS = spaces.Discrete(4)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    return tmp_path / "root"


def write(target: Any, lengths: tuple[int, ...] = (4, 1, 7), space: Any = VECTOR, **options: Any) -> list[Episode]:
    episodes = random_episodes(space, ACTIONS, lengths)
    write_dataset(target, episodes, space, ACTIONS, **options)
    return episodes


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_round_trip_returns_equal_episodes(data_format: str) -> None:
    episodes = write("games/mine-v0", space=MIXED, data_format=data_format)
    dataset = open_dataset("games/mine-v0")
    assert (dataset.lengths, dataset.n_steps) == ([4, 1, 7], 12)
    assert (dataset.observation_space, dataset.action_space) == (MIXED, ACTIONS)
    assert_equal_episodes(dataset, episodes)
    loaded = minari.load_dataset("games/mine-v0")
    assert (loaded.total_steps, loaded.storage.FORMAT) == (12, data_format)
    assert_equal_episodes(loaded, episodes)
    assert "games/mine-v0" in minari.list_local_datasets()
    assert minari.namespace.list_local_namespaces() == ["games"]


def test_folders_are_read_with_and_without_their_data_folder(tmp_path: Path, root: Path) -> None:
    episodes = write(tmp_path / "some data")
    assert_equal_episodes(open_dataset(str(tmp_path / "some data")), episodes)
    assert minari.MinariDataset(tmp_path / "some data").id == "some_data-v0"
    write("other-v1")
    assert_equal_episodes(open_dataset(root / "other-v1"), episodes)
    part = minari.load_dataset("other-v1").filter_episodes(lambda episode: len(episode) > 1)
    assert_equal_episodes(open_dataset(part), [episodes[0], episodes[2]])
    opened = open_dataset(part)
    assert open_dataset(opened) is opened


def test_relative_paths_and_ids_are_distinguished(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("./mine-v0")
    assert (tmp_path / "mine-v0" / "metadata.json").is_file()
    assert not (root / "mine-v0").exists()
    sources: list[tuple[Any, type[Exception], str]] = [
        ("mine-v0", InvalidArgumentError, r"minari download mine-v0\nUse './mine-v0' for a folder"),
        ("nowhere", InvalidArgumentError, "expected the folder of a Minari dataset"),
        (3, InvalidTypeError, "is of type int"),
    ]
    for source, error, text in sources:
        with pytest.raises(error, match=text):
            open_dataset(source)


def test_missing_package_is_reported_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage")
    for package, text in (
        ("h5py", r"h5py.*\n.*pip install .*\[datasets\]"),
        ("minari", r"minari.*\n.*pip install .*\[datasets\]"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=text):
            open_dataset(tmp_path / "mine")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_damaged_files_are_refused(tmp_path: Path, data_format: str) -> None:
    write(tmp_path / "mine", (200,), data_format=data_format)
    files = [path for path in (tmp_path / "mine").rglob("*") if path.suffix in (".hdf5", ".arrow")]
    for path in files:
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CorruptFileError, match="is damaged"):
        list(open_dataset(tmp_path / "mine"))


def test_episode_with_missing_rows_is_refused(tmp_path: Path) -> None:
    import h5py

    write(tmp_path / "mine")
    with h5py.File(tmp_path / "mine" / "main_data.hdf5", "a") as file:
        file["episode_1/observations"].resize(1, axis=0)
    dataset = open_dataset(tmp_path / "mine")
    assert len(dataset.read(0)) == 4
    with pytest.raises(CorruptFileError, match=r"episode 1 has \[1\] observations, expected 2"):
        dataset.read(1)


def test_unknown_version_of_minari_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine")
    path = tmp_path / "mine" / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "minari_version": "9.9.9"}))
    with pytest.raises(InvalidArgumentError, match=r"Minari 9\.9\.9.*\n    pip install -U minari"):
        open_dataset(tmp_path / "mine")


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Tuple([VECTOR, VECTOR]), r"observation_space is Tuple"),
        (spaces.Dict({"mission": spaces.Text(10)}), r"observation_space\['mission'\] is Text"),
    ],
)
def test_other_spaces_are_refused_by_name(tmp_path: Path, space: Any, name: str) -> None:
    with pytest.raises(InvalidTypeError, match=name):
        write_dataset(tmp_path / "mine", [], space, ACTIONS)
    storage = minari.dataset.minari_storage.MinariStorage.new(tmp_path / "mine", space, ACTIONS)
    storage.update_metadata({"dataset_id": "mine-v0", "minari_version": minari.__version__})
    with pytest.raises(InvalidTypeError, match=name):
        open_dataset(tmp_path / "mine")


def test_failure_leaves_no_files_and_changes_none(tmp_path: Path) -> None:
    def fail() -> Iterator[Episode]:
        yield from random_episodes(VECTOR, ACTIONS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "mine", fail(), VECTOR, ACTIONS)
    (tmp_path / "existing").mkdir()
    good, other_actions = random_episodes(VECTOR, ACTIONS), random_episodes(VECTOR, spaces.Discrete(9, start=-1))
    other_observations = random_episodes(spaces.Box(0, 1, (2,), np.float64), ACTIONS)
    for target, episodes, options, text in (
        (tmp_path / "mine", [], {}, "no episodes"),
        (tmp_path / "mine", other_actions, {}, "are from 3 to 7"),
        (tmp_path / "mine", other_observations, {}, r"observations have shape \(2,\), expected \(3,\)"),
        (tmp_path / "mine", good, {"data_format": "csv"}, "expected one of"),
        (tmp_path / "existing", good, {}, "exists already"),
        ("", good, {}, "empty"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            write_dataset(target, episodes, VECTOR, ACTIONS, **options)
    assert [*tmp_path.rglob("*")] == [tmp_path / "existing"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_folder_without_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        write(tmp_path / "mine")


def test_long_episodes_are_written_to_hdf5_only(tmp_path: Path) -> None:
    n_steps = 32_768
    flags = np.zeros(n_steps, bool)
    episode = Episode(np.zeros((n_steps + 1, 1), np.float32), np.zeros(n_steps, int), np.zeros(n_steps), flags, flags)
    space = spaces.Box(-1, 1, (1,))
    with pytest.raises(InvalidArgumentError, match=r"reads only the first 32,767 .*\. Use data_format='hdf5'"):
        write_dataset(tmp_path / "arrow", [episode], space, ACTIONS, data_format="arrow")
    write_dataset(tmp_path / "hdf5", [episode], space, ACTIONS)
    assert open_dataset(tmp_path / "hdf5").lengths == [n_steps]


def test_old_minari_without_lossless_images_is_refused_for_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = minari.dataset.minari_storage.MinariStorage
    new = storage.new
    monkeypatch.setattr(
        storage, "new", lambda path, observations, actions, data_format: new(path, observations, actions)
    )
    write(tmp_path / "vectors")
    with pytest.raises(InvalidArgumentError, match=r"stores images as JPEG.*\n.*minari>=0\.5\.4"):
        write(tmp_path / "images", space=MIXED)


@given(
    numbers=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    ends=st.lists(st.sampled_from(["", "terminated", "truncated"]), min_size=12, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_split_episodes_matches_a_plain_loop(numbers: list[int], ends: list[str], sizes: list[int]) -> None:
    # A step with the number 0 follows the one before. Others begin elsewhere, as after a reset.
    count = len(numbers)
    observations = np.cumsum(np.array(numbers) * 10 + 1).astype(float)
    observations[np.arange(count) % 5 == 4] = np.nan
    following = observations + 1
    for step in range(count - 1):
        if numbers[step + 1] == 0:
            following[step] = observations[step + 1]
    terminations, truncations = (
        np.array([end == name for end in ends[:count]]) for name in ("terminated", "truncated")
    )
    steps = Steps({"x": observations}, {"x": following}, np.arange(count), np.arange(count), terminations, truncations)
    bounds = np.minimum(np.cumsum([0, *sizes]), count)
    chunks = [steps.part(first, end) for first, end in itertools.pairwise(bounds) if end > first]

    expected: list[list[int]] = [[]]
    for step in range(count):
        expected[-1].append(step)
        last = step == count - 1
        if last or ends[step] or not np.array_equal(following[step], observations[step + 1], equal_nan=True):
            expected.append([])
    episodes = list(split_episodes(chunks))
    assert [episode.actions.tolist() for episode in episodes] == expected[:-1]
    for episode, rows in zip(episodes, expected, strict=False):
        np.testing.assert_array_equal(episode.observations["x"], [*observations[rows], following[rows[-1]]])
        assert episode.terminations[-1] == terminations[rows[-1]]
        assert episode.truncations[-1] == (not terminations[rows[-1]])
