"""What a buffer that may be off samples, next to Stable Baselines3's; and what it says of memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import planning
from rl_ext_core.frames.planning import MemoryWatch
from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import Sprite

STEPS = 400


def filled(buffer_class: Any, channels: int, **options: Any) -> Any:
    """A buffer that DQN has added to, for the same seed always the same."""
    env = VecFrameStack(DummyVecEnv([lambda: Sprite(channels, still=False)] * 2), n_stack=3)
    model = DQN(
        "CnnPolicy",
        env,
        replay_buffer_class=buffer_class,
        replay_buffer_kwargs=options,
        buffer_size=STEPS,
        learning_starts=10 * STEPS,
        policy_kwargs={"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}},
        seed=0,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    model.learn(STEPS + 60)  # around the ring once
    return model.replay_buffer


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [{}, {"codec": "patch"}, {"codec": "patch+lz4"}], ids=str)
def test_everything_is_within_the_bound(channels: int, options: dict[str, Any]) -> None:
    plain, ours = filled(ReplayBuffer, channels), filled(CompressedReplayBuffer, channels, max_error=4, **options)
    assert plain.dones.sum() > 10
    assert plain.timeouts.sum() > 3
    worst = 0
    for name in ("observations", "next_observations"):
        off = np.abs(np.asarray(getattr(ours, name)).astype(int) - getattr(plain, name))
        worst = max(worst, int(off.max()))
    assert worst == 4
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))
    for buffer in (plain, ours):
        np.random.seed(3)
        sample = buffer.sample(64)
        if buffer is plain:
            expected = sample
    assert (sample.observations.int() - expected.observations.int()).abs().max() <= 4
    assert (sample.rewards == expected.rewards).all()


def test_jpeg_is_by_choice() -> None:
    ours = filled(CompressedReplayBuffer, 3, codec="jpeg", quality=80)
    assert ours.codec == "jpeg"
    assert ours.n_stack == 3
    with pytest.raises(InvalidArgumentError, match="quality=80 is for codec='jpeg' only"):
        filled(CompressedReplayBuffer, 3, quality=80)
    with pytest.raises(InvalidArgumentError, match="max_error=4 has no effect on codec='jpeg'"):
        filled(CompressedReplayBuffer, 3, codec="jpeg", max_error=4)


IMAGES = spaces.Box(0, 255, (9, 100, 100), np.uint8), spaces.Discrete(3)


def test_a_buffer_that_will_not_fit_comes_with_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 3_000_000_000)
    with pytest.warns(UserWarning, match="3 GB are free") as caught:
        CompressedReplayBuffer(1_000_000, *IMAGES, device="cpu", n_envs=4)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "uncompressed they would take 180 GB" in text
    assert "rl-ext plan --shape 9,100,100 --size 1000000 --envs 4 --env ID" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("options", [{"max_bytes": 10**9}, {"storage_dir": "there"}], ids=str)
def test_one_that_is_limited_or_on_disk_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    monkeypatch.chdir(tmp_path)
    CompressedReplayBuffer(10_000, *IMAGES, device="cpu", **options).close()


def test_it_is_judged_again_when_it_is_known_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryWatch, "KNOWN_AT", 150)
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (3, 30, 30), np.uint8)
    monkeypatch.setattr(planning, "available_memory", lambda: 10**12)
    buffer = CompressedReplayBuffer(100_000, space, IMAGES[1], device="cpu")
    monkeypatch.setattr(planning, "available_memory", lambda: 10**7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            image = rng.integers(256, size=(1, *space.shape)).astype(np.uint8)
            buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    assert len(caught) == 1
    assert "by what it holds so far" in str(caught[0].message)
