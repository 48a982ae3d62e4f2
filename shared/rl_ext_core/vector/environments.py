"""What workers do to an environment before it is stepped: kept here, where it loads no framework."""

from __future__ import annotations

import sys
from typing import Any

from rl_ext_core.errors import InvalidTypeError

__all__ = ["checked", "make", "monitored", "seeded"]


def make(spec: Any, env_kwargs: dict[str, Any]) -> Any:
    """Let gymnasium make an environment that renders images, if it takes a render mode: as Stable Baselines3 does."""
    import gymnasium

    try:
        return gymnasium.make(spec, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:
        return gymnasium.make(spec, **env_kwargs)


def checked(environment: Any) -> Any:
    """Give back an environment of gymnasium.

    :raises InvalidTypeError: it is another one
    """
    import gymnasium

    if isinstance(environment, gymnasium.Env):
        return environment
    kind = type(environment)
    raise InvalidTypeError(
        f"the environment is a {kind.__module__}.{kind.__qualname__}; expected one of gymnasium. Wrap one of the old "
        "gym: shimmy.GymV21CompatibilityV0(env=env)"
    )


def seeded(environment: Any, seed: int) -> Any:
    """Seed the space that actions are sampled from."""
    environment.action_space.seed(seed)
    return environment


def monitored(environment: Any) -> Any:
    """Record returns and lengths of episodes: by Stable Baselines3's own class where that is loaded already."""
    theirs = sys.modules.get("stable_baselines3.common.monitor")
    if theirs is not None:
        return theirs.Monitor(environment)
    from rl_ext_core.vector.monitor import EpisodeMonitor

    return EpisodeMonitor(environment)
