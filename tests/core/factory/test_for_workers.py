"""Factories for several workers: settings of their own, random streams of their own."""

from __future__ import annotations

import ctypes
import pickle
import random
import subprocess
import sys
import weakref
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import as_factory
from tests.core.factory.test_fingerprint import Holder
from tests.core.factory.worlds import Line, rollout


class Drawing(gym.Env[Any, Any]):
    """Draws from every generator that there is, when it is made and later."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)

    def __init__(self) -> None:
        self.first = self._draw()

    def _draw(self) -> list[float]:
        word = ctypes.CDLL(None).rand() / 2**31
        return [random.random(), np.random.uniform(), word]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.array([*self.first, *self._draw()]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], float(self.np_random.uniform()), False, False, {}


def in_another_process(*factories: Any) -> list[Any]:
    """Build environments in a process each, and give what they return."""
    program = (
        "import pickle, sys; make = pickle.load(sys.stdin.buffer); env = make(); "
        "seen = [env.reset()[0].tolist(), env.step(0)[1]]; sys.stdout.buffer.write(pickle.dumps(seen))"
    )
    running = []
    for factory in factories:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(cloudpickle.dumps(factory))
        process.stdin.close()
        running.append(process)
    seen = []
    for process in running:
        assert process.stdout is not None
        seen.append(pickle.loads(process.stdout.read()))
        process.stdout.close()
        assert process.wait() == 0
    return seen


@pytest.mark.sample
@pytest.mark.parametrize("source", [Drawing(), Drawing], ids=["instance", "class"])
def test_workers_draw_differently_from_every_generator_and_the_same_again_with_a_seed(source: Any) -> None:
    factory = as_factory(source)
    one, other = factory.for_workers(2, seed=3)
    first, second, again, anew = in_another_process(
        one, other, factory.for_workers(np.int64(2), seed=np.int64(3))[1].again(0), other.again(1)
    )
    assert again == second  # the same worker
    assert anew[1] != second[1]  # it is started anew
    pairs = list(zip(np.ravel(first[0]), np.ravel(second[0]), strict=True))
    drawn_when_made = 3 if isinstance(source, Drawing) else 0
    assert all(one != other for one, other in pairs[drawn_when_made:])
    assert first[1] != second[1]


class Gone:
    """Deleted while a weak proxy of it stays."""


GONE = weakref.proxy(Gone())
NOISE = np.random.default_rng(42)
LEGACY = np.random.RandomState(42)


class Shared(gym.Env[Any, Any]):
    """Draws from generators and spaces of its module and its class alone."""

    action_space = gym.spaces.Discrete(10**9)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    dice, urn = random.Random(42), np.random.Philox(42)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        own = [NOISE.normal(), LEGACY.standard_normal(), self.dice.gauss(0, 1), self.urn.random_raw() / 2**64]
        return np.array([*own, self.action_space.sample(), OPTIONS.sample()["speed"][0]]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], self.reset()[0][0], False, False, {}


OPTIONS = gym.spaces.Dict(speed=gym.spaces.Box(0, 1, (1,)))


@pytest.mark.sample(quick=1, ci=2)
@pytest.mark.parametrize("source", [Shared(), Shared], ids=["instance", "class"])
def test_generators_of_modules_and_classes_differ_by_worker_and_repeat_with_a_seed(source: Any) -> None:
    first, second = as_factory(source).for_workers(2, seed=3)
    one, other, again, anew = in_another_process(first, second, pickle.loads(pickle.dumps(second)), second.again(1))
    assert again == other
    for left, right in ((one, other), (other, anew)):
        assert all(a != b for a, b in zip(left[0], right[0], strict=True))


def test_generators_of_modules_and_classes_of_this_process_are_left_alone() -> None:
    generators = Shared.dice.getstate, lambda: NOISE.bit_generator.state, lambda: Shared.urn.state
    before = [repr(state()) for state in generators]
    for source in (Shared(), Shared):
        as_factory(source).for_workers(1, seed=0)[0]()
    assert [repr(state()) for state in generators] == before
    assert Shared.action_space._np_random is None


class Group(gym.Env[Any, Any]):
    """Holds environments in a list, in a dict and in an object that is not an environment."""

    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-9, 9, (4, 4))

    def __init__(self) -> None:
        made = [gym.make("CartPole-v1") for _ in range(4)]
        self.parts, self.named, self.manager = made[:2], {"third": made[2]}, Holder(parts=(made[3],))
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
        [one, other], again = (
            [factory().reset()[0].tolist() for factory in as_factory(source, verify=False).for_workers(2, seed=7)]
            for _ in range(2)
        )
        assert [one, other] == again
        parts = [str(row) for seen in (one, other) for row in np.reshape(seen, (-1, 4)).tolist()]
        assert len(set(parts)) == len(parts)


def test_generators_of_this_process_are_left_alone() -> None:
    factory = as_factory(Line())
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.uniform()
    random.seed(1)
    np.random.seed(1)
    for make in factory.for_workers(3, seed=0):
        rollout(make(), None)
    assert (random.random(), np.random.uniform()) == expected


@pytest.mark.parametrize("lived", [False, True])
def test_copies_in_this_process_draw_differently_and_reproducibly(lived: bool) -> None:
    env = gym.make("worlds/Line-v0")
    if lived:
        rollout(env)
        env.unwrapped.gain = 2.0
    factory = as_factory(env)
    one, other = (rollout(make(), None) for make in factory.for_workers(2, seed=1))
    assert one != other
    assert [rollout(make(), None) for make in factory.for_workers(2, seed=1)] == [one, other]
    assert rollout(factory(), None) != rollout(factory(), None)


def test_a_seed_of_a_reset_rules() -> None:
    env = Line()
    assert [rollout(make(), 9) for make in as_factory(env).for_workers(2, seed=1)] == [rollout(env, 9)] * 2


def test_each_worker_has_its_overrides_and_its_number() -> None:
    factories = as_factory(Line()).for_workers(3, overrides=[{"gain": 1.0}, {"gain": 2.0}, {}])
    assert [factory.worker for factory in factories] == [0, 1, 2]
    assert [dict(factory.overrides) for factory in factories] == [{"gain": 1.0}, {"gain": 2.0}, {}]
    assert [pickle.loads(pickle.dumps(factory))().gain for factory in factories] == [1.0, 2.0, 1.0]
    assert factories[1](gain=6.0).gain == 6.0
    assert as_factory(Line).worker is None


def test_decisions_are_handed_out_and_applied_where_the_environment_is_built() -> None:
    decision = resolve("cpu")
    factories = as_factory(lambda device="?": (device, Line())).for_workers(2, devices=decision)
    assert [factory.decision for factory in factories] == [decision, decision]
    assert [factory()[0] for factory in factories] == ["cpu", "cpu"]
    assert [factory.decision for factory in as_factory(Line).for_workers(2, devices=[decision] * 2)] == [decision] * 2
    assert as_factory(Line).for_workers(1)[0].decision is None


def test_round_robin_decides_for_each_worker() -> None:
    factories = as_factory(Line()).for_workers(2, devices="round-robin")
    assert all(isinstance(factory.decision, Decision) for factory in factories)


WRONG: list[tuple[str, list[Any], type[Exception], str]] = [
    ("num_workers", [0, -1, 2.0, True, "2", None], InvalidArgumentError, r"Write for_workers\(2\)"),
    ("seed", [-1, 1.5, "a", True], InvalidArgumentError, r"Write for_workers\(2, seed=0\)"),
    ("overrides", [{"gain": 1.0}, [1, 2], "ab", 5, [{}, None]], InvalidTypeError, r"write overrides=\[dict\(name"),
    ("devices", ["cuda", 5, ["cpu", "cpu"]], InvalidArgumentError, r"Write devices=\[resolve\("),
    ("overrides", [[{}]], InvalidArgumentError, "1 entries for 2 workers; expected one for each. Write overrides="),
    ("devices", [[resolve("cpu")] * 3], InvalidArgumentError, "3 entries for 2 workers; expected one for each. Write "),
]


@pytest.mark.parametrize(("name", "values", "error", "said"), WRONG)
def test_what_is_wrong_is_named_with_the_line_to_write(
    name: str, values: list[Any], error: type[Exception], said: str
) -> None:
    for value in values:
        with pytest.raises(error, match=said) as caught:
            as_factory(Line).for_workers(**{"num_workers": 2, name: value})
        assert f"{name}={value!r}" in str(caught.value) or f"{name} has" in str(caught.value)


def test_what_is_for_a_worker_keeps_what_is_not_said_anew() -> None:
    [_, second] = as_factory(Line).for_workers(2, seed=3, overrides=[{"gain": 2.0}, {"gain": 5.0}])
    [_, again] = second.for_workers(2)
    assert again.overrides == {"gain": 5.0}
    assert again().gain == 5.0
    assert again._worker is not None
    assert again._worker.entropy == 3
    [other] = second.for_workers(1, overrides=[{"length": 7}])
    assert other.overrides == {"gain": 5.0, "length": 7}
