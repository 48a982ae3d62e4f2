"""n-step returns from images in a fraction of the memory."""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import stable_baselines3
from stable_baselines3.common import buffers
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError
from sb3_ext._arguments import at_least_one
from sb3_ext.replay_buffer import CompressedReplayBuffer

if not hasattr(buffers, "NStepReplayBuffer"):
    raise MissingDependencyError(
        "CompressedNStepReplayBuffer needs Stable Baselines3 2.7 or later, which has n-step returns; installed is "
        f'{stable_baselines3.__version__}. Install it with:\n    pip install "stable-baselines3>=2.7"'
    )

_logger = logging.getLogger("sb3_ext")


class CompressedNStepReplayBuffer(buffers.NStepReplayBuffer, CompressedReplayBuffer):
    """
    :class:`CompressedReplayBuffer` in place of :class:`stable_baselines3.common.buffers.NStepReplayBuffer`.

    ``n_steps`` and ``gamma`` are those of the algorithm that makes the buffer. Stable Baselines3 warns that it ignores
    its ``n_steps`` with a class of one's own; to be without the warning, pass ``n_steps`` here alone::

        DQN("CnnPolicy", env, replay_buffer_class=CompressedNStepReplayBuffer, replay_buffer_kwargs={"n_steps": 3})

    :param args, kwargs: As in :class:`CompressedReplayBuffer`
    :param n_steps: Number of steps to accumulate rewards for; by default the algorithm's, and 3 where it has just one
    :param gamma: Discount factor; by default the algorithm's, and 0.99 without one
    :raises InvalidArgumentError: if the algorithm has other ones
    """

    def __init__(self, *args: Any, n_steps: int | None = None, gamma: float | None = None, **kwargs: Any) -> None:
        algorithm = _algorithm_that_builds(self)
        if n_steps is not None:
            n_steps = at_least_one("n_steps", n_steps)
        theirs = getattr(algorithm, "n_steps", 1)
        if theirs > 1:
            n_steps = _agreed("n_steps", n_steps, theirs)
            _logger.warning(
                "n_steps=%d of the algorithm is used, although Stable Baselines3 says that it ignores it", n_steps
            )
        if algorithm is not None:
            gamma = _agreed("gamma", gamma, algorithm.gamma)
        super().__init__(
            *args, n_steps=3 if n_steps is None else n_steps, gamma=0.99 if gamma is None else gamma, **kwargs
        )

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ReplayBufferSamples:
        newest, timeouts = self.pos - 1, self.timeouts[self.pos - 1].copy()
        try:
            return super()._get_samples(batch_inds, env)
        finally:
            # Upstream marks the newest transition meanwhile, and would leave it so where it is interrupted.
            self.timeouts[newest] = timeouts

    _NUMBERS = (*CompressedReplayBuffer._NUMBERS, "n_steps", "gamma")
    _FOR_OTHERS = "n-step returns are for these alone, as in Stable Baselines3"


def _agreed(name: str, ours: Any, theirs: Any) -> Any:
    if ours is not None and ours != theirs:
        raise InvalidArgumentError(
            f"the replay buffer is given {name}={ours!r} and the algorithm {name}={theirs!r}; leave it out of "
            "replay_buffer_kwargs"
        )
    return theirs


def _algorithm_that_builds(buffer: Any) -> OffPolicyAlgorithm | None:
    """
    The algorithm in whose set-up the buffer is made. It hands ``n_steps`` and ``gamma`` to the class of Stable
    Baselines3 alone, and with other ones than its own it would learn something else in silence.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is buffer:
        frame = frame.f_back
    caller = frame.f_locals.get("self")
    is_setup = frame.f_code.co_name == "_setup_model" and isinstance(caller, OffPolicyAlgorithm)
    return caller if is_setup else None
