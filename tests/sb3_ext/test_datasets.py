from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch._dynamo  # noqa: F401  # else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage

from rl_ext_core.datasets import Episode, open_dataset, write_dataset
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, RlExtError
from sb3_ext import CompressedDictReplayBuffer, CompressedHerReplayBuffer, CompressedReplayBuffer
from sb3_ext.datasets import read_buffer_episodes
from tests.dataset_checks import assert_equal_episodes, assert_equal_values, random_episodes, require_minari
from tests.sb3_ext.buffer_envs import Sprite, without_logger

minari = require_minari()

PIXELS = spaces.Box(0, 255, (36, 40, 3), np.uint8)
FRAMES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
HEADING = spaces.Box(-1, 1, (2,), np.float32)
MIXED = spaces.Dict({"camera": PIXELS, "mode": spaces.Discrete(3), "state": VECTOR})
SWITCH = spaces.Discrete(4)
ARRAYS = ("actions", "rewards", "dones", "timeouts")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))


def write(observations: Any = VECTOR, actions: Any = SWITCH, lengths: tuple[int, ...] = (4, 1, 7)) -> list[Episode]:
    """Write the dataset ``mine-v0``, and return its episodes."""
    episodes = random_episodes(observations, actions, lengths)
    write_dataset("mine-v0", episodes, observations, actions)
    return episodes


class Recorder(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Record the episodes of an environment without a library."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.episodes: list[Any] = []

    def reset(self, **options: Any) -> Any:
        found = super().reset(**options)
        self.episodes.append(([found[0]], [], [], [], []))
        return found

    def step(self, action: Any) -> Any:
        found = super().step(action)
        for values, value in zip(self.episodes[-1], (found[0], action, *found[1:4]), strict=True):
            values.append(copy.deepcopy(value))
        return found

    def write(self, target: str) -> None:
        episodes = [Episode(*map(np.array, episode)) for episode in self.episodes if episode[1]]
        write_dataset(target, episodes, self.observation_space, self.action_space)


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_buffer_equals_the_one_that_sb3_filled(algorithm: Any) -> None:
    actions = SWITCH if algorithm is DQN else spaces.Box(np.float32([-2, 0]), np.float32([2, 3]))
    sprite = Sprite(channels=3, still=False)
    sprite.action_space = actions
    env = Recorder(sprite)
    options = {"buffer_size": 100, "learning_starts": 100, "device": "cpu", "seed": 1}
    model = without_logger(algorithm("CnnPolicy", env, policy_kwargs={"net_arch": [4]}, **options)).learn(60)
    env.write("mine-v0")
    expected = model.replay_buffer
    assert type(expected) is ReplayBuffer
    found = CompressedReplayBuffer.from_dataset("mine-v0", env=model.get_env(), buffer_size=100, device="cpu")
    assert (found.size(), found.pos, found.n_envs) == (60, 60, 1)
    assert found.observation_space == model.observation_space
    for name in ("observations", "next_observations"):
        np.testing.assert_array_equal(getattr(found, name)[:60], getattr(expected, name)[:60])
    # The last episode has not ended. Its last step is stored as one that was truncated.
    expected.timeouts[59] = 1 - (expected.dones[59] - expected.timeouts[59])
    expected.dones[59] = 1
    for name in ARRAYS:
        tolerance = 3e-7 if name == "actions" and algorithm is SAC else 0  # SB3 scales in float32
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=tolerance)
        assert getattr(found, name).dtype == getattr(expected, name).dtype


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (FRAMES, SWITCH),
        (VECTOR, spaces.MultiDiscrete([3, 4])),
        (HEADING, spaces.Box(-1, 1, (2,), np.float32)),
        (spaces.Discrete(6), spaces.MultiBinary(3)),
        (spaces.Dict({"camera": FRAMES, "mode": spaces.Discrete(3)}), spaces.Box(-2, 2, (2, 2), np.float32)),
    ],
)
def test_round_trip_returns_equal_episodes(observations: Any, actions: Any) -> None:
    episodes = write(observations, actions)
    cls = CompressedDictReplayBuffer if isinstance(observations, spaces.Dict) else CompressedReplayBuffer
    buffer = cls.from_dataset("mine-v0")
    folder = buffer.to_dataset("copy-v0")
    copied = open_dataset("copy-v0")
    assert (copied.observation_space, copied.action_space) == (observations, actions)
    assert_equal_episodes(copied, episodes)
    assert minari.MinariDataset(folder).total_steps == minari.load_dataset("copy-v0").total_steps == 12


def test_images_are_transposed_as_sb3_does() -> None:
    episodes = write(MIXED)
    buffer = CompressedDictReplayBuffer.from_dataset("mine-v0")
    env = VecTransposeImage(DummyVecEnv([lambda: _SpacesOnly(MIXED)]))
    assert buffer.observation_space == env.observation_space
    for found, episode in zip(read_buffer_episodes(buffer), episodes, strict=True):
        assert_equal_values(found.observations, env.transpose_observations(episode.observations))


class _SpacesOnly(gymnasium.Env):  # type: ignore[type-arg]
    def __init__(self, observation_space: Any = VECTOR, action_space: Any = SWITCH) -> None:
        self.observation_space, self.action_space = observation_space, action_space


@pytest.mark.parametrize(
    ("space", "ulps"), [(spaces.Box(-0.25, 0.25, (200,), np.float32), 0), (spaces.Box(0, 3, (200,), np.float32), 1)]
)
def test_actions_are_scaled_and_scaled_back(space: Any, ulps: int) -> None:
    episodes = write(VECTOR, space)
    buffer = CompressedReplayBuffer.from_dataset("mine-v0")
    stored = buffer.actions.reshape(-1, *space.shape)
    assert np.abs(stored).max() <= 1
    actions = np.concatenate([episode.actions for episode in episodes])
    scale = SAC("MlpPolicy", _SpacesOnly(VECTOR, space), buffer_size=1, device="cpu").policy.scale_action
    np.testing.assert_allclose(stored, scale(actions), rtol=0, atol=3e-7)
    found = np.concatenate([episode.actions for episode in read_buffer_episodes(buffer)])
    spacing = np.spacing(np.maximum(np.abs(actions), np.abs(space.high)))
    assert (np.abs(found - actions) <= ulps * spacing).all()


def test_environments_get_equal_parts_of_consecutive_steps() -> None:
    episodes = write(lengths=(4, 1, 7, 2))
    buffer = CompressedReplayBuffer.from_dataset("mine-v0", n_envs=3)
    assert (buffer.buffer_size, buffer.full, buffer.n_envs) == (4, True, 3)
    expected = np.concatenate([episode.observations[:-1] for episode in episodes])[:12].reshape(3, 4, 3)
    np.testing.assert_array_equal(buffer.observations[:].swapaxes(0, 1), expected)
    assert buffer.dones.T.tolist() == [[0, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 1]]
    assert buffer.timeouts.T.tolist() == [[0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    lengths = [len(episode) for episode in read_buffer_episodes(buffer)]
    assert lengths == [4, 1, 3, 4]


def test_overwritten_and_dropped_transitions_are_left_out() -> None:
    episodes = write(lengths=(30, 30, 40))
    buffer = CompressedReplayBuffer.from_dataset("mine-v0", buffer_size=110)
    for step in range(20):
        value = np.full((1, 3), step, float)
        buffer.add(value, value + 1, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    found = list(read_buffer_episodes(buffer))
    assert [len(episode) for episode in found] == [20, 30, 40, 20]
    np.testing.assert_array_equal(found[0].observations, episodes[0].observations[10:])
    assert [bool(episode.truncations[-1]) for episode in found] == [False, True, False, True]

    small = CompressedReplayBuffer.from_dataset("mine-v0", max_bytes=5600, codec="raw")
    assert 10 < small.size() < 100
    assert sum(map(len, read_buffer_episodes(small))) == small.size()


def test_reset_without_done_begins_an_episode() -> None:
    buffer = CompressedReplayBuffer(1200, VECTOR, SWITCH, n_envs=2)
    for step in range(600):
        before = np.full((2, 3), [[step], [-step]], float)
        after = before + np.where(np.array([[step % 250 == 249], [False]]), 7, [[1], [-1]])
        buffer.add(before, after, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    found = list(read_buffer_episodes(buffer))
    assert [len(episode) for episode in found] == [250, 250, 100, 600]
    assert all(episode.truncations[-1] and not episode.truncations[:-1].any() for episode in found)


@pytest.mark.sample(quick=1)
@pytest.mark.parametrize("options", [{"codec": "jpeg"}, {"max_error": 4}])
def test_lossy_codecs_do_not_split_episodes(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, 36, 36)).astype(np.uint8)
    noise = [np.clip(np.roll(image, step, 1) + rng.integers(-3, 4, image.shape), 0, 255) for step in range(300)]
    flags = np.arange(299) == 298
    space = spaces.Box(0, 255, image.shape, np.uint8)
    episode = Episode(np.array(noise, np.uint8), np.zeros(299, int), np.zeros(299), flags, flags & False)
    write_dataset("mine-v0", [episode], space, SWITCH)
    buffer = CompressedReplayBuffer.from_dataset("mine-v0", **options)
    assert [len(episode) for episode in read_buffer_episodes(buffer)] == [299]


def test_hindsight_buffer_equals_the_one_that_was_recorded() -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True)
    options = {"buffer_size": 120, "learning_starts": 200, "device": "cpu", "seed": 0}
    model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedHerReplayBuffer, **options)
    recorded: Any = without_logger(model).learn(100).replay_buffer
    recorded.to_dataset("bits-v0")
    found: Any = CompressedHerReplayBuffer.from_dataset("bits-v0", env=model.get_env(), buffer_size=120, device="cpu")
    ended = int(np.flatnonzero(recorded.dones)[-1]) + 1
    for name in (*ARRAYS, "ep_start", "ep_length"):
        np.testing.assert_array_equal(getattr(found, name)[:ended], getattr(recorded, name)[:ended])
    assert found.sample(16).rewards.shape == (16, 1)
    for options in ({}, {"env": model.get_env(), "copy_info_dict": True}):
        with pytest.raises(InvalidArgumentError, match=r"from_dataset\(\.\.\., env=model\.get_env\(\)\)"):
            CompressedHerReplayBuffer.from_dataset("bits-v0", **options)


def test_storage_dir_contains_the_dataset(tmp_path: Path) -> None:
    write(MIXED)
    folder = tmp_path / "stored"
    buffer = CompressedDictReplayBuffer.from_dataset("mine-v0", storage_dir=folder)
    episodes = list(read_buffer_episodes(buffer))
    buffer.close()
    for options, text in (({}, "contains 12 rows of an earlier buffer"), ({"resume": True}, "resume=True is not for")):
        with pytest.raises(InvalidArgumentError, match=text):
            CompressedDictReplayBuffer.from_dataset("mine-v0", storage_dir=folder, **options)
    again = CompressedDictReplayBuffer(12, buffer.observation_space, SWITCH, storage_dir=folder, resume=True)
    assert_equal_episodes(read_buffer_episodes(again), episodes)
    again.close()


def test_failure_removes_a_new_storage_dir(tmp_path: Path) -> None:
    import h5py

    write(FRAMES)
    with h5py.File(tmp_path / "root" / "mine-v0" / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
    with pytest.raises(CorruptFileError, match="episode 1 is damaged"):
        CompressedReplayBuffer.from_dataset("mine-v0", storage_dir=tmp_path / "stored")
    assert not (tmp_path / "stored").exists()
    (tmp_path / "stored").mkdir()
    for _ in range(2):  # nothing is left in an empty folder, so the second call fails in the same way
        with pytest.raises(CorruptFileError, match="episode 1 is damaged"):
            CompressedReplayBuffer.from_dataset("mine-v0", storage_dir=tmp_path / "stored")


@pytest.mark.parametrize(
    ("observations", "actions", "error", "text"),
    [
        (spaces.Dict({"a": spaces.Dict({"b": VECTOR})}), SWITCH, InvalidTypeError, "Dict with a Dict under 'a'"),
        (VECTOR, spaces.Dict({"a": SWITCH}), InvalidTypeError, "action_space is Dict"),
        (VECTOR, spaces.Box(0, 9, (2,), np.int64), InvalidTypeError, "expected a Box of floats"),
        (VECTOR, VECTOR, InvalidArgumentError, "expected finite bounds"),
        (VECTOR, spaces.Box(1, 1, (1,), np.float32), InvalidArgumentError, "with low < high"),
    ],
)
def test_spaces_that_sb3_does_not_support_are_refused(
    observations: Any, actions: Any, error: type[RlExtError], text: str
) -> None:
    write(observations, actions)
    with pytest.raises(error, match=text):
        CompressedReplayBuffer.from_dataset("mine-v0")


def test_other_spaces_and_sizes_are_refused() -> None:
    write()
    with pytest.raises(InvalidTypeError, match="CompressedReplayBuffer"):
        CompressedDictReplayBuffer.from_dataset("mine-v0")
    for options, text in (
        ({"env": _SpacesOnly(HEADING)}, r"has observations of Box.*but env has Box\(.*float32\)"),
        ({"env": _SpacesOnly(VECTOR, spaces.Discrete(5))}, r"actions of Discrete\(4\), but env has Discrete\(5\)"),
        ({"buffer_size": 11}, r"expected at least one step .* buffer_size >= 12"),
        ({"n_envs": 13}, "n_envs=13, but mine-v0 has 12 steps"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            CompressedReplayBuffer.from_dataset("mine-v0", **options)
    with pytest.raises(InvalidArgumentError, match="no episodes"):
        CompressedReplayBuffer(12, VECTOR, SWITCH).to_dataset("empty-v0")


@pytest.mark.slow
def test_recipe_trains_on_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_snippets.py runs the guide."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    recipe = (docs / "recipes.md").read_text().partition("## Start from a dataset")[2].partition("```python\n")[2]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    env = gymnasium.make("Pendulum-v1")
    spaces_of_env = env.observation_space, env.action_space
    write_dataset("pendulum/mine-v0", random_episodes(*spaces_of_env, (200, 90)), *spaces_of_env)
    code = recipe.partition("```")[0]
    for number, less in (("1_000_000", "2_000"), ("100_000", "8"), ("1_000", "2"), ("(100)", "(2)")):
        code = code.replace(number, less)
    exec(code, {"__name__": "recipe"})
