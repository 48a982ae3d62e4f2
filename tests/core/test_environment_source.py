"""Names of environments on the command line, which all commands read in the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_ext_core.cli import main

MODULE = """
import gymnasium
import numpy as np


class Pixels(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self._at = int(self.np_random.integers(12))
        return self._seen(), {}

    def step(self, action):
        self._at += 1 + int(action)
        return self._seen(), 0.0, self._at > 20, False, {}

    def _seen(self):
        import my_module_nearby

        seen = np.zeros((12, 12), np.uint8)
        seen[self._at % 12] = my_module_nearby.COLOR
        return seen

    @classmethod
    def make(cls):
        return cls()


class Suite:
    class Inner:
        build = Pixels.make


gymnasium.register("MyPixels-v0", Pixels, disable_env_checker=True)
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that defines environments, and return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "my_named_sources"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "my_module_nearby.py").write_text("COLOR = 9\n")
    return name


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("name", ["Pixels", "Pixels.make", "Suite.Inner.build", "MyPixels-v0"])
def test_commands_accept_the_same_environment_names(
    capsys: pytest.CaptureFixture[str], module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:{name}", "--steps", "150", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [12, 12]
    assert main(["probe", f"{module}:{name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isolation"] == "independent"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere:make", "'nowhere:make': 'nowhere' cannot be imported (ModuleNotFoundError: "),
        ("{}:nothing", "'my_named_sources' has no 'nothing'"),
        ("{}:Pixels.nothing", "'my_named_sources' has no 'Pixels.nothing'"),
        ("{}:number", "is 3, which cannot build an environment"),
        ("os:sep", "is '/', which cannot build an environment"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "--size", "9", "--env"], ["probe"]], ids=["plan", "probe"])
def test_commands_reject_invalid_environment_names(
    capsys: pytest.CaptureFixture[str], module: str, command: list[str], name: str, text: str
) -> None:
    assert main([*command, name.format(module)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert "Expected module:function, module:Class.method, or a gymnasium id" in printed.err
    assert printed.err.count("\n") == 1
