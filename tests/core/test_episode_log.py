from __future__ import annotations

import functools
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import WorkerError
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder, episode_log
from rl_ext_core.recording.capsule import read_capsule
from rl_ext_core.recording.generators import restore_generator, state_of_generator
from rl_ext_core.vector import SharedMemoryVectorEnv
from tests.environments import Counting, Failing, FailingOnce

ACTIONS = np.random.default_rng(0).integers(0, 2, (93, 3))


class Adjustable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with an attribute, a method and a private generator that change its observations."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.scale = 1.0
        self.rng = np.random.default_rng(5)

    def shift(self, by: float) -> None:
        self.rng.bit_generator.advance(int(by))

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return (observation * self.scale + self.rng.normal()).astype(np.float32), *rest


def make_env() -> Any:
    return Adjustable(gymnasium.make("CartPole-v1"))


def make_failing_env(how: str = "raise") -> Any:
    return Adjustable(Failing("step", how, after=4))


def fail_in_a_worker(how: str = "raise", **options: Any) -> str:
    """Step until the second environment fails, and return the error's text."""
    envs = SharedMemoryVectorEnv([lambda: make_failing_env(""), lambda: make_failing_env(how)], **options)
    envs.reset(seed=1)
    assert (envs._pool.episode_logs() == [None] * 2) == (options["recorder"] is False)
    for _ in range(4):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(WorkerError) as raised:
        envs.step(np.zeros(2, np.int64))
    return str(raised.value)


def check_repetition(log: EpisodeLog | None, observation: Any, make: Callable[[], Any] = make_env) -> EpisodeRecorder:
    """Repeat a log in a new environment, compare its last observation, and return the environment."""
    assert log is not None
    env = EpisodeRecorder(make())
    repetition = env.repeat(pickle.loads(pickle.dumps(log)))
    assert repetition.first_difference is None
    np.testing.assert_array_equal(repetition.observation, observation)
    again = env.episode_log()
    assert (again.checksums, again.generators) == (log.checksums, log.generators)
    return env


@pytest.mark.parametrize("kills", [(), (7, 8, 33)], ids=["no restart", "restarts"])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_episodes_are_repeated_in_all_autoreset_modes(mode: str, kills: tuple[int, ...]) -> None:
    envs = SharedMemoryVectorEnv([make_env] * 3, autoreset_mode=mode, n_workers=2, restart="truncate")
    observations, _ = envs.reset(seed=3)
    for number, actions in enumerate(ACTIONS):
        if number in kills:
            worker = envs._pool.workers[number % 2]
            os.kill(worker.process.pid, signal.SIGKILL)
        observations, _, terminated, truncated, _ = envs.step(actions)
        if mode == "Disabled" and (terminated | truncated).any():
            observations, _ = envs.reset(options={"reset_mask": terminated | truncated})
        if number == 20:
            envs.set_attr("scale", [2.0, 3.0, 4.0])
            envs.call("shift", 7)
        logs = envs._pool.episode_logs()
        if number in (0, 6, 9, 20, 23, 34, 50, 70, 92):
            for log, observation in zip(logs, observations, strict=True):
                check_repetition(log, observation)
    assert envs.timings.restarts == len(kills)
    envs.close()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Pendulum-v1", "Blackjack-v1", "Double", "Adjustable"])
def test_workers_repeat_episodes_and_continue_them(name: str) -> None:
    def make() -> Any:
        if name == "Adjustable":
            return make_env()
        if name != "Double":
            return gymnasium.make(name)
        env = gymnasium.make("CartPole-v1")  # returns float64, although its space is of float32
        return gymnasium.wrappers.TransformObservation(env, lambda x: x.astype(np.float64) / 3, env.observation_space)

    one, other = (SharedMemoryVectorEnv([make] * 3, n_workers=2, autoreset_mode="SameStep") for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    for _ in range(30):
        one.step(one.action_space.sample())
    logs = one._pool.episode_logs()
    for number, log in enumerate(logs):
        assert other._pool.repeat_episode(number, log).first_difference is None
    for log, copy in zip(logs, other._pool.episode_logs(), strict=True):
        assert (log.checksums, len(log.calls)) == (copy.checksums, len(copy.calls))
    one.close()
    other.close()


@pytest.mark.parametrize(("how", "kind"), [("raise", "exception"), ("SIGSEGV", "signal")])
def test_failure_of_a_worker_is_recorded_in_the_folder(how: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "crashes" if how == "raise" else tmp_path
    text = fail_in_a_worker(how, recorder=folder)
    (path,) = folder.iterdir()
    assert f"rl-ext replay {path}" in text
    capsule = read_capsule(path)
    assert (capsule.failure.kind, capsule.step, capsule.environment) == (kind, 5, 1)
    assert capsule.log.is_interrupted


def test_no_failure_is_recorded_without_a_recorder_or_in_a_full_folder(tmp_path: Path, crash_folder: Path) -> None:
    before = set(crash_folder.iterdir())
    assert "rl-ext replay" not in fail_in_a_worker(recorder=False)
    assert set(crash_folder.iterdir()) == before
    for number in range(10):
        (tmp_path / f"crash-{number}.rlx").touch()
    assert "contains 10 files" in fail_in_a_worker(recorder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 10


class Walk(gymnasium.Env[Any, Any]):
    """Random walk with lives, whose resets between two lives continue the game."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, size: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.place, self.scale, self.was_real_done = 0.0, 1.0, True

    def observe(self) -> Any:
        return np.full(self.observation_space.shape, self.place + self.np_random.random(), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = (options or {}).get("place", np.zeros(1))[0] if self.was_real_done else self.place
        self.was_real_done = False
        return self.observe(), {}

    def shift(self, by: float) -> None:
        self.place += by

    def step(self, action: Any) -> Any:
        self.place += sum(float(torch.as_tensor(part).detach().sum()) for part in action) * self.scale
        draw = self.np_random.random()
        self.was_real_done = draw < 0.2
        return self.observe(), 0.0, draw < 0.4, False, {}


ACTION_KINDS: dict[str, Callable[[float], Any]] = {
    "arrays": lambda value: np.full(2, value, np.float32),
    "other dtypes": lambda value: np.full(2, value),
    "tuples": lambda value: (np.full(2, value),),
    "lists": lambda value: [value],
    "tensors": lambda value: torch.full((2,), value, requires_grad=True) * 1,
}


def fill(action: Any) -> None:
    if isinstance(action, list):
        action[0] = 7.0
    else:
        array = action[0] if isinstance(action, tuple) else action
        (array.detach() if isinstance(array, torch.Tensor) else array)[:] = 7


@settings(max_examples=80, deadline=None)
@given(size=st.sampled_from([1, 3, 3000]), data=st.data())
def test_episodes_of_recorders_are_repeated(size: int, data: st.DataObject) -> None:
    make = functools.partial(Walk, size)
    env = EpisodeRecorder(make())
    observation = env.reset(seed=0)[0]
    for operation in data.draw(st.lists(st.sampled_from(["step"] * 8 + ["reset", "set", "call", "repeat", "copy"]))):
        value = float(data.draw(st.integers(0, 3)))
        if operation == "step":
            action = ACTION_KINDS[data.draw(st.sampled_from(list(ACTION_KINDS)))](value)
            observation = env.step(action)[0]
            fill(action)
        elif operation == "reset":
            options = {"place": np.array([value])}
            arguments = data.draw(st.sampled_from([{}, {"seed": 1}, {"seed": 2, "options": options}]))
            is_full_reset = env.unwrapped.was_real_done
            observation = env.reset(**arguments)[0]
            options["place"][:] = 7
            assert not is_full_reset or len(env.episode_log().calls) == 1
        elif operation == "set":
            env.set_wrapper_attr("scale", value)
        elif operation == "call":
            env.get_wrapper_attr("shift")(value)
        elif operation == "repeat" and env.episode_log() is not None:
            env = check_repetition(env.episode_log(), observation, make)
        elif operation == "copy":  # which records from its next reset
            env = deepcopy(env)
            assert env.episode_log() is None
            env.unwrapped.was_real_done = True  # otherwise the reset depends on earlier steps
            observation = env.reset()[0]
    if (log := env.episode_log()) is not None:
        check_repetition(log, observation, make)
        if log.steps:
            log.checksums[-1 if log.calls[-1][0] == "step" else 0] ^= 1
            assert EpisodeRecorder(make()).repeat(log).first_difference is not None


@pytest.mark.parametrize("make_action", [lambda number: np.zeros(2, np.float32), lambda number: [0.0] * 100])
def test_environment_that_never_ends_takes_limited_memory(make_action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_log, "LOG_BYTES", 1 << 16)
    monkeypatch.setattr(episode_log, "_TABLE_BYTES", 300 * 32)
    env = EpisodeRecorder(Walk(1))
    for n_steps, is_recorded in ((30, True), (400, False), (30, True)):
        env.unwrapped.was_real_done = True
        observation = env.reset(seed=1)[0]
        for number in range(n_steps):
            observation = env.step(make_action(number))[0]
        assert (env.episode_log() is not None) == is_recorded
    check_repetition(env.episode_log(), observation, functools.partial(Walk, 1))


OBSERVATIONS: dict[str, Any] = {
    "object": lambda: gymnasium.Env(),  # without a text of its own
    "function": lambda: lambda: 1,
    "tensor": lambda: torch.zeros(2),
    "tensor with a gradient": lambda: torch.zeros(2, requires_grad=True) * 2,
    "dict of tensors": lambda: {"a": torch.zeros(2, requires_grad=True), 1: np.zeros(2)},
    "bfloat16": lambda: (torch.zeros(2, dtype=torch.bfloat16), "text"),
    "sparse tensor": lambda: torch.zeros(2, 2).to_sparse(),
    "set": lambda: {1},
}


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_of_any_class_are_recorded(kind: str) -> None:
    class Special(Walk):
        def observe(self) -> Any:
            return OBSERVATIONS[kind]()

    env = EpisodeRecorder(Special(1))
    env.reset(seed=1)
    env.step(np.zeros(2, np.float32))
    assert EpisodeRecorder(Special(1)).repeat(env.episode_log()).first_difference is None


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_episode_after_two_restarts_in_one_step_is_repeated(mode: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    make = functools.partial(FailingOnce, str(mark), "reset")
    options = {"restart": "truncate", "recorder": tmp_path}
    envs = SharedMemoryVectorEnv([make, Counting], autoreset_mode=mode, n_workers=2, **options)
    envs.reset(seed=3)
    mark.unlink()  # the new worker dies in its first reset, too
    os.kill(envs._pool.workers[0].process.pid, signal.SIGKILL)
    for actions in ACTIONS[:4]:
        observations = envs.step(actions[:2])[0]
    assert envs.timings.restarts == 2
    log = envs._pool.episode_logs()[0]
    assert [name for name, _ in log.calls].count("reset") == 1
    check_repetition(log, observations[0], make)
    envs.close()


def test_call_that_raised_ends_the_log_until_the_next_reset() -> None:
    env = EpisodeRecorder(make_failing_env())
    env.reset(seed=0)
    for _ in range(4):
        env.step(0)
    with pytest.raises(ValueError, match="the rope has snapped"):
        env.step(0)
    log = env.episode_log()
    assert (log.steps, log.is_interrupted) == (5, True)
    env.unwrapped._when = ""
    env.step(0)
    assert env.episode_log() is None
    env.reset()
    env.step(1)
    log = env.episode_log()
    assert (log.steps, log.is_interrupted) == (1, False)


class ReadingItsLog(Counting):
    """Environment whose steps read the log of their own call."""

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.action_space = action_space
        self.recorder, self.log = EpisodeRecorder(self), None

    def step(self, action: Any) -> Any:
        self.log = self.recorder.episode_log()
        return super().step(action)


@pytest.mark.parametrize("space", [gymnasium.spaces.Discrete(3), gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(3))])
def test_log_has_no_results_of_the_episode_before(space: gymnasium.Space[Any]) -> None:
    env: Any = ReadingItsLog(space)
    for _ in range(3):
        env.recorder.reset()
        actions = [space.sample() for _ in range(10)]
        for number, action in enumerate(actions, 1):
            terminated = env.recorder.step(action)[2]
            assert (env.log.is_interrupted, env.log.steps, len(env.log.checksums)) == (True, number, number)
            assert [given for name, given in env.log.calls if name == "step"] == actions[:number]
        assert terminated
        assert not env.recorder.episode_log().is_interrupted


def test_episode_with_an_attribute_that_cannot_be_pickled_is_not_recorded() -> None:
    env = EpisodeRecorder(make_env())
    for value, is_recorded in ((threading.Lock(), False), (2.0, True)):
        env.set_wrapper_attr("scale", value)
        env.reset(seed=0)
        assert (env.episode_log() is not None) == is_recorded


def test_recorder_records_an_environment_that_replaced_another() -> None:
    env = EpisodeRecorder(make_failing_env())
    env.reset(seed=0)
    env.env = make_env()
    env.reset(seed=1)
    for _ in range(5):
        observation, *_ = env.step(0)
    check_repetition(env.episode_log(), observation)


def test_step_of_a_subclass_is_called() -> None:
    class Inverted(EpisodeRecorder):
        def step(self, action: Any) -> Any:
            return super().step(1 - action)

    env = Inverted(make_env())
    env.reset(seed=0)
    env.step(1)
    log = env.episode_log()
    assert log.calls[-1] == ("step", 0)


@pytest.mark.parametrize("generator", [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)], ids=type)
def test_generators_are_restored_in_place_or_created(generator: Any) -> None:
    state, draw = state_of_generator(generator), generator.random()
    assert restore_generator(generator, state) is generator
    assert [generator.random(), restore_generator(None, state).random()] == [draw, draw]
