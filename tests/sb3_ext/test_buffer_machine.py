"""Random sequences of replay buffer calls, compared with Stable Baselines3's buffer after every call."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl

from rl_ext_core.errors import InvalidArgumentError
from tests.interrupts import interrupt_at
from tests.sb3_ext.buffer_envs import REPLAY, assert_same_draws

N_STACK, FRAME = 3, (6, 5)
IMAGE = spaces.Box(0, 255, (N_STACK, *FRAME), np.uint8)
PLACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
ROWS = ("actions", "rewards", "dones", "timeouts")
CODE_PATHS = ("/sb3_ext/", "/rl_ext_core/")


class GoalRewards:
    """Minimal environment for hindsight: it computes rewards."""

    def env_method(
        self, name: str, achieved: np.ndarray, desired: np.ndarray, infos: Any, *, indices: Any
    ) -> list[Any]:
        return [-np.abs(achieved - desired).sum(axis=1)]


KINDS: dict[str, Any] = {
    "plain": (IMAGE, {}),
    "dict": (spaces.Dict(image=IMAGE, place=PLACE), {}),
    "n-step": (IMAGE, {"n_steps": 3, "gamma": 0.9}),
    "hindsight": (spaces.Dict(observation=IMAGE, achieved_goal=PLACE, desired_goal=PLACE), {"env": GoalRewards()}),
}


class TransitionSource:
    """Source of transitions whose frames change a little and whose episodes end."""

    def __init__(self, n_envs: int, space: spaces.Space[Any]) -> None:
        self._rng = np.random.default_rng(0)
        self._space = space
        self._time = 0
        self._stacks = self._rng.integers(256, size=(n_envs, *IMAGE.shape), dtype=np.uint8)

    def _observe(self) -> Any:
        """Return the observation of all environments in the form of the space."""
        image = self._stacks.copy()
        if not isinstance(self._space, spaces.Dict):
            return image
        place = np.stack([np.full(len(image), self._time), image[:, -1, 0, 0]], axis=1).astype(np.float32)
        return {key: image if part == IMAGE else place for key, part in self._space.items()}

    def transition(self, *, discontinuous: bool) -> tuple[Any, ...]:
        """Advance by one step, and return the arguments for a buffer's ``add``."""
        rng, stacks, n_envs = self._rng, self._stacks, len(self._stacks)
        if discontinuous:
            stacks[:] = rng.integers(256, size=stacks.shape)
        before = self._observe()
        self._time += 1
        stacks[:, :-1] = stacks[:, 1:]
        stacks[:, -1, rng.integers(FRAME[0]), rng.integers(FRAME[1])] = rng.integers(256, size=n_envs)
        after = self._observe()
        done = rng.random(n_envs) < 0.2
        stacks[done, :-1] = 0
        infos = [{"TimeLimit.truncated": bool(end and rng.random() < 0.5)} for end in done]
        action = rng.uniform(-1, 1, (n_envs, 2)).astype(np.float32)
        return before, after, action, np.full(n_envs, float(self._time)), done, infos


class SameAsUpstream(RuleBasedStateMachine):
    """State machine that makes the same calls on a compressed buffer and on Stable Baselines3's."""

    ours: Any = None

    @initialize(
        kind=st.sampled_from([*KINDS]),
        in_folder=st.booleans(),
        rows=st.integers(1, 40),
        n_envs=st.integers(1, 2),
        codec=st.sampled_from(["raw", "patch"]),
        n_stack=st.sampled_from([None, N_STACK]),
        limited=st.booleans(),
    )
    def begin(
        self, kind: str, in_folder: bool, rows: int, n_envs: int, codec: str, n_stack: int | None, limited: bool
    ) -> None:
        """Create the compressed buffer and SB3's, both empty."""
        (self.space, self.her_options), (self.cls, theirs) = KINDS[kind], REPLAY[kind]
        self.buffer_arguments = {"buffer_size": rows * n_envs, "observation_space": self.space, "action_space": ACTIONS}
        self.buffer_arguments |= {"device": "cpu", "n_envs": n_envs, **self.her_options}
        self.options: dict[str, Any] = {"codec": codec, "n_stack": n_stack}
        if limited:
            self.options["max_bytes"] = 16_000 if kind == "hindsight" else 12_000
        self.temporary = Path(tempfile.mkdtemp())
        # A reopened folder starts new episodes, so hindsight would differ from SB3.
        self.folder = self.temporary / "a" if in_folder and kind != "hindsight" else None
        self.ours = self._open(self.folder)
        self.theirs: Any = theirs(**self.buffer_arguments)
        self.world = TransitionSource(n_envs, self.space)

    def _open(self, folder: Path | None) -> Any:
        """Create the compressed buffer with a folder as its storage_dir."""
        return self.cls(**self.buffer_arguments, storage_dir=folder, resume=folder is not None, **self.options)

    @rule(count=st.integers(1, 25), discontinuous=st.booleans())
    def add(self, count: int, discontinuous: bool) -> None:
        """Add the same transitions to both buffers."""
        for time in range(count):
            transition = self.world.transition(discontinuous=discontinuous and time == 0)
            self.ours.add(*transition)
            self.theirs.add(*transition)

    @rule(at=st.integers(1, 250))
    def interrupt_add(self, at: int) -> None:
        """Interrupt an ``add``; repeat it in SB3's buffer only if it took effect."""
        transition = self.world.transition(discontinuous=False)
        before = self.ours.pos, self.ours.full
        interrupt_at(lambda: self.ours.add(*transition), at, code_paths=CODE_PATHS)
        newest = self.ours.rewards[(self.ours.pos - 1) % self.ours.buffer_size]
        if (self.ours.pos, self.ours.full) != before or (newest == transition[3]).all():
            self.theirs.add(*transition)

    @rule(part=st.integers(0, 3))
    def fail_to_add(self, part: int) -> None:
        """Check that a transition with a wrong shape is refused."""
        transition = [*self.world.transition(discontinuous=False)]
        value = transition[part]
        wrong = {key: array[..., 1:] for key, array in value.items()} if isinstance(value, dict) else value[..., 1:]
        transition[part] = wrong
        if np.size(transition[part]) or isinstance(value, dict):
            with pytest.raises(InvalidArgumentError, match=r"[nN]othing was stored"):
                self.ours.add(*transition)

    @rule(batch_size=st.integers(1, 50), seed=st.integers(0, 99))
    def sample(self, batch_size: int, seed: int) -> None:
        """Check that both buffers return the same samples."""
        known = self.ours.size() == self.theirs.size() and np.any(getattr(self.theirs, "ep_length", 1))
        if self.theirs.size() and known:
            assert_same_draws(lambda buffer: buffer.sample(batch_size), self.ours, self.theirs, seed)

    @rule(start=st.integers(-45, 45), stop=st.integers(-45, 45), step=st.sampled_from([-2, -1, 1, 3]))
    def slice(self, start: int, stop: int, step: int) -> None:
        """Check that both buffers return the same slices of observations."""
        if self.ours.size() < self.theirs.size():
            return
        rows = np.arange(self.theirs.size())[start:stop:step]
        for name in ("observations", "next_observations"):
            ours, theirs = getattr(self.ours, name), getattr(self.theirs, name)
            for key in ours if isinstance(ours, dict) else [None]:
                left, right = (ours, theirs) if key is None else (ours[key], theirs[key])
                np.testing.assert_array_equal(left[: self.theirs.size()][start:stop:step], right[rows], strict=True)

    @rule()
    def reset(self) -> None:
        """Reset both buffers."""
        self.ours.reset()
        if isinstance(self.theirs, HerReplayBuffer):  # it would keep sampling the old episodes
            self.theirs = HerReplayBuffer(**self.buffer_arguments)
        else:
            self.theirs.reset()

    @rule(how=st.sampled_from(["file", "pickle", "deepcopy"]), goes_on=st.booleans())
    def copy(self, how: str, goes_on: bool) -> None:
        """Copy the compressed buffer, continue with either copy, and change the other."""
        if how == "deepcopy":
            other = copy.deepcopy(self.ours)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(self.ours))
        else:
            save_to_pkl(self.temporary / "b.pkl", self.ours)  # as model.save_replay_buffer() does
            other = self.cls.load(self.temporary / "b.pkl", "cpu")
        if "env" in self.her_options:
            other.set_env(self.her_options["env"])
        if goes_on and self.folder is None:
            other, self.ours = self.ours, other
        # Changes of one copy do not affect the other.
        other.add(*self.world.transition(discontinuous=True))

    @rule()
    def open_again(self) -> None:
        """Close the compressed buffer, and open its folder again."""
        if self.folder is not None:
            self.ours.close()
            self.ours = self._open(self.folder)

    @rule(flushed=st.booleans())
    def recover_copy_of_folder(self, flushed: bool) -> None:
        """Copy the folder of the open buffer, and check that the copy opens with true data."""
        if self.folder is None:
            return
        if flushed:
            self.ours.flush()
        left = self._open(shutil.copytree(self.folder, self.temporary / "left"))
        try:
            n_rows, size = self.theirs.buffer_size, left.size()
            lost = (self.theirs.pos - left.pos) % n_rows
            assert lost == 0 or not flushed
            assert size + lost <= self.theirs.size() or not size
            self._compare(left, (left.pos - size + np.arange(size)) % n_rows)
        finally:
            left.close()
            shutil.rmtree(self.temporary / "left")

    def _compare(self, ours: Any, rows: np.ndarray) -> None:
        """Check that rows of a compressed buffer equal those of SB3's."""
        for name in ROWS:
            np.testing.assert_array_equal(getattr(ours, name)[rows], getattr(self.theirs, name)[rows], name)
        for name in ("observations", "next_observations"):
            left, right = getattr(ours, name), getattr(self.theirs, name)
            for key in left if isinstance(left, dict) else [None]:
                seen, true = (left, right) if key is None else (left[key], right[key])
                np.testing.assert_array_equal(seen[rows], true[rows], strict=True)

    @invariant()
    def buffers_are_equal(self) -> None:
        """Check that both buffers contain the same transitions, except dropped ones."""
        if self.ours is not None:
            assert (self.ours.pos, self.ours.full) == (self.theirs.pos, self.theirs.full)
            size = self.ours.size()
            assert size == self.theirs.size() or (size > 0 and "max_bytes" in self.options)
            self._compare(self.ours, (self.ours.pos - size + np.arange(size)) % self.ours.buffer_size)

    def teardown(self) -> None:
        if self.ours is not None:
            self.ours.close()
            shutil.rmtree(self.temporary)


TestSameAsUpstream = SameAsUpstream.TestCase
TestSameAsUpstream.settings = settings(max_examples=50 if "CI" in os.environ else 10, stateful_step_count=25)
