from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from rl_ext_core.factory import as_factory
from tests.core.factory import copying
from tests.core.factory.copying import NOT_SILENT, Line, Scaled, rollout


class Rising(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.level, self.episodes, self.lengths = 1, 0, [0]

    def reset(self, **options: Any) -> Any:
        self.episodes += 1
        self.level = 1 + self.episodes // 3
        self.lengths.append(0)
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.lengths[-1] += 1
        return observation, float(reward) * self.level, terminated, truncated or self.lengths[-1] > 4, info


def _make_cartpole() -> Any:
    return gym.make("CartPole-v1")


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "NormalizeObservation": (
        lambda: wrappers.NormalizeObservation(_make_cartpole()),
        lambda env: env.obs_rms.mean.tolist(),
    ),
    "NormalizeReward": (lambda: wrappers.NormalizeReward(_make_cartpole()), lambda env: env.return_rms.var),
    "RecordEpisodeStatistics": (
        lambda: wrappers.RecordEpisodeStatistics(_make_cartpole(), 5),
        lambda env: [env.episode_count, list(env.length_queue), env.length_queue.maxlen],
    ),
    "curriculum": (lambda: Rising(_make_cartpole()), lambda env: [env.level, env.episodes, env.lengths[:-1]]),
    "counter of steps": (Line, lambda env: env.ticks),
    "statistics below a wrapper": (
        lambda: Scaled(wrappers.NormalizeObservation(gym.make("copies/Line-v0"))),
        lambda env: env.env.obs_rms.var.tolist(),
    ),
}


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize("steps", [60, 3])
@pytest.mark.parametrize("name", KEPT)
def test_state_that_outlasts_resets_is_copied(name: str, steps: int, copy_outcome: Any) -> None:
    make, read = KEPT[name]
    env = make()
    rollout(env, steps)
    kept = repr(read(env))
    factory = as_factory(env)
    assert repr(read(factory())) == repr(read(env)) == kept
    assert copy_outcome(env, steps=25) == "copied"
    # Copies do not share the state.
    one, other = factory(), factory()
    rollout(one, 30)
    assert repr(read(other)) == kept
    assert repr(read(one)) != kept


def _reset(env: Any) -> None:
    env.reset(seed=5)


def _stop_midway(env: Any) -> None:
    rollout(env, 5)


def _finish_episode(env: Any) -> None:
    env.reset(seed=5)
    while not any(env.step(env.action_space.sample())[2:4]):
        pass


@pytest.mark.sample(quick=3, ci=10)
@pytest.mark.parametrize("stage", [lambda env: None, _reset, _stop_midway, _finish_episode])
@pytest.mark.parametrize(
    "make", [_make_cartpole, Line, lambda: Rising(_make_cartpole()), lambda: gym.make("FrozenLake-v1")]
)
def test_copy_of_an_environment_at_any_stage_starts_at_a_reset(make: Any, stage: Any, copy_outcome: Any) -> None:
    env = make()
    env.action_space.seed(1)
    stage(env)
    assert copy_outcome(env) == "copied"


@pytest.mark.parametrize("stage", [_stop_midway, _reset])
def test_copying_does_not_change_the_original(stage: Any) -> None:
    env, twin = (wrappers.NormalizeObservation(gym.make("copies/Line-v0")) for _ in range(2))
    for one in (env, twin):
        stage(one)
        one.unwrapped.gain = 2.0  # type: ignore[attr-defined]
    held = {name: id(value) for name, value in vars(env.unwrapped).items()}
    state, drawn = cloudpickle.dumps(vars(env.unwrapped)), random.getstate()
    as_factory(env)()
    assert {name: id(value) for name, value in vars(env.unwrapped).items()} == held
    assert cloudpickle.dumps(vars(env.unwrapped)) == state
    assert random.getstate() == drawn
    for _ in range(5):
        assert repr(env.step(1)) == repr(twin.step(1))


class Driven(gym.Env[Any, Any]):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    speed, body, bodies = 1.0, copying.Rewards(), {"a": copying.Rewards()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        own = [self.speed, self.body.bonus, self.bodies["a"].bonus]
        return np.array([*own, GRAVITY, sum(TABLE["k"]), scale(1.0)]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


GRAVITY, TABLE = 9.8, {"k": [1.0]}


def scale(x: float) -> float:
    return x


SHARED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "attribute of a class": ("speed", lambda patch: patch.setattr(Driven, "speed", 6.0)),
    "object of a class": ("body", lambda patch: patch.setattr(Driven.body, "bonus", 6.0)),
    "method of a class": ("reset", lambda patch: patch.setattr(Driven, "reset", Line.reset)),
    "global": ("GRAVITY", lambda patch: patch.setitem(globals(), "GRAVITY", 3.7)),
    "table": ("TABLE", lambda patch: patch.setitem(TABLE, "k", [1.0, 2.0])),
    "function": ("scale", lambda patch: patch.setitem(globals(), "scale", lambda x: x * 50)),
}


@pytest.mark.sample(quick=3)
@pytest.mark.parametrize("name", SHARED)
def test_changed_global_or_class_attribute_is_copied_or_reported(
    name: str, copy_outcome: Any, monkeypatch: Any
) -> None:
    env = Driven()
    path, change = SHARED[name]
    change(monkeypatch)
    assert copy_outcome(env, path) in NOT_SILENT


EPISODES = {"count": 0, "steps": 0}


class Paced(Line):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        EPISODES["count"] += 1
        EPISODES["steps"] = 0
        return super().reset(seed=seed)

    def push(self, action: Any) -> float:
        EPISODES["steps"] += 1
        return float(EPISODES["count"])


class Timed(Paced):
    """Environment that uses only the steps of an episode, which each reset restores."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        EPISODES["count"] = 0
        return result


@pytest.mark.parametrize(("cls", "expected"), [(Paced, "warned"), (Timed, "copied")])
def test_global_that_episodes_change_is_reported_unless_resets_restore_it(
    cls: Any, expected: str, copy_outcome: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "EPISODES", {"count": 0, "steps": 0})
    env = cls()
    for _ in range(3):
        rollout(env)
    assert copy_outcome(env, "EPISODES") == expected


# -- Objects that an environment shares with its module and its class.

UNSET = object()
LEVEL: dict[str, Any] = {"level": 1, "extra": [{"speed": 1}]}
VISITS: defaultdict[str, int] = defaultdict(int)
WEIGHTS = np.ones(3)


class Budget:
    def __init__(self) -> None:
        self.left = 10


BUDGET = Budget()


class Curriculum(gym.Env[Any, Any]):
    """Environment that refers to each shared object by two names."""

    START = object()
    history: ClassVar[list[int]] = []
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (6,), np.float64)

    def __init__(self) -> None:
        self.last, self.start = UNSET, self.START
        self.level, self.visits, self.weights, self.budget, self.seen = LEVEL, VISITS, WEIGHTS, BUDGET, self.history
        self.extra, self.options = LEVEL["extra"], {"first": LEVEL["extra"][0]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        LEVEL["level"] += 1
        VISITS["all"] += 1
        WEIGHTS[0] += 1
        BUDGET.left -= 1
        Curriculum.history.append(1)
        held = self.last, self.start, self.level, self.visits, self.weights, self.budget, self.seen
        shared = UNSET, self.START, LEVEL, VISITS, WEIGHTS, BUDGET, self.history
        same = float(all(one is other for one, other in zip(held, shared, strict=True)))
        return np.array([same, LEVEL["level"], VISITS["all"], WEIGHTS[0], BUDGET.left, len(self.history)]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


def _first_observation(packed: bytes) -> list[Any]:
    found: list[Any] = cloudpickle.loads(packed)().reset()[0].tolist()
    return found


def test_copy_refers_to_the_objects_of_its_own_modules_and_classes(spawned_pool: Any, caplog: Any) -> None:
    for env in (Curriculum(), wrappers.TimeLimit(Curriculum(), 5)):
        assert spawned_pool.submit(_first_observation, cloudpickle.dumps(as_factory(env))).result()[0] == 1.0
    copy = as_factory(Curriculum())()
    held = copy.last, copy.start, copy.level, copy.extra, copy.weights, copy.budget, copy.seen
    expected = UNSET, Curriculum.START, LEVEL, LEVEL["extra"], WEIGHTS, BUDGET, Curriculum.history
    assert [*map(id, held)] == [*map(id, expected)]
    assert not caplog.records
