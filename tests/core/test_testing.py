"""The checks for third parties need nothing but NumPy, and what they make is what they say."""

from __future__ import annotations

import pytest

from rl_ext_core.testing import CONTENTS, LAYOUTS, make_transitions
from tests.boundaries import modules_loaded_by


def test_it_loads_no_test_framework() -> None:
    packages = {"pytest", "hypothesis", "torch", "gymnasium", "stable_baselines3", "torchrl"}
    assert modules_loaded_by("import rl_ext_core.testing", packages) == set()


@pytest.mark.sample(quick=8)
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("layout", LAYOUTS[:-1], ids=str)
def test_observations_follow_each_other_as_in_an_environment(layout: object, contents: str) -> None:
    steps = list(make_transitions(layout, n_envs=2, n_steps=60, contents=contents, episode=8))
    again = list(make_transitions(layout, n_envs=2, n_steps=60, contents=contents, episode=8))
    continued = 0
    for (_, after), (before, _), (same, _) in zip(steps, steps[1:], again[1:], strict=False):
        assert before.shape == (2, *layout.shape)
        assert before.dtype == layout.dtype
        assert before.tobytes() == same.tobytes()
        continued += after.tobytes() == before.tobytes()
    # With two environments and a reset each 8 steps, most pairs follow each other and some do not.
    assert continued >= 30
    if contents == "noise":
        assert continued < 59
