"""What ``as_factory`` takes, what comes out of it, and where its factories may be used."""

from __future__ import annotations

import functools
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rl_ext_core.factory import as_factory
from tests.core.factory.copying import Line, Scaled, life, use
from tests.core.factory.main_script import DEFINED, USED, in_pools
from tests.ways import run_as


def make_line(gain: float = 2.0) -> Line:
    return Line(gain)


class Maker:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __call__(self) -> Line:
        return Line(self.gain)

    def make(self) -> Line:
        return Line(self.gain)


SOURCES = [
    pytest.param(lambda: Line(2.0), "callable", id="lambda"),
    pytest.param(make_line, "callable", id="function"),
    pytest.param(functools.partial(Line, 2.0), "callable", id="partial"),
    pytest.param(Maker(2.0), "callable", id="object"),
    pytest.param(Maker(2.0).make, "callable", id="method"),
    pytest.param(Line, "class", id="class"),
    pytest.param("copies/Line-v0", "id", id="id"),
    pytest.param("tests.core.factory.copying:copies/Line-v0", "id", id="id with its module"),
    pytest.param(gym.spec("copies/Line-v0"), "spec", id="specification"),
    pytest.param(Line(2.0), None, id="instance"),
    pytest.param(gym.make("copies/Line-v0"), None, id="made instance"),
    pytest.param(Scaled(Line(2.0), 3.0), None, id="wrapped instance"),
]


@pytest.mark.parametrize(("source", "origin"), SOURCES)
def test_everything_that_builds_an_environment_is_taken(source: Any, origin: str | None) -> None:
    factory = as_factory(source)
    assert origin in (None, factory.origin)
    env = source if origin is None else factory()
    one, other = factory(), factory()
    assert len({id(env.unwrapped), id(one.unwrapped), id(other.unwrapped)}) == 3
    assert life(pickle.loads(pickle.dumps(factory))()) == life(env)
    one.unwrapped.rewards.bonus, one.unwrapped.weights[0] = 50.0, 9.0
    assert (other.unwrapped.rewards.bonus, other.unwrapped.weights[0]) == (1.0, 1.0)
    assert (env.unwrapped.rewards.bonus, env.unwrapped.weights[0]) == (1.0, 1.0)


def test_nothing_is_built_or_stepped_in_this_process(tmp_path: Path) -> None:
    code = f"""
import os
from rl_ext_core.factory import as_factory
from tests.core.factory.copying import Line
class Noting(Line):
    def __init__(self):
        super().__init__(); self._note("made")
    def _note(self, what):
        with open({str(tmp_path / "notes")!r}, "a") as file: file.write(f"{{os.getpid()}} {{what}}\\n")
    def reset(self, **options):
        self._note("reset"); return super().reset(**options)
    def step(self, action):
        self._note("step"); return super().step(action)
if __name__ == "__main__":
    as_factory(Noting()), as_factory(Noting), as_factory(lambda: Noting())
    print(os.getpid())
"""
    own = run_as("script", code, tmp_path).strip()
    notes = (tmp_path / "notes").read_text().splitlines()
    here = {note.partition(" ")[2] for note in notes if note.startswith(f"{own} ")}
    assert not here & {"reset", "step", "close"}


def test_factory_is_taken_as_it_is() -> None:
    factory = as_factory(make_line)
    assert as_factory(factory) is factory
    assert repr(as_factory(Line)) == "EnvFactory('lambda: Line()', origin='class')"
    assert repr(as_factory(Line).for_workers(2)[1]) == "EnvFactory('lambda: Line()', origin='class', worker=1)"


def test_live_instance_stays_in_this_process() -> None:
    env = Line()
    factory = as_factory(env)
    assert factory.live is env
    assert factory.then(Scaled).live is env
    assert all(worker.live is env for worker in factory.for_workers(2))
    assert pickle.loads(pickle.dumps(factory)).live is None
    assert as_factory(make_line).live is None


def test_then_adapts_what_is_built() -> None:
    factory = as_factory(make_line).then(Scaled).then(functools.partial(Scaled, scale=5.0))
    assert factory.adapted
    env = pickle.loads(pickle.dumps(factory))()
    assert (env.scale, env.env.scale, env.unwrapped.gain) == (5.0, 2.0, 2.0)
    assert not as_factory(make_line).adapted
    assert as_factory("CartPole-v1").then(Scaled, preload=["json"]).preload == ("gymnasium", "json")


def test_function_over_an_environment_builds_copies_of_that() -> None:
    env = Line(4.0)
    factory = as_factory(lambda: env)
    one, other = factory(), factory()
    assert len({id(one), id(other), id(env)}) == 3
    assert life(one) == life(other) == life(env)


@pytest.mark.sample
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_every_start_method_finds_the_same(start_method: str) -> None:
    env = Line()
    env.gain = 3.0
    assert as_factory(env, start_method=start_method)().gain == 3.0


def test_as_factory_works_in_a_thread_and_on_environments_without_driver() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(as_factory(Line(3.0))))
    thread.start()
    thread.join()
    assert found[0]().gain == 3.0
    env = Turned()
    env.angle = 0.5
    assert as_factory(env)().angle in (0.5, 0.0)  # 0.0: where a reset would put it


class Turned:
    """Resets and steps, and is of no kind that is known."""

    def __init__(self) -> None:
        self.angle = 0.0

    def reset(self) -> float:
        self.angle = 0.0
        return self.angle

    def step(self, action: float) -> float:
        self.angle += action
        return self.angle


class Loud(Line):
    """One that prints and warns."""

    def step(self, action: Any) -> Any:
        print("a step")  # noqa: T201 (what it is for)
        return super().step(action)


scale = 2.0  # a global, and an attribute of what the function below reads


class _Gone:
    """What a weak proxy stood for."""


class HoldsProxy(gym.Wrapper[Any, Any, Any, Any]):
    held = weakref.proxy(_Gone())

    def reset(self, **options: Any) -> Any:
        _ = GONE
        return self.env.reset(**options)


GONE = HoldsProxy.held


def _reads_an_attribute_like_a_global() -> Any:
    def read(observation: Any) -> Any:
        return observation.scale if hasattr(observation, "scale") else observation

    return gym.wrappers.TransformObservation(gym.make("CartPole-v1"), read, None)


@pytest.mark.parametrize("make", [Loud, _reads_an_attribute_like_a_global, lambda: HoldsProxy(gym.make("CartPole-v1"))])
def test_odd_environments_are_copied(make: Any, judge: Any) -> None:
    env = make()
    use(env)
    assert judge(env) == "copied"


def changed_line() -> Any:
    env = gym.wrappers.TimeLimit(Line(), 20)
    env.unwrapped.rewards.bonus = 4.0  # type: ignore[attr-defined]
    return env


def _rollouts(venv: Any) -> list[Any]:
    venv.action_space.seed(1)
    seen: list[Any] = list(venv.reset(seed=3))
    for _ in range(30):
        seen += venv.step(venv.action_space.sample())
    venv.close()
    return seen


@pytest.mark.sample
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_vector_environments_of_gymnasium_take_the_factories(method: str) -> None:
    gc.collect()  # what other tests have left of libraries that a forked process does not tolerate
    env = changed_line()
    ours = _rollouts(AsyncVectorEnv(as_factory(env).for_workers(2), context=method))
    np.testing.assert_equal(ours, _rollouts(SyncVectorEnv([changed_line] * 2)))
    env.reset()
    env.step(0)  # gymnasium has closed the environment that it built for its spaces, not this one


ASYNC = in_pools("", "[gym.vector.AsyncVectorEnv]", "envs.reset(seed=0)[0].tolist()")


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("way", ["-c", "notebook", "script", "stdin"])
def test_classes_of_the_main_module_travel_and_stay_as_they_are(way: str, tmp_path: Path) -> None:
    assert "as expected" in run_as(way, DEFINED + USED + ASYNC, tmp_path)


SCRIPT = """
import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv
from rl_ext_core.factory import as_factory

UNSET, LEVEL = object(), {"level": 1}

class Own(gym.Env):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (4,))
    offset = 1.0
    def __init__(self, gain=1.0):
        self.gain, self.last, self.level = gain, UNSET, LEVEL
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        LEVEL["level"] += 1
        shared = [self.last is UNSET, self.level["level"]]
        return self.observation_space.low * 0 + [self.gain, self.offset, *shared], {}
    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}

def main():
    class Local(Own): ...
    gym.register("Own-v0", entry_point=Own)
    Own.offset, LEVEL["level"] = 5.0, 4
    env, local = Own(3.0), Local(4.0)
    env.gain = 4.0
    sources = env, local, lambda: Own(4.0), gym.make("Own-v0", gain=4.0), gym.spec("Own-v0"), "Own-v0"
    factories = [as_factory(source) for source in sources]
    venv = AsyncVectorEnv([factory.for_workers(2, seed=0)[1] for factory in factories], context="forkserver")
    print(venv.reset()[0].tolist())
    venv.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_what_a_script_defines_registers_and_sets_is_in_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([[4.0, 5.0, 1.0, 5.0]] * 4 + [[1.0, 5.0, 1.0, 5.0]] * 2)


def test_game_of_stable_retro_is_built_by_its_name() -> None:
    pytest.importorskip("stable_retro")
    factory = as_factory("Airstriker-Genesis-v0")
    assert (factory.origin, factory.line()) == ("id", "stable_retro.make('Airstriker-Genesis-v0')")
    env = factory()
    assert (env.unwrapped.gamename, env.render_mode) == ("Airstriker-Genesis-v0", "rgb_array")
    env.close()
