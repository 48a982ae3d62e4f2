"""Copies draw from streams of their worker's own: different ones in different workers, the same ones each time."""

from __future__ import annotations

import concurrent.futures
import ctypes
import json
import random
import subprocess
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_ext_core.factory import _graft, streams, as_factory
from tests.core.factory.grafting import copied, different, made
from tests.core.factory.test_fingerprint import Holder


class Dice(random.Random):
    """A generator of somebody's own, with attributes."""

    def __init__(self, sides: int) -> None:
        super().__init__()
        self.sides = sides

    def __new__(cls, sides: int) -> Dice:
        return super().__new__(cls)


class Urn(np.random.Generator):
    """Likewise."""


def _world() -> Any:
    environment = gym.make("CartPole-v1")
    environment.reset(seed=1)
    environment.action_space.seed(2)
    numpy = np.random.default_rng(3)
    urn = Urn(np.random.PCG64(1))
    urn.label = "red"  # type: ignore[attr-defined]
    return Holder(
        environment=environment,
        numpy=numpy,
        again=[numpy, numpy.bit_generator],
        philox=np.random.Generator(np.random.Philox(5)),
        legacy=np.random.RandomState(4),
        python=random.Random(5),
        dice=Dice(6),
        urn=urn,
        torch=torch.Generator().manual_seed(6),
        system=random.SystemRandom(),
    )


def _drawn(world: Any) -> dict[str, Any]:
    """Draw from everything that a world holds, and from what belongs to the process."""
    library = ctypes.CDLL(None)
    return {
        "env.np_random": world.environment.unwrapped.np_random.random(),
        "space.sample": [int(world.environment.action_space.sample()) for _ in range(64)],
        "numpy": world.numpy.random(),
        "philox": world.philox.random(),
        "legacy": world.legacy.rand(),
        "normal": world.legacy.randn(),
        "python": world.python.random(),
        "dice": world.dice.random(),
        "urn": world.urn.random(),
        "torch": torch.rand(1, generator=world.torch).item(),
        "global python": random.random(),
        "global numpy": np.random.rand(),
        "global torch": torch.rand(1).item(),
        "rand": library.rand(),
        "random": library.random(),
        "lrand48": library.lrand48(),
    }


def _in_worker(packed: bytes, *, seed: int | None = 0, worker: int = 0, attempt: int = 0) -> Any:
    streams.seed_process(streams.sequence(seed, worker, attempt))
    return _graft.loads(packed)


def test_workers_draw_differently_from_every_generator_and_the_same_each_time() -> None:
    packed = _graft.dumps(_world())
    draws = [_drawn(_in_worker(packed, worker=worker)) for worker in range(3)]
    assert _drawn(_in_worker(packed, worker=2)) == draws[2]
    draws += [_drawn(_in_worker(packed, attempt=1)), _drawn(_in_worker(packed, seed=1))]
    for name in draws[0]:
        values = [str(draw[name]) for draw in draws]
        assert len(set(values)) == len(values), name


def test_generators_that_were_two_draw_differently_unless_they_were_alike() -> None:
    states = [np.random.RandomState(seed) for seed in (1, 2, 2)]
    one, two, three = _in_worker(_graft.dumps(states))
    first = [generator.rand() for generator in (one, two, three)]
    assert first[0] != first[1] == first[2]


def test_generators_of_the_process_are_those_of_the_worker_s() -> None:
    held = [random._inst, np.random.mtrand._rand, torch.default_generator]  # type: ignore[attr-defined]
    copies = _in_worker(_graft.dumps(held))
    assert all(copy is original for copy, original in zip(copies, held, strict=True))


def test_under_keeping_copies_go_on_exactly_where_the_original_is() -> None:
    world = _world()
    world.legacy.randn()  # keeps a second number in reserve
    world.python.gauss(0, 1)
    world.dice.seed(3)
    copy = copied(world)
    assert different(world, copy) == []
    assert copy.python.gauss(0, 1) == world.python.gauss(0, 1)
    mine, theirs = _drawn(world), _drawn(copy)
    of_process = {"global python", "global numpy", "global torch", "rand", "random", "lrand48"}
    assert {name for name in mine if mine[name] != theirs[name]} <= of_process


def test_emulators_draw_from_streams_of_their_own_too() -> None:
    import ale_py

    gym.register_envs(ale_py)
    environment = made("ALE/Breakout-v5", repeat_action_probability=0.5)
    environment.reset(seed=1)
    environment.action_space.seed(1)
    packed = _graft.dumps(environment)
    actions = [environment.action_space.sample() for _ in range(20)]

    def played(worker: int) -> bytes:
        copy = _in_worker(packed, worker=worker)
        copy.reset()
        return b"".join(copy.step(action)[0].tobytes() for action in actions)

    assert played(0) == played(0)
    assert played(0) != played(1)


@pytest.fixture(autouse=True)
def leave_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_stream", None)


class SlowToUnpickle(gym.Env[Any, Any]):
    """Takes a moment, as a simulator does, in which other threads go on."""

    def __init__(self) -> None:
        self.before, self.rng, self.after = Moment(), np.random.default_rng(5), Moment()


class Moment:
    def __reduce__(self) -> Any:
        return wait_a_moment, ()


def wait_a_moment() -> Moment:
    time.sleep(0.01)
    return Moment()


def test_copies_that_are_made_in_threads_draw_what_those_made_in_turns_draw() -> None:
    factory = as_factory(SlowToUnpickle(), verify=False)

    def draw(call: Any) -> list[float]:
        return [float(copy.rng.random()) for copy in call(lambda one: one(), factory.for_workers(8, seed=0))]

    one_by_one = draw(map)
    assert len(set(one_by_one)) == 8
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert draw(pool.map) == one_by_one


ASKING = """
import importlib.util, json, sys
import numpy as np
from rl_ext_core.factory import streams

streams.seed_process(np.random.SeedSequence(3))
for _ in range(int(sys.argv[1])):
    assert importlib.util.find_spec("torch") is not None  # as transformers and many others ask
import torch
drawn = torch.rand(3).tolist()
assert importlib.util.find_spec("torch") is not None
torch.manual_seed(7)
print(json.dumps([drawn, [repr(one) for one in sys.meta_path if "SeedsTorch" in repr(one)]]))
"""


@pytest.mark.slow
def test_asking_whether_torch_is_installed_leaves_its_seed_alone() -> None:
    ran = [
        subprocess.run([sys.executable, "-c", ASKING, asked], capture_output=True, text=True, check=True).stdout
        for asked in ("0", "2")
    ]
    assert ran[0] == ran[1]
    assert json.loads(ran[0])[1] == []
