"""Stable Baselines3's wrappers, those of sb3-contrib, and vectorised environments are grafted as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib.common.wrappers import ActionMasker, TimeFeatureWrapper
from stable_baselines3.common import atari_wrappers as atari
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from rl_ext_core.factory import _graft
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import assert_copied, copied


def _cart() -> Any:
    return gym.make("CartPole-v1")


def _pong() -> Any:
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)


def _vec() -> Any:
    return DummyVecEnv([_cart, _cart])


def _mask(_: Any) -> Any:
    return np.ones(2, bool)


WRAPPED: dict[str, Callable[[], Any]] = {
    "Atari": lambda: atari.AtariWrapper(_pong(), action_repeat_probability=0.3),  # seven wrappers
    "Monitor": lambda: Monitor(_cart()),
    "TimeFeatureWrapper": lambda: TimeFeatureWrapper(_cart()),
    "ActionMasker": lambda: ActionMasker(_cart(), _mask),
    "BitFlippingEnv": BitFlippingEnv,
}
VECTORISED: dict[str, Callable[[], Any]] = {
    "VecNormalize": lambda: VecNormalize(_vec()),
    "VecFrameStack": lambda: VecFrameStack(_vec(), 3),
    "VecMonitor": lambda: VecMonitor(_vec()),
    "VecCheckNan": lambda: VecCheckNan(_vec()),
}


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("name", [*VECTORISED, *WRAPPED])
def test_a_copy_does_the_same(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = {**VECTORISED, **WRAPPED}[name]()
    assert type(assert_copied(environment, at_once=False)) is type(environment)


def test_what_a_wrapper_drops_when_it_is_pickled_is_kept() -> None:
    environment = VecNormalize(_vec(), gamma=0.5)
    environment.reset()
    environment.returns[:] = 7.0
    copy = copied(environment)
    assert copy.venv is not None
    assert copy.returns.tolist() == [7.0, 7.0]
    copy.set_attr("gravity", 5.0)
    path = ".venv.envs[0].gravity"
    assert path in fingerprint(environment).differences(fingerprint(copy))


def test_a_monitor_with_a_file_is_refused(tmp_path: Path) -> None:
    environment = Monitor(_cart(), str(tmp_path / "log"))
    with pytest.raises(_graft.Refused, match=r"\.results_writer\.file_handler .*an open file has a position"):
        _graft.dumps(environment)
    environment.close()


@pytest.mark.slow
def test_environments_in_other_processes_are_refused() -> None:
    environment = SubprocVecEnv([_cart, _cart], start_method="fork")
    try:
        with pytest.raises(_graft.Refused, match="another process"):
            _graft.dumps(environment)
    finally:
        environment.close()
