from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from sb3_contrib.common.maskable import buffers as maskable
from sb3_contrib.common.recurrent import buffers as recurrent
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common import buffers
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage

import sb3_ext
from rl_ext_core.vector.array_frameworks import map_arrays
from sb3_ext import contrib
from tests.sb3_ext.vec_checks import assert_equal


class Sprite(gym.Env[Any, int]):
    """Environment with a square that actions move; it terminates or is truncated after a few steps.

    :param channels: 1 for gray, 3 for RGB
    :param size: height and width in pixels
    :param still: whether frames change little; else they are noise
    :param as_dict: whether observations are a dict of the image and a vector of position and step
    """

    def __init__(self, channels: int = 1, size: int = 36, *, still: bool = True, as_dict: bool = False) -> None:
        image, place = spaces.Box(0, 255, (size, size, channels), np.uint8), spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = spaces.Dict(image=image, place=place) if as_dict else image
        self.action_space = spaces.Discrete(3)
        self._still, self._as_dict = still, as_dict
        self._background = np.random.default_rng(1).integers(100, size=(size, size, channels), dtype=np.uint8)

    def _observe(self) -> Any:
        image = self._draw()
        return {"image": image, "place": np.float32([self._place, self._steps])} if self._as_dict else image

    def _draw(self) -> np.ndarray:
        if not self._still:
            return self.np_random.integers(256, size=self._background.shape, dtype=np.uint8)
        frame = self._background.copy()
        at = 3 + self._place % (len(frame) - 8)
        frame[at : at + 5, 10:15] = 200 + self._steps % 50
        return frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(20)), 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self._place += round(float(np.sum(action))) - 1
        self._steps += 1
        terminated = bool(self.np_random.random() < 0.08)
        truncated = not terminated and self._steps >= 11
        return self._observe(), float(np.sum(action)) - 0.5, terminated, truncated, {}


def image_env(channels: int = 1, n_envs: int = 2, n_stack: int = 4, *, first: bool = True, **options: bool) -> VecEnv:
    """Return image environments with SB3's wrappers: stacked, and channel-first unless ``first`` is False."""
    venv: VecEnv = DummyVecEnv([lambda: Sprite(channels, **options)] * n_envs)
    venv.seed(0)
    if n_stack > 1:
        venv = VecFrameStack(venv, n_stack)
    return VecTransposeImage(venv) if first else venv


def dict_env() -> VecEnv:
    return image_env(as_dict=True)


class Reach(gym.Env[dict[str, np.ndarray], np.ndarray]):
    """Environment with a point that should reach a goal, a position."""

    def __init__(self, size: int = 12, *, still: bool = True, length: int = 9) -> None:
        image = spaces.Box(0, 255, (1, size, size), np.uint8)
        goal = spaces.Box(0, size, (2,), np.float32)
        self.observation_space = spaces.Dict(observation=image, achieved_goal=goal, desired_goal=goal)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._size, self._still, self._length = size, still, length

    def _observe(self) -> dict[str, np.ndarray]:
        image = np.zeros((1, self._size, self._size), np.uint8)
        row, column = self._place.astype(int)
        image[0, row : row + 2, column : column + 2] = 255
        if not self._still:
            image = self.np_random.integers(256, size=image.shape, dtype=np.uint8)
        return {"observation": image, "achieved_goal": self._place.copy(), "desired_goal": self._goal.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.uniform(0, self._size - 2, (2, 2)).astype(np.float32)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        self._place = np.clip(self._place + action, 0, self._size - 2).astype(np.float32)
        self._steps += 1
        seen = self._observe()
        reward = float(self.compute_reward(seen["achieved_goal"][None], seen["desired_goal"][None], [{}])[0])
        ends = self._length < 10 and self.np_random.random() < 0.05
        return seen, reward, bool(ends), self._steps >= self._length, {"step": self._steps}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, infos: Any) -> np.ndarray:
        return sum(info.get("step", 0) for info in infos) - np.abs(achieved - desired).mean(axis=1)


def make_reach_vec_env(n_envs: int = 2, **options: Any) -> VecEnv:
    venv = DummyVecEnv([lambda: Reach(**options)] * n_envs)
    venv.seed(0)
    return venv


LAST = "terminal_observation"
Transition = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]


def collect_transitions(venv: VecEnv, n_steps: int, *, seed: int = 0) -> list[Transition]:
    """Return transitions as ``OffPolicyAlgorithm._store_transition`` passes them to a buffer."""
    venv.action_space.seed(seed)
    found, before = [], venv.reset()
    for _ in range(n_steps):
        action = sample_batch(venv.action_space, venv.num_envs)
        after, reward, done, infos = venv.step(action)
        seen = map_arrays(lambda part: part.copy(order="K"), after)
        for env in np.flatnonzero(done):
            map_arrays(lambda part, last, env=env: operator.setitem(part, env, last), seen, infos[env][LAST])
        found.append((before, seen, action, reward, done, infos))
        before = after
    return found


def add_all(targets: Iterable[Any], transitions: Iterable[Transition]) -> None:
    """Add the same transitions to several buffers."""
    for transition in transitions:
        for buffer in targets:
            obs, next_obs, *rest = transition
            if isinstance(obs, dict):  # SB3 reshapes the arrays in the dict
                obs, next_obs = dict(obs), dict(next_obs)
            buffer.add(obs, next_obs, *rest)


def sample_batch(space: spaces.Space[Any], n_envs: int) -> Any:
    """Return a batch of samples of a space, as a vectorized environment does."""
    if isinstance(space, spaces.Dict):
        return {key: sample_batch(part, n_envs) for key, part in space.spaces.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(n_envs)])


class TransitionSource:
    """Source of transitions of vectorized environments, for observations of any space.

    Stacks of 3 frames change a little, and other observations are random. The next observation is the following one,
    except after ``done``, and after :meth:`restart`.

    :param channels_last: Whether images are views of channel-last memory, as those of ``VecTransposeImage``
    :param miscasts: Whether observations have other dtypes than the space
    """

    def __init__(
        self,
        space: Any,
        actions: Any,
        n_envs: int,
        *,
        end_probability: float = 0.2,
        channels_last: bool = False,
        miscasts: bool = False,
    ) -> None:
        self._parts = space.spaces if isinstance(space, spaces.Dict) else {None: space}
        self._actions, self._n_envs, self._end_probability = actions, n_envs, end_probability
        self._channels_last, self._miscasts = channels_last, miscasts
        self._rng, self._time = np.random.default_rng(0), 0
        for part in (*self._parts.values(), actions):
            part.seed(0)
        self.restart()

    def restart(self) -> None:
        """Reset all environments, as ``learn()`` does at its start."""
        self._observations = {key: self._reset_part(part) for key, part in self._parts.items()}

    def _is_stack(self, part: Any) -> bool:
        return len(part.shape) == 3 and part.shape[0] == 3

    def _reset_part(self, part: Any) -> np.ndarray:
        found = sample_batch(part, self._n_envs)
        if self._is_stack(part):
            found[:, :-1] = 0
        return found

    def _step_part(self, part: Any, before: np.ndarray) -> np.ndarray:
        if not self._is_stack(part):
            return sample_batch(part, self._n_envs)
        after = np.concatenate([before[:, 1:], before[:, -1:]], axis=1)
        row, column = self._rng.integers(part.shape[1:])
        after[:, -1, row, column] = self._rng.integers(256, size=self._n_envs)
        return after

    def _export(self, parts: dict[Any, np.ndarray]) -> Any:
        """Return observations in the form of the space."""
        found = {key: value.copy() for key, value in parts.items()}
        if self._channels_last:
            for key, value in found.items():
                if value.ndim == 4:
                    found[key] = np.moveaxis(np.moveaxis(value, 1, -1).copy(), -1, 1)
        for key, value in found.items() if self._miscasts else ():
            found[key] = value.astype(np.int64) if value.dtype == np.uint8 else value + np.float64(1e-9)
        return found.get(None, found)

    def step(self) -> Any:
        """Advance by one step, and return the arguments of a buffer's ``add``."""
        before = self._observations
        after = {key: self._step_part(part, before[key]) for key, part in self._parts.items()}
        done = self._rng.random(self._n_envs) < self._end_probability
        self.restart()
        for key, fresh in self._observations.items():
            fresh[~done] = after[key][~done]
        self._time += 1
        infos = [{"TimeLimit.truncated": bool(end and self._rng.random() < 0.5), "step": self._time} for end in done]
        reward = self._time + np.arange(self._n_envs) / 8
        return self._export(before), self._export(after), sample_batch(self._actions, self._n_envs), reward, done, infos


class GoalRewards:
    """Minimal environment for hindsight: it computes rewards."""

    def env_method(self, name: str, achieved: np.ndarray, desired: np.ndarray, infos: Any, *, indices: Any) -> Any:
        steps = np.array([info.get("step", 0) for info in infos])
        distances = np.abs(achieved.astype(float) - desired)
        return [steps - distances.sum(axis=tuple(range(1, distances.ndim)))]


REPLAY: dict[str, tuple[Any, Any]] = {
    "plain": (sb3_ext.CompressedReplayBuffer, buffers.ReplayBuffer),
    "dict": (sb3_ext.CompressedDictReplayBuffer, buffers.DictReplayBuffer),
    "hindsight": (sb3_ext.CompressedHerReplayBuffer, HerReplayBuffer),
}
if hasattr(buffers, "NStepReplayBuffer"):  # since SB3 2.7
    REPLAY["n-step"] = (sb3_ext.CompressedNStepReplayBuffer, buffers.NStepReplayBuffer)
ROLLOUT: dict[str, tuple[Any, Any]] = {
    "plain": (sb3_ext.CompressedRolloutBuffer, buffers.RolloutBuffer),
    "dict": (sb3_ext.CompressedDictRolloutBuffer, buffers.DictRolloutBuffer),
    "maskable": (contrib.CompressedMaskableRolloutBuffer, maskable.MaskableRolloutBuffer),
    "maskable dict": (contrib.CompressedMaskableDictRolloutBuffer, maskable.MaskableDictRolloutBuffer),
    "recurrent": (contrib.CompressedRecurrentRolloutBuffer, recurrent.RecurrentRolloutBuffer),
    "recurrent dict": (contrib.CompressedRecurrentDictRolloutBuffer, recurrent.RecurrentDictRolloutBuffer),
}
_OURS_ALONE = ("codec", "n_stack", "max_error", "quality", "num_threads", "max_bytes", "storage_dir", "resume")


def make_buffers(kind: str, size: int, space: Any, actions: Any, n_envs: int = 2, **options: Any) -> tuple[Any, Any]:
    """Return a compressed replay buffer and SB3's. Storage options go to the compressed one only."""
    theirs = {name: value for name, value in options.items() if name not in _OURS_ALONE}
    more = {"device": "cpu", "n_envs": n_envs}
    return (
        REPLAY[kind][0](size, space, actions, **options, **more),
        REPLAY[kind][1](size, space, actions, **theirs, **more),
    )


def make_buffers_for(kind: str, rows: int, venv: VecEnv, **options: Any) -> tuple[Any, Any]:
    """Return a compressed replay buffer and SB3's, for these environments."""
    if kind == "hindsight":
        options["env"] = venv
    return make_buffers(kind, rows * venv.num_envs, venv.observation_space, venv.action_space, venv.num_envs, **options)


@contextlib.contextmanager
def repeating_in_thread(function: Callable[[], Any]) -> Iterator[None]:
    """Call a function again and again in another thread, with frequent switches between threads."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def repeat() -> None:
        while not stop.is_set():
            function()

    thread = threading.Thread(target=repeat)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def call_in_thread(function: Callable[[], None]) -> None:
    """Call a function in another thread, raise its error here, and fail if it does not end."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result(timeout=60)


class LogRows(KVWriter):
    """Output of SB3's logger that keeps each row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], *_: Any) -> None:
        self.rows.append(dict(key_values))

    def close(self) -> None: ...


def without_logger(model: Any) -> Any:
    """Replace a model's logger, which would create a folder for temporary files."""
    model.set_logger(Logger(None, []))
    return model


def assert_same_draws(draw: Callable[[Any], Any], ours: Any, theirs: Any, seed: int) -> None:
    """Check that draws of both have equal bits, and leave NumPy's generator in the same state."""
    found = []
    for buffer in (ours, theirs):
        np.random.seed(seed)
        found.append((draw(buffer), np.random.get_state()))
    assert_equal(*found)


def assert_same(ours: Any, theirs: Any, batch_size: int = 40, env: Any = None) -> None:
    """Check that two replay buffers have equal contents, and draw equal samples."""
    for name in ("pos", "full", "buffer_size", "n_envs", "obs_shape", "action_dim", "device"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("actions", "rewards", "dones", "timeouts"):
        assert_equal(getattr(ours, name)[: ours.size()], getattr(theirs, name)[: theirs.size()], name)
    for name in ("ep_start", "ep_length", "_current_ep_start"):
        np.testing.assert_array_equal(getattr(ours, name, ()), getattr(theirs, name, ()))
    if not ours.size() or not np.any(getattr(theirs, "ep_length", 1)):
        return
    for seed in range(3):
        assert_same_draws(lambda buffer: buffer.sample(batch_size, env=env), ours, theirs, seed)


def assert_same_batches(ours: Any, theirs: Any, batch_size: int | None) -> None:
    """Check that two rollout buffers yield equal minibatches."""
    for seed in range(2):
        assert_same_draws(lambda buffer: tuple(buffer.get(batch_size)), ours, theirs, seed)


def train(model: Any, n_steps: int) -> Any:
    """Train a model twice. In between, the environments are reset, so observations do not continue the stored ones."""
    without_logger(model).learn(n_steps)
    return model.learn(n_steps // 4, reset_num_timesteps=False)


def check_equal_weights(make: Callable[[Any], Any], ours_class: Any, theirs_class: Any, n_steps: int) -> Any:
    """Train with both classes, compare the weights, and return the model with the compressed buffer."""
    ours, theirs = (train(make(cls), n_steps) for cls in (ours_class, theirs_class))
    initial, trained = make(theirs_class).policy.state_dict(), theirs.policy.state_dict()
    assert_equal(ours.policy.state_dict(), trained)
    assert not all(weights.equal(initial[name]) for name, weights in trained.items())
    if hasattr(ours, "rollout_buffer"):
        assert type(ours.rollout_buffer) is ours_class
        assert_same_batches(ours.rollout_buffer, theirs.rollout_buffer, 16)
    else:
        assert type(ours.replay_buffer) is ours_class
        assert_same(ours.replay_buffer, theirs.replay_buffer, env=theirs.get_vec_normalize_env())
    return ours


def run_state_machine(make: Callable[[], RuleBasedStateMachine], n_examples: int, n_examples_in_ci: int) -> None:
    """Run a state machine with 25 steps an example, without shrinking, which takes minutes."""
    options = settings(
        max_examples=n_examples_in_ci if "CI" in os.environ else n_examples,
        stateful_step_count=25,
        phases=(Phase.generate,),
    )
    run_state_machine_as_test(make, settings=options)
