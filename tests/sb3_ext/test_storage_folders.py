"""New models, loaded models and loaded replay buffers continue in the right ``storage_dir``."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN

from rl_ext_core.errors import InvalidArgumentError, StorageError
from sb3_ext import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import add_all, collect_transitions, make_buffers_for, without_logger
from tests.sb3_ext.test_storage import ENVS

SPACES = spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(2)


def make_model(folder: Path, **options: Any) -> DQN:
    """Return a new model whose replay buffer is in a folder."""
    kwargs = {"storage_dir": folder, **options}
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        buffer_size=500,
        learning_starts=10_000,
        train_freq=1,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs=kwargs,
        policy_kwargs={"net_arch": [4]},
    )
    return without_logger(model)


def size_of_folder(folder: Path) -> int:
    buffer = make_model(folder, resume=True).replay_buffer
    size: int = buffer.size()
    buffer.close()
    return size


def test_new_buffer_continues_in_a_folder_only_if_asked(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a").learn(30)
    model.replay_buffer.close()
    with pytest.raises(InvalidArgumentError, match=r"contains 30 rows of an earlier buffer.* Pass resume=True"):
        make_model(tmp_path / "a")
    assert size_of_folder(tmp_path / "a") == 30
    with pytest.raises(InvalidArgumentError, match="resume=True needs a folder"):
        CompressedReplayBuffer(40, *SPACES, resume=True)


def test_garbage_collection_closes_a_folder_with_its_last_row(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a").learn(30)
    rewards = model.replay_buffer.rewards[:30].copy()
    del model
    gc.collect()
    buffer = make_model(tmp_path / "a", resume=True).replay_buffer
    assert buffer.recovered == (30, 0)
    np.testing.assert_array_equal(buffer.rewards[:30], rewards)
    buffer.close()


def test_load_after_del_continues_in_the_folder(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a").learn(30)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    del model  # not collected yet
    model = DQN.load(tmp_path / "model.zip", env=make_model(tmp_path / "other").get_env())
    assert model.replay_buffer.size() == 30
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    without_logger(model).learn(20, reset_num_timesteps=False)
    assert (tmp_path / "buffer.pkl").stat().st_size < 10_000
    shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert size_of_folder(tmp_path / "killed") == 50


def test_in_use_error_names_the_thread_that_owns_the_folder(tmp_path: Path) -> None:
    buffers: list[Any] = []
    thread = threading.Thread(target=lambda: buffers.append(make_model(tmp_path / "a").replay_buffer), name="trainer")
    thread.start()
    thread.join()
    with pytest.raises(StorageError, match=r"in use by this process, .*thread 'trainer'"):
        make_model(tmp_path / "a", resume=True)
    buffers[0].close()


@pytest.mark.filterwarnings("ignore:The last trajectory")
@pytest.mark.parametrize("rows", [40, 200], ids=["full", "not full"])
@pytest.mark.parametrize("kind", list(ENVS))
def test_saved_buffer_of_a_folder_that_moved_on_is_a_copy(
    kind: str, rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    venv = ENVS[kind]()
    transitions = collect_transitions(venv, 70)
    ours, theirs = make_buffers_for(kind, rows, venv, storage_dir=tmp_path / "a")
    add_all((ours, theirs), transitions[:50])
    saved = pickle.dumps(ours)
    newest = theirs.rewards[(np.arange(50 - 20, 50)) % rows].copy()
    add_all((ours,), transitions[50:])
    ours.close()
    loaded = pickle.loads(saved)
    assert "20 transitions that are newer" in caplog.text
    assert "a-copy1" in caplog.text
    assert loaded.size() == min(50, rows - 20)
    np.testing.assert_array_equal(loaded.rewards[(np.arange(50 - 20, 50)) % rows], newest)
    if kind == "hindsight" and rows == 200:
        np.testing.assert_array_equal(loaded.ep_length[:50], theirs.ep_length[:50])
        loaded.set_env(venv)
    add_all((loaded,), transitions[50:])
    loaded.close()
    again = make_buffers_for(kind, rows, venv, storage_dir=tmp_path / "a", resume=True)[0]
    assert again.size() == min(70, rows)
    again.close()


def test_saved_buffer_continues_in_a_folder_that_the_model_opened_elsewhere(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a").learn(30)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.replay_buffer.close()
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(StorageError, match="which does not exist"):
        CompressedReplayBuffer.load(tmp_path / "buffer.pkl")
    model = make_model(tmp_path / "b", resume=True)
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    model.learn(10)
    model.replay_buffer.close()
    assert size_of_folder(tmp_path / "b") == 40


def test_saved_buffer_of_another_living_buffer_is_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(tmp_path / "a").learn(30)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    other = CompressedReplayBuffer.load(tmp_path / "buffer.pkl")
    assert "a is in use" in caplog.text
    model.learn(10, reset_num_timesteps=False)
    assert (model.replay_buffer.size(), other.size()) == (40, 30)
    for buffer in (model.replay_buffer, other):
        buffer.close()


def test_file_of_a_buffer_in_memory_warns_a_model_with_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = CompressedReplayBuffer(40, spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    model = make_model(tmp_path / "a")
    folder = model.replay_buffer
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert "the loaded replay buffer is in memory" in caplog.text
    folder.close()


def test_uniform_buffer_refuses_a_folder_with_priorities(tmp_path: Path) -> None:
    CompressedPrioritizedReplayBuffer(40, *SPACES, storage_dir=tmp_path / "a").close()
    with pytest.raises(InvalidArgumentError, match=r"contains \['priorities'\] of another class"):
        CompressedReplayBuffer(40, *SPACES, storage_dir=tmp_path / "a")
    CompressedPrioritizedReplayBuffer(40, *SPACES, storage_dir=tmp_path / "a").close()
