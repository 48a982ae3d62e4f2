"""What a plan consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.layout import StackLayout

ROW_BYTES = 20  # beside the frames: one action of 8 bytes, reward, done and timeout


@dataclass(frozen=True)
class Case:
    """The buffer that is planned.

    :param layout: how an observation is stacked.
    :param size: transitions, over all environments.
    :param n_envs: number of environments.
    """

    layout: StackLayout
    size: int
    n_envs: int

    @property
    def plain_bytes(self) -> int:
        """Bytes a transition in Stable Baselines3's ``ReplayBuffer``, which stores both observations whole."""
        return 2 * self.layout.stack_bytes + ROW_BYTES

    @property
    def fixed_bytes(self) -> int:
        """What a store takes beside its transitions: a newest stack and an open block for each environment."""
        return self.n_envs * (3 * self.layout.stack_bytes + 20 * self.layout.frame_bytes)


@dataclass(frozen=True)
class Row:
    """What one way of storing costs.

    :param name: the codec with its options, as people read it.
    :param options: of ``AdaptiveStore`` and of the buffers; empty for Stable Baselines3's own.
    :param bytes_a_transition: with action, reward and flags; of an estimate the geometric middle.
    :param range: from the smallest to the largest of the recordings; None where it was measured.
    :param total_bytes: of all transitions.
    :param times_less: how many times less memory than Stable Baselines3's ``ReplayBuffer``.
    :param times_less_optimized: likewise, with ``optimize_memory_usage=True``.
    :param sample_us: CPU time to read a transition, both observations; None where it was not measured.
    :param psnr: of what comes out, in dB; None where it is bit-exact, or was not measured.
    :param lossy: whether it is not bit-exact.
    :param capacity: how many transitions fit into the budget; None where there is none.
    :param fits: whether all transitions do.
    """

    name: str
    options: Mapping[str, Any]
    bytes_a_transition: float
    range: tuple[float, float] | None
    total_bytes: int
    times_less: float
    times_less_optimized: float
    sample_us: float | None
    psnr: float | None
    lossy: bool
    capacity: int | None
    fits: bool | None


@dataclass(frozen=True)
class Suggestion:
    """A smaller observation.

    :param line: what wraps a single environment, in place of what stacks its frames where that is part of it.
    :param shape: of the observation then.
    :param bytes_a_transition: with the lossless codec, measured.
    :param times_less: than Stable Baselines3's ``ReplayBuffer`` of the observations as they are.
    :param total_bytes: of all transitions.
    """

    line: str
    shape: tuple[int, ...]
    bytes_a_transition: float
    times_less: float
    total_bytes: int


@dataclass(frozen=True)
class Sample:
    """Transitions of one environment, in order.

    :param before: shape ``(n, *shape)``, the observations.
    :param after: likewise, the next observations; terminal ones where an episode ends.
    :param source: where they are from, in words.
    :param row_bytes: what action, reward and flags take.
    """

    before: npt.NDArray[np.generic]
    after: npt.NDArray[np.generic]
    source: str
    row_bytes: int = field(default=ROW_BYTES)

    def __len__(self) -> int:
        return len(self.before)
