from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_ext_core._environment_source import as_gymnasium_env
from rl_ext_core.errors import EnvironmentOutputError, InvalidTypeError, MissingDependencyError
from rl_ext_core.vector.environments import EpisodeMonitor
from tests.environments import Counting


def test_episode_monitor_equals_sb3_monitor() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    monitor_env, sb3_env = EpisodeMonitor(Counting()), monitor.Monitor(Counting())
    with pytest.raises(EnvironmentOutputError, match="needs a reset"):
        monitor_env.step(0)
    for env in (monitor_env, sb3_env):
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(10):
                *_, info = env.step(0)
        assert {name: value for name, value in info["episode"].items() if name != "t"} == {"r": 10.0, "l": 10}
    for name in ("get_total_steps", "get_episode_rewards", "get_episode_lengths"):
        assert getattr(monitor_env, name)() == getattr(sb3_env, name)()
    assert len(monitor_env.get_episode_times()) == 2


class FakeOldGymEnv:
    unwrapped = property(lambda self: self)


class FakeGym26Env(FakeOldGymEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, {}


class FakeGym21Env(FakeOldGymEnv):
    def reset(self) -> Any:
        return 0


@pytest.mark.parametrize(("kind", "version"), [(FakeGym26Env, "26"), (FakeGym21Env, "21")])
def test_old_gym_environments_are_converted_by_shimmy(
    kind: type, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, env, gym = f"GymV{version}CompatibilityV0", kind(), ModuleType("gym")
    with pytest.raises(InvalidTypeError, match=r"expected a gymnasium\.Env\. Use a class that inherits"):
        as_gymnasium_env(env)  # gym is not imported, so the class is unknown
    gym.Env = FakeOldGymEnv
    monkeypatch.setitem(sys.modules, "gym", gym)
    monkeypatch.setitem(sys.modules, "shimmy", SimpleNamespace(**{name: lambda env: SimpleNamespace(inside=env)}))
    with pytest.warns(UserWarning, match=rf"`{kind.__name__}` is an environment of gym 0\.{version}"):
        assert as_gymnasium_env(env).inside is env
    monkeypatch.setitem(sys.modules, "shimmy", None)
    with pytest.raises(MissingDependencyError, match=rf"gym 0\.{version}, .*{name}\(env=env\)"):
        as_gymnasium_env(env)
