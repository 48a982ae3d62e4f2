from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import planning
from sb3_ext import CompressedDictReplayBuffer, CompressedHerReplayBuffer, CompressedReplayBuffer, replay_buffers
from tests.forks import result_in_fork
from tests.sb3_ext.buffer_envs import (
    Reach,
    Sprite,
    TransitionSource,
    add_all,
    assert_same,
    collect_transitions,
    image_env,
    make_buffers,
    make_buffers_for,
    make_reach_vec_env,
)

GREY = spaces.Box(0, 255, (4, 12, 11), np.uint8)
ACTIONS = spaces.Discrete(5)
SHAPE, TYPE = InvalidArgumentError, InvalidTypeError


NORMALIZED: dict[str, Callable[[], VecNormalize]] = {
    "plain": lambda: VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0)),
    "rewards": lambda: VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0), norm_obs=False),
    "dict": lambda: VecNormalize(DummyVecEnv([lambda: Sprite(as_dict=True)] * 2), norm_obs_keys=["place"]),
    "hindsight": lambda: VecNormalize(make_reach_vec_env(), norm_obs_keys=["achieved_goal", "desired_goal"]),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_samples_are_normalized_as_in_sb3(name: str) -> None:
    venv = NORMALIZED[name]()
    buffers = make_buffers_for("plain" if name == "rewards" else name, 40, venv.venv)
    add_all(buffers, collect_transitions(venv.venv, 50))
    venv.reset()
    for _ in range(30):
        venv.step(np.stack([venv.action_space.sample() for _ in range(2)]))
    assert_same(*buffers, env=venv)
    assert_same(*buffers)  # stored transitions did not change


@pytest.mark.parametrize("index", [(0, slice(None), [1, 2]), (slice(None), [0], slice(None), 0), (None, 3)], ids=str)
def test_ambiguous_observation_indices_are_refused(index: Any) -> None:
    with pytest.raises(ValueError, match="cannot index compressed observations"):
        make_buffers("plain", 40, GREY, ACTIONS)[0].observations[index]


@pytest.mark.parametrize(("name", "value"), [("pos", 1), ("full", True)])
def test_position_cannot_be_set(name: str, value: Any) -> None:
    buffer = make_buffers("plain", 40, GREY, ACTIONS)[0]
    with pytest.raises(InvalidArgumentError, match=rf"{name} cannot be set to {value}. Use add\(\) or reset\(\)"):
        setattr(buffer, name, value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"buffer_size": 0}, SHAPE, "buffer_size=0 must be at least 1"),
        ({"codec": "zstd"}, SHAPE, "codec='zstd' is unknown; expected one of 'patch', 'raw', 'jpeg'"),
        ({"n_stack": 3}, SHAPE, r"n_stack=3 does not divide the 4 channels.*\[1, 2, 4\]"),
        ({"buffer_size": 1e6}, TYPE, "buffer_size=1000000.0 must be .*, for example buffer_size=1_000_000$"),
        ({"max_bytes": 1000}, SHAPE, "max_bytes=1,000 is too little"),
        ({"buffer_size": 10**6, "max_bytes": 2 * 10**7}, SHAPE, "too little for 1,000,000 x 1 transitions"),
        ({"observation_space": spaces.Dict({"camera": GREY})}, TYPE, r"a Dict of \['camera'\]"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CompressedReplayBuffer(
            **{"buffer_size": 10, "observation_space": GREY, "action_space": ACTIONS, **options}  # type: ignore[arg-type]
        )


def test_hindsight_accepts_rewards_in_a_column_and_refuses_one_for_all_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    venv = make_reach_vec_env()
    buffers = make_buffers_for("hindsight", 40, venv)
    add_all(buffers, collect_transitions(venv, 40))
    monkeypatch.setattr(Reach, "compute_reward", lambda _, achieved, desired, infos: (achieved - desired)[:, :1])
    assert_same(*buffers)
    monkeypatch.setattr(
        Reach, "compute_reward", lambda _, achieved, desired, infos: np.linalg.norm(achieved - desired)
    )  # DLR-RM/stable-baselines3#1337
    with pytest.raises(InvalidArgumentError, match=r"1 rewards for 8 goals, expected one per goal\. .*axis=-1"):
        buffers[0].sample(10)


@pytest.mark.parametrize(
    "achieved", [None, spaces.Box(-9, 9, (1,), np.float32), spaces.Box(-9, 9, (2,), np.float64)], ids=str
)
def test_hindsight_refuses_goals_that_cannot_replace_each_other(achieved: Any) -> None:
    goals = {"desired_goal": spaces.Box(-9, 9, (2,), np.float32), "achieved_goal": achieved}
    space = spaces.Dict({"observation": GREY, **{key: part for key, part in goals.items() if part is not None}})
    with pytest.raises(InvalidArgumentError, match=r"achieved_goal is .*expected spaces of the same shape and dtype"):
        CompressedHerReplayBuffer(10, space, ACTIONS, env=make_reach_vec_env())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_can_sample_if_thread_held_lock_at_fork() -> None:
    buffer = CompressedReplayBuffer(10, GREY, ACTIONS)
    image = np.zeros((1, *GREY.shape), np.uint8)
    buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    lock, inside = buffer._observations.lock, threading.Event()
    # Like the locks of stores: a forking thread must not hold one and wait for the buffer's.
    within = [make_fork_safe_lock() for _ in range(30)]

    def hold_locks() -> None:
        with lock:
            inside.set()
            time.sleep(0.1)
            for inner in within:
                with inner:
                    pass

    thread = threading.Thread(target=hold_locks)
    thread.start()
    inside.wait()
    assert result_in_fork(lambda: len(buffer.sample(2).rewards)) == "2"
    thread.join()


def test_options_can_differ_between_keys_of_dict_space() -> None:
    image = spaces.Box(0, 255, (4, 30, 30), np.uint8)
    space = spaces.Dict(left=image, right=image, speed=spaces.Box(-1, 1, (6,), np.float32))
    codec, options = {"left": "raw", "right": "jpeg"}, {"quality": {"right": 80}, "n_stack": 4}
    buffer, _ = make_buffers("dict", 80, space, ACTIONS, codec=codec, **options)
    assert buffer.codec == {"left": "raw", "right": "jpeg", "speed": "raw"}
    assert buffer.n_stack == {"left": 4, "right": 4, "speed": 1}
    for wrong, error, text in (
        ({"codec": {"front": "raw"}}, SHAPE, r"codec is given for \['front'\].*\['left', 'right', 'speed'\]"),
        ({"quality": {"left": 80}}, SHAPE, "key 'left': quality=80 is for codec='jpeg' only"),
        ({"n_stack": {"left": 7}}, SHAPE, "key 'left': n_stack=7 does not divide the 4 channels"),
        ({"n_stack": {"left": "4"}}, TYPE, "key 'left': n_stack='4' must be a whole number"),
    ):
        with pytest.raises(error, match=text):
            make_buffers("dict", 80, space, ACTIONS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TYPE, match=r"observation_space is Box.*expected a Dict.*CompressedReplayBuffer"):
        CompressedDictReplayBuffer(10, image, ACTIONS)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 10**7}, {"storage_dir": "there"}], ids=str)
def test_too_large_buffer_warns_once_unless_it_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay_buffers, "MEASURED_AFTER", 150)
    monkeypatch.setattr(planning, "available_memory", lambda: 10**7)
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (3, 30, 30), np.uint8)
    buffer = CompressedReplayBuffer(100_000, space, spaces.Discrete(3), device="cpu", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            image = rng.integers(256, size=(1, *space.shape)).astype(np.uint8)
            buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    buffer.close()
    assert len(caught) == (not options)
    assert all("uncompressed they would take 540 MB" in str(warning.message) for warning in caught)


# -- arrays of batches are reused only after their last reference is gone

Pick = Callable[[Any], Any]


@pytest.fixture(scope="module")
def buffer() -> CompressedReplayBuffer:
    """Return a replay buffer that contains images of noise."""
    venv = image_env(still=False)
    made = CompressedReplayBuffer(200, venv.observation_space, venv.action_space, "cpu", n_envs=2)
    add_all((made,), collect_transitions(venv, 60))
    return made


@pytest.mark.sample
@pytest.mark.parametrize(
    "pick",
    [
        lambda batch: batch,
        lambda batch: batch.next_observations[3:5, 1],
        lambda batch: batch.observations.numpy()[::2, 0],
        lambda batch: memoryview(batch.observations.numpy()),
        lambda batch: batch.observations.detach().untyped_storage(),
        lambda batch: torch.utils.dlpack.to_dlpack(batch.observations),
    ],
    ids=["batch", "slice", "array slice", "memory", "storage", "dlpack"],
)
def test_batches_in_use_are_never_overwritten(buffer: CompressedReplayBuffer, pick: Pick) -> None:
    held = []
    for _ in range(7):
        batch = buffer.sample(16)
        expected = tuple(part.clone() for part in batch if part is not None)
        held.append((pick(batch), pick(type(batch)(*expected))))
        del batch, expected
    for _ in range(10):
        buffer.sample(16)
    for kept, expected in held:
        if type(kept).__name__ == "PyCapsule":
            kept, expected = torch.utils.dlpack.from_dlpack(kept), torch.utils.dlpack.from_dlpack(expected)
        for left, right in zip(kept, expected, strict=True) if isinstance(kept, tuple) else [(kept, expected)]:
            assert left is right is None or np.array_equal(np.asarray(left), np.asarray(right))


def test_to_torch_copies_arrays_of_caller(buffer: CompressedReplayBuffer) -> None:
    images = buffer.observations[np.arange(16), np.zeros(16, dtype=np.int64)]
    tensor, shared = buffer.to_torch(images), buffer.to_torch(images, copy=False)
    before = images.copy()
    images += 50
    np.testing.assert_array_equal(tensor, before)
    np.testing.assert_array_equal(shared, images)


def test_arrays_of_unused_batches_are_reused(buffer: CompressedReplayBuffer) -> None:
    places = set()
    for _ in range(20):
        batch = buffer.sample(16)
        places |= {batch.observations.data_ptr(), batch.next_observations.data_ptr()}
    assert len(places) <= 4


def test_recycled_arrays_stay_bounded_for_many_batch_sizes(buffer: CompressedReplayBuffer) -> None:
    for size in range(1, 40):
        buffer.sample(size)
    assert buffer.nbytes - buffer.stored_nbytes <= 4 * 40 * 4 * 36 * 36


# -- observations of other dtypes than the space's are cast, and transposed images refused

PLACE, IMAGE = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(0, 255, (1, 36, 36), np.uint8)
GOALS = spaces.Dict(observation=IMAGE, achieved_goal=PLACE, desired_goal=PLACE)


@pytest.mark.parametrize("space", [GOALS, IMAGE], ids=["dict", "plain"])
def test_casts_warn_once_for_each_key(space: Any) -> None:
    kind, parts = ("dict", space.spaces) if space is GOALS else ("plain", {None: space})
    buffer, source = make_buffers(kind, 24, space, ACTIONS)[0], TransitionSource(space, ACTIONS, 2, miscasts=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        add_all([buffer], [source.step() for _ in range(3)])
    for (key, part), warning in zip(parts.items(), caught, strict=True):
        name, dtype = "obs" if key is None else f"obs[{key!r}]", "int64" if part.dtype == np.uint8 else "float64"
        text = f"{name} has dtype {dtype}, but the observation space has {part.dtype}. Observations are cast"
        assert str(warning.message).startswith(text)


def test_buffer_is_unchanged_if_cast_warning_is_raised() -> None:
    ours, _ = make_buffers("dict", 24, GOALS, ACTIONS)
    with pytest.raises(UserWarning, match="Observations are cast"):
        ours.add(*TransitionSource(GOALS, ACTIONS, 2, miscasts=True).step())
    assert (ours.size(), ours.pos) == (0, 0)


def test_images_with_channels_last_are_refused() -> None:
    """See https://github.com/DLR-RM/stable-baselines3/issues/819."""
    buffer = CompressedReplayBuffer(10, spaces.Box(0, 255, (3, 36, 40), np.uint8), ACTIONS, "cpu", n_envs=2)
    images = np.zeros((2, 36, 40, 3), np.uint8)
    with pytest.raises(InvalidArgumentError, match=r"obs has shape .*channels last.*VecNormalize\(VecTransposeImage"):
        buffer.add(images, images, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    assert buffer.size() == 0
