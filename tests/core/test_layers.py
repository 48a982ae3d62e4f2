from __future__ import annotations

import collections
import dataclasses
import enum
import io
import os
import pickle
import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.layers import layer_states, restore_layers, unsaved_attributes


class Helper:
    def __init__(self, level: Any) -> None:
        self.level = level


@dataclasses.dataclass(frozen=True)
class Frozen:
    level: int


class Stage(enum.Enum):
    EASY, HARD = 1, 2


class Lasting(gymnasium.Env):
    """Environment with attributes of all kinds, which each episode changes."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.array, self.names, self.members = np.zeros(2), ["a"], {1}
        self.helper = Helper(self.array)
        self.table: dict[str, Any] = {"count": 0, "double": lambda value: 2 * value, "names": self.names}
        self.weights, self.noise = torch.zeros(2), torch.Generator().manual_seed(0)
        self.random, self.last, self.big = np.random.default_rng(), 0.0, np.zeros(300_000)
        self.recent: collections.deque[Any] = collections.deque(maxlen=2)
        self.tasks, self.counts = [Helper(0), Helper(0)], collections.defaultdict(int)
        self.settings = {"port": os.urandom(4), "folder": f"/tmp/{os.urandom(4).hex()}"}
        self.port = random.SystemRandom().random()

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        self.helper.level += 1
        self.table["names"].append("b")
        self.members.add(len(self.names))
        self.table["count"] = self.table["double"](self.table["count"]) + 1
        self.weights += torch.rand(2, generator=self.noise)
        self.recent.append(len(self.names))
        self.counts["resets"] += 1
        self.tasks[1].level += 1
        self.last, self.big[7] = self.random.random(), len(self.names)
        return 0, {}


def values_of(env: Any) -> list[Any]:
    levels = [*env.array, *env.helper.level, *env.weights.tolist(), *(task.level for task in env.tasks)]
    numbers = [env.table["count"], env.last, env.big[7], env.random.random()]
    return [levels, numbers, env.names, env.members, list(env.recent), env.counts]


def test_attributes_are_restored_in_place_and_those_of_the_process_stay() -> None:
    envs = [EpisodeRecorder(Lasting()) for _ in range(2)]
    for _ in range(5):
        envs[0].reset()
    other = envs[1].unwrapped
    shared = other.array, other.names, other.members, other.table, other.weights, other.settings
    before = dict(other.settings), other.port
    states = pickle.loads(pickle.dumps(layer_states(envs[0])))
    assert unsaved_attributes(states) == []
    assert restore_layers(envs[1], states) == []
    assert values_of(other) == values_of(envs[0].unwrapped)
    after = other.array, other.names, other.members, other.table, other.weights, other.settings
    assert all(one is two for one, two in zip(shared, after, strict=True))
    assert other.helper.level is other.array
    assert other.table["names"] is other.names
    assert (other.settings, other.port) == before


def count_calls() -> Any:
    numbers = 0

    def count() -> None:
        nonlocal numbers
        numbers += 1

    return count


class Tagged(list[int]):
    tag = 0


def change_one_of_two(value: Any, change: Any) -> tuple[list[Any], list[str], list[str]]:
    """Change an attribute of one of two environments, restore it in the other, and return what each step reports."""

    class Changing(Lasting):
        def __init__(self) -> None:
            super().__init__()
            self.value = value()

    envs = [EpisodeRecorder(Changing()) for _ in range(2)]
    for env in envs:
        env.reset()
    always = [name for name in unsaved_attributes(layer_states(envs[0])) if "generator" in name]
    assert unsaved_attributes(layer_states(envs[0])) == always
    change(envs[0].unwrapped)
    states = pickle.loads(pickle.dumps(layer_states(envs[0])))
    return [env.unwrapped for env in envs], unsaved_attributes(states), restore_layers(envs[1], states)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (lambda: None, lambda env: setattr(env, "value", 3.5)),
        (lambda: (1, [2]), lambda env: env.value[1].append(3)),
        (lambda: {"a": 1, "b": 2}, lambda env: env.value.pop("a")),
        (lambda: {"a": 1}, lambda env: env.value.clear()),
        (lambda: {}, lambda env: env.value.update(a=3)),
        (lambda: {1: 2}, lambda env: env.value.update({1: 3, 4: [5]})),
        (lambda: collections.defaultdict(lambda: 0), lambda env: env.value.update(a=2)),
        (lambda: Stage.EASY, lambda env: setattr(env, "value", Stage.HARD)),
        (lambda: np.zeros(3), lambda env: setattr(env, "value", np.ones(5))),
    ],
)
def test_values_are_restored(value: Any, change: Any) -> None:
    envs, unsaved, problems = change_one_of_two(value, change)
    assert unsaved == problems == []
    np.testing.assert_equal(envs[1].value, envs[0].value)
    assert type(envs[1].value) is type(envs[0].value)


@pytest.mark.parametrize(
    ("value", "change", "text"),
    [
        (lambda: [Helper(0)], lambda env: env.value.append(Helper(1)), "Changing.value"),
        (lambda: [Helper(0)] * 2, lambda env: env.value.pop(), "Changing.value"),
        (lambda: Helper(0), lambda env: setattr(env, "value", Lasting()), "Changing.value"),
        (lambda: Frozen(1), lambda env: setattr(env, "value", Frozen(2)), "Changing.value"),
        (
            random.SystemRandom().random,
            lambda env: setattr(env, "value", 3.0),
            "construction has set Changing.value otherwise",
        ),
    ],
)
def test_values_that_construction_has_built_otherwise_are_named(value: Any, change: Any, text: str) -> None:
    envs, _, problems = change_one_of_two(value, change)
    assert text in " ".join(problems)
    assert vars(envs[1])["value"] is not vars(envs[0])["value"]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (count_calls, lambda env: env.value()),
        (lambda: {Helper(1): 1}, lambda env: env.value.update(dict.fromkeys(env.value, 2))),
        (lambda: bytearray(b"a"), lambda env: env.value.append(1)),
        (lambda: np.array([None]), lambda env: env.value.fill(1)),
        (lambda: np.zeros(3_000_000), lambda env: env.value.fill(1)),
        (lambda: iter([1, 2, 3]), lambda env: next(env.value)),
        (lambda: (number for number in range(9)), lambda env: next(env.value)),
        (lambda: np.random.PCG64(), lambda env: env.value.random_raw()),
        (lambda: io.StringIO("a\nb\n"), lambda env: env.value.readline()),
        (lambda: len, lambda env: setattr(env, "value", max)),
        (lambda: Tagged(), lambda env: setattr(env.value, "tag", 1)),
    ],
)
def test_attributes_that_cannot_be_saved_are_named_once_they_change(value: Any, change: Any) -> None:
    _, unsaved, problems = change_one_of_two(value, change)
    assert [name.partition(" (")[0].partition("[")[0] for name in unsaved] == ["Changing.value"]
    assert "Changing.value" in " ".join(problems)


# Importing Box2D under warnings as errors kills the process.
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_addresses_in_c_libraries_are_not_compared() -> None:
    pytest.importorskip("Box2D")
    envs = [EpisodeRecorder(gymnasium.make("LunarLander-v3")) for _ in range(2)]
    envs[0].reset(seed=1)
    envs[0].step(0)
    log = envs[0].episode_log()
    assert log is not None
    envs[1].repeat(log)
    states = layer_states(envs[0])
    assert unsaved_attributes(states) == restore_layers(envs[1], states) == []
