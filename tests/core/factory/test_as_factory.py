"""What ``as_factory`` takes, what comes out of it, and what it says of what it cannot take."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError, WorkerError
from rl_ext_core.factory import as_factory
from tests.core.factory import worlds
from tests.core.factory.worlds import Line, rollout


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
    pytest.param("worlds/Line-v0", "id", id="id"),
    pytest.param("tests.core.factory.worlds:worlds/Line-v0", "id", id="id with its module"),
    pytest.param(gym.spec("worlds/Line-v0"), "spec", id="specification"),
    pytest.param(Line(2.0), "graft", id="instance"),
    pytest.param(gym.make("worlds/Line-v0"), "graft", id="made instance"),
]


@pytest.mark.parametrize(("source", "origin"), SOURCES)
def test_everything_that_builds_an_environment_is_taken(source: Any, origin: str) -> None:
    worlds.EVENTS.clear()
    factory = as_factory(source)
    assert factory.origin == origin
    assert worlds.EVENTS == []  # none is built here
    travelled = pickle.loads(pickle.dumps(factory))
    assert worlds.EVENTS == []
    env = source if hasattr(source, "step") and not isinstance(source, type) else factory()
    assert rollout(travelled()) == rollout(env)
    one, other = factory(), factory()
    assert one is not other
    assert one is not source
    one.unwrapped.rewards.bonus = 50.0
    assert other.unwrapped.rewards.bonus == 1.0


def test_a_factory_is_taken_as_it_is() -> None:
    factory = as_factory(make_line)
    assert as_factory(factory) is factory


def test_the_live_instance_stays_here() -> None:
    env = Line()
    factory = as_factory(env)
    assert factory.live is env
    assert factory.then(worlds.Scaled).live is env
    assert all(worker.live is env for worker in factory.for_workers(2))
    assert pickle.loads(pickle.dumps(factory)).live is None
    assert as_factory(make_line).live is None


scale = 2.0  # a global, and an attribute of what the function below reads


def test_an_attribute_is_not_taken_for_the_global_of_its_name() -> None:
    def read(observation: Any) -> Any:
        return observation.scale if hasattr(observation, "scale") else observation

    env = gym.wrappers.TransformObservation(gym.make("CartPole-v1"), read, None)
    factory = as_factory(env)
    assert factory.origin == "graft"
    assert factory().reset(seed=3)[0].tolist() == env.reset(seed=3)[0].tolist()


def test_then_adapts_what_is_built() -> None:
    factory = as_factory(make_line).then(worlds.Scaled).then(functools.partial(worlds.Scaled, scale=5.0))
    assert factory.adapted
    env = pickle.loads(pickle.dumps(factory))()
    assert (env.scale, env.env.scale, env.unwrapped.gain) == (5.0, 2.0, 2.0)
    assert not as_factory(make_line).adapted


def test_then_adds_what_a_fork_server_may_import() -> None:
    factory = as_factory("CartPole-v1")
    assert factory.then(worlds.Scaled, preload=["json", "gymnasium"]).preload == ("gymnasium", "json")
    assert factory.preload == ("gymnasium",)


def test_its_text_says_what_it_builds() -> None:
    factory = as_factory(Line)
    assert repr(factory) == "EnvFactory('lambda: Line()', origin='class')"
    assert repr(factory.for_workers(2)[1]) == "EnvFactory('lambda: Line()', origin='class', worker=1)"


@pytest.mark.parametrize("source", [5, None, object(), ["CartPole-v1"], {"id": "CartPole-v1"}, os])
def test_what_builds_nothing_is_refused(source: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"builds no environment; .* as_factory\(lambda: MyEnv\(\)\)"):
        as_factory(source)


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"does not know the id 'NoSuch-v0'.*\"package:NoSuch-v0\""):
        as_factory("NoSuch-v0")
    with pytest.raises(InvalidArgumentError, match="no_such_module"):
        as_factory("no_such_module:NoSuch-v0")


def test_another_start_method_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'thread' is no way to start processes here"):
        as_factory(Line(), start_method="thread")


def test_a_function_over_what_cannot_be_copied_is_refused() -> None:
    engine = zlib.compressobj()
    with pytest.raises(NotCopyableError, match=r"engine.*cannot pickle 'zlib.Compress' object.*inside of the function"):
        as_factory(lambda: (engine, Line()))


def test_a_function_over_an_environment_builds_copies_of_that() -> None:
    env = Line(4.0)
    rollout(env)
    factory = as_factory(lambda: env)
    one, other = factory(), factory()
    assert len({id(one), id(other), id(env)}) == 3
    assert rollout(one) == rollout(other) == rollout(env)


def test_what_building_a_copy_raises_is_the_cause() -> None:
    with pytest.raises(WorkerError, match="ConnectionRefusedError: the licence is taken") as caught:
        as_factory(worlds.Unmakeable())
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert "in __setstate__" in caught.value.traceback


def test_what_one_way_raises_does_not_hinder_another() -> None:
    env = gym.make("worlds/Unmakeable-v0", gain=3.0)
    factory = as_factory(env)
    assert factory.origin == "spec"
    assert factory().unwrapped.gain == 3.0
    env.unwrapped.gain = 4.0
    with pytest.raises(NotCopyableError) as caught:
        as_factory(env)
    assert "the licence is taken" in str(caught.value)
    assert ".gain is 4.0 in the instance and 3.0 in a copy" in str(caught.value)


def test_a_crash_is_named() -> None:
    with pytest.raises(WorkerError, match="was killed by SIGSEGV") as caught:
        as_factory(worlds.Crashing())
    assert caught.value.kind == "signal"
    assert "trial copy" in str(caught.value)
    assert "in step" in caught.value.traceback


def test_what_prints_and_warns_is_taken() -> None:
    assert as_factory(worlds.Loud()).origin == "graft"


def test_it_may_be_called_beside_the_main_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(as_factory(Line(3.0))))
    thread.start()
    thread.join()
    assert found[0]().gain == 3.0


SCRIPT = """
import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv
from rl_ext_core.factory import as_factory, capture_constructors
import zlib

class Own(gym.Env):
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-99, 99, (2,))
    offset = 1.0
    def __init__(self, gain=1.0):
        self.gain, self.engine = gain, zlib.compressobj()
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low * 0 + [self.gain, self.offset], {}
    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}

def main():
    capture_constructors(Own)
    gym.register("Own-v0", entry_point=Own)
    Own.offset = 5.0
    env = Own(3.0)
    env.gain = 4.0
    sources = env, lambda: Own(4.0), gym.make("Own-v0", gain=4.0), gym.spec("Own-v0"), "Own-v0"
    factories = [as_factory(source) for source in sources]
    venv = AsyncVectorEnv([factory.for_workers(2, seed=0)[1] for factory in factories], context="forkserver")
    for factory, seen in zip(factories, venv.reset()[0].tolist()):
        print(factory.origin, seen)
    venv.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_what_a_script_defines_and_registers_is_known_to_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The class travels with the factory, and what was set on it; ids are known by what they were registered with.
    changed, default = [4.0, 5.0], [1.0, 5.0]
    assert done.stdout.splitlines() == [
        f"graft {changed}",
        f"callable {changed}",
        f"graft {changed}",
        f"spec {default}",
        f"id {default}",
    ]


def test_names_of_stable_retros_games() -> None:
    pytest.importorskip("stable_retro")
    factory = as_factory("Airstriker-Genesis-v0")
    assert (factory.origin, factory.line()) == ("id", "stable_retro.make('Airstriker-Genesis-v0')")
    env = factory()
    assert env.unwrapped.gamename == "Airstriker-Genesis-v0"
    assert env.render_mode == "rgb_array"
    env.close()
    for name in ("Airstriker-Genesis-v9", "", "../stable/Airstriker-Genesis-v0"):
        with pytest.raises(InvalidArgumentError, match="gymnasium does not know the id"):
            as_factory(name)


LAZY = """
import gymnasium

def __getattr__(name):
    if name == "helper":
        from lazily.impl import helper
        globals()[name] = helper
        return helper
    raise AttributeError(name)
"""
USER = """
import lazily
from tests.core.factory.worlds import Line

class Later(Line):
    def reset(self, **options):
        lazily.helper(self)
        return super().reset(**options)
"""


def test_a_global_that_is_resolved_when_it_is_first_asked_for_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lazily").mkdir()
    (tmp_path / "lazily" / "__init__.py").write_text(LAZY)
    (tmp_path / "lazily" / "impl.py").write_text("TABLE = [1, 2]\ndef helper(env):\n    return TABLE[0]\n")
    (tmp_path / "users_lazy.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    environment = importlib.import_module("users_lazy").Later()
    environment.reset(seed=0)
    as_factory(environment)
    assert "lazily" not in caplog.text
    sys.modules["lazily"].helper = print  # type: ignore[attr-defined]
    as_factory(environment)
    assert "<global lazily.helper>" in caplog.text
    for name in ("users_lazy", "lazily", "lazily.impl"):
        del sys.modules[name]
