"""What is done about things that neither pickle nor a rule can copy: their layer is built anew, or they are refused."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rl_ext_core.factory import _graft, _rules, register_rebuilder
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import copied, different
from tests.core.factory.test_fingerprint import Holder


class Handle:
    """A simulator behind a pointer."""

    def __init__(self, gain: float) -> None:
        self.pointer = ctypes.pointer(ctypes.c_double(gain))

    def __reduce__(self) -> Any:
        raise TypeError("a simulator cannot be pickled")


class Simulated(gym.Env[Any, Any]):
    """Holds a simulator, and settings that its constructor does not know."""

    def __init__(self, gain: float = 1.0, render_mode: str | None = None) -> None:
        self.action_space, self.observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (1,))
        self.simulator, self.gain, self.render_mode = Handle(gain), gain, render_mode
        self.bonus, self.table = 0.5, {"simulator": self.simulator, "scale": gain}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        state = self.simulator.pointer.contents.value * self.gain + self.bonus
        return np.array([state], np.float32), 0.0, False, False, {}


class Easy(Simulated, EzPickle):
    """Remembers its arguments."""

    def __init__(self, gain: float = 1.0) -> None:
        EzPickle.__init__(self, gain)
        super().__init__(gain)


@pytest.fixture(autouse=True)
def no_rules_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules, "_registered", {})


class Connected(Easy):
    """Has a state somewhere else, too."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__(gain)
        self.wire = multiprocessing.Pipe()[0]


def test_a_layer_with_a_state_in_another_process_is_not_made_anew() -> None:
    environment = Connected(2.0)
    with environment.wire, pytest.raises(_graft.Refused, match=r"^\.wire .*belongs to another process"):
        _graft.dumps(environment)


def test_what_is_changed_next_to_the_simulator_is_missed() -> None:
    environment = Easy(3.0)
    environment.table["scale"] = 7.0
    assert fingerprint(environment).differences(fingerprint(copied(environment))) == [".table['scale']"]


def test_a_rule_of_the_user_s_tells_how_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(handle: Handle) -> float:
        return float(handle.pointer.contents.value)

    register_rebuilder(Handle, lambda handle: (Handle, (read(handle),)), settings=lambda handle: {"gain": read(handle)})
    environment = Simulated(2.0)
    environment.simulator.pointer.contents.value = 5.0
    packed = _graft.dumps(environment)
    copy = _graft.loads(packed)
    assert copy.simulator.pointer.contents.value == 5.0
    assert different(environment, copy) == []
    copy.simulator.pointer.contents.value = 6.0
    assert fingerprint(environment).differences(fingerprint(copy)) == [".simulator.gain"]
    # A process that has not registered it learns it from the pickle.
    monkeypatch.setattr(_rules, "_registered", {})
    assert ".simulator.gain" in fingerprint(_graft.loads(packed)).tokens


def test_a_rule_that_fails_is_named_with_its_reason() -> None:
    def rule(_: Any) -> Any:
        raise pickle.PicklingError("the simulation is running")

    register_rebuilder(Handle, rule)
    with pytest.raises(_graft.Refused, match=r"\.simulator .*the simulation is running"):
        _graft.dumps(Simulated())


def _chain(length: int) -> Any:
    chain: Any = None
    for number in range(length):
        chain = Holder(number=number, next=chain)
    return chain


def _taken_apart(*chains: Any) -> None:
    # Python would do it by recursion.
    for chain in chains:
        while chain is not None:
            following = chain.next
            chain.next = None
            chain = following


@pytest.mark.parametrize(
    ("length", "calls"), [(3_000, 4_000), pytest.param(200_000, _graft._CALLS, marks=pytest.mark.exhaustive)]
)
def test_an_endless_one_is_refused_with_a_reason(length: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_graft, "_CALLS", calls)
    chain, limit = _chain(length), sys.getrecursionlimit()
    with pytest.raises(_graft.Refused, match="refer to one another in a chain"):
        _graft.dumps(chain)
    assert sys.getrecursionlimit() == limit
    _taken_apart(chain)


def test_importing_the_rules_imports_no_library() -> None:
    code = "import importlib, sys; from rl_ext_core.factory import _rules; "
    code += "[importlib.import_module(f'rl_ext_core.factory.{name}') for name in _rules._MODULES.values()]; "
    code += "print([name for name in sys.argv[1:] if name in sys.modules])"
    names = ["gymnasium", "torch", "mujoco", "ale_py", "pygame", "Box2D", "stable_baselines3", "torchrl", "dm_control"]
    done = subprocess.run([sys.executable, "-c", code, *names], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_rules_of_every_simulator_are_found() -> None:
    folder = Path(_rules.__file__).parent
    modules = {path.stem for path in folder.glob("_rules_*.py")} - {"_rules_basics"}
    assert modules == set(_rules._MODULES.values())
    for name in modules:
        for cls, _, _ in importlib.import_module(f"rl_ext_core.factory.{name}").RULES:
            module = cls.partition(":")[0]
            found = _rules._MODULES.get(module) or _rules._MODULES.get(module.partition(".")[0])
            assert found == name, f"{cls} is not looked for in {name}"
