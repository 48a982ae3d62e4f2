"""Compressed replay buffers return the bits of Stable Baselines3's buffers, and refuse invalid transitions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.frames.log import FrameLog
from sb3_ext import CompressedDictReplayBuffer, CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import (
    Camera,
    Sprite,
    add_all,
    assert_same,
    collect_transitions,
    dict_env,
    image_env,
    make_buffers,
    make_buffers_for,
    make_reach_vec_env,
)

GREY = spaces.Box(0, 255, (4, 12, 11), np.uint8)
ACTIONS = spaces.Discrete(5)
SHAPE, TYPE = InvalidArgumentError, InvalidTypeError


@pytest.mark.parametrize(("channels", "first"), [(1, True), (3, False)])
def test_images_of_wrappers_are_stored_as_stacks(channels: int, first: bool) -> None:
    venv = image_env(channels, 5, first=first)
    ours, theirs = make_buffers_for("plain", 30, venv)
    add_all((ours, theirs), collect_transitions(venv, 75))
    assert_same(ours, theirs, 60)
    assert (ours.n_stack, ours.codec) == (4, "patch")
    assert ours.stored_nbytes < theirs.observations.nbytes / 2


NORMALIZED: dict[str, Callable[[], VecNormalize]] = {
    "plain": lambda: VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0)),
    "rewards": lambda: VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0), norm_obs=False),
    "dict": lambda: VecNormalize(DummyVecEnv([lambda: Camera(Sprite())] * 2), norm_obs_keys=["place"]),
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


def test_transition_that_does_not_fit_into_memory_leaves_the_buffer_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    venv = dict_env()
    buffers = make_buffers_for("dict", 40, venv)
    add_all(buffers, collect_transitions(venv, 60))

    def raise_out_of_memory(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(FrameLog, "_new_segment", raise_out_of_memory)
        for transition in collect_transitions(venv, 1000, seed=5):
            try:
                add_all(buffers, [transition])
            except OutOfMemoryError:
                break
    assert_same(*buffers)
    add_all(buffers, collect_transitions(venv, 30, seed=2))
    assert_same(*buffers)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"buffer_size": 0}, SHAPE, "buffer_size=0 must be at least 1"),
        ({"codec": "zstd"}, SHAPE, "codec='zstd' is unknown; expected one of 'patch', 'raw', 'jpeg'"),
        ({"n_stack": 3}, SHAPE, r"n_stack=3 does not divide the 4 channels.*\[1, 2, 4\]"),
        (
            {"buffer_size": 1e6},
            TYPE,
            "buffer_size=1000000.0 must be .*, for example buffer_size=1_000_000$",
        ),
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_can_sample_if_thread_held_lock_at_fork() -> None:
    buffer = CompressedReplayBuffer(10, GREY, ACTIONS)
    image = np.zeros((1, *GREY.shape), np.uint8)
    buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    lock, inside = buffer._observations.lock, threading.Event()
    within = [
        make_fork_safe_lock() for _ in range(30)
    ]  # like the locks of stores: a forking thread must not hold one and wait for the buffer's

    def hold_locks() -> None:
        """Hold the buffer's lock for a while, then take the inner locks."""
        with lock:
            inside.set()
            time.sleep(0.1)
            for inner in within:
                with inner:
                    pass

    thread = threading.Thread(target=hold_locks)
    thread.start()
    inside.wait()
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler would run the next tests in the child
        signal.alarm(60)
        buffer.sample(2)
        os._exit(0)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_options_can_differ_between_keys_of_dict_space() -> None:
    image = spaces.Box(0, 255, (4, 30, 30), np.uint8)
    space = spaces.Dict(left=image, right=image, speed=spaces.Box(-1, 1, (6,), np.float32))
    codec = {"left": "raw"}
    buffer, _ = make_buffers("dict", 80, space, ACTIONS, codec=codec, n_stack=4)
    assert buffer.codec == {"left": "raw", "right": "patch", "speed": "raw"}
    assert buffer.n_stack == {"left": 4, "right": 4, "speed": 1}
    for options, error, text in (
        (
            {"codec": {"front": "raw"}},
            SHAPE,
            r"codec is given for \['front'\].*\['left', 'right', 'speed'\]",
        ),
        ({"n_stack": {"left": 7}}, SHAPE, "key 'left': n_stack=7 does not divide the 4 channels"),
        ({"n_stack": {"left": "4"}}, TYPE, "key 'left': n_stack='4' must be a whole number"),
    ):
        with pytest.raises(error, match=text):
            make_buffers("dict", 80, space, ACTIONS, **options)  # type: ignore[arg-type]
    with pytest.raises(TYPE, match=r"observation_space is Box.*expected a Dict.*CompressedReplayBuffer"):
        CompressedDictReplayBuffer(10, image, ACTIONS)
