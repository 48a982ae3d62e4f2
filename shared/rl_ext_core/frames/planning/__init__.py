"""What a replay buffer of images will cost, before it is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames._loss import Loss
from rl_ext_core.frames.codecs import DEFAULT_QUALITY
from rl_ext_core.frames.layout import candidate_layouts
from rl_ext_core.frames.planning._advice import suggestions
from rl_ext_core.frames.planning._costs import priced
from rl_ext_core.frames.planning._estimates import likely_layout
from rl_ext_core.frames.planning._forecast import MemoryWatch
from rl_ext_core.frames.planning._measured import channel_first, layout_of
from rl_ext_core.frames.planning._plan import Plan
from rl_ext_core.frames.planning._rows import Case, Row, Sample, Suggestion
from rl_ext_core.frames.planning._sampling import from_env, from_frames
from rl_ext_core.resources import available_memory

if TYPE_CHECKING:
    import gymnasium

__all__ = ["MemoryWatch", "Plan", "Row", "Suggestion", "plan"]

_USUAL = ("raw", "lz4", "patch", "patch+lz4")
_LOSSY: tuple[dict[str, Any], ...] = (
    {"codec": "patch", "max_error": 4},
    {"codec": "patch+lz4", "max_error": 4},
    {"codec": "jpeg", "quality": DEFAULT_QUALITY},
)


def plan(
    shape: Sequence[int] | None,
    size: int,
    *,
    dtype: npt.DTypeLike = np.uint8,
    n_stack: int | None = None,
    n_envs: int = 1,
    frames: Any = None,
    env: gymnasium.Env[Any, Any] | Callable[[], Any] | None = None,
    steps: int = 300,
    seed: int = 0,
    max_bytes: int | None = None,
    codecs: Sequence[str | Mapping[str, Any]] | None = None,
) -> Plan:
    """What each way of storing ``size`` transitions of images costs.

    Measured on the frames given, or on those of a random policy in the environment given; without either the figures
    are estimates, marked as such, with the range of this project's recordings.

    :param shape: of an observation, stacked as the buffer gets it; None to take that of the frames or the environment.
    :param size: transitions, over all environments.
    :param dtype: of an observation, where neither frames nor environment say.
    :param n_stack: frames in an observation, or None to find out.
    :param n_envs: number of environments that the buffer is for.
    :param frames: consecutive observations of one environment, or its single frames, at least 129.
    :param env: a gymnasium environment, or what makes one; one that is made here is closed again.
    :param steps: of the random policy.
    :param seed: of the random policy and the environment.
    :param max_bytes: the budget; without it, what the machine has free counts.
    :param codecs: names of codecs, or mappings of options such as ``{"codec": "patch", "max_error": 4}``; by default
        all that suit the observations.
    :return: the plan.
    :raises InvalidArgumentError: if something is out of range, or does not fit the observations.
    :raises InvalidTypeError: if something is of another type.
    :raises MissingDependencyError: if a codec that is named needs a package that is not installed.
    """
    for name, value in (("size", size), ("n_envs", n_envs), ("max_bytes", 1 if max_bytes is None else max_bytes)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}=1_000_000")
        if value < 1:
            raise InvalidArgumentError(f"{name}={value} must be at least 1")
    if frames is not None and env is not None:
        raise InvalidArgumentError("frames and env exclude each other; pass the one that the figures are to be for")
    given = None if shape is None else tuple(map(int, shape))
    sample: Sample | None = None
    if frames is not None:
        sample = from_frames(frames, shape=given, n_stack=n_stack)
    elif env is not None:
        sample = from_env(env, steps=steps, shape=given, n_stack=n_stack, seed=seed)
    elif given is None:
        raise InvalidArgumentError("shape=None needs frames or env to take it from; for example shape=(100, 100, 9)")
    if sample is not None:
        given, sample = sample.before.shape[1:], channel_first(sample)
        layout = layout_of(sample, n_stack=n_stack)
    else:
        layout = likely_layout(given or (), dtype, n_stack=n_stack)
    case = Case(layout, int(size), int(n_envs))
    free = available_memory()
    budget = free if max_bytes is None else int(max_bytes)
    ways = [_options(way) for way in (_suiting(case) if codecs is None else codecs)]
    return Plan(
        shape=tuple(map(int, given or layout.shape)),
        dtype=str(layout.dtype),
        size=case.size,
        n_envs=case.n_envs,
        n_stack=int(layout.n_stack),
        measured=sample is not None,
        source="the range of recordings of games and robots" if sample is None else sample.source,
        free_bytes=free,
        max_bytes=None if max_bytes is None else int(max_bytes),
        rows=priced(case, ways, sample, budget),
        suggestions=() if sample is None else suggestions(sample, case),
    )


def _options(way: str | Mapping[str, Any]) -> dict[str, Any]:
    """The options of one way of storing.

    :raises InvalidArgumentError: if one is unknown.
    """
    options = {"codec": way} if isinstance(way, str) else dict(way)
    if unknown := sorted(set(options) - {"codec", "max_error", "quality", "block_length"}):
        raise InvalidArgumentError(
            f"codecs has {way!r} with {unknown}; known are codec, max_error, quality and block_length, for example "
            '{"codec": "patch", "max_error": 4}'
        )
    return {"codec": "auto", **options}


def _suiting(case: Case) -> list[dict[str, Any]]:
    """The usual ways that the observations and the packages installed allow."""
    found = []
    layouts = list(candidate_layouts(case.layout.shape, case.layout.dtype, n_stack=case.layout.n_stack))
    for options in (*({"codec": name} for name in _USUAL), *_LOSSY):
        loss = {"max_error": 0, "quality": DEFAULT_QUALITY, **options}
        try:
            Loss.asked_for(loss.pop("codec"), layouts, block_length=None, **loss)
        except (InvalidArgumentError, InvalidTypeError, ImportError):
            continue
        found.append(options)
    return found
