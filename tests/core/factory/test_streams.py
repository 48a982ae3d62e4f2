from __future__ import annotations

import ctypes
import functools
import json
import pickle
import random
import sys
import types
from collections import deque
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.factory import as_factory
from tests import programs
from tests.core.factory.copying import Line, rollout


class Dice(random.Random):
    def __new__(cls, sides: int) -> Dice:
        return super().__new__(cls)

    def __init__(self, sides: int) -> None:
        super().__init__(3)
        self.sides = sides


NOISE, LEGACY = np.random.default_rng(42), np.random.RandomState(42)
OPTIONS = gym.spaces.Dict(speed=gym.spaces.Box(0, 1, (1,)))


class Shared(gym.Env[Any, Any]):
    action_space, observation_space = gym.spaces.Discrete(10**9), gym.spaces.Box(-np.inf, np.inf, (16,), np.float64)
    dice, urn = random.Random(42), np.random.Philox(42)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        library = ctypes.CDLL(None)
        process = [random.random(), np.random.uniform(), library.rand(), library.random(), library.lrand48()]
        module = [NOISE.normal(), LEGACY.standard_normal(), OPTIONS.sample()["speed"][0]]
        own = [self.dice.gauss(0, 1), self.urn.random_raw(), self.action_space.sample(), self.np_random.random()]
        return np.array([*process, *module, *own, *self.draw_from_instance()], float), {}

    def draw_from_instance(self) -> list[float]:
        return []

    def step(self, action: Any) -> Any:
        return self.reset()[0], float(self.reset()[0][0]), False, False, {}


class Drawing(Shared):
    def __init__(self) -> None:
        import torch

        self.generator, self.philox = np.random.default_rng(3), np.random.Generator(np.random.Philox(5))
        self.legacy, self.python, self.own = np.random.RandomState(4), random.Random(5), Dice(6)
        self.torch = torch.Generator().manual_seed(6)
        self.noise = gym.spaces.Box(0, 1, (1,))
        hidden = np.random.default_rng(7)
        self.closure, self.method = lambda: hidden.random(), random.Random(8).random
        self.partial, self.queue = functools.partial(Dice(9).uniform, 0, 1), deque([np.random.default_rng(10)])

    def draw_from_instance(self) -> list[float]:
        import torch

        drawn = [self.generator.random(), self.philox.random(), self.legacy.randn(), self.python.random()]
        drawn += [torch.rand(1, generator=self.torch).item(), torch.rand(1).item(), self.noise.sample()[0]]
        drawn += [self.closure(), self.method(), self.partial(), self.queue[0].random()]
        return [*drawn, self.own.random()]


def step_in_other_processes(*factories: Any) -> list[Any]:
    program = (
        "import json, pickle, sys; make = pickle.loads(bytes.fromhex(sys.argv[1])); env = make(); "
        "print(json.dumps([env.reset()[0].tolist(), env.step(0)[1]]))"
    )
    started = [programs.start(program, "torch", cloudpickle.dumps(factory).hex()) for factory in factories]
    return [json.loads(each.wait().stdout) for each in started]


@pytest.mark.sample(quick=1, ci=2)
@pytest.mark.parametrize("make", [Drawing, lambda: Shared], ids=["instance", "class"])
def test_draws_of_every_generator_differ_between_workers_and_repeat_with_a_seed(make: Any) -> None:
    factory = as_factory(make())
    first, second = factory.for_workers(np.int64(2), seed=np.int64(3))
    sources = (
        first,
        pickle.loads(pickle.dumps(second)),
        second.for_attempt(1),
        factory.for_workers(2, seed=4)[1],
        second,
    )
    *different, repeated = step_in_other_processes(*sources)
    assert repeated == different[1]
    for number, drawn in enumerate(zip(*(seen[0] for seen in different), strict=True)):
        assert len(set(drawn)) == len(different), number


SCRIPT = """
import gymnasium, numpy

NOISE, OPTIONS = numpy.random.default_rng(42), gymnasium.spaces.Box(0, 1, (1,))

def draw():
    return [NOISE.random(), OPTIONS.sample()[0]]

class Base(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Box(0, 1, (3,))
    urn = numpy.random.default_rng(42)

class Env(Base):
    def reset(self, *, seed=None, options=None):
        return numpy.array([*draw(), self.urn.random()]), {}

    def step(self, action):
        return self.reset()[0], float(self.reset()[0][0]), False, False, {}

def make():
    return Env()
"""


@pytest.mark.parametrize("source", ["make", "Env", "Env()"])
def test_draws_of_generators_of_a_script_differ_between_workers_and_repeat_with_a_seed(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = types.ModuleType("script_of_a_user")  # Workers cannot import it, so it is pickled by value.
    monkeypatch.setitem(sys.modules, script.__name__, script)
    exec(SCRIPT, vars(script))
    first, second = as_factory(eval(source, vars(script))).for_workers(2, seed=3)
    (one, _), (other, _), repeated = step_in_other_processes(first, second, second)
    assert repeated[0] == other
    assert all(mine != its for mine, its in zip(one, other, strict=True))


class Borrowing(Shared):
    def __init__(self) -> None:
        self.noise = NOISE


def test_generators_of_this_process_are_not_changed() -> None:
    generators = Shared.dice.getstate, lambda: NOISE.bit_generator.state, lambda: Shared.urn.state
    before = [repr(state()) for state in generators]
    for source in (Shared(), Borrowing(), Shared):
        as_factory(source).for_workers(1, seed=0)[0]()
        as_factory(source)()
    assert [repr(state()) for state in generators] == before
    assert Shared.action_space._np_random is None
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.uniform()
    random.seed(1)
    np.random.seed(1)
    for make in as_factory(Line()).for_workers(3, seed=0):
        make().reset()
    assert (random.random(), np.random.uniform()) == expected


class Group(gym.Env[Any, Any]):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-9, 9, (4, 4))

    def __init__(self) -> None:
        made = [gym.make("CartPole-v1") for _ in range(4)]
        self.parts, self.named, self.manager = made[:2], {"third": made[2]}, types.SimpleNamespace(parts=(made[3],))
        self.noise = gym.spaces.Box(0, 1, (4,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        parts = [*self.parts, *self.named.values(), *self.manager.parts]
        return np.stack([part.reset()[0] + self.noise.sample() for part in parts]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.parametrize(
    "make",
    [
        Group,
        lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"),
        lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"),
        lambda: gym.wrappers.vector.RecordEpisodeStatistics(gym.vector.SyncVectorEnv([Group, Group])),
    ],
    ids=["lists", "SyncVectorEnv", "CartPoleVectorEnv", "wrapped"],
)
def test_environments_inside_environments_differ_and_repeat_with_a_seed(make: Any) -> None:
    for source in (make(), make):
        [one, other], repeated = (
            [factory().reset()[0].tolist() for factory in as_factory(source, verify=False).for_workers(2, seed=7)]
            for _ in range(2)
        )
        assert [one, other] == repeated
        parts = [str(row) for seen in (one, other) for row in np.reshape(seen, (-1, 4)).tolist()]
        assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("lived", [False, True])
def test_copies_in_this_process_differ_and_repeat_with_a_seed(lived: bool) -> None:
    env: Any = gym.make("copies/Line-v0")
    if lived:
        rollout(env)
        env.unwrapped.gain = 2.0
    factory = as_factory(env)
    one, other = (rollout(make(), seed=None) for make in factory.for_workers(2, seed=1))
    assert one != other
    assert [rollout(make(), seed=None) for make in factory.for_workers(2, seed=1)] == [one, other]
    assert rollout(factory(), seed=None) != rollout(factory(), seed=None)
    assert [rollout(make(), seed=9) for make in factory.for_workers(2, seed=1)] == [rollout(env, seed=9)] * 2
