"""The conformance tests for third parties: dependencies, and generated transitions."""

from __future__ import annotations

import pytest

from rl_ext_core.testing import CONTENTS, LAYOUTS, make_transitions
from tests.boundaries import modules_loaded_by


def test_import_does_not_load_frameworks() -> None:
    packages = {"pytest", "hypothesis", "torch", "gymnasium", "stable_baselines3", "torchrl"}
    assert modules_loaded_by("import rl_ext_core.testing", packages) == set()


@pytest.mark.sample(quick=8)
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("layout", LAYOUTS[:-1], ids=str)
def test_transitions_follow_each_other_except_at_resets(layout: object, contents: str) -> None:
    steps = list(make_transitions(layout, n_envs=2, n_steps=60, contents=contents, episode=8))
    again = list(make_transitions(layout, n_envs=2, n_steps=60, contents=contents, episode=8))
    continued = 0
    for (_, after), (before, _), (same, _) in zip(steps, steps[1:], again[1:], strict=False):
        assert before.shape == (2, *layout.shape)
        assert before.dtype == layout.dtype
        assert before.tobytes() == same.tobytes()
        continued += after.tobytes() == before.tobytes()
    # Two environments are reset every 8 steps on average, so most pairs follow each other and some do not.
    assert continued >= 30
    if contents == "noise":
        assert continued < 59
