"""Saved buffers are small and load with the same transitions; damaged files are refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer

from rl_ext_core.errors import CorruptFileError
from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import (
    REPLAY,
    TransitionSource,
    add_all,
    assert_same,
    collect_transitions,
    image_env,
    make_buffers,
    make_reach_vec_env,
    without_logger,
)

ACTIONS = spaces.Discrete(3)
SMALL = spaces.Box(0, 255, (3, 6, 5), np.uint8)


def make_model(kind: str, ours: bool, **options: Any) -> Any:
    """Return a DQN or SAC model with a compressed replay buffer, or with SB3's."""
    defaults: dict[str, Any] = {
        "learning_starts": 10_000,
        "seed": 0,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [4]},
    }
    defaults["replay_buffer_class"] = REPLAY[kind][0 if ours else 1]
    if kind == "plain":
        return without_logger(DQN("CnnPolicy", image_env(), buffer_size=400, **defaults, **options))
    return without_logger(SAC("MultiInputPolicy", make_reach_vec_env(size=36), buffer_size=80, **defaults, **options))


@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer will be truncated")
@pytest.mark.parametrize(
    ("kind", "n_steps", "options", "load"),
    [
        ("plain", 500, {}, {}),
        ("hindsight", 50, {"copy_info_dict": True}, {"truncate_last_traj": True}),
        ("hindsight", 120, {}, {"truncate_last_traj": True}),
    ],
)
def test_model_saves_and_loads_replay_buffer(
    kind: str, n_steps: int, options: dict[str, Any], load: dict[str, Any], tmp_path: Path
) -> None:
    loaded, sizes = [], []
    for ours in (True, False):
        model = make_model(kind, ours, replay_buffer_kwargs=options)
        model.learn(n_steps)
        path = tmp_path / f"{ours}.pkl"
        model.save_replay_buffer(path)
        sizes.append(path.stat().st_size)
        model.replay_buffer = None
        model.load_replay_buffer(path, **load)
        assert getattr(model.replay_buffer, "env", model.env) is model.env
        loaded.append(model.replay_buffer)
    assert type(loaded[0]) is REPLAY[kind][0]
    assert_same(loaded[0], loaded[1])
    add_all(loaded, collect_transitions(model.env, 50))
    assert_same(loaded[0], loaded[1])
    assert sizes[0] < sizes[1] / (20 if kind == "plain" else 1)
    again = REPLAY[kind][0].load(tmp_path / "True.pkl", device="cpu")
    assert again.size() == min(n_steps // 2, again.buffer_size)
    assert again.device == torch.device("cpu")


def test_copy_of_hindsight_buffer_separates_episodes_with_the_same_first_row() -> None:
    image, place = SMALL, spaces.Box(-1, 1, (2,), np.float32)
    goals = spaces.Dict(observation=image, achieved_goal=place, desired_goal=place)
    ours, theirs = make_buffers("hindsight", 3, goals, ACTIONS, 1, env=None)
    source = TransitionSource(goals, ACTIONS, 1)
    for done in (False, False, True, False, True):
        obs, next_obs, action, reward, _, infos = source.step()
        add_all((ours, theirs), [(obs, next_obs, action, reward, np.array([done]), infos)])
    assert pickle.loads(pickle.dumps(ours)).ep_length.tolist() == theirs.ep_length.tolist() == [[2], [2], [0]]


def make_small_buffers() -> tuple[CompressedReplayBuffer, ReplayBuffer]:
    """Return a compressed replay buffer and SB3's, both with the same transitions."""
    buffers = make_buffers("plain", 20, SMALL, ACTIONS, codec="raw")
    source = TransitionSource(SMALL, ACTIONS, 2)
    add_all(buffers, [source.step() for _ in range(12)])
    return buffers


@pytest.fixture(scope="module")
def saved_buffer() -> bytes:
    return pickle.dumps(make_small_buffers()[0], protocol=pickle.HIGHEST_PROTOCOL)


def test_file_of_sb3s_buffer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(make_small_buffers()[1]))
    with pytest.raises(CorruptFileError, match="contains a ReplayBuffer, expected a CompressedReplayBuffer"):
        CompressedReplayBuffer.load(tmp_path / "buffer.pkl")


def test_unknown_format_version_is_refused(tmp_path: Path) -> None:
    state = make_small_buffers()[0].__getstate__()
    for version in (2, None):
        with pytest.raises(CorruptFileError, match=f"has format {version}, but this version reads 1; use the version"):
            CompressedReplayBuffer.__new__(CompressedReplayBuffer).__setstate__({**state, "format": version})


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
    try:
        loaded = CompressedReplayBuffer.load(path, device="cpu")
    except CorruptFileError:
        return
    # Damage in the pickled spaces of gymnasium may go undetected, but it does not affect samples.
    rows = np.arange(10)
    original = make_small_buffers()[0]
    for name in ("actions", "rewards", "dones", "timeouts", "observations", "next_observations"):
        left, right = getattr(loaded, name)[rows], getattr(original, name)[rows]
        np.testing.assert_array_equal(left, right, err_msg=f"byte {int(place * len(data))} flipped by {flip}")


def test_failed_load_closes_the_file(saved_buffer: bytes, tmp_path: Path) -> None:
    path = tmp_path / "buffer.pkl"
    path.write_bytes(saved_buffer[:-9])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CorruptFileError):
            CompressedReplayBuffer.load(path)
    assert len(os.listdir("/proc/self/fd")) == before
