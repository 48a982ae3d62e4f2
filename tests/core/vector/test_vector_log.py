"""Episode logs of pools: each environment's episode can be repeated from its log, in all autoreset modes."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import StorageError, WorkerError
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder, vector_log
from rl_ext_core.recording.capsule import read_capsule
from rl_ext_core.recording.memory_layout import ENDED, MemoryLayout
from rl_ext_core.vector import SharedMemoryVectorEnv
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import new_cells
from rl_ext_core.vector.worker import WorkerEnvironments

ACTIONS = np.random.default_rng(0).integers(0, 2, (200, 3))


class Adjustable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with an attribute, a method and a private generator that change its observations."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.scale = 1.0
        self.rng = np.random.default_rng(5)

    def shift(self, by: float) -> None:
        self.rng.bit_generator.advance(int(by))  # type: ignore[attr-defined]

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return (observation * self.scale + self.rng.normal()).astype(np.float32), *rest


class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that fails in one step of the first episode."""

    def __init__(self, env: gymnasium.Env[Any, Any], kind: str) -> None:
        super().__init__(env)
        self.kind, self.count = kind, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 5:
            if self.kind == "exception":
                raise ValueError("planted")
            ctypes.string_at(0)
        return self.env.step(action)


def make_env() -> Any:
    return Adjustable(gymnasium.make("CartPole-v1"))


def make_failing_env(kind: str = "exception") -> Any:
    return Failing(make_env(), kind)


def step_repeatedly(envs: SharedMemoryVectorEnv) -> None:
    """Make more steps than the failing environment survives."""
    for _ in range(10):
        envs.step(np.zeros(envs.num_envs, np.int64))


def check_repetition(log: EpisodeLog | None, observation: Any) -> None:
    """Repeat a log in a new environment, and compare its last observation."""
    assert log is not None
    env = EpisodeRecorder(make_env())
    repetition = env.repeat(pickle.loads(pickle.dumps(log)))
    assert repetition.first_difference is None
    np.testing.assert_array_equal(repetition.observation, observation)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_episodes_are_repeated_in_all_autoreset_modes(mode: str) -> None:
    envs = SharedMemoryVectorEnv([make_env] * 3, autoreset_mode=mode, n_workers=2)
    observations, _ = envs.reset(seed=3)
    for number, actions in enumerate(ACTIONS):
        observations, _, terminated, truncated, _ = envs.step(actions)
        if mode == "Disabled" and (terminated | truncated).any():
            observations, _ = envs.reset(options={"reset_mask": terminated | truncated})
        if number == 20:
            envs.set_attr("scale", [2.0, 3.0, 4.0])
            envs.call("shift", 7)
        if number % 23 == 0:
            for log, observation in zip(envs._pool.episode_logs(), observations, strict=True):
                check_repetition(log, observation)
    envs.close()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Pendulum-v1", "Blackjack-v1", "Double"])
def test_converted_observations_are_repeated(name: str) -> None:
    def make() -> Any:
        if name != "Double":
            return gymnasium.make(name)
        env = gymnasium.make("CartPole-v1")  # returns float64, although its space is of float32
        return gymnasium.wrappers.TransformObservation(env, lambda x: x.astype(np.float64) / 3, env.observation_space)

    one, other = (SharedMemoryVectorEnv([make] * 2, autoreset_mode="SameStep") for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    for _ in range(30):
        one.step(one.action_space.sample())
    for number, log in enumerate(one._pool.episode_logs()):
        assert log is not None
        assert other._pool.repeat_episode(number, log).first_difference is None
    one.close()
    other.close()


def test_repeated_episodes_continue_equally() -> None:
    one, other = (SharedMemoryVectorEnv([make_env] * 3, n_workers=2) for _ in range(2))
    one.reset(seed=3)
    for actions in ACTIONS[:60]:
        one.step(actions)
    # A log taken during the step that follows an episode's end would omit the due reset.
    logs = one._pool.episode_logs()
    for number, log in enumerate(logs):
        assert log is not None
        assert other._pool.repeat_episode(number, log).first_difference is None
    again = other._pool.episode_logs()
    for log, copy in zip(logs, again, strict=True):
        assert log is not None
        assert copy is not None
        assert (log.checksums, len(log.calls)) == (copy.checksums, len(copy.calls))
    one.close()
    other.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_episodes_after_a_restart_are_repeated(mode: str) -> None:
    envs = SharedMemoryVectorEnv([make_env] * 3, autoreset_mode=mode, n_workers=2, restart="truncate")
    observations, _ = envs.reset(seed=3)
    for number, actions in enumerate(ACTIONS[:60]):
        if number in (7, 8, 33):
            worker = envs._pool.workers[number % 2]
            os.kill(worker.process.pid, signal.SIGKILL)
        observations, _, terminated, truncated, _ = envs.step(actions)
        if mode == "Disabled" and (terminated | truncated).any():
            observations, _ = envs.reset(options={"reset_mask": terminated | truncated})
        logs = envs._pool.episode_logs()
        if number in (6, 9, 20, 34, 50):
            for log, observation in zip(logs, observations, strict=True):
                check_repetition(log, observation)
    assert envs.timings.restarts == 3
    envs.close()


@pytest.mark.parametrize("kind", ["exception", "signal"])
def test_failure_of_a_worker_is_recorded_in_the_folder(kind: str, tmp_path: Path) -> None:
    envs = SharedMemoryVectorEnv([make_env, lambda: make_failing_env(kind)], recorder=tmp_path)
    envs.reset(seed=1)
    with pytest.raises(WorkerError, match="rl-ext replay") as raised:
        step_repeatedly(envs)
    (path,) = tmp_path.iterdir()
    assert str(path) in str(raised.value)
    capsule = read_capsule(path)
    assert (capsule.failure.kind, capsule.step, capsule.environment) == (kind, 5, 1)
    assert capsule.log.is_interrupted


def test_recorder_false_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.recording.capsule.CRASH_FOLDER", str(tmp_path))
    envs = SharedMemoryVectorEnv([make_failing_env], recorder=False)
    envs.reset(seed=1)
    assert envs._pool.episode_logs() == [None]
    with pytest.raises(WorkerError) as raised:
        step_repeatedly(envs)
    assert "rl-ext replay" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_full_folder_is_reported_and_kept(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"crash-{number}.rlx").touch()
    envs = SharedMemoryVectorEnv([make_failing_env], recorder=tmp_path)
    envs.reset()
    with pytest.raises(WorkerError, match="contains 10 files"):
        step_repeatedly(envs)
    assert len(list(tmp_path.iterdir())) == 10


def test_recorder_must_be_a_folder() -> None:
    with pytest.raises(StorageError, match=r"recorder='/dev/null/crashes' cannot be written to: /dev/null is a file"):
        SharedMemoryVectorEnv([make_env], recorder="/dev/null/crashes")


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
        self.place += float(action.sum()) * self.scale
        draw = self.np_random.random()
        self.was_real_done = draw < 0.2
        return self.observe(), 0.0, draw < 0.4, False, {}


def seeded_walk(size: int) -> Any:
    """Return an environment whose generator is that of its reference before the first seed."""
    walk = Walk(size)
    walk.np_random = np.random.default_rng(5)
    return walk


class InThisProcess:
    """A worker without a process, its log, and a recorder for each environment as reference."""

    def __init__(self, mode: Autoreset, size: int) -> None:
        walk = Walk(size)
        self.mode, self.layout = mode, MemoryLayout.from_spaces(2, walk.observation_space, walk.action_space)
        self.block, heads = bytearray(self.layout.size), [bytearray(vector_log.HEAD_BYTES) for _ in range(2)]
        self.worker = WorkerEnvironments(
            lambda message: None,
            lambda size: self.block,
            new_cells(),
            0,
            [lambda: seeded_walk(size)] * 2,
            mode,
            heads.__getitem__,
        )
        self.worker.execute("map", self.layout)
        delay = {Autoreset.SAME_STEP: 0, Autoreset.NEXT_STEP: 1}.get(mode)
        self.log = vector_log.VectorLog(heads, self.block, self.layout, reset_delay=delay, ended=ENDED)
        self.recorders = [EpisodeRecorder(seeded_walk(size)) for _ in range(2)]
        self.due: set[int] = set()

    def reset(self, seeds: list[int | None], number: int | None, place: float | None) -> None:
        """Reset one environment or both."""
        options = None if place is None else {"place": np.array([place])}
        requests = [(seed, options) if number in (None, n) else None for n, seed in enumerate(seeds)]
        for n, request in enumerate(requests):
            if request is not None:
                arguments = {"seed": request[0]} if options is None else {"seed": request[0], "options": options}
                self.log.begin_reset(n, arguments)
                self.recorders[n].reset(**arguments)
                self.due.discard(n)
        self.worker.execute("reset", requests)
        self.log.end()

    def call(self, number: int, name: str, data: Any) -> None:
        """Call an environment."""
        self.log.begin_call(number, name, data)
        self.worker.execute(name, [(number, data)])
        self.log.end()
        self.recorders[number].make_recorded_call(name, data)

    def step(self, actions: Any, *, shared: bool) -> None:
        """Step both environments."""
        if shared:
            self.layout.arrays(self.block)["action"][...] = actions
        self.log.begin_step(*([] if shared else [list(actions)]))
        self.worker.execute("step", None if shared else list(actions))
        self.log.end()
        for number, (recorder, action) in enumerate(zip(self.recorders, actions, strict=True)):
            if number in self.due:
                self.due.discard(number)
                recorder.reset()
            elif recorder.step(action)[2]:
                if self.mode is Autoreset.SAME_STEP:
                    recorder.reset()
                elif self.mode is Autoreset.NEXT_STEP:
                    self.due.add(number)

    def check(self) -> None:
        """Compare the logs with those of the recorders."""
        for number, recorder in enumerate(self.recorders):
            found, expected = self.log.episode_log(number), recorder.episode_log()
            assert (found is None) == (expected is None)
            if found is None or expected is None:
                continue
            assert (found.generators, found.settings) == (expected.generators, expected.settings)
            np.testing.assert_equal(found.calls, expected.calls)
            assert len(found.checksums) == len(expected.checksums)
            for (name, _), one, other in zip(found.calls, found.checksums, expected.checksums, strict=True):
                # The observation of the reset has replaced that of the step.
                assert one == other or (one is None and name == "step" and self.mode is Autoreset.SAME_STEP)


@settings(max_examples=60, deadline=None)
@given(mode=st.sampled_from(Autoreset), size=st.sampled_from([1, 3, 600]), data=st.data())
def test_logs_of_workers_equal_those_of_recorders(mode: Autoreset, size: int, data: st.DataObject) -> None:
    with mock.patch.object(vector_log, "_TRIM", 5):
        pair = InThisProcess(mode, size)
        pair.reset([0, 1], None, None)
        for operation in data.draw(
            st.lists(st.sampled_from(["step"] * 8 + ["reset", "set_attr", "env_method", "check"]))
        ):
            if operation == "step":
                seed, shared = data.draw(st.integers(0, 9)), data.draw(st.booleans())
                pair.step(np.random.default_rng(seed).normal(size=(2, 2)).astype(np.float32), shared=shared)
            elif operation == "reset":
                seeds = data.draw(st.lists(st.none() | st.integers(0, 3), min_size=2, max_size=2))
                pair.reset(seeds, data.draw(st.sampled_from([None, 0, 1])), data.draw(st.none() | st.just(2.0)))
            elif operation == "set_attr":
                pair.call(data.draw(st.integers(0, 1)), "set_attr", ("scale", float(data.draw(st.integers(0, 3)))))
            elif operation == "env_method":
                pair.call(data.draw(st.integers(0, 1)), "env_method", ("shift", (1.5,), {}))
            else:
                pair.check()
        pair.check()


@pytest.mark.parametrize("limit", ["steps", "bytes"])
def test_environment_that_never_ends_takes_limited_memory(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_log, "_TRIM", 5)
    if limit == "steps":
        monkeypatch.setattr(vector_log, "MAX_STEPS", 30)
    else:
        monkeypatch.setattr(vector_log, "_MAX_BYTES", 30 * 400)
    pair = InThisProcess(Autoreset.DISABLED, 1)
    pair.reset([0, 1], None, None)
    for number in range(100):
        pair.step(np.zeros((2, 2), np.float32), shared=number % 2 == 0)
        if number % 7 == 6:
            pair.call(1, "set_attr", ("was_real_done", True))
            pair.reset([None, None], 1, None)
        if number < 10:
            pair.check()
        pair.call(0, "env_method", ("shift", (1.0,), {}))
        assert len(pair.log._rows) <= 40
    assert pair.log.episode_log(0) is None
    assert len(pair.log._episodes[0].events) <= 40
    assert pair.log.episode_log(1) is not None


def test_caller_may_change_options_and_arguments_later() -> None:
    envs = SharedMemoryVectorEnv([lambda: Walk(1)] * 2, n_workers=1)
    options, value = {"place": np.array([3.0])}, np.array(2.0)
    envs.reset(seed=1, options=options)
    envs.set_attr("scale", [value, value])
    actions = np.ones((2, 2), np.float32)
    envs.step(actions)
    options["place"][0], value[...], actions[...] = 0, 0, 0
    log = envs._pool.episode_logs()[0]
    assert log is not None
    assert log.calls[0][1]["options"]["place"] == 3
    assert log.calls[1][1][1] == 2
    assert log.calls[2][1].tolist() == [1, 1]
    envs.close()


class DiesInReset(Adjustable):
    """Wrapper that dies in the second reset of all processes."""

    def __init__(self, env: gymnasium.Env[Any, Any], folder: Path) -> None:
        super().__init__(env)
        self.folder = folder

    def reset(self, **arguments: Any) -> Any:
        count = len(list(self.folder.iterdir()))
        (self.folder / str(count)).touch()
        if count == 1:
            os._exit(3)
        return self.env.reset(**arguments)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_episode_after_two_restarts_in_one_step_is_repeated(mode: str, tmp_path: Path) -> None:
    def make() -> Any:
        return DiesInReset(gymnasium.make("CartPole-v1"), tmp_path)

    envs = SharedMemoryVectorEnv(
        [make, make_env], autoreset_mode=mode, n_workers=2, restart="truncate", recorder=tmp_path
    )
    envs.reset(seed=3)
    os.kill(envs._pool.workers[0].process.pid, signal.SIGKILL)
    for actions in ACTIONS[:4]:
        observations = envs.step(actions[:2])[0]
    assert envs.timings.restarts == 2
    log = envs._pool.episode_logs()[0]
    assert log is not None
    assert [name for name, _ in log.calls].count("reset") == 1
    check_repetition(log, observations[0])
    envs.close()


def test_call_that_raised_ends_the_log_until_the_next_reset() -> None:
    env = EpisodeRecorder(make_failing_env())
    env.reset(seed=0)
    for _ in range(4):
        env.step(0)
    with pytest.raises(ValueError, match="planted"):
        env.step(0)
    log = env.episode_log()
    assert log is not None
    assert (log.steps, log.is_interrupted) == (5, True)
    env.step(0)
    assert env.episode_log() is None
    env.reset()
    env.step(1)
    log = env.episode_log()
    assert log is not None
    assert (log.steps, log.is_interrupted) == (1, False)


def test_copied_recorder_records_its_own_environment() -> None:
    env = EpisodeRecorder(make_env())
    env.reset(seed=0)
    env.reset()
    twin = deepcopy(env)
    first, *_ = twin.step(1)
    twin.reset()
    last, *_ = twin.step(0)
    check_repetition(twin.episode_log(), last)
    log = env.episode_log()
    assert log is not None
    assert log.steps == 0
    np.testing.assert_array_equal(env.step(1)[0], first)


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
    assert log is not None
    assert log.calls[-1] == ("step", 0)
