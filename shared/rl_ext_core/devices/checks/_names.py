"""Variables that are misspelled, so that nobody reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_ext_core.devices._mask import MASK, ORDER
from rl_ext_core.devices._picks import LOCAL_RANK
from rl_ext_core.devices._renderers import BACKEND, INDEX, PLATFORM
from rl_ext_core.devices.checks import _wishes
from rl_ext_core.devices.checks._base import mistake, unquoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices.checks._base import Mistake, Situation

_KNOWN = (MASK, ORDER, BACKEND, INDEX, PLATFORM, LOCAL_RANK)
_READERS = {
    MASK: "CUDA",
    ORDER: "CUDA",
    BACKEND: "MuJoCo",
    INDEX: "MuJoCo",
    PLATFORM: "PyOpenGL",
    LOCAL_RANK: "torch.distributed",
}


def find(situation: Situation) -> Iterator[Mistake]:
    """Find names that are those of a known variable but for case, blanks or one letter."""
    for name in situation.original:
        meant = _meant(name)
        if meant is not None:
            yield from _misspelled(name, meant, situation)


def _misspelled(name: str, meant: str, situation: Situation) -> Iterator[Mistake]:
    value = _sane(meant, situation.original[name], situation)
    right = situation.original.get(meant)
    if right == value:
        return
    effect = f"{_READERS[meant]} reads {meant} and never looks at {name!r}, {_difference(name, meant)}"
    if right is None:
        yield mistake(situation, name, f"{effect}, so that it has no effect", {meant: value})
        return
    effect = f"{effect}, so that {meant}={right!r} is in force alone"
    yield mistake(situation, name, effect, {meant: right}, "warning")


def _meant(name: str) -> str | None:
    """Tell which variable was meant; None if this is one, or none."""
    if name in _KNOWN:
        return None
    letters = _letters(name)
    return next((known for known in _KNOWN if letters == known or _one_off(letters, known)), None)


def _letters(name: str) -> str:
    """Take off what env files leave in names: blanks and a leading "export"."""
    bare = re.sub(r"^\s*export\s+", "", name)
    return "".join(bare.split()).replace("-", "_").upper()


def _difference(name: str, meant: str) -> str:
    if name.upper() == meant:
        return "which differs in case"
    if _letters(name) == meant:
        return "which has other characters in its name"
    return "which is one letter off"


def _one_off(text: str, known: str) -> bool:
    """Tell whether one letter is missing, too many, another one, or swapped with its neighbour."""
    if len(text) == len(known):
        places = [place for place, (a, b) in enumerate(zip(text, known, strict=True)) if a != b]
        swapped = len(places) == 2 and places[1] == places[0] + 1
        return len(places) == 1 or (swapped and sorted(text) == sorted(known))
    shorter, longer = sorted((text, known), key=len)
    if len(longer) != len(shorter) + 1:
        return False
    return any(longer[:place] + longer[place + 1 :] == shorter for place in range(len(longer)))


def _sane(meant: str, value: str, situation: Situation) -> str:
    """Give the value to set under the right name, itself mended where that is possible."""
    if meant == MASK:
        return _wishes.read(value, situation).mask or unquoted(value)
    if meant == BACKEND:
        lower = unquoted(value).lower()
        return lower if lower in ("egl", "osmesa", "glfw") else "egl"
    return unquoted(value)
