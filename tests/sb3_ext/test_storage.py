from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from sb3_ext import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import (
    TransitionSource,
    add_all,
    assert_same,
    collect_transitions,
    dict_env,
    image_env,
    make_buffers,
    make_buffers_for,
    make_reach_vec_env,
    repeating_in_thread,
    without_logger,
)

ENVS: dict[str, Any] = {
    "plain": image_env,
    "n-step": image_env,
    "dict": dict_env,
    "hindsight": lambda: make_reach_vec_env(size=36),
}


def make_compressed(kind: str, rows: int, venv: Any, **options: Any) -> Any:
    return make_buffers_for(kind, rows, venv, **options)[0]


def test_copy_info_dict_with_storage_dir_is_refused(tmp_path: Path) -> None:
    venv = make_reach_vec_env()
    with pytest.raises(InvalidArgumentError, match="True stores dicts, which storage_dir does not support"):
        make_compressed("hindsight", 40, venv, copy_info_dict=True, storage_dir=tmp_path, resume=True)
    make_compressed("hindsight", 40, venv, storage_dir=tmp_path, resume=True).close()


def test_hindsight_excludes_episodes_that_are_longer_than_what_is_stored() -> None:
    venv = make_reach_vec_env(size=36, still=False, length=400)
    ours, theirs = make_buffers_for("hindsight", 1000, venv, max_bytes=400_000)
    ended = 0
    for transition in collect_transitions(venv, 900):
        add_all((ours, theirs), [transition])
        oldest = ours.pos - ours.size()
        whole = theirs.ep_start >= oldest
        np.testing.assert_array_equal(ours.ep_length, theirs.ep_length * whole)
        ended += int(transition[4].sum())
    assert oldest > 100
    assert ended > 1
    assert ours.size() < 400


@pytest.mark.filterwarnings("ignore:The last trajectory")
def test_trajectory_truncated_can_be_reopened(tmp_path: Path) -> None:
    venv = ENVS["hindsight"]()
    buffer = make_compressed("hindsight", 40, venv, storage_dir=tmp_path / "a", resume=True)
    add_all((buffer,), collect_transitions(venv, 22))
    buffer.truncate_last_trajectory()
    dones = buffer.dones[: buffer.pos].copy()
    buffer.close()
    buffer = make_compressed("hindsight", 40, venv, storage_dir=tmp_path / "a", resume=True)
    np.testing.assert_array_equal(buffer.dones[: buffer.pos], dones)
    buffer.close()


def test_buffer_does_not_write_to_folder_that_replaced_its_own(tmp_path: Path) -> None:
    venv, path = image_env(still=False), tmp_path / "run"
    transitions = collect_transitions(venv, 140)
    former = make_compressed("plain", 200, venv, storage_dir=path)
    add_all([former], transitions[:50])
    path.rename(tmp_path / "old")
    latter = make_compressed("plain", 200, venv, storage_dir=path)
    add_all([latter], transitions[:30])
    with pytest.raises(StorageError, match="was moved or replaced"):
        add_all([former], transitions[50:])
    former.close()
    latter.close()
    opened = make_compressed("plain", 200, venv, storage_dir=path, resume=True)
    np.testing.assert_array_equal(opened.observations[:30], [transition[0] for transition in transitions[:30]])
    opened.close()


def test_saved_buffer_is_consistent_while_thread_adds() -> None:
    venv = ENVS["dict"]()
    transitions = collect_transitions(venv, 40)
    buffer = make_compressed("dict", 40, venv)

    def add_all_numbered() -> None:
        for number, transition in enumerate(transitions):
            buffer.add(*transition[:3], np.full(venv.num_envs, number), *transition[4:])

    add_all_numbered()
    with repeating_in_thread(add_all_numbered):
        for _ in range(8):
            file = io.BytesIO()
            save_to_pkl(file, buffer)
            file.seek(0)
            loaded = load_from_pkl(file)
            rows, obs = slice(0, loaded.size()), loaded.observations
            for row, number in enumerate(loaded.rewards[rows, 0].astype(int)):
                for key, view in obs.items():
                    np.testing.assert_array_equal(view[row], transitions[number][0][key])


# -- new models, loaded models and loaded replay buffers continue in the right ``storage_dir``

IMAGE_SPACES = spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(2)


def make_dqn(folder: Path, **options: Any) -> DQN:
    sizes = {"buffer_size": 500, "learning_starts": 10_000, "train_freq": 1, "policy_kwargs": {"net_arch": [4]}}
    buffer = {"replay_buffer_class": CompressedReplayBuffer, "replay_buffer_kwargs": {"storage_dir": folder, **options}}
    return without_logger(DQN("MlpPolicy", "CartPole-v1", **sizes, **buffer))


def size_of_folder(folder: Path) -> int:
    buffer = make_dqn(folder, resume=True).replay_buffer
    size: int = buffer.size()
    buffer.close()
    return size


def test_new_buffer_continues_in_a_folder_only_if_asked(tmp_path: Path) -> None:
    model = make_dqn(tmp_path / "a").learn(30)
    model.replay_buffer.close()
    with pytest.raises(InvalidArgumentError, match=r"contains 30 rows of an earlier buffer.* Pass resume=True"):
        make_dqn(tmp_path / "a")
    assert size_of_folder(tmp_path / "a") == 30
    with pytest.raises(InvalidArgumentError, match="resume=True needs a folder"):
        CompressedReplayBuffer(40, *IMAGE_SPACES, resume=True)


def test_load_after_del_continues_in_the_folder(tmp_path: Path) -> None:
    model = make_dqn(tmp_path / "a").learn(30)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    del model  # not collected yet
    model = DQN.load(tmp_path / "model.zip", env=make_dqn(tmp_path / "other").get_env())
    assert model.replay_buffer.size() == 30
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    without_logger(model).learn(20, reset_num_timesteps=False)
    assert (tmp_path / "buffer.pkl").stat().st_size < 10_000
    shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert size_of_folder(tmp_path / "killed") == 50


@pytest.mark.parametrize("kind", list(ENVS))
def test_saved_buffer_of_a_folder_continues_unless_it_has_newer_transitions(kind: str, tmp_path: Path) -> None:
    venv = ENVS[kind]()
    transitions = collect_transitions(venv, 70)
    ours, theirs = make_buffers_for(kind, 40, venv, storage_dir=tmp_path / "a")
    add_all((ours, theirs), transitions[:50])
    saved = pickle.dumps(ours)
    with pytest.raises(StorageError, match="is in use by this process"):
        pickle.loads(saved)
    ours.close()
    loaded = pickle.loads(saved)
    if kind == "hindsight":
        loaded.set_env(venv)
    assert_same(loaded, theirs)
    add_all((loaded,), transitions[50:])
    loaded.close()
    for _ in range(2):  # the refused file leaves the folder closed
        with pytest.raises(InvalidArgumentError, match=r"20 transitions or .* newer .* leave out load_replay_buffer"):
            pickle.loads(saved)


def test_saved_buffer_continues_in_a_folder_that_the_model_opened_elsewhere(tmp_path: Path) -> None:
    model = make_dqn(tmp_path / "a").learn(30)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.replay_buffer.close()
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(StorageError, match="which does not exist"):
        CompressedReplayBuffer.load(tmp_path / "buffer.pkl")
    model = make_dqn(tmp_path / "b", resume=True)
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    model.learn(10)
    model.replay_buffer.close()
    assert size_of_folder(tmp_path / "b") == 40


def test_file_of_a_buffer_in_memory_warns_a_model_with_a_folder(tmp_path: Path, caplog: Any) -> None:
    save_to_pkl(tmp_path / "buffer.pkl", CompressedReplayBuffer(40, spaces.Box(-1, 1, (4,)), spaces.Discrete(2)))
    model = make_dqn(tmp_path / "a")
    folder = model.replay_buffer
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert "the loaded replay buffer is in memory" in caplog.text
    folder.close()


def test_uniform_buffer_refuses_a_folder_with_priorities(tmp_path: Path) -> None:
    CompressedPrioritizedReplayBuffer(40, *IMAGE_SPACES, storage_dir=tmp_path / "a").close()
    with pytest.raises(InvalidArgumentError, match=r"contains \['priorities'\] of another class"):
        CompressedReplayBuffer(40, *IMAGE_SPACES, storage_dir=tmp_path / "a")
    CompressedPrioritizedReplayBuffer(40, *IMAGE_SPACES, storage_dir=tmp_path / "a").close()


# -- saved buffers are small and load with the same transitions; damaged files are refused

THREE_ACTIONS = spaces.Discrete(3)
SMALL = spaces.Box(0, 255, (3, 6, 5), np.uint8)


def test_file_of_images_is_much_smaller_than_that_of_sb3(tmp_path: Path) -> None:
    venv = image_env()
    buffers = make_buffers_for("plain", 200, venv)
    add_all(buffers, collect_transitions(venv, 250))
    for name, buffer in zip(("ours.pkl", "theirs.pkl"), buffers, strict=True):
        save_to_pkl(tmp_path / name, buffer)
    assert (tmp_path / "ours.pkl").stat().st_size < (tmp_path / "theirs.pkl").stat().st_size / 20
    loaded = CompressedReplayBuffer.load(tmp_path / "ours.pkl", device="cpu")
    assert (loaded.size(), loaded.device) == (200, torch.device("cpu"))


def make_small_buffers() -> tuple[CompressedReplayBuffer, ReplayBuffer]:
    """Return a compressed replay buffer and SB3's, both with the same transitions."""
    buffers = make_buffers("plain", 20, SMALL, THREE_ACTIONS, codec="raw")
    source = TransitionSource(SMALL, THREE_ACTIONS, 2)
    add_all(buffers, [source.step() for _ in range(12)])
    return buffers


@pytest.fixture(scope="module")
def saved_buffer() -> bytes:
    return pickle.dumps(make_small_buffers()[0], protocol=pickle.HIGHEST_PROTOCOL)


def test_file_of_sb3s_buffer_is_refused(tmp_path: Path) -> None:
    save_to_pkl(tmp_path / "buffer.pkl", make_small_buffers()[1])
    with pytest.raises(CorruptFileError, match="contains a ReplayBuffer, expected a CompressedReplayBuffer"):
        CompressedReplayBuffer.load(tmp_path / "buffer.pkl")


def test_states_of_other_versions_and_damaged_ones_are_refused() -> None:
    state = make_small_buffers()[0].__getstate__()
    for changed, text in (
        ({"format": 2}, "has format 2, but this version reads 1; use the version"),
        ({"format": None}, "has format None, but this version reads 1; use the version"),
        ({"attributes": state["attributes"] ^ 1}, "is damaged: its checksum does not match its contents"),
    ):
        with pytest.raises(CorruptFileError, match=text):
            CompressedReplayBuffer.__new__(CompressedReplayBuffer).__setstate__({**state, **changed})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_damaged_file_is_refused_or_loads_same_transitions(
    saved_buffer: bytes, tmp_path: Path, place: float, flip: int
) -> None:
    """Some bytes are irrelevant, but a file never loads with different transitions."""
    data = bytearray(saved_buffer)
    data[int(place * len(data))] ^= flip
    path = tmp_path / "buffer.pkl"
    path.write_bytes(data)
    n_open = len(os.listdir("/proc/self/fd"))
    try:
        loaded = CompressedReplayBuffer.load(path, device="cpu")
    except CorruptFileError:
        assert len(os.listdir("/proc/self/fd")) == n_open
        return
    # Damage in the pickled spaces of gymnasium may go undetected, but it does not affect samples.
    rows = np.arange(10)
    original = make_small_buffers()[0]
    for name in ("actions", "rewards", "dones", "timeouts", "observations", "next_observations"):
        left, right = getattr(loaded, name)[rows], getattr(original, name)[rows]
        np.testing.assert_array_equal(left, right, err_msg=f"byte {int(place * len(data))} flipped by {flip}")
