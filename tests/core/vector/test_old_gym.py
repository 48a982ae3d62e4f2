"""Environments of the old gym, which stand-ins for gym and shimmy imitate."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import pytest

from rl_ext_core.errors import InvalidTypeError, MissingDependencyError
from rl_ext_core.vector.environments import checked


class _OldEnv:
    @property
    def unwrapped(self) -> _OldEnv:
        return self


class V26(_OldEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, {}


class V21(_OldEnv):
    def reset(self) -> Any:
        return 0


class _Converted(gymnasium.Env[Any, Any]):
    def __init__(self, env: Any) -> None:
        self.inside = env


class V26Converted(_Converted):
    pass


class V21Converted(_Converted):
    pass


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("gym")
    module.Env = _OldEnv
    monkeypatch.setitem(sys.modules, "gym", module)


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(("kind", "converted", "version"), [(V26, V26Converted, "26"), (V21, V21Converted, "21")])
def test_environments_of_gym_are_converted_by_shimmy(
    kind: type, converted: type, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shimmy = SimpleNamespace(GymV26CompatibilityV0=V26Converted, GymV21CompatibilityV0=V21Converted)
    monkeypatch.setitem(sys.modules, "shimmy", shimmy)  # type: ignore[arg-type]
    env = kind()
    with pytest.warns(UserWarning, match=rf"`{kind.__name__}` is an environment of gym 0\.{version}"):
        found = checked(env)
    assert type(found) is converted
    assert found.inside is env


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(("kind", "version"), [(V26, "26"), (V21, "21")])
def test_environments_of_gym_without_shimmy_name_the_right_converter(
    kind: type, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shimmy", None)  # type: ignore[arg-type]
    with pytest.raises(MissingDependencyError, match=rf"gym 0\.{version}, .*GymV{version}CompatibilityV0\(env=env\)"):
        checked(kind())


def test_environments_of_no_known_library_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"V26; expected one of gymnasium\. Use a class that inherits"):
        checked(V26())


def test_vectorized_environments_of_gym_26() -> None:
    old = pytest.importorskip("gym", reason="gym 0.26 is not a dependency")
    pytest.importorskip("shimmy", reason="shimmy is not a dependency")
    sb3_ext = pytest.importorskip("sb3_ext")

    class Old(old.Env):  # type: ignore[misc]
        observation_space, action_space = old.spaces.Box(-1, 1, (2,)), old.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 1.0, False, False, {}

    for make in (lambda: sb3_ext.make_vec_env(Old, 2), lambda: sb3_ext.SharedMemoryVecEnv([Old, Old], "fork")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about gym
            venv = make()
        assert venv.reset().shape == (2, 2)
        venv.close()
