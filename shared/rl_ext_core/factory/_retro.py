"""Games of stable-retro have names like gymnasium's ids, and gymnasium does not know them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["builder_of"]


def builder_of(name: str) -> Callable[..., Any] | None:
    """Give what builds a game, if stable-retro is installed and has one of this name."""
    found = find_spec("stable_retro")
    places = (found.submodule_search_locations if found else None) or ()
    folders = [Path(place, "data", kind, name) for place in places for kind in ("stable", "contrib", "experimental")]
    if not name or name != Path(name).name or not any(folder.is_dir() for folder in folders):
        return None
    return functools.partial(_make, name)


def _make(game: str, **kwargs: Any) -> Any:
    import stable_retro

    # Its own default opens a window.
    return stable_retro.make(game, **{"render_mode": "rgb_array", **kwargs})
