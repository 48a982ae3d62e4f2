"""Blind Cliffwalk: a walk of several steps, where every wrong step ends the episode, and only the last one is rewarded.

The observation is a picture. It shows which step comes next, but not which of the two actions is right.

Source: Schaul et al., "Prioritized Experience Replay", section 3.1, https://arxiv.org/abs/1511.05952
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

COLUMNS = 4  # of a grid of squares, one per step
SQUARE = 9  # pixels


class BlindCliffwalk(gymnasium.Env[npt.NDArray[np.uint8], np.int64]):
    """
    Walk along a cliff. The right action of each step is random, and fixed by the seed.

    :param n_steps: Steps to the goal, from 1 to 16.
    :param seed: Seed of the right actions.
    :ivar pictures: Observations of all steps, uint8, shape ``(n_steps, 36, 36, 1)``.
    :ivar right_actions: Right action of each step, 0 or 1, int64, shape ``(n_steps,)``.
    """

    def __init__(self, n_steps: int = 11, seed: int = 0) -> None:
        # Action spaces have the same generator. With only the seed, their first random actions would be right.
        self.right_actions = np.random.default_rng([seed, n_steps]).integers(2, size=n_steps)
        self.pictures = np.zeros((n_steps, COLUMNS * SQUARE, COLUMNS * SQUARE, 1), np.uint8)
        for step, picture in enumerate(self.pictures):
            top, left = SQUARE * np.array(divmod(step, COLUMNS))
            picture[top : top + SQUARE, left : left + SQUARE] = 255
        self.observation_space = gymnasium.spaces.Box(0, 255, self.pictures.shape[1:], np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.n_done = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Return to the first step."""
        super().reset(seed=seed)
        self.n_done = 0
        return self.pictures[0].copy(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take a step. The episode ends with reward 0 if it was wrong, or with reward 1 after the last step."""
        is_right = bool(action == self.right_actions[self.n_done])
        self.n_done += is_right
        is_goal = self.n_done == len(self.pictures)
        picture = self.pictures[min(self.n_done, len(self.pictures) - 1)].copy()
        return picture, float(is_goal), not is_right or is_goal, False, {}
