"""Environments with numbers that a C library may have given them are built anew, or refused."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import _rules, as_factory, register_rebuilder
from tests.core.factory.handles import ClassPlant, Plant, Timed

gym.register("handles/Plant-v0", entry_point=Plant)


@pytest.fixture(autouse=True)
def no_rules_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules, "_registered", {})


@pytest.mark.parametrize(
    "environment",
    [
        Plant(0),
        Plant(np.int64(3)),
        Plant([4, 5]),
        Plant({"robot": 6}),
        Plant(ctypes.c_size_t(7)),
        ClassPlant(8),
        gym.wrappers.TimeLimit(Plant(9), 5),
    ],
    ids=lambda env: f"{type(env).__name__}({env.unwrapped.handle})",
)
def test_number_next_to_a_c_library_is_refused(environment: Any) -> None:
    with pytest.raises(NotCopyableError, match=r"(?s)its handle=.* may be a handle of the C library .*lambda: .*Plant"):
        as_factory(environment)
    assert as_factory(environment, verify=False)().unwrapped.handle is not None


def test_environment_with_handles_is_built_by_its_specification_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory = as_factory(gym.make("handles/Plant-v0"))
    assert factory.origin == "spec"
    assert "handles.Plant" in caplog.text.replace(":", ".")
    assert "say how it is copied, with register_rebuilder" in caplog.text


@pytest.mark.parametrize("environment", [Plant(None), Plant(2.0), Plant(True), Timed()])
def test_environment_without_handles_is_copied(environment: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert as_factory(environment).origin == "graft"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_environment_with_a_rule_of_the_user_is_copied() -> None:
    register_rebuilder(Plant, lambda env: (Plant, (env.handle,)), settings=lambda env: env.handle)
    assert as_factory(Plant(3))().handle == 3
