"""What workers put around environments: the monitor, and converters of the old gym, which stand-ins imitate."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import pytest

from rl_ext_core.errors import EnvironmentOutputError, InvalidTypeError, MissingDependencyError
from rl_ext_core.vector.environments import EpisodeMonitor, check_environment
from tests.sb3_ext.vec_worlds import Counting


def test_the_monitor_counts_as_stable_baselines3s() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    ours, theirs = EpisodeMonitor(Counting()), monitor.Monitor(Counting())
    with pytest.raises(EnvironmentOutputError, match="needs a reset"):
        ours.step(0)
    for env in (ours, theirs):
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(10):
                *_, info = env.step(0)
        assert {name: value for name, value in info["episode"].items() if name != "t"} == {"r": 10.0, "l": 10}
    for name in ("get_total_steps", "get_episode_rewards", "get_episode_lengths"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert len(ours.get_episode_times()) == 2


class FakeOldGymEnv:
    @property
    def unwrapped(self) -> FakeOldGymEnv:
        return self


class FakeGym26Env(FakeOldGymEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, {}


class FakeGym21Env(FakeOldGymEnv):
    def reset(self) -> Any:
        return 0


class FakeShimmyEnv(gymnasium.Env[Any, Any]):
    def __init__(self, env: Any) -> None:
        self.inside = env


@pytest.mark.parametrize(("kind", "version"), [(FakeGym26Env, "26"), (FakeGym21Env, "21")])
def test_environments_of_gym_are_converted_by_shimmy(kind: type, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, env, gym = f"GymV{version}CompatibilityV0", kind(), ModuleType("gym")
    with pytest.raises(InvalidTypeError, match=r"expected one of gymnasium\. Use a class that inherits"):
        check_environment(env)  # gym is not loaded: of no known library
    gym.Env = FakeOldGymEnv  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gym", gym)
    monkeypatch.setitem(sys.modules, "shimmy", SimpleNamespace(**{name: FakeShimmyEnv}))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=rf"`{kind.__name__}` is an environment of gym 0\.{version}"):
        assert check_environment(env).inside is env
    monkeypatch.setitem(sys.modules, "shimmy", None)  # type: ignore[arg-type]
    with pytest.raises(MissingDependencyError, match=rf"gym 0\.{version}, .*{name}\(env=env\)"):
        check_environment(env)
