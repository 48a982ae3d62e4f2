"""Policies that choose the actions of recorded episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv


@dataclass(frozen=True)
class Policy:
    """
    Policy and its description.

    :param text: Description, which is stored in the recording.
    :param choose: Function that returns the actions for a buffer: indices ``(E,)``, or numbers in -1..1 ``(E, n)``.
    """

    text: str
    choose: Callable[[VecEnv], np.ndarray]


def uniform(*, seed: int) -> Policy:
    """
    Return a policy that draws every action with the same probability.

    :param seed: Seed of the choices.
    :return: The policy.
    """
    rng = np.random.default_rng(seed)
    return Policy("random", lambda venv: _draw_uniform(venv, rng))


def _draw_uniform(venv: VecEnv, rng: np.random.Generator) -> np.ndarray:
    """Draw a uniformly random action for each environment."""
    assert isinstance(venv.action_space, spaces.Discrete)
    return rng.integers(venv.action_space.n, size=venv.num_envs)


def sticky(*, seed: int, repeat: float = 0.75) -> Policy:
    """
    Return a random policy that often repeats its last action, and so moves further.

    :param seed: Seed of the choices.
    :param repeat: Probability of repeating the last action.
    :return: The policy.
    """
    rng = np.random.default_rng(seed)
    last: np.ndarray | None = None

    def choose(venv: VecEnv) -> np.ndarray:
        """Repeat each environment's last action, or draw a new one."""
        nonlocal last
        fresh = _draw_uniform(venv, rng)
        last = fresh if last is None else np.where(rng.random(venv.num_envs) < repeat, last, fresh)
        return last

    return Policy(f"sticky random (repeat {repeat})", choose)


def ornstein_uhlenbeck(*, seed: int, theta: float = 0.15, sigma: float = 0.3) -> Policy:
    """
    Return a policy of Ornstein-Uhlenbeck noise, clipped to -1..1.

    :param seed: Seed of the noise.
    :param theta: Fraction of the distance to zero that each step removes.
    :param sigma: Standard deviation of the noise that each step adds.
    :return: The policy.
    """
    rng = np.random.default_rng(seed)
    state: np.ndarray | float = 0.0

    def choose(venv: VecEnv) -> np.ndarray:
        """Return the next value of the noise for each environment, clipped to -1..1."""
        nonlocal state
        assert isinstance(venv.action_space, spaces.Box)
        noise = rng.standard_normal((venv.num_envs, *venv.action_space.shape))
        state = state * (1 - theta) + sigma * noise
        return np.clip(state, -1, 1).astype(np.float32)

    return Policy(f"Ornstein-Uhlenbeck noise (theta {theta}, sigma {sigma})", choose)


@dataclass(frozen=True)
class Chase:
    """
    Parameters for following the ball of an Atari game.

    Positions are in the game's pixels, times in steps of 4 frames.

    :param ball: RAM address of the ball's position along the paddle's axis.
    :param depth: RAM address of the ball's other coordinate, which grows towards the paddle.
    :param paddle: RAM address of the paddle's position.
    :param less: Action that decreases the paddle's position.
    :param more: Action that increases the paddle's position.
    :param reach: Smallest and largest position of the paddle.
    :param offset: Distance from the ball to the paddle position that hits it centrally.
    :param slack: Distance below which the paddle does not move.
    :param coast: Distance that the paddle slides after a move.
    :param lead: Number of steps for which the ball's path is extrapolated.
    :param jitter: Largest random offset of the aim, without which rallies repeat endlessly.
    """

    ball: int
    depth: int
    paddle: int
    less: int
    more: int
    reach: tuple[int, int]
    offset: int
    slack: int
    coast: int
    lead: int
    jitter: int


# The addresses are those of AtariARI (Anand et al. 2019, arXiv:1906.08226); the rest was found by trial.
CHASES = {
    "Pong": Chase(
        ball=54,
        depth=49,
        paddle=51,
        less=2,
        more=3,
        reach=(38, 203),
        offset=-7,
        slack=13,
        coast=16,
        lead=2,
        jitter=3,
    ),
    "Breakout": Chase(
        ball=99,
        depth=101,
        paddle=72,
        less=3,
        more=2,
        reach=(55, 191),
        offset=-10,
        slack=6,
        coast=4,
        lead=1,
        jitter=3,
    ),
}
FIRE = 1


def scripted(game: str, *, seed: int) -> Policy:
    """
    Return a policy that follows the ball, whose position it reads in the console's RAM.

    :param game: One of ``CHASES``.
    :param seed: Seed of the paddle's aim.
    :return: The policy, for a ``DummyVecEnv`` of that game.
    :raises ValueError: If ``game`` is not one of ``CHASES``.
    """
    if game not in CHASES:
        raise ValueError(f"game={game!r} has no scripted policy: expected one of {', '.join(CHASES)}")
    rng = np.random.default_rng(seed)
    players: dict[int, _Player] = {}

    def choose(venv: Any) -> np.ndarray:
        """Return the action of each environment's player, who reads the RAM."""
        for e in range(venv.num_envs):
            players.setdefault(e, _Player(CHASES[game], rng))
        return np.array([players[e].act(env.unwrapped.ale.getRAM()) for e, env in enumerate(venv.envs)])

    return Policy("scripted (RAM)", choose)


class _Player:
    """Player of one Atari game, who remembers the ball's last position."""

    def __init__(self, chase: Chase, rng: np.random.Generator) -> None:
        self.chase = chase
        self.rng = rng
        self.ball = self.depth = self.move = 0
        self.aim = 0.0

    def act(self, ram: np.ndarray) -> int:
        """Return the action that follows the ball, read from the console's RAM."""
        chase = self.chase
        ball, depth, paddle = (int(ram[address]) for address in (chase.ball, chase.depth, chase.paddle))
        speed, leaving = ball - self.ball, depth <= self.depth
        self.ball, self.depth = ball, depth
        if not (ball and depth):  # no ball is in play
            self.move = 0
            return FIRE
        if leaving:
            self.aim = self.rng.uniform(-chase.jitter, chase.jitter)
        # a jump means a new ball, so it is not a speed
        foreseen = ball + (chase.lead * speed if abs(speed) < 30 else 0) + chase.offset + self.aim
        gap = np.clip(foreseen, *chase.reach) - np.clip(paddle + chase.coast * self.move, *chase.reach)
        self.move = int(np.sign(gap)) if abs(gap) > chase.slack else 0
        return {-1: chase.less, 0: 0, 1: chase.more}[self.move]
