"""Buffers with ``storage_dir`` or ``max_bytes`` contain the right transitions, the same for all keys."""

from __future__ import annotations

import io
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from rl_ext_core.errors import InvalidArgumentError, StorageError
from sb3_ext import CompressedDictReplayBuffer
from tests.sb3_ext.buffer_envs import (
    add_all,
    collect_transitions,
    dict_env,
    image_env,
    make_buffers_for,
    make_reach_vec_env,
    sample_batch,
)

ENVS: dict[str, Any] = {
    "plain": image_env,
    "n-step": image_env,
    "dict": dict_env,
    "hindsight": lambda: make_reach_vec_env(size=36),
}


def make_compressed(kind: str, rows: int, venv: Any, **options: Any) -> Any:
    return make_buffers_for(kind, rows, venv, **options)[0]


def test_storage_dir_with_other_keys_is_refused(tmp_path: Path) -> None:
    image, vector = spaces.Box(0, 255, (2, 30, 30), np.uint8), spaces.Box(-1, 1, (3,), np.float32)
    actions = spaces.Discrete(2)

    def open_dict_buffer(**keys: Any) -> CompressedDictReplayBuffer:
        return CompressedDictReplayBuffer(50, spaces.Dict(keys), actions, "cpu", storage_dir=tmp_path, resume=True)

    buffer = open_dict_buffer(image=image, vector=vector)
    for _ in range(20):
        obs = sample_batch(buffer.observation_space, 1)
        buffer.add(obs, obs, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    buffer.close()
    for keys in ({"image": image}, {"image": image, "vector": vector, "other": vector}):
        with pytest.raises(InvalidArgumentError, match=r"was created with observations=.*Pass the same options"):
            open_dict_buffer(**keys)
    buffer = open_dict_buffer(image=image, vector=vector)
    assert buffer.size() == 20
    buffer.close()


def test_copy_info_dict_with_storage_dir_is_refused(tmp_path: Path) -> None:
    venv = make_reach_vec_env()
    with pytest.raises(
        InvalidArgumentError, match="copy_info_dict=True stores dicts, which storage_dir does not support"
    ):
        make_compressed("hindsight", 40, venv, copy_info_dict=True, storage_dir=tmp_path, resume=True)
    make_compressed("hindsight", 40, venv, storage_dir=tmp_path, resume=True).close()


@pytest.mark.parametrize("length", [9, 400])
def test_hindsight_excludes_episodes_with_dropped_start(length: int) -> None:
    venv = make_reach_vec_env(size=36, still=False, length=length)
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
    assert (ours.size() < length) == (length == 400)


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


@pytest.mark.parametrize(
    "leave", [lambda path: path.rename(path.with_name("old")), shutil.rmtree], ids=["move", "delete"]
)
def test_buffer_does_not_write_to_folder_that_replaced_its_own(leave: Any, tmp_path: Path) -> None:
    venv, path = image_env(still=False), tmp_path / "run"
    transitions = collect_transitions(venv, 140)
    former = make_compressed("plain", 200, venv, storage_dir=path, resume=True)
    add_all([former], transitions[:50])
    leave(path)
    latter = make_compressed("plain", 200, venv, storage_dir=path, resume=True)
    add_all([latter], transitions[:30])
    with pytest.raises(StorageError, match="was moved or replaced"):
        add_all([former], transitions[50:])
    np.testing.assert_array_equal(former.observations[:50], [transition[0] for transition in transitions[:50]])
    latter.close()
    former.close()
    opened = make_compressed("plain", 200, venv, storage_dir=path, resume=True)
    assert opened.size() == 30
    np.testing.assert_array_equal(opened.observations[:30], [transition[0] for transition in transitions[:30]])
    opened.close()


def test_saved_buffer_is_consistent_while_thread_adds() -> None:
    venv = ENVS["dict"]()
    transitions = collect_transitions(venv, 40)
    buffer = make_compressed("dict", 40, venv)
    for number, transition in enumerate(transitions):
        buffer.add(*transition[:3], np.full(venv.num_envs, number), *transition[4:])
    done = threading.Event()

    def keep_adding() -> None:
        while not done.is_set():
            for number, transition in enumerate(transitions):
                buffer.add(*transition[:3], np.full(venv.num_envs, number), *transition[4:])

    thread = threading.Thread(target=keep_adding)
    thread.start()
    try:
        for _ in range(8):
            file = io.BytesIO()
            save_to_pkl(file, buffer)
            file.seek(0)
            loaded = load_from_pkl(file)
            rows, obs = slice(0, loaded.size()), loaded.observations
            for row, number in enumerate(loaded.rewards[rows, 0].astype(int)):
                for key, view in obs.items():
                    np.testing.assert_array_equal(view[row], transitions[number][0][key])
    finally:
        done.set()
        thread.join()
