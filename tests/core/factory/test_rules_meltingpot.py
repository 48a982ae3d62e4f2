"""The rules for Melting Pot, on a class and a closure of its shape; torchrl_ext/test_meltingpot.py has the real one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import cloudpickle
import pytest

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory._rules_lab2d import RULES, EnvSeeds

(_, RULE, SETTINGS), (_, BARE, _) = RULES
LARGEST = 2**32 - 1


class ResetWrapper:
    def __init__(self, build_environment: Any) -> None:
        self._env = build_environment()
        self._rebuild_environment = build_environment
        self._reset = False

    def reset(self) -> None:
        if self._reset:
            self._env = self._rebuild_environment()
        self._reset = True


def builder(seed: int, **settings: str) -> ResetWrapper:
    lab2d_settings_dict = dict(settings)
    env_seeds = (seed % (LARGEST + 1) for seed in itertools.count(seed))

    def build_environment() -> dict[str, str]:
        lab2d_settings_dict["env_seed"] = str(next(env_seeds))
        return dict(lab2d_settings_dict)

    return ResetWrapper(build_environment)


def copy_of(wrapper: ResetWrapper) -> ResetWrapper:
    rebuild, arguments, state = cloudpickle.loads(cloudpickle.dumps(RULE(wrapper)))
    copy: ResetWrapper = rebuild(*arguments)
    vars(copy).update(state)
    return copy


def seeds(wrapper: ResetWrapper, resets: int) -> list[int]:
    found = []
    for _ in range(resets):
        wrapper.reset()
        found.append(int(wrapper._env["env_seed"]))
    return found


def test_a_copy_has_the_settings_of_the_original_and_seeds_of_its_own() -> None:
    original = builder(5, players="7")
    original.note = "mine"  # type: ignore[attr-defined]
    random.seed(3)
    expected = random.randint(1, LARGEST)
    random.seed(3)
    copy = copy_of(original)
    assert (type(copy), copy._env["players"], copy.note) == (ResetWrapper, "7", "mine")  # type: ignore[attr-defined]
    assert seeds(copy, 3) == [expected, expected + 1, expected + 2]
    assert seeds(original, 3) == [5, 6, 7]


def test_the_chain_goes_on_at_zero_as_melting_pots_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "randint", lambda low, high: high)
    chain = EnvSeeds()
    assert [next(chain) for _ in range(3)] == [LARGEST, 0, 1]


def test_settings_tell_everything_but_the_seed() -> None:
    one, other, third = builder(5, players="7"), builder(6, players="7"), builder(5, players="8")
    assert SETTINGS(one) == SETTINGS(other) != SETTINGS(third)
    assert SETTINGS(one) == SETTINGS(copy_of(one))
    one.note = "mine"  # type: ignore[attr-defined]
    assert SETTINGS(one) != SETTINGS(other)


def test_a_simulator_alone_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        InvalidTypeError, match=r"does not tell by which settings it was made.*make_env, not make_env\(\)"
    ):
        BARE(object())
