from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymEnv

from rl_ext_core.datasets import Episode, open_dataset, write_dataset
from rl_ext_core.datasets.episodes import map_values
from rl_ext_core.errors import InvalidArgumentError
from tests.dataset_checks import assert_equal_episodes, random_episodes, require_minari
from torchrl_ext import FrameStorage

minari = require_minari()

PIXELS = spaces.Box(0, 255, (36, 40, 3), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
MIXED = spaces.Dict({"camera": PIXELS, "inner": spaces.Dict({"state": VECTOR})})
SWITCH = spaces.Discrete(4)
THRUST = spaces.Box(-2, 3, (2,), np.float32)
SIDES = slice(None, -1), slice(1, None)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    return tmp_path / "root"


def write(observations: Any = PIXELS, actions: Any = SWITCH, lengths: tuple[int, ...] = (4, 1, 7)) -> list[Episode]:
    episodes = random_episodes(observations, actions, lengths)
    write_dataset("mine-v0", episodes, observations, actions)
    return episodes


def fill(storage: FrameStorage) -> TensorDictReplayBuffer:
    """Fill a storage with the dataset ``mine-v0``, as in the guide."""
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    for episode in open_dataset("mine-v0"):
        sides = [map_values(lambda array, part=part: array[part], episode.observations) for part in SIDES]
        ends = {"terminated": episode.terminations, "truncated": episode.truncations}
        ends |= {"done": episode.terminations | episode.truncations, "reward": episode.rewards}
        following = {"observation": sides[1], **{key: array[:, None] for key, array in ends.items()}}
        elements = {"observation": sides[0], "action": episode.actions, "next": following}
        buffer.extend(TensorDict(elements, [len(episode)]))
    return buffer


@pytest.mark.parametrize(
    ("observations", "actions"), [(PIXELS, SWITCH), (VECTOR, spaces.MultiBinary(3)), (MIXED, THRUST)]
)
def test_round_trip_returns_equal_episodes(observations: Any, actions: Any, tmp_path: Path) -> None:
    episodes = write(observations, actions)
    storage = FrameStorage(12)
    fill(storage)
    storage.to_dataset("copy-v0", actions, data_format="arrow")
    assert_equal_episodes(open_dataset("copy-v0"), episodes)
    assert open_dataset("copy-v0").observation_space == observations  # as it was inferred
    storage.to_dataset(tmp_path / "copy", actions, observation_space=observations)
    assert_equal_episodes(minari.MinariDataset(tmp_path / "copy"), episodes)


def test_overwritten_elements_are_left_out(tmp_path: Path) -> None:
    episodes = write()
    storage = FrameStorage(15, storage_dir=tmp_path / "stored")
    fill(storage).extend(storage.get(torch.arange(5)))
    found = list(open_dataset(storage.to_dataset(tmp_path / "copy", SWITCH)))
    assert [len(episode) for episode in found] == [2, 1, 7, 4, 1]
    np.testing.assert_array_equal(found[0].observations, episodes[0].observations[2:])
    assert_equal_episodes(found[1:3], episodes[1:])
    storage.close()


def test_rollout_becomes_a_dataset() -> None:
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    rollout = env.rollout(40, break_when_any_done=False)
    storage = FrameStorage(100)
    TensorDictReplayBuffer(storage=storage, batch_size=4).extend(rollout)
    storage.to_dataset("cartpole/mine-v0", env._env.action_space)
    env.close()
    dataset = open_dataset("cartpole/mine-v0")
    assert dataset.action_space == spaces.Discrete(2)
    actions = np.concatenate([episode.actions for episode in dataset])
    np.testing.assert_array_equal(actions, rollout["action"].to(int).argmax(-1))
    ends = np.cumsum(dataset.lengths) - 1
    np.testing.assert_array_equal(ends[:-1], np.flatnonzero(rollout["next", "done"]))
    np.testing.assert_array_equal(dataset.read(0).observations[:-1], rollout["observation"][: ends[0] + 1])
    np.testing.assert_array_equal(dataset.read(0).observations[-1], rollout["next", "observation"][ends[0]])


def test_several_keys_become_a_dict() -> None:
    count = torch.arange(6.0)[:, None]
    part = {"a": count, "b": torch.zeros(6, 3, dtype=torch.bool), "step_count": count}
    done = torch.zeros(6, 1, dtype=torch.bool)
    following = {**part, "a": count + 1, "reward": count, "done": done}
    storage = FrameStorage(6)
    TensorDictReplayBuffer(storage=storage, batch_size=1).extend(
        TensorDict({**part, "action": torch.arange(6), "next": following}, [6])
    )
    storage.to_dataset("mine-v0", spaces.Discrete(6))
    dataset = open_dataset("mine-v0")
    expected = {"a": spaces.Box(-np.inf, np.inf, (1,), np.float32), "b": spaces.MultiBinary((3,))}
    assert dataset.observation_space == spaces.Dict(expected)
    assert dataset.lengths == [6]


def test_unsuitable_storages_are_refused() -> None:
    write()
    storage = FrameStorage(12)
    fill(storage)
    with pytest.raises(InvalidArgumentError, match=r"actions have shape \(\), expected \(2,\)"):
        storage.to_dataset("copy-v0", THRUST)
    with pytest.raises(InvalidArgumentError, match=r"actions are from 1 to 3, expected those of Discrete\(2\)"):
        storage.to_dataset("copy-v0", spaces.Discrete(2))
    with pytest.raises(InvalidArgumentError, match="observations have shape"):
        storage.to_dataset("copy-v0", SWITCH, observation_space=VECTOR)
    with pytest.raises(InvalidArgumentError, match="expected ndim=1 and at least one element"):
        FrameStorage(3).to_dataset("copy-v0", SWITCH)
    storage = FrameStorage(3)
    TensorDictReplayBuffer(storage=storage, batch_size=1).extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(InvalidArgumentError, match=r"'action', \('next', 'reward'\)"):
        storage.to_dataset("copy-v0", SWITCH)
