from __future__ import annotations

import copy
import functools
import os
import pickle
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from tests.interrupts import interrupt_at
from tests.sb3_ext.buffer_envs import (
    REPLAY,
    GoalRewards,
    TransitionSource,
    assert_same_draws,
    call_in_thread,
    run_state_machine,
)
from tests.sb3_ext.test_sequences import assert_same_sequences

IMAGE = spaces.Box(0, 255, (3, 6, 5), np.uint8)
PLACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
SPACES: dict[str, Any] = {
    "image": IMAGE,
    "vector": spaces.Box(-1, 1, (7,), np.float32),
    "one value": spaces.Box(-1, 1, (1,), np.float32),
    "matrix": spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    "camera": spaces.Box(0, 255, (5, 6, 3), np.uint8),
    "discrete": spaces.Discrete(9),
    "multi discrete": spaces.MultiDiscrete([3, 4, 2]),
    "binary": spaces.MultiBinary(5),
}
ACTION_SPACES = [
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Discrete(4),
    spaces.MultiBinary(3),
    spaces.MultiDiscrete([2, 3]),
]
ROWS = ("actions", "rewards", "dones", "timeouts")
CODE_PATHS = ("/sb3_ext/", "/rl_ext_core/")
ARGUMENTS = ("obs", "next_obs", "action", "reward", "done", "infos")
SHAPE, TYPE = InvalidArgumentError, InvalidTypeError
# Argument, how it is changed, and the error.
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("obs", lambda obs: np.stack([obs] * 2), SHAPE, r"obs has shape \(2, .*, expected "),
    ("next_obs", lambda obs: obs[[0, *range(len(obs))]], SHAPE, r"next_obs has shape .*, expected "),
    ("next_obs", lambda obs: np.full(obs.shape, "black"), TYPE, "next_obs has dtype <U5, expected "),
    ("action", lambda action: np.zeros(99, int), SHAPE, r"action has shape \(99,\), expected "),
    ("action", lambda action: np.full(action.shape, "up"), TYPE, "(?s)action is .*'up'.*expected numbers"),
    ("reward", lambda reward: [*reward, 1.0], SHAPE, "(?s)reward has shape .*: one row per environment"),
    ("reward", lambda reward: [{}] * len(reward), TYPE, r"(?s)reward is \[\{\}.*, expected numbers"),
    ("done", lambda done: np.zeros((len(done), 2)), SHAPE, "done has shape .*, 2\\), expected "),
    ("infos", lambda infos: [*infos, {}], SHAPE, "infos has length .*: one per environment"),
    ("infos", lambda infos: [{"TimeLimit.truncated": "no"}] * len(infos), TYPE, "TimeLimit.truncated is"),
]


class SameAsUpstream(RuleBasedStateMachine):
    """State machine that makes the same calls on a compressed buffer and on Stable Baselines3's."""

    ours: Any = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        def draw(*choices: Any) -> Any:
            return data.draw(st.sampled_from(choices))

        kind, size, n_envs = self.kind, data.draw(st.integers(1, 80)), draw(1, 2, 3)
        (self.cls, theirs), actions = REPLAY[kind], draw(*ACTION_SPACES)
        self.options: dict[str, Any] = {"codec": draw("raw", "patch")}
        own: dict[str, Any] = {}
        if kind == "hindsight":
            own = {"goal_selection_strategy": draw("future", "final", "episode"), "copy_info_dict": draw(False, True)}
            own["env"] = GoalRewards()
            goal = draw(PLACE, IMAGE)
            space: Any = spaces.Dict(observation=IMAGE, achieved_goal=goal, desired_goal=goal)
        elif kind == "dict":
            space = spaces.Dict({name: SPACES[name] for name in data.draw(st.permutations([*SPACES]))[:3]})
        else:
            space = SPACES[draw(*SPACES, *["image"] * 6)]
            self.options["n_stack"] = draw(None, 3) if space is IMAGE else None
        if kind == "n-step":
            own = {"n_steps": data.draw(st.integers(1, 5)), "gamma": 0.9}
        own |= {"device": "cpu", "n_envs": n_envs, "handle_timeout_termination": draw(False, True)}
        self.buffer_arguments = {"buffer_size": size, "observation_space": space, "action_space": actions, **own}
        if kind in ("plain", "dict"):  # on the CPU, it changes nothing
            self.options["decode_on_gpu"] = draw(False, True)
        is_limited = draw(False, True)
        # In CI, until rows are dropped, which takes many steps and a second.
        self.drops_rows = is_limited and "CI" in os.environ
        if is_limited:
            self.options["max_bytes"] = (60_000 if kind == "dict" else 30_000) * (n_envs + 1)
        if self.drops_rows:
            self.buffer_arguments["buffer_size"] = 300 * n_envs
        self.temporary = Path(tempfile.mkdtemp())
        # A reopened folder starts new episodes, so hindsight would differ from SB3.
        self.folder = self.temporary / "a" if kind != "hindsight" and draw(False, True) else None
        self.ours = self._open(self.folder)
        self.theirs: Any = theirs(**self.buffer_arguments)
        form = {"channels_last": draw(False, True), "miscasts": draw(False, False, True)}
        self.source = TransitionSource(space, actions, n_envs, **form)

    def _open(self, folder: Path | None) -> Any:
        """Create the compressed buffer with a folder as its storage_dir."""
        return self.cls(**self.buffer_arguments, storage_dir=folder, resume=folder is not None, **self.options)

    @rule(count=st.integers(1, 25), restart=st.booleans())
    def add(self, count: int, restart: bool) -> None:
        if restart:
            self.source.restart()
        for _ in range(count * (8 if self.drops_rows else 1)):
            transition = self.source.step()
            self.ours.add(*transition)
            self.theirs.add(*transition)

    @rule(at=st.integers(1, 250))
    def interrupt_add(self, at: int) -> None:
        """Interrupt an ``add``; repeat it in SB3's buffer only if it took effect."""
        transition = self.source.step()
        before = self.ours.pos, self.ours.full
        interrupt_at(lambda: self.ours.add(*transition), at, code_paths=CODE_PATHS)
        newest = self.ours.rewards[(self.ours.pos - 1) % self.ours.buffer_size]
        if (self.ours.pos, self.ours.full) != before or (newest == transition[3]).all():
            self.theirs.add(*transition)

    @rule(name=st.sampled_from(["sample", "pickle"]), at=st.integers(1, 250))
    def interrupt_read(self, name: str, at: int) -> None:
        """Interrupt a call that changes nothing, and check that no lock is held."""
        calls = {"sample": lambda: self.ours.sample(5), "pickle": lambda: pickle.dumps(self.ours)}
        if name != "sample" or (self.ours.size() and np.any(getattr(self.ours, "ep_length", 1))):
            interrupt_at(calls[name], at, code_paths=CODE_PATHS)
        call_in_thread(self.buffers_are_equal)

    @rule(refused=st.sampled_from(REFUSED))
    def fail_to_add(self, refused: Any) -> None:
        """Check that a transition with a wrong argument is refused."""
        name, change, error, text = refused
        if name == "infos" and not self.ours.handle_timeout_termination:
            return  # as SB3, do not read infos
        transition = dict(zip(ARGUMENTS, self.source.step(), strict=True))
        value = transition[name]
        if name.endswith("obs") and isinstance(value, dict):
            key = next(iter(value))
            for wrong in ({**value, key: change(value[key])}, {}):
                with pytest.raises(error if wrong else SHAPE, match=text if wrong else "expected a dict with the keys"):
                    self.ours.add(**{**transition, name: wrong})
            return
        with pytest.raises(error, match=text):
            self.ours.add(**{**transition, name: change(value)})

    @rule(batch_size=st.integers(1, 50), seed=st.integers(0, 99))
    def sample(self, batch_size: int, seed: int) -> None:
        known = self.ours.size() == self.theirs.size() and np.any(getattr(self.theirs, "ep_length", 1))
        if self.theirs.size() and known:
            assert_same_draws(lambda buffer: buffer.sample(batch_size), self.ours, self.theirs, seed)

    @rule(length=st.integers(1, 12), burn_in=st.integers(0, 30), period=st.integers(1, 9))
    def sample_sequences(self, length: int, burn_in: int, period: int) -> None:
        """Check that sequences equal those of a loop over SB3's arrays."""
        if self.kind in ("plain", "dict") and self.ours.size():
            assert_same_sequences(self.ours, self.theirs, 5, length=length, burn_in=burn_in, period=period)

    @rule(start=st.integers(-45, 45), stop=st.integers(-45, 45), step=st.sampled_from([-2, -1, 1, 3]))
    def slice(self, start: int, stop: int, step: int) -> None:
        if self.ours.size() == self.theirs.size():
            rows = np.arange(self.theirs.size())[start:stop:step]
            self._compare(self.ours, rows, read=lambda view: view[: self.theirs.size()][start:stop:step])

    @rule(at=st.integers(1, 250))
    def interrupt_reset(self, at: int) -> None:
        """Interrupt a ``reset``; repeat it in SB3's buffer only if it took effect."""
        interrupt_at(self.ours.reset, at, code_paths=CODE_PATHS)
        if self.ours.size() == 0:
            self._reset_theirs()

    @rule()
    def reset(self) -> None:
        self.ours.reset()
        self._reset_theirs()

    def _reset_theirs(self) -> None:
        if isinstance(self.theirs, HerReplayBuffer):  # it would keep sampling the old episodes
            self.theirs = HerReplayBuffer(**self.buffer_arguments)
        else:
            self.theirs.reset()

    @rule()
    def truncate_last_trajectory(self) -> None:
        """End the running episodes, as ``model.load_replay_buffer()`` does."""
        for buffer in (self.ours, self.theirs) if self.kind == "hindsight" else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SB3 warns of them
                buffer.truncate_last_trajectory()

    @rule(how=st.sampled_from(["file", "pickle", "deepcopy"]), goes_on=st.booleans())
    def copy(self, how: str, goes_on: bool) -> None:
        """Copy the compressed buffer, continue with either copy, and change the other."""
        if self.folder is not None:
            return
        if how == "deepcopy":
            other = copy.deepcopy(self.ours)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(self.ours))
        else:
            save_to_pkl(self.temporary / "b.pkl", self.ours)  # as model.save_replay_buffer() does
            other = self.cls.load(self.temporary / "b.pkl", "cpu")
        assert other._observations.decode_on_gpu == self.ours._observations.decode_on_gpu
        if self.kind == "hindsight":
            other.set_env(self.buffer_arguments["env"])
        if goes_on:
            other, self.ours = self.ours, other
        # Changes of one copy do not affect the other.
        other.add(*self.source.step())
        other.close()

    @rule()
    def open_again(self) -> None:
        if self.folder is not None:
            self.ours.close()
            self.ours = self._open(self.folder)

    @rule()
    def recover_copy_of_folder(self) -> None:
        """Copy the folder of the open buffer, and check that the copy contains the same transitions."""
        if self.folder is not None:
            left = self._open(shutil.copytree(self.folder, self.temporary / "left"))
            assert (left.pos, left.size()) == (self.ours.pos, self.ours.size())
            self._compare(left, (left.pos - left.size() + np.arange(left.size())) % left.buffer_size)
            left.close()
            shutil.rmtree(self.temporary / "left")

    def _compare(self, ours: Any, rows: np.ndarray, read: Any = None) -> None:
        """Check that rows of a compressed buffer equal those of SB3's."""
        for name in ROWS:
            left, right = getattr(ours, name), getattr(self.theirs, name)
            assert (left.dtype, left.shape) == (right.dtype, right.shape), name
            np.testing.assert_array_equal(left[rows], right[rows], name)
        for name in ("observations", "next_observations"):
            left, right = getattr(ours, name), getattr(self.theirs, name)
            for key in left if isinstance(left, dict) else [None]:
                seen, true = (left, right) if key is None else (left[key], right[key])
                np.testing.assert_array_equal(read(seen) if read else seen[rows], true[rows], strict=True)

    @invariant()
    def buffers_are_equal(self) -> None:
        """Check that both buffers contain the same transitions, except dropped ones."""
        if self.ours is not None:
            size = self.ours.size()
            drops = size < self.theirs.size()
            assert self.ours.pos == self.theirs.pos
            # A folder does not say whether rows that were dropped before it was opened had been written.
            assert self.ours.full == self.theirs.full or (drops and self.folder is not None)
            assert size == self.theirs.size() or (drops and size > 0 and "max_bytes" in self.options)
            self._compare(self.ours, (self.ours.pos - size + np.arange(size)) % self.ours.buffer_size)
            if self.kind == "hindsight" and drops and not self.ours.full:
                whole = self.theirs.ep_start >= self.ours.pos - size
                np.testing.assert_array_equal(self.ours.ep_length, self.theirs.ep_length * whole)
            for name in ("ep_start", "ep_length", "_current_ep_start") if size == self.theirs.size() else ():
                stop = size if name == "ep_start" else None  # reset() leaves the values of unused rows
                left, right = getattr(self.ours, name, ()), getattr(self.theirs, name, ())
                np.testing.assert_array_equal(left[:stop], right[:stop])

    def teardown(self) -> None:
        if self.ours is not None:
            self.ours.close()
            shutil.rmtree(self.temporary)


@pytest.mark.filterwarnings("ignore:.*Observations are cast")
@pytest.mark.parametrize("kind", REPLAY)
def test_same_calls_have_the_same_effect_as_with_sb3s_buffers(kind: str) -> None:
    run_state_machine(functools.partial(SameAsUpstream, kind), 10, 80)
