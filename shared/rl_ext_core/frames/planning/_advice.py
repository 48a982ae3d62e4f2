"""What smaller observations would save: gymnasium's own wrappers, tried on the frames at hand."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.planning._measured import layout_of, measure
from rl_ext_core.frames.planning._rows import Case, Sample, Suggestion
from rl_ext_core.frames.planning._sampling import from_env

if TYPE_CHECKING:
    import gymnasium

_LEAST_SIZE = 64  # pixels, below which halving is no advice


def suggestions(sample: Sample, case: Case) -> tuple[Suggestion, ...]:
    """Grey and smaller frames, where they are images; measured with the lossless codec."""
    frames = _single_frames(sample, case.layout)
    if frames is None or any(importlib.util.find_spec(name) is None for name in ("gymnasium", "cv2")):
        return ()
    height, width, channels = frames.shape[1:]
    sizes = (None, (height // 2, width // 2)) if min(height, width) >= _LEAST_SIZE else (None,)
    ways = [(size, grey) for size in sizes for grey in ((False, True) if channels == 3 else (False,))]
    return tuple(_suggestion(frames, size, grey, sample.row_bytes, case) for size, grey in ways[1:])


def _single_frames(sample: Sample, layout: StackLayout) -> npt.NDArray[Any] | None:
    """The newest frame of each observation, channel-last; None where they are no images."""
    frames = sample.after
    if layout.n_stack > 1:
        frames = np.moveaxis(frames, layout.axis + 1, -1)[..., -layout.frame_channels :]
    elif frames.ndim == 4 and frames.shape[1] in (1, 3):
        frames = np.moveaxis(frames, 1, -1)
    if frames.ndim != 4 or frames.shape[3] not in (1, 3) or frames.dtype != np.uint8:
        return None
    return np.ascontiguousarray(frames)


def _suggestion(
    frames: npt.NDArray[Any], size: tuple[int, int] | None, grey: bool, row_bytes: int, case: Case
) -> Suggestion:
    from gymnasium import wrappers

    env, line, n_stack = _replayed(frames), "env", case.layout.n_stack
    shape: tuple[int, ...] | None = None
    if size is not None:
        env, line = wrappers.ResizeObservation(env, size), f"ResizeObservation({line}, {size})"
    if grey:
        env, line = wrappers.GrayscaleObservation(env), f"GrayscaleObservation({line})"
        if n_stack > 1:
            env, line = wrappers.FrameStackObservation(env, n_stack), f"FrameStackObservation({line}, {n_stack})"
    else:
        height, width, channels = env.observation_space.shape or ()
        shape = (height, width, channels * n_stack)
    tried = from_env(env, steps=len(frames) - 1, shape=shape, n_stack=None, seed=0)
    layout = layout_of(tried, n_stack=n_stack)
    per_transition = measure(tried, layout, {"codec": "auto"}).frame_bytes + row_bytes
    return Suggestion(
        line=f"env = {line}",
        shape=layout.shape,
        bytes_a_transition=per_transition,
        times_less=case.plain_bytes / per_transition,
        total_bytes=int(per_transition * case.size) + Case(layout, case.size, case.n_envs).fixed_bytes,
    )


def _replayed(frames: npt.NDArray[Any]) -> gymnasium.Env[Any, Any]:
    """An environment that shows the frames again, for gymnasium's wrappers."""
    import gymnasium

    class Replayed(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, frames.shape[1:], np.uint8)
        action_space = gymnasium.spaces.Discrete(1)
        at = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return frames[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.at += 1
            return frames[self.at], 0.0, False, False, {}

    return Replayed()
