"""What cannot be copied faithfully is refused, and what cannot be known is said."""

from __future__ import annotations

import gymnasium as gym
import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from tests.core.factory import worlds


def test_what_an_environments_own_pickle_leaves_out_is_not_lost_in_silence() -> None:
    env = worlds.Forgetful(gain=6.0)
    with pytest.raises(NotCopyableError, match=r"\.gain is 6\.0 in the instance and 1\.0 in a copy") as caught:
        as_factory(env)
    assert "lambda: Forgetful(...)" in str(caught.value)


def test_what_an_environments_own_pickle_leaves_out_and_the_specification_has_is_built_by_that() -> None:
    env = gym.make("worlds/Forgetful-v0", gain=6.0)
    factory = as_factory(env)
    assert factory.origin == "spec"
    assert factory().unwrapped.gain == 6.0


def test_spaces_of_classes_may_be_drawn_from(caplog: pytest.LogCaptureFixture) -> None:
    worlds.Line.action_space.sample()
    worlds.Line.observation_space.sample()
    env = gym.make("worlds/Line-v0")
    worlds.EVENTS.clear()  # a list of the module, to which the constructor appends
    factory = as_factory(env)
    assert factory.examination is not None
    assert factory.examination.class_attributes == ()
    assert not caplog.records


def test_attributes_of_classes_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worlds.Line, "drift", 2.0)
    env = gym.make("worlds/Line-v0")
    worlds.EVENTS.clear()  # a list of the module, to which the constructor appends
    factory = as_factory(env)
    assert factory.examination is not None
    assert factory.examination.class_attributes == ("<class tests.core.factory.worlds.Line>.drift",)
    [said] = [record.getMessage() for record in caplog.records]
    assert "worlds.Line>.drift" in said
    assert "set it on the instance" in said


def test_what_cannot_be_copied_is_named_with_the_reason_and_the_line() -> None:
    env = worlds.Scaled(worlds.Sealed(gain=2.0), 3.0)
    with pytest.raises(NotCopyableError) as caught:
        as_factory(env)
    text = str(caught.value)
    assert ".env.engine (zlib.Compress): cannot pickle 'zlib.Compress' object" in text
    assert "\n    lambda: Scaled(Sealed(...), ...)\n" in text
    assert 'register_rebuilder("zlib:Compress", ' in text


def test_state_behind_what_cannot_be_looked_into_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    env = gym.make("worlds/Sealed-v0")
    worlds.EVENTS[:] = ["made"]  # a list of the module; a copy of this is constructed
    factory = as_factory(env)
    assert factory.examination is not None
    [opaque] = factory.examination.opaque
    assert opaque.endswith(".engine (zlib.Compress)")
    [said] = [record.getMessage() for record in caplog.records]
    assert opaque in said
    assert "register_rebuilder" in said
