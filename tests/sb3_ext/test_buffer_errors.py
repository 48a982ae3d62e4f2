"""What cannot be stored is refused by name, and the buffer goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.testing import LAYOUTS, transitions
from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import Transition, add_all, assert_same, both

SHAPE = LAYOUTS[0].shape
IMAGES = spaces.Box(0, 255, SHAPE, np.uint8)
ACTIONS = spaces.Discrete(5)


def steps(n_steps: int, n_envs: int = 2, seed: int = 0) -> list[Transition]:
    rng = np.random.default_rng(seed)
    found: list[Transition] = []
    for before, after in transitions(LAYOUTS[0], n_envs=n_envs, n_steps=n_steps, seed=seed):
        done = rng.random(n_envs) < 0.2
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": bool(end)} for end in done]
        found.append((before, after, rng.integers(5, size=n_envs), rng.standard_normal(n_envs), done, infos))
    return found


def check_refused(bad: dict[str, Any], error: type[Exception], text: str, n_envs: int = 2) -> None:
    """One transition is refused in a buffer that is not full, and in one that is."""
    ours, theirs = both(30, IMAGES, ACTIONS, n_envs)
    for seed in range(2):
        add_all((ours, theirs), steps(12, n_envs, seed))
        names = ("obs", "next_obs", "action", "reward", "done", "infos")
        offending = {**dict(zip(names, steps(1, n_envs, 7)[0], strict=True)), **bad}
        with pytest.raises(error, match=text):
            ours.add(**offending)
        assert_same(ours, theirs)
    add_all((ours, theirs), steps(20, n_envs, 3))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["obs", "next_obs"])
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            np.zeros((2, 4, 12, 10), np.uint8),
            InvalidArgumentError,
            r"shape \(2, 4, 12, 10\), expected \(2, 4, 12, 11\)",
        ),
        (np.zeros((3, *SHAPE), np.uint8), InvalidArgumentError, r"shape \(3, 4, 12, 11\), expected \(2, 4, 12, 11\)"),
        (np.zeros(SHAPE, np.uint8), InvalidArgumentError, r"shape \(4, 12, 11\)"),
    ],
    ids=["shape", "environments", "no environments"],
)
def test_observations(name: str, value: Any, error: type[Exception], text: str) -> None:
    check_refused({name: value}, error, f"^{name} has {text}")


@pytest.mark.parametrize("shape", [(1, 12, 11, 4), (12, 11, 4), (1, 4, 11, 12), (528,)])
def test_an_observation_of_as_many_values_in_another_order_is_refused(shape: tuple[int, ...]) -> None:
    text = rf"obs has shape \({', '.join(map(str, shape))},?\), expected \(1, 4, 12, 11\)"
    check_refused({"obs": np.ones(shape, np.uint8)}, InvalidArgumentError, text, n_envs=1)


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"action": np.zeros(3, int)}, InvalidArgumentError, r"action has shape \(3,\), expected \(2, 1\)"),
        ({"reward": np.zeros(1)}, InvalidArgumentError, r"reward has shape \(1,\), expected \(2,\)"),
        ({"done": np.zeros((2, 2))}, InvalidArgumentError, r"done has shape \(2, 2\), expected \(2,\)"),
        ({"infos": [{}]}, InvalidArgumentError, "infos has 1 entries, expected 2"),
        ({"action": np.array(["up", "down"])}, InvalidTypeError, "action is .*'up'.*expected numbers"),
        ({"reward": [1.0, {}]}, InvalidTypeError, r"reward is \[1.0, \{\}\], expected numbers"),
        ({"done": [[1], [1, 2]]}, InvalidTypeError, "done is"),
        ({"infos": [{}, {"TimeLimit.truncated": "no"}]}, InvalidTypeError, "TimeLimit.truncated is"),
    ],
    ids=["actions", "rewards", "dones", "infos", "action names", "no reward", "ragged", "no flag"],
)
def test_what_goes_with_observations(bad: dict[str, Any], error: type[Exception], text: str) -> None:
    check_refused(bad, error, text)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"buffer_size": 0}, InvalidArgumentError, "buffer_size=0 must be at least 1"),
        ({"buffer_size": -5}, InvalidArgumentError, "buffer_size=-5"),
        ({"n_envs": 0}, InvalidArgumentError, "n_envs=0"),
        ({"codec": "zstd"}, InvalidArgumentError, "unknown codec 'zstd'; known: 'auto', 'jpeg', 'patch'"),
        ({"codec": None}, InvalidTypeError, "codec must be a name, got None"),
        ({"n_stack": 3}, InvalidArgumentError, r"n_stack=3 does not divide the 4 channels.*\[1, 2, 4\]"),
        (
            {"block_length": 10},
            InvalidArgumentError,
            "block_length=10 is not a power of two from 1 to 4096",
        ),
        (
            {"buffer_size": 1e6},
            InvalidTypeError,
            "buffer_size=1000000.0 must be .*, for example buffer_size=1_000_000$",
        ),
        ({"n_stack": "4"}, InvalidTypeError, "n_stack='4' must be a whole number, for example n_stack=4$"),
        ({"max_bytes": "4GB"}, InvalidTypeError, "max_bytes='4GB' must .*, for example max_bytes=4_000_000_000$"),
        ({"buffer_size": "many"}, InvalidTypeError, "buffer_size='many' must be .*, for example buffer_size=1$"),
        ({"buffer_size": float("nan")}, InvalidTypeError, "buffer_size=nan must be .*, for example buffer_size=1$"),
        ({"num_threads": [2]}, InvalidTypeError, r"num_threads=\[2\] must be .*, for example num_threads=1$"),
        ({"num_threads": 0}, InvalidArgumentError, "num_threads=0 must be at least 1"),
        ({"observation_space": spaces.Dict({"camera": IMAGES})}, InvalidTypeError, r"a Dict of \['camera'\]"),
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CompressedReplayBuffer(
            **{"buffer_size": 10, "observation_space": IMAGES, "action_space": ACTIONS, **options}  # type: ignore[arg-type]
        )
