"""Whatever an environment does with its attributes, and whatever was done to them: the copy is faithful, or refused."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from tests.core.factory.scripted import NAMES, OPERATIONS, Doubled, Program, Scripted, SealedScripted
from tests.core.factory.worlds import rollout

_NUMBERS = st.sampled_from([0, 1, 2, 5, 11, 40])
_INSTRUCTIONS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(NAMES), _NUMBERS), max_size=4).map(
    tuple
)
_PROGRAMS = st.builds(
    Program,
    begin=st.tuples(*[_NUMBERS] * len(NAMES)),
    resets=_INSTRUCTIONS,
    steps=_INSTRUCTIONS,
    length=st.sampled_from([3, 20, 60]),
    shown=st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
)
_CHANGES = st.dictionaries(st.sampled_from([*NAMES, "nested.bias", "left"]), _NUMBERS, max_size=3)


def _make(program: Program, *, sealed: bool, registered: bool, wrapped: bool) -> Any:
    cls = SealedScripted if sealed else Scripted
    env: Any = gym.make(f"scripted/{cls.__name__}-v0", program=program) if registered else cls(program)
    return Doubled(env) if wrapped else env


def _change(env: Any, changes: dict[str, int]) -> None:
    for name, value in changes.items():
        owner = env.unwrapped.nested if name == "nested.bias" else env.unwrapped
        setattr(owner, name.rpartition(".")[2], value)


_KINDS = st.fixed_dictionaries({"sealed": st.booleans(), "registered": st.booleans(), "wrapped": st.booleans()})


@pytest.mark.slow
@settings(max_examples=40)
@given(program=_PROGRAMS, kinds=_KINDS, lived=st.sampled_from([0, 1, 7, 25]), changes=_CHANGES)
def test_copies_are_faithful_or_refused(
    program: Program, kinds: dict[str, bool], lived: int, changes: dict[str, int]
) -> None:
    env = _make(program, **kinds)
    if lived:
        rollout(env, steps=lived)
    _change(env, changes)
    try:
        copy = as_factory(env)()
    except NotCopyableError:
        assert kinds["sealed"]
        assert not kinds["registered"]
        return
    for seed in (1, 2):
        assert rollout(copy, seed, steps=70) == rollout(env, seed, steps=70)
