"""Resident memory of ``CompressedReplayBuffer`` against SB3's ``ReplayBuffer``, on Atari.

    python -m benchmarks.memory [game ...] [--size 1000000] [--codec raw] [--wraps 10]

Each buffer is filled in a fresh process. The frames come from ``ale_py``'s vectorized environment: 84×84 gray, frame
skip 4, stacks of 4. Actions are random, and repeat the last one with probability 3/4. SB3's buffer gets fewer
transitions, since a million take 56 GB. ``--wraps 10`` adds ten times the buffer's size, to check that memory does not
grow.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from benchmarks.measure import machine, resident_bytes
from benchmarks.processes import run_module
from sb3_ext import CompressedReplayBuffer

GAMES = ("pong", "breakout", "ms_pacman", "seaquest", "montezuma_revenge")
N_ENVS = 8
PLAIN_SIZE = 40_000
STICKINESS = 0.75
WARM_UP = 500  # Steps after which kernels are loaded, and emulators and allocators have their memory.


def transitions(game: str, *, steps: int, seed: int = 0, n_envs: int = N_ENVS) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield Atari transitions of ``n_envs`` environments.

    Each is ``(obs, next_obs, actions, rewards, dones)``.
    """
    env = AtariVectorEnv(game, num_envs=n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    obs = obs.copy()
    actions = rng.integers(0, env.single_action_space.n, n_envs)
    for _ in range(steps):
        fresh = rng.integers(0, env.single_action_space.n, n_envs)
        actions = np.where(rng.random(n_envs) < STICKINESS, actions, fresh)
        new_obs, rewards, terminated, truncated, info = env.step(actions)
        dones = terminated | truncated
        next_obs = new_obs.copy()
        if dones.any():
            for e in np.flatnonzero(dones):
                next_obs[e] = info["final_obs"][e]
        yield obs, next_obs, actions, rewards, dones
        obs = new_obs.copy()
    env.close()


def fill(game: str, *, buffer: str, size: int, wraps: int) -> None:
    """Fill one buffer; print the process's growth in bytes, ``nbytes`` and the size."""
    space, actions = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(18)

    def make_buffer(n: int) -> ReplayBuffer:
        """Make SB3's buffer, or a compressed one, for ``n`` transitions."""
        if buffer == "sb3":
            return ReplayBuffer(n, space, actions, device="cpu", n_envs=N_ENVS)
        return CompressedReplayBuffer(n, space, actions, device="cpu", n_envs=N_ENVS, codec=buffer)

    infos: list[dict[str, object]] = [{}] * N_ENVS
    steps = wraps * size // N_ENVS
    stream = transitions(game, steps=steps + WARM_UP + 1)  # one more, since the end of the stream frees the emulators
    warm = make_buffer(WARM_UP * N_ENVS)  # stays in memory, so that the measured buffer cannot reuse its pages
    for transition in islice(stream, WARM_UP):
        warm.add(*transition, infos)
    before = resident_bytes()
    filled = make_buffer(size)
    for transition in tqdm(islice(stream, steps), total=steps, desc=f"{game} {buffer}", leave=False):
        filled.add(*transition, infos)
    grown = resident_bytes() - before
    print(grown, getattr(filled, "nbytes", 0), filled.size() * N_ENVS)


def measure(game: str, *, buffer: str, size: int, wraps: int = 1) -> tuple[int, int, int]:
    """Run :func:`fill` in a fresh process, and return the numbers that it prints."""
    line = run_module("benchmarks.memory", game, "--fill", buffer, "--size", size, "--wraps", wraps)
    grown, reported_nbytes, count = map(int, line.split())
    return grown, reported_nbytes, count


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=main.__doc__)
    parser.add_argument("games", nargs="*", default=GAMES)
    parser.add_argument("--size", type=int, default=1_000_000, help="transitions")
    parser.add_argument("--codec", default="patch")
    parser.add_argument("--wraps", type=int, default=1, help="number of times that the buffer is filled")
    parser.add_argument("--fill", metavar="BUFFER", help="fill one buffer in this process: sb3, or a codec")
    options = parser.parse_args()
    if options.fill:
        fill(options.games[0], buffer=options.fill, size=options.size, wraps=options.wraps)
        return
    print(machine())
    grown, _, count = measure(options.games[0], buffer="sb3", size=PLAIN_SIZE)
    plain = grown / count
    print(f"SB3's ReplayBuffer: {plain:,.0f} resident bytes per transition ({count:,} stored)")
    print(f"{'game':18} {'stored':>9} {'resident':>9} {'B/transition':>12} {'less':>6} {'nbytes/RSS':>10}")
    for game in options.games:
        grown, reported_nbytes, count = measure(game, buffer=options.codec, size=options.size, wraps=options.wraps)
        print(
            f"{game:18} {count:9,} {grown / 1e6:6.0f} MB {grown / count:10.0f} B {plain * count / grown:5.0f}× "
            f"{reported_nbytes / grown:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
