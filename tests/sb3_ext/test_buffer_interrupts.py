"""A buffer call that Ctrl-C interrupts at any instruction takes effect completely or not at all."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from tests.interrupts import interrupt_everywhere
from tests.sb3_ext.buffer_envs import REPLAY, ROLLOUT, GoalRewards, TransitionSource

CODE_PATHS = ("sb3_ext/", "rl_ext_core/frames/", "_interrupts.py", "common/buffers.py", "her_replay_buffer.py")
CODE_PATHS += ("maskable/buffers.py", "recurrent/buffers.py")
EVERY = [pytest.param(1, marks=pytest.mark.exhaustive), 41]
SIZE, N_ENVS = 6, 2
BOX = spaces.Box(0, 255, (3, 8, 8), np.uint8)
VECTOR = spaces.Box(-9, 99, (3,), np.float32)
DICT = spaces.Dict(camera=BOX, place=VECTOR)
GOALS = spaces.Dict(observation=BOX, achieved_goal=VECTOR, desired_goal=VECTOR)


def make_buffer(kind: str) -> Any:
    """Create an empty buffer of a kind."""
    space = GOALS if kind == "hindsight" else DICT if "dict" in kind else BOX
    more: dict[str, Any] = {"n_envs": N_ENVS, "device": "cpu"}
    if "rollout" in kind:
        if "recurrent" in kind:
            more["hidden_state_shape"] = (SIZE, 1, N_ENVS, 4)
        return ROLLOUT[kind.removesuffix(" rollout")][0](SIZE, space, spaces.Discrete(3), **more)
    if kind == "hindsight":
        more |= {"env": GoalRewards(), "n_sampled_goal": 2, "goal_selection_strategy": "future"}
    return REPLAY[kind][0](SIZE * N_ENVS, space, spaces.Discrete(3), **more)


def make_transitions(space: Any) -> list[Any]:
    source = TransitionSource(space, spaces.Discrete(3), N_ENVS, end_probability=0.4)
    return [source.step() for _ in range(40)]


TRANSITIONS = [(space, make_transitions(space)) for space in (BOX, DICT, GOALS)]


def add_step(buffer: Any, time: int) -> None:
    """Add the transition, or the rollout step, of a time to a buffer."""
    transitions = next(found for space, found in TRANSITIONS if space == buffer.observation_space)
    obs, next_obs, action, reward, done, infos = transitions[time]
    if not hasattr(buffer, "log_probs"):
        buffer.add(obs, next_obs, action, reward, done, infos)
        return
    logs = th.full((N_ENVS,), float(time))
    more: dict[str, Any] = {}
    if hasattr(buffer, "action_masks"):
        more["action_masks"] = np.arange(N_ENVS * 3).reshape(N_ENVS, 3) % 5 != time % 5
    if hasattr(buffer, "hidden_states_pi"):
        states = th.full((1, N_ENVS, 4), float(time))
        more["lstm_states"] = RNNStates((states, -states), (2 * states, 3 * states))
    buffer.add(obs, action, reward, done, logs, logs, **more)


def read_state_in_thread(buffer: Any) -> Any:
    found: list[Any] = []

    def read_state() -> None:
        names = ("actions", "rewards", "dones", "timeouts", "returns", "episode_starts", "values", "log_probs")
        names += ("advantages", "ep_start", "ep_length", "_current_ep_start", "action_masks")
        names += ("hidden_states_pi", "hidden_states_vf", "cell_states_pi", "cell_states_vf")
        rows = slice(0, SIZE if buffer.full else buffer.pos)
        flat = getattr(buffer, "generator_ready", False)
        views = [buffer.observations, getattr(buffer, "next_observations", ())]
        parts = [view for both in views for view in (both.values() if isinstance(both, dict) else [both]) if len(view)]
        arrays = [np.asarray(view[:] if flat else view[rows]) for view in parts]
        arrays += [
            getattr(buffer, name)[() if flat or "_current" in name else rows] for name in names if hasattr(buffer, name)
        ]
        found.append((buffer.pos, buffer.full, flat, [array.tolist() for array in arrays]))

    thread = threading.Thread(target=read_state, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a lock is still held"
    return found[0]


def get_batches(buffer: Any) -> list[Any]:
    return list(buffer.get(5))


def compute_returns(buffer: Any) -> None:
    """Compute returns and advantages, with last values of one."""
    buffer.compute_returns_and_advantage(th.ones(N_ENVS), np.zeros(N_ENVS))


ROLLOUTS = [f"{kind} rollout" for kind in ROLLOUT]
REPLAY_CALLS: dict[str, Callable[[Any], Any]] = {
    "add": lambda buffer: add_step(buffer, 20),
    "sample": lambda buffer: buffer.sample(5),
    "reset": lambda buffer: buffer.reset(),
    "pickle": lambda buffer: pickle.dump(buffer, io.BytesIO(), 5),
}


def check_call_is_atomic(kind: str, call: Callable[[Any], Any], n_added: int, *, every: int) -> None:
    """Interrupt a call at many places; check that the buffer is as before or as after it."""
    number, buffers = 0, []

    def prepare() -> Callable[[], Any]:
        nonlocal number
        number += 1
        buffers.append(make_buffer(kind))
        for time in range(n_added):
            add_step(buffers[-1], time)
        if call is get_batches:
            compute_returns(buffers[-1])
        np.random.seed(0)
        return lambda: call(buffers[-1])

    def add_more() -> Any:
        buffer = buffers[-1]
        if kind in ROLLOUTS:
            buffer.reset()
        for time in range(30, 33):
            add_step(buffer, time)
        return read_state_in_thread(buffer)

    prepare()
    before, before_and_on = read_state_in_thread(buffers[-1]), add_more()
    prepare()()
    after, after_and_on = read_state_in_thread(buffers[-1]), add_more()
    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=every):
        found = read_state_in_thread(buffers[-1])
        assert found in (before, after), where
        then = add_more()
        assert then in ([before_and_on] * (found == before) + [after_and_on] * (found == after)), where
        buffers.clear()
    assert number > 3, "nothing was interrupted"


@pytest.mark.sample(quick=2, ci=8)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", REPLAY_CALLS)
@pytest.mark.parametrize("kind", REPLAY)
def test_interrupted_replay_buffer_call_is_atomic(kind: str, name: str, every: int) -> None:
    check_call_is_atomic(kind, REPLAY_CALLS[name], 8, every=every)


@pytest.mark.sample(ci=8)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize(
    ("call", "n_added"),
    [(REPLAY_CALLS["add"], SIZE - 1), (REPLAY_CALLS["reset"], SIZE), (compute_returns, SIZE), (get_batches, SIZE)],
    ids=["add", "reset", "compute_returns_and_advantage", "get"],
)
def test_interrupted_rollout_buffer_call_is_atomic(kind: str, call: Any, n_added: int, every: int) -> None:
    check_call_is_atomic(kind, call, n_added, every=every)
