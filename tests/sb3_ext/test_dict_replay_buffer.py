"""The compressed buffer for dictionaries gives the bits that Stable Baselines3's gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.frames import FrameStore
from sb3_ext import CompressedDictReplayBuffer
from tests.sb3_ext.test_replay_buffer import SPACES
from tests.sb3_ext.toys import (
    Camera,
    Sprite,
    assert_same,
    collected,
    dict_env,
    random_transitions,
)

ACTIONS = spaces.Discrete(3)


def both(size: int, space: Any, action_space: Any, n_envs: int, **options: Any) -> tuple[Any, Any]:
    theirs = {name: options[name] for name in ("handle_timeout_termination",) if name in options}
    arguments = (size, space, action_space, "cpu", n_envs)
    return CompressedDictReplayBuffer(*arguments, **options), DictReplayBuffer(*arguments, **theirs)


def add(buffers: tuple[Any, Any], transitions: list[Any]) -> None:
    for obs, next_obs, *rest in transitions:
        for buffer in buffers:
            buffer.add(dict(obs), dict(next_obs), *rest)  # SB3 reshapes what is in the dictionary


def test_all_spaces_at_once() -> None:
    space = spaces.Dict({str(number): part for number, part in enumerate(SPACES)})
    for n_envs in (1, 3):
        buffers = both(50, space, ACTIONS, n_envs)
        parts = {key: random_transitions(part, ACTIONS, n_envs, 70) for key, part in space.spaces.items()}
        for step, (_, _, *rest) in enumerate(parts["0"]):
            obs, next_obs = ({key: part[step][place] for key, part in parts.items()} for place in range(2))
            add(buffers, [(obs, next_obs, *rest)])
        assert_same(*buffers)
        for view in ("observations", "next_observations"):
            for key in space.spaces:
                left, right = getattr(buffers[0], view)[key], getattr(buffers[1], view)[key]
                np.testing.assert_array_equal(np.asarray(left), right, strict=True)
                np.testing.assert_array_equal(left[[1, -1], 0], right[[1, -1], 0], strict=True)


def test_samples_are_normalized() -> None:
    venv = VecNormalize(DummyVecEnv([lambda: Camera(Sprite())] * 2), norm_obs_keys=["place"])
    buffers = both(60, venv.observation_space, ACTIONS, 2)
    raw = venv.venv
    add(buffers, collected(raw, 70))
    venv.training = True
    venv.reset()
    for _ in range(50):
        venv.step(np.array([0, 2]))
    assert_same(*buffers, env=venv)
    assert_same(*buffers)


def test_options_by_key() -> None:
    space = spaces.Dict(
        left=spaces.Box(0, 255, (4, 30, 30), np.uint8),
        right=spaces.Box(0, 255, (4, 30, 30), np.uint8),
        speed=spaces.Box(-1, 1, (6,), np.float32),
    )
    buffer, _ = both(
        80, space, ACTIONS, 2, codec={"left": "patch+lz4", "speed": "patch"}, n_stack=4, block_length={"right": 2}
    )
    assert buffer.codec == {"left": "patch+lz4", "right": "patch", "speed": "patch"}
    assert buffer.n_stack == {"left": 4, "right": 4, "speed": 1}
    assert buffer.block_length["right"] == 2
    with pytest.raises(InvalidArgumentError, match=r"codec is given for \['front'\].*\['left', 'right', 'speed'\]"):
        both(80, space, ACTIONS, 2, codec={"front": "raw"})
    with pytest.raises(InvalidArgumentError, match=r"key 'left': n_stack=7 does not divide the 4 channels"):
        both(80, space, ACTIONS, 2, n_stack={"left": 7})
    with pytest.raises(InvalidTypeError, match=r"key 'left': n_stack='4' must be a whole number"):
        both(80, space, ACTIONS, 2, n_stack={"left": "4"})


def test_another_space_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"observation_space is Box.*expected a Dict.*CompressedReplayBuffer"):
        CompressedDictReplayBuffer(10, spaces.Box(0, 255, (4, 30, 30), np.uint8), ACTIONS)


def check_refused(bad: Any, error: type[Exception], text: str, *, place: int) -> None:
    """In a buffer that is not full, and in one that is."""
    venv = dict_env()
    buffers = both(80, venv.observation_space, ACTIONS, 2)
    for seed in range(2):
        add(buffers, collected(venv, 30, seed=seed))
        offending: list[Any] = list(collected(venv, 1)[0])
        offending[place] = bad(offending[place])
        with pytest.raises(error, match=text):
            buffers[0].add(*offending)
        assert_same(*buffers)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (lambda obs: {"image": obs["image"]}, InvalidArgumentError, r"has keys \['image'\], expected.*'place'"),
        (lambda obs: obs["image"], InvalidArgumentError, r"is of type ndarray, expected"),
        (lambda obs: {**obs, "place": obs["place"][:, 1:]}, InvalidArgumentError, "key 'place': .*obs has shape"),
        (
            lambda obs: {**obs, "place": np.full(obs["place"].shape, "far")},
            InvalidTypeError,
            "key 'place': .*obs has dtype",
        ),
    ],
    ids=["a key", "no dictionary", "shape", "dtype"],
)
def test_what_does_not_fit_is_refused(place: int, bad: Any, error: type[Exception], text: str) -> None:
    check_refused(bad, error, text, place=place)


@pytest.mark.parametrize(("key", "call"), [("image", "stage"), ("place", "append")])
def test_one_store_that_fails_leaves_the_others_as_they_were(
    key: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that would be overwritten is whole, whichever key runs out of memory."""
    venv = dict_env()
    buffers = both(80, venv.observation_space, ACTIONS, 2)
    add(buffers, collected(venv, 60))

    def scarce(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(FrameStore, call, scarce)
        with pytest.raises(OutOfMemoryError, match=f"key '{key}': no memory"):
            buffers[0].add(*collected(venv, 1, seed=5)[0])
    assert_same(*buffers)
    add(buffers, collected(venv, 30, seed=2))
    assert_same(*buffers)
