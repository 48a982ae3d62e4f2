"""An observation and an action of one name would overwrite each other in the data."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.environments import Sampled, box
from torchrl_ext import GymWrapper


def test_an_action_of_an_observations_name_is_refused() -> None:
    env = Sampled(spaces.Dict(joint=box(2)), spaces.Dict(joint=box(2)))
    with pytest.raises(InvalidArgumentError, match=r"joint names an observation and an action.*Rename one"):
        GymWrapper(env)
