from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from tests.interrupts import interrupt_at
from tests.sb3_ext.buffer_envs import (
    ROLLOUT,
    TransitionSource,
    assert_same_batches,
    call_in_thread,
    collect_transitions,
    image_env,
    run_state_machine,
    sample_batch,
)

ACTIONS = spaces.Discrete(3)
IMAGE = spaces.Box(0, 255, (3, 8, 8), np.uint8)
DICT = spaces.Dict(camera=IMAGE, place=spaces.Box(-9, 99, (3,), np.float32))
CODE_PATHS = ("sb3_ext/", "rl_ext_core/frames/", "_interrupts.py", "common/buffers.py")
OF_MINIBATCHES = {"seq_start_indices", "pad", "pad_and_flatten"}  # attributes of recurrent buffers
CODE_PATHS += ("maskable/buffers.py", "recurrent/buffers.py")


def make_rollout_buffers(
    kind: str, n_steps: int, space: Any, actions: Any = ACTIONS, n_envs: int = 2, **options: Any
) -> Any:
    """Return a compressed rollout buffer and SB3's, both empty."""
    hidden = [(n_steps, 1, n_envs, 5)] if "recurrent" in kind else []
    more = {"device": "cpu", "gae_lambda": 0.9, "gamma": 0.95, "n_envs": n_envs}
    ours, theirs = ROLLOUT[kind]
    return ours(n_steps, space, actions, *hidden, **more, **options), theirs(n_steps, space, actions, *hidden, **more)


def make_step(buffer: Any, obs: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Return the arguments of a buffer's ``add`` for an observation, with random other values."""
    n_envs = buffer.n_envs
    value, log_prob = (torch.from_numpy(rng.standard_normal(n_envs).astype(np.float32)) for _ in range(2))
    step: dict[str, Any] = {"value": value[:, None], "log_prob": log_prob}
    if hasattr(buffer, "action_masks") and rng.random() < 0.7:
        step["action_masks"] = rng.random((n_envs, buffer.mask_dims)) < 0.5
    if hasattr(buffer, "hidden_states_pi"):
        state = torch.from_numpy(rng.standard_normal((4, 1, n_envs, 5)).astype(np.float32))
        step["lstm_states"] = RNNStates((state[0], state[1]), (state[2], state[3]))
    action = sample_batch(buffer.action_space, n_envs)
    step |= {"reward": rng.standard_normal(n_envs), "episode_start": rng.random(n_envs) < 0.2}
    return {"obs": obs, "action": action, **step}


def fill_rollouts(buffers: tuple[Any, Any], observations: list[Any], *, seed: int = 0) -> None:
    """Fill both buffers with one rollout, as ``OnPolicyAlgorithm.collect_rollouts`` does."""
    for buffer in buffers:
        rng = np.random.default_rng(seed)
        buffer.reset()
        buffer.action_space.seed(seed)
        for obs in observations:
            buffer.add(**make_step(buffer, obs, rng))
        last = torch.from_numpy(rng.standard_normal((buffer.n_envs, 1)).astype(np.float32))
        buffer.compute_returns_and_advantage(last, rng.random(buffer.n_envs) < 0.5)


class SameAsUpstream(RuleBasedStateMachine):
    """State machine that makes the same calls on a compressed rollout buffer and on the original one."""

    ours: Any = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @initialize(
        size=st.integers(1, 12),
        n_envs=st.integers(1, 3),
        actions=st.sampled_from([ACTIONS, spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]),
        codec=st.sampled_from(["raw", "patch"]),
        channels_last=st.booleans(),
        miscasts=st.sampled_from([False, False, True]),
        seed=st.integers(0, 99),
    )
    def begin(self, size: int, n_envs: int, actions: Any, codec: str, seed: int, **form: bool) -> None:
        space: Any = DICT if "dict" in self.kind else IMAGE
        self.ours, self.theirs = make_rollout_buffers(self.kind, size, space, actions, n_envs, codec=codec)
        self.source = TransitionSource(space, actions, n_envs, **form)
        self.size, self.rng = size, np.random.default_rng(seed)

    def _draw_call(self, name: str) -> Callable[[Any], Any]:
        """Return a call that has the same arguments for both buffers."""
        if name == "add":
            step = make_step(self.theirs, self.source.step()[0], self.rng)
            return lambda buffer: buffer.add(**step)
        last, dones = self.rng.standard_normal((self.theirs.n_envs, 1)), self.rng.random(self.theirs.n_envs) < 0.5
        calls: dict[str, Callable[[Any], Any]] = {
            "reset": lambda buffer: buffer.reset(),
            "compute": lambda buffer: buffer.compute_returns_and_advantage(torch.from_numpy(last).float(), dones),
            "get": lambda buffer: list(buffer.get(5)),
        }
        return calls[name]

    @property
    def is_flat(self) -> bool:
        """Whether ``get`` has flattened the arrays."""
        return bool(self.theirs.generator_ready)

    def _call_both(self, name: str) -> None:
        call = self._draw_call(name)
        call(self.ours)
        call(self.theirs)

    @rule(count=st.integers(1, 8))
    def add(self, count: int) -> None:
        """Add steps to both buffers, up to a whole rollout."""
        for _ in range(min(count, self.size - self.theirs.pos)):
            self._call_both("add")

    @rule()
    def reset(self) -> None:
        self._call_both("reset")

    @precondition(lambda self: self.theirs.full)
    @rule(batch_size=st.sampled_from([None, 1, 7, 10_000]))
    def get(self, batch_size: int | None) -> None:
        """Compute returns unless that was done, and compare minibatches."""
        if not self.is_flat:
            self._call_both("compute")
        assert_same_batches(self.ours, self.theirs, batch_size)

    @rule(name=st.sampled_from(["add", "reset", "compute", "get"]), at=st.integers(1, 250))
    def interrupt(self, name: str, at: int) -> None:
        """Interrupt a call. Make it in SB3's buffer only if it took effect."""
        if (name == "add" and self.theirs.full) or (name in ("compute", "get") and not self.theirs.full):
            return
        if name == "compute" and self.is_flat:
            return
        call = self._draw_call(name)
        interrupt_at(lambda: call(self.ours), at, code_paths=CODE_PATHS)
        try:
            call_in_thread(self._compare)  # fails if a lock is still held
        except AssertionError:
            call(self.theirs)  # the invariant compares again

    @rule(how=st.sampled_from([copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))]))
    def copy(self, how: Callable[[Any], Any]) -> None:
        other, self.ours = self.ours, how(self.ours)
        other.reset()

    @precondition(lambda self: not self.is_flat)
    @rule()
    def fail_to_add(self) -> None:
        if self.theirs.full and hasattr(self.theirs, "hidden_states_pi"):
            return  # sb3-contrib's class raises an IndexError first
        step = make_step(self.theirs, self.source.step()[0], self.rng)
        step.pop("action_masks", None)  # sb3-contrib's class writes them before it raises
        obs, key = step["obs"], "camera" if isinstance(step["obs"], dict) else None
        image = obs if key is None else obs[key]
        wrong: list[tuple[Any, type[Exception], str]] = [
            (image[..., 1:], InvalidArgumentError, r"obs.* has shape .* 7\), expected"),
            (np.full(image.shape, "black"), InvalidTypeError, "obs.* has dtype <U5"),
        ]
        if self.theirs.full:
            wrong = [
                (image, InvalidArgumentError, rf"the rollout has {self.size} of {self.size} steps: .* Call reset\(\)")
            ]
        else:
            with pytest.raises(ValueError, match="reshape"):
                self.ours.add(**{**step, "action": np.zeros(5)})
            if key is None:
                pos = self.theirs.pos
                said = rf"step {pos - 2} cannot be stored, because the rollout has {pos} of {self.size} steps"
                with pytest.raises(InvalidArgumentError, match=said):
                    self.ours.observations[pos - 2] = image
                with pytest.raises(InvalidTypeError, match=r"assigned row by row, not by \(0, 1\)\. Use"):
                    self.ours.observations[0, 1] = image[0]
        for value, error, text in wrong:
            with pytest.raises(error, match=text):
                self.ours.add(**{**step, "obs": value if key is None else {**obs, key: value}})

    @invariant()
    def buffers_are_equal(self) -> None:
        if self.ours is not None:
            self._compare()

    def _compare(self) -> None:
        """Check that all attributes are equal, except rows that are not filled yet."""
        rows = slice(None) if self.theirs.full else slice(self.theirs.pos)
        ours, theirs = (
            {name: value for name, value in vars(buffer).items() if name not in OF_MINIBATCHES}
            for buffer in (self.ours, self.theirs)
        )
        assert ours.keys() - {"_observations"} == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, np.ndarray) and name != "observations":
                np.testing.assert_array_equal(ours[name][rows], value[rows], err_msg=name, strict=True)
            elif isinstance(value, (int, float)):
                assert ours[name] == value, name
        mine, other = ours["observations"], theirs["observations"]
        for key in other if isinstance(other, dict) else [...]:
            left, right = (mine[key], other[key]) if isinstance(other, dict) else (mine, other)
            np.testing.assert_array_equal(np.asarray(left)[rows], right[rows], strict=True)


@pytest.mark.filterwarnings("ignore:.*Observations are cast")
@pytest.mark.parametrize("kind", ROLLOUT)
def test_same_calls_have_the_same_effect_as_with_sb3s_buffers(kind: str) -> None:
    run_state_machine(functools.partial(SameAsUpstream, kind), 4, 40)


@pytest.mark.parametrize(("channels", "first", "codec"), [(1, True, "patch"), (3, False, "raw")])
def test_stacked_images_of_consecutive_rollouts_take_less_memory(channels: int, first: bool, codec: str) -> None:
    venv = image_env(channels, 2, first=first)
    buffers = make_rollout_buffers("plain", 40, venv.observation_space, codec=codec)
    for turn in range(3):
        fill_rollouts(buffers, [step[0] for step in collect_transitions(venv, 40)], seed=turn)
        assert_same_batches(*buffers, 16)
    assert buffers[0].n_stack == 4
    assert buffers[0].stored_nbytes < buffers[1].observations.nbytes / 2


def test_like_copies_settings_and_refuses_other_buffers() -> None:
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    _, theirs = make_rollout_buffers("recurrent", 24, space)
    ours = ROLLOUT["recurrent"][0].like(theirs, codec="raw")
    assert (ours.gae_lambda, ours.gamma, ours.codec) == (0.9, 0.95, "raw")
    source = TransitionSource(space, ACTIONS, 2)
    fill_rollouts((ours, theirs), [source.step()[0] for _ in range(24)])
    assert_same_batches(ours, theirs, 10)
    with pytest.raises(InvalidTypeError, match=r"buffer is a RolloutBuffer.*\.like\(model.rollout_buffer\)"):
        ROLLOUT["recurrent"][0].like(RolloutBuffer(24, space, ACTIONS))
    with pytest.raises(InvalidTypeError, match=r"expected a Dict\. Use CompressedRecurrentRolloutBuffer"):
        ROLLOUT["recurrent dict"][0].like(theirs)
